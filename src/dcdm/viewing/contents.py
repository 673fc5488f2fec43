"""What chunks hold: which tokens, and how much of the routing one thing alone explains.

Pure functions of ids, tokens and the bytes of tokens; `chunks` has the models. Bits are Shannon's: H(chunk) is how
much there is to explain, I(chunk; position), I(chunk; token) and I(chunk; window) what knowing one of them saves.
Counts of a finite text find some of each by chance, so ids are shuffled, within each window for the first two, and
measured again: what is there then is chance, taken out such that a router which position decides has all of its
bits there and a random one none.

    N windows   L positions   M counted tokens   K chunks   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    sizes: list[int]
    """(K): tokens of each chunk."""
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
    ids: Tensor, tokens: Tensor, seen: Tensor, counted: Tensor, num_chunks: int, names: Mapping[int, str],
    which: str = "all", seed: int = 0,
) -> Contents:  # fmt: skip
    """Of the `counted` (N, L) positions, given ids (N, L) of 1…K, tokens as they are and as the router has `seen`
    them, and their names."""
    row, position = counted.nonzero(as_tuple=True)
    chunk, token = ids[counted] - 1, tokens[counted]
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
        which, len(chunk), chunk.bincount(minlength=num_chunks).tolist(),
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
