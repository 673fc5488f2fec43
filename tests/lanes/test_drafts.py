"""Lanes with drafts: tokens that are verified change how fast a text is written, not what it is drawn from."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dcdm
import tiny
from dcdm.config import ConfigError
from dcdm.decoding import caching
from dcdm.decoding.batch import ContinuousBatch, batch_of
from dcdm.decoding.caching import PrefixCache, predictor_of
from dcdm.decoding.commits import Sampling, View, commit_policy
from dcdm.decoding.config import DecodingConfig
from dcdm.decoding.text import BatchRow
from dcdm.keys import Key
from dcdm.lanes import masks as lane_masks
from dcdm.lanes.decoding import DraftedLanes, LaneState
from dcdm.lanes.drafts import accept_or_replace
from dcdm.lanes.masks import lane_partition, led_positions, left
from dcdm.likelihood.estimators import score
from dcdm.model import masks
from dcdm.model.reference import Pass
from dcdm.model.transformer import Model


def model_with_drafts(symbols: int = tiny.LETTERS, **changes: object) -> Model:
    """Lanes whose head has opinions of its own."""
    made = tiny.model("mdlm", symbols, kind="lanes", lanes=(1, 2, 4), drafts=3, **changes)
    assert made.drafting is not None
    with torch.no_grad():
        made.drafting.down.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
    return made


@dataclass
class Decided:
    """Walks along a text; which draft tokens are accepted is told beforehand, and the odds of that are kept."""

    tokens: Tensor
    told: list[list[bool]] | Tensor
    """Of each row, in the order in which draft tokens are verified; or for every position (B, L)."""

    def __post_init__(self) -> None:
        self.odds: list[list[float]] = [[] for _ in self.told]

    def draft(self, log_q: Tensor, row: Tensor, position: Tensor) -> Tensor:
        return self.tokens[row, position]

    def verify(
        self, log_p: Tensor, log_q: Tensor, row: Tensor, position: Tensor, token: Tensor
    ) -> tuple[Tensor, Tensor]:
        if isinstance(self.told, Tensor):
            return self.told[row, position], token
        right = []
        chance = (log_q - log_p).gather(-1, token[:, None]).squeeze(-1).exp().clamp(max=1)
        before, rejected = (-1, -1), False
        for own, at, one in zip(row.tolist(), position.tolist(), chance.tolist(), strict=True):
            if rejected and (own, at) == before:  # nobody asks behind a rejected one
                right.append(False)
                before = (own, at + 1)
                continue
            number, told = len(self.odds[own]), self.told[own]
            accepted = told[number] if number < len(told) else True
            self.odds[own].append(one if accepted else 1 - one)
            right.append(accepted)
            before, rejected = (own, at + 1), not accepted
        return torch.tensor(right), token


@torch.no_grad()
def walk(
    model: Model, tokens: Tensor, lanes: int, ahead: int, by: Decided, prompt: Tensor | None = None
) -> tuple[Tensor, Tensor, int]:
    """log p (B, L) of the tokens along an acceptance pattern, the passes that brought each, and how many."""
    positions = model.position_masks(tokens, prompt)
    z = tokens.masked_fill(positions.free, model.config.mask_id)
    lane = lane_of(model, tokens, lanes, prompt)
    numbers = torch.full((len(tokens),), ahead)
    predict = predictor_of(model, positions, "exact")
    state = LaneState(z, positions, DraftedLanes(positions, lane), predict, lane=lane, ahead=numbers, drafter=by)
    log_p = torch.zeros(tokens.shape, dtype=torch.float64)
    known = torch.where(positions.real, 0, -1)

    def reveal(view: View, fill: Tensor) -> Tensor:
        return tokens.gather(1, view.position)

    while (done := state.step(commit_policy("chunk"), reveal)) is not None:
        row, at = done.fill.nonzero(as_tuple=True)
        log_p[row, done.position[row, at]] = done.log_p()[row, at].double()
        known[row, done.position[row, at]] = done.forward[row]
    assert torch.equal(state.z, tokens)
    return log_p, known, int(state.counts.forwards.max())


def lane_of(model: Model, tokens: Tensor, lanes: int, prompt: Tensor | None) -> Tensor:
    positions = model.position_masks(tokens, prompt)
    return lane_partition(model.config, positions.free, positions.real, lanes)[1]


def texts(model: Model, rows: int, length: int, padded: bool = True) -> tuple[Tensor, Tensor]:
    """Random rows with prompts here and there, the last ones shorter."""
    config, draw = model.config, torch.Generator().manual_seed(3)
    tokens = torch.randint(config.vocab_size - 3, (rows, length), generator=draw)
    tokens[:, 0] = config.bos_id
    if padded:
        tokens[-1, length - 3 :] = config.pad_id
    prompt = torch.zeros_like(tokens, dtype=torch.bool)
    prompt[0, 1:4] = True
    prompt[1, 6:9] = True
    return tokens, prompt


def encode_drafted(model: Model, tokens: Tensor, known: Tensor, lane: Tensor) -> Tensor:
    """States (B, L, d) that predict each free position when lanes ran as far as each got, in one pass.

    `known` (B, L) numbers the pass that brought each token, 0 for given ones and −1 for padding; `lane` counts
    from 1. A token whose right neighbour in its lane came with the same pass was a draft token, read in that pass;
    every other one was read by the next. A slot sees what was known before its pass, and its own lane up to
    itself.
    """
    length = tokens.shape[1]
    position = torch.arange(length, device=tokens.device).expand_as(tokens)
    on = (lane > 0) & (lane == F.pad(lane[:, 1:], (0, 1)))  # the lane continues at the next position
    drafted = on & (known == F.pad(known[:, 1:], (0, 1), value=-1))
    view = torch.where(drafted, known - 1, known)

    known_q, known_k = known[:, :, None], known[:, None, :]
    not_later = position[:, None, :] <= position[:, :, None]
    given = (known_q == 0) & (known_k == 0)
    earlier = (known_k >= 0) & (known_k <= view[:, :, None]) & (~given | not_later)
    clean_to_clean = earlier | ((lane[:, :, None] == lane[:, None, :]) & (lane > 0)[:, :, None] & not_later)
    seed_to_clean = (known_k >= 0) & (known_k < known_q)
    itself = torch.eye(length, dtype=torch.bool, device=tokens.device).expand_as(seed_to_clean)
    allowed = torch.cat(
        [torch.cat([itself, seed_to_clean], dim=2), torch.cat([torch.zeros_like(itself), clean_to_clean], dim=2)],
        dim=1,
    )
    only = Pass(model, left, masks.dual_stream_slots(known))
    only.allowed = allowed
    both = torch.cat([torch.full_like(tokens, model.config.mask_id), tokens], dim=1)
    seed_bld, clean_bld = model.norm(only.run(model.embed_tokens(both))).split(length, dim=1)
    led = led_positions(known) | F.pad(drafted[:, :-1], (1, 0))
    return torch.where(led[..., None], clean_bld.roll(1, dims=1), seed_bld)


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("chunks", [{}, {"num_chunks": 2, "chunk_dim": 4}])
def test_every_acceptance_pattern_equals_one_pass_over_all_slots_with_the_view_that_each_had(
    lanes: int, chunks: dict
) -> None:
    model = model_with_drafts(**chunks)
    tokens, prompt = texts(model, 4, 23)
    for seed in range(3):
        told = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
        log_p, known, _ = walk(model, tokens, lanes, 3, Decided(tokens, told), prompt)
        lane = lane_of(model, tokens, lanes, prompt)
        states = encode_drafted(model, tokens, known, lane)
        expected = model.head(states).log_softmax(dim=-1).gather(-1, tokens[..., None]).squeeze(-1)
        free = model.position_masks(tokens, prompt).free
        torch.testing.assert_close(log_p[free], expected[free], atol=1e-9, rtol=0)
        assert int((known == 1).sum()) >= lanes


def test_lanes_whose_drafts_are_all_rejected_wait_for_each_other() -> None:
    model = model_with_drafts()
    tokens, prompt = texts(model, 3, 19)
    for lanes in (1, 2, 4):
        log_p, _, _ = walk(model, tokens, lanes, 0, Decided(tokens, [[]] * len(tokens)), prompt)
        exact = score(model, tokens, "exact", prompt=prompt, lanes=lanes)
        torch.testing.assert_close(-log_p.sum(dim=-1), exact.nats, atol=1e-9, rtol=0)
        never = torch.zeros(tokens.shape, dtype=torch.bool)
        rejected, _, _ = walk(model, tokens, lanes, 3, Decided(tokens, never), prompt)
        torch.testing.assert_close(rejected, log_p, atol=1e-9, rtol=0)


def test_draft_tokens_of_other_lanes_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with_drafts()
    tokens, prompt = texts(model, 2, 23, padded=False)

    def first_drafted(tokens: Tensor) -> tuple[Tensor, Tensor]:
        every = torch.ones(tokens.shape, dtype=torch.bool)
        log_p, known, _ = walk(model, tokens, 2, 3, Decided(tokens, every), prompt)
        return log_p, known

    log_p, known = first_drafted(tokens)
    lane = lane_of(model, tokens, 2, prompt)
    changed = (lane == 2) & (known == 2)  # what lane 2 is told in the second forward
    assert bool(changed.any())
    other = torch.where(changed, (tokens + 1) % (model.config.vocab_size - 3), tokens)
    same = (lane == 1) & (known <= 2)
    torch.testing.assert_close(first_drafted(other)[0][same], log_p[same], atol=1e-12, rtol=0)
    leaking = lane_masks.left_with_drafts | masks.Mask("leak", lambda q, k: (q.stream >= 2) & (k.stream >= 2))
    monkeypatch.setattr(lane_masks, "left_with_drafts", leaking)
    leaked = [first_drafted(text)[0][same] for text in (tokens, other)]
    assert not torch.allclose(*leaked, atol=1e-6)


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_probabilities_of_all_texts_over_all_acceptance_patterns_sum_to_one(lanes: int) -> None:
    model = model_with_drafts(tiny.SYMBOLS)
    total = 0.0
    for letters in itertools.product(range(tiny.SYMBOLS), repeat=5):
        tokens = torch.tensor([[model.config.bos_id, *letters]])
        p = probability(model, tokens, lanes)
        total += p
        if lanes == 1:
            assert p == pytest.approx(math.exp(-float(score(model, tokens, "exact", lanes=1).nats)), abs=1e-12)
    assert total == pytest.approx(1, abs=1e-9)


def probability(model: Model, tokens: Tensor, lanes: int, ahead: int = 3) -> float:
    """Of a text (1, L), summed over all acceptance patterns."""
    total = 0.0
    open_ends: list[list[bool]] = [[]]
    while open_ends:
        by = Decided(tokens.expand(len(open_ends), -1), open_ends)
        log_p, _, _ = walk(model, by.tokens, lanes, ahead, by)
        open_ends = []
        for told, odds, own in zip(by.told, by.odds, log_p.sum(dim=-1).tolist(), strict=True):
            total += math.exp(own + sum(math.log(max(one, 1e-300)) for one in odds))
            open_ends += [[*told, *[True] * more, False] for more in range(len(odds) - len(told))]
    return total


@pytest.mark.parametrize("lanes", [1, 2])
def test_drawn_texts_follow_the_sum_over_acceptance_patterns(lanes: int) -> None:
    model, count = model_with_drafts(tiny.SYMBOLS), 3000
    made = dcdm.generate(model, [[]] * count, max_new_tokens=4, lanes=lanes, drafts=2, batch_size=500, seed=1)
    found = torch.zeros(2**4)
    for row in made.completions:
        found[int("".join(map(str, row)), 2)] += 1
    p = [
        probability(model, torch.tensor([[model.config.bos_id, *letters]]), lanes, ahead=2)
        for letters in itertools.product(range(2), repeat=4)
    ]
    expected = torch.tensor(p) * count
    often = expected > 5
    chi = ((found - expected)[often] ** 2 / expected[often]).sum()
    assert chi < 2.5 * int(often.sum())
    assert float(made.statistics.forwards.double().mean()) < 4 / lanes + 1


def test_scores_are_those_of_the_walk_and_exact_with_one_lane() -> None:
    model = model_with_drafts()
    tokens, prompt = texts(model, 3, 23)
    one = score(model, tokens, "drafted", 2, prompt=prompt, lanes=1)
    exact = score(model, tokens, "exact", prompt=prompt, lanes=1)
    torch.testing.assert_close(one.nats, exact.nats, atol=1e-9, rtol=0)
    assert bool((one.forwards < one.tokens).all())
    several = score(model, tokens, "drafted", 3, prompt=prompt, lanes=4, batch_size=2)
    torch.testing.assert_close(several.nats, score(model, tokens, "drafted", 3, prompt=prompt, lanes=4).nats)
    assert "upper bound" in several.label
    lockstep = score(model, tokens, "drafted", 1, prompt=prompt, lanes=4, drafts=0)
    torch.testing.assert_close(lockstep.nats, score(model, tokens, "exact", prompt=prompt, lanes=4).nats)
    with pytest.raises(ConfigError, match="give a number"):
        score(model, tokens, "drafted", "all")
    with pytest.raises(ConfigError, match="needs the cache"):
        score(model, tokens, "drafted", cache="none")
    with pytest.raises(ConfigError, match="wait for each other"):
        score(model, tokens, "trajectory", drafts=2)
    with pytest.raises(ValueError, match="does not fit"):
        score(tiny.model("mdlm", kind="lanes"), tokens, "drafted")


def test_the_most_probable_text_of_one_lane_is_the_same_with_and_without_drafts() -> None:
    model = model_with_drafts()
    prompts = [[5, 6, 7], [1], [2, 3]]
    plain, drafted = (
        dcdm.generate(model, prompts, max_new_tokens=24, lanes=1, temperature=0.0, drafts=number).completions
        for number in (0, 3)
    )
    assert plain == drafted


@pytest.mark.parametrize("fillers", [0, 64])
def test_texts_of_all_settings_join_and_leave_one_batch(fillers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "FILLERS", fillers)  # 0: rows of different sizes share no pass
    model = model_with_drafts(6, num_chunks=2, chunk_dim=4)
    mask, bos = model.config.mask_id, model.config.bos_id
    draw = random.Random(0)

    def text(number: int) -> BatchRow:
        prompt = [draw.randrange(6) if draw.random() < 0.7 else mask for _ in range(draw.choice([0, 4, 18]))]
        options = {"lanes": draw.choice([1, 2, 3]), "drafts": draw.choice([0, 1, 3, 7])}
        how = draw.choice([{}, {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}])
        if draw.random() < 0.2:
            options |= {"drafts": 0, "cache": "none"}
        decoding = DecodingConfig.of(**options, **how).resolve(model.config)
        window = draw.choice([24, 40])
        return BatchRow(
            [bos, *prompt], draw.choice([7, 25, 50]), decoding, window, 8, seed=4, index=number, eos_id=2
        )

    def written(texts: list[BatchRow], together: ContinuousBatch) -> list[list[int]]:
        waiting = list(texts)
        while waiting or together.running:
            if waiting:
                together.add(waiting.pop())
            together.step()
        return [one.completion(mask) for one in texts]

    state = draw.getstate()
    mixed = written([text(number) for number in range(12)], batch_of(model, PrefixCache(1 << 20)))
    draw.setstate(state)
    assert mixed == [written([text(number)], batch_of(model))[0] for number in range(12)]


def test_texts_end_at_eos_also_where_drafts_continue() -> None:
    model = model_with_drafts(tiny.SYMBOLS)
    made = dcdm.generate(model, [[]] * 40, max_new_tokens=12, lanes=2, eos_id=1, seed=2)
    assert "eos" in made.finished
    assert all(1 not in row for row in made.completions)


def test_speculative_sampling_draws_from_p_whatever_is_drafted() -> None:
    draw = torch.Generator().manual_seed(0)
    log_p, log_q = (torch.randn(1, 6, generator=draw).log_softmax(-1).expand(60_000, 6) for _ in range(2))
    uniform = Key(0).fold("test").uniform(3 * 60_000).view(3, -1)
    for sampling in (Sampling(), Sampling(0.7, top_p=0.8)):
        drafted = sampling.draw(sampling.log_p(log_q), uniform[0])
        right, instead = accept_or_replace(sampling, log_p, log_q, drafted, uniform[1], uniform[2])
        drawn = torch.where(right, drafted, instead).bincount(minlength=6) / 60_000
        torch.testing.assert_close(drawn, sampling.log_p(log_p)[0].exp().to(drawn), atol=8e-3, rtol=0)
    greedy = Sampling(0.0)
    right, instead = accept_or_replace(greedy, log_p[:6], log_q[:6], torch.arange(6), uniform[1], uniform[2])
    assert right.nonzero().flatten().tolist() == [int(log_p[0].argmax())]
    assert set(instead.tolist()) == {int(log_p[0].argmax())}


def test_mistakes_are_named() -> None:
    model = model_with_drafts()
    with pytest.raises(ConfigError, match="drafts=-1 must be at least 0"):
        dcdm.generate(model, [[1]], drafts=-1)
    with pytest.raises(ConfigError, match="needs the cache"):
        dcdm.generate(model, [[1]], drafts=1, cache="none")
    with pytest.raises(ConfigError, match="needs a model with a draft head"):
        dcdm.generate(tiny.model("mdlm", kind="lanes"), [[1]], drafts=1)
    with pytest.raises(ConfigError, match="belongs to kind 'lanes'"):
        replace(tiny.config("mdlm"), drafts=1)
    assert len(dcdm.generate(model, [[1]], max_new_tokens=5, drafts=64).completions[0]) == 5
    assert DecodingConfig.of(cache="none").resolve(model.config).drafts == 0
    assert DecodingConfig.of().resolve(model.config).drafts == 3
