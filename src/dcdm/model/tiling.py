"""Tiles: runs of queries with the key ranges they may attend to, read off the chunk offsets of sorted slots.

Most tiles need no mask at all. Chunks too small for a tile of their own share one, under a mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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


def runs_of(stream: list[int], chunk: list[int]) -> list[Run]:
    """The runs of one row; fillers are left out."""
    runs, start = [], 0
    for (number, name), members in itertools.groupby(zip(stream, chunk, strict=True)):
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
        for tile in _row_tiles(mask, slots[r0])
        if tile.q0 < num_queries
    ]
    whole = Tile(0, rows, 0, num_queries, 0, total, masked=True)
    if whole.pairs + CALL_COST < sum(t.pairs + CALL_COST for t in tiles):
        return [whole]
    return tiles


def _row_tiles(mask: Mask, row: Slots) -> Iterator[Tile]:
    """Tiles of one row, rows not yet filled in."""
    if mask is masks.noise:
        yield from _noise_tiles(row)
    elif mask is masks.left:
        yield from _left_tiles(runs_of(row.stream.tolist(), row.chunk.tolist()))
    elif mask is masks.causal:
        total = len(row.chunk)
        for start in range(0, total, ROW_BLOCK):
            end = min(total, start + ROW_BLOCK)
            yield Tile(0, 0, start, end, 0, end, masked=True)
    else:
        yield from _chunk_tiles(mask, runs_of(row.stream.tolist(), row.chunk.tolist()))


def _noise_tiles(row: Slots) -> Iterator[Tile]:
    real = int((row.chunk >= 0).sum())
    visible = real - int(row.masked.sum())
    if visible:
        yield Tile(0, 0, 0, visible, 0, visible)
    if real > visible:
        yield Tile(0, 0, visible, real, 0, visible, own=True)


def _chunk_tiles(mask: Mask, runs: list[Run]) -> Iterator[Tile]:
    clean = [run for run in runs if run.stream == CLEAN]
    for _, of_stream in itertools.groupby(runs, key=lambda run: run.stream):
        for group in _shared(list(of_stream)):
            q0, q1, masked = group[0].start, group[-1].end, len(group) > 1
            if mask is masks.chunk_causal or group[0].stream == CLEAN:
                first = runs[0].start if mask is masks.chunk_causal else clean[0].start
                yield Tile(0, 0, q0, q1, first, q1, masked=masked)
                continue
            earlier = [run for run in clean if run.chunk < group[-1].chunk]
            if earlier:
                yield Tile(0, 0, q0, q1, earlier[0].start, earlier[-1].end, q0, q1, masked=masked)
            else:
                yield Tile(0, 0, q0, q1, q0, q1, masked=masked)


def _left_tiles(runs: list[Run]) -> Iterator[Tile]:
    """Clean slots see all up to their chunk's end; seed slots the clean ones of earlier chunks, and themselves."""
    clean = [run for run in runs if run.stream == CLEAN]
    for group in _shared(clean, ROW_BLOCK):
        alone = len(group) == 1 and (group[0].chunk > 0 or group[0].end - group[0].start == 1)
        yield Tile(0, 0, group[0].start, group[-1].end, clean[0].start, group[-1].end, masked=not alone)
    for group in _shared([run for run in runs if run.stream != CLEAN]):
        q0, q1 = group[0].start, group[-1].end
        earlier = [run for run in clean if run.chunk < group[-1].chunk]
        a0, a1 = (earlier[0].start, earlier[-1].end) if earlier else (0, 0)
        if len(group) == 1:
            yield Tile(0, 0, q0, q1, a0, a1, own=True)
        else:
            yield Tile(0, 0, q0, q1, a0, a1, q0, q1, masked=True)


def _shared(runs: list[Run], smallest: int = SMALLEST) -> Iterator[list[Run]]:
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
