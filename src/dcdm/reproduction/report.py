"""The page and the tables of the document: both come from stored results alone, in seconds."""

from __future__ import annotations

import base64
import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from dcdm.files import write_whole
from dcdm.reproduction.claims import WEAKEST_FIRST, Claim, Comparison, claims
from dcdm.reproduction.plots import Plot, draw, plots
from dcdm.reproduction.results import Results
from dcdm.reproduction.tables import grids, shown
from dcdm.viewing.page import assemble, badge, paragraph, section

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
    parts = [section("What was found", found(claims(results)), wide=True)]
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


def found(every: Sequence[Claim]) -> str:
    """The verdicts counted, and for each claim the interval that decides it, about zero."""
    counted = Counter(claim.verdict for claim in every)
    counts = "".join(
        f'<span class="verdict {verdict}">{counted[verdict]} {verdict}</span>'
        for verdict in reversed(WEAKEST_FIRST)
    )
    rule = (
        "A claim says that a difference lies below zero. It is confirmed where the 95 % interval over paired seeds "
        "does, contradicted where the interval lies on the other side, undecided where it holds zero. Of several "
        "comparisons the weakest decides; it is the one drawn, in nats per token where no other unit is named."
    )
    reach: dict[str, float] = {}
    for part in (claim.deciding for claim in every):
        if part is not None and part.difference is not None:
            far = 1.08 * (abs(part.difference.mean) + (part.difference.half or 0.0))
            reach[part.unit] = max(reach.get(part.unit, 0.0), far)
    rows = "".join(_forest_row(claim, reach) for claim in every)
    sides = (
        '<div class="sides"><span><span>← as claimed</span><span>0</span><span>the other way →</span></span></div>'
    )
    return f'<p class="counts">{counts}</p>{paragraph(rule)}<div class="forest">{sides}{rows}</div>'


def _forest_row(claim: Claim, reach: Mapping[str, float]) -> str:
    part, drawn, number = claim.deciding, "", ""
    if part is not None and part.difference is not None:
        drawn, number = _interval_drawing(part, reach[part.unit]), shown(part.difference, sign=True)
    of = ", ".join(f"{count} {verdict}" for verdict, count in claim.counts().items())
    basis = part.name if part is not None else "no finished runs to compare"
    if len(claim.parts) > 1:
        basis += f"; of {len(claim.parts)} comparisons {of}"
    statement = claim.statement[:1].upper() + claim.statement[1:]
    return (
        f'<div><p>{html.escape(statement)}<br><span class="small quiet">{html.escape(basis)}</span></p>'
        f'{drawn or "<span></span>"}<span class="number">{number}</span>{badge(claim.verdict)}</div>\n'
    )


def _interval_drawing(part: Comparison, reach: float) -> str:
    """A bar from end to end of the interval, with a tick at its mean; zero stands in the middle."""
    assert part.difference is not None
    mean, half = part.difference.mean, part.difference.half or 0.0
    scale = 100 / reach if reach else 0.0  # nothing reaches anywhere where the only difference is 0
    left, right, middle = (100 + scale * value for value in (mean - half, mean + half, mean))
    words = f"{part.name}: {shown(part.difference, sign=True)}, {part.verdict}"
    return (
        f'<svg class="{part.verdict}" viewBox="0 0 200 20" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(words)}"><line class="zero" x1="100" x2="100" y1="0" y2="20"/>'
        f'<line class="interval" x1="{left:.1f}" x2="{right:.1f}" y1="10" y2="10"/>'
        f'<line class="mean" x1="{middle:.1f}" x2="{middle:.1f}" y1="4" y2="16"/></svg>'
    )


def _image(plot: Plot) -> str:
    """A drawing inside the page, apart from it, so that names of its parts do not meet those of others."""
    data = base64.b64encode(draw(plot).encode()).decode()
    return (
        f'<img alt="{html.escape(plot.up)} over {html.escape(plot.across)}" src="data:image/svg+xml;base64,{data}">'
    )
