"""`dcdm reproduce`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from dcdm.reproduction.queue import State
    from dcdm.reproduction.runs import Places

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

    A finished run is never repeated; Ctrl-C saves and stops, the same command resumes.
    report, in place of a name, makes the page and the tables of docs/reproduction.md anew from the results.

    Args:
        names: Experiments.
        scale: cpu runs here; paper writes commands and costs without starting; tiny is for tests.
        data: Folder with the texts (docs/reproduction.md says which).
        results: Folder of the results, one JSON file for each run.
        work: Folder of the runs themselves: weights, metrics, logs.
        jobs: Runs at one time, each with one thread.
        seeds: Seeds of every model, in place of its own (three or six): one for a first look, more for narrower
            intervals.
        list: Say what each experiment shows and costs, and which runs there are, without starting.
    """
    from dcdm.config import ConfigError
    from dcdm.reproduction.runs import Places, prepare_data
    from dcdm.reproduction.scale import scale as scale_of

    if jobs < 1:
        raise ConfigError(f"--jobs {jobs} must be at least 1")
    if min(seeds, default=0) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {' '.join(map(str, seeds))} must be different numbers from 0 on")
    places = Places(data.absolute(), work.absolute(), results.absolute())
    if list:
        from dcdm.reproduction.listing import show_list

        show_list(scale_of("cpu" if scale == "paper" else scale), places, names or ("all",), seeds)
        return
    if not names:
        raise ConfigError("name an experiment, or all; `dcdm reproduce --list` says what there is")
    if names == ("report",):
        _report(results, "cpu" if scale == "paper" else scale)
        return
    if scale == "paper":
        _spell_out(names)
        return
    from dcdm.reproduction.experiments import specs
    from dcdm.reproduction.frequencies import write_frequencies
    from dcdm.reproduction.queue import INTERRUPTED, log_of, work_off

    chosen = scale_of(scale)
    runs = specs(chosen, [*names], seeds)
    places.check()
    prepare_data(chosen, places)
    write_frequencies(chosen, places)
    with _overview(places) as show:
        state = work_off(runs, places, jobs, show)
    for spec in state.failed:
        print(f"{spec.name} failed; {log_of(spec, places)} says why", file=sys.stderr)
    if state.waiting:
        print(f"{len(state.waiting)} runs are left; the same command resumes", file=sys.stderr)
    sys.exit(1 if state.failed else INTERRUPTED if state.waiting else 0)


def _report(results: Path, scale: str) -> None:
    from dcdm.config import ConfigError
    from dcdm.reproduction.report import write_report

    if not any((results / scale).glob("*.json")):
        raise ConfigError(
            f"--results {results} has no finished run under {scale}; the page and its tables are left alone"
        )
    document = Path("docs/reproduction.md") if scale == "cpu" and Path("docs/reproduction.md").exists() else None
    print(write_report(results, scale, document, Path("docs/images/reproduction")))


def _spell_out(names: tuple[str, ...]) -> None:
    """Commands and costs at the paper's scale."""
    from dcdm.reproduction.experiments import chosen_experiments
    from dcdm.reproduction.paper_scale import describe
    from dcdm.reproduction.scale import cpu

    print("\n\n".join(describe(one) for one in chosen_experiments(cpu(), [*names])))


def _overview(places: Places) -> _Overview:
    from rich.console import Console

    return _Overview(places, Console(stderr=True))


class _Overview:
    """A live table in a terminal; elsewhere a line whenever a run begins or ends."""

    def __init__(self, places: Places, console: object) -> None:
        from rich.console import Console
        from rich.live import Live

        assert isinstance(console, Console)
        self.places, self.console = places, console
        self.live = Live(console=console, refresh_per_second=2) if console.is_terminal else None
        self._said: dict[str, str] = {}

    def __enter__(self) -> Callable[[State], None]:
        if self.live is not None:
            self.live.start()
        return self.show

    def __exit__(self, *exception: object) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, state: State) -> None:
        from dcdm.reproduction.listing import overview, progress

        if self.live is not None:
            self.live.update(overview(state, self.places))
            return
        now = {one.spec.name: "started" for one in state.running}
        now |= {spec.name: "done" for spec in state.done} | {spec.name: "FAILED" for spec in state.failed}
        if not self._said:
            self._said = {spec.name: "done" for spec in state.done}
            print(progress(state), file=sys.stderr, flush=True)
        for name, what in now.items():
            if self._said.get(name) != what:
                print(f"{name}: {what}  ({progress(state)})", file=sys.stderr, flush=True)
        self._said = now
