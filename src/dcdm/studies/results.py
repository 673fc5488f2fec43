"""What the figures of a study say: means over seeds with 95 % intervals, differences, and verdicts on its claims.

A claim's comparison `one < other` is confirmed where the interval of the difference over paired seeds lies below
zero, contradicted where it lies above, and undecided where it holds zero; a claim of several comparisons is as good
as its weakest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dcdm.files import digest
from dcdm.likelihood.statistics import known, mean_and_stderr
from dcdm.studies.study import BALANCE, STEP, Study

Figures = Mapping[str, dict[str, Any]]
"""Run → its figures by name."""
CONFIRMED, CONTRADICTED, UNDECIDED = "confirmed", "contradicted", "undecided"
NOT_RUN, ONE_SEED = "not run", "one seed"
WEAKEST_FIRST = (CONTRADICTED, NOT_RUN, ONE_SEED, UNDECIDED, CONFIRMED)
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""97.5 % points of Student's distribution by degrees of freedom; beyond, the last is a little too wide."""


# --- intervals ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half the width of its 95 % interval; None where one seed shows no spread."""

    mean: float
    half: float | None
    seeds: int

    def shown(self, sign: str = "") -> str:
        """Mean ± half, for people; `sign` is + where a mean above zero shows its sign."""
        return f"{self.mean:{sign}.3f}" + ("" if self.half is None else f" ± {self.half:.3f}")


def interval(values: Sequence[float]) -> Interval | None:
    """Mean and Student's 95 % interval over seeds."""
    if not values:
        return None
    error = known(mean_and_stderr((value, 1) for value in values)[1])
    return Interval(
        fmean(values), None if error is None else STUDENT.get(len(values) - 1, STUDENT[9]) * error, len(values)
    )


# --- figures of runs ----------------------------------------------------------------------------------------------


def by_seed(study: Study, figures: Figures, variant: str, figure: str) -> dict[int, float]:
    """Seed → value, of a variant's runs that have the figure."""
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


def curve_of(figures: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Step → valid figure of held-out text while a run was trained, from its figures."""
    return [(step, nll) for figure in figures.values() for step, nll in figure.get("curve", ())]


def balance_of(figures: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Step → MaxVio of the training batches since the step before, from the figures of a run."""
    return [(step, value) for figure in figures.values() for step, value in figure.get("balance", ())]


def same_texts(runs: Collection[Mapping[str, Any]]) -> bool:
    """Whether runs were trained and measured on the same texts, as far as their figures tell.

    Old results tell nothing, and a text that only one was measured on does not matter.
    """
    told: dict[str, str] = {}
    for figures in runs:
        texts: Mapping[str, str] = next((figure["text"] for figure in figures.values() if "text" in figure), {})
        if any(told.setdefault(name, text) != text for name, text in texts.items()):
            return False
    return True


def difference(study: Study, figures: Figures, one: tuple[str, str], other: tuple[str, str]) -> Interval | None:
    """One (variant, figure) minus another, over the seeds that both have on the same texts."""
    ours, theirs = by_seed(study, figures, *one), by_seed(study, figures, *other)
    paired = [
        ours[seed] - theirs[seed]
        for seed in sorted(ours.keys() & theirs.keys())
        if same_texts([figures[f"{variant}-s{seed}"] for variant, _ in (one, other)])
    ]
    return interval(paired)


@dataclass(frozen=True)
class Row:
    """A figure of a variant over its finished seeds."""

    variant: str
    figure: str
    estimator: str
    forwards: float | None
    mean: Interval
    difference: Interval | None
    """Minus the main figure of `against` on the same text, over the seeds that both have. None of a surrogate."""


def compare(study: Study, figures: Figures) -> list[Row]:
    """A row per variant and figure, over the seeds that are finished."""
    rows = []
    main = "" if study.against is None else study.main_figure(study.against)
    for variant in study.variants:
        parts = [figures[run.name] for run in study.runs() if run.variant == variant and run.name in figures]
        for figure in dict.fromkeys(name for part in parts for name in part):
            text = next((f"{name}: " for name in study.corpora if figure.startswith(f"{name}: ")), "")
            measured = [part[figure] for part in parts if figure in part]
            estimator, forwards = measured[0]["estimator"], [one["forwards"] for one in measured]
            mean = interval([one["nats_per_token"] for one in measured])
            assert mean is not None
            minus = None
            if study.against is not None and estimator != "surrogate":
                base = (study.against, text + main)
                minus = None if (variant, figure) == base else difference(study, figures, (variant, figure), base)
            spent = None if forwards[0] is None else fmean(forwards)  # drafts: each seed its own
            rows.append(Row(variant, figure, estimator, spent, mean, minus))
    return rows


def summary(study: Study, figures: Figures) -> dict[str, Any]:
    """The study's results as plain values: figures per run, without those of single windows."""
    runs = {
        run: {name: {key: value for key, value in one.items() if key != "nats"} for name, one in part.items()}
        for run, part in figures.items()
    }
    return {
        "study": study.name,
        "about": study.about,
        "windows": study.windows,
        "samples": study.samples,
        "measured_with": {run.name: run.measured_with() for run in study.runs() if run.name in runs},
        "runs": runs,
        "sha256": digest(runs),
    }


# --- verdicts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One comparison of a claim, and what it says."""

    name: str
    difference: Interval | None

    @property
    def verdict(self) -> str:
        """By the side of zero on which the interval lies; one seed decides nothing."""
        if self.difference is None:
            return NOT_RUN
        if (half := self.difference.half) is None:
            return ONE_SEED
        if self.difference.mean + half < 0:
            return CONFIRMED
        return CONTRADICTED if self.difference.mean - half > 0 else UNDECIDED


@dataclass(frozen=True)
class Judged:
    """A claim with its comparisons."""

    name: str
    says: str
    parts: tuple[Compared, ...]

    @property
    def verdict(self) -> str:
        reached = {part.verdict for part in self.parts}
        return next((verdict for verdict in WEAKEST_FIRST if verdict in reached), NOT_RUN)


def judge(study: Study, figures: Figures) -> list[Judged]:
    """Every claim of the study, by the runs that are finished."""
    return [
        Judged(
            name, claim.says,
            tuple(Compared(text, difference(study, figures, *study.sides(text))) for text in claim.below),
        )
        for name, claim in study.claims.items()
    ]  # fmt: skip
