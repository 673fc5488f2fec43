import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from dcdm.model import reference
from dcdm.model.routing import causal_partition, fixed_partition

INF = math.inf


def canvas(free_pattern):
    """free and real of one row: BOS, then free (True) or prompt (False) positions."""
    free = torch.tensor([[False, *free_pattern]])
    return free, torch.ones_like(free)


def causal_ids(free_pattern, num_chunks, seed=0, **settings):
    free, real = canvas(free_pattern)
    config = tiny.config("causal", num_chunks=num_chunks, **settings)
    r = torch.rand(*free.shape, num_chunks, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return causal_partition(lambda new: r, free, real, config)[0][0], r[0]


patterns = st.lists(st.booleans(), min_size=1, max_size=24)


@given(patterns, st.integers(1, 9), st.integers(0, 3))
def test_causal_chunks_are_disjoint_cover_the_free_positions_and_have_balanced_sizes(pattern, num_chunks, seed):
    ids, _ = causal_ids(pattern, num_chunks, seed)
    assert ids[0] == 0
    assert [bool(i > 0) for i in ids[1:]] == pattern
    counts = [int((ids == k).sum()) for k in range(1, num_chunks + 1)]
    n = sum(pattern)
    assert sum(counts) == n
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    if num_chunks > n:
        assert counts[n:] == [0] * (num_chunks - n)


@given(patterns, st.integers(1, 9), st.integers(0, 3))
def test_contiguous_prior_of_infinite_weight_gives_consecutive_runs_whatever_the_router_says(pattern, k, seed):
    ids, _ = causal_ids(pattern, k, seed, prior="contiguous", prior_weight=INF)
    of_free = ids[ids > 0]
    assert torch.equal(of_free, of_free.sort().values)
    free, real = canvas(pattern)
    assert torch.equal(ids, fixed_partition(tiny.config("positional", num_chunks=k), free, real)[0])


@given(patterns, st.integers(1, 9), st.integers(0, 3))
def test_strided_prior_of_infinite_weight_gives_strided_chunks_whatever_the_router_says(pattern, k, seed):
    ids, _ = causal_ids(pattern, k, seed, prior="strided", prior_weight=INF)
    assert ids[ids > 0].tolist() == [1 + (j % k) for j in range(sum(pattern))]
    free, real = canvas(pattern)
    assert torch.equal(ids, fixed_partition(tiny.config("strided", num_chunks=k), free, real)[0])


def test_without_prior_each_round_takes_the_positions_with_the_largest_centred_score():
    ids, r = causal_ids([True] * 7, 3)
    left = set(range(1, 8))
    for k, size in zip((1, 2, 3), (3, 2, 2), strict=True):
        centred = {p: float(r[p, k - 1] - r[p].mean()) for p in left}
        best = set(sorted(left, key=lambda p, c=centred: -c[p])[:size])
        assert set((ids == k).nonzero().flatten().tolist()) == best
        left -= best


def test_equal_scores_go_to_the_lower_positions():
    free, real = canvas([True] * 6)
    flat = torch.ones(1, 7, 2, dtype=torch.float64)
    ids, _ = causal_partition(lambda revealed: flat, free, real, tiny.config("causal"))
    assert ids.tolist() == [[0, 1, 1, 1, 2, 2, 2]]


def test_a_finite_prior_weight_adds_to_the_score():
    free, real = canvas([True, True, True, True])
    config = tiny.config("causal", prior="contiguous", prior_weight=10.0)
    scores = torch.zeros(1, 5, 2, dtype=torch.float64)
    scores[0, 4, 0] = 2.0  # centred: 1; the contiguous prior costs position 4 up to 10 × 3/4
    assert causal_partition(lambda r: scores, free, real, config)[0].tolist() == [[0, 1, 1, 2, 2]]
    scores[0, 4, 0] = 30.0
    assert causal_partition(lambda r: scores, free, real, config)[0].tolist() == [[0, 1, 2, 2, 1]]


def test_block_ids_and_one_chunk_count_free_positions_and_the_last_block_may_be_short():
    free, real = canvas([True, True, False, True, True, True])
    real[0, -1] = False
    free[0, -1] = False
    assert fixed_partition(tiny.config("bdlm", block_size=3), free, real).tolist() == [[0, 1, 1, 0, 1, 2, -1]]
    assert fixed_partition(tiny.config("mdlm"), free, real).tolist() == [[0, 1, 1, 0, 1, 1, -1]]


def test_random_chunks_depend_on_seed_and_sequence_number_only_and_are_balanced():
    free, real = canvas([True] * 10)
    free, real = free.repeat(3, 1), real.repeat(3, 1)
    config = tiny.config("random", num_chunks=4)
    ids = fixed_partition(config, free, real, torch.tensor([5, 9, 5]))
    assert torch.equal(ids[0], ids[2])
    assert not torch.equal(ids[0], ids[1])
    assert torch.equal(fixed_partition(config, free[:1], real[:1], torch.tensor([9]))[0], ids[1])
    other = tiny.config("random", num_chunks=4, routing_seed=1)
    assert not torch.equal(fixed_partition(other, free, real, torch.tensor([5, 9, 5]))[0], ids[0])
    assert sorted(Counter(ids[0, 1:].tolist()).values()) == [2, 2, 3, 3]


@pytest.mark.parametrize("kind", ["causal", "causal-strided", "causal-moe"])
@pytest.mark.parametrize("with_prompt", [False, True])
def test_the_causal_partition_is_unchanged_when_any_not_yet_revealed_token_changes(kind, with_prompt):
    model = tiny.model(kind, num_chunks=4)
    clean = tiny.tokens(2, 12, padding=(0, 2))
    prompt = torch.zeros_like(clean, dtype=torch.bool)
    prompt[:, [3, 7]] = with_prompt
    ids = model.partition(clean, prompt).ids
    changed_somewhere = False
    for position in range(1, 12):
        other = clean.clone()
        other[:, position] = torch.where(clean[:, position] < tiny.LETTERS, (clean[:, position] + 7) % 20, 21)
        new = model.partition(other, prompt).ids
        for row in range(2):
            own = ids[row, position]
            if own > 0:  # chunks up to and including its own were formed before it was revealed
                settled = ids[row] <= own
                assert torch.equal(new[row][settled], ids[row][settled])
                assert (new[row][~settled] > own).all()
                changed_somewhere |= not torch.equal(new[row], ids[row])
    assert changed_somewhere, "the router never used a revealed token: this test would prove nothing"


def test_causal_rounds_see_only_revealed_tokens(monkeypatch):
    model = tiny.model("causal")
    clean = tiny.tokens(2, 9)
    positions = model.position_masks(clean)
    seen = []
    original = reference.router_scores
    monkeypatch.setattr(reference, "router_scores", lambda m, z, real: (seen.append(z), original(m, z, real))[1])
    ids = reference.partition(model, clean)
    for k, z in enumerate(seen, start=1):
        hidden = positions.free & (ids >= k)
        assert torch.equal(z == model.config.mask_id, hidden)


def test_paper_routing_routes_bos_and_prompt_like_all_others_and_has_no_partition_without_noise():
    model = tiny.model("paper", num_chunks=3)
    clean = tiny.tokens(2, 10, padding=(3,))
    ids = model(clean, tiny.noise(model, clean)).chunk_ids
    real = clean != model.config.pad_id
    assert ((ids >= 1) & (ids <= 3))[real].all()
    assert (ids[~real] == -1).all()
    with pytest.raises(ValueError, match="noise"):
        model.partition(clean)
