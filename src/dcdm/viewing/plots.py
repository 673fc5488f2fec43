"""Plots as inline SVG, in the package's colours, readable on light and on dark ground."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dcdm.evaluation.studies import Bin
from dcdm.model.masks import Slots, causal, chunk_causal, dual_stream, dual_stream_slots, noise
from dcdm.viewing import palette
from dcdm.viewing.chunks import Filling
from dcdm.viewing.palette import colour, ink

SMOOTHED = 40  # points that a curve is averaged down to
DASHES = ("", "7 4", "2 3")
SHAPES = ("disc", "square", "triangle", "diamond")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    name: str
    values: Sequence[float]
    """One for each step, from step 1."""


@dataclass(frozen=True)
class Series:
    """Points of a chart; `colour` counts from 1 as chunks do."""

    name: str
    points: Points
    colour: int = 1
    dash: str = ""
    joined: bool = True
    shapes: Sequence[str] = ()
    """A mark for each point, of `SHAPES`; none: a bare line."""
    errors: Sequence[float | None] = ()
    """± of each point."""


def line_plot(curves: Sequence[Curve], across: str, up: str) -> str:
    """The curves, averaged over stretches of steps, each with its name at its end."""
    smooth = [averaged(curve.values) for curve in curves]
    steps = max((len(curve.values) for curve in curves), default=1)
    values = [value for points in smooth for _, value in points]
    if not values:
        return ""
    ticks = _ticks(min(values), max(values))
    frame = _Frame(640, 300, 1, max(2, steps), ticks[0], ticks[-1], right=70)
    ends = _apart([frame.y(points[-1][1]) if points else 0.0 for points in smooth])
    marks = sorted({1, steps // 2, steps} - {0})
    parts = _axes(frame, [float(step) for step in marks], ticks, across, up)
    for number, (curve, points, end) in enumerate(zip(curves, smooth, ends, strict=True)):
        if points:
            parts.append(_line(frame, points, palette.colour(number + 1), DASHES[number % len(DASHES)]))
            parts.append(_name(frame.x(points[-1][0]) + 8, end, curve.name, palette.colour(number + 1)))
    return frame.svg(parts, _spoken([c.name for c in curves], smooth, up))


def chart(series: Sequence[Series], across: str, up: str, *, log: bool = False) -> str:
    """Lines and marks over numbers; with `log`, equal factors lie equally far apart. "" where there is no point."""
    x = [at for one in series for at, _ in one.points]
    y = [end for one in series for end in _ends(one)]
    if not x:
        return ""
    across_ticks = _powers(min(x), max(x)) if log else _ticks(0, max(x))
    up_ticks = _ticks(min(y), max(y))
    frame = _Frame(520, 320, across_ticks[0], across_ticks[-1], up_ticks[0], up_ticks[-1], log=log)
    parts = _axes(frame, across_ticks, up_ticks, across, up)
    for one in series:
        parts += _drawn(frame, one)
    return frame.svg(parts, _spoken([one.name for one in series], [one.points for one in series], up))


def bars(values: Sequence[float], across: str, up: str, level: float) -> str:
    """A bar for each chunk, in its colour, with a broken line at `level`."""
    ticks = _ticks(0, max(*values, level, 1e-6))
    frame = _Frame(360, 220, 0.5, len(values) + 0.5, 0, ticks[-1])
    every = max(1, math.ceil(len(values) / 12))
    parts = _axes(frame, [float(k) for k in range(1, len(values) + 1, every)], ticks, across, up)
    for k, value in enumerate(values, start=1):
        parts.append(
            _bar(frame, k - 0.4, k + 0.4, value, f'fill="{palette.colour(k)}"', f"chunk {k}: {value:,.4g}")
        )
    parts.append(_line(frame, [(0.5, level), (len(values) + 0.5, level)], "currentColor", "4 4", width=1))
    return frame.svg(parts, f"{up}: {', '.join(f'{value:,.4g}' for value in values)}")


def reliability(bins: Sequence[Bin], across: str, up: str) -> str:
    """How often predictions are right against their confidence, and below, how many there are of each."""
    frame = _Frame(320, 300, 0, 1, 0, 1, bottom=78)
    fifths = [number / 5 for number in range(6)]
    parts = _axes(frame, fifths, fifths, across, up)
    most = max(1, *(one.count for one in bins))
    floor, deep = frame.height - 24, 26
    for one in bins:
        said = f"confidence {one.low:.1f} to {one.high:.1f}: {one.count:,} predictions"
        if one.count:
            said += f", mean confidence {one.confidence:.3f}, {one.accuracy:.3f} right"
            parts.append(_bar(frame, one.low + 0.008, one.high - 0.008, one.accuracy, 'class="accuracy"', said))
            parts.append(_error(frame, one.confidence, one.accuracy, one.stderr, "currentColor"))
            parts.append(shape("disc", frame.x(one.confidence), frame.y(one.accuracy), "currentColor", 3))
        tall = deep * one.count / most
        left, right = frame.x(one.low + 0.008), frame.x(one.high - 0.008)
        parts.append(
            f'<rect x="{left:.1f}" y="{floor - tall:.1f}" width="{right - left:.1f}" height="{tall:.1f}" '
            f'class="count"><title>{said}</title></rect>'
        )
    parts.append(_line(frame, [(0, 0), (1, 1)], "currentColor", "4 4", width=1))
    return frame.svg(parts, f"{up} against {across}")


def key(colour: str, dash: str | None = None, mark: str | None = None) -> str:
    """A small picture of a line, of a mark, or of both."""
    parts = []
    if dash is not None:
        parts.append(f'<path d="M1 7H27" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>')
    if mark is not None:
        parts.append(shape(mark, 14, 7, colour))
    return f'<svg class="key" viewBox="0 0 28 14" aria-hidden="true">{"".join(parts)}</svg>'


def shape(name: str, x: float, y: float, colour: str, size: float = 4.5) -> str:
    """A mark of `SHAPES` around a point."""
    if name == "disc":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{colour}"/>'
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "triangle": ((0, -1.2), (1.2, 1), (-1.2, 1)),
        "diamond": ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
    }[name]
    path = " ".join(f"{x + size * right:.1f},{y + size * down:.1f}" for right, down in corners)
    return f'<polygon points="{path}" fill="{colour}"/>'


def averaged(values: Sequence[float], points: int = SMOOTHED) -> list[tuple[float, float]]:
    """(middle step, mean) of at most `points` stretches of equal length."""
    return averaged_points([(number, value) for number, value in enumerate(values, start=1)], points)


def averaged_points(values: Points, points: int = SMOOTHED) -> list[tuple[float, float]]:
    """(mean, mean) of at most `points` stretches with equally many of the values each."""
    width = max(1, math.ceil(len(values) / points))
    parts = [values[at : at + width] for at in range(0, len(values), width)]
    return [(_mean([x for x, _ in part]), _mean([y for _, y in part])) for part in parts]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@dataclass(frozen=True)
class _Frame:
    """Where numbers lie in a picture of `width` and `height`."""

    width: int
    height: int
    first: float
    last: float
    low: float
    high: float
    log: bool = False
    left: int = 52
    right: int = 22
    top: int = 14
    bottom: int = 44

    def x(self, value: float) -> float:
        first, last, at = (math.log(v) if self.log else v for v in (self.first, self.last, value))
        return self.left + (self.width - self.left - self.right) * (at - first) / (last - first)

    def y(self, value: float) -> float:
        return self.top + (self.height - self.top - self.bottom) * (self.high - value) / (self.high - self.low)

    def svg(self, parts: Sequence[str], spoken: str) -> str:
        head = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{html.escape(spoken)}">'
        return "".join([head, *parts, "</svg>"])


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, at most seven, from below `low` to above `high`."""
    span = max(high - low, 1e-6)
    unit = 10.0 ** math.floor(math.log10(span))
    step = next(unit * m for m in (0.2, 0.5, 1.0, 2.0) if span / (unit * m) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Powers of two around two positive numbers, at most nine."""
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    last = max(last, first + 1)
    every = math.ceil((last - first) / 8)
    return [2.0**number for number in range(first, last + every, every)]


def _axes(
    frame: _Frame, across_ticks: Sequence[float], up_ticks: Sequence[float], across: str, up: str
) -> list[str]:
    middle, half = (frame.left + frame.width - frame.right) / 2, (frame.top + frame.height - frame.bottom) / 2
    parts = [_grid(frame, tick) for tick in up_ticks]
    below = frame.height - frame.bottom + 18
    parts += [
        f'<text x="{frame.x(tick):.1f}" y="{below}" text-anchor="middle">{short(tick)}</text>'
        for tick in across_ticks
    ]
    parts.append(f'<text x="{middle}" y="{frame.height - 6}" text-anchor="middle">{html.escape(across)}</text>')
    turned = f'transform="rotate(-90 14 {half})"'
    parts.append(f'<text x="14" y="{half}" text-anchor="middle" {turned}>{html.escape(up)}</text>')
    return parts


def _grid(frame: _Frame, tick: float) -> str:
    y = frame.y(tick)
    line = f'<line x1="{frame.left}" x2="{frame.width - frame.right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
    return f'{line}<text x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>'


def short(value: float) -> str:
    """A round number with as few letters as an axis has room for."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:.10g}"


def _drawn(frame: _Frame, one: Series) -> list[str]:
    colour = palette.colour(one.colour)
    parts = [_line(frame, one.points, colour, one.dash)] if one.joined and len(one.points) > 1 else []
    for (x, y), error in zip(one.points, one.errors, strict=False):
        if error:
            parts.append(_error(frame, x, y, error, colour))
    for (x, y), name in zip(one.points, one.shapes, strict=False):
        parts.append(shape(name, frame.x(x), frame.y(y), colour))
    return parts


def _ends(one: Series) -> list[float]:
    """The heights that a series needs room for."""
    errors = [*one.errors, *[None] * (len(one.points) - len(one.errors))]
    return [y + sign * (error or 0) for (_, y), error in zip(one.points, errors, strict=True) for sign in (-1, 1)]


def _line(frame: _Frame, points: Points, colour: str, dash: str, width: float = 2.5) -> str:
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashed}/>'


