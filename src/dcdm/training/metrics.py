"""What a run shows and writes: a live line, metrics.jsonl, timing.jsonl, TensorBoard, and wandb where asked.

metrics.jsonl holds what the run computes and is the same for a run that was interrupted and one that was not;
timing.jsonl holds what the machine did.
"""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from dcdm.config import ConfigError, many
from dcdm.costs import bf16_peak, training_operations
from dcdm.distributed import World
from dcdm.files import write_whole
from dcdm.likelihood.statistics import with_stderr
from dcdm.training.settings import RunConfig
from dcdm.training.trainer import StepReport

MAIN = "valid_nll"
"""The figure of an evaluation by which checkpoints are kept."""
LONGEST_LINE = 1 << 20
WIDE = 120  # columns of a terminal that has room for more than the essentials


class Recorder:
    """Of the main process only. `on_resume` must come first: it drops what lies beyond the step resumed from."""

    def __init__(self, folder: Path, config: RunConfig, console: Console, world: World | None = None) -> None:
        self.folder, self.config, self.console = folder, config, console
        self.figures: dict[str, float] = {}
        self._utilisation_at_one = _utilisation_at_one(config, world or World())
        self._since = (time.perf_counter(), 0, 0)
        self._speed: Mapping[str, float] = {}  # as last logged
        self._wide = console.width >= WIDE
        self._progress = Progress(
            BarColumn(40 if self._wide else 8), TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("training", total=config.train.steps)
        self._board: Any = None
        self._wandb = self._open_wandb(config.wandb) if config.wandb else None

    def __enter__(self) -> Recorder:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def on_resume(self, step: int) -> None:
        for name in ("metrics.jsonl", "timing.jsonl"):
            _keep_until(self.folder / name, step)
        if self.config.tensorboard:
            self._board = self._open_board(step)
        self._progress.update(self._task, completed=step)
        self._since = (time.perf_counter(), step, 0)

    def on_step(self, report: StepReport) -> None:
        step = report.step + 1
        started, first, tokens = self._since
        self._since = (started, first, tokens + report.tokens)
        row: dict[str, Any] = {
            "step": step, "loss": report.loss, "nll": report.nll, "gradient_norm": report.gradient_norm,
            "learning_rate": report.learning_rate, "tokens": report.tokens,
        }  # fmt: skip
        for name in ("chunk_loss", "moe_loss", "draft_loss", "max_violation"):
            if getattr(report, name) is not None:
                row[name] = getattr(report, name)
        if report.chunk_counts is not None:
            row["chunk_counts"] = report.chunk_counts.tolist()
        _append(self.folder / "metrics.jsonl", row)
        if step % self.config.log_every == 0 or step == self.config.train.steps:
            self._log(step, row)
        self._progress.update(self._task, completed=step, description=self._live_line(step, row))

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        self.figures = dict(figures)
        _append(self.folder / "metrics.jsonl", {"step": step, "evaluation": self.figures})
        self._write(step, {f"evaluation/{name}": value for name, value in figures.items()})
        parts = []
        for name, value in figures.items():
            if not name.endswith("_stderr"):
                parts.append(f"{label(name)} {with_stderr(value, figures.get(f'{name}_stderr'))}")
        shown = ", ".join(parts)
        self.console.print(f"step {step}: {shown} nats/token")

    def _log(self, step: int, row: dict[str, Any]) -> None:
        """Speed since the last log, to the files, the boards and, without a terminal, as a plain line."""
        speed = self._measured(step)
        timing = {
            "step": step,
            **speed,
            "peak_memory_gb": _peak_memory(),
            "seconds_left": (self.config.train.steps - step) * speed["seconds_per_step"],
        }
        if self._utilisation_at_one is not None:
            timing["utilisation"] = self._utilisation_at_one / speed["seconds_per_step"]
        self._speed = timing
        _append(self.folder / "timing.jsonl", timing)
        self._since = (time.perf_counter(), step, 0)
        scalars = {f"train/{name}": value for name, value in row.items() if isinstance(value, int | float)}
        self._write(step, scalars | {f"speed/{name}": value for name, value in timing.items()})
        if self._board is not None and "chunk_counts" in row:
            counts = torch.tensor(row["chunk_counts"])
            ids = torch.repeat_interleave(torch.arange(1, len(counts) + 1), counts)
            self._board.add_histogram("chunks/ids", ids, step)
        if not self.console.is_terminal:
            self.console.print("  ".join([self._essentials(step, row, timing), *self._details(row)]))

    def _measured(self, step: int) -> dict[str, float]:
        """Speed since the last log."""
        started, first, tokens = self._since
        seconds = time.perf_counter() - started
        return {"tokens_per_second": tokens / seconds, "seconds_per_step": seconds / max(1, step - first)}

    def _live_line(self, step: int, row: dict[str, Any]) -> str:
        """What there is room for: the essentials first."""
        parts = [self._essentials(step, row, self._speed or self._measured(step))]
        return "  ".join(parts + (self._details(row) if self._wide else []))

    def _essentials(self, step: int, row: Mapping[str, Any], speed: Mapping[str, float]) -> str:
        """Step, loss, speed and time left: at most 68 columns, up to millions of steps and of tokens a second."""
        left = (self.config.train.steps - step) * speed["seconds_per_step"]
        return (
            f"step {step}/{self.config.train.steps}  loss {row['nll']:.3f}  "
            f"{speed['tokens_per_second']:.0f} tokens/s  {_spelled(left)} left"
        )

    def _details(self, row: Mapping[str, Any]) -> list[str]:
        parts = [f"grad {row['gradient_norm']:.2f}", f"lr {row['learning_rate']:.1e}"]
        if "max_violation" in row:
            parts.append(f"MaxVio {row['max_violation']:.2f}")
        if MAIN in self.figures:
            parts.append(f"valid {self.figures[MAIN]:.3f}")
        return parts

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._board is not None:
            for name, value in scalars.items():
                if math.isfinite(value):
                    self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(scalars), step=step)

    def _open_board(self, step: int) -> Any:
        """A writer that hides what a killed run had written beyond `step`."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1 if step else None)

    def _open_wandb(self, project: str) -> Any:
        return wandb_package().init(project=project, dir=str(self.folder), resume="allow", id=self.folder.name)


def wandb_package() -> Any:
    """The package wandb; ConfigError where it is missing."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("wandb is set, but the package is missing; pip install -e '.[wandb]'") from error
    return wandb


