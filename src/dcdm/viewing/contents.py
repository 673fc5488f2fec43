"""What chunks hold: which tokens, of which kinds, and how much of the routing one thing alone explains.

Pure functions of ids, tokens and the bytes of tokens; `chunks` has the models. Bits are Shannon's: H(chunk) is how
much there is to explain, I(chunk; position), I(chunk; token) and I(chunk; window) what knowing one of them saves.
Counts of a finite text find some of each by chance, so ids are shuffled, within each window for the first two, and
measured again: what is there then is chance, taken out such that a router which position decides has all of its
bits there and a random one none.

    N windows   L positions   M counted tokens   K chunks   V vocabulary
"""

from __future__ import annotations

import keyword
import math
import re
import string
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcdm.keys import Key

SHUFFLES = 4
LEAST = 10
"""Occurrences from which on a token counts as typical, or its chunk as constant; words are also ranked as if each
had been seen so many times more, spread as all tokens are."""
TYPICAL = 1.2
"""How many times as often as by chance a typical token goes to its chunk."""
WORDS = 12


@dataclass(frozen=True)
class Explained:
    """What one variable alone tells of the chunk, in bits."""

    bits: float
    """Without chance: 0 of a random router, all of H(chunk) where the variable decides."""
    counted: float
    """The mutual information of the counts."""
    chance: float
    """The same after shuffling."""


@dataclass(frozen=True)
class TypicalToken:
    """A token that a chunk holds more often than others do."""

    text: str
    count: int
    share: float
    """Of its occurrences, how many are in this chunk."""


@dataclass(frozen=True)
class Contents:
    """What the chunks of many tokens hold."""

    which: str
    """all, or what the router saw of them: visible, masked."""
    tokens: int
    kinds: list[list[int]]
    """(K, kinds): tokens of each kind."""
    words: list[list[TypicalToken]]
    """(K, up to `WORDS`): by pointwise mutual information, the most typical first."""
    bits: float
    """H(chunk)."""
    position: Explained
    token: Explained
    window: Explained
    """How chunks differ from window to window: by what the text is about, or by what is masked."""
    left: float
    """Bits that none of these explains alone: left to context, to noise, and to several of them together."""
    neighbour: Explained
    """What the token before, as the router sees it, tells: context, if anything does."""
    constant: float | None
    """How often a token goes where most of its type go, over types seen `LEAST` times; None if there are none."""
    constant_by_chance: float | None


def contents(
    ids: Tensor, tokens: Tensor, seen: Tensor, kinds: Tensor, counted: Tensor, num_chunks: int, num_kinds: int,
    names: Mapping[int, str], which: str = "all", seed: int = 0,
) -> Contents:  # fmt: skip
    """Of the `counted` (N, L) positions, given ids (N, L) of 1…K, tokens as they are and as the router has `seen`
    them, their kinds (N, L) and names."""
    row, position = counted.nonzero(as_tuple=True)
    chunk, token, kind = (values[counted] for values in (ids, tokens, kinds))
    chunk = chunk - 1
    draws = Key(seed).fold("contents").rows(torch.arange(SHUFFLES), len(row)).to(row.device)
    shuffled, everywhere = ([chunk[torch.argsort(each)] for each in keys] for keys in (row + draws, draws))
    types, number = token.unique(return_inverse=True)
    of_types = _table(number, chunk, len(types), num_chunks)
    constant = [_constancy(_table(number, one, len(types), num_chunks)) for one in shuffled]
    labels = (position, token, seen.roll(1, dims=1)[counted])
    place, itself, neighbour = (explained(chunk, each, shuffled) for each in labels)
    window, whole = explained(chunk, row, everywhere), entropy(chunk)
    left = max(0.0, whole - place.bits - itself.bits - window.bits)
    return Contents(
        which, len(chunk), _table(chunk, kind, num_chunks, num_kinds).tolist(),
        typical([names[one] for one in types.tolist()], of_types), whole, place, itself, window, left,
        neighbour, _constancy(of_types), _mean([one for one in constant if one is not None]),
    )  # fmt: skip


