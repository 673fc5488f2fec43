"""A table that the page and the document share, and how its figures are written."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from dcdm.reproduction.reading import Interval
from dcdm.viewing.pieces import grid as grid_html

NONE = "–"
TEXT = (
    "model", "claim", "verdict", "first figures", "comparison", "benchmark", "decoder",
    "tokens that mark chunks (seed 0)", "what changes",
)  # fmt: skip
"""Columns of words."""
SINGLE = {True: " (one seed)", False: " (one window)"}
Minus = str.maketrans("-", "−")


@dataclass(frozen=True)
class Grid:
    """Rows under a header; the first column holds names."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    def markdown(self) -> str:
        lines = [self.header, tuple("---" for _ in self.header), *self.rows]
        text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"{text}\n\n{self.note}" if self.note else text

    def html(self) -> str:
        note = f'<p class="small">{html.escape(self.note)}</p>' if self.note else ""
        rows = [[cell.replace("**", "").replace("`", "") for cell in row] for row in self.rows]
        return grid_html(self.header, rows, TEXT) + note


def shown(value: Interval | None, digits: int = 3, sign: bool = False) -> str:
    """Mean ± half the 95 % interval."""
    if value is None:
        return NONE
    text = f"{value.mean:{'+' if sign else ''}.{digits}f}"
    text += f" ± {value.half:.{digits}f}" if value.half is not None else SINGLE[value.seeds == 1]
    return text.translate(Minus)


def shown_bare(value: Interval | None, digits: int = 3) -> str:
    """The mean alone."""
    return NONE if value is None else f"{value.mean:.{digits}f}"
