"""What there is to run, what it costs, and how far it has come."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dcdm.reproduction.experiments import experiments, specs
from dcdm.reproduction.runs import Places, RunSpec, is_done
from dcdm.reproduction.scale import Scale

if TYPE_CHECKING:
    from rich.table import Table

    from dcdm.reproduction.queue import State

OPERATIONS = 2.6e10  # per second of one core, as measured; used where no finished run says better
MEASURE_SECONDS = {
    "curve": 12, "heldout": 12, "zeroshot": 14, "frontier": 20, "policies": 15, "balance": 2, "contents": 2,
    "tasks": 130,
}  # fmt: skip


def price(spec: RunSpec, places: Places) -> float:
    """Minutes of one core: measured where a run of the variant has finished, else estimated."""
    for seed in (spec.seed, *range(spec.variant.seeds)):
        same = RunSpec(spec.scale, spec.variant, seed)
        try:
            seconds = json.loads(places.machine(same).read_bytes())["seconds"]
        except (OSError, ValueError):
            continue
        return sum(value for name, value in seconds.items() if name != "last start") / 60
    from dcdm.model.costs import bill

    training = spec.steps * spec.scale.batch_size * bill(spec.model).training / OPERATIONS
    return (training + sum(MEASURE_SECONDS[name] for name in spec.variant.measures)) / 60


def show_list(scale: Scale, places: Places, names: Sequence[str], seeds: Sequence[int] = ()) -> None:
    """Print the experiments, then the matrix of runs with its price."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 130)
    known = experiments(scale)
    table = Table(box=None, pad_edge=False, title=f"experiments at {scale.name} scale", title_justify="left")
    for column in ("experiment", "paper", "shows", "runs", "done", "core-hours"):
        table.add_column(column)
    for one in known.values():
        if "all" in names or one.name in names:
            runs = specs(scale, [one.name], seeds)
            done = sum(is_done(spec, places) for spec in runs)
            hours = sum(price(spec, places) for spec in runs) / 60
            table.add_row(one.name, one.paper, one.shows, str(len(runs)), str(done), f"{hours:.1f}")
    console.print(table)
    console.print("\nRuns are shared: each is done once and serves every experiment that names it.\n")
    matrix = Table(box=None, pad_edge=False, title="run matrix", title_justify="left")
    for column in ("variant", "what", "seeds", "done", "minutes each"):
        matrix.add_column(column)
    runs = specs(scale, [*names], seeds)
    for variant in dict.fromkeys(spec.variant.name for spec in runs):
        own = [spec for spec in runs if spec.variant.name == variant]
        done = sum(is_done(spec, places) for spec in own)
        matrix.add_row(
            variant,
            own[0].variant.says,
            ", ".join(str(spec.seed) for spec in own),
            str(done),
            f"{price(own[0], places):.1f}",
        )
    console.print(matrix)
    total = sum(price(spec, places) for spec in runs) / 60
    left = sum(price(spec, places) for spec in runs if not is_done(spec, places)) / 60
    console.print(
        f"\n{len(runs)} runs of {scale.tokens:,} tokens: {total:.1f} core-hours, {total / 2:.1f} hours on 2 cores; "
        f"left {left:.1f} core-hours"
    )


def progress(state: State) -> str:
    """One line of counts."""
    counts: dict[str, Sequence[object]] = {
        "done": state.done,
        "running": state.running,
        "left": state.waiting,
        "failed": state.failed,
    }
    return ", ".join(f"{len(runs)} {name}" for name, runs in counts.items() if runs or name != "failed")


def overview(state: State, places: Places) -> Table:
    """What runs now and how far it has come, under a line of counts."""
    from rich.table import Table

    left = sum(price(spec, places) for spec in state.waiting) / max(1, len(state.running))
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.title = f"{progress(state)}; about {left / 60:.1f} hours to go"
    for column in ("run", "what", "step", "loss", "minutes"):
        table.add_column(column)
    for one in state.running:
        row = _last(one.spec, places)
        step, loss = row.get("step", 0), row.get("nll")
        at = f"{step}/{one.spec.steps}" if step < one.spec.steps else "measuring"
        shown = "" if loss is None else f"{loss:.3f}"
        minutes = (time.time() - one.started) / 60
        table.add_row(one.spec.name, one.spec.variant.says, at, shown, f"{minutes:.1f}")
    return table


def _last(spec: RunSpec, places: Places) -> dict[str, Any]:
    """The newest row of a run's metrics."""
    try:
        with open(places.run(spec) / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4000))
            lines = file.read().splitlines()
        return json.loads(lines[-1])
    except (OSError, ValueError, IndexError):
        return {}
