"""The decoding engine: faithful to the model, the same with and without cache, alone and in a batch."""

from __future__ import annotations

import functools
import gc
import itertools
import math

import pytest
import torch

import dcdm
import tiny
from dcdm.config import ConfigError
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.decoding import commits, routes
from dcdm.decoding.commits import View, commit_policy
from dcdm.decoding.distributions import Distributions
from dcdm.decoding.loop import walk
from dcdm.decoding.predictors import Afresh, Remembering, predictable
from dcdm.decoding.routes import AdaBlock
from dcdm.decoding.sampling import Sampling
from dcdm.keys import Key
from dcdm.model.cache import LayerMemory, Memory

EXACT = ["ar", *tiny.VALID]
ORDERED = ["chunk", "position", "steps:2", "threshold:0.5", "entropy:0.9", "factor:0.8"]
RANDOM = ["ancestral:3", "first-hitting"]


def model_of(kind, **changes):
    chunks = {"num_chunks": 4} if tiny.KINDS[kind]["kind"] == "dcdm" else {}
    return tiny.model(kind, **{**chunks, **changes})


def canvases(model, seed=0):
    """Three rows of different lengths, with given tokens at the front, in the middle and at the end."""
    clean = tiny.tokens(3, 14, seed=seed, padding=(0, 3, 6))
    prompt = torch.zeros_like(clean, dtype=torch.bool)
    prompt[0, 1:4] = True
    if model.config.kind != "ar":
        prompt[1, [5, 9]] = True
    return clean, model.sets(clean, prompt)


def whole(view):
    """(B, A, V): all log-probabilities of a view; 0 at fillers."""
    found = []
    view.predicted.measure(lambda log_p, row, at: found.append(log_p) or at, view.predicted.valid, 0)
    log_p = torch.cat(found)
    out = torch.zeros(*view.candidates.shape, log_p.shape[-1], dtype=log_p.dtype)
    out[view.predicted.valid] = log_p
    return out


def walked(model, clean, sets, predict, commit, routing="auto", adablock=None, order=None):
    """Log-probabilities of each forward at its positions, and the counts."""
    seen = []

    def reveal(view, fill):
        seen.append((whole(view), view.candidates, view.position))
        return clean.gather(1, view.position)

    router = routes.router_of(model, sets, torch.arange(len(clean)), routing, adablock)
    z = clean.masked_fill(sets.free, model.config.mask_id)
    filled, counts = walk(z, sets, router, predict, commit_policy(commit), reveal, order=order)
    assert torch.equal(filled, clean)
    return seen, counts


@pytest.mark.parametrize("commit", [*ORDERED, *RANDOM])
@pytest.mark.parametrize("kind", EXACT)
def test_cached_predictions_equal_uncached_ones_in_ragged_batches(kind, commit):
    model = model_of(kind)
    clean, sets = canvases(model)
    order = torch.rand(clean.shape, generator=torch.Generator().manual_seed(2))
    slow, slow_counts = walked(model, clean, sets, Afresh(model), commit, order=order)
    fast, fast_counts = walked(model, clean, sets, Remembering(model, sets), commit, order=order)
    assert len(slow) == len(fast)
    for (a, where, at), (b, also, there) in zip(slow, fast, strict=True):
        assert torch.equal(where, also)
        assert torch.equal(at[where], there[where])
        torch.testing.assert_close(b[where], a[where], rtol=0, atol=1e-9)
    assert torch.equal(slow_counts.forwards, fast_counts.forwards)
    assert (fast_counts.computed <= slow_counts.computed).all()
    # what is remembered and what is computed is together what the active chunk can see
    assert torch.equal(fast_counts.computed + fast_counts.reused, slow_counts.computed - _unseen(model, sets, slow))


def _unseen(model, sets, seen):
    """AR computes the position it asks for too when nothing is remembered; the others compute nothing more."""
    if model.config.kind != "ar":
        return 0
    return sum(where.any(dim=-1).long() for _, where, _ in seen)


