"""Pictures of a study: exact figures against forwards, and curves of training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dcdm.reproduction.intervals import Interval
from dcdm.reproduction.measuring import curve_of
from dcdm.reproduction.study import Row, Study

MARKERS = "sovD^P<X>*hpd"


def draw_frontier(study: Study, rows: Sequence[Row], path: Path) -> None:
    """Exact nats against forwards per window, a line for each variant; bars are intervals over seeds."""
    from matplotlib.figure import Figure

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
    paced = any(row.estimator == "drafted" for row in rows)
    what = "exact figures, bounds for several lanes with drafts" if paced else "exact figures"
    axes.set(xlabel="forwards per window (log scale)", ylabel="nats per token of held-out text")
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


def training_curve(study: Study, variant: str, figures: Mapping[str, dict[str, Any]]) -> list[tuple[float, float]]:
    """Steps, or minutes where the study knows all of them, and the valid figure of held-out text, mean over seeds.

    Over minutes, a variant with start weights begins where the training of those ended.
    """
    finished = [run.name for run in study.runs() if run.variant == variant and run.name in figures]
    seen: dict[int, list[float]] = {}
    for run in finished:
        for step, nll in curve_of(figures[run]):
            seen.setdefault(step, []).append(nll)
    complete = {step: fmean(values) for step, values in sorted(seen.items()) if len(values) == len(finished)}
    if not study.over_minutes:
        return list(complete.items())
    unit = (study.minutes_of(variant) or 0.0) / max(complete, default=1)
    before = sum(study.minutes_of(name) or 0.0 for name in study.ancestors(variant))
    return [(before + unit * step, nll) for step, nll in complete.items()]


def draw_curves(
    study: Study, figures: Mapping[str, dict[str, Any]], path: Path, only: Collection[str] = ()
) -> None:
    """The valid figure of held-out text while training, a line for each variant, or for those named."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.2), layout="constrained")
    axes = figure.subplots()
    for number, variant in enumerate(name for name in study.variants if name in (only or study.variants)):
        if points := training_curve(study, variant, figures):
            axes.plot(
                *zip(*points, strict=True), marker=MARKERS[number % len(MARKERS)], markersize=4, linewidth=1.2,
                label=study.named(variant),
            )  # fmt: skip
    across = "minutes" if study.over_minutes else "steps"
    axes.set(xlabel=across, ylabel="nats per token of held-out text (exact or bound)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8, ncols=2)
    figure.savefig(path, dpi=110)
