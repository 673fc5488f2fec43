"""`dcdm reproduce`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from rich.table import Table

    from dcdm.reproduction.results import Places
    from dcdm.reproduction.run import QueueState
    from dcdm.reproduction.scale import Scale

EXAMPLES = (
    "dcdm reproduce --list",
    "dcdm reproduce loss-curves --data texts",
    "dcdm reproduce scaling --scale paper",
)


def details() -> str:
    """Every experiment, for the help."""
    from dcdm.reproduction.experiments import experiments
    from dcdm.reproduction.scale import cpu

    return f"Names: {', '.join(experiments(cpu()))}, or all."


def reproduce(
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME...")] = (),
    scale: Literal["cpu", "paper", "tiny"] = "cpu",
    data: Path = Path("data"),
    results: Path = Path("results"),
    work: Path = Path("runs/reproduce"),
    jobs: int = 2,
    seeds: tuple[int, ...] = (),
    list: bool = False,
) -> None:
    """Run the paper's experiments: every table and figure, by name.

    A run takes one to nine minutes of a core, all of them more than ten hours; --list has the price of each.
    A finished run is never repeated; Ctrl-C saves and stops, the same command resumes.
    In place of a name, report writes the page and the tables of docs/reproduction.md anew from the results.

    Args:
        names: Experiments.
        scale: cpu runs here; paper writes commands and costs without starting; tiny is for tests.
        data: Folder with the texts (docs/reproduction.md says which).
        results: Folder of the results, a file of figures for each scale.
        work: Folder of the runs themselves: weights, metrics, logs.
        jobs: Runs at one time, each with one thread.
        seeds: Seeds of every model, in place of its own (three or six): one for a first look, more for narrower
            intervals.
        list: Show what each experiment is about and costs, and its runs, without starting.
    """
    from dcdm.config import ConfigError
    from dcdm.reproduction.results import Places
    from dcdm.reproduction.scale import scale as scale_of

    if jobs < 1:
        raise ConfigError(f"--jobs {jobs} must be at least 1")
    if min(seeds, default=0) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {' '.join(map(str, seeds))} must be different numbers from 0 on")
    places = Places(data.absolute(), work.absolute(), results.absolute())
    if list:
        _show_list(scale_of("cpu" if scale == "paper" else scale), places, names or ("all",), seeds)
        return
    if not names:
        raise ConfigError("name an experiment, or all; `dcdm reproduce --list` shows their names")
    if names == ("report",):
        _report(results, "cpu" if scale == "paper" else scale)
        return
    if scale == "paper":
        _spell_out(names)
        return
    from dcdm.reproduction.experiments import specs
    from dcdm.reproduction.run import INTERRUPTED, measure_frequencies, prepare_data, work_off

    chosen = scale_of(scale)
    runs = specs(chosen, [*names], seeds)
    places.check()
    prepare_data(chosen, places)
    measure_frequencies(chosen, places)
    with _Overview(places, chosen.name) as show:
        state = work_off(runs, places, jobs, show)
    for spec in state.failed:
        print(f"{spec.name} failed; see {places.log(spec)}", file=sys.stderr)
    if state.waiting:
        print(f"{len(state.waiting)} runs are left; the same command resumes them", file=sys.stderr)
    sys.exit(1 if state.failed else INTERRUPTED if state.waiting else 0)


def _report(results: Path, scale: str) -> None:
    from dcdm.config import ConfigError
    from dcdm.reproduction.report import write_report
    from dcdm.reproduction.results import read_results

    stored = read_results(results, scale)
    if not stored.runs:
        raise ConfigError(
            f"--results {results} has no finished run at {scale} scale; the page and its tables are left alone"
        )
    document = Path("docs/reproduction.md") if scale == "cpu" and Path("docs/reproduction.md").exists() else None
    print(write_report(stored, results, document, Path("docs/images/reproduction")))


def _spell_out(names: tuple[str, ...]) -> None:
    """Commands and costs at the paper's scale."""
    from dcdm.reproduction.experiments import chosen_experiments, paper_commands
    from dcdm.reproduction.scale import cpu

    print("\n\n".join(paper_commands(one) for one in chosen_experiments(cpu(), [*names])))