def _table(rows: Tensor, columns: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Counts (rows, columns)."""
    return torch.bincount(rows * num_columns + columns, minlength=num_rows * num_columns).view(num_rows, -1)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def entropy(labels: Tensor) -> float:
    """In bits, of how often each label occurs."""
    share = labels.unique(return_counts=True)[1].double() / max(1, len(labels))
    return max(0.0, -float((share * share.log2()).sum()))


def explained(chunk: Tensor, labels: Tensor, shuffled: Sequence[Tensor]) -> Explained:
    """I(chunk; label) of (M,) each, without what `shuffled` chunks share with the labels."""
    width = int(labels.max()) + 1 if len(labels) else 1

    def shared(chunk: Tensor) -> float:
        return entropy(chunk) + entropy(labels) - entropy(chunk * width + labels)

    whole, counted = entropy(chunk), shared(chunk)
    chance = math.fsum(map(shared, shuffled)) / len(shuffled)
    room = whole - chance
    return Explained(whole * max(0.0, counted - chance) / room if room > 1e-6 else 0.0, counted, chance)


def typical(names: Sequence[str], of_types: Tensor) -> list[list[TypicalToken]]:
    """The most typical of T types for each chunk, given how many of each go to which (T, K)."""
    share = of_types.sum(dim=0).double() / of_types.sum().clamp(min=1)
    count = of_types.sum(dim=1, keepdim=True)
    ratio_tk = (of_types + LEAST * share) / (count + LEAST) / share.clamp(min=1e-12)
    ratio_tk = torch.where((count >= LEAST) & (of_types * 2 >= LEAST), ratio_tk, 0)
    best = ratio_tk.topk(min(WORDS, len(names)), dim=0)
    found = []
    for k, column in enumerate(best.indices.T.tolist()):
        members = [number for number in column if ratio_tk[number, k] > TYPICAL]
        found.append([TypicalToken(names[n], int(count[n]), float(of_types[n, k] / count[n])) for n in members])
    return found


def _constancy(of_types: Tensor) -> float | None:
    """Of types that are not rare, the share of occurrences that are in the type's main chunk."""
    often = of_types[of_types.sum(dim=1) >= LEAST]
    return float(often.amax(dim=1).sum() / often.sum()) if len(often) else None


# --- kinds of tokens ---------------------------------------------------------------------------------------------


CODE = ("keyword", "name", "digits", "punctuation", "whitespace", "other")
PROSE = ("function", "name", "word", "piece", "digits", "punctuation", "whitespace", "other")
_WORDS = """a about above after again against all also although always am among an and another any are as at away be
    because been before being between both but by can cannot could did do does done down during each either else
    every few for from further had has have having he her here hers him himself his how however i if in into is it
    its itself just least less may me might more most much must my myself neither no nor not now of off often on
    once one only or other our ours ourselves out over own rather same shall she should since so some such than
    that the their theirs them themselves then there therefore these they this those though through thus to too
    toward towards under until up upon us very was we well were what when where whether which while who whom whose
    why will with within without would yet you your yours"""
FUNCTION_WORDS = frozenset(_WORDS.split())
_RUN = re.compile(r"(?P<name>[^\W\d]\w*)|(?P<digits>\d\w*(?:\.\d\w*)*)|(?P<whitespace>\s+)")
_PROSE_RUN = re.compile(
    r"(?P<word>[^\W\d_]+(?:['’][^\W\d_]+)*)|(?P<digits>\d\w*(?:[.,]\d\w*)*)|(?P<whitespace>\s+)"
)
_SIGNS_OF_CODE = re.compile(r"[_()\[\]{}=<>#]")


def kinds_for(pieces: Sequence[bytes]) -> tuple[str, ...]:
    """`CODE` for a text that has a sign of code among every hundred letters, `PROSE` for any other."""
    text = b"".join(pieces).decode("utf-8", errors="ignore")
    return CODE if 100 * len(_SIGNS_OF_CODE.findall(text)) > len(text) else PROSE


def kinds_of(pieces: Sequence[bytes], kinds: Sequence[str] = CODE) -> list[str]:
    """The kind of every token of a text, given the bytes that each stands for.

    In code a token belongs to the word around it: each byte of `def` is part of a keyword, each of `define` of a
    name; keywords are Python's. In prose only a token that begins a word has the word's kind, the others are
    pieces, and a name is a word with a capital that begins no sentence. A token that spans several words goes with
    the first that is not white space. Bytes that are not UTF-8, as at the edges of a window, are other.
    """
    of_byte: list[str] = []
    text = b"".join(pieces).decode("utf-8", errors="surrogateescape")
    for run, kind in _runs(text, _PROSE_RUN if kinds == PROSE else _RUN):
        size = len(run.encode("utf-8", errors="surrogateescape"))
        begun = kinds == PROSE and kind in PROSE[:3]
        of_byte += [kind, *["piece"] * (size - 1)] if begun else [kind] * size
    found, at = [], 0
    for piece in pieces:
        own = of_byte[at : at + len(piece)]
        found.append(next((k for k in own if k != "whitespace"), "whitespace" if own else "other"))
        at += len(piece)
    return found


def _runs(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    at, before = 0, "."
    while at < len(text):
        match = pattern.match(text, at)
        run, kind = (text[at], _sign(text[at])) if match is None else (match[0], str(match.lastgroup))
        if kind == "name" and keyword.iskeyword(run):
            kind = "keyword"
        elif kind == "word" and run.lower() in FUNCTION_WORDS:
            kind = "function"
        elif kind == "word" and run[0].isupper() and before not in ".!?":
            kind = "name"
        yield run, kind
        before = before if kind == "whitespace" and "\n" not in run else "." if "\n" in run else run[-1]
        at += len(run)


def _sign(letter: str) -> str:
    is_punctuation = letter in string.punctuation or unicodedata.category(letter).startswith("P")
    return "punctuation" if is_punctuation else "other"
