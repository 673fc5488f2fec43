"""The page and the tables of the document: both come from stored results alone, in seconds."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping
from pathlib import Path

from dcdm.files import write_whole
from dcdm.reproduction.plots import Plot, draw, plots
from dcdm.reproduction.results import Results
from dcdm.reproduction.tables import grids
from dcdm.viewing.page import assemble, section

REGION = re.compile(r"(<!-- begin (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DRAWN_WITH = {
    "kinds": ("loss-curves",), "frontier": ("frontier", "frontier-partitions"), "scaling": ("scaling",),
    "learning-rate": ("learning-rate",), "k-ablation": ("k-ablation",),
    "point-vs-subspace": ("point-vs-subspace", "violation"),
}  # fmt: skip
"""Table → the drawings that stand under it."""
NOTHING = "*(No finished run yet.)*"


def write_report(results: Results, folder: Path, document: Path | None, images: Path) -> Path:
    """Write the page into `folder` and, where given, the document's tables and pictures; returns the page."""
    page = folder / f"{results.scale}.html"
    write_whole(page, page_of(results).encode())
    if document is not None:
        images.mkdir(parents=True, exist_ok=True)
        for name, plot in plots(results).items():
            write_whole(images / f"{name}.svg", draw(plot).encode())
        write_whole(document, filled(document.read_text(encoding="utf-8"), regions(results)).encode())
    return page


def regions(results: Results) -> dict[str, str]:
    """What may stand between a document's marks: tables, and `plot-NAME` for pictures."""
    tables = {name: grid.markdown() for name, grid in grids(results).items()}
    return tables | {f"plot-{name}": f"![{name}](images/reproduction/{name}.svg)" for name in plots(results)}


def filled(text: str, parts: Mapping[str, str]) -> str:
    """The document with every region between `<!-- begin NAME -->` and `<!-- end -->` made anew."""

    def region(match: re.Match[str]) -> str:
        return f"{match[1]}\n{parts.get(match['name'], NOTHING)}\n\n{match[3]}"

    return REGION.sub(region, text)


def page_of(results: Results) -> str:
    """One self-contained HTML file with every table and drawing."""
    tables, drawings = grids(results), {name: _image(plot) for name, plot in plots(results).items()}
    parts = []
    for name, grid in tables.items():
        drawn = "".join(f"<figure>{drawings[d]}</figure>" for d in DRAWN_WITH.get(name, ()) if d in drawings)
        parts.append(section(grid.title, grid.html() + drawn, wide=True))
    seeds = sorted({seed for _, seed in results.runs})
    summary = (
        f"{len(results.runs)} runs at {results.scale} scale, seeds {', '.join(map(str, seeds))}. Intervals are "
        "95 % over seeds. A surrogate is not a bound and never stands in one column with bounds."
    )
    body = (
        '<header><h1>The paper’s experiments, run</h1><p class="summary">'
        f'{html.escape(summary)}</p></header>\n<main class="sections">{"".join(parts)}</main>'
    )
    return assemble("DCDM: reproduction", body, {}, "report")


def _image(plot: Plot) -> str:
    """A drawing inside the page, apart from it, so that names of its parts do not meet those of others."""
    data = base64.b64encode(draw(plot).encode()).decode()
    return (
        f'<img alt="{html.escape(plot.up)} over {html.escape(plot.across)}" src="data:image/svg+xml;base64,{data}">'
    )
