"""Tiles: runs of queries with the key ranges they may attend to, read off the chunk offsets of sorted slots.

Most tiles need no mask at all. Chunks too small for a tile of their own share one, under a mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dcdm.model import masks
from dcdm.model.masks import CLEAN, Mask, Slots

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