@pytest.mark.parametrize("routing", ["blocks:3", "adablock"])
@pytest.mark.parametrize("kind", ["bdlm", "mdlm"])
def test_other_routings_are_the_same_with_and_without_cache(kind, routing):
    model = tiny.model(kind)
    clean, sets = canvases(model)
    adablock = AdaBlock(tuple(range(10)), 2, least=0.2)
    slow, _ = walked(model, clean, sets, Afresh(model), "threshold:0.5", routing, adablock)
    fast, _ = walked(model, clean, sets, Remembering(model, sets), "threshold:0.5", routing, adablock)
    for (a, where, _), (b, also, _) in zip(slow, fast, strict=True):
        assert torch.equal(where, also)
        torch.testing.assert_close(b[where], a[where], rtol=0, atol=1e-9)


def test_a_cached_step_of_the_active_chunk_costs_its_own_size():
    model = model_of("causal", num_chunks=4)
    clean = tiny.tokens(2, 33)
    sets = model.sets(clean)
    _, counts = walked(model, clean, sets, Remembering(model, sets), "position")
    # 8 forwards for each chunk of 8; BOS and three finished chunks are written once, in forwards that run anyway
    assert counts.forwards.tolist() == [32, 32]
    assert counts.computed.tolist() == [32 * 8 + 1 + 24] * 2
    assert counts.rounds.tolist() == [4, 4]


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("commit", ["threshold:0.4", "ancestral:3"])
def test_a_batch_gives_what_each_prompt_gives_alone(kind, commit):
    model = model_of(kind)
    prompts = [[3, 4, 5], [], [1, 2, 3, 4, 5, 6, 7, 8], [9]]
    settings = {"max_new_tokens": 7, "commit": commit, "window": 16, "seed": 3}
    index = [5, 1, 8, 2]
    together = dcdm.generate(model, prompts, index=index, **settings)
    for row, prompt in enumerate(prompts):
        alone = dcdm.generate(model, [prompt], index=[index[row]], **settings)
        assert alone.completions == together.completions[row : row + 1]
        assert alone.forwards[0] == together.forwards[row]
        assert alone.statistics.computed[0] == together.statistics.computed[row]
    pairs = dcdm.generate(model, prompts, index=index, batch_size=2, **settings)
    assert pairs.completions == together.completions


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_seed_repeats_a_result_and_another_changes_it(kind):
    model = model_of(kind, scale=6.0)
    one, same, other = (dcdm.generate(model, [[1, 2]], max_new_tokens=12, seed=s).completions for s in (1, 1, 2))
    assert one == same != other
    assert len(one[0]) == 12
    assert max(one[0]) < tiny.LETTERS


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_decoder_never_reads_a_token_it_has_not_committed(kind, monkeypatch):
    model = model_of(kind)
    clean, sets = canvases(model)
    shown = (~sets.free).clone()
    mask_id = model.config.mask_id
    denoise, extend = model.denoise, model.extend

    def spy(z, ids, *more):
        assert torch.equal(z == mask_id, ~shown[~shown.all(dim=-1)]), "only rows that are not full"
        return denoise(z, ids, *more)

    def spy_slots(tokens, slots, *more):
        real = slots.chunk >= 0
        known = shown[~shown.all(dim=-1)].gather(1, slots.position)
        assert torch.equal((tokens == mask_id)[real], ~known[real])
        return extend(tokens, slots, *more)

    def reveal(view, fill):
        row, at = fill.nonzero(as_tuple=True)
        shown[row, view.position[row, at]] = True
        return clean.gather(1, view.position)

    monkeypatch.setattr(model, "denoise", spy)
    monkeypatch.setattr(model, "extend", spy_slots)
    for predict in (Afresh(model), Remembering(model, sets)):
        shown.copy_(~sets.free)
        z = clean.masked_fill(sets.free, mask_id)
        walk(z, sets, routes.router_of(model, sets), predict, commit_policy("position"), reveal)
        assert shown.all()


# ---- faithfulness by enumeration

FREE = 3


WAYS = [(k, "auto") for k in tiny.KINDS if k not in tiny.PAPER and k != "random"]
WAYS += [(k, routing) for k in tiny.PAPER for routing in ("paper-chunk", "paper-step")]


