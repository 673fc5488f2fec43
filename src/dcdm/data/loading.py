"""Prepared shards to batches: windows of any length, and a loader whose position can be saved and moved.

L positions of a window
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from dcdm.config import NUM_SPECIALS, DataError
from dcdm.data.ordering import GlobalBatches
from dcdm.data.settings import Split
from dcdm.data.store import Overlong, PreparedData, TokenStream
from dcdm.keys import Key

log = logging.getLogger(__name__)

Item = dict[str, Any]


class WindowSet(Protocol):
    """What a loader needs of a data set."""

    identity: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...


class Windows:
    """A split's stream of tokens in windows: window i is BOS and the next L−1 tokens after window i−1's.

    An item holds `tokens` (L,), `prompt` (L,), here all False, and `index`.
    """

    def __init__(self, stream: TokenStream, length: int, bos_id: int, identity: str) -> None:
        self.stream, self.length, self.bos_id, self.identity = stream, length, bos_id, identity

    def __len__(self) -> int:
        return len(self.stream) // (self.length - 1)

    def __getitem__(self, index: int) -> Item:
        index = _checked(index, len(self))
        tokens = np.full(self.length, self.bos_id, dtype=np.int64)
        tokens[1:] = self.stream.read(index * (self.length - 1), (index + 1) * (self.length - 1))
        prompt = torch.zeros(self.length, dtype=torch.bool)
        return {"tokens": torch.from_numpy(tokens), "prompt": prompt, "index": index}


class ExampleWindows:
    """One example per window: BOS, prompt, response with its EOS, then PAD; `prompt` is True on the first two.

    `truncated` counts the examples whose response's end is cut off, `dropped` those that are left out: all
    that are too long if asked for, and those whose prompt leaves no place for a response.
    """

    def __init__(
        self, stream: TokenStream, lengths: np.ndarray, length: int, bos_id: int, pad_id: int,
        overlong: Overlong, identity: str,
    ) -> None:  # fmt: skip
        self.stream, self.length, self.bos_id, self.pad_id, self.identity = stream, length, bos_id, pad_id, identity
        whole, prompts = lengths.T
        room = length - 1
        kept = whole <= room if overlong == "drop" else prompts < room
        self.truncated = int((kept & (whole > room)).sum())
        self.dropped = int((~kept).sum())
        starts = np.cumsum(whole) - whole
        self._starts, self._lengths, self._prompts = starts[kept], np.minimum(whole[kept], room), prompts[kept]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Item:
        index = _checked(index, len(self))
        start, size, prompt_size = (int(a[index]) for a in (self._starts, self._lengths, self._prompts))
        tokens = np.full(self.length, self.pad_id, dtype=np.int64)
        tokens[0] = self.bos_id
        tokens[1 : size + 1] = self.stream.read(start, start + size)
        prompt = torch.arange(self.length) <= prompt_size
        return {"tokens": torch.from_numpy(tokens), "prompt": prompt, "index": index}


def dataset_of(prepared: PreparedData, split: Split, length: int, overlong: Overlong) -> Windows | ExampleWindows:
    """See `PreparedData.dataset`."""
    if length < 2:
        raise DataError(f"length={length} must be at least 2: BOS and a token")
    if overlong not in ("truncate", "drop"):
        raise DataError(f"overlong={overlong!r} is not known; choose truncate or drop")
    where = f"the {split} split of {prepared.folder}"
    bos_id, pad_id, _ = range(prepared.vocab_size - NUM_SPECIALS, prepared.vocab_size)
    identity = f"{prepared.fingerprint}/{split}/{length}"
    if not prepared.fine_tuning:
        windows = Windows(prepared.stream(split), length, bos_id, identity)
        if not len(windows):
            raise DataError(
                f"{where} has {prepared.tokens(split)} tokens, fewer than one window of {length - 1} and BOS; "
                f"{_more_text(split)} or a shorter length"
            )
        return windows
    examples = ExampleWindows(
        prepared.stream(split), prepared.lengths(split), length, bos_id, pad_id,
        overlong, f"{identity}/{overlong}",
    )  # fmt: skip
    if examples.truncated or examples.dropped:
        log.warning(
            "%s: of %d examples, %d are cut and %d left out, being longer than a window of %d",
            where, prepared.documents(split), examples.truncated, examples.dropped, length,
        )  # fmt: skip
    if not len(examples):
        raise DataError(f"{where} has no example for a window of {length}; {_more_text(split)} or a longer length")
    return examples


def _more_text(split: Split) -> str:
    if split == "train":
        return "give more text"
    return "give more text, name a validation source (--validation), raise validation_share (--validation-share)"


class Loader:
    """Endless batches of one rank, each a dict that fits `Batch(**batch)`.

    `tokens` and `prompt` (B, L), `index` (B,) in the data set, `rows` (B,) in the global batch, `num_rows` its
    size. Iterating goes on where the last iteration, `start` or a loaded state left off.
    """

    def __init__(
        self, dataset: WindowSet, seed: int, global_batch: int, rank: int, world: int,
        micro_batch: int | None, start: int, num_workers: int, pin_memory: bool,
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
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital'")  # torchdata 0.11 under newer torch
            loader = StatefulDataLoader(
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
        """Go on after the last step that the saved loader handed out; takes effect at the next `iter`."""
        for name, now in (("seed", self.seed), ("data", self.dataset.identity)):
            if state[name] != now:
                raise DataError(
                    f"the saved position belongs to {name} {state[name]}, this loader has {now}; "
                    "resume with the same data, window length and seed"
                )
        self._samples = int(state["samples"])


def loader(
    dataset: WindowSet,
    *,
    seed: int,
    global_batch: int,
    rank: int = 0,
    world: int = 1,
    micro_batch: int | None = None,
    start: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Loader:
    """Batches for training from global step `start` on.

    Step s takes samples s·G … (s+1)·G − 1 of the shuffled epochs, G = `global_batch`, whatever the number of
    ranks; rank `rank` of `world` gets its contiguous share of the rows, in micro-batches of `micro_batch`.
    """
    return Loader(dataset, seed, global_batch, rank, world, micro_batch, start, num_workers, pin_memory)


def in_order(
    dataset: WindowSet, batch_size: int, *, rank: int = 0, world: int = 1, limit: int | None = None
) -> Iterator[Item]:
    """One pass for evaluation: every `world`-th window (of the first `limit`) from `rank` on, unshuffled."""
    count = len(dataset) if limit is None else min(limit, len(dataset))
    mine = range(rank, count, world)
    for start in range(0, len(mine), batch_size):
        items = [dataset[i] for i in mine[start : start + batch_size]]
        yield {name: _stacked([item[name] for item in items]) for name in ("tokens", "prompt", "index")}


class _Numbered:
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


def _stacked(values: list[Any]) -> torch.Tensor:
    return torch.stack(values) if isinstance(values[0], torch.Tensor) else torch.tensor(values)


def _checked(index: int, size: int) -> int:
    if not -size <= index < size:
        raise IndexError(f"window {index} of {size}")
    return index % size
