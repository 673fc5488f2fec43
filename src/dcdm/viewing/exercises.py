"""What newcomers see a model do: blanks of a class, the body of a function. Shared by demo and playground."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dcdm.data.tokenizers import Tokenizer

TEXT = (
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def move(self):\n"
)
"""What lanes and chunks are shown on."""


@dataclass(frozen=True)
class Exercise:
    """A text with parts of it blanked out."""

    name: str
    about: str
    marked: str
    """The text; ⟦ and ⟧ stand around what is blanked out."""

    def parts(self) -> list[tuple[str, bool]]:
        """Stretches of the text, and whether each is blanked out."""
        pieces = re.split("[⟦⟧]", self.marked)
        return [(piece, bool(number % 2)) for number, piece in enumerate(pieces) if piece]

    def original(self, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
        """The tokens of the whole text, without BOS, and which of them are blanked out."""
        ids: list[int] = []
        blank: list[bool] = []
        for piece, is_blank in self.parts():
            tokens = tokenizer.encode(piece)
            ids += tokens
            blank += [is_blank] * len(tokens)
        return ids, blank

    def prompt(self, tokenizer: Tokenizer) -> str:
        """The text with blanks of as many tokens as stood there."""
        return "".join(f"[[{len(tokenizer.encode(piece))}]]" if blank else piece for piece, blank in self.parts())


BLANKS = Exercise(
    "blanks",
    "Fill the blanks of a class",
    "class Point:\n    def __init__(⟦self, x, y⟧):\n        ⟦self.x⟧ = x\n        self.y = y\n\n"
    "    ⟦def move⟧(self):\n",
)
FUNCTION = Exercise(
    "function",
    "Complete a function",
    'def read(filename):\n    """Return the lines of a file."""\n'
    "⟦    with open(filename) as file:\n        return file.readlines()\n⟧",
)
EXERCISES = (BLANKS, FUNCTION)