def label(name: str) -> str:
    """What a figure of an evaluation is called on the screen."""
    if name.startswith("lanes_"):
        return many(int(name.split("_")[1]), "lane")
    return "surrogate (not a bound)" if name.startswith("surrogate") else "validation"


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a run's metrics.jsonl or timing.jsonl; none where there is no such file."""
    return (row for _, row in _rows(path))


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every line that is a row, and the row. Others are skipped: a kill may cut one short."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        while line := file.readline(LONGEST_LINE):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if _is_row(row):
                yield line.rstrip(b"\r\n") + b"\n", row


def _is_row(row: Any) -> bool:
    """Whether a line holds what `Recorder` writes: a step, figures, lists of counts, or an evaluation's figures."""
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return False
    parts = {"evaluation": dict, "chunk_counts": list}
    if any(type(row[name]) is not kind for name, kind in parts.items() if name in row):
        return False
    values = [value for name, value in row.items() if name not in parts]
    values += [*row.get("evaluation", {}).values(), *row.get("chunk_counts", ())]
    return all(type(value) is float or (type(value) is int and abs(value) < 2**63) for value in values)


def _keep_until(path: Path, step: int) -> None:
    """Drop lines beyond `step` (all if it is 0), and what is no line, such as a last one that a kill cut short."""
    if path.exists():
        write_whole(path, b"".join(line for line, row in _rows(path) if 0 <= row["step"] <= step > 0))


def _spelled(seconds: float) -> str:
    """A span of time as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _utilisation_at_one(config: RunConfig, world: World) -> float | None:
    """The share of the dense bf16 peak of all devices that steps of one second use; None where it is not known."""
    peak = bf16_peak(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
    if peak is None:
        return None
    return training_operations(config.model, config.window) * config.train.batch_size / (peak * world.size)


def _peak_memory() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
