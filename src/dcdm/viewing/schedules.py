"""A picture of when texts are computed: `python -m dcdm.viewing.schedules FILE` draws both schedules.

The same texts arrive at a server that computes batches to their end and at one whose texts join between forwards. A
forward is one unit of time here, whatever it holds; the picture shows who waits for whom, not how fast a model is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from dcdm.viewing.palette import colour

ROWS = 3
TEXTS = ((0, 9), (1, 3), (2, 14), (3, 4), (4, 2), (8, 6), (9, 2), (11, 3))
"""When each text arrives, and how many forwards it needs."""


@dataclass(frozen=True)
class Span:
    """A text's place in the picture."""

    row: int
    arrives: int
    begins: int
    ends: int


def by_batches(texts: tuple[tuple[int, int], ...] = TEXTS, rows: int = ROWS) -> list[Span]:
    """All that wait, as many as there are rows, begin when the last batch has ended."""
    spans: list[Span] = []
    now = 0
    while len(spans) < len(texts):
        waiting = [text for text in texts[len(spans) :] if text[0] <= now][:rows]
        if not waiting:
            now = texts[len(spans)][0]
            continue
        spans += [Span(row, arrives, now, now + size) for row, (arrives, size) in enumerate(waiting)]
        now += max(size for _, size in waiting)
    return spans


def by_steps(texts: tuple[tuple[int, int], ...] = TEXTS, rows: int = ROWS) -> list[Span]:
    """Each begins as soon as a row is free."""
    free, spans = [0] * rows, []
    for arrives, size in texts:
        row = min(range(rows), key=lambda each: (max(free[each], arrives), each))
        begins = max(free[row], arrives)
        free[row] = begins + size
        spans.append(Span(row, arrives, begins, begins + size))
    return spans


def draw_schedules(path: str) -> str:
    """Both schedules, one above the other, into a PNG or SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for axis, name, spans in zip(axes, ("batch", "step"), (by_batches(), by_steps()), strict=True):
        _draw(axis, name, spans)
    axes[1].set_xlabel("forwards")
    figure.savefig(path, dpi=110)
    return path


def _draw(axis: Any, name: str, spans: list[Span]) -> None:
    waited = sum(span.begins - span.arrives for span in spans) / len(spans)
    axis.set_title(f"--schedule {name}: a text waits {waited:.1f} forwards on average", loc="left", fontsize=10)
    for number, span in enumerate(spans, start=1):
        shade = colour(number)
        axis.barh(span.row, span.ends - span.begins, left=span.begins, height=0.62, color=shade, edgecolor="white")
        axis.text((span.begins + span.ends) / 2, span.row, str(number), ha="center", va="center", fontsize=9)
        axis.plot([span.arrives, span.begins], [span.row + 0.42] * 2, color=shade, linewidth=2)
        axis.plot(span.arrives, span.row + 0.42, "o", color=shade, markersize=4)
    axis.set_yticks(range(ROWS), [f"row {row + 1}" for row in range(ROWS)])
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    print(draw_schedules(sys.argv[1] if len(sys.argv) > 1 else "schedules.png"))
