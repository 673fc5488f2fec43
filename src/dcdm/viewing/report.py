"""What `dcdm report` tells of runs, from what stands in their folders: their figures, and where they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dcdm.config import ConfigError, ModelConfig
from dcdm.evaluation.perplexity import names_of
from dcdm.kinds import parameter_counts
from dcdm.likelihood.statistics import with_stderr
from dcdm.training import settings as run_settings
from dcdm.training.metrics import MAIN, read_rows
from dcdm.training.settings import RunConfig
from dcdm.viewing.tables import Table

LAST = 50  # steps that the training loss of the table is a mean over
LEGEND = (
    f"nats per token; training: mean of the last {LAST} steps; held out: the last evaluation, by a valid "
    "estimator, ± its standard error over windows; best: the smallest of them, and its step; tokens/s: median"
)


@dataclass(frozen=True)
class RunLog:
    """What a run's folder tells of it."""

    name: str
    config: RunConfig
    steps: list[dict[str, Any]]
    """The rows of metrics.jsonl that are of a step."""
    evaluations: list[dict[str, Any]]
    """The rows that are of an evaluation."""
    timing: list[dict[str, Any]]

    @property
    def done(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @cached_property
    def values(self) -> dict[str, Any]:
        """Every setting by its dotted name."""
        return run_settings.flat(run_settings.to_dict(self.config))

    def best(self) -> dict[str, Any] | None:
        """The evaluation with the smallest valid figure."""
        return min(self.evaluations, key=lambda row: row["evaluation"][MAIN], default=None)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def read_runs(folders: Sequence[str]) -> list[RunLog]:
    """The logs of these run folders, under names that differ."""
    return [_read(name, Path(folder)) for name, folder in names_of(folders).items()]


def _read(name: str, folder: Path) -> RunLog:
    if not (folder / "settings.yaml").is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no settings.yaml")
    rows = list(read_rows(folder / "metrics.jsonl"))
    if not rows:
        raise ConfigError(
            f"{folder / 'metrics.jsonl'} is missing, empty or damaged: train the run, or leave it out"
        )
    evaluations = [row for row in rows if _finite((row.get("evaluation") or {}).get(MAIN))]
    steps = [row for row in rows if "nll" in row]
    config = run_settings.read(folder / "settings.yaml")
    return RunLog(name, config, steps, evaluations, list(read_rows(folder / "timing.jsonl")))


def run_figures(run: RunLog) -> dict[str, Any]:
    """One run's figures, as plain values."""
    last = [row["nll"] for row in run.steps[-LAST:]]
    evaluation = run.evaluations[-1] if run.evaluations else None
    best = run.best()
    speeds = sorted(row["tokens_per_second"] for row in run.timing if "tokens_per_second" in row)
    return {
        "run": run.name, "kind": kind_in_words(run.config.model),
        "parameters": parameter_counts(run.config.model)[0], "step": run.done, "steps": run.config.train.steps,
        "tokens": sum(row.get("tokens", 0) for row in run.steps),
        "training_nll": math.fsum(last) / len(last) if last else None,
        "valid_nll": evaluation and evaluation["evaluation"][MAIN],
        "valid_nll_stderr": evaluation and evaluation["evaluation"].get(f"{MAIN}_stderr"),
        "best_nll": best and best["evaluation"][MAIN], "best_step": best and best["step"],
        "tokens_per_second": speeds[len(speeds) // 2] if speeds else None,
    }  # fmt: skip


def figures_table(runs: Sequence[RunLog]) -> Table:
    """A row for each run."""
    header = ["run", "model", "parameters", "step", "tokens", "training", "held out", "best", "tokens/s"]
    return Table(header, [_cells(run_figures(run)) for run in runs], ("run", "model"))


def _cells(one: dict[str, Any]) -> list[Any]:
    def shown(name: str, spelled: Callable[[Any], str]) -> str | None:
        return None if one[name] is None else spelled(one[name])

    return [
        one["run"], one["kind"], f"{one['parameters'] / 1e6:.2f}M", f"{one['step']:,} of {one['steps']:,}",
        f"{one['tokens']:,}", shown("training_nll", lambda value: f"{value:.3f}"),
        shown("valid_nll", lambda value: with_stderr(value, one["valid_nll_stderr"])),
        shown("best_nll", lambda value: f"{value:.3f} at {one['best_step']:,}"),
        shown("tokens_per_second", lambda value: f"{value:,.0f}"),
    ]  # fmt: skip


def kind_in_words(config: ModelConfig) -> str:
    return f"DCDM, {config.routing} routing" if config.kind == "dcdm" else config.kind.upper()


def differing(runs: Sequence[RunLog]) -> dict[str, list[Any]]:
    """The settings in which the runs differ, and what they are in each; None where a run has none of this name."""
    names = dict.fromkeys(name for run in runs for name in run.values)
    found = {name: [run.values.get(name) for run in runs] for name in names}
    return {name: values for name, values in found.items() if len(set(map(str, values))) > 1}


def settings_table(runs: Sequence[RunLog]) -> Table:
    """A row for each setting in which the runs differ."""
    header = ("setting", *(run.name for run in runs))
    return Table(header, [[name, *values] for name, values in differing(runs).items()], header)
