"""Draw what a study's claims rest on: `python tools/draw_claims.py STUDY RESULTS PICTURE`.

That of docs/reproduction.md: studies/claims.yaml results/claims.json docs/images/claims.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dcdm.studies.results import CONFIRMED, CONTRADICTED, UNDECIDED, Compared, Judged, judge
from dcdm.studies.runner import stored_figures
from dcdm.studies.study import Study, read_study

COLOURS = {CONFIRMED: "tab:green", CONTRADICTED: "tab:red", UNDECIDED: "tab:gray"}
NOBODY_KNOWS = COLOURS[UNDECIDED]
"""Of what was not run, or with one seed."""


def draw(study: Study, judged: list[Judged], path: Path) -> None:
    """All comparisons with their intervals below the claim they belong to, in the colour of their verdict."""
    rows: list[Judged | Compared] = []
    for claim in judged:
        rows += [claim, *claim.parts]
    figure = Figure(figsize=(8.5, 1.2 + 0.2 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="0.4", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=7.5)
    for at, (row, label) in enumerate(zip(rows, axes.get_yticklabels(), strict=True)):
        if isinstance(row, Judged):
            axes.axhline(at - 0.5, color="0.85", linewidth=0.8)
            label.set(color=COLOURS.get(row.verdict, NOBODY_KNOWS), weight="bold")
        elif row.difference is not None:
            axes.errorbar(
                row.difference.mean, at, xerr=row.difference.half or 0.0, marker="o", markersize=4, capsize=3,
                color=COLOURS.get(row.verdict, NOBODY_KNOWS),
            )  # fmt: skip
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("symlog", linthresh=0.2)
    ticks = (-2, -1, -0.5, -0.2, -0.1, 0, 0.1, 0.2, 0.5, 1, 2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=7.5)
    axes.minorticks_off()
    axes.set_xlabel("left of zero favours the claim: nats per token, or MaxVio", fontsize=8)
    axes.set_title(f"{study.name}: 95 % intervals over paired seeds", fontsize=9, loc="left")
    handles = [Line2D([], [], marker="o", color=colour, label=verdict) for verdict, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", fontsize=8, ncols=3)
    figure.savefig(path, dpi=110)


def _label(row: Judged | Compared) -> str:
    return f"{row.says}: {row.verdict}" if isinstance(row, Judged) else row.name.replace(" < ", "  −  ")


if __name__ == "__main__":
    file, results, picture = map(Path, sys.argv[1:])
    asked = read_study(file)
    draw(asked, judge(asked, stored_figures(asked, results)), picture)
