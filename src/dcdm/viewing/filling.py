"""Texts with blanks, and how decoders fill them: what is blanked out, and what came with which forward pass.

Exercises are what newcomers see a model do, in the demo and in the playground.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest

from dcdm.config import many
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.engine import Generation
from dcdm.viewing.chunks import ChunkView, window_from

# --- what was filled when ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Filling:
    """One row of a generation that fits into one window."""

    tokens: list[str]
    """What each position shows, BOS first."""
    chunks: list[int]
    """The chunk of each position, numbered in the order of filling; 0 where the text was given."""
    steps: list[list[int]]
    """Positions that each forward pass filled."""
    lanes: list[int] = field(default_factory=list)
    """The lane of each position, from 1, and 0 where the text was given; [] for models without lanes."""

    @property
    def came(self) -> list[int]:
        """The forward that each position came with, 0 where the text was given."""
        forwards = [0] * len(self.tokens)
        for number, positions in enumerate(self.steps, start=1):
            for position in positions:
                forwards[position] = number
        return forwards

    @property
    def groups(self) -> list[int]:
        """What colours stand for: the lane of each position, or its chunk."""
        return self.lanes or self.chunks

    @property
    def by_forward(self) -> Filling:
        """One lane that takes several tokens in a pass is coloured by passes: its lane would be one colour."""
        if max(self.lanes, default=0) != 1 or max(map(len, self.steps)) == 1:
            return self
        return replace(self, chunks=self.came, lanes=[])


@dataclass(frozen=True)
class Written:
    """A text as one decoder filled it, and what that took."""

    label: str
    """Which decoder, such as "4 lanes"."""
    filling: Filling
    seconds: float

    @property
    def forwards(self) -> int:
        return len(self.filling.steps)

    @property
    def sentence(self) -> str:
        """What it took, in figures."""
        tokens = sum(map(len, self.filling.steps))
        passes = many(self.forwards, "forward pass", "forward passes")
        return f"{tokens} tokens in {passes}, {self.seconds:.2f} s"


def filling_of(generation: Generation, tokenizer: Tokenizer, row: int = 0) -> Filling:
    """The row's tokens, and the chunk and the forward pass that each of them came with."""
    events = [event for event in generation.history if event.row == row]
    ids = [token for token in generation.tokens[row].tolist() if token != tokenizer.pad_id]
    chunks, lanes = [0] * len(ids), [0] * len(ids)
    for event in events:
        for position, lane in zip_longest(event.positions, event.lanes, fillvalue=0):
            if position < len(ids):  # what lies behind an EOS was cut off
                chunks[position], lanes[position] = event.chunk, lane
    steps = [[p for p in event.positions if p < len(ids)] for event in events]
    return Filling(window_from(ids, tokenizer).labels, chunks, steps, lanes if any(lanes) else []).by_forward


def as_filling(view: ChunkView) -> Filling:
    """A text that is known, as its model would fill it: a forward pass for each chunk with free positions."""
    ids = view.frame.ids if view.axis == "noise" else view.frames[-1].ids
    free = (token.free for token in view.tokens)  # the paper's routing puts BOS into a chunk, too
    ids = [chunk if counts else 0 for chunk, counts in zip(ids, free, strict=True)]
    steps = [[at for at, chunk in enumerate(ids) if chunk == number] for number in range(1, max(ids) + 1)]
    texts = [token.text for token in view.tokens]
    return Filling(texts, ids, [step for step in steps if step])


