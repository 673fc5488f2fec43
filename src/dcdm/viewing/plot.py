"""Line plots as inline SVG, in the package's colours, readable on light and on dark ground."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dcdm.viewing import palette

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 70, 14, 44
SMOOTHED = 40  # points that a curve is averaged down to
DASHES = ("", "7 4", "2 3")


@dataclass(frozen=True)
class Curve:
    name: str
    values: Sequence[float]
    """One for each step, from step 1."""


def line_plot(curves: Sequence[Curve], across: str, up: str) -> str:
    """The curves, averaged over stretches of steps, each with its name at its end."""
    smooth = [averaged(curve.values) for curve in curves]
    steps = max((len(curve.values) for curve in curves), default=1)
    values = [value for points in smooth for _, value in points]
    if not values:
        return ""
    ticks = _ticks(min(values), max(values))
    frame = _Frame(steps, ticks[0], ticks[-1])
    ends = _apart([frame.y(points[-1][1]) if points else 0.0 for points in smooth])
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(_spoken(curves, smooth, up))}">'
    ]
    parts += [_grid(frame, tick) for tick in ticks]
    parts += [_mark(frame, step) for step in sorted({1, steps // 2, steps} - {0})]
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{across}</text>')
    middle = HEIGHT / 2
    turned = f'transform="rotate(-90 14 {middle})"'
    parts.append(f'<text x="14" y="{middle}" text-anchor="middle" {turned}>{up}</text>')
    for number, (curve, points, end) in enumerate(zip(curves, smooth, ends, strict=True)):
        parts.append(_drawn(frame, curve, points, number, end))
    return "".join([*parts, "</svg>"])


def averaged(values: Sequence[float], points: int = SMOOTHED) -> list[tuple[float, float]]:
    """(middle step, mean) of at most `points` stretches of equal length."""
    width = max(1, math.ceil(len(values) / points))
    parts = [(at, values[at : at + width]) for at in range(0, len(values), width)]
    return [(at + (len(part) + 1) / 2, math.fsum(part) / len(part)) for at, part in parts]


@dataclass(frozen=True)
class _Frame:
    steps: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - 1) / max(1, self.steps - 1)

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - value) / (self.high - self.low)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, at most seven, from below `low` to above `high`."""
    span = max(high - low, 1e-6)
    unit = 10.0 ** math.floor(math.log10(span))
    step = next(unit * m for m in (0.2, 0.5, 1.0, 2.0) if span / (unit * m) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def _grid(frame: _Frame, tick: float) -> str:
    y = frame.y(tick)
    line = f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
    return f'{line}<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'


def _mark(frame: _Frame, step: int) -> str:
    return f'<text x="{frame.x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>'


def _drawn(frame: _Frame, curve: Curve, points: Sequence[tuple[float, float]], number: int, end: float) -> str:
    if not points:
        return ""
    path = " ".join(f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in points)
    colour, dash = palette.colour(number + 1), DASHES[number % len(DASHES)]
    line = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>'
    x = frame.x(points[-1][0]) + 8
    place = f'x="{x:.1f}" y="{end + 4:.1f}" class="name" style="fill:{colour}"'
    return f"{line}<text {place}>{html.escape(curve.name)}</text>"


def _apart(heights: list[float], gap: float = 16) -> list[float]:
    """The same heights, moved so that names do not cover each other."""
    placed = dict.fromkeys(range(len(heights)), 0.0)
    last = -math.inf
    for number in sorted(placed, key=heights.__getitem__):
        placed[number] = last = max(heights[number], last + gap)
    return list(placed.values())


def _spoken(curves: Sequence[Curve], smooth: Sequence[Sequence[tuple[float, float]]], up: str) -> str:
    said = (f"{c.name} from {points[0][1]:.2f} to {points[-1][1]:.2f}"
            for c, points in zip(curves, smooth, strict=True) if points)  # fmt: skip
    return f"{up}: {', '.join(said)}"
