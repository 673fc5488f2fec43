"""Verdicts on claims: `one < other` is decided by the 95 % interval of their difference over paired seeds.

It is confirmed where the interval lies below zero, contradicted where it lies above, and undecided where it holds
zero; a claim of several comparisons is as good as its weakest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcdm.reproduction.intervals import Interval, interval
from dcdm.reproduction.measuring import curve_of
from dcdm.reproduction.study import BALANCE, STEP, Study, same_text, sides

CONFIRMED, CONTRADICTED, UNDECIDED = "confirmed", "contradicted", "undecided"
WEAKEST_FIRST = (CONTRADICTED, UNDECIDED, CONFIRMED)
COLOURS = {CONFIRMED: "tab:green", CONTRADICTED: "tab:red", UNDECIDED: "tab:gray"}


@dataclass(frozen=True)
class Compared:
    """One comparison of a claim, and what it says."""

    name: str
    difference: Interval | None

    @property
    def verdict(self) -> str:
        return verdict_of(self.difference)


@dataclass(frozen=True)
class Judged:
    """A claim with its comparisons."""

    name: str
    says: str
    parts: tuple[Compared, ...]

    @property
    def verdict(self) -> str:
        reached = {part.verdict for part in self.parts}
        return next((verdict for verdict in WEAKEST_FIRST if verdict in reached), UNDECIDED)


def verdict_of(difference: Interval | None) -> str:
    """What a difference that the claim wants below zero says."""
    if difference is None or difference.half is None:
        return UNDECIDED
    if difference.below_zero:
        return CONFIRMED
    return CONTRADICTED if difference.above_zero else UNDECIDED


def judge(study: Study, figures: Mapping[str, dict[str, Any]]) -> list[Judged]:
    """Every claim of the study, by the runs that are finished."""
    return [
        Judged(name, claim.says, tuple(_compared(study, figures, text) for text in claim.below))
        for name, claim in study.claims.items()
    ]


def _compared(study: Study, figures: Mapping[str, dict[str, Any]], text: str) -> Compared:
    (first, figure), (second, its_figure) = sides(study, text)
    one, other = _by_seed(study, figures, first, figure), _by_seed(study, figures, second, its_figure)
    found = {(run.variant, run.seed): figures[run.name] for run in study.runs() if run.name in figures}
    shared = [seed for seed in sorted(one.keys() & other.keys()) if same_text(found, seed, first, second)]
    return Compared(text, interval([one[seed] - other[seed] for seed in shared]))


def _by_seed(study: Study, figures: Mapping[str, dict[str, Any]], variant: str, figure: str) -> dict[int, float]:
    """Seed → value, of the runs that have the figure."""
    found = {
        run.seed: _value(figures[run.name], figure)
        for run in study.runs()
        if run.variant == variant and run.name in figures
    }
    return {seed: value for seed, value in found.items() if value is not None}


def _value(part: Mapping[str, Any], figure: str) -> float | None:
    """A figure of a run: nats per token; of `MaxVio` that; of `step N` the valid figure while training."""
    if figure == BALANCE:
        return part.get("valid", {}).get("max_violation")
    if figure.startswith(STEP):
        return dict(curve_of(part)).get(int(figure.removeprefix(STEP)))
    return part[figure]["nats_per_token"] if figure in part else None


def draw(study: Study, judged: Sequence[Judged], path: Path) -> None:
    """All comparisons with their intervals below the claim they belong to, in the colour of their verdict."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

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
            label.set(color=COLOURS[row.verdict], weight="bold")
        elif row.difference is not None:
            axes.errorbar(
                row.difference.mean, at, xerr=row.difference.half or 0.0, marker="o", markersize=4, capsize=3,
                color=COLOURS[row.verdict],
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
