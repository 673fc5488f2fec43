"""The decoding engine: faithful to the model, the same with and without cache, alone and in a batch."""

from __future__ import annotations

import gc

import pytest
import torch

import dcdm
import tiny
from dcdm.decoding import routes
from dcdm.decoding.caching import Cached
from dcdm.decoding.commits import commit_policy
from dcdm.decoding.config import AdaBlock
from dcdm.decoding.loop import Uncached, fill_canvas, predictable
from dcdm.model.cache import KVCache, LayerCache
from walks import EXACT, ORDERED, RANDOM, both_ways, canvases, model_of, same_predictions, walked


@pytest.mark.parametrize("commit", [*ORDERED, *RANDOM])
@pytest.mark.parametrize("kind", EXACT)
def test_cached_predictions_equal_uncached_ones_in_ragged_batches(kind, commit):
    model = model_of(kind)
    clean, positions = canvases(model)
    order = torch.rand(clean.shape, generator=torch.Generator().manual_seed(2))
    slow, slow_counts, fast_counts = both_ways(model, clean, positions, commit, order=order)
    assert torch.equal(slow_counts.forwards, fast_counts.forwards)
    assert (fast_counts.computed <= slow_counts.computed).all()
    # what is remembered and what is computed is together what the active chunk can see
    assert torch.equal(
        fast_counts.computed + fast_counts.reused, slow_counts.computed - _unseen(model, positions, slow)
    )


def _unseen(model, positions, seen):
    """AR computes the position it asks for too when nothing is remembered; the others compute nothing more."""
    if model.config.kind != "ar":
        return 0
    return sum(where.any(dim=-1).long() for _, where, _ in seen)


@pytest.mark.parametrize("routing", ["blocks:3", "adablock"])
@pytest.mark.parametrize("kind", ["bdlm", "mdlm"])
def test_other_routings_are_the_same_with_and_without_cache(kind, routing):
    model = tiny.model(kind)
    clean, positions = canvases(model)
    adablock = AdaBlock(tuple(range(10)), 2, least=0.2)
    both_ways(model, clean, positions, "threshold:0.5", routing, adablock)


def test_a_cached_step_of_the_active_chunk_costs_its_own_size():
    model = model_of("causal", num_chunks=4)
    clean = tiny.tokens(2, 33)
    positions = model.position_masks(clean)
    _, counts = walked(model, clean, positions, Cached(model, positions), "position")
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
    clean, positions = canvases(model)
    shown = (~positions.free).clone()
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
    for predict in (Uncached(model), Cached(model, positions)):
        shown.copy_(~positions.free)
        z = clean.masked_fill(positions.free, mask_id)
        fill_canvas(z, positions, routes.router_of(model, positions), predict, commit_policy("position"), reveal)
        assert shown.all()


@pytest.mark.parametrize("routing", ["paper-chunk", "paper-step"])
def test_frozen_states_agree_as_long_as_nothing_has_been_frozen(routing):
    model = model_of("paper")
    clean, positions = canvases(model)
    slow, _ = walked(model, clean, positions, Uncached(model), "chunk", routing)
    fast, counts = walked(model, clean, positions, Cached(model, positions), "chunk", routing)
    torch.testing.assert_close(fast[0][0][fast[0][1]], slow[0][0][slow[0][1]], rtol=0, atol=1e-9)
    later = [float((a - b)[w].abs().max()) for (a, w, _), (b, _, _) in zip(slow[1:], fast[1:], strict=False)]
    assert max(later) > 1e-3, "frozen is an approximation, not a cache"
    assert (counts.reused > 0).any()


def test_appendix_b_predicts_what_the_training_pass_predicts():
    """Later revealed tokens stay in stage 1 and are hidden in stage 2, as they are in training."""
    model = model_of("paper")
    differs = 0
    for seed in range(6):
        clean, positions = canvases(model, seed)
        theirs, _ = walked(model, clean, positions, Uncached(model), "chunk", "appendix-b")
        log_p, candidates, position = theirs[0]
        trained = model(clean, positions.free, prompt=positions.visible).logits.log_softmax(dim=-1)[..., :-3]
        rows = torch.arange(len(clean))[:, None]
        torch.testing.assert_close(log_p[candidates], trained[rows, position][candidates], rtol=0, atol=1e-9)
        ours, _ = walked(model, clean, positions, Uncached(model), "chunk", "paper-chunk")
        differs += not torch.allclose(ours[0][0][candidates], log_p[candidates])
    assert differs


