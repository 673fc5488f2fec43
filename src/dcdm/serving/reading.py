"""Text from tokens that come out of order.

Text is given out as soon as everything before it is there: whole characters only, and nothing that could be the
beginning of a stop text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.text import Ended, Event

UNFINISHED = "\ufffd"  # how a part of a character decodes


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """What a token adds to a text, a space before it included; parts of characters show as �."""
    return tokenizer.pieces([token])[0].decode(errors="replace")


def own_costs(costs: Mapping[str, int]) -> dict[str, int]:
    """What a text would have cost by itself: what others sent before it must not show in its answer."""
    shared = costs.get("prefix", 0)
    own = {name: value for name, value in costs.items() if name != "prefix"}
    return {**own, "computed": own["computed"] + shared, "reused": own["reused"] - shared}


@dataclass
class Piece:
    """A part of a text."""

    text: str
    finish: str | None = None
    """In the last piece: "stop" (EOS or a stop text) or "length"."""


class TextReader:
    """Reads one row's events and says its text piece by piece; the joined pieces are `decode` of the tokens."""

    def __init__(
        self, tokenizer: Tokenizer, first: int, *, last: int | None = None, stops: Sequence[str] = (),
        eos_id: int = -1, begins: bool = False, in_pieces: bool = True,
    ) -> None:  # fmt: skip
        """The text takes the positions from `first` on, to `last` if something given follows it.

        If it `begins`, it has no prompt. If it is not wanted `in_pieces`, the last piece is all of it.
        """
        self.tokenizer, self.first, self.last, self.stops = tokenizer, first, last, tuple(stops)
        self.eos_id = eos_id if last is None else -1  # a blank is filled whole
        self.begins, self.in_pieces = begins, in_pieces
        self.satisfied = False
        self.text = ""
        self._waiting: dict[int, int] = {}  # by position: tokens that cannot be read yet
        self._ids: list[int] = []
        self._sent = 0
        self._settled = 0  # tokens before it are text
        self._group = 0  # where the last part of that text begins

    def event(self, event: Event, seconds: float = 0.0) -> Piece | None:
        for position, token in zip(event.positions, event.tokens, strict=True):
            if self.last is None or position <= self.last:
                self._waiting[position] = token
        while not self.satisfied and (following := self._waiting.get(self.first + len(self._ids))) is not None:
            if following == self.eos_id:
                break  # what stands behind it is no part of the text
            self._ids.append(following)
            self._settle()
        return self._piece(len(self.text) - self._held()) if self.in_pieces else None

    def end(self, ended: Ended, seconds: float = 0.0) -> Piece:
        self._settle(whole=True)
        piece = self._piece(len(self.text)) or Piece("")
        piece.finish = "stop" if self.satisfied or ended.finished in ("eos", "stop") else "length"
        return piece

    def _settle(self, whole: bool = False) -> None:
        """Decode what came since the last whole character; the tokens before give it its context."""
        if self.satisfied or self._settled == len(self._ids):
            return
        decode = self.tokenizer.decode if self.begins and not self._group else self.tokenizer.continuation
        before = decode(self._ids[self._group : self._settled])
        text = decode(self._ids[self._group :])
        if text.endswith(UNFINISHED) and not whole:
            return
        old, self.text = len(self.text), self.text + text[len(before) :]
        self._group, self._settled = self._settled, len(self._ids)
        longest = max(map(len, self.stops), default=0)
        ends = [at for stop in self.stops if (at := self.text.find(stop, max(0, old - longest + 1))) >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self.satisfied = True

    def _held(self) -> int:
        """Characters at the end that a stop text could begin with."""
        if self.satisfied:
            return 0
        lengths = (size for stop in self.stops for size in range(1, len(stop)) if self.text.endswith(stop[:size]))
        return max(lengths, default=0)

    def _piece(self, upto: int) -> Piece | None:
        if upto <= self._sent:
            return None
        text, self._sent = self.text[self._sent : upto], upto
        return Piece(text)