def _error(frame: _Frame, x: float, y: float, error: float, colour: str) -> str:
    at = frame.x(x)
    ends = f'y1="{frame.y(y - error):.1f}" y2="{frame.y(y + error):.1f}"'
    return f'<line x1="{at:.1f}" x2="{at:.1f}" {ends} stroke="{colour}" stroke-width="1.5"/>'


def _bar(frame: _Frame, left: float, right: float, value: float, look: str, said: str) -> str:
    x, y = frame.x(left), frame.y(value)
    size = f'width="{frame.x(right) - x:.1f}" height="{max(0.0, frame.y(0) - y):.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} {look}><title>{html.escape(said)}</title></rect>'


def _name(x: float, y: float, name: str, colour: str) -> str:
    return f'<text x="{x:.1f}" y="{y + 4:.1f}" class="name" style="fill:{colour}">{html.escape(name)}</text>'


def _apart(heights: list[float], gap: float = 16) -> list[float]:
    """The same heights, moved so that names do not cover each other."""
    placed = dict.fromkeys(range(len(heights)), 0.0)
    last = -math.inf
    for number in sorted(placed, key=heights.__getitem__):
        placed[number] = last = max(heights[number], last + gap)
    return list(placed.values())


def _spoken(names: Sequence[str], lines: Sequence[Points], up: str) -> str:
    said = (f"{name} from {points[0][1]:.2f} to {points[-1][1]:.2f}"
            for name, points in zip(names, lines, strict=True) if points)  # fmt: skip
    return f"{up}: {', '.join(said)}"


