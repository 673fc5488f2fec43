"""The page of `dcdm report`: curves and figures of one or several runs, from what stands in their folders."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dcdm.config import ConfigError, ModelConfig, many
from dcdm.evaluation.perplexity import names_of
from dcdm.kinds import parameter_counts
from dcdm.likelihood.statistics import with_stderr
from dcdm.training import settings as run_settings
from dcdm.training.metrics import MAIN, read_rows
from dcdm.training.settings import RunConfig
from dcdm.viewing.pages import Curve, Points, averaged, chart, details, escape, page, paragraph, section
from dcdm.viewing.tables import Table

LAST = 50  # steps that the training loss of the table is a mean over


@dataclass(frozen=True)
class RunLog:
    """What a run's folder tells of it."""

    name: str
    config: RunConfig
    steps: list[dict[str, Any]]
    """The rows of metrics.jsonl that are of a step; `seen` counts the tokens up to it."""
    evaluations: list[dict[str, Any]]
    """The rows that are of an evaluation, with `seen` too."""
    timing: list[dict[str, Any]]

    @property
    def done(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @cached_property
    def values(self) -> dict[str, Any]:
        """Every setting by its dotted name."""
        return run_settings.flat(run_settings.to_dict(self.config))

    def curve(self, name: str, over: str = "step") -> Points:
        """(`over`, value) of each step that has the figure."""
        rows = self.timing if name == "tokens_per_second" else self.steps
        return [(row[over], row[name]) for row in rows if _finite(row.get(name))]

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
    seen = 0
    for row in rows:
        seen += row.get("tokens", 0) if "nll" in row else 0
        row["seen"] = seen
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


def runs_page(runs: Sequence[RunLog]) -> str:
    """The runs as one self-contained HTML file."""
    what = (
        f"Nats per token. training: mean of the last {LAST} steps; held out: the last evaluation, by an estimator "
        "that is valid for the model's kind, ± its standard error over windows; best: the smallest of them, and "
        "its step; tokens/s: median."
    )
    marks = (
        "Marks: a valid estimator for the model's kind, on held-out text of the training's own data, ± its "
        "standard error over windows."
    )
    loss = chart([_loss(run) for run in runs], "tokens seen", "nats per token", "valid bound, or exact for AR")
    sections = [
        section("Figures", figures_table(runs).to_html() + paragraph(what), wide=True),
        _drawn("Loss and valid bound against tokens seen", loss, marks),
    ]
    for name, title, up in (
        ("gradient_norm", "Gradient norm", "norm before clipping"),
        ("learning_rate", "Learning rate", "learning rate"),
        ("tokens_per_second", "Speed", "tokens per second"),
        ("max_violation", "Balance of chunks", "MaxVio"),
    ):
        curves = [Curve(run.name, averaged(run.curve(name))) for run in runs]
        sections.append(_drawn(title, chart(curves, "step", up)))
    sections.append(section("Settings", _settings(runs), wide=True))
    summary = f"{many(len(runs), 'run')}: {', '.join(run.name for run in runs)}."
    return page("report", "Training runs", summary=escape(summary), sections="".join(sections))


def _loss(run: RunLog) -> Curve:
    """Training loss as a line, evaluations as marks with their standard errors."""
    marks = [(row["seen"], row["evaluation"][MAIN]) for row in run.evaluations]
    errors = [row["evaluation"].get(f"{MAIN}_stderr") or 0.0 for row in run.evaluations]
    return Curve(run.name, averaged(run.curve("nll", "seen")), marks, errors)


def _drawn(title: str, drawn: str, what: str = "") -> str:
    """A chart under its title; nothing where no run has the figure."""
    caption = paragraph(f"Lines are averaged over stretches of steps. {what}")
    return section(title, f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>") if drawn else ""


def _settings(runs: Sequence[RunLog]) -> str:
    """Where the runs differ, and behind it all of their settings."""
    names = list(dict.fromkeys(name for run in runs for name in run.values))
    differing = [name for name in names if len({str(run.values.get(name)) for run in runs}) > 1]
    header = ["setting", *(run.name for run in runs)]

    def table(chosen: Sequence[str]) -> str:
        rows = [[name, *(str(run.values.get(name, "–")) for run in runs)] for name in chosen]
        return Table(header, rows, tuple(header)).to_html()

    shown = ""
    if len(runs) > 1:
        shown = table(differing) if differing else paragraph("The runs have the same settings.")
    return shown + details("All settings", table(names))
