"""Results as they stand in their folder, and what can be said of them over seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcdm.config import ConfigError
from dcdm.reproduction.runs import MACHINE

STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""97.5 % points of Student's distribution by degrees of freedom."""

Path_ = tuple[str, ...]
VALID = ("heldout", "valid")


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half the width of its 95 % interval; None where one seed says nothing about spread."""

    mean: float
    half: float | None
    seeds: int

    @property
    def below_zero(self) -> bool:
        return self.half is not None and self.mean + self.half < 0

    @property
    def above_zero(self) -> bool:
        return self.half is not None and self.mean - self.half > 0


def interval(values: Sequence[float], other_error: float = 0.0) -> Interval | None:
    """Mean and 95 % interval over seeds; `other_error` is a standard error that all seeds share."""
    if not values:
        return None
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Interval(mean, None, 1)
    spread = statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, math.hypot(STUDENT.get(count - 1, 2.0) * spread, 1.96 * other_error), count)


@dataclass
class Results:
    """Every finished run of a scale."""

    scale: str
    runs: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    machines: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def seeds(self, *variants: str) -> list[int]:
        """Seeds that all of these variants have finished."""
        own = [{seed for name, seed in self.runs if name == variant} for variant in variants]
        return sorted(set.intersection(*own)) if own else []

    def figure(self, variant: str, seed: int, path: Path_) -> Any:
        """What stands under `path` of a run's measures; None where it does not."""
        value: Any = self.runs.get((variant, seed), {}).get("measures")
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def mean(self, variant: str, path: Path_, key: str = "nats_per_token") -> Interval | None:
        """A figure of a variant over its seeds."""
        found = [self.figure(variant, seed, (*path, key)) for seed in self.seeds(variant)]
        return interval([value for value in found if value is not None])

    def difference(
        self, one: str, other: str, path: Path_ = VALID, other_path: Path_ | None = None
    ) -> Interval | None:
        """Nats per token of `one` minus those of `other`, seed by seed on the windows that both have."""
        pairs = [
            _paired(self.figure(one, seed, path), self.figure(other, seed, other_path or path))
            for seed in self.seeds(one, other)
        ]
        found = [pair for pair in pairs if pair is not None]
        if not found:
            return None
        windows = [statistics.fmean(column) for column in zip(*(rows for _, rows in found), strict=True)]
        error = statistics.stdev(windows) / math.sqrt(len(windows)) if len(windows) > 1 else 0.0
        return interval([mean for mean, _ in found], error)


def _paired(one: Any, other: Any) -> tuple[float, list[float]] | None:
    """Difference per token over common windows, and each window's."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return None
    places = [{number: at for at, number in enumerate(side["numbers"])} for side in (one, other)]
    common = sorted(set(places[0]) & set(places[1]))
    rows = [one["window_nats"][places[0][n]] - other["window_nats"][places[1][n]] for n in common]
    tokens = [one["window_tokens"][places[0][n]] for n in common]
    if not tokens:
        return None
    return sum(rows) / sum(tokens), [row / count for row, count in zip(rows, tokens, strict=True)]


def read_results(folder: Path, scale: str) -> Results:
    """All results of a scale under `folder`."""
    place = folder / scale
    results = Results(scale)
    for path in sorted(place.glob("*.json")):
        run = _read(path)
        key = (run["variant"], run["seed"])
        results.runs[key] = run
        machine = place / MACHINE / path.name
        if machine.exists():
            results.machines[key] = _read(machine)
    if not results.runs:
        raise ConfigError(f"--results {folder}: no results of scale {scale} there; `dcdm reproduce all` makes them")
    return results


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); remove it and run its experiment again") from error


def curve_points(results: Results, variant: str, name: str = "validation") -> list[tuple[float, float, float]]:
    """(share of training, mean over seeds, standard deviation over seeds) of a variant's curve."""
    curves = [results.figure(variant, seed, ("curve", name)) or [] for seed in results.seeds(variant)]
    curves = [curve for curve in curves if curve]
    if not curves or len({len(curve) for curve in curves}) > 1:
        return []
    points = []
    for at in range(len(curves[0])):
        values = [curve[at][1] for curve in curves]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        points.append(((at + 1) / len(curves[0]), statistics.fmean(values), spread))
    return points


def worst(verdicts: Iterable[str], order: Sequence[str]) -> str:
    """The first of `order` that occurs."""
    there = set(verdicts)
    return next((verdict for verdict in order if verdict in there), order[-1])
