"""Slots in an order that makes masks cheap, sorted by chunk or visible before masked, and the tiles read off it.

RoPE takes original positions, so a pass may hold its slots in any order. Sorted, what a run of queries may
attend to is one or two ranges of keys, and slots that nobody reads are left out. A tile is such a run with its
ranges. Most need no mask at all; chunks too small for a tile of their own share one, under a mask.

    B batch   L positions   N, M slots of the noisy stream and of the clean one   S = N + M
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dcdm.model import masks
from dcdm.model.masks import CLEAN, NOISY, Mask, Slots, read_slots, there

_LAST = torch.iinfo(torch.long).max  # sorts behind every chunk


@dataclass(frozen=True)
class Layout:
    """Which slot holds what."""

    slots: Slots
    """(B, S); slots of chunk −1 are fillers."""
    source: Tensor
    """(B, S): where a slot's content comes from, in the concatenation of the streams (L each, clean last)."""
    num_noisy: int
    """The first slots: all noisy ones are among them, and of most rows no others."""
    home: Tensor
    """(B, L): the slot of every noisy position; meaningless where `held` is False."""
    held: Tensor
    """(B, L) bool: whether a noisy position has a slot."""

    def packed(self, size: int | None = None) -> Layout:
        """The same slots without fillers between the streams of a row: rows are padded at their ends alone, all to
        `size`, by default to what the longest needs.

        A row with a long prompt has few noisy slots and many clean ones; apart, each stream would be as long as in
        the row that has most of it. Of a row with fewer noisy slots some clean ones come before `num_noisy`.
        """
        kept, noisy = self.slots.chunk >= 0, size
        if size is None or noisy is None:
            size = max(1, int(kept.sum(dim=-1).max()))
            noisy = max(1, int(kept[:, : self.num_noisy].sum(dim=-1).max()))
        if size == kept.shape[1]:
            return self
        order = kept.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :size]
        home = inverse(order, kept.shape[1]).gather(1, self.home).masked_fill(~self.held, 0)
        return Layout(self.slots.gather(order), self.source.gather(1, order), noisy, home, self.held)

    def in_few_shapes(self) -> Layout:
        """Packed to L slots or a few more where no row needs more, as MDLM and lanes, and that is known without
        asking a device: two more shapes to compile, and half the work."""
        most, length = self.slots.chunk.shape[1], self.home.shape[1]
        if self.slots.chunk.device.type == "cpu":
            needed = int((self.slots.chunk >= 0).sum(dim=-1).max())
            most = next((size for size in (length, length + 128) if needed <= size < most), most)
        return self.packed(most)

    def gather(self, streams: Tensor) -> Tensor:
        """Values of the streams, (B, 2L) or with a trailing dimension, to (B, S, …)."""
        return _pick(streams, self.source)

    def restore(self, slot_values: Tensor) -> Tensor:
        """Values of the noisy slots (B, N, …) to positions (B, L, …); 0 where a position has no slot."""
        picked = _pick(slot_values, self.home)
        held = there(self.held, picked.device)
        return picked.masked_fill(~(held if picked.ndim == 2 else held[..., None]), 0)

    def restore_from(self, slot_values: Tensor, source: Tensor) -> Tensor:
        """As `restore`, with the values of other slots: those at these places (B, L) of the streams, one or two."""
        slot = inverse(self.source, 2 * source.shape[1]).gather(1, source)
        return replace(self, home=slot).restore(slot_values)


def _pick(values: Tensor, index: Tensor) -> Tensor:
    index = there(index, values.device)
    if values.ndim == 2:
        return values.gather(1, index)
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))


def sorted_stream(keep: Tensor, by: Tensor, compact: bool) -> tuple[Tensor, Tensor]:
    """Positions ordered by `by` with those not kept at the end: order (B, N) and which of them are kept."""
    order = torch.where(keep, by, _LAST).argsort(dim=-1, stable=True)
    if compact:
        order = order[:, : max(1, int(keep.sum(dim=-1).max()))]
    return order, keep.gather(1, order)


def dual_stream(ids: Tensor, masked: Tensor, compact: bool = True) -> Layout:
    """The noisy stream and the clean one, each sorted by chunk, without the slots that nobody reads.

    `compact` False keeps static shapes, or few of them, and so asks no device for a value.
    """
    length = ids.shape[1]
    noisy_read, clean_read = read_slots(ids).chunk(2, dim=-1)
    noisy_order, noisy_kept = sorted_stream(noisy_read, ids, compact)
    clean_order, clean_kept = sorted_stream(clean_read, ids, compact)
    slots = Slots.cat(
        slots_of(ids, noisy_order, noisy_kept, NOISY, masked),
        slots_of(ids, clean_order, clean_kept, CLEAN, torch.zeros_like(masked)),
    )
    source = torch.cat([noisy_order, clean_order + length], dim=1)
    place = Layout(slots, source, noisy_order.shape[1], inverse(noisy_order, length), noisy_read)
    return place.packed() if compact else place.in_few_shapes()


