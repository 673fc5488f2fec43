"""Text from tokens that come out of order.

Text is given out as soon as everything before it is there: whole characters only, and nothing that could be the
beginning of a stop text. Who asks for it also hears what is written ahead of that, each piece with its place.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.text import Ended, Event

UTF8 = codecs.getincrementaldecoder("utf-8")
UNFINISHED = "\ufffd"  # how a part of a character decodes
Alternatives = list[tuple[int, float]]
"""Tokens and their log-probabilities, the most probable first."""


@dataclass(frozen=True)
class Provisional:
    """Whole characters ahead of the reading order; discarded if the text ends before them."""

    position: int
    """Of the first token, in tokens of the completion, from 0."""
    tokens: int
    text: str
    lane: int | None
    """From 1; None where the model does not write in lanes."""


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
    """A part of a text, and the tokens that begin in it."""

    text: str
    tokens: list[int] = field(default_factory=list)
    log_p: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Where each token begins, in characters of the whole completion."""
    alternatives: list[Alternatives] = field(default_factory=list)
    """For each token the most probable ones in its place, if they were asked for."""
    finish: str | None = None
    """In the last piece: "stop" (EOS or a stop text) or "length"."""
    ahead: list[Provisional] = field(default_factory=list)
    """What is new ahead of the reading order, for who asks for it."""
    reading: int | None = None
    """With it: how many tokens the text up to here stands for; what was told ahead before them is superseded."""


