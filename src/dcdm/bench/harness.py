"""How paths are timed and shown: warm-up, interleaved repetitions, median and spread, peak memory.

Peak memory is that of one path in a fresh process, which `python -m dcdm.bench.subjects` is.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dcdm.viewing.tables import Table

Run = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """Paths that do the same work. `paths` maps a name to a maker of the run, so that memory is taken late."""

    name: str
    paths: dict[str, Callable[[], Run]]
    baselines: tuple[str, ...]
    """The ratio of a path is to the fastest of these."""
    target: float | None = None
    """The least ratio that the first path is meant to reach."""


@dataclass(frozen=True)
class PathTiming:
    subject: str
    case: str
    path: str
    median: float
    low: float
    high: float
    ratio: float | None
    """Time of the fastest baseline over this path's; None for the baselines themselves."""
    target: float | None
    megabytes: float | None = None


def measure_case(
    subject: str, case: Case, repeats: int, memory: bool, say: Callable[[str], None]
) -> list[PathTiming]:
    """Time every path of a case, taking turns so that a busy moment hits all of them."""
    runs = {}
    for name, make in case.paths.items():
        say(f"{subject} {case.name}: warming up {name}")
        runs[name] = make()
        runs[name]()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats):
        say(f"{subject} {case.name}: {turn + 1} of {repeats}")
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    median = {name: sorted(times)[len(times) // 2] for name, times in seconds.items()}
    best = min((median[name] for name in case.baselines if name in median), default=None)
    first = next(iter(case.paths))
    rows = []
    for name, times in seconds.items():
        ratio = None if best is None or name in case.baselines else best / median[name]
        megabytes = peak_memory(subject, case.name, name) if memory else None
        target = case.target if name == first else None
        rows.append(
            PathTiming(subject, case.name, name, median[name], min(times), max(times), ratio, target, megabytes)
        )
    return rows


def peak_memory(subject: str, case: str, path: str) -> float | None:
    """Megabytes that one run adds to a fresh process's resident memory, at its peak; None without Linux."""
    if platform.system() != "Linux":
        return None
    command = [sys.executable, "-m", "dcdm.bench.subjects", subject, case, path, str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def forget_peak() -> float:
    """Let the kernel measure the peak anew from here; megabytes resident now. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_megabytes() -> float:
    """Largest resident size since `forget_peak`."""
    return _status("VmHWM")


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**10


def environment() -> dict[str, object]:
    """What a figure depends on beside the code."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


def to_json(rows: list[PathTiming]) -> str:
    return json.dumps({"environment": environment(), "rows": [row.__dict__ for row in rows]})


def print_table(rows: list[PathTiming]) -> None:
    """A table for people."""
    memory = any(row.megabytes is not None for row in rows)
    columns = ["subject", "case", "path", "median s", "spread", "ratio", "target", *(["peak MB"] if memory else [])]
    lines = []
    for row in rows:
        cells = [row.subject, row.case, row.path, f"{row.median:.4g}", f"{row.low:.3g}–{row.high:.3g}"]
        cells.append("" if row.ratio is None else f"{row.ratio:.2f}×")
        cells.append("" if row.target is None else f"≥ {row.target:.2f}×")
        if memory:
            cells.append("" if row.megabytes is None else f"{row.megabytes:.0f}")
        lines.append(cells)
    Table(columns, lines, text=("subject", "case", "path")).print()
