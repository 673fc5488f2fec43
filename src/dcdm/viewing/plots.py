"""Plots by matplotlib: charts as SVG inside pages, and masks as PNG files.

In a page, text has neither colour nor family of its own, so that the page's style decides, and everything else is
readable on light and on dark ground. The same numbers always give the same bytes.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from dcdm.lanes.masks import led_positions, left
from dcdm.model.masks import CLEAN, Mask, Slots, causal, chunk_causal, dual_stream, dual_stream_slots, noise
from dcdm.viewing.palette import colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    """A line of a chart, and marks in its colour; without points only its place in the row of colours is taken."""

    name: str
    points: Points
    marks: Points = ()
    errors: Sequence[float] = ()
    """± of each mark."""


def averaged(values: Points, points: int = SMOOTHED) -> list[tuple[float, float]]:
    """(mean, mean) of at most `points` stretches with equally many of the values each."""
    width = max(1, math.ceil(len(values) / points))
    parts = [values[at : at + width] for at in range(0, len(values), width)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]


def chart(curves: Sequence[Curve], across: str, up: str, marks: str = "") -> str:
    """The curves as an SVG element that asks for nothing from outside; "" where none has a point.

    `marks` is what the legend calls them.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return ""
    text = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        legend_rows = math.ceil((len(drawn) + bool(marks)) / 3)
        figure = Figure(figsize=(5.4, 3.2 + 0.22 * legend_rows), layout="constrained")
        axis = figure.subplots()
        for number, curve in enumerate(curves):
            if curve in drawn:
                _draw_curve(axis, curve, colour(number + 1), DASHES[number % len(DASHES)])
        if marks:
            axis.plot([], [], color=GREY, marker="o", linestyle="", label=marks)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set(xlabel=across, ylabel=up)
        axis.grid(axis="y", color=GREY, alpha=0.3)
        figure.legend(loc="outside lower left", ncols=3, fontsize=9)
        figure.draw_without_rendering()  # ticks follow from the layout and the layout from ticks
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    ranges = [f"{one.name} from {one.points[0][1]:,.4g} to {one.points[-1][1]:,.4g}" for one in drawn]
    return _for_a_page(text.getvalue(), spoken=f"{up}: {', '.join(ranges)}")


def _draw_curve(axis: Axes, curve: Curve, shade: str, dash: str) -> None:
    alone = "." if len(curve.points) == 1 else ""  # a line of one point would not be seen
    axis.plot(*zip(*curve.points, strict=True), color=shade, linestyle=dash, marker=alone, lw=2, label=curve.name)
    if curve.marks:
        x, y = zip(*curve.marks, strict=True)
        axis.errorbar(x, y, curve.errors, color=shade, fmt="o", markersize=6, elinewidth=1.5)


def _for_a_page(svg: str, spoken: str) -> str:
    """The element alone, with words for those who cannot see it, without what the page decides."""
    size = re.search(r'viewBox="[^"]*"', svg)
    assert size is not None
    head = f'<svg {size[0]} role="img" aria-label="{html.escape(spoken)}" stroke-linejoin="round">'
    inner = svg[svg.index(">", svg.index("<svg")) + 1 :]
    for useless in (
        r"(?s)<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>",
        r'(?<=<g) id="[^"]*"',  # the same in every drawing, but a page may have many
        r"font-family: [^;\"]*; ",
    ):
        inner = re.sub(useless, "", inner)
    inner = re.sub("<[^>]*>", lambda tag: re.sub(r"(?<=\.\d\d)\d+", "", tag[0]), inner)  # coordinates, no labels
    return re.sub(r"\s*\n\s*", " ", head + inner).strip()


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