# --- exercises ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exercise:
    """A text with parts of it blanked out: whole tokens, as the model reads the text when nothing is missing."""

    name: str
    about: str
    marked: str
    """The text; ⟦ and ⟧ stand around what is blanked out, with the space before a word."""

    @property
    def text(self) -> str:
        return re.sub("[⟦⟧]", "", self.marked)

    def original(self, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
        """The tokens of the whole text, without BOS, and which are blanked out: all that are marked in part."""
        pieces = re.split("[⟦⟧]", self.marked)
        marked = b"".join(bytes([number % 2]) * len(piece.encode()) for number, piece in enumerate(pieces))
        ids = tokenizer.encode(self.text)
        blank, at = [], 0
        for piece in tokenizer.pieces(ids):
            blank.append(any(marked[at : at + len(piece)]))
            at += len(piece)
        return ids, blank

    def segments(self, tokenizer: Tokenizer) -> list[tuple[str, int]]:
        """Stretches of the text, and how many tokens of each are blanked out: none, or all."""
        ids, blank = self.original(tokenizer)
        runs = [[at for at, _ in run] for _, run in groupby(enumerate(blank), key=lambda pair: pair[1])]
        texts = [b"".join(tokenizer.pieces([ids[at] for at in run])).decode(errors="replace") for run in runs]
        return [(text, len(run) if blank[run[0]] else 0) for text, run in zip(texts, runs, strict=True)]

    def prompt(self, tokenizer: Tokenizer) -> str:
        """The text with blanks of as many tokens as stood there."""
        return "".join(f"[[{count}]]" if count else text for text, count in self.segments(tokenizer))


CLASS = Exercise(
    "blanks",
    "Fill the blanks of a class",
    'class Stack:\n    """A stack of items."""\n\n    def __init__(⟦self⟧):\n        self.items = []\n\n'
    "    def push(⟦self, item⟧):\n        self.⟦items⟧.append(⟦item⟧)\n\n    def pop(self):\n"
    '       ⟦ if⟧ not self.items:\n            raise ValueError("the stack is empty")\n'
    "       ⟦ return⟧ self.items.pop()\n\n    def __len__(⟦self⟧):\n        return len(⟦self.items⟧)\n",
)
SHORT_CLASS = Exercise(
    "blanks",
    "Fill the blanks of a class",
    "class Stack:\n    def __init__(⟦self⟧):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.⟦items.append⟧(item)\n",
)
FUNCTION = Exercise(
    "ending",
    "Complete a function",
    'def read_lines(filename, encoding="utf-8"):\n    """Return a list of the lines of a file."""'
    "⟦\n    with open(filename, encoding=encoding) as file:\n        lines = file.readlines()\n"
    "    return [line.rstrip() for line in lines]\n⟧",
)
SHORT_FUNCTION = Exercise(
    "ending",
    "Complete a function",
    'def read(filename):\n    """Return the lines of a file."""'
    "⟦\n    with open(filename) as file:\n        return file.readlines()\n⟧",
)
PASSAGE = Exercise(
    "blanks",
    "Fill the blanks of a sentence",
    "The people of⟦ the United States⟧ are at peace with all⟦ the nations of⟧ the world, and the⟦ revenue⟧ of the"
    " Government has been more⟦ than⟧ enough to pay⟦ the⟧ expenses of the year.⟦ It is⟧ our duty to keep it so.",
)
SHORT_PASSAGE = Exercise(
    "blanks",
    "Fill the blanks of a sentence",
    "We are⟦ at peace⟧ with all⟦ the nations of⟧ the world, and the people of⟦ the United⟧ States are⟦ free⟧.",
)
SENTENCE = Exercise(
    "ending",
    "Complete a sentence",
    "The commerce of our country has been extended to every part of the world, and⟦ the laws of the Congress have"
    " been carried out in all of the States.⟧",
)
SHORT_SENTENCE = Exercise("ending", "Complete a sentence", "The commerce of our country⟦ has been good this year.⟧")
EXERCISES = {
    "python": ((CLASS, SHORT_CLASS), (FUNCTION, SHORT_FUNCTION)),
    "english": ((PASSAGE, SHORT_PASSAGE), (SENTENCE, SHORT_SENTENCE)),
}
"""By language, each in a longer and a shorter form."""


def exercises_for(tokenizer: Tokenizer, length: int, language: str = "python") -> list[Exercise]:
    """The exercises that fit into a context of `length` tokens, BOS among them, each in its longest form.

    Those that the tokenizer cannot spell are left out.
    """

    def fits(text: str) -> bool:
        try:
            ids = tokenizer.encode(text)
        except Exception:  # `tokenizers` raises nothing narrower where it has no token for a text
            return False
        return len(ids) < length and tokenizer.decode(ids) == text

    fitting = [[one for one in forms if fits(one.text)] for forms in EXERCISES[language]]
    return [forms[0] for forms in fitting if forms]
