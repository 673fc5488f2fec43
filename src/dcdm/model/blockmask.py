"""FlexAttention's block masks, from the chunk ranges of tiles instead of the predicate on all pairs.

B batch   S slots   T tiles of `BLOCK` slots
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import flex_attention as _flex_attention

from dcdm.model import masks
from dcdm.model.masks import CLEAN, Mask, Slots

BLOCK = 128
_FAR = 1 << 40  # beyond every chunk id


def from_slots(mask: Mask, slots: Slots, num_queries: int, draws: int = 1, block: int = BLOCK) -> BlockMask:
    """The block mask of `mask` over slots sorted for it; no host sync, no B × S × S tensor."""
    some, every = _tile_relations(mask, slots, draws, block)
    tiles = -(-num_queries // block)
    some, every = some[:, :tiles], every[:, :tiles]
    partial_count, partial_index = _ordered(some & ~every)
    full_count, full_index = _ordered(every)
    total = slots.chunk.shape[1]
    return BlockMask.from_kv_blocks(
        partial_count, partial_index, full_count, full_index,
        BLOCK_SIZE=block, mask_mod=mask_mod(mask, slots), seq_lengths=(num_queries, total),
    )  # fmt: skip


def mask_mod(mask: Mask, slots: Slots) -> Any:
    """The predicate in the form that FlexAttention calls."""

    def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask(slots[b, query], slots[b, key])

    return allowed


def _ordered(live: Tensor) -> tuple[Tensor, Tensor]:
    """Number and places of the live tiles of each row of tiles, head dimension added: (B, 1, T), (B, 1, T, T)."""
    count = live.sum(dim=-1, dtype=torch.int32)
    index = live.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[:, None], index[:, None]


def _tile_relations(mask: Mask, slots: Slots, draws: int, block: int) -> tuple[Tensor, Tensor]:
    """For each pair of tiles whether some, and whether every, query may attend to some or every key: (B, T, T)."""
    chunk = _blocks(slots.chunk, block, -1)
    stream = _blocks(slots.stream, block, CLEAN)
    real = chunk >= 0
    whole = real.all(dim=-1)
    both_whole = whole[:, :, None] & whole[:, None, :]
    if mask is masks.noise:
        return _noise_relations(slots, real, both_whole, block)
    if mask is masks.causal:
        return _causal_relations(real, both_whole)
    if mask is masks.chunk_causal:
        low, high, _ = _ranges(chunk, real)
        return _at_least(high, low), _at_least(low, high) & both_whole
    if mask is masks.left:
        return _left_relations(chunk, stream, real, both_whole)
    some, every = torch.zeros_like(both_whole), both_whole.clone()
    clean_low, clean_high, has_clean = _ranges(chunk, real & (stream == CLEAN))
    for number in range(1, draws + 1):
        low, high, has = _ranges(chunk, real & (stream == number))
        touching = (low[:, :, None] <= high[:, None, :]) & (high[:, :, None] >= low[:, None, :])
        one = (
            (low == high)[:, :, None]
            & (low[:, :, None] == low[:, None, :])
            & (high[:, :, None] == high[:, None, :])
        )
        some |= touching | (high[:, :, None] > clean_low[:, None, :])
        every &= ~(has[:, :, None] & has[:, None, :]) | one
        every &= ~(has[:, :, None] & has_clean[:, None, :]) | (low[:, :, None] > clean_high[:, None, :])
        every &= ~(has_clean[:, :, None] & has[:, None, :])
        for other in range(1, number):
            has_other = (real & (stream == other)).any(dim=-1)
            every &= ~(has[:, :, None] & has_other[:, None, :]) & ~(has_other[:, :, None] & has[:, None, :])
    some |= _at_least(clean_high, clean_low)
    every &= ~(has_clean[:, :, None] & has_clean[:, None, :]) | _at_least(clean_low, clean_high)
    return some, every


def _left_relations(chunk: Tensor, stream: Tensor, real: Tensor, both_whole: Tensor) -> tuple[Tensor, Tensor]:
    low, high, has = _ranges(chunk, real & (stream == CLEAN))
    seed_low, seed_high, has_seed = _ranges(chunk, real & (stream != CLEAN))
    some = _at_least(high, low) | (seed_high[:, :, None] > low[:, None, :]) | torch.diag_embed(has_seed)
    # within chunk 0, whose tokens see what stands before them, tiles are left to the predicate
    above = (low[:, :, None] > high[:, None, :]) | (_at_least(low, high) & (high >= 1)[:, None, :])
    every = both_whole & ~has_seed[:, None, :]
    every &= ~(has[:, :, None] & has[:, None, :]) | above
    every &= ~(has_seed[:, :, None] & has[:, None, :]) | (seed_low[:, :, None] > high[:, None, :])
    return some, every


def _noise_relations(slots: Slots, real: Tensor, both_whole: Tensor, block: int) -> tuple[Tensor, Tensor]:
    masked = _blocks(slots.masked, block, False)
    visible = (real & ~masked).any(dim=-1)
    itself = torch.diag_embed((real & masked).any(dim=-1))
    some = (real.any(dim=-1)[:, :, None] & visible[:, None, :]) | itself
    every = both_whole & (~masked).all(dim=-1)[:, None, :]
    if block == 1:  # a tile of one masked slot sees itself, wholly
        every |= itself & both_whole
    return some, every


def _causal_relations(real: Tensor, both_whole: Tensor) -> tuple[Tensor, Tensor]:
    number = real.shape[1] * real.shape[2]
    place = torch.arange(number, device=real.device).view(1, real.shape[1], real.shape[2])
    low, high, _ = _ranges(place.expand_as(real), real)
    return _at_least(high, low), _at_least(low, high) & both_whole


def _at_least(left: Tensor, right: Tensor) -> Tensor:
    return left[:, :, None] >= right[:, None, :]


def _blocks(x: Tensor, block: int, fill: int | bool) -> Tensor:
    """(B, S) to (B, T, block), the last tile filled up."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % block), value=fill).unflatten(1, (-1, block))


def _ranges(values: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Smallest and largest value of each tile where `where`, and whether there is any: an empty tile has none
    that is reached (smallest beyond everything, largest below everything)."""
    low = values.masked_fill(~where, _FAR).amin(dim=-1)
    high = values.masked_fill(~where, -_FAR).amax(dim=-1)
    return low, high, where.any(dim=-1)


@cache
def _compiled() -> Any:
    return torch.compile(_flex_attention, dynamic=False)


def flex_attention(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
    """FlexAttention on (B, H, S, D): compiled where it is meant to run, eager on the CPU."""
    run = _flex_attention if q.device.type == "cpu" or torch.compiler.is_compiling() else _compiled()
    return run(q, k, v, block_mask=block_mask, enable_gqa=True)
