"""Self-contained pages: one file, nothing from outside, to be opened from a disk or sent by mail.

First the skeleton, its pieces and charts, last the pages about a text: its chunks, and how it is filled in.
`dcdm demo` has its own.

Every page is `assets/page.html` around a body, NAME.html, its data as JSON, and pieces of style and script from
`assets/`. Scripts there are modules, which the server's page loads as such; here all that a page needs become
one script.
"""

from __future__ import annotations

import html
import io
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import fmean
from string import Template
from typing import TYPE_CHECKING, Any

from dcdm.viewing import palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dcdm.viewing.chunks import ChunkView

ASSETS = files("dcdm.viewing") / "assets"


def asset(name: str) -> str:
    """The text of a file in `assets/`."""
    return (ASSETS / name).read_text(encoding="utf-8")


def page(name: str, title: str, data: Any = None, *, script: str = "report", **parts: Any) -> str:
    """The page whose body is NAME.html, filled with `parts`, which are trusted HTML.

    Whatever is not trusted goes into `data`, which scripts show as text. `script` names the page's own script and
    style in `assets/`, SCRIPT.js and SCRIPT.css; what the script imports comes with it, and so do the styles of the
    same names.
    """
    names = ["base"]
    _add_with_imports(script, names)
    styles = [asset(f"{one}.css") for one in names if (ASSETS / f"{one}.css").is_file()]
    return Template(asset("page.html")).substitute(
        title=html.escape(title),
        style="\n".join([palette_style(), *styles]),
        body=Template(asset(f"{name}.html")).substitute(parts, title=html.escape(title)),
        data=inlined(data),
        script="\n".join(_as_plain_script(f"{one}.js") for one in names[1:]),
    )


_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)


def _add_with_imports(name: str, names: list[str]) -> None:
    """Append a piece behind all that its script imports."""
    if name in names:
        return
    for imported in _IMPORT.findall(asset(f"{name}.js")):
        _add_with_imports(imported, names)
    names.append(name)


def _as_plain_script(name: str) -> str:
    """A module without its imports and exports, for a script that holds all modules; their names are distinct."""
    return re.sub(r"^export ", "", _IMPORT.sub("", asset(name)), flags=re.MULTILINE)


def inlined(data: Any) -> str:
    """JSON that may stand inside a script element: it holds no `<`, so nothing in it can end the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def palette_style() -> str:
    """The package's colours as classes `chunk-0`…`chunk-8` that set --chunk and --ink."""
    rules = (
        f".chunk-{k} {{ --chunk: {palette.colour(k)}; --ink: {palette.ink(palette.colour(k))}; }}"
        for k in range(len(palette.CHUNKS) + 1)
    )
    return "\n".join(rules)


# --- pieces of HTML that pages are put together from; every text is escaped here ---------------------------------


escape: Callable[[str], str] = html.escape


def section(title: str, inner: str, wide: bool = False) -> str:
    return f'<section class="panel{" wide" if wide else ""}">\n<h2>{escape(title)}</h2>\n{inner}\n</section>\n'


def items(texts: Sequence[str]) -> str:
    """The lines of a list."""
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def grid(header: Sequence[str], rows: Sequence[Sequence[Any]], text: Sequence[str] = ()) -> str:
    """A table; columns of `text` are set left."""
    looks = [' class="text"' if name in text else "" for name in header]
    head = "".join(f'<th scope="col"{look}>{escape(name)}</th>' for name, look in zip(header, looks, strict=True))
    lines = [
        "".join(f"<td{look}>{escape(str(cell))}</td>" for cell, look in zip(row, looks, strict=True))
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


# --- charts: SVG by matplotlib ------------------------------------------------------------------------------------
#
# Text has neither colour nor family of its own, so that the page's style decides, and everything else is readable
# on light and on dark ground. The same numbers always give the same bytes.


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
    """A line of a chart; without points only its place in the row of colours is taken."""

    name: str
    points: Points


def averaged(values: Points, points: int = SMOOTHED) -> list[tuple[float, float]]:
    """(mean, mean) of at most `points` stretches with equally many of the values each."""
    width = max(1, math.ceil(len(values) / points))
    parts = [values[at : at + width] for at in range(0, len(values), width)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]


def chart(curves: Sequence[Curve], across: str, up: str) -> str:
    """The curves as an SVG element that asks for nothing from outside; "" where none has a point."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return ""
    text = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        legend_rows = math.ceil(len(drawn) / 3)
        figure = Figure(figsize=(5.4, 3.2 + 0.22 * legend_rows), layout="constrained")
        axis = figure.subplots()
        for number, curve in enumerate(curves):
            if curve in drawn:
                _draw_curve(axis, curve, palette.colour(number + 1), DASHES[number % len(DASHES)])
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


def _for_a_page(svg: str, spoken: str) -> str:
    """The element alone, with words for those who cannot see it, without what the page decides."""
    size = re.search(r'viewBox="[^"]*"', svg)
    assert size is not None
    head = f'<svg {size[0]} role="img" aria-label="{escape(spoken)}" stroke-linejoin="round">'
    inner = svg[svg.index(">", svg.index("<svg")) + 1 :]
    for useless in (
        r"(?s)<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>",
        r'(?<=<g) id="[^"]*"',  # the same in every drawing, but a page may have many
        r"font-family: [^;\"]*; ",
    ):
        inner = re.sub(useless, "", inner)
    inner = re.sub("<[^>]*>", lambda tag: re.sub(r"(?<=\.\d\d)\d+", "", tag[0]), inner)  # coordinates, no labels
    return re.sub(r"\s*\n\s*", " ", head + inner).strip()


# --- the chunks of a text ----------------------------------------------------------------------------------------


def chunks_page(view: ChunkView) -> str:
    """The page of `dcdm chunks --html`: the view as one self-contained HTML file."""
    return page("chunks", f"Chunks · {view.model}", page_data(view), script="chunks")


def page_data(view: ChunkView) -> dict[str, Any]:
    """The view as the page reads it: scores to five digits, null where no router was asked."""
    data = view.to_dict()
    for frame in data["frames"]:
        frame["scores"] = [_short(row) for row in frame["scores"]] if any(frame["scores"]) else None
        frame["hidden"] = [int(hidden) for hidden in frame["hidden"]]
    return {**data, "bias": _short(data["bias"])}


def _short(values: list[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
