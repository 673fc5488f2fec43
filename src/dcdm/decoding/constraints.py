"""Text that must match a regular expression or a JSON schema, filled in any order.

The expression becomes an automaton over bytes (by `outlines-core`), the automaton one over tokens. Positions are
filled out of order, so it is not enough to follow it from the left: before a token is drawn, the states that the
positions before it can lead to and those from which the positions behind it can still reach the end are computed,
with exactly as many positions as there are. A token is allowed if it leads from one of the first to one of the
second: if and only if the canvas can then still be completed. Tokens that one pass fills are drawn one after the
other, each given those before it. So every text that is begun ends with a match, and what no text can match is
refused beforehand.

    S states   V tokens that can be predicted   n positions
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dcdm.config import ConfigError
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.commits import Sampling, View
from dcdm.decoding.json_schemas import check_schema

COMPILER = Path(__file__).with_name("expression_compiler.py")
SECONDS, MEMORY, STATES = 5, 1 << 30, 20_000
CLOCK_SECONDS = 10
"""Within which a process that is given its `SECONDS` of computing must be done."""
AT_ONCE = 1 << 20
"""Entries that are made in one go: other threads come in between."""
ENTRIES = 20_000_000
"""States times tokens of one automaton; each takes two bytes."""
_compiling = threading.BoundedSemaphore(2)

States = npt.NDArray[np.bool_]


class CompilerBusy(ConfigError):
    """Nothing is wrong with the expression: its turn did not come in time."""


def require_package() -> None:
    if importlib.util.find_spec("outlines_core") is None:
        raise ConfigError("constraints need outlines-core: run pip install -e '.[serve]' in the checkout of dcdm")


@dataclass(frozen=True)
class Automaton:
    """Over bytes."""

    table: npt.NDArray[np.int32]
    """(S, 256): the state that follows; −1 where none does."""
    first: int
    final: list[int]


def compile_expression(*, regex: str | None = None, schema: Mapping[str, Any] | None = None) -> Automaton:
    """The automaton of a regular expression (that of Rust's `regex`, matched as a whole) or of a JSON schema."""
    require_package()
    request: dict[str, Any] = {"seconds": SECONDS, "memory": MEMORY, "states": STATES}
    if (regex is None) == (schema is None):
        raise ConfigError("give a regex or a schema, one of them")
    if regex is not None:
        name = "regex"
        request["regex"] = _without_anchors(regex)
    else:
        name = "schema"
        check_schema(schema)
        request["schema"] = schema
    if not _compiling.acquire(timeout=4 * SECONDS):
        raise CompilerBusy(f"{name}: other expressions keep the compiler busy; try again")
    try:
        line, _, content = _compiled(json.dumps(request).encode() + b"\n").partition(b"\n")
    finally:
        _compiling.release()
    if not line:
        raise ConfigError(
            f"{name}: its automaton takes more than {SECONDS} seconds or {MEMORY >> 20} MiB to make; simplify it"
        )
    head = json.loads(line)
    if "error" in head:
        raise ConfigError(f"{name}: {head['error']}")
    table = np.frombuffer(content, dtype=np.int32).reshape(-1, 256)
    return Automaton(table, head["first"], head["final"])


def _compiled(request: bytes) -> bytes:
    """What the compiler's process answers; nothing if it takes too much and dies.

    One that lives when the clock has run out has not computed for as long as it may: the machine did other things.
    """
    command = [sys.executable, "-P", "-B", str(COMPILER)]
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=CLOCK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise CompilerBusy("the machine is too busy to make an automaton; try again") from None
    return b"" if done.returncode else done.stdout


def _without_anchors(regex: str) -> str:
    """Matched as a whole in any case: what says so is left out, since the library does not take it."""
    regex = regex.removeprefix("^")
    body = regex.removesuffix("$")
    escapes = len(body) - len(body.rstrip("\\"))
    return regex if escapes % 2 else body


class Constraint:
    """An automaton over the tokens of a tokenizer."""

    def __init__(self, automaton: Automaton, pieces: Sequence[bytes], eos_id: int) -> None:
        """`pieces` are the bytes of every token that can be predicted; `eos_id` is the one that ends a text."""
        states, size = len(automaton.table), len(pieces)
        if states * size > ENTRIES:
            raise ConfigError(
                f"the expression needs {states} states, too many for a vocabulary of {size} tokens; simplify it, "
                "or bound its repetitions more tightly"
            )
        self.eos_id, self.size = eos_id, size
        self.end, self.dead = states, states + 1
        self.first = automaton.first
        self.final = np.zeros(states + 2, dtype=bool)
        self.final[automaton.final] = True
        self.table = self._tokens(automaton.table, pieces)
        """(S+2, V): the state after a token. Of the last two rows one is behind an EOS, the other leads nowhere."""
        pairs = [np.unique(row) for row in self.table[:states]]
        self._from = np.repeat(np.arange(states), [len(row) for row in pairs])
        self._to = np.concatenate([*pairs, np.zeros(0, dtype=self.table.dtype)]).astype(np.int64)
        alive = self._to != self.dead
        self._from, self._to = self._from[alive], self._to[alive]
        self._tails: dict[bool, list[States]] = {}
        self._lock = threading.Lock()  # requests and the model's thread ask at the same time

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, *, regex: str | None = None, schema: Mapping[str, Any] | None = None
    ) -> Constraint:
        """For texts of a tokenizer."""
        pieces = tokenizer.pieces(list(range(tokenizer.bos_id)))
        return cls(compile_expression(regex=regex, schema=schema), pieces, tokenizer.eos_id)

    def _tokens(self, table: npt.NDArray[np.int32], pieces: Sequence[bytes]) -> npt.NDArray[np.int16]:
        states = len(table)
        wide = np.full((states + 1, 256), states, dtype=np.int32)  # its last row: nothing follows
        wide[:states] = np.where(table < 0, states, table)
        reached = np.full((states + 2, len(pieces)), self.dead, dtype=np.int16)
        by_length: dict[int, list[int]] = {}
        for token, piece in enumerate(pieces):
            if piece and token != self.eos_id:  # an EOS ends; what is no text leads nowhere
                by_length.setdefault(len(piece), []).append(token)
        step = max(1, AT_ONCE // states)
        batches = (
            (n, every[at : at + step]) for n, every in by_length.items() for at in range(0, len(every), step)
        )
        for length, tokens in batches:
            content = np.frombuffer(b"".join(pieces[token] for token in tokens), dtype=np.uint8).reshape(-1, length)
            at = np.repeat(np.arange(states, dtype=np.int32)[:, None], len(tokens), axis=1)
            for column in content.T:
                at = wide[at, column]
            reached[:states, tokens] = np.where(at == states, self.dead, at)
        reached[self.end] = self.end
        return reached

    def before(self, behind: States, token: int | None, ends: bool) -> States:
        """The states from which a position, filled with `token` or free, leads to one of those `behind` it."""
        if token is None:
            found = np.zeros_like(behind)
            found[self._from[behind[self._to]]] = True
            if ends and behind[self.end]:
                found |= self.final
        elif token == self.eos_id:
            found = self.final & (ends and bool(behind[self.end]))
        else:
            found = behind[self.table[:, token]]
        found[self.end] = behind[self.end]
        found[self.dead] = False
        return found

    def after(self, before: States, token: int | None, ends: bool) -> States:
        """The states that a position, filled with `token` or free, leads to from those `before` it."""
        found = np.zeros_like(before)
        if token is None:
            found[self._to[before[self._from]]] = True
            found[self.end] = ends and bool((before & self.final).any())
        elif token == self.eos_id:
            found[self.end] = ends and bool((before & self.final).any())
        else:
            found[self.table[before, token]] = True
        found[self.end] |= before[self.end]
        found[self.dead] = False
        return found

    def tail(self, length: int, ends: bool) -> States:
        """The states from which `length` free positions complete the text; if it `ends`, an EOS may come before."""
        with self._lock:
            if ends not in self._tails:
                last = self.final.copy()
                last[self.end] = ends
                self._tails[ends] = [last]
            tails = self._tails[ends]
            while len(tails) <= length:
                one_more = self.before(tails[-1], None, ends)
                tails.append(tails[-1] if np.array_equal(one_more, tails[-1]) else one_more)
            return tails[length]

    @property
    def memory(self) -> int:
        """Bytes that it takes."""
        with self._lock:
            tails = {id(tail): tail.nbytes for tails in self._tails.values() for tail in tails}
        return self.table.nbytes + self._from.nbytes + self._to.nbytes + sum(tails.values())

    def possible(self, length: int, ends: bool) -> bool:
        """Whether any text of so many positions matches."""
        return bool(self.tail(length, ends)[self.first])

    def fill(
        self, reach: Reach, line: Sequence[int | None], places: Sequence[int], draw: Callable[[int, Tensor], int]
    ) -> list[int]:
        """Tokens for the `places` (ascending) of a line whose other positions are filled or, None, free.

        `draw(number, allowed)` chooses the token of the `number`-th place among those allowed, (V,) bool. `reach`
        is what is known of the line; only what has changed since is computed again.
        """
        reach.look_back(line, places[0])
        drawn: list[int] = []

        def token_at(at: int) -> int | None:
            if at != places[len(drawn)]:
                return line[at]
            allowed = self.allowed(reach.before(at), reach.behind(at + 1), reach.ends)
            drawn.append(draw(len(drawn), torch.from_numpy(allowed)))
            return drawn[-1]

        reach.look_ahead(token_at, places[-1])
        return drawn

    def allowed(self, before: States, behind: States, ends: bool) -> States:
        """(V,): the tokens that lead from one of the states before to one of those behind."""
        found = np.asarray(behind[self.table[before]].any(axis=0))
        may_end = bool(before[self.end]) or bool((before & self.final).any())
        found[self.eos_id] = ends and may_end and bool(behind[self.end])
        return found


UNKNOWN = -1


class Reach:
    """Of every place of a line: the states that lead to it, and those from which the rest completes the text.

    Both are kept packed, with the tokens that they were computed for: filling a place changes few of them.
    """

    def __init__(self, constraint: Constraint, length: int, ends: bool) -> None:
        self.constraint, self.ends = constraint, ends
        first = np.zeros(constraint.dead + 1, dtype=bool)
        first[constraint.first] = True
        self._before = [np.packbits(first)] * (length + 1)
        self._behind = [np.packbits(constraint.tail(length - at, ends)) for at in range(length + 1)]
        self._left: list[int | None] = [UNKNOWN] * length  # tokens that `_before` is right for
        self._right: list[int | None] = [None] * length

    def before(self, at: int) -> States:
        return np.unpackbits(self._before[at], count=self.constraint.dead + 1).view(bool)

    def behind(self, at: int) -> States:
        return np.unpackbits(self._behind[at], count=self.constraint.dead + 1).view(bool)

    def look_ahead(self, token_at: Callable[[int], int | None], last: int) -> None:
        """Bring what is before each place up to date, as far as behind the place `last`."""
        changed = False
        for at in range(last + 1):
            token = token_at(at)
            if changed or token != self._left[at]:
                found = np.packbits(self.constraint.after(self.before(at), token, self.ends))
                changed = not np.array_equal(found, self._before[at + 1])
                self._before[at + 1], self._left[at] = found, token
        if changed and last + 1 < len(self._left):
            self._left[last + 1] = UNKNOWN

    def look_back(self, line: Sequence[int | None], first: int) -> None:
        """Bring what is behind each place up to date, from the end to the place `first`."""
        changed = False
        for at in range(len(line) - 1, first, -1):
            if changed or line[at] != self._right[at]:
                found = np.packbits(self.constraint.before(self.behind(at + 1), line[at], self.ends))
                changed = not np.array_equal(found, self._behind[at])
                self._behind[at], self._right[at] = found, line[at]
        if changed:
            self._right[first] = UNKNOWN


@dataclass
class ConstrainedSpan:
    """A run of positions of a canvas that must match."""

    constraint: Constraint
    start: int
    length: int
    ends: bool
    """Whether an EOS may end the text before the run is full."""
    reach: Reach | None = field(default=None, init=False, repr=False, compare=False)
    """Of the text that is being written."""

    def check(self, name: str = "regex") -> None:
        """Refuse what no text of the run's length matches."""
        if not self.constraint.possible(self.length, self.ends):
            upto = "up to " if self.ends else "exactly "
            raise ConfigError(f"{name}: no text of {upto}{self.length} tokens matches; change it, or the length")

    def draw(
        self, view: View, fill: Tensor, row: int, drawn: Tensor, line: Tensor, sampling: Sampling, chances: Tensor
    ) -> Tensor:
        """What a row fills, `drawn` (A,), drawn once more within the span from what the constraint allows.

        `fill` (B, A) is what all rows fill, `line` (L,) the row's canvas, on which MASK is free, and `chances` (L,)
        uniform numbers.
        """
        inside = (view.position[row] >= self.start) & (view.position[row] < self.start + self.length)
        asked = torch.zeros_like(fill)
        asked[row] = fill[row] & inside
        if not bool(asked.any()):
            return drawn
        parts: list[Tensor] = []

        def keep(log_p: Tensor, row: Tensor, at: Tensor) -> Tensor:
            parts.append(log_p)
            return at

        view.predicted.measure(keep, asked, 0)
        log_p, columns = torch.cat(parts), asked[row].nonzero().squeeze(-1)
        places = view.position[row, columns]
        order = places.argsort()
        log_p, columns, places = log_p[order], columns[order], places[order]

        def draw(number: int, allowed: Tensor) -> int:
            own = log_p[number].masked_fill(~allowed.to(log_p.device), -torch.inf)[None]
            return int(sampling.draw(sampling.log_p(own), chances[places[number]][None]))

        span = line[self.start : self.start + self.length].tolist()
        known = [token if token < self.constraint.size else None for token in span]
        drawn = drawn.clone()
        self.reach = self.reach or Reach(self.constraint, self.length, self.ends)
        found = self.constraint.fill(self.reach, known, (places - self.start).tolist(), draw)
        drawn[columns] = torch.tensor(found, device=drawn.device)
        return drawn


def constrained_spans(
    constraints: Sequence[Constraint], row: Sequence[int], new_tokens: int, window: int, eos_id: int | None,
    mask_id: int, name: str = "regex",
) -> list[ConstrainedSpan]:  # fmt: skip
    """What a row (BOS first) must match: each blank by itself, or what is written behind the prompt."""
    runs = blank_runs(row, mask_id)
    if runs and new_tokens:
        raise ConfigError(f"{name}: fill blanks or continue behind the prompt, not both in one text")
    if len(row) + new_tokens > window:
        raise ConfigError(f"{name}: the text must fit into one window of {window} tokens; ask for fewer")
    if len(constraints) not in (1, len(runs) or 1):
        raise ConfigError(f"{name}: give one for all blanks, or one for each of the {len(runs)}")
    if runs:
        each = list(constraints) * (len(runs) if len(constraints) == 1 else 1)
        spans = [ConstrainedSpan(one, *run, ends=False) for one, run in zip(each, runs, strict=True)]
    else:
        ends = eos_id is not None and eos_id == constraints[0].eos_id
        spans = [ConstrainedSpan(constraints[0], len(row), new_tokens, ends)]
    for span in spans:
        span.check(name)
    return spans


def blank_runs(row: Sequence[int], mask_id: int) -> list[tuple[int, int]]:
    """Where the blanks of a row begin, and how long each is."""
    runs: list[tuple[int, int]] = []
    for at, token in enumerate(row):
        if token == mask_id:
            start, length = runs[-1] if runs and sum(runs[-1]) == at else (at, 0)
            runs[len(runs) - bool(length) :] = [(start, length + 1)]
    return runs