def chunk_sorted(ids: Tensor, masked: Tensor, compact: bool = False) -> Layout:
    """One stream sorted by chunk, padding last or, if `compact`, mostly left out."""
    order, kept = sorted_stream(ids >= 0, ids, compact)
    return _one_stream(slots_of(ids, order, kept, NOISY, masked), order, ids >= 0)


def visible_first(real: Tensor, masked: Tensor, compact: bool = False) -> Layout:
    """One stream with its visible tokens before its masked ones, padding as in `chunk_sorted`."""
    order, kept = sorted_stream(real, masked.long(), compact)
    return _one_stream(slots_of(torch.zeros_like(real, dtype=torch.long), order, kept, NOISY, masked), order, real)


def _one_stream(slots: Slots, order: Tensor, held: Tensor) -> Layout:
    return Layout(slots, order, order.shape[1], inverse(order, held.shape[1]), held)


def slots_of(ids: Tensor, order: Tensor, kept: Tensor, stream: int, masked: Tensor) -> Slots:
    chunk = torch.where(kept, ids.gather(1, order), -1)
    return Slots(order, chunk, torch.full_like(order, stream), masked.gather(1, order) & kept)


def inverse(order: Tensor, length: int) -> Tensor:
    """(B, L): where each position stands in `order`; 0 for those it leaves out."""
    place = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.zeros(len(order), length, dtype=torch.long, device=order.device).scatter_(1, order, place)


class RaggedIndex:
    """The True positions of each row, padded to the longest row; `rows` (X′,) leaves out the other rows.

    `most`, the number in the longest row, is read from the device unless it is given.
    """

    def __init__(self, where: Tensor, rows: Tensor | None = None, most: int | None = None) -> None:
        self.rows = torch.arange(len(where), device=where.device) if rows is None else rows
        self.rows = self.rows[:, None]
        where = where if rows is None else where[rows]
        count = where.sum(dim=-1)
        if most is None:
            most = int(count.max()) if len(count) else 0
        self.index = where.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :most]
        self.valid = torch.arange(most, device=where.device) < count[:, None]

    def pick(self, x_bl: Tensor) -> Tensor:
        """(B, L, …) to (B, X, …); fillers repeat other positions."""
        return x_bl[self.rows, self.index]

    def put(self, whole_bl: Tensor, part_bx: Tensor) -> None:
        """Write (B, X, …) back into (B, L, …), fillers left out."""
        valid = self.valid[(..., *[None] * (part_bx.ndim - 2))]
        kept = torch.where(valid, part_bx.to(whole_bl.dtype), self.pick(whole_bl))  # fillers are other positions
        whole_bl[self.rows, self.index] = kept


def stack_rows(first: Tensor, second: Tensor, filler: float) -> Tensor:
    """Rows (B, L, …) of both, one below the other; the shorter ones are filled up behind."""
    length = max(first.shape[1], second.shape[1])
    return torch.cat([widen(first, length, filler), widen(second, length, filler)])


def widen(x_bl: Tensor, length: int, filler: float) -> Tensor:
    """Rows (B, L, …) filled up behind."""
    if x_bl.shape[1] == length:
        return x_bl
    more = x_bl.new_full((len(x_bl), length - x_bl.shape[1], *x_bl.shape[2:]), filler)
    return torch.cat([x_bl, more], dim=1)


# --- tiles ----------------------------------------------------------------------------------------------------

SMALLEST = 64  # consecutive chunks share a tile until it has this many queries
ROW_BLOCK = 256  # queries of a tile under the causal mask of AR
CALL_COST = 4096  # what a tile costs beside its query–key pairs, in pairs


@dataclass(frozen=True)
class Tile:
    """Queries [q0, q1) of rows [r0, r1) see the keys [a0, a1) and [b0, b1), and their own slot if `own`."""

    r0: int
    r1: int
    q0: int
    q1: int
    a0: int
    a1: int
    b0: int = 0
    b1: int = 0
    masked: bool = False
    own: bool = False

    @property
    def num_keys(self) -> int:
        return self.a1 - self.a0 + self.b1 - self.b0

    @property
    def pairs(self) -> int:
        return (self.r1 - self.r0) * (self.q1 - self.q0) * (self.num_keys + self.own)

    def keys(self, x: Tensor, dim: int) -> Tensor:
        """The tile's part of a tensor over key slots, rows narrowed first."""
        first = x.narrow(dim, self.a0, self.a1 - self.a0)
        if self.b1 == self.b0:
            return first
        return torch.cat([first, x.narrow(dim, self.b0, self.b1 - self.b0)], dim=dim)


