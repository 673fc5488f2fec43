"""The one standard error of every figure that is a mean per token: over windows, documents, texts or samples.

Rows (windows, documents) are the independent draws, and they differ in length. The figure is a ratio of two sums,
nats over tokens, so its error is that of a ratio: each row's deviation from what its length alone would give it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

UNKNOWN = math.nan
"""The standard error of a single row: nothing can be said about its spread."""


def mean_and_stderr(rows: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Σ nats / Σ tokens over rows (nats, tokens), and its standard error over rows.

    The error is √(n/(n−1) · Σ (nats − mean · tokens)²) / Σ tokens; for rows of equal length this is the textbook
    s/√n. `UNKNOWN` for fewer than two rows.
    """
    pairs = list(rows)
    tokens = max(1, math.fsum(size for _, size in pairs))
    mean = math.fsum(nats for nats, _ in pairs) / tokens
    if len(pairs) < 2:
        return mean, UNKNOWN
    spread = math.fsum((nats - mean * size) ** 2 for nats, size in pairs)
    return mean, math.sqrt(spread * len(pairs) / (len(pairs) - 1)) / tokens


def with_stderr(mean: float, stderr: float | None, digits: int = 4) -> str:
    """Mean ± standard error, for people; without what is not known."""
    return f"{mean:.{digits}f}" + ("" if stderr is None or math.isnan(stderr) else f" ± {stderr:.{digits}f}")


def known(value: float) -> float | None:
    """None in the place of `UNKNOWN`, for files and tables."""
    return None if math.isnan(value) else value
