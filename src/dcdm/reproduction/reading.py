"""Results as they stand in their folder, and what can be said of them over seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from dcdm.config import ConfigError
from dcdm.reproduction.runs import FREQUENCIES, MACHINE, REFERENCE

NORMAL = 1.959964
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""97.5 % points of Student's distribution by degrees of freedom; `student` has those beyond."""
SAME_PLACE = 0.01  # of a training run: points of curves that are closer are one

Path_ = tuple[str, ...]
VALID = ("heldout", "valid")


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half the width of its 95 % interval; None where one seed or window shows no spread."""

    mean: float
    half: float | None
    seeds: int

    @property
    def below_zero(self) -> bool:
        return self.half is not None and self.mean + self.half < 0

    @property
    def above_zero(self) -> bool:
        return self.half is not None and self.mean - self.half > 0


def student(freedom: int) -> float:
    """The 97.5 % point of Student's distribution."""
    if freedom in STUDENT:
        return STUDENT[freedom]
    z, n = NORMAL, freedom
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


def interval(values: Sequence[float], shared: float | None = 0.0) -> Interval | None:
    """Mean and 95 % interval over seeds; `shared` is half an interval of something else that all seeds share."""
    if not values:
        return None
    mean, count = statistics.fmean(values), len(values)
    own = half_width(values)
    return Interval(mean, None if own is None or shared is None else math.hypot(own, shared), count)


def half_width(values: Sequence[float]) -> float | None:
    """Half of Student's 95 % interval of a mean; None of a single value."""
    if len(values) < 2:
        return None
    return student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


@dataclass
class Results:
    """Every finished run of a scale."""

    scale: str
    runs: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    machines: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    frequencies: dict[str, Any] = field(default_factory=dict)
    """Measures of single tokens' frequencies: the same for every seed, read as a variant of that name."""

    def seeds(self, *variants: str) -> list[int]:
        """Seeds that all of these variants have finished."""
        own = [
            {seed for name, seed in self.runs if name == variant} for variant in variants if variant != FREQUENCIES
        ]
        return sorted(set.intersection(*own)) if own else [0] if self.frequencies else []

    def figure(self, variant: str, seed: int, path: Path_) -> Any:
        """What stands under `path` of a run's measures; None where it does not."""
        value: Any = self.runs.get((variant, seed), {}).get("measures")
        if variant == FREQUENCIES:
            value = self.frequencies
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def mean(
        self, variant: str, path: Path_, key: str = "nats_per_token", seeds: Sequence[int] | None = None
    ) -> Interval | None:
        """A figure of a variant over its seeds, or over some of them; the interval is over seeds alone."""
        chosen = self.seeds(variant) if seeds is None else seeds
        found = [self.figure(variant, seed, (*path, key)) for seed in chosen]
        return interval([value for value in found if value is not None])

    def difference(
        self, one: str, other: str, path: Path_ = VALID, other_path: Path_ | None = None
    ) -> Interval | None:
        """Nats per token of `one` minus those of `other`, seed by seed on the windows that all of them have."""
        pairs = [
            (_windows(self.figure(one, seed, path)), _windows(self.figure(other, seed, other_path or path)))
            for seed in self.seeds(one, other)
        ]
        pairs = [pair for pair in pairs if all(pair)]
        common = sorted(set.intersection(*(set(side) for pair in pairs for side in pair))) if pairs else []
        if not common:
            return None
        rows = [[mine[n][0] - theirs[n][0] for n in common] for mine, theirs in pairs]
        tokens = [pairs[0][0][n][1] for n in common]
        columns = zip(zip(*rows, strict=True), tokens, strict=True)
        windows = [statistics.fmean(column) / count for column, count in columns]
        return interval([sum(row) / sum(tokens) for row in rows], half_width(windows))

    def at_frequencies(self) -> list[tuple[str, int]]:
        """Runs whose valid figure is not surely below that of single tokens' frequencies, over the same windows."""
        held = _windows(self.figure(FREQUENCIES, 0, VALID))
        found = []
        for name, seed in sorted(self.runs):
            own = _windows(self.figure(name, seed, VALID))
            gained = [(own[n][0] - held[n][0]) / held[n][1] for n in sorted(own.keys() & held.keys())]
            if gained and statistics.fmean(gained) + (half_width(gained) or math.inf) >= 0:
                found.append((name, seed))
        return found


