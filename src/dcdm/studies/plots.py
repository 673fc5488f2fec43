"""Pictures of a study: curves of training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from dcdm.studies.results import balance_of, curve_of
from dcdm.studies.study import Study

Curve = Callable[[Mapping[str, Any]], list[tuple[int, float]]]
"""What a run's figures tell of its training: step → value."""
MARKERS = "sovD^P<X>*hpd"


def training_curve(
    study: Study, variant: str, figures: Mapping[str, dict[str, Any]], read: Curve = curve_of
) -> list[tuple[float, float]]:
    """Steps, or minutes where the study knows them, and the valid figure of held-out text, mean over seeds."""
    finished = [run.name for run in study.runs() if run.variant == variant and run.name in figures]
    seen: dict[int, list[float]] = {}
    for run in finished:
        for step, value in read(figures[run]):
            seen.setdefault(step, []).append(value)
    complete = {step: fmean(values) for step, values in sorted(seen.items()) if len(values) == len(finished)}
    unit = 1 if study.minutes is None else study.minutes / max(complete, default=1)
    return [(unit * step, value) for step, value in complete.items()]


def draw_curves(
    study: Study, figures: Mapping[str, dict[str, Any]], path: Path, only: Collection[str] = ()
) -> None:
    """The valid figure of held-out text while training, and MaxVio of the training batches where variants have
    chunks: a line for each variant, or for those named."""
    from matplotlib.figure import Figure

    names = [name for name in study.variants if name in (only or study.variants)]
    panels: list[tuple[Curve, str]] = [(curve_of, "nats per token of held-out text (exact or bound)")]
    if any(training_curve(study, name, figures, balance_of) for name in names):
        panels.append((balance_of, "MaxVio of the training batches"))
    figure = Figure(figsize=(8.5 if len(panels) == 1 else 11.0, 5.2), layout="constrained")
    for axes, (read, up) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for number, variant in enumerate(names):
            if points := training_curve(study, variant, figures, read):
                label = study.named(variant) if read is curve_of else None
                axes.plot(
                    *zip(*points, strict=True), marker=MARKERS[number % len(MARKERS)], markersize=4, linewidth=1.2,
                    color=f"C{number}", label=label,
                )  # fmt: skip
        axes.set(xlabel="steps" if study.minutes is None else "minutes", ylabel=up)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8, ncols=2)
    figure.savefig(path, dpi=110)
