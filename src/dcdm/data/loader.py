"""Windows to batches: an order that depends on the seed alone, and a position that can be saved and moved.

B rows of a batch   L positions of a window
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from dcdm.config import DataError
from dcdm.data.store import Item
from dcdm.data.tokenizers import Tokenizer
from dcdm.keys import Key


class WindowSet(Protocol):
    """What a loader needs of a data set."""

    identity: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...


class Loader:
    """Endless batches of one rank for training, from global step `start` on.

    Step s takes samples s·G … (s+1)·G − 1 of the shuffled epochs, G = `global_batch`, whatever the number of
    ranks; rank `rank` of `world` gets its contiguous share of the rows, in micro-batches of `micro_batch`.

    Each batch is a dict that fits `dcdm.Batch(**batch)`: `tokens` and `prompt` (B, L), `index` (B,) in the data
    set, `rows` (B,) in the global batch, `num_rows` its size. Iterating resumes where the last iteration,
    `start` or a loaded state left off.
    """

    def __init__(
        self, dataset: WindowSet, *, seed: int, global_batch: int, rank: int = 0, world: int = 1,
        micro_batch: int | None = None, start: int = 0, num_workers: int = 0, pin_memory: bool = False,
    ) -> None:  # fmt: skip
        self.dataset, self.seed, self.global_batch = dataset, seed, global_batch
        self._samples = start * global_batch
        self._batches = partial(GlobalBatches, Key(seed), len(dataset), global_batch, rank, world, micro_batch)
        self.micro_steps = self._batches().micro_steps
        self._num_workers, self._pin_memory = num_workers, pin_memory

    @property
    def epoch(self) -> float:
        """How often the data set has been seen."""
        return self._samples / len(self.dataset)

    def __iter__(self) -> Iterator[Item]:
        loader = DataLoader(
            _Numbered(self.dataset),
            batch_sampler=self._batches(self._samples),
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            collate_fn=partial(_collate, num_rows=self.global_batch),
            generator=torch.Generator(),  # else it would draw from the global one
        )
        for number, batch in enumerate(loader, start=1):
            if number % self.micro_steps == 0:  # counted when handed out: whoever holds it may save
                self._samples += self.global_batch
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position in whole steps handed out. It holds for any number of ranks, workers and micro-batches."""
        return {"samples": self._samples, "seed": self.seed, "data": self.dataset.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the last step that the saved loader handed out; takes effect at the next `iter`."""
        for name, now in (("seed", self.seed), ("data", self.dataset.identity)):
            if state[name] != now:
                raise DataError(
                    f"the saved position belongs to {name} {state[name]}, this loader has {now}; "
                    "resume with the same data, window length and seed"
                )
        self._samples = int(state["samples"])


def in_order(
    dataset: WindowSet, batch_size: int, *, rank: int = 0, world: int = 1, limit: int | None = None
) -> Iterator[Item]:
    """One pass for evaluation, unshuffled: every `world`-th window from `rank` on, of `limit` spread evenly."""
    count = len(dataset) if limit is None else min(limit, len(dataset))
    mine = [number * len(dataset) // count for number in range(rank, count, world)]
    for start in range(0, len(mine), batch_size):
        items = [dataset[i] for i in mine[start : start + batch_size]]
        yield {name: _stacked([item[name] for item in items]) for name in ("tokens", "prompt", "index")}


class _Numbered(Dataset[Item]):
    """A data set asked for (index, row) rather than index."""

    def __init__(self, dataset: WindowSet) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, pair: tuple[int, int]) -> Item:
        index, row = pair
        return {**self.dataset[index], "rows": row}


def _collate(items: list[Item], num_rows: int) -> Item:
    return {**{name: _stacked([item[name] for item in items]) for name in items[0]}, "num_rows": num_rows}


def _stacked(values: list[Any]) -> Tensor:
    return torch.stack(values) if isinstance(values[0], Tensor) else torch.tensor(values)


# --- which windows a step sees -----------------------------------------------------------------------------------


def sample_range(key: Key, first: int, count: int, total: int) -> Tensor:
    """Samples first … first+count−1 of the endless sequence of epochs over `total` windows.

    Each epoch is shuffled by the key and sees every window once.
    """
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


# --- a corpus in memory ------------------------------------------------------------------------------------------


def pack(documents: Iterable[str], tokenizer: Tokenizer, length: int) -> Tensor:
    """Windows (N, length): BOS, then the next length−1 tokens of the documents joined by EOS.

    What a preparation and `TextWindows` compute, in a few literal lines. No token is dropped but the tail that
    does not fill a window.
    """
    ids = tokenizer.encode_arrays(list(documents))
    stream = np.concatenate(
        [np.empty(0, dtype=np.int64), *(np.append(i.astype(np.int64), tokenizer.eos_id) for i in ids)]
    )
    count = len(stream) // (length - 1)
    if count == 0:
        raise DataError(
            f"the corpus has {len(stream)} tokens, fewer than one window of {length - 1}; "
            "give more text or a shorter length"
        )
    windows = np.full((count, length), tokenizer.bos_id, dtype=np.int64)
    windows[:, 1:] = stream[: count * (length - 1)].reshape(count, length - 1)
    return torch.from_numpy(windows)
