"""Draw how the shipped model fills blanks, for the README: `python tools/draw_filling.py docs/images/blanks.svg`.

One SVG that moves by itself: a README can hold neither scripts nor buttons.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from dcdm.config import many
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.engine import generate
from dcdm.io.load import load_model
from dcdm.model.transformer import Model
from dcdm.serving.exercises import Exercise, exercises_for
from dcdm.viewing.chunks import window_from
from dcdm.viewing.palette import colour, ink

WIDE, HIGH = 8.4, 20.0
"""Pixels of a letter."""
MARGIN, GAP, HEAD = 14.0, 18.0, 46.0
MOST_COLUMNS = 64
HOLD = 2.5
"""Seconds for which the finished texts stay."""
MOST_SECONDS = 9.0
UNSEEN = {code: chr(0x2400 + code) for code in range(32) if code != 10} | {0x7F: "␡"}
STYLE = """
text { font: 14px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; }
.ground { fill: #ffffff; stroke: #dcdcd6; } .given { fill: #1b1b1a; } .title { fill: #1b1b1a; font-weight: 700; }
.small { fill: #62625e; font-size: 12px; } .blank { fill: #f0f0ec; stroke: #c9c9c3; stroke-width: 0.6; }
.head { fill: none; stroke: #1b1b1a; stroke-width: 2; opacity: 0; }
@media (prefers-color-scheme: dark) {
.ground { fill: #1e2021; stroke: #3a3c3d; } .given, .title { fill: #e9e9e5; } .small { fill: #a3a39d; }
.blank { fill: #2a2c2d; stroke: #505355; } .head { stroke: #ffffff; }
}
"""


@dataclass(frozen=True)
class Written:
    """A text as a decoder filled it."""

    label: str
    tokens: list[str]
    """What each position shows, BOS first."""
    groups: list[int]
    """What colours stand for: the lane of each position, 0 where the text was given."""
    came: list[int]
    """The forward pass that each position came with, 0 where the text was given."""

    @property
    def forwards(self) -> int:
        return max(self.came)


def written(model: Model, tokenizer: Tokenizer, exercise: Exercise, lanes: int) -> Written:
    prompt = exercise.prompt(tokenizer)
    done = generate(model, prompt, tokenizer=tokenizer, eos_id=-1, temperature=0.5, lanes=lanes, drafts=0)
    ids = done.tokens[0].tolist()
    groups, came = [0] * len(ids), [0] * len(ids)
    for number, event in enumerate(done.history, start=1):
        for position, lane in zip(event.positions, event.lanes, strict=True):
            groups[position], came[position] = lane, number
    label = "AR’s order (1 lane)" if lanes == 1 else f"{lanes} lanes"
    return Written(label, window_from(ids, tokenizer).labels, groups, came)


@dataclass(frozen=True)
class Cell:
    """A piece of a token on one line of the text."""

    position: int
    line: int
    column: int
    text: str


def cells(tokens: Sequence[str], came: Sequence[int]) -> Iterator[Cell]:
    """Where the tokens behind BOS stand; a line end that was written is shown, and long lines are broken."""
    line = column = 0
    for position, token in enumerate(tokens[1:], start=1):
        parts = token.expandtabs(4).split("\n")
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            shown = part + ("" if last or not came[position] else "↵")
            while shown:
                room = MOST_COLUMNS - column
                if room < min(len(shown), 2):
                    line, column = line + 1, 0
                    continue
                yield Cell(position, line, column, shown[:room])
                column += len(shown[:room])
                shown = shown[room:]
            if not last:
                line, column = line + 1, 0


def moving_picture(texts: Sequence[Written], title: str = "A text being filled in") -> str:
    """The texts side by side, as an SVG that stands alone."""
    forwards = max(text.forwards for text in texts)
    second = max(4.0, forwards / MOST_SECONDS)  # forward passes in a second
    total = forwards / second + HOLD
    layouts = [list(cells(text.tokens, text.came)) for text in texts]
    columns = max(max(cell.column + len(cell.text) for cell in layout) for layout in layouts)
    columns = max(columns, *(len(text.label) + 20 for text in texts), 34)
    lines = max(max(cell.line for cell in layout) for layout in layouts) + 1
    panel, high = 2 * MARGIN + columns * WIDE, HEAD + lines * HIGH + MARGIN
    width = len(texts) * panel + (len(texts) - 1) * GAP
    parts = [
        _panel(text, layout, number * (panel + GAP), panel, high)
        for number, (text, layout) in enumerate(zip(texts, layouts, strict=True))
    ]
    times = "".join(_keyframes(number, second, total) for number in range(1, forwards + 1))
    moves = f"@media (prefers-reduced-motion: no-preference) {{ {times} }}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {high:g}" width="{width:g}" '
        f'height="{high:g}" role="img" aria-label="{escape(title)}">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}{moves}</style>\n{''.join(parts)}</svg>\n"
    )


def _keyframes(forward: int, second: float, total: float) -> str:
    """What came with a forward is seen from then on; its frame until the next one."""
    start, end = (100 * number / second / total for number in (forward, forward + 1))
    return (
        f"@keyframes f{forward}{{0%{{opacity:0}}{start:.2f}%{{opacity:1}}}}"
        f".f{forward}{{animation:f{forward} {total:.2f}s step-end infinite}}"
        f"@keyframes h{forward}{{0%{{opacity:0}}{start:.2f}%{{opacity:1}}{end:.2f}%{{opacity:0}}}}"
        f".h{forward}{{animation:h{forward} {total:.2f}s step-end infinite}}"
    )


def _panel(text: Written, layout: list[Cell], left: float, width: float, high: float) -> str:
    parts = [
        f'<rect class="ground" x="{left + 0.5:g}" y="0.5" width="{width - 1:g}" height="{high - 1:g}" rx="8"/>',
        f'<text class="title" x="{left + MARGIN:g}" y="24">{escape(text.label)}</text>',
        f'<text class="small f{text.forwards}" x="{left + width - MARGIN:g}" y="24" text-anchor="end">'
        f"✓ {many(text.forwards, 'forward pass', 'forward passes')}</text>",
    ]
    for cell in layout:
        x, y = left + MARGIN + cell.column * WIDE, HEAD + cell.line * HIGH
        long, forward = len(cell.text) * WIDE, text.came[cell.position]
        letters = escape(cell.text.translate(UNSEEN))
        fitted = f'textLength="{long:.1f}" lengthAdjust="spacingAndGlyphs"'
        if not forward:
            if cell.text.strip():
                parts.append(f'<text class="given" x="{x:.1f}" y="{y:g}" {fitted}>{letters}</text>')
            continue
        ground = colour(text.groups[cell.position])
        box = f'x="{x + 0.5:.1f}" y="{y - 14:g}" width="{long - 1:.1f}" height="{HIGH - 2:g}" rx="2"'
        parts.append(
            f'<rect class="blank" {box}/><g class="f{forward}"><rect {box} fill="{ground}"/>'
            f'<text x="{x:.1f}" y="{y:g}" fill="{ink(ground)}" {fitted}>{letters}</text></g>'
            f'<rect class="head h{forward}" {box}/>'
        )
    return "".join(f"{part}\n" for part in parts)


def draw_filling(place: str) -> None:
    """The first exercise of the default model, in its lanes and in AR's order."""
    model, tokenizer = load_model()
    exercise = exercises_for(tokenizer, model.config.context_length)[0]
    texts = [written(model, tokenizer, exercise, lanes) for lanes in (model.config.default_lanes, 1)]
    Path(place).write_text(moving_picture(texts, "A small model fills blanks in code"), encoding="utf-8")


if __name__ == "__main__":
    draw_filling(sys.argv[1])
