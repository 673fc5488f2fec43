"""Which windows a step sees: shuffled epochs one after another, the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.data import Sampler

from dcdm.config import DataError
from dcdm.keys import Key


def sample_indices(key: Key, step: int, batch_size: int, total: int) -> Tensor:
    """The windows of one step: epochs without replacement, each shuffled by the seed."""
    return sample_range(key, step * batch_size, batch_size, total)


def sample_range(key: Key, first: int, count: int, total: int) -> Tensor:
    """Samples first … first+count−1 of the endless sequence of shuffled epochs over `total` windows."""
    pieces, at, stop = [], first, first + count
    while at < stop:
        epoch, begin = divmod(at, total)
        end = min(total, begin + stop - at)
        pieces.append(_epoch(key, epoch, total)[begin:end])
        at += end - begin
    return torch.cat(pieces)


@lru_cache(maxsize=2)  # this epoch and the next
def _epoch(key: Key, epoch: int, total: int) -> Tensor:
    return key.fold("epoch", epoch).permutation(total)


class GlobalBatches(Sampler[list[tuple[int, int]]]):
    """One rank's micro-batches, without end: (index in the data set, row in the global batch) of every item.

    A step takes the next `global_batch` samples; rank r of `world` takes rows r·G/world … (r+1)·G/world − 1.
    """

    def __init__(
        self, key: Key, total: int, global_batch: int, rank: int = 0, world: int = 1,
        micro_batch: int | None = None, first: int = 0,
    ) -> None:  # fmt: skip
        if total < 1:
            raise DataError("the data set is empty")
        if not 0 <= rank < world:
            raise DataError(f"rank={rank} is not one of world={world}")
        if global_batch < 1 or global_batch % world:
            raise DataError(f"global_batch={global_batch} must be a multiple of the number of ranks, {world}")
        share = global_batch // world
        micro_batch = share if micro_batch is None else micro_batch
        if not 1 <= micro_batch <= share:
            raise DataError(f"micro_batch={micro_batch} must lie between 1 and a rank's share of a step, {share}")
        self.key, self.total, self.global_batch, self.first = key, total, global_batch, first
        self.rows = range(rank * share, (rank + 1) * share)
        self.micro_batch = micro_batch

    @property
    def micro_steps(self) -> int:
        """Micro-batches of one step."""
        return -(-len(self.rows) // self.micro_batch)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        first = self.first
        while True:
            indices = sample_range(self.key, first, self.global_batch, self.total).tolist()
            for start in range(0, len(self.rows), self.micro_batch):
                yield [(indices[row], row) for row in self.rows[start : start + self.micro_batch]]
            first += self.global_batch
