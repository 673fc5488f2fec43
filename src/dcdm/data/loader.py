"""Windows to batches: an order that depends on the seed alone, and a position that can be saved and moved.

B rows of a batch   L positions of a window
"""

from __future__ import annotations

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
        pieces.append(_shuffled(key.fold("epoch", epoch), total)[begin:end])
        at += end - begin
    return torch.cat(pieces)


@lru_cache(maxsize=2)  # this epoch and the next
def _shuffled(key: Key, total: int) -> Tensor:
    return key.permutation(total)


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