@torch.no_grad()
def predicted(model, z, route=None):
    """Plain loop over the same weights: the next chunk's positions and log-probabilities, nothing remembered.

    `route` are the ids made at the chunk's start, if the decoder keeps them; the ids that hold are given back.
    """
    row = torch.tensor([z])
    if model.config.kind == "ar":
        at = z.index(model.config.mask_id)
        logits = predictable(model, model.denoise(row, torch.zeros_like(row)))[0, [at - 1]]
        return [at], logits.log_softmax(-1), None
    ids = routes.current_ids(model, row) if route is None else torch.tensor([route])
    masked = row[0] == model.config.mask_id
    active = (masked & (ids[0] == ids[0][masked].min())).nonzero().flatten().tolist()
    log_p = predictable(model, model.denoise(row, ids))[0, active].log_softmax(-1)
    return active, log_p, tuple(ids[0].tolist())


def filled(z, positions, values):
    z = list(z)
    for at, value in zip(positions, values, strict=True):
        z[at] = value
    return tuple(z)


def exact_distribution(model, steps, keeps_route=False):
    """p(x) of the reverse process: in `steps` intervals per chunk, or (None) in continuous time.

    `keeps_route`: positions are routed at a chunk's start only, not after every forward.
    """

    @functools.cache
    def outcomes(z, step, route=None):
        if model.config.mask_id not in z:
            return {z: 1.0}
        active, log_p, route = predicted(model, list(z), route)
        total = {}
        for chosen, chance in moments(len(active), step):
            for values in itertools.product(range(tiny.SYMBOLS), repeat=len(chosen)):
                p = chance * math.exp(sum(float(log_p[i, v]) for i, v in zip(chosen, values, strict=True)))
                after = filled(z, [active[i] for i in chosen], values)
                is_full = len(chosen) == len(active)
                kept = route if keeps_route and not is_full else None
                for x, q in outcomes(after, 0 if is_full else step + 1, kept).items():
                    total[x] = total.get(x, 0.0) + p * q
        return total

    def moments(count, step):
        if steps is None:
            return [((i,), 1 / count) for i in range(count)]
        share = 1 / (steps - step)
        return [
            (chosen, share ** len(chosen) * (1 - share) ** (count - len(chosen)))
            for size in range(count + 1)
            for chosen in itertools.combinations(range(count), size)
            if share < 1 or size == count
        ]

    return outcomes((model.config.bos_id, *[model.config.mask_id] * FREE), 0)


@pytest.mark.parametrize("commit", ["first-hitting", "ancestral:2"])
@pytest.mark.parametrize(("kind", "routing"), WAYS)
def test_samples_follow_the_models_exact_distribution(kind, routing, commit):
    model = tiny.model(kind, symbols=tiny.SYMBOLS)
    exact = exact_distribution(model, 2 if commit == "ancestral:2" else None, routing == "paper-chunk")
    assert abs(sum(exact.values()) - 1) < 1e-9
    count = 3000
    drawn = dcdm.generate(
        model, [[]] * count, max_new_tokens=FREE, commit=commit, routing=routing, batch_size=count, seed=1
    )
    observed = dict.fromkeys(exact, 0)
    for row in drawn.tokens.tolist():
        observed[tuple(row)] += 1
    chi_square = sum((observed[x] - count * p) ** 2 / (count * p) for x, p in exact.items() if p > 1e-4)
    assert chi_square < 24.3, f"7 degrees of freedom, 0.1 %: {chi_square:.1f}"


def test_a_sampler_that_fills_in_the_wrong_order_is_noticed():
    """The negative control of the test above: most confident first is not the diffusion's own process."""
    model = tiny.model("mdlm", symbols=tiny.SYMBOLS)
    exact = exact_distribution(model, None)
    drawn = dcdm.generate(model, [[]] * 3000, max_new_tokens=FREE, commit="position", batch_size=3000, seed=1)
    observed = dict.fromkeys(exact, 0)
    for row in drawn.tokens.tolist():
        observed[tuple(row)] += 1
    assert sum((observed[x] - 3000 * p) ** 2 / (3000 * p) for x, p in exact.items() if p > 1e-4) > 40


@pytest.mark.parametrize("commit", ORDERED)
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_trajectory_likelihoods_of_every_ordered_decoder_sum_to_one(kind, commit):
    model = tiny.model(kind, symbols=tiny.SYMBOLS)
    rows = tiny.every_sequence(4)
    index = torch.zeros(len(rows), dtype=torch.long)
    scored = dcdm.score(model, rows, "trajectory", commit=commit, index=index)
    assert abs(float((-scored.nats).exp().sum()) - 1) < 1e-9


