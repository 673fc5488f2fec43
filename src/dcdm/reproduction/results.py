"""Stored results: the files that hold them, the intervals over seeds that follow from them, and curves.

A scale has three files: `SCALE.jsonl` with a line of figures for each run (the same for an interrupted and an
uninterrupted run), `SCALE-windows.jsonl.gz` with the figures window by window that differences are taken from, and
`SCALE-machines.jsonl` with what each run took. Lines are sorted, so that the files follow from what they hold.
"""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from dcdm.config import ConfigError
from dcdm.files import canonical, digest, write_whole
from dcdm.reproduction.intervals import Interval, half_width, interval
from dcdm.reproduction.scale import TEST, TRAINING, VALIDATION, ZERO_SHOT, Scale
from dcdm.reproduction.variants import RunSpec

FREQUENCIES = "frequencies"
BY_WINDOW = ("numbers", "window_nats", "window_tokens")
"""Lists of a figure that have an entry for each window."""
SAME_PLACE = 0.01  # of a training run: points of curves that are closer are one

FigurePath = tuple[str, ...]
"""Where a figure stands among the measures of a run."""
VALID = ("heldout", "valid")


@dataclass(frozen=True)
class Places:
    """Where things are: texts to read, folders to work in, results to keep."""

    data: Path
    work: Path
    results: Path

    def run(self, spec: RunSpec) -> Path:
        return self.work / spec.scale.name / spec.name

    def model(self, spec: RunSpec) -> Path:
        return self.run(spec) / "model"

    def prepared(self, scale: Scale, tuning: bool = False) -> Path:
        return self.work / scale.name / ("gsm8k" if tuning else "text")

    def result(self, spec: RunSpec) -> Path:
        """The run's own file, before it is gathered into the results of its scale."""
        return self.run(spec) / "result.json"

    def machine(self, spec: RunSpec) -> Path:
        return self.run(spec) / "machine.json"

    def log(self, spec: RunSpec) -> Path:
        """What a run says while it works."""
        return self.work / spec.scale.name / "logs" / f"{spec.name}.txt"

    def check(self) -> None:
        """Refuse a data folder in which something is missing, before anything starts."""
        needed = [*TRAINING, VALIDATION, TEST, *ZERO_SHOT.values()]
        if missing := [name for name in needed if not (self.data / name).is_file()]:
            raise ConfigError(
                f"--data {self.data} lacks {', '.join(missing)}; docs/reproduction.md says what belongs there"
            )


# --- results ------------------------------------------------------------------------------------------------------


