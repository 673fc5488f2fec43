"""Exercises: texts with blanks, which newcomers see a model fill in the playground."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.resources import files

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


def _read() -> dict[str, list[list[Exercise]]]:
    text = (files("dcdm.serving") / "assets" / "exercises.json").read_text(encoding="utf-8")
    return {
        language: [[Exercise(**form) for form in forms] for forms in several]
        for language, several in json.loads(text).items()
    }


EXERCISES = _read()
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