@pytest.mark.parametrize("kind", ["bdlm", "mdlm"])
def test_trajectory_likelihoods_of_adaptive_blocks_sum_to_one(kind):
    model = tiny.model(kind, symbols=tiny.SYMBOLS)
    rows = tiny.every_sequence(6)
    for least in (0.0, 0.55, 1.0):
        scored = dcdm.score(
            model, rows, "trajectory", commit="threshold:0.7", routing="adablock",
            adablock=AdaBlock((1,), 2, least=least, window=4),
        )  # fmt: skip
        assert abs(float((-scored.nats).exp().sum()) - 1) < 1e-9


@pytest.mark.parametrize(("kind", "routing"), WAYS)
def test_the_trajectory_of_one_position_at_a_time_matches_brute_force(kind, routing):
    model = tiny.model(kind, symbols=3)
    clean = tiny.tokens(3, 6, symbols=3)
    expected = []
    for row in clean.tolist():
        z, nats, route = [row[0], *[model.config.mask_id] * 5], 0.0, None
        while model.config.mask_id in z:
            active, log_p, route = predicted(model, z, route)
            i = int(log_p.amax(dim=-1).argmax())
            nats -= float(log_p[i, row[active[i]]])
            z[active[i]] = row[active[i]]
            if routing != "paper-chunk" or len(active) == 1:
                route = None
        expected.append(nats)
    for cache in ("none",) if kind in tiny.PAPER else ("exact", "none"):
        scored = dcdm.score(model, clean, "trajectory", commit="position", routing=routing, cache=cache)
        torch.testing.assert_close(scored.nats, torch.tensor(expected, dtype=torch.float64))


def test_a_tempered_truncated_decoder_is_scored_by_what_it_samples_from():
    model = tiny.model("bdlm", symbols=3)
    rows = tiny.every_sequence(4, symbols=3)
    for sampling in (Sampling(0.5), Sampling(1.5, top_k=2), Sampling(1.0, top_p=0.8)):
        scored = dcdm.score(model, rows, "trajectory", commit="position", sampling=sampling)
        assert abs(float((-scored.nats).exp().sum()) - 1) < 1e-9


# ---- policies and sampling by themselves


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
        ("first-hitting", [0, 0, 0, 1]), ("ancestral:1", [1, 1, 1, 1]), ("ancestral:2", [0, 0, 1, 1]),
    ],
)  # fmt: skip
def test_commit_policies_fill_what_they_say(commit, expected):
    assert commit_policy(commit)(view_of(PREDICTED)).tolist() == [[bool(e) for e in expected]]


@pytest.mark.parametrize("name", commits.POLICIES)
def test_commit_policies_fill_a_candidate_and_nothing_else(name):
    view = view_of(PREDICTED, candidates=[True, False, True, False])
    fill = commit_policy(name)(view)
    assert fill.any()
    assert not (fill & ~view.candidates).any()


def test_fixed_steps_end_with_the_chunk():
    assert commit_policy("steps:3")(view_of(PREDICTED, step=2)).all()
    assert commit_policy("steps:3")(view_of(PREDICTED, step=7)).all()


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


# ---- canvases, windows, events

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def writer():
    return tiny.model("causal", symbols=TOKENIZER.vocab_size - 3, num_chunks=4)


def test_blanks_are_filled_and_the_rest_is_kept(writer):
    result = dcdm.generate(writer, "def [[4]](x):[[3]]!", tokenizer=TOKENIZER)
    ids = result.tokens[0, 1:].tolist()
    assert ids[:4] == TOKENIZER.encode("def ")
    assert ids[8:12] == TOKENIZER.encode("(x):")
    assert ids[15:] == TOKENIZER.encode("!")
    assert result.completions[0] == ids
    assert result.statistics.new_tokens.tolist() == [7]
    assert max(ids) < TOKENIZER.bos_id


