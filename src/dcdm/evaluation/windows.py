"""Tokens to the windows that a model reads, each knowing which of its tokens count.

T tokens of the corpus   L positions of a window   W windows
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dcdm.config import ConfigError
from dcdm.data.tokenizers import Tokenizer
from dcdm.evaluation.corpora import Tokens

ROUND = 32  # short windows are padded to a multiple of this, whatever stands beside them in a batch


@dataclass(frozen=True)
class WindowSettings:
    """How a corpus is cut."""

    stride: int | None = None
    """Of a window only the last so many tokens count, the earlier ones are given; None: windows share nothing."""
    apart: bool = False
    """Every document in windows of its own, instead of one stream as in training."""
    length: int | None = None
    """Positions, BOS among them; None: the model's context length."""
    limit: int | None = None
    """At most so many windows, spread evenly over the corpus."""

    def __post_init__(self) -> None:
        for name in ("stride", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")

    def check(self, length: int, longest: int) -> None:
        """Whether windows of `length` positions suit these settings and a model of `longest` positions."""
        if not 2 <= length <= longest:
            raise ConfigError(f"length={length} must lie between 2 and the model's max_position={longest}")
        if self.stride is not None and self.stride > length - 1:
            raise ConfigError(f"stride={self.stride} must be at most {length - 1}, the tokens of a window")


@dataclass(frozen=True)
class WindowBatch:
    tokens: Tensor
    """(B, L) BOS, tokens, PAD."""
    prompt: Tensor
    """(B, L) tokens that are given."""
    index: Tensor
    """(B,) number of the window in the corpus."""
    place: Tensor
    """(B, L) where in the corpus a counted token stands; −1 for all others."""

    @classmethod
    def of(cls, tokens: Tensor) -> WindowBatch:
        """Rows of tokens (B, L) of which nothing is given but BOS, numbered from 0."""
        rows, length = tokens.shape
        place = torch.arange(length).expand(rows, -1)
        return cls(tokens, torch.zeros(rows, length, dtype=torch.bool), torch.arange(rows), place)


class CorpusWindows:
    """The windows of a corpus, of which `chosen` are measured."""

    def __init__(self, corpus: Tokens, tokenizer: Tokenizer, length: int, settings: WindowSettings) -> None:
        self.corpus, self.tokenizer, self.length = corpus, tokenizer, length
        stride = length - 1 if settings.stride is None else settings.stride
        apart = settings.apart or corpus.prompt is not None
        borders = corpus.borders() if apart else np.array([0, len(corpus.ids)])
        self.spans = self._counting(_spans(borders, length - 1, stride))
        """(W, 3): a window's first token, its first that counts, and its end."""
        count = len(self.spans)
        kept = count if settings.limit is None else min(settings.limit, count)
        self.chosen = np.arange(kept) * count // kept

    def batches(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[WindowBatch]:
        """Every `world`-th chosen window from `rank` on, those of one padded size together."""
        mine = self.chosen[rank::world]
        sizes = self._padded(self.spans[mine, 2] - self.spans[mine, 0])
        for size in np.unique(sizes)[::-1].tolist():
            group = mine[sizes == size]
            for start in range(0, len(group), batch_size):
                yield self._batch(group[start : start + batch_size], size)

    def left_out(self) -> int:
        """Tokens of windows that are not chosen."""
        given = np.zeros(len(self.corpus.ids)) if self.corpus.prompt is None else self.corpus.prompt
        before = np.concatenate([[0], np.cumsum(given == 0)])
        counted = before[self.spans[:, 2]] - before[self.spans[:, 1]]
        return int(counted.sum() - counted[self.chosen].sum())

    def cut_documents(self) -> int:
        """Documents among the chosen windows that do not lie whole in one of them."""
        begin, _, end = self.spans[self.chosen].T
        borders = self.corpus.borders()
        first = self.corpus.document[begin]
        last = self.corpus.document[end - 1]
        cut = set(first[borders[first] < begin].tolist()) | set(last[borders[last + 1] > end].tolist())
        return len(cut)

    def _counting(self, spans: np.ndarray) -> np.ndarray:
        """Without those that hold nothing but a prompt."""
        if self.corpus.prompt is None:
            return spans
        before = np.concatenate([[0], np.cumsum(~self.corpus.prompt)])
        return spans[before[spans[:, 2]] > before[spans[:, 1]]]

    def _padded(self, tokens: np.ndarray) -> np.ndarray:
        return np.minimum(self.length, -(-(tokens + 1) // ROUND) * ROUND)

    def _batch(self, numbers: np.ndarray, size: int) -> WindowBatch:
        tokens = np.full((len(numbers), size), self.tokenizer.pad_id, dtype=np.int64)
        place = np.full((len(numbers), size), -1, dtype=np.int64)
        tokens[:, 0] = self.tokenizer.bos_id
        for row, (begin, first, end) in enumerate(self.spans[numbers].tolist()):
            tokens[row, 1 : 1 + end - begin] = self.corpus.ids[begin:end]
            place[row, 1 + first - begin : 1 + end - begin] = np.arange(first, end)
        if self.corpus.prompt is not None:
            place = np.where((place >= 0) & self.corpus.prompt[place], -1, place)
        prompt = (place < 0) & (tokens != self.tokenizer.pad_id)
        return WindowBatch(*(torch.from_numpy(array) for array in (tokens, prompt, numbers, place)))


def _spans(borders: np.ndarray, room: int, stride: int) -> np.ndarray:
    """Windows of up to `room` tokens between borders; after a stretch's first one each counts `stride` more."""
    spans = []
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        counted = start
        while counted < stop:
            end = min(stop, start + room if counted == start else counted + stride)
            spans.append((counted if stride == room else max(start, end - room), counted, end))
            counted = end
    return np.array(spans, dtype=np.int64).reshape(-1, 3)