# --- a text that was filled in -----------------------------------------------------------------------------------


MOST_TOKENS = 64  # more do not fit beside each other


def draw_filling(filling: Filling, path: Path) -> None:
    """One line per chunk, its tokens in its colour, blanks empty: PNG or SVG after the file's name."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    length = min(MOST_TOKENS, len(filling.tokens))
    lines = sorted({0, *filling.chunks})
    figure, axis = plt.subplots(figsize=(1.8 + 0.2 * length, 0.3 + 0.32 * len(lines)), layout="constrained")
    for number, chunk in enumerate(lines):
        for position in range(1, length):
            by = filling.chunks[position]
            ground = "#ffffff" if by > chunk else colour(by) if by == chunk > 0 else "#eeeeee"
            letter = "" if by > chunk else filling.tokens[position].replace(" ", "·")
            axis.add_patch(Rectangle((position, -number), 1, 0.9, facecolor=ground, edgecolor="#999999", lw=0.4))
            axis.text(
                position + 0.5, 0.42 - number, letter, ha="center", va="center", fontsize=8, color=ink(ground),
                family="monospace", parse_math=False,
            )  # fmt: skip
        label = "given" if chunk == 0 else f"chunk {chunk}, {_forwards(filling, chunk)}"
        axis.text(0.8, 0.42 - number, label, ha="right", va="center", fontsize=7)
    axis.set(xlim=(-7, length), ylim=(1 - len(lines), 1))
    axis.axis("off")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _forwards(filling: Filling, chunk: int) -> str:
    count = sum(any(filling.chunks[p] == chunk for p in step) for step in filling.steps)
    return f"{count} forward" + ("s" if count > 1 else "")


# --- masks: `python -m dcdm.viewing.plots [FOLDER]` --------------------------------------------------------------


def draw_masks(folder: str) -> list[str]:
    """Write one PNG per mask into `folder`, on a small example; returns the paths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    ids = torch.tensor([0, 2, 1, 1, 3, 2, 1, 3, 2, 2, 1, 3])
    masked = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0]).bool()
    order = ids.argsort(stable=True)
    both = torch.cat([order, order + len(ids)])
    one = Slots.of(ids, masked)
    streams = dual_stream_slots(ids)
    sorted_labels = streams.chunk[both].tolist(), streams.stream[both].tolist()
    examples = [
        (noise, one, [f"{p}{'·' if m else ''}" for p, m in enumerate(masked.tolist())], "dots: masked"),
        (chunk_causal, one, ids.tolist(), "labels: chunks"),
        (causal, one, list(range(len(ids))), "labels: positions"),
        (dual_stream, streams, [f"z{c}" for c in ids.tolist()] + [f"x{c}" for c in ids.tolist()], "z ⊕ x"),
        (
            dual_stream.named("dual_stream_sorted"),
            streams[both],
            [f"{'z' if s else 'x'}{c}" for c, s in zip(*sorted_labels, strict=True)],
            "the same mask, slots sorted by chunk",
        ),
    ]
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for mask, slots, labels, note in examples:
        size = 1.6 + 0.19 * len(labels)
        figure, axis = plt.subplots(figsize=(size, size), layout="constrained")
        axis.imshow(mask.dense(slots), cmap=ListedColormap(["#f2f2f2", "#0072b2"]), vmin=0, vmax=1)
        axis.set_xticks(range(len(labels)), [str(x) for x in labels], fontsize=6)
        axis.set_yticks(range(len(labels)), [str(x) for x in labels], fontsize=6)
        axis.set_xticks([x - 0.5 for x in range(len(labels) + 1)], minor=True)
        axis.set_yticks([x - 0.5 for x in range(len(labels) + 1)], minor=True)
        axis.grid(which="minor", color="white", linewidth=0.6)
        axis.tick_params(which="both", length=0)
        axis.set(xlabel="key", ylabel="query")
        axis.set_title(f"{mask.name.replace('_', ' ')} ({note})", fontsize=9)
        paths.append(str(Path(folder) / f"{mask.name}.png"))
        figure.savefig(paths[-1], dpi=110)
        plt.close(figure)
    return paths


if __name__ == "__main__":
    import sys

    print("\n".join(draw_masks(sys.argv[1] if len(sys.argv) > 1 else ".")))