def test_networks_of_a_single_block_decode_with_a_cache():
    for kind in ("causal", "bdlm", "ar", "mdlm"):
        model = model_of(kind, num_layers=1)
        clean, positions = canvases(model)
        both_ways(model, clean, positions, "position")


def test_the_adaptive_block_ends_at_the_surest_delimiter_and_its_first_forward_is_used():
    model = tiny.model("bdlm", symbols=6, scale=20.0)
    clean = tiny.tokens(2, 17, symbols=6)
    positions = model.position_masks(clean)
    adablock = AdaBlock((1, 2), 3, least=0.0, window=8)
    seen, counts = walked(model, clean, positions, Uncached(model), "chunk", "adablock", adablock)
    _, candidates, position = seen[0]
    z = clean.masked_fill(positions.free, model.config.mask_id)
    ids = torch.where(torch.arange(17) == 0, 0, torch.where(torch.arange(17) <= 8, 1, 2)).expand(2, -1)
    p, token = predictable(model, model.denoise(z, ids)).detach()[:, 1:9].softmax(dim=-1).max(dim=-1)
    for row in range(2):
        ends = [(float(p[row, i]), i + 1) for i in range(8) if token[row, i] in (1, 2)]
        last = max(ends)[1] if ends else 3
        assert position[row][candidates[row]].tolist() == list(range(1, last + 1))
    assert counts.forwards.max() <= 16


# ---- what is not computed


@pytest.mark.parametrize("kind", ["ar", "mdlm", "causal", "paper"])
def test_distributions_are_made_a_slice_at_a_time_and_change_nothing(kind, monkeypatch):
    model = model_of(kind)
    clean, positions = canvases(model)
    settings = {"max_new_tokens": 12, "commit": "threshold:0.3", "top_p": 0.9}
    plain = dcdm.generate(model, [[1, 2], [3]], **settings)
    score = dcdm.score(model, clean, "trajectory", commit="entropy:0.9", prompt=positions.visible)
    sizes = []

    def counted(model, states):
        sizes.append(len(states))
        return predictable(model, states)

    monkeypatch.setattr("dcdm.decoding.commits.SLICE_BYTES", 2 * 4 * model.config.vocab_size)
    monkeypatch.setattr("dcdm.decoding.loop.predictable", counted)
    assert dcdm.generate(model, [[1, 2], [3]], **settings).completions == plain.completions
    assert max(sizes) <= 2
    sliced = dcdm.score(model, clean, "trajectory", commit="entropy:0.9", prompt=positions.visible)
    torch.testing.assert_close(sliced.by_position, score.by_position, rtol=0, atol=1e-12)


@pytest.mark.parametrize("routing", ["paper-step", "paper-chunk", "paper-equal", "appendix-b"])
def test_the_first_block_that_routed_a_canvas_is_not_computed_again(routing, monkeypatch):
    model = model_of("paper")
    clean, positions = canvases(model)
    calls = []
    model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    fast, counts = walked(model, clean, positions, Uncached(model), "steps:2", routing)
    reused = len(calls)
    denoise = model.denoise
    monkeypatch.setattr(model, "denoise", lambda z, ids, block_zero=None: denoise(z, ids))
    calls.clear()
    slow, _ = walked(model, clean, positions, Uncached(model), "steps:2", routing)
    assert reused < len(calls)
    if routing == "paper-step":
        assert reused == int(counts.forwards.max()), "one block 0 for routing and forward together"
    same_predictions(slow, fast)


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

    def held() -> set[int]:
        return {id(one) for one in gc.get_objects() if isinstance(one, KVCache | LayerCache)}

    gc.collect()
    gc.disable()
    try:
        before = held()  # servers of other tests in this process may hold some
        dcdm.generate(model, [[1, 2]], max_new_tokens=4, cache="frozen" if kind == "paper" else "exact")
        assert held() <= before
    finally:
        gc.enable()


def test_memory_is_that_of_the_rows_that_are_there():
    cache = tiny.model("causal").new_cache()
    cache.add_rows(1, 40)
    cache.add_rows(3, 8)
    assert cache.positions == 4 * 40
    cache.keep_rows(torch.tensor([1, 2, 3]))
    cache.add_rows(5, 8)
    assert cache.positions == 8 * 8, "the long row has left"