class TextReader:
    """Reads one row's events and says its text piece by piece; the joined pieces are `decode` of the tokens."""

    def __init__(
        self, tokenizer: Tokenizer, first: int, *, last: int | None = None, stops: Sequence[str] = (),
        eos_id: int = -1, provisional: bool = False, begins: bool = False, in_pieces: bool = True,
    ) -> None:  # fmt: skip
        """The text takes the positions from `first` on, to `last` if something given follows it.

        With `provisional` pieces also say what is written ahead. If it `begins`, it has no prompt. If it is not
        wanted `in_pieces`, the last piece is all of it.
        """
        self.tokenizer, self.first, self.last, self.stops = tokenizer, first, last, tuple(stops)
        self.eos_id = eos_id if last is None else -1  # a blank is filled whole
        self.begins, self.in_pieces = begins, in_pieces
        self.satisfied = False
        self._waiting: dict[int, tuple[int, float, Alternatives]] = {}
        self._tokens: list[int] = []
        self._log_p: list[float] = []
        self._alternatives: list[Alternatives] = []
        self._offsets: list[int] = []
        self._ended = False
        self.text = ""
        self._sent = 0
        self._sent_tokens = 0
        self._settled = 0  # tokens before it are text
        self._group = 0  # where the last part of that text begins
        self._ahead = _Ahead(tokenizer) if provisional else None

    def event(self, event: Event, seconds: float = 0.0) -> Piece | None:
        others = event.alternatives or [[]] * len(event.tokens)
        for position, *rest in zip(event.positions, event.tokens, event.log_p, others, strict=True):
            self._waiting[position] = tuple(rest)  # type: ignore[assignment]
        while not self._ended and (following := self._waiting.pop(self.first + len(self._tokens), None)):
            self._add(*following)
        if not self.in_pieces:
            return None
        piece = self._piece(len(self.text) - self._held())
        return piece if self._ahead is None else self._with_ahead(piece, event, self._ahead)

    def end(self, ended: Ended, seconds: float = 0.0) -> Piece:
        self._settle(whole=True)
        piece = self._piece(len(self.text), all_tokens=True) or Piece("")
        piece.finish = "stop" if self.satisfied or ended.finished in ("eos", "stop") else "length"
        piece.reading = None if self._ahead is None else self._sent_tokens
        return piece

    def _with_ahead(self, piece: Piece | None, event: Event, ahead: _Ahead) -> Piece | None:
        """The piece with what the event wrote ahead; None if there is neither."""
        lanes: Sequence[int | None] = event.lanes or [None] * len(event.positions)
        for position, token, lane in zip(event.positions, event.tokens, lanes, strict=True):
            ahead.write(position - self.first, token, lane)
        ends = (at - self.first for at, (token, *_) in self._waiting.items() if token == self.eos_id)
        news = [] if self._ended else ahead.read(len(self._tokens), min(ends, default=None))
        if piece is None and not news:
            return None
        piece = piece or Piece("")
        piece.ahead, piece.reading = news, self._sent_tokens
        return piece

    def _add(self, token: int, log_p: float, alternatives: Alternatives) -> None:
        if self.last is not None and self.first + len(self._tokens) > self.last:
            self._ended = True
            return
        if token == self.eos_id:
            self._ended = True
            return
        self._tokens.append(token)
        self._log_p.append(log_p)
        self._alternatives.append(alternatives)
        self._offsets.append(len(self.text))
        self._settle()

    def _settle(self, whole: bool = False) -> None:
        """Decode what came since the last whole character; the tokens before give it its context."""
        if self.satisfied or self._settled == len(self._tokens):
            return
        decode = self.tokenizer.decode if self.begins and not self._group else self.tokenizer.continuation
        before = decode(self._tokens[self._group : self._settled])
        text = decode(self._tokens[self._group :])
        if text.endswith(UNFINISHED) and not whole:
            return
        old, self.text = len(self.text), self.text + text[len(before) :]
        self._group, self._settled = self._settled, len(self._tokens)
        longest = max(map(len, self.stops), default=0)
        ends = [at for stop in self.stops if (at := self.text.find(stop, max(0, old - longest + 1))) >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self.satisfied = self._ended = True

    def _held(self) -> int:
        """Characters at the end that a stop text could begin with."""
        if self.satisfied:
            return 0
        lengths = (size for stop in self.stops for size in range(1, len(stop)) if self.text.endswith(stop[:size]))
        return max(lengths, default=0)

    def _piece(self, upto: int, all_tokens: bool = False) -> Piece | None:
        if upto <= self._sent and not all_tokens:
            return None
        text, self._sent = self.text[self._sent : upto], max(upto, self._sent)
        at = start = self._sent_tokens
        everything = all_tokens and not self.satisfied
        while at < len(self._tokens) and (everything or self._offsets[at] < self._sent):
            at += 1
        self._sent_tokens = at
        return Piece(
            text, self._tokens[start:at], self._log_p[start:at], self._offsets[start:at],
            self._alternatives[start:at],
        )  # fmt: skip


class _Ahead:
    """What is written ahead of the reading order and was not told yet: characters that are not whole wait."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._untold: dict[int, tuple[bytes, int | None]] = {}
        self._told: set[int] = set()

    def write(self, position: int, token: int, lane: int | None) -> None:
        self._untold[position] = (self.tokenizer.pieces([token])[0], lane)

    def read(self, reading: int, end: int | None) -> list[Provisional]:
        """Everything that can be told by now, from the first unread position on, and before an EOS at `end`."""
        for position in [at for at in self._untold if at < reading]:
            del self._untold[position]
        open_places = [at for at in sorted(self._untold) if end is None or at < end]
        joined: list[Provisional] = []
        for one in self._characters(open_places):
            last = joined[-1] if joined else None
            if last is not None and last.lane == one.lane and last.position + last.tokens == one.position:
                joined[-1] = Provisional(last.position, last.tokens + one.tokens, last.text + one.text, one.lane)
            else:
                joined.append(one)
        for piece in joined:
            for position in range(piece.position, piece.position + piece.tokens):
                del self._untold[position]
                self._told.add(position)
        return joined

    def _characters(self, places: list[int]) -> Iterator[Provisional]:
        """The shortest runs of neighbours that are whole characters.

        UTF-8 can be read from any byte that does not continue a character, and from behind what was told.
        """
        begin, text, decoder = 0, "", UTF8("replace")
        synchronous = False
        for at, position in enumerate(places):
            content = self._untold[position][0]
            if at == 0 or places[at - 1] != position - 1:  # behind a gap
                begin, text, decoder = at, "", UTF8("replace")
                synchronous = position - 1 in self._told
            if not synchronous and content and 0x80 <= content[0] < 0xC0:  # of a character that began before it
                begin = at + 1
                continue
            synchronous = True
            text += decoder.decode(content)
            if not decoder.getstate()[0]:
                yield Provisional(places[begin], at + 1 - begin, text, self._untold[places[begin]][1])
                begin, text = at + 1, ""
