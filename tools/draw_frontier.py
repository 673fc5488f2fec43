"""Draw a study's exact figures against forward passes: `python tools/draw_frontier.py STUDY RESULTS PICTURE`.

That of docs/lanes.md: studies/lanes-128.yaml results/lanes-128.json docs/images/lanes-frontier.png.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from dcdm.studies.plots import MARKERS
from dcdm.studies.results import Interval, Row, compare
from dcdm.studies.runner import stored_figures
from dcdm.studies.study import Study, read_study


def draw_frontier(study: Study, rows: Sequence[Row], path: Path) -> None:
    """Exact nats against forward passes per window, a line for each variant; bars are intervals over seeds."""
    figure = Figure(figsize=(8.5, 5.2), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    lines: dict[str, list[tuple[float, Interval]]] = {}
    for row in rows:
        if row.forwards is not None and not any(row.figure.startswith(f"{name}: ") for name in study.corpora):
            decoder = _decoder(row.figure)
            label = study.named(row.variant) + (f", {decoder}" if decoder else "")
            lines.setdefault(label, []).append((row.forwards, row.mean))
    for number, (label, points) in enumerate(lines.items()):
        points.sort(key=lambda point: point[0])
        axes.errorbar(
            [forwards for forwards, _ in points], [mean.mean for _, mean in points],
            [mean.half or 0.0 for _, mean in points], marker=MARKERS[number % len(MARKERS)], capsize=3,
            label=label, linewidth=1.2, markersize=6,
        )  # fmt: skip
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    drafted = any(row.estimator == "drafted" for row in rows)
    what = "exact figures, bounds for several lanes with drafts" if drafted else "exact figures"
    axes.set(xlabel="forward passes per window (log scale)", ylabel="nats per token of held-out text")
    title = f"{study.name}: lower left is better; {what}; bars: 95 % intervals over seeds"
    axes.set_title(title, fontsize=9, loc="left")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8, ncols=2)
    figure.savefig(path, dpi=110)


def _decoder(figure: str) -> str:
    """What parts a line of the frontier from others of its variant: AdaBlock, dilated commits, drafts."""
    if figure.startswith("adablock "):
        return "AdaBlock"
    return "dilated" if figure.startswith("dilated:") else figure.partition(", ")[2]


if __name__ == "__main__":
    file, results, picture = map(Path, sys.argv[1:])
    asked = read_study(file)
    draw_frontier(asked, compare(asked, stored_figures(asked, results)), picture)