@dataclass
class Results:
    """Every finished run of a scale."""

    scale: str
    runs: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    """(variant, seed) → what was computed."""
    machines: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    """(variant, seed) → the machine, and how long it took."""
    reference: dict[str, Any] = field(default_factory=dict)
    """Single tokens' frequencies, measured like a run, and what they were made of."""

    @property
    def frequencies(self) -> dict[str, Any]:
        """Measures of single tokens' frequencies: the same for every seed, read as a variant of that name."""
        return self.reference.get("measures", {})

    def seeds(self, *variants: str) -> list[int]:
        """Seeds that all of these variants have finished."""
        sets = [
            {seed for name, seed in self.runs if name == variant} for variant in variants if variant != FREQUENCIES
        ]
        return sorted(set.intersection(*sets)) if sets else [0] if self.frequencies else []

    def figure(self, variant: str, seed: int, path: FigurePath) -> Any:
        """What stands under `path` of a run's measures; None where it does not."""
        value: Any = self.runs.get((variant, seed), {}).get("measures")
        if variant == FREQUENCIES:
            value = self.frequencies
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def mean(
        self, variant: str, path: FigurePath, key: str = "nats_per_token", seeds: Sequence[int] | None = None
    ) -> Interval | None:
        """A figure of a variant over its seeds, or over some of them; the interval is over seeds alone."""
        chosen = self.seeds(variant) if seeds is None else seeds
        values = [self.figure(variant, seed, (*path, key)) for seed in chosen]
        return interval([value for value in values if value is not None])

    def difference(
        self, one: str, other: str, path: FigurePath = VALID, other_path: FigurePath | None = None
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
        windows = [statistics.fmean(column) for column in zip(*rows, strict=True)]
        return interval([sum(row) / sum(tokens) for row in rows], half_width(windows, tokens))

    def at_frequencies(self) -> list[tuple[str, int]]:
        """Runs whose valid figure is not surely below that of single tokens' frequencies, over the same windows."""
        held = _windows(self.figure(FREQUENCIES, 0, VALID))
        stuck = []
        for name, seed in sorted(self.runs):
            scored = _windows(self.figure(name, seed, VALID))
            gained = [(scored[n][0] - held[n][0]) / held[n][1] for n in sorted(scored.keys() & held.keys())]
            if gained and statistics.fmean(gained) + (half_width(gained) or math.inf) >= 0:
                stuck.append((name, seed))
        return stuck


def _windows(figures: Any) -> dict[int, tuple[float, int]]:
    """Number of a window → its nats and tokens; {} where figures are not kept by window."""
    if not isinstance(figures, dict):
        return {}
    columns = [figures.get(name, []) for name in BY_WINDOW]
    return {number: (nats, tokens) for number, nats, tokens in zip(*columns, strict=False)}


def is_current(result: Mapping[str, Any], spec: RunSpec) -> bool:
    """Whether a stored result is what the run would give as it is defined now."""
    if result.get("identity") != spec.identity():
        return False
    measured_with, wanted = result.get("measured_with", {}), spec.variant.measures
    return all(
        name in result["measures"] and measured_with.get(name) == spec.scale.measured_with(name) for name in wanted
    )


def is_done(spec: RunSpec, results: Results) -> bool:
    """Whether the run's result is stored, of the same settings and with all of its measures."""
    result = results.runs.get((spec.variant.name, spec.seed))
    return result is not None and is_current(result, spec)


# --- files --------------------------------------------------------------------------------------------------------


def read_results(folder: Path, scale: str) -> Results:
    """All results of a scale under `folder`; there may be none."""
    results, names = Results(scale), _files(folder, scale)
    windows = {line["run"]: line for line in _lines(names["windows"])}
    for line in _lines(names["figures"]):
        kept = windows.get(line["run"], {"of": None})
        if kept["of"] != _settings_of(line):
            continue  # the writing was interrupted between two files: the run is gathered or measured again
        line["measures"] = _join(line["measures"], kept["measures"])
        if line["run"] == FREQUENCIES:
            results.reference = line
        else:
            results.runs[line["variant"], line["seed"]] = line
    keys = {run["run"]: key for key, run in results.runs.items()}
    for machine in _lines(names["machines"]):
        if machine["run"] in keys:
            results.machines[keys[machine.pop("run")]] = machine
    return results


def write_results(folder: Path, results: Results) -> None:
    """Write the files of a scale, each aside and renamed; the figures last, when what belongs to them is there."""
    names = _files(folder, results.scale)
    folder.mkdir(parents=True, exist_ok=True)
    figures, windows = [], []
    for record in (*results.runs.values(), *([results.reference] if results.reference else [])):
        measures, by_window = _split(record["measures"])
        figures.append({**record, "measures": measures})
        windows.append({"run": record["run"], "of": _settings_of(record), "measures": by_window})
    machines = [{"run": results.runs[key]["run"], **machine} for key, machine in results.machines.items()]
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as file:  # the same bytes at any time
        file.write(_as_lines(windows))
    write_whole(names["windows"], packed.getvalue())
    write_whole(names["machines"], _as_lines(machines))
    write_whole(names["figures"], _as_lines(figures))


@contextmanager
def changing_results(folder: Path, scale: str) -> Iterator[Results]:
    """The results, to be changed and then written, while no other process does the same."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        results = read_results(folder, scale)
        yield results
        write_results(folder, results)
    finally:
        os.close(handle)


def gather(specs: Iterable[RunSpec], places: Places, scale: str) -> Results:
    """Take finished results of these runs from their folders into those of the scale; returns the latter, whole."""
    results = read_results(places.results, scale)
    fresh = {}
    for spec in specs:
        if not is_done(spec, results) and (result := finished_result(spec, places)) is not None:
            fresh[spec.variant.name, spec.seed] = result, json.loads(places.machine(spec).read_bytes())
    if not fresh:
        return results
    with changing_results(places.results, scale) as results:
        for key, (result, machine) in fresh.items():
            results.runs[key], results.machines[key] = result, machine
    return results


def finished_result(spec: RunSpec, places: Places) -> dict[str, Any] | None:
    """What the run has left in its folder, if it is finished and of these settings."""
    try:
        result = json.loads(places.result(spec).read_bytes())
    except (OSError, ValueError):
        return None
    return result if is_current(result, spec) else None


def _files(folder: Path, scale: str) -> dict[str, Path]:
    return {
        "figures": folder / f"{scale}.jsonl",
        "windows": folder / f"{scale}-windows.jsonl.gz",
        "machines": folder / f"{scale}-machines.jsonl",
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        data = path.read_bytes()
        return [json.loads(line) for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()]
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); restore it, or remove it and run again") from error


def _as_lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(canonical(record) + b"\n" for record in sorted(records, key=lambda record: record["run"]))


def _settings_of(record: Mapping[str, Any]) -> str:
    """What the figures of a record follow from, as a short hash."""
    return digest([record.get("identity"), record.get("measured_with"), record.get("made_of")])[:16]


def _split(measures: Any) -> tuple[Any, dict[str, Any]]:
    """Figures without their lists by window, and these lists alone, under the same names."""
    if not isinstance(measures, dict):
        return measures, {}
    figures, by_window = {}, {}
    for name, value in measures.items():
        if name in BY_WINDOW:
            by_window[name] = value
            continue
        figures[name], lists = _split(value)
        if lists:
            by_window[name] = lists
    return figures, by_window


def _join(figures: Any, by_window: Mapping[str, Any]) -> Any:
    """The inverse of `_split`."""
    if not by_window:
        return figures
    lists = {
        name: _join(figures[name], value) if isinstance(value, dict) else value for name, value in by_window.items()
    }
    return {**figures, **lists}


# --- curves -------------------------------------------------------------------------------------------------------


Curve = list[tuple[float, float]]
"""(tokens seen, value), in order."""


def curve_of(results: Results, variant: str, seed: int, name: str = "validation") -> Curve:
    """A run's curve, without points that the next one follows at once."""
    points = [(point[0], point[1]) for point in results.figure(variant, seed, ("curve", name)) or []]
    if not points:
        return []
    near = SAME_PLACE * points[-1][0]
    following = [*(tokens for tokens, _ in points[1:]), math.inf]
    return [point for point, later in zip(points, following, strict=True) if later - point[0] > near]


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