def test_long_texts_are_written_window_by_window():
    model = model_of("bdlm")
    result = dcdm.generate(model, [[1, 2, 3], [4]], max_new_tokens=40, window=16, overlap=5)
    assert [len(c) for c in result.completions] == [40, 40]
    assert result.finished == ["length", "length"]
    # 12 (14) tokens in the first canvas, then 10 behind BOS and an overlap of 5
    assert result.statistics.reencoded.tolist() == [18, 18]
    # the second window is what its five tokens alone would give, under the noise of a second window
    text = result.tokens[0].tolist()
    context = torch.tensor([[model.config.bos_id, *text[11:16], *text[16:26]]])
    prompt = torch.arange(16)[None] < 6
    uniform = Key(0).fold("generate").fold("token", 0, 1).uniform(16)

    def reveal(view, fill):
        drawn = torch.zeros_like(view.position)
        drawn[fill] = Sampling().draw(whole(view)[fill], uniform[view.position[fill]])
        return drawn

    sets = model.sets(context, prompt)
    z = context.masked_fill(sets.free, model.config.mask_id)
    again, _ = walk(z, sets, routes.router_of(model, sets), Afresh(model), commit_policy("threshold:0.9"), reveal)
    assert torch.equal(again, context)


@pytest.mark.parametrize("window", [2, 3, 8])
def test_windows_without_overlap_go_on(window):
    model = model_of("bdlm")
    result = dcdm.generate(model, [[]], max_new_tokens=12, window=window, overlap=0)
    assert len(result.completions[0]) == 12
    assert len(dcdm.generate(model, [[]], max_new_tokens=12, window=window).completions[0]) == 12


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_generation_ends_at_eos_and_pays_for_nothing_behind_it(kind):
    model = model_of(kind)
    free = dcdm.generate(model, [[1], [2]], max_new_tokens=24, window=32, commit="position", seed=5)
    eos = free.completions[0][6]
    first = free.completions[0].index(eos)
    cut = dcdm.generate(model, [[1], [2]], max_new_tokens=24, window=32, commit="position", seed=5, eos_id=eos)
    assert cut.finished[0] == "eos"
    assert cut.completions[0] == free.completions[0][:first]
    assert cut.tokens[0, 2 + first] == eos
    assert cut.forwards[0] <= free.forwards[0]
    assert cut.statistics.new_tokens[0] == first + 1
    if kind in ("ar", "bdlm", "causal-contiguous", "positional"):
        assert cut.forwards[0] < free.forwards[0]


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_events_rebuild_the_text_in_the_order_of_commits(kind):
    model = model_of(kind)
    streamed = []
    result = dcdm.generate(model, [[7, 8], [9]], max_new_tokens=20, window=14, on_event=streamed.append)
    assert streamed == result.history
    rebuilt = result.tokens.clone()
    rebuilt[0, 3:] = rebuilt[1, 2:] = -1
    for event in streamed:
        assert (rebuilt[event.row, event.positions] == -1).all(), "a position is committed once"
        rebuilt[event.row, event.positions] = torch.tensor(event.tokens)
    assert [row[row >= 0].tolist() for row in rebuilt] == [
        row[row != model.config.pad_id].tolist() for row in result.tokens
    ]
    per_window = {(e.row, e.window): e.forward for e in streamed}
    assert sum(n for (row, _), n in per_window.items() if row == 0) == result.forwards[0]


def test_a_row_can_be_cancelled_between_steps():
    model = model_of("causal")
    seen = []

    def on_event(event):
        seen.append(event)

    result = dcdm.generate(
        model, [[1], [2]], max_new_tokens=12, commit="position", on_event=on_event,
        cancel=lambda row: row == 1 and sum(e.row == 1 for e in seen) >= 3,
    )  # fmt: skip
    assert result.finished == ["length", "cancelled"]
    assert result.statistics.new_tokens.tolist() == [12, 3]
    assert (result.tokens[1] == model.config.mask_id).sum() == 9
    whole = dcdm.generate(model, [[1], [2]], max_new_tokens=12, commit="position")
    assert result.completions[0] == whole.completions[0]


def test_stop_is_asked_after_each_window():
    model = model_of("ar")
    asked = []
    result = dcdm.generate(
        model, [[1]], max_new_tokens=50, window=10, overlap=3,
        stop=lambda row, ids: asked.append(len(ids)) or len(ids) > 12,
    )  # fmt: skip
    assert asked == [8, 14]
    assert result.finished == ["stop"]
    assert len(result.completions[0]) == 14