@dataclass(frozen=True)
class Run:
    """Consecutive slots of one stream and one chunk."""

    stream: int
    chunk: int
    start: int
    end: int


def runs_of(row: Slots) -> list[Run]:
    """The runs of one row; fillers are left out."""
    runs, start = [], 0
    for (number, name), members in itertools.groupby(zip(row.stream.tolist(), row.chunk.tolist(), strict=True)):
        end = start + sum(1 for _ in members)
        if name >= 0:
            runs.append(Run(number, name, start, end))
        start = end
    return runs


def rows_alike(mask: Mask, slots: Slots) -> bool:
    """Whether the mask of every row is that of the first."""
    decisive = (slots.chunk, slots.masked) if mask is masks.noise else (slots.chunk, slots.stream)
    return all(bool((field == field[:1]).all()) for field in decisive)


def tiles_of(mask: Mask, slots: Slots, num_queries: int) -> list[Tile]:
    """Tiles of the first `num_queries` slots under one of the masks of `masks.py`; slots must be sorted for it."""
    rows, total = slots.chunk.shape
    groups = [(0, rows)] if rows_alike(mask, slots) else [(row, row + 1) for row in range(rows)]
    tiles = [
        replace(tile, r0=r0, r1=r1, q1=min(tile.q1, num_queries))
        for r0, r1 in groups
        for tile in TILES[mask](slots[r0])
        if tile.q0 < num_queries
    ]
    whole = Tile(0, rows, 0, num_queries, 0, total, masked=True)
    if whole.pairs + CALL_COST < sum(t.pairs + CALL_COST for t in tiles):
        return [whole]
    return tiles


def _noise_tiles(row: Slots) -> Iterator[Tile]:
    real = int((row.chunk >= 0).sum())
    visible = real - int(row.masked.sum())
    if visible:
        yield Tile(0, 0, 0, visible, 0, visible)
    if real > visible:
        yield Tile(0, 0, visible, real, 0, visible, own=True)


def _causal_tiles(row: Slots) -> Iterator[Tile]:
    total = len(row.chunk)
    for start in range(0, total, ROW_BLOCK):
        end = min(total, start + ROW_BLOCK)
        yield Tile(0, 0, start, end, 0, end, masked=True)


def _chunk_causal_tiles(row: Slots) -> Iterator[Tile]:
    runs = runs_of(row)
    for _, of_stream in itertools.groupby(runs, key=lambda run: run.stream):
        for group in shared(list(of_stream)):
            yield Tile(0, 0, group[0].start, group[-1].end, runs[0].start, group[-1].end, masked=len(group) > 1)


def _dual_stream_tiles(row: Slots) -> Iterator[Tile]:
    runs = runs_of(row)
    clean = [run for run in runs if run.stream == CLEAN]
    for _, of_stream in itertools.groupby(runs, key=lambda run: run.stream):
        for group in shared(list(of_stream)):
            q0, q1, masked = group[0].start, group[-1].end, len(group) > 1
            if group[0].stream == CLEAN:
                yield Tile(0, 0, q0, q1, clean[0].start, q1, masked=masked)
                continue
            earlier = [run for run in clean if run.chunk < group[-1].chunk]
            if earlier:
                yield Tile(0, 0, q0, q1, earlier[0].start, earlier[-1].end, q0, q1, masked=masked)
            else:
                yield Tile(0, 0, q0, q1, q0, q1, masked=masked)


def shared(runs: list[Run], smallest: int = SMALLEST) -> Iterator[list[Run]]:
    """Runs that make a tile together: large ones alone, small ones in company."""
    group: list[Run] = []
    for run in runs:
        if group and run.end - run.start >= smallest:
            yield group
            group = []
        group.append(run)
        if run.end - group[0].start >= smallest:
            yield group
            group = []
    if group:
        yield group


TILES: dict[Mask, Callable[[Slots], Iterator[Tile]]] = {
    masks.noise: _noise_tiles,
    masks.causal: _causal_tiles,
    masks.chunk_causal: _chunk_causal_tiles,
    masks.dual_stream: _dual_stream_tiles,
}
"""The tiles of one row under each mask, r0 and r1 not yet filled in. A new mask adds its own."""
