"""Plots by matplotlib: charts as SVG inside pages, and masks as PNG files.

In a page, text has neither colour nor family of its own, so that the page's style decides, and everything else is
readable on light and on dark ground. The same numbers always give the same bytes.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dcdm.lanes.masks import led_positions, left
from dcdm.model.masks import CLEAN, Mask, Slots, causal, chunk_causal, dual_stream, dual_stream_slots, noise
from dcdm.viewing.palette import colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHED = 40  # points that a curve is averaged down to
DASHES = ("-", "--", ":")
GREY = "#808080"  # what is readable on white and on black
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "dcdm", "font.size": 10, "text.parse_math": False,
    "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "xtick.labelcolor": "black",
    "ytick.labelcolor": "black", "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    name: str
    values: Sequence[float]
    """One for each step, from step 1."""


@dataclass(frozen=True)
class Series:
    """Points of a chart; `colour` counts from 1 as chunks do, 0 is grey. Without points: in the legend only."""

    name: str
    points: Points = ()
    colour: int = 1
    dash: str = ""
    """Of `DASHES`; "": the points are not joined."""
    markers: Sequence[str] = ()
    """A marker for each point, as matplotlib names them; none: a bare line."""
    errors: Sequence[float | None] = ()
    """± of each point."""
    in_legend: bool = True


# --- in pages ----------------------------------------------------------------------------------------------------


def line_plot(curves: Sequence[Curve], across: str, up: str) -> str:
    """The curves, averaged over stretches of steps."""
    return chart(
        [
            Series(curve.name, averaged(curve.values), number + 1, DASHES[number % len(DASHES)])
            for number, curve in enumerate(curves)
        ],
        across,
        up,
    )


def chart(series: Sequence[Series], across: str, up: str) -> str:
    """Lines and markers over numbers; "" where there is no point."""
    if not any(one.points for one in series):
        return ""

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import EngFormatter

        axis = figure.subplots()
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        for one in series:
            _draw_series(axis, one)
        axis.set(xlabel=across, ylabel=up)
        axis.grid(axis="y", color=GREY, alpha=0.3)
        figure.legend(loc="outside lower left", ncols=3, fontsize=9)

    legend_rows = math.ceil(sum(one.in_legend for one in series) / 3)
    return _page_svg((5.4, 3.2 + 0.22 * legend_rows), draw, _spoken(series, up))


def _draw_series(axis: Axes, one: Series) -> None:
    shade = colour(one.colour) if one.colour else GREY
    x, y = [x for x, _ in one.points], [y for _, y in one.points]
    marker = one.markers[0] if one.markers and not one.points else ""
    axis.plot(
        x, y, color=shade, linestyle=one.dash, marker=marker, linewidth=2,
        label=one.name if one.in_legend else "_",
    )  # fmt: skip
    for at, (px, py) in enumerate(one.points):
        if at < len(one.markers):
            axis.plot([px], [py], color=shade, marker=one.markers[at], markersize=6)
        if at < len(one.errors) and (error := one.errors[at]):
            axis.errorbar([px], [py], [error], color=shade, elinewidth=1.5)


def _page_svg(size: tuple[float, float], draw: Callable[[Figure], None], spoken: str) -> str:
    """What `draw` puts into a figure, as an SVG element that asks for nothing from outside."""
    import matplotlib
    from matplotlib.figure import Figure

    text = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.draw_without_rendering()  # ticks follow from the layout and the layout from ticks
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    size_of = re.search(r'viewBox="[^"]*"', svg)
    assert size_of is not None
    head = f'<svg {size_of[0]} role="img" aria-label="{html.escape(spoken)}" stroke-linejoin="round">'
    drawn = svg[svg.index(">", svg.index("<svg")) + 1 :]
    for useless in (
        r"(?s)<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>",
        r'(?<=<g) id="[^"]*"',  # the same in every drawing, but a page may have many
        r"font-family: [^;\"]*; ",
    ):
        drawn = re.sub(useless, "", drawn)
    drawn = re.sub("<[^>]*>", lambda tag: re.sub(r"(?<=\.\d\d)\d+", "", tag[0]), drawn)  # coordinates, no labels
    return re.sub(r"\s*\n\s*", " ", head + drawn).strip()


def _spoken(series: Sequence[Series], up: str) -> str:
    """A chart for those who cannot see it."""
    ranges = [f"{s.name} from {s.points[0][1]:,.4g} to {s.points[-1][1]:,.4g}" for s in series if s.points]
    return f"{up}: {', '.join(ranges)}"


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


# --- masks: `python -m dcdm.viewing.plots [FOLDER]` --------------------------------------------------------------


def draw_masks(folder: str) -> list[str]:
    """Write one PNG per mask into `folder`, on a small example; returns the paths."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

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
        *_left_examples(),
    ]
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for mask, slots, labels, note in examples:
        size = 1.6 + 0.19 * len(labels)
        figure = Figure(figsize=(size, size), layout="constrained")
        axis = figure.subplots()
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
    return paths


def _left_examples() -> list[tuple[Mask, Slots, list[str], str]]:
    """BOS and twelve tokens in three lanes, whose second and third start with a seed slot."""
    ids = torch.tensor([0, *[1, 2, 3, 4] * 3])
    seeds = (ids == 1) & ~led_positions(ids)
    clean, masked = Slots.of(ids, stream=CLEAN), Slots.of(ids, torch.ones_like(seeds))[seeds]
    lane = [0, *[number for number in "abc" for _ in range(4)]]
    labels = ["BOS", *(f"{lane[at]}{ids[at]}" for at in range(1, 13)), "?b1", "?c1"]
    order = [*ids.argsort(stable=True).tolist(), 13, 14]
    slots = Slots.cat(clean, masked)
    return [
        (left, slots, labels, "three lanes in reading order; ?: seeds"),
        (left.named("left_sorted"), slots[order], [labels[at] for at in order], "the same, sorted by chunk"),
    ]


if __name__ == "__main__":
    import sys

    print("\n".join(draw_masks(sys.argv[1] if len(sys.argv) > 1 else ".")))