def _show_list(scale: Scale, places: Places, names: Sequence[str], seeds: Sequence[int] = ()) -> None:
    """Print the experiments, then the matrix of runs with its price."""
    from rich.console import Console
    from rich.table import Table

    from dcdm.reproduction.experiments import chosen_experiments, specs
    from dcdm.reproduction.results import is_done, read_results
    from dcdm.reproduction.run import expected_minutes

    console = Console(width=None if Console().is_terminal else 130)
    results = read_results(places.results, scale.name)
    table = Table(box=None, pad_edge=False, title=f"experiments at {scale.name} scale", title_justify="left")
    for column in ("experiment", "paper", "shows", "runs", "done", "core-hours"):
        table.add_column(column)
    for one in chosen_experiments(scale, [*names]):
        runs = specs(scale, [one.name], seeds)
        done = sum(is_done(spec, results) for spec in runs)
        hours = sum(expected_minutes(spec, results) for spec in runs) / 60
        table.add_row(one.name, one.paper, one.shows, str(len(runs)), str(done), f"{hours:.1f}")
    console.print(table)
    console.print("\nRuns are shared: each is done once and serves every experiment that names it.\n")
    matrix = Table(box=None, pad_edge=False, title="run matrix", title_justify="left")
    for column in ("variant", "what", "seeds", "done", "minutes each"):
        matrix.add_column(column)
    runs = specs(scale, [*names], seeds)
    for variant in dict.fromkeys(spec.variant.name for spec in runs):
        same = [spec for spec in runs if spec.variant.name == variant]
        done = sum(is_done(spec, results) for spec in same)
        seeds_of = ", ".join(str(spec.seed) for spec in same)
        minutes = f"{expected_minutes(same[0], results):.1f}"
        matrix.add_row(variant, same[0].variant.label, seeds_of, str(done), minutes)
    console.print(matrix)
    total = sum(expected_minutes(spec, results) for spec in runs) / 60
    left = sum(expected_minutes(spec, results) for spec in runs if not is_done(spec, results)) / 60
    console.print(
        f"\n{len(runs)} runs of {scale.tokens:,} tokens: {total:.1f} core-hours, {total / 2:.1f} hours on 2 cores; "
        f"left {left:.1f} core-hours"
    )


class _Overview:
    """A live table in a terminal; elsewhere a line whenever a run begins or ends."""

    def __init__(self, places: Places, scale: str) -> None:
        from rich.console import Console
        from rich.live import Live

        from dcdm.reproduction.results import read_results

        self.places, self.results = places, read_results(places.results, scale)
        console = Console(stderr=True)
        self.live = Live(console=console, refresh_per_second=2) if console.is_terminal else None
        self._printed: dict[str, str] = {}

    def __enter__(self) -> Callable[[QueueState], None]:
        if self.live is not None:
            self.live.start()
        return self.show

    def __exit__(self, *exception: object) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, state: QueueState) -> None:
        if self.live is not None:
            self.live.update(self.table(state))
            return
        now = {one.spec.name: "started" for one in state.running}
        now |= {spec.name: "done" for spec in state.done} | {spec.name: "FAILED" for spec in state.failed}
        if not self._printed:
            self._printed = {spec.name: "done" for spec in state.done}
            print(_progress(state), file=sys.stderr, flush=True)
        for name, what in now.items():
            if self._printed.get(name) != what:
                print(f"{name}: {what}  ({_progress(state)})", file=sys.stderr, flush=True)
        self._printed = now

    def table(self, state: QueueState) -> Table:
        """What runs now and how far it has come, under a line of counts."""
        from rich.table import Table

        from dcdm.reproduction.run import expected_minutes

        left = sum(expected_minutes(spec, self.results) for spec in state.waiting) / max(1, len(state.running))
        table = Table(box=None, pad_edge=False, title_justify="left")
        table.title = f"{_progress(state)}; about {left / 60:.1f} hours to go"
        for column in ("run", "what", "step", "loss", "minutes"):
            table.add_column(column)
        for one in state.running:
            metrics = _last_metrics(self.places.run(one.spec))
            step, loss = metrics.get("step", 0), metrics.get("nll")
            table.add_row(
                one.spec.name, one.spec.variant.label,
                f"{step}/{one.spec.steps}" if step < one.spec.steps else "measuring",
                "" if loss is None else f"{loss:.3f}", f"{(time.time() - one.started) / 60:.1f}",
            )  # fmt: skip
        return table


def _progress(state: QueueState) -> str:
    """One line of counts."""
    counts: dict[str, Sequence[object]] = {
        "done": state.done,
        "running": state.running,
        "left": state.waiting,
        "failed": state.failed,
    }
    return ", ".join(f"{len(runs)} {name}" for name, runs in counts.items() if runs or name != "failed")


def _last_metrics(run: Path) -> dict[str, Any]:
    """The newest line of a run's metrics."""
    try:
        with open(run / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4000))
            lines = file.read().splitlines()
        row = json.loads(lines[-1])
    except (OSError, ValueError, IndexError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}
