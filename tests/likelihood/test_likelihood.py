"""Likelihoods, checked by enumerating all sequences and all mask sets of a small vocabulary."""

import itertools
import math
from functools import cache

import pytest
import torch

import dcdm
import tiny
from dcdm.config import ConfigError, ObjectiveConfig
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.decoding import routes
from dcdm.decoding.commits import commit_policy
from dcdm.decoding.loop import Uncached, fill_canvas, predictable
from dcdm.diffusion.objectives import Batch, loss
from dcdm.keys import Key
from dcdm.likelihood.subsets import rank_in_group, sampled_subsets

FREE = 4  # all 16 sequences of two symbols


AABB = [[2, a, a, b, b] for a in (0, 1) for b in (0, 1)]  # two fair bits, each written twice
COPIED_BIT = [[2, bit, bit] for bit in (0, 1)]


def trained_on(rows, model, steps, lr):
    """`model`, taught a source of a few equally likely sequences."""
    source = torch.tensor(rows).repeat(32 // len(rows), 1)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, Batch(source), Key(0).fold("noise", step), ObjectiveConfig(prompt_share=0.0)).total.backward()
        optimizer.step()
    return model.eval()


@cache
def trained(kind):
    return trained_on(AABB, tiny.model(kind, symbols=2, scale=4.0), steps=120, lr=1e-2)


def models(kind):
    yield from (tiny.model(kind, symbols=2, seed=seed) for seed in (0, 1))
    yield trained(kind)


def total_probability(model, estimator, free=FREE, **options):
    everything = tiny.every_sequence(free)
    index = torch.zeros(len(everything), dtype=torch.long)  # random routing: one partition for all
    scored = dcdm.score(model, everything, estimator, samples="all", index=index, **options)
    assert not scored.stderr.any()
    return torch.exp(-scored.nats).sum().item()


def mixtures_later(kinds):
    return [pytest.param(kind, marks=pytest.mark.slow) if kind.endswith("-moe") else kind for kind in kinds]


@pytest.mark.parametrize("kind", mixtures_later(tiny.VALID))
def test_the_bound_sums_to_at_most_one_over_all_sequences(kind):
    sums = [total_probability(model, "bound") for model in models(kind)]
    assert all(0 < value <= 1 + 1e-9 for value in sums)
    assert min(sums) < 1 - 1e-6, "a bound that is always tight would prove little"


@pytest.mark.parametrize("kind", mixtures_later(tiny.PAPER))
def test_the_sequential_protocol_of_the_papers_model_is_a_bound(kind):
    assert all(0 < total_probability(model, "sequential") <= 1 + 1e-9 for model in models(kind))


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("commit", ["chunk", "position"])
def test_the_trajectory_likelihood_sums_to_one_over_all_sequences(kind, commit):
    for model in models(kind):
        assert total_probability(model, "trajectory", commit=commit) == pytest.approx(1.0, abs=1e-9)


def test_ar_is_exact_and_sums_to_one_but_for_what_it_gives_to_specials():
    model = tiny.model("ar", symbols=2)
    everything = tiny.every_sequence(3, symbols=5)  # specials as ordinary symbols too
    everything[:, 0] = model.config.bos_id
    logits = model(everything).logits[:, :-1].log_softmax(-1)
    by_hand = -logits.gather(-1, everything[:, 1:, None]).squeeze(-1).sum(-1)
    assert torch.exp(-by_hand).sum().item() == pytest.approx(1.0)
    plain = tiny.every_sequence(3)
    nats = dcdm.score(model, plain).nats
    rows = [int((everything[:, 1:] == row[1:]).all(-1).nonzero()) for row in plain]
    torch.testing.assert_close(nats, by_hand[rows].detach())


def copied_bit_model(length, routed=True):
    """A stand-in for the paper's network: an optimal predictor of `length` copies of one fair bit.

    Ids are those of the mask pattern (visible positions in the last chunk), as the paper's routing may give;
    a masked position knows the bit as soon as any token is visible or lies in an earlier chunk.
    """
    model = tiny.model("paper", symbols=2)

    def encode(tokens, masked, *, prompt=None, chunk_ids=None, index=None):
        known = (~masked[:, 1:]).any(dim=1, keepdim=True).expand_as(masked)
        states = torch.zeros(*tokens.shape, 2, dtype=torch.float64)
        states.scatter_(-1, tokens.clamp(max=1)[..., None], 1.0)
        if routed:  # positions are chunks: a masked position also sees the clean tokens before it
            known = known | (torch.arange(tokens.shape[1]) > 1)
        states = torch.where(known[..., None], states, 0.5)
        ids = torch.arange(tokens.shape[1]).expand_as(tokens)
        return type("Encoded", (), {"states": states.clamp(min=1e-300).log(), "chunk_ids": ids})

    model.encode, model.head_weight = encode, lambda: torch.eye(2, dtype=torch.float64)
    return model


@pytest.mark.parametrize("length", [2, 3, 6])
def test_the_surrogate_breaks_the_bound_on_a_copied_bit(length):
    """Entropy 1 bit, surrogate 1/L bits: position 1 pays only when everything is masked, all others never."""
    model = copied_bit_model(length)
    sequence = torch.tensor([[2] + [1] * length])
    result = dcdm.score(model, sequence, "surrogate", samples="all")
    assert result.nats.item() / math.log(2) == pytest.approx(1 / length)
    both = torch.tensor([[2] + [bit] * length for bit in (0, 1)])
    assert torch.exp(-dcdm.score(model, both, "surrogate", samples="all").nats).sum() > 1
    assert result.label == "surrogate (not a bound)"
    assert "not a bound" in str(result)


def test_the_surrogate_of_a_trained_model_of_the_papers_kind_breaks_the_bound():
    """The surrogate falls below the source's entropy; the same weights under the sequential protocol do not.

    Not every seed shows it: where all masked tokens fall into one chunk there is nothing to count twice.
    """
    model = trained_on(COPIED_BIT, tiny.model("paper", symbols=2, scale=12.0, seed=2), steps=300, lr=5e-3)
    source = torch.tensor(COPIED_BIT)
    assert dcdm.score(model, source, "surrogate", samples="all").nats.mean() < 0.8 * math.log(2)
    assert dcdm.score(model, source, "sequential", samples="all").nats.mean() > math.log(2)
    assert total_probability(model, "surrogate", free=2) > 1.2
    assert total_probability(model, "sequential", free=2) <= 1 + 1e-9


def subsets(positions):
    for size in range(1, len(positions) + 1):
        yield from itertools.combinations(positions, size)


@pytest.mark.parametrize("kind", tiny.VALID)
def test_enumerated_bound_equals_a_literal_sum_over_chunks_and_mask_sets(kind):
    model = tiny.model(kind, symbols=2)
    clean = tiny.tokens(2, FREE + 1, symbols=2)
    ids = model.partition(clean, index=torch.tensor([0, 1])).ids
    expected = torch.zeros(2, dtype=torch.float64)
    for row in range(2):
        for chunk in set(ids[row].tolist()) - {0}:
            members = (ids[row] == chunk).nonzero().flatten().tolist()
            for subset in subsets(members):
                weight = math.factorial(len(subset) - 1) * math.factorial(len(members) - len(subset))
                weight /= math.factorial(len(members))
                z = clean[row : row + 1].clone()
                z[0, list(subset)] = model.config.mask_id
                z[0, ids[row] > chunk] = model.config.mask_id
                log_p = predictable(model, model.denoise(z, ids[row : row + 1])).log_softmax(dim=-1)
                expected[row] -= weight * sum(log_p[0, p, clean[row, p]].item() for p in subset)
    scored = dcdm.score(model, clean, "bound", samples="all")
    torch.testing.assert_close(scored.nats, expected)


@pytest.mark.parametrize("kind", mixtures_later(tiny.DIFFUSION))
def test_monte_carlo_scores_agree_with_the_enumerated_ones_within_their_error(kind):
    larger = {"block_size": 3} if kind == "bdlm" else {}  # blocks of 2 would be enumerated
    model = tiny.model(kind, symbols=3, **larger)
    clean = tiny.tokens(6, 7, symbols=3)
    for estimator in ["surrogate", "sequential"] if kind in tiny.PAPER else ["bound"]:
        whole = dcdm.score(model, clean, estimator, samples="all")
        exact = whole.nats
        runs = [dcdm.score(model, clean, estimator, samples=4, seed=seed) for seed in range(30)]
        estimates = torch.stack([r.nats for r in runs])
        spread = estimates.std(dim=0)
        assert ((estimates.mean(0) - exact).abs() <= 4.5 * spread / math.sqrt(30) + 1e-9).all()
        shares = torch.stack([r.by_position for r in runs])
        off = (shares.mean(0) - whole.by_position).abs()
        assert (off <= 6 * shares.std(dim=0) / math.sqrt(30) + 1e-9).all(), "positions are charged what they cost"
        reported = torch.stack([r.stderr for r in runs]).square().mean(0).sqrt()
        noisy = spread > 1e-3
        assert noisy.any()
        assert ((reported / spread)[noisy].log().mean().exp() > 0.75).all(), "errors must not be understated"


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_scores_do_not_depend_on_the_batch_size_or_on_the_other_sequences(kind):
    model = tiny.model(kind)
    clean = tiny.tokens(5, 9, padding=(0, 3, 1))
    index = torch.tensor([4, 9, 2, 7, 1])
    for estimator in {"auto", "trajectory"} | ({"surrogate"} if kind in tiny.PAPER else set()):
        whole = dcdm.score(model, clean, estimator, samples=3, index=index)
        single = dcdm.score(model, clean, estimator, samples=3, index=index, batch_size=1)
        torch.testing.assert_close(single.nats, whole.nats)
        assert torch.equal(single.forwards, whole.forwards)
        last = dcdm.score(model, clean[3:4], estimator, samples=3, index=index[3:4])
        torch.testing.assert_close(last.nats, whole.nats[3:4])
        torch.testing.assert_close(last.stderr, whole.stderr[3:4])
        assert torch.equal(whole.tokens, (clean < tiny.LETTERS).sum(dim=1))


@pytest.mark.parametrize("kind", tiny.VALID)
def test_one_pass_over_full_chunks_equals_walking_chunk_by_chunk(kind):
    model = tiny.model(kind, num_chunks=4) if "dcdm" in tiny.KINDS[kind].values() else tiny.model(kind)
    clean = tiny.tokens(3, 11, padding=(4,))
    prompt = torch.zeros_like(clean, dtype=torch.bool)
    prompt[1, 3:6] = True
    fast = dcdm.score(model, clean, "trajectory", prompt=prompt)
    positions = model.position_masks(clean, prompt)
    total = torch.zeros(3, dtype=torch.float64)

    def reveal(view, fill):
        true = clean.gather(1, view.position)
        total.sub_(view.predicted.log_p(true, fill).sum(-1))
        return true

    z = clean.masked_fill(positions.free, model.config.mask_id)
    router = routes.router_of(model, positions, torch.arange(3))
    filled, counts = fill_canvas(z, positions, router, Uncached(model), commit_policy("chunk"), reveal)
    assert torch.equal(filled, clean)
    forwards = counts.forwards
    torch.testing.assert_close(fast.nats, total)
    assert torch.equal(fast.forwards, forwards)


def test_subset_sizes_are_stratified_and_uniform():
    groups = torch.tensor([[0, 1, 1, 1, 1, 2, 2, 2, 2, -1]])
    for seed in range(20):
        draws = list(sampled_subsets(Key(seed), torch.tensor([3]), groups, 2, 4))
        for group in (1, 2):
            sizes = sorted(int((d.masked & (groups == group)).sum()) for d in draws)
            assert sizes == [1, 2, 3, 4]
        assert all(not d.masked[groups <= 0].any() for d in draws)
    counts = torch.zeros(10)
    for seed in range(400):
        counts += next(sampled_subsets(Key(seed), torch.tensor([0]), groups, 2, 1)).masked[0]
    assert (counts[1:9] / 400 - 5 / 8).abs().max() < 0.1


def test_ranks_within_groups_are_those_of_a_plain_count():
    generator = torch.Generator().manual_seed(0)
    groups = torch.randint(-1, 4, (5, 30), generator=generator)
    priority = torch.rand(5, 30, generator=generator)
    same = groups[:, :, None] == groups[:, None, :]
    before = (same & (priority[:, None, :] < priority[:, :, None])).sum(dim=-1)
    assert torch.equal(rank_in_group(groups, priority), before)


@pytest.mark.parametrize(("change", "message"), [
    ({"tokens": torch.tensor([[20, 22, 1]])}, "MASK"), ({"tokens": torch.tensor([[20, 23]])}, "vocabulary of 23"),
    ({"tokens": torch.tensor([[20, 1]], dtype=torch.int32)}, "int64"),
    ({"tokens": torch.zeros(0, 3).long()}, "row"),
    ({"prompt": torch.tensor([[1, 0, 0]])}, "prompt must be bool"), ({"batch_size": 0}, "batch_size"),
    ({"prompt": torch.ones(1, 2, dtype=torch.bool)}, "prompt must be bool of the shape"),
])  # fmt: skip
def test_what_cannot_be_scored_is_refused_by_name(change, message):
    arguments = {"tokens": torch.tensor([[20, 1, 2]]), **change}
    with pytest.raises(ConfigError, match=message):
        dcdm.score(tiny.model("mdlm"), arguments.pop("tokens"), **arguments)


def test_estimators_that_do_not_fit_are_refused_with_those_that_do():
    clean = tiny.tokens(1, 6)
    with pytest.raises(ValueError, match=r"surrogate.*does not fit MDLM.*bound"):
        dcdm.score(tiny.model("mdlm"), clean, "surrogate")
    with pytest.raises(ValueError, match=r"bound.*does not fit DCDM with the paper's routing.*sequential"):
        dcdm.score(tiny.model("paper"), clean, "bound")
    with pytest.raises(ValueError, match="unknown estimator"):
        dcdm.score(tiny.model("mdlm"), clean, "elbo")
    with pytest.raises(ValueError, match="samples"):
        dcdm.score(tiny.model("mdlm"), clean, samples=0)
    with pytest.raises(ValueError, match="commit"):
        dcdm.score(tiny.model("mdlm"), clean, "trajectory", commit="greedy")
    with pytest.raises(ValueError, match="mask sets"):
        dcdm.score(tiny.model("mdlm"), tiny.tokens(1, 20), samples="all")


def test_texts_are_scored_as_the_tokens_they_stand_for():
    made, tokenizer = tiny.model("mdlm", symbols=257), byte_tokenizer()
    short, long = ([made.config.bos_id, *tokenizer.encode(text)] for text in ("ab", "abcde"))
    rows = torch.tensor([short + [made.config.pad_id] * 3, long])
    given = dcdm.score(made, ["ab", "abcde"], samples=4, tokenizer=tokenizer)
    torch.testing.assert_close(given.nats, dcdm.score(made, rows, samples=4).nats)
    with pytest.raises(ConfigError, match="with tokenizer="):
        dcdm.score(made, "ab")
