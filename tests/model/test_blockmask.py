"""Block masks from chunk ranges equal PyTorch's own construction, which asks the predicate for all pairs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import tiny
from dcdm.lanes import masks as lanes
from dcdm.model import blockmask, masks
from dcdm.model.layout import chunk_sorted, dual_stream, visible_first


def tile_kinds(block_mask):
    """(B, T, T): 0 empty, 1 partial, 2 full."""
    kinds = torch.zeros(block_mask.kv_indices[:, 0].shape, dtype=torch.long)
    for value, count, index in (
        (1, block_mask.kv_num_blocks, block_mask.kv_indices),
        (2, block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        live = torch.arange(kinds.shape[-1]) < count[:, 0, :, None]  # an index lists every tile, live ones first
        kinds.scatter_add_(-1, index[:, 0].long(), value * live.long())
    return kinds


@given(
    st.integers(0, 10_000), st.integers(1, 2), st.integers(3, 36), st.integers(1, 6),
    st.sampled_from([1, 4, 16]), st.booleans(),
)  # fmt: skip
def test_tiles_are_full_partial_and_empty_as_pytorch_finds_them(seed, rows, length, chunks, block, compact):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, chunks + 1, (rows, length), generator=generator)
    ids[:, length - seed % 3 :] = -1
    ids[:, 0] = 0
    noise = torch.rand(rows, length, generator=generator) < 0.5
    cases = [
        (masks.dual_stream, dual_stream(ids, noise & (ids >= 1), compact).slots),
        (masks.dual_stream, dual_stream(ids.clamp(max=1), noise & (ids >= 1), compact).slots),
        (masks.chunk_causal, chunk_sorted(ids, noise).slots),
        (masks.noise, visible_first(ids >= 0, noise & (ids >= 0)).slots),
        (masks.causal, masks.Slots.of(torch.where(ids >= 0, 0, -1))),
        (lanes.left, lanes.from_left(ids, ids >= 1, ids >= 0, compact).slots),
    ]
    for mask, slots in cases:
        total = slots.chunk.shape[1]
        ours = blockmask.from_slots(mask, slots, total, block)
        theirs = create_block_mask(
            blockmask.mask_mod(mask, slots), rows, 1, total, total, device="cpu", BLOCK_SIZE=block
        )
        found, expected = tile_kinds(ours), tile_kinds(theirs)
        # tiles of seeds are called partial, and asked for every pair, also where they need not be
        certain = found != 1 if mask is lanes.left else torch.ones_like(found, dtype=torch.bool)
        assert torch.equal(found[certain], expected[certain]), mask.name


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_flex_attention_gives_the_same_outputs_as_the_tiled_path(kind):
    model = tiny.model(kind, head_dim=16)
    clean = tiny.tokens(2, 40, padding=(0, 7))
    masked = tiny.noise(model, clean)
    with torch.no_grad():
        expected = model(clean, masked)
        ids = torch.where(clean == model.config.pad_id, -1, torch.arange(40) // 9)
        z = clean.masked_fill(ids == 2, model.config.mask_id)
        states = model.denoise(z, ids)
        model.backend = "flex"
        torch.testing.assert_close(model(clean, masked).logits, expected.logits)
        torch.testing.assert_close(model.denoise(z, ids)[ids >= 0], states[ids >= 0])


def test_fewer_queries_than_keys_take_the_first_rows_of_tiles():
    ids = torch.tensor([[0, *([1] * 20), *([2] * 20)]])
    slots = dual_stream(ids, torch.ones(1, 41, dtype=torch.bool)).slots
    whole = blockmask.from_slots(masks.dual_stream, slots, slots.chunk.shape[1], block=8)
    part = blockmask.from_slots(masks.dual_stream, slots, 40, block=8)
    assert torch.equal(tile_kinds(part), tile_kinds(whole)[:, :5])


def test_static_shapes_are_those_of_one_stream_where_no_row_needs_two():
    """MDLM reads the clean copies of given tokens alone; in lanes each needs one seed, and few have one."""
    one, blocks = torch.ones(2, 300, dtype=torch.long), torch.arange(300).expand(2, -1) // 5
    lanes_of_100 = torch.arange(300).expand(2, -1) % 100 + 1
    one[:, :9] = 0
    assert dual_stream(one, one >= 1, compact=False).slots.chunk.shape[1] == 300
    assert dual_stream(blocks, blocks >= 1, compact=False).slots.chunk.shape[1] == 600
    assert lanes.from_left(lanes_of_100, lanes_of_100 >= 1, lanes_of_100 < 100, compact=False).num_noisy == 300
    assert lanes.from_left(blocks, blocks >= 1, blocks < 59, compact=False).num_noisy == 600
