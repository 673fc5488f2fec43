"""Charts by matplotlib, as SVG inside pages.

Text has neither colour nor family of its own, so that the page's style decides, and everything else is
readable on light and on dark ground. The same numbers always give the same bytes.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

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
