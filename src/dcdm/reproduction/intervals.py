"""Means over seeds and their 95 % intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dcdm.likelihood.statistics import known, mean_and_stderr

NORMAL = 1.959964
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""97.5 % points of Student's distribution by degrees of freedom; `student` has those beyond."""


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
    over_seeds = half_width(values)
    half = None if over_seeds is None or shared is None else math.hypot(over_seeds, shared)
    return Interval(mean, half, count)


def half_width(values: Sequence[float], sizes: Sequence[float] | None = None) -> float | None:
    """Half of Student's 95 % interval of a mean, with `sizes` of Σ values / Σ sizes; None of a single value."""
    sizes = [1] * len(values) if sizes is None else sizes
    error = known(mean_and_stderr(zip(values, sizes, strict=True))[1])
    return None if error is None else student(len(values) - 1) * error
