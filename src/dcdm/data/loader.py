"""Windows to batches: an order that depends on the seed alone, and a position that can be saved and moved.

B rows of a batch   L positions of a window
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import cycle
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dcdm.config import DataError
from dcdm.data.store import Item
from dcdm.data.tokenizers import Tokenizer
from dcdm.keys import Key

MOST_SHUFFLED = 1 << 22
"""Windows of which an epoch's order is a list in memory; of more it is computed, place by place."""
ROUNDS = 6


class WindowSet(Protocol):
    """What a loader needs of a data set."""

    identity: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...


class Loader:
    """Endless batches of one rank for training.

    Step s takes samples s·G … (s+1)·G − 1 of the shuffled epochs, G = `global_batch`, whatever the number of
    ranks; rank `rank` of `world` gets its contiguous share of the rows, in micro-batches of `micro_batch`.

    Each batch is a dict that fits `dcdm.Batch(**batch)`: `tokens` and `prompt` (B, L), `index` (B,) in the data
    set, `rows` (B,) in the global batch, `num_rows` its size. Iterating resumes where the last iteration or a
    loaded state left off.
    """

    def __init__(
        self, dataset: WindowSet, *, seed: int, global_batch: int, rank: int = 0, world: int = 1,
        micro_batch: int | None = None, num_workers: int = 0, pin_memory: bool = False,
    ) -> None:  # fmt: skip
        if not len(dataset):
            raise DataError("the data set is empty")
        if not 0 <= rank < world:
            raise DataError(f"rank={rank} is not one of world={world}")
        if global_batch < 1 or global_batch % world:
            raise DataError(f"global_batch={global_batch} must be a multiple of the number of ranks, {world}")
        share = global_batch // world
        size = share if micro_batch is None else micro_batch
        if not 1 <= size <= share:
            raise DataError(f"micro_batch={size} must lie between 1 and a rank's share of a step, {share}")
        self.dataset, self.seed, self.global_batch = dataset, seed, global_batch
        stop = (rank + 1) * share
        self._micro_rows = [range(at, min(at + size, stop)) for at in range(rank * share, stop, size)]
        self._samples = 0
        self._order_of = dataset.identity + ("/computed" if len(dataset) > MOST_SHUFFLED else "")
        self._num_workers, self._pin_memory = num_workers, pin_memory

    @property
    def micro_steps(self) -> int:
        """Micro-batches of one step."""
        return len(self._micro_rows)

    def __iter__(self) -> Iterator[Item]:
        loader: Iterable[Item] = DataLoader(
            self.dataset,  # type: ignore[arg-type]
            batch_sampler=self._indices(self._samples),
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            collate_fn=_collate,
            generator=torch.Generator(),  # else it would draw from the global one
        )
        for rows, batch in zip(cycle(self._micro_rows), loader):
            if rows == self._micro_rows[-1]:  # counted when handed out: whoever holds it may save
                self._samples += self.global_batch
            yield {**batch, "rows": torch.tensor(rows), "num_rows": self.global_batch}

    def _indices(self, first: int) -> Iterator[list[int]]:
        """The windows of this rank's micro-batches, from sample `first` on, without end."""
        while True:
            samples = sample_range(Key(self.seed), first, self.global_batch, len(self.dataset)).tolist()
            yield from ([samples[row] for row in rows] for rows in self._micro_rows)
            first += self.global_batch

    def state_dict(self) -> dict[str, Any]:
        """The position in whole steps handed out. It holds for any number of ranks, workers and micro-batches."""
        return {"samples": self._samples, "seed": self.seed, "data": self._order_of}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the last step that the saved loader handed out; takes effect at the next `iter`."""
        for name, now in (("seed", self.seed), ("data", self._order_of)):
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
        yield _collate([dataset[i] for i in mine[start : start + batch_size]])


def _collate(items: list[Item]) -> Item:
    stacked = {name: torch.stack([item[name] for item in items]) for name in ("tokens", "prompt")}
    return {**stacked, "index": torch.tensor([item["index"] for item in items])}


def sample_range(key: Key, first: int, count: int, total: int) -> Tensor:
    """Samples first … first+count−1 of the endless sequence of epochs over `total` windows.

    Each epoch is shuffled by the key and sees every window once.
    """
    pieces, at, stop = [], first, first + count
    while at < stop:
        epoch, begin = divmod(at, total)
        end = min(total, begin + stop - at)
        pieces.append(_epoch(key.fold("epoch", epoch), begin, end, total))
        at += end - begin
    return torch.cat(pieces)


def _epoch(key: Key, begin: int, end: int, total: int) -> Tensor:
    """The windows at places begin … end−1 of an epoch."""
    return _shuffled(key, total)[begin:end] if total <= MOST_SHUFFLED else computed_order(key, begin, end, total)


@lru_cache(maxsize=2)  # this epoch and the next
def _shuffled(key: Key, total: int) -> Tensor:
    return key.permutation(total)


def computed_order(key: Key, begin: int, end: int, total: int) -> Tensor:
    """Places begin … end−1 of a permutation of `total` windows of which nothing is kept in memory.

    A Feistel network: a number is two digits to the base √total, rounded up. A round adds to one digit what the
    key makes of the other one, which could be undone, so that no two places get the same window. What falls on one
    of the few numbers beyond `total` is sent through again, until it does not.
    """
    base = np.uint64(math.isqrt(total - 1) + 1)
    rounds = torch.randint(2**62, (ROUNDS,), generator=key.fold("rounds").generator()).numpy().astype(np.uint64)
    numbers = np.arange(begin, end, dtype=np.uint64)
    beyond = np.ones(len(numbers), dtype=bool)
    while beyond.any():
        one, other = np.divmod(numbers[beyond], base)
        for salt in rounds:
            one, other = other, (one + _scrambled(other + salt) % base) % base
        numbers[beyond] = one * base + other
        beyond = numbers >= total
    return torch.from_numpy(numbers.astype(np.int64))


def _scrambled(numbers: np.ndarray) -> np.ndarray:
    """Numbers of 64 bits, every bit of each depending on all of its bits (SplitMix64's last steps)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


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
