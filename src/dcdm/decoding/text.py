"""One text to write: its windows, its noise, how it ends and what it cost.

A canvas is BOS, the prompt and MASKs. A text that does not fit into one is written window by window, the end of
what is there being the prompt of the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from dcdm.decoding.config import DecodingConfig
from dcdm.keys import Key
from dcdm.model.layout import widen

COSTS = ("new_tokens", "forwards", "rounds", "computed", "reused", "reencoded", "prefix")
"""What a text costs; `Statistics` says what each means."""


@dataclass(frozen=True)
class Event:
    """Tokens that one forward pass committed in one row; those after an EOS are discarded in the end."""

    row: int
    window: int
    """Number of the window, from 0."""
    forward: int
    """Number of the row's forward pass within its window, from 1."""
    chunk: int
    """Number of the chunk within its window, from 1 in the order of filling."""
    positions: list[int]
    """In the row's whole text, BOS at 0."""
    tokens: list[int]
    log_p: list[float]
    """What the model itself gave each token, before temperature and truncation."""
    lanes: list[int] = field(default_factory=list)
    """The lane of each position, from 1; [] where the model does not write in lanes."""


@dataclass(frozen=True)
class Ended:
    """How one row ended, for those who do not wait for the whole batch."""

    completion: list[int]
    finished: str
    costs: dict[str, int]


@dataclass
class BatchRow:
    """One text to write, and how far it is: a row of a `ContinuousBatch` while its windows are being written."""

    prompt: list[int]
    """Token ids, BOS first, MASK where there is a blank."""
    new_tokens: int
    """To write behind the prompt."""
    decoding: DecodingConfig
    """Resolved for the model."""
    window_length: int
    """Positions of a canvas."""
    overlap: int
    """Tokens of what is written that begin the next canvas."""
    seed: int = 0
    index: int = 0
    """Seed and index alone decide the text's noise."""
    eos_id: int | None = None
    row: int = 0
    """Its number in events."""
    cancel: Callable[[], bool] | None = None
    """Asked between forward passes."""
    stop: Callable[[list[int]], bool] | None = None
    """Asked after each window, with the completion so far."""
    on_event: Callable[[Event], None] | None = None
    on_end: Callable[[Ended], None] | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        """The whole text so far."""
        self.left = self.new_tokens
        self.forwards = 0
        """Forward passes so far that brought it tokens."""
        self.finished = ""
        """Why it ended: "eos", "length", "stop" or "cancelled"; empty while it is being written."""
        self.costs = dict.fromkeys(COSTS, 0)
        self.window_number = 0
        """Of its window, from 0."""
        self.lanes: list[int] = []
        """Of each position of the window, where the model writes in lanes."""
        self._key = Key(self.seed).fold("generate")

    def canvas(self, bos_id: int, mask_id: int) -> list[int]:
        """The next window: what begins it, and MASKs."""
        self.context = self.tokens
        if self.window_number:
            self.context = [bos_id, *self.tokens[max(1, len(self.tokens) - self.overlap) :]]
            self.costs["reencoded"] += len(self.context)
        self.size = min(self.left, self.window_length - len(self.context))
        self.offset = len(self.tokens) - len(self.context)
        return self.context + [mask_id] * self.size

    def noise(self, use: str, length: int) -> Tensor:
        """(1, L) uniform: one number per position, whatever the batch and its padding."""
        drawn = self._key.fold(use, self.index, self.window_number).uniform(min(self.window_length, length))[None]
        return widen(drawn, length, 0.0)

    def committed(self, event: Event) -> None:
        if self.on_event is not None:
            self.on_event(event)

    def accept(self, line: list[int], mask_id: int) -> None:
        """Take over what a window wrote, and say so if that was the last."""
        start = len(self.context)
        new = line[start : start + self.size]
        blanks = sum(a == mask_id != b for a, b in zip(self.context, line, strict=False))
        before = line[:start] if self.context is self.tokens else self.tokens  # the first window may have blanks
        self.tokens = before + new
        self.left -= self.size
        ends = self.eos_id is not None and self.eos_id in new
        kept = new.index(self.eos_id) + 1 if ends else self.size  # type: ignore[arg-type]
        self.costs["new_tokens"] += blanks + sum(token != mask_id for token in new[:kept])
        if not self.finished:  # not cancelled
            if ends:
                self.tokens = self.tokens[: len(self.tokens) - self.size + kept]
                self.finished = "eos"
            elif self.stop is not None and self.stop(self.completion(mask_id)):
                self.finished = "stop"
            elif self.left <= 0:
                self.finished = "length"
        self.window_number += 1
        if self.finished and self.on_end is not None:
            self.on_end(Ended(self.completion(mask_id), self.finished, self.costs))

    def completion(self, mask_id: int) -> list[int]:
        """What follows the prompt, without EOS; of a prompt with blanks its own text with the blanks filled."""
        ids = self.tokens[1 if mask_id in self.prompt else len(self.prompt) :]
        if self.finished == "eos":
            return ids[:-1]
        if self.finished == "cancelled" and mask_id in ids:
            return ids[: ids.index(mask_id)]
        return ids