@pytest.mark.parametrize("routing", ["paper-chunk", "paper-step"])
def test_frozen_states_agree_as_long_as_nothing_has_been_frozen(routing):
    model = model_of("paper")
    clean, sets = canvases(model)
    slow, _ = walked(model, clean, sets, Afresh(model), "chunk", routing)
    fast, counts = walked(model, clean, sets, Remembering(model, sets), "chunk", routing)
    torch.testing.assert_close(fast[0][0][fast[0][1]], slow[0][0][slow[0][1]], rtol=0, atol=1e-9)
    later = [float((a - b)[w].abs().max()) for (a, w, _), (b, _, _) in zip(slow[1:], fast[1:], strict=False)]
    assert max(later) > 1e-3, "frozen is an approximation, not a cache"
    assert (counts.reused > 0).any()


def test_appendix_b_predicts_what_the_training_pass_predicts():
    """Later revealed tokens stay in stage 1 and are hidden in stage 2, as they are in training."""
    model = model_of("paper")
    differs = 0
    for seed in range(6):
        clean, sets = canvases(model, seed)
        theirs, _ = walked(model, clean, sets, Afresh(model), "chunk", "appendix-b")
        log_p, candidates, position = theirs[0]
        trained = model(clean, sets.free, prompt=sets.visible).logits.log_softmax(dim=-1)[..., :-3]
        rows = torch.arange(len(clean))[:, None]
        torch.testing.assert_close(log_p[candidates], trained[rows, position][candidates], rtol=0, atol=1e-9)
        ours, _ = walked(model, clean, sets, Afresh(model), "chunk", "paper-chunk")
        differs += not torch.allclose(ours[0][0][candidates], log_p[candidates])
    assert differs


def test_networks_of_a_single_block_decode_with_a_cache():
    for kind in ("causal", "bdlm", "ar", "mdlm"):
        model = model_of(kind, num_layers=1)
        clean, sets = canvases(model)
        slow, _ = walked(model, clean, sets, Afresh(model), "position")
        fast, _ = walked(model, clean, sets, Remembering(model, sets), "position")
        for (a, where, _), (b, _, _) in zip(slow, fast, strict=True):
            torch.testing.assert_close(b[where], a[where], rtol=0, atol=1e-9)


def test_a_low_temperature_does_not_make_predictions_look_certain():
    model = model_of("causal", scale=3.0)
    forwards = [
        int(dcdm.generate(model, [[1]], max_new_tokens=12, temperature=t).forwards[0]) for t in (0.0, 1e-3, 1.0)
    ]
    assert min(forwards) > 4, "one forward per chunk would be 4"
    assert dcdm.generate(model, [[1]], max_new_tokens=12, temperature=1e-39).completions == (
        dcdm.generate(model, [[1]], max_new_tokens=12, temperature=0.0).completions
    )


def test_prompts_with_and_without_blanks_share_a_batch(writer):
    result = dcdm.generate(writer, ["a[[2]]b", "a"], tokenizer=TOKENIZER, window=12)
    assert [len(c) for c in result.completions] == [4, 10]
    alone = dcdm.generate(writer, ["a"], tokenizer=TOKENIZER, window=12, index=[1])
    assert alone.completions[0] == result.completions[1]
    literal = dcdm.generate(writer, ["a[[2]]b"], tokenizer=TOKENIZER, window=12, blanks=False)
    assert len(literal.completions[0]) == 4


def test_a_row_that_is_full_is_not_cancelled():
    model = model_of("bdlm")
    seen = []
    result = dcdm.generate(
        model, [[1]], max_new_tokens=6, on_event=seen.append,
        cancel=lambda row: sum(len(e.positions) for e in seen) >= 6,
    )  # fmt: skip
    assert result.finished == ["length"]


