"""Commit policies and draws by themselves."""

from __future__ import annotations

import pytest
import torch

from dcdm.config import ConfigError
from dcdm.decoding import commits
from dcdm.decoding.commits import Distributions, Sampling, View, commit_policy


def view_of(probabilities, step=0, candidates=None):
    log_p = torch.tensor([probabilities]).log()
    shape = log_p.shape[:2]
    given = torch.ones(shape, dtype=torch.bool) if candidates is None else torch.tensor([candidates])
    order = torch.linspace(0.9, 0.1, shape[1])[None]
    return View(Distributions.of(log_p, given), given, torch.arange(shape[1])[None], torch.tensor([step]), order)


PREDICTED = [[0.5, 0.5], [0.95, 0.05], [0.8, 0.2], [0.99, 0.01]]


@pytest.mark.parametrize(
    ("commit", "expected"),
    [
        ("chunk", [1, 1, 1, 1]), ("position", [0, 0, 0, 1]), ("steps:2", [0, 1, 0, 1]), ("steps:4", [0, 0, 0, 1]),
        ("threshold:0.9", [0, 1, 0, 1]), ("threshold:1", [0, 0, 0, 1]), ("threshold:0", [1, 1, 1, 1]),
        ("entropy:0.3", [0, 1, 0, 1]), ("entropy:0", [0, 0, 0, 1]),
        # (n+1)(1−c): 2·0.01, 3·0.05, 4·0.2, 5·0.5
        ("factor:0.16", [0, 1, 0, 1]), ("factor:0.81", [0, 1, 1, 1]), ("factor:0", [0, 0, 0, 1]),
        ("dilated:2", [1, 0, 1, 0]), ("dilated:3", [1, 0, 0, 1]), ("dilated:9", [1, 0, 0, 0]),
        ("count:2", [0, 1, 0, 1]), ("threshold:0.9+count:3", [0, 1, 1, 1]), ("threshold:0.9+count:1", [0, 1, 0, 1]),
        ("entropy-steps:1", [1, 1, 1, 1]), ("entropy-steps:2", [0, 0, 0, 1]), ("entropy-steps:4", [0, 0, 0, 0]),
        ("first-hitting", [0, 0, 0, 1]), ("ancestral:1", [1, 1, 1, 1]), ("ancestral:2", [0, 0, 1, 1]),
    ],
)  # fmt: skip
def test_commit_policies_fill_what_they_say(commit, expected):
    assert commit_policy(commit)(view_of(PREDICTED)).tolist() == [[bool(e) for e in expected]]


@pytest.mark.parametrize("name", commits.POLICIES)
def test_commit_policies_fill_a_candidate_and_nothing_else(name):
    view = view_of(PREDICTED, candidates=[True, False, True, False])
    fill = commit_policy(name)(view)
    assert fill.any() != (name == "entropy-steps")  # the first of many steps fills nothing
    assert not (fill & ~view.candidates).any()


def test_fixed_steps_end_with_the_chunk():
    assert commit_policy("steps:3")(view_of(PREDICTED, step=2)).all()
    assert commit_policy("steps:3")(view_of(PREDICTED, step=7)).all()


@pytest.mark.parametrize(("steps", "size"), [(1, 5), (3, 8), (4, 16), (5, 3)])
def test_dilated_forwards_fill_the_first_then_the_second_of_every_few_positions(steps, size):
    open_, filled = [True] * size, []
    for step in range(steps):
        view = view_of([[0.5, 0.5]] * size, step, open_)
        filled.append(commit_policy(f"dilated:{steps}")(view)[0].nonzero().flatten().tolist())
        open_ = [was and at not in filled[-1] for at, was in enumerate(open_)]
        if not any(open_):
            break
    assert filled == [list(range(step, size, steps)) for step in range(min(steps, size))]


@pytest.mark.parametrize("text", ["best", "steps:0", "steps:1.5", "threshold:1.1", "threshold:x", "chunk:3"])
def test_commit_policies_that_make_no_sense_are_refused_by_name(text):
    with pytest.raises(ConfigError, match="commit="):
        commit_policy(text)


def test_the_nucleus_keeps_the_token_that_crosses():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert (Sampling(top_p=0.6).log_p(logits).exp() > 0).tolist() == [True, True, False, False]
    assert (Sampling(top_p=0.5).log_p(logits).exp() > 0).tolist() == [True, False, False, False]
    assert (Sampling(top_p=1e-9).log_p(logits).exp() > 0).tolist() == [True, False, False, False]
    torch.testing.assert_close(Sampling(top_k=2).log_p(logits).exp(), torch.tensor([0.625, 0.375, 0, 0]))
    assert Sampling(top_k=1).log_p(torch.tensor([1.0, 1.0, 0.0])).exp().tolist() == [1, 0, 0]


def test_draws_follow_the_distribution_and_never_take_an_impossible_token():
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    u = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    drawn = Sampling().draw(p.log().expand(4000, -1), u)
    assert torch.bincount(drawn, minlength=6).tolist() == [0, 1000, 0, 2000, 1000, 0]
    edge = Sampling().draw(p.log().expand(2, -1), torch.tensor([1e-12, 1 - 1e-16], dtype=torch.float64))
    assert edge.tolist() == [1, 4]
    assert Sampling(0.0).draw(p.log()[None], torch.tensor([0.99])).tolist() == [3]


def test_rare_tokens_keep_their_odds():
    """Float32 cumulative sums would never reach tokens of probability 1e-8 at the end of a large vocabulary."""
    p = torch.full((1, 50_000), 1e-8, dtype=torch.float64)
    p[0, 0] = 1 - p[0, 1:].sum()
    u = torch.tensor([1 - 2.5e-8], dtype=torch.float64)
    assert Sampling().draw(p.log(), u).tolist() == [49_997]