def _windows(figures: Any) -> dict[int, tuple[float, int]]:
    """Number of a window → its nats and tokens; {} where figures are not kept by window."""
    if not isinstance(figures, dict):
        return {}
    columns = [figures.get(name, []) for name in ("numbers", "window_nats", "window_tokens")]
    return {number: (nats, tokens) for number, nats, tokens in zip(*columns, strict=False)}


def read_results(folder: Path, scale: str) -> Results:
    """All results of a scale under `folder`; there may be none."""
    place = folder / scale
    results = Results(scale)
    for path in sorted(place.glob("*.json")):
        run = _read(path)
        key = (run["variant"], run["seed"])
        results.runs[key] = run
        machine = place / MACHINE / path.name
        if machine.exists():
            results.machines[key] = _read(machine)
    reference = place / REFERENCE / f"{FREQUENCIES}.json"
    if reference.exists():
        results.frequencies = _read(reference)["measures"]
    return results


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); remove it and run its experiment again") from error


Curve = list[tuple[float, float]]
"""(tokens seen, value), in order."""


def curve_of(results: Results, variant: str, seed: int, name: str = "validation") -> Curve:
    """A run's curve, without points that the next one follows at once."""
    found = [(point[0], point[1]) for point in results.figure(variant, seed, ("curve", name)) or []]
    if not found:
        return []
    near = SAME_PLACE * found[-1][0]
    following = [*(tokens for tokens, _ in found[1:]), math.inf]
    return [point for point, later in zip(found, following, strict=True) if later - point[0] > near]


def final_losses(results: Results, variant: str, seeds: Sequence[int]) -> list[float]:
    """The last validation loss of each of these seeds."""
    return [curve[-1][1] for seed in seeds if (curve := curve_of(results, variant, seed))]


def aligned(curves: Sequence[Curve]) -> list[tuple[float, list[float]]]:
    """(tokens, value of every curve) at the points that all curves have.

    Whole curves have their points at the same steps, though not at the same tokens: visible prompts are drawn.
    """
    if not curves or not all(curves):
        return []
    if len({len(curve) for curve in curves}) == 1:
        together = [tuple(zip(*points, strict=True)) for points in zip(*curves, strict=True)]
        apart = min((b - a for (a, _), (b, _) in pairwise(curves[0])), default=math.inf)
        if all(max(tokens) - min(tokens) < 0.75 * apart for tokens, _ in together):  # none has lost a point
            return [(statistics.fmean(tokens), list(values)) for tokens, values in together]
    near, rows = SAME_PLACE * curves[0][-1][0], []
    for tokens, _ in curves[0]:
        points = [min(curve, key=lambda point: abs(point[0] - tokens)) for curve in curves]
        if all(abs(point[0] - tokens) <= near for point in points):
            rows.append((tokens, [value for _, value in points]))
    return rows


def curve_points(results: Results, variant: str, name: str = "validation") -> list[tuple[float, float, float]]:
    """(tokens, mean over seeds, standard deviation over seeds) of a variant's curve."""
    curves = [curve_of(results, variant, seed, name) for seed in results.seeds(variant)]
    return [
        (tokens, statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)
        for tokens, values in aligned([curve for curve in curves if curve])
    ]


def reached(curve: Curve, value: float) -> float | None:
    """Tokens at which a falling curve first is at `value`, between points by the straight line; None if never."""
    before: tuple[float, float] | None = None
    for tokens, now in curve:
        if now <= value:
            if before is None or before[1] == now:
                return tokens
            return before[0] + (tokens - before[0]) * (before[1] - value) / (before[1] - now)
        before = (tokens, now)
    return None


def worst(verdicts: Iterable[str], order: Sequence[str]) -> str:
    """The first of `order` that occurs."""
    there = set(verdicts)
    return next((verdict for verdict in order if verdict in there), order[-1])
