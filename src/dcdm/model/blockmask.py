"""FlexAttention's block masks, from the chunk ranges of tiles instead of the predicate on all pairs.

B batch   S slots   T tiles of `BLOCK` slots
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


def from_slots(mask: Mask, slots: Slots, num_queries: int, block: int = BLOCK) -> BlockMask:
    """The block mask of `mask` over slots sorted for it; no host sync, no B × S × S tensor."""
    cut = SlotTiles(
        _blocks(slots.chunk, block, -1), _blocks(slots.stream, block, CLEAN),
        _blocks(slots.masked, block, False), block,
    )  # fmt: skip
    some, every = RELATIONS[mask](cut)
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


@dataclass(frozen=True)
class SlotTiles:
    """Slots cut into tiles of `block`; each (B, T, block)."""

    chunk: Tensor
    stream: Tensor
    masked: Tensor
    block: int

    @property
    def real(self) -> Tensor:
        return self.chunk >= 0

    @property
    def both_whole(self) -> Tensor:
        """(B, T, T): pairs of tiles without padding."""
        whole = self.real.all(dim=-1)
        return whole[:, :, None] & whole[:, None, :]


Relations = tuple[Tensor, Tensor]
"""For each pair of tiles whether some, and whether every, query may attend to some or every key: (B, T, T)."""


def _chunk_causal_relations(tiles: SlotTiles) -> Relations:
    low, high, _ = ranges(tiles.chunk, tiles.real)
    return at_least(high, low), at_least(low, high) & tiles.both_whole


def _dual_stream_relations(tiles: SlotTiles) -> Relations:
    clean_low, clean_high, has_clean = ranges(tiles.chunk, tiles.real & (tiles.stream == CLEAN))
    low, high, has = ranges(tiles.chunk, tiles.real & (tiles.stream != CLEAN))
    touching = (low[:, :, None] <= high[:, None, :]) & (high[:, :, None] >= low[:, None, :])
    one = (
        (low == high)[:, :, None]
        & (low[:, :, None] == low[:, None, :])
        & (high[:, :, None] == high[:, None, :])
    )  # fmt: skip
    some = touching | (high[:, :, None] > clean_low[:, None, :]) | at_least(clean_high, clean_low)
    every = tiles.both_whole & (~(has[:, :, None] & has[:, None, :]) | one)
    every &= ~(has[:, :, None] & has_clean[:, None, :]) | (low[:, :, None] > clean_high[:, None, :])
    every &= ~(has_clean[:, :, None] & has[:, None, :])
    every &= ~(has_clean[:, :, None] & has_clean[:, None, :]) | at_least(clean_low, clean_high)
    return some, every


def _noise_relations(tiles: SlotTiles) -> Relations:
    real, masked = tiles.real, tiles.masked
    visible = (real & ~masked).any(dim=-1)
    itself = torch.diag_embed((real & masked).any(dim=-1))
    some = (real.any(dim=-1)[:, :, None] & visible[:, None, :]) | itself
    every = tiles.both_whole & (~masked).all(dim=-1)[:, None, :]
    if tiles.block == 1:  # a tile of one masked slot sees itself, wholly
        every |= itself & tiles.both_whole
    return some, every


def _causal_relations(tiles: SlotTiles) -> Relations:
    real = tiles.real
    place = torch.arange(real.shape[1] * real.shape[2], device=real.device).view(1, *real.shape[1:])
    low, high, _ = ranges(place.expand_as(real), real)
    return at_least(high, low), at_least(low, high) & tiles.both_whole


RELATIONS: dict[Mask, Callable[[SlotTiles], Relations]] = {
    masks.noise: _noise_relations,
    masks.causal: _causal_relations,
    masks.chunk_causal: _chunk_causal_relations,
    masks.dual_stream: _dual_stream_relations,
}
"""What tiles see of each other under each mask. A new mask adds its own."""


def at_least(left: Tensor, right: Tensor) -> Tensor:
    return left[:, :, None] >= right[:, None, :]


def _blocks(x: Tensor, block: int, fill: int | bool) -> Tensor:
    """(B, S) to (B, T, block), the last tile filled up."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % block), value=fill).unflatten(1, (-1, block))


def ranges(values: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
