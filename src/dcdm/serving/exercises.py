"""Exercises: texts with blanks, which newcomers see a model fill in the playground."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dcdm.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Exercise:
    """A text with parts of it blanked out."""

    name: str
    marked: str
    """The text; ⟦ and ⟧ stand around what is blanked out, with the space before a word."""

    @property
    def text(self) -> str:
        return re.sub("[⟦⟧]", "", self.marked)

    def segments(self, tokenizer: Tokenizer) -> list[tuple[str, int]]:
        """Stretches of the text, and how many tokens of each are blanked out: none, or all."""
        parts = re.split("[⟦⟧]", self.marked)
        found = [(part, len(tokenizer.encode(part)) if number % 2 else 0) for number, part in enumerate(parts)]
        return [(part, count) for part, count in found if part]

    def prompt(self, tokenizer: Tokenizer) -> str:
        """The text with blanks of as many tokens as stood there."""
        return "".join(f"[[{count}]]" if count else text for text, count in self.segments(tokenizer))


CLASS = Exercise(
    "blanks",
    'class Stack:\n    """A stack of items."""\n\n    def __init__(⟦self⟧):\n        self.items = []\n\n'
    "    def push(⟦self, item⟧):\n        self.⟦items⟧.append(⟦item⟧)\n\n    def pop(self):\n"
    '       ⟦ if⟧ not self.items:\n            raise ValueError("the stack is empty")\n'
    "       ⟦ return⟧ self.items.pop()\n\n    def __len__(⟦self⟧):\n        return len(⟦self.items⟧)\n",
)
SHORT_CLASS = Exercise(
    "blanks",
    "class Stack:\n    def __init__(⟦self⟧):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.⟦items.append⟧(item)\n",
)
FUNCTION = Exercise(
    "ending",
    'def read_lines(filename, encoding="utf-8"):\n    """Return a list of the lines of a file."""'
    "⟦\n    with open(filename, encoding=encoding) as file:\n        lines = file.readlines()\n"
    "    return [line.rstrip() for line in lines]\n⟧",
)
SHORT_FUNCTION = Exercise(
    "ending",
    'def read(filename):\n    """Return the lines of a file."""'
    "⟦\n    with open(filename) as file:\n        return file.readlines()\n⟧",
)
PASSAGE = Exercise(
    "blanks",
    "The people of⟦ the United States⟧ are at peace with all⟦ the nations of⟧ the world, and the⟦ revenue⟧ of the"
    " Government has been more⟦ than⟧ enough to pay⟦ the⟧ expenses of the year.⟦ It is⟧ our duty to keep it so.",
)
SHORT_PASSAGE = Exercise(
    "blanks",
    "We are⟦ at peace⟧ with all⟦ the nations of⟧ the world, and the people of⟦ the United⟧ States are⟦ free⟧.",
)
SENTENCE = Exercise(
    "ending",
    "The commerce of our country has been extended to every part of the world, and⟦ the laws of the Congress have"
    " been carried out in all of the States.⟧",
)
SHORT_SENTENCE = Exercise("ending", "The commerce of our country⟦ has been good this year.⟧")
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
