"""What kind of thing a token is part of: a keyword, a name, a number, punctuation, white space, or other."""

from __future__ import annotations

import keyword
import re
import string
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

KINDS = ("keyword", "name", "digits", "punctuation", "whitespace", "other")

_RUN = re.compile(r"(?P<name>[^\W\d]\w*)|(?P<digits>\d\w*(?:\.\d\w*)*)|(?P<whitespace>\s+)")


def kinds_of(pieces: Sequence[bytes]) -> list[str]:
    """The kind of every token of a text, given the bytes that each stands for.

    A token belongs to the word around it: each byte of `def` is part of a keyword, each of `define` of a name.
    One that spans several goes with the first that is not white space. Keywords are Python's.
    """
    kinds = _byte_kinds(b"".join(pieces))
    found, at = [], 0
    for piece in pieces:
        found.append(_first_visible(kinds[at : at + len(piece)]))
        at += len(piece)
    return found


def counted(chunks: Iterable[int], kinds: Iterable[str], num_chunks: int) -> list[list[int]]:
    """How many tokens of each kind chunks 1…K hold: K rows in the order of `KINDS`."""
    table = [[0] * len(KINDS) for _ in range(num_chunks)]
    for chunk, kind in zip(chunks, kinds, strict=True):
        if chunk >= 1:
            table[chunk - 1][KINDS.index(kind)] += 1
    return table


def _first_visible(kinds: list[str]) -> str:
    return next((kind for kind in kinds if kind != "whitespace"), "whitespace" if kinds else "other")


def _byte_kinds(text: bytes) -> list[str]:
    """The kind of every byte; those that are not UTF-8, as at the edges of a window, are other."""
    kinds: list[str] = []
    for run, kind in _runs(text.decode("utf-8", errors="surrogateescape")):
        kinds += [kind] * len(run.encode("utf-8", errors="surrogateescape"))
    return kinds


def _runs(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        match = _RUN.match(text, at)
        run, kind = (text[at], _sign(text[at])) if match is None else (match[0], str(match.lastgroup))
        yield run, "keyword" if kind == "name" and keyword.iskeyword(run) else kind
        at += len(run)


def _sign(letter: str) -> str:
    is_punctuation = letter in string.punctuation or unicodedata.category(letter).startswith("P")
    return "punctuation" if is_punctuation else "other"