def test_the_adaptive_block_ends_at_the_surest_delimiter_and_its_first_forward_is_used():
    model = tiny.model("bdlm", symbols=6, scale=20.0)
    clean = tiny.tokens(2, 17, symbols=6)
    sets = model.sets(clean)
    adablock = AdaBlock((1, 2), 3, least=0.0, window=8)
    seen, counts = walked(model, clean, sets, Afresh(model), "chunk", "adablock", adablock)
    _, candidates, position = seen[0]
    z = clean.masked_fill(sets.free, model.config.mask_id)
    ids = torch.where(torch.arange(17) == 0, 0, torch.where(torch.arange(17) <= 8, 1, 2)).expand(2, -1)
    p, token = predictable(model, model.denoise(z, ids)).detach()[:, 1:9].softmax(dim=-1).max(dim=-1)
    for row in range(2):
        ends = [(float(p[row, i]), i + 1) for i in range(8) if token[row, i] in (1, 2)]
        last = max(ends)[1] if ends else 3
        assert position[row][candidates[row]].tolist() == list(range(1, last + 1))
    assert counts.forwards.max() <= 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1.0}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"), ({"commit": "steps:0"}, "commit"), ({"cache": "frozen"}, "exact"),
        ({"cache": "fast"}, "cache"), ({"routing": "paper-step"}, "does not fit"),
        ({"routing": "blocks:0"}, "blocks"), ({"routing": "adablock"}, "adablock"),
        ({"prompts": []}, "at least one"), ({"prompts": [[99]]}, "vocabulary"),
        ({"prompts": [[1] * 70]}, "does not fit"), ({"prompts": ["text"]}, "tokenizer"),
        ({"max_new_tokens": 0}, "nothing to do"), ({"max_new_tokens": -2}, "max_new_tokens"),
        ({"window": 1}, "window"), ({"overlap": 64}, "overlap"), ({"batch_size": 0}, "batch_size"),
        ({"index": [1, 2]}, "index"), ({"prompts": [[1, 20, 2]]}, "BOS"),
        ({"prompts": [[21, 1]]}, "PAD"), ({"window": 0}, "window"), ({"commit": "steps:inf"}, "commit"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(change, message):
    model = tiny.model("bdlm")
    arguments = {"prompts": [[1, 2]], "max_new_tokens": 4, **change}
    with pytest.raises(ConfigError, match=message):
        dcdm.generate(model, arguments.pop("prompts"), **arguments)


def test_an_exact_cache_for_the_papers_routing_is_refused():
    with pytest.raises(ConfigError, match="frozen"):
        dcdm.generate(tiny.model("paper"), [[1]], max_new_tokens=2, cache="exact")
    with pytest.raises(ConfigError, match="appendix-b"):
        dcdm.generate(tiny.model("paper"), [[1]], max_new_tokens=2, cache="frozen", routing="appendix-b")
    with pytest.raises(ConfigError, match="random order"):
        dcdm.score(tiny.model("mdlm"), tiny.tokens(1, 4), "trajectory", commit="first-hitting")
    with pytest.raises(ConfigError, match="greedy"):
        dcdm.score(tiny.model("mdlm"), tiny.tokens(1, 4), "trajectory", sampling=Sampling(0.0))


@pytest.mark.parametrize("kind", ["causal", "ar"])
def test_requests_with_their_own_seed_and_length_share_a_batch(kind):
    model = model_of(kind)
    ended = {}
    together = dcdm.generate(
        model, [[1, 2], [3], [1, 2]], max_new_tokens=[3, 11, 6], seed=[5, 6, 7], index=[0, 0, 0],
        on_end=lambda row, end: ended.setdefault(row, (len(ended), end)),
    )  # fmt: skip
    for row, (prompt, size, seed) in enumerate([([1, 2], 3, 5), ([3], 11, 6), ([1, 2], 6, 7)]):
        alone = dcdm.generate(model, [prompt], max_new_tokens=size, seed=seed)
        assert together.completions[row] == alone.completions[0]
        assert ended[row][1].completion == alone.completions[0]
        assert ended[row][1].costs["forwards"] == int(alone.forwards[0]) == int(together.forwards[row])
    assert [ended[row][0] for row in (0, 1, 2)] == [0, 2, 1], "the shortest ends first"


def test_events_say_how_sure_the_model_was():
    model = model_of("causal")
    result = dcdm.generate(model, [[1, 2]], max_new_tokens=9, commit="position", temperature=0)
    sure = [p for event in result.history for p in event.log_p]
    assert len(sure) == 9
    assert all(math.log(1 / model.config.vocab_size) < p <= 0 for p in sure), (
        "greedy: at least as probable as chance"
    )


def test_seeds_and_lengths_must_match_the_prompts():
    model = model_of("causal")
    with pytest.raises(ConfigError, match="seed has 1 entries for 2 prompts"):
        dcdm.generate(model, [[1], [2]], max_new_tokens=2, seed=[1])
    with pytest.raises(ConfigError, match="max_new_tokens has 3 entries for 2 prompts"):
        dcdm.generate(model, [[1], [2]], max_new_tokens=[1, 2, 3])


# ---- what is not computed


@pytest.mark.parametrize("kind", ["ar", "mdlm", "causal", "paper"])
def test_distributions_are_made_a_slice_at_a_time_and_change_nothing(kind, monkeypatch):
    model = model_of(kind)
    clean, sets = canvases(model)
    settings = {"max_new_tokens": 12, "commit": "threshold:0.3", "top_p": 0.9}
    plain = dcdm.generate(model, [[1, 2], [3]], **settings)
    score = dcdm.score(model, clean, "trajectory", commit="entropy:0.9", prompt=sets.visible)
    sizes = []

    def counted(model, states):
        sizes.append(len(states))
        return predictable(model, states)

    monkeypatch.setattr("dcdm.decoding.distributions.SLICE_BYTES", 2 * 4 * model.config.vocab_size)
    monkeypatch.setattr("dcdm.decoding.predictors.predictable", counted)
    assert dcdm.generate(model, [[1, 2], [3]], **settings).completions == plain.completions
    assert max(sizes) <= 2
    sliced = dcdm.score(model, clean, "trajectory", commit="entropy:0.9", prompt=sets.visible)
    torch.testing.assert_close(sliced.by_position, score.by_position, rtol=0, atol=1e-12)


@pytest.mark.parametrize("routing", ["paper-step", "paper-chunk", "appendix-b"])
def test_the_first_block_that_routed_a_canvas_is_not_computed_again(routing, monkeypatch):
    model = model_of("paper")
    clean, sets = canvases(model)
    calls = []
    model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    fast, counts = walked(model, clean, sets, Afresh(model), "steps:2", routing)
    reused = len(calls)
    denoise = model.denoise
    monkeypatch.setattr(model, "denoise", lambda z, ids, begun=None: denoise(z, ids))
    calls.clear()
    slow, _ = walked(model, clean, sets, Afresh(model), "steps:2", routing)
    assert reused < len(calls)
    if routing == "paper-step":
        assert reused == int(counts.forwards.max()), "one block 0 for routing and forward together"
    for (a, where, at), (b, also, there) in zip(slow, fast, strict=True):
        assert torch.equal(where, also)
        assert torch.equal(at[where], there[where])
        torch.testing.assert_close(b[where], a[where], rtol=0, atol=1e-12)


@pytest.mark.parametrize("cache", ["exact", "none"])
def test_rows_that_have_ended_cost_nothing(cache, monkeypatch):
    model = model_of("causal")
    rows = []
    for name in ("denoise", "extend"):
        real = getattr(model, name)
        monkeypatch.setattr(
            model, name, lambda tokens, *more, _real=real: rows.append(len(tokens)) or _real(tokens, *more)
        )
    dcdm.generate(model, [[1], [2], [3]], max_new_tokens=[2, 12, 6], commit="position", cache=cache)
    assert rows == sorted(rows, reverse=True)
    assert set(rows) == {3, 2, 1}


@pytest.mark.parametrize("kind", ["ar", "causal", "paper"])
def test_what_was_remembered_is_freed_with_the_last_token(kind):
    """Without waiting for Python to look for cycles: on a GPU they would hold whole caches."""
    model = tiny.model(kind)
    dcdm.generate(model, [[1, 2]], max_new_tokens=4)
    gc.collect()
    gc.disable()
    try:
        dcdm.generate(model, [[1, 2]], max_new_tokens=4, cache="frozen" if kind == "paper" else "exact")
        assert not [held for held in gc.get_objects() if isinstance(held, Memory | LayerMemory)]
    finally:
        gc.enable()
