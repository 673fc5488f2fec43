"""`dcdm reproduce`: the paper's experiments by name."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from dcdm.reproduction.experiments import Experiment
    from dcdm.reproduction.study import Study

EXAMPLES = (
    "dcdm reproduce --list",
    "dcdm reproduce loss-curves",
    "dcdm reproduce scaling --scale paper",
)


def details() -> str:
    """Every experiment, for the help."""
    from dcdm.reproduction.experiments import EXPERIMENTS

    return f"Names: {', '.join(EXPERIMENTS)}, or all."


def reproduce(
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME...")] = (),
    scale: Literal["cpu", "paper"] = "cpu",
    study: Path = Path("studies/claims.yaml"),
    work: Path = Path("runs/claims"),
    out: Path = Path("results/claims.json"),
    jobs: int = 2,
    seeds: tuple[int, ...] = (),
    list: bool = False,
) -> None:
    """Run the paper's experiments by name, with verdicts.

    At CPU scale an experiment is a part of one study, of which a run takes some minutes of a core. A finished run
    is never repeated; Ctrl-C saves and stops, the same command resumes.

    Args:
        names: Experiments.
        scale: cpu runs here; paper writes commands and costs without starting.
        study: The study with the runs and the claims (docs/reproduction.md says which texts it needs).
        work: Folder of the runs themselves: weights, metrics, logs.
        out: The figures of all finished runs; those that the file has are not made again.
        jobs: Runs at one time, each with one thread.
        seeds: Seeds to run now; by default all that each model has.
        list: Show what each experiment is about, and how many of its runs are done, without starting.
    """
    from dcdm.commands.options import folders_exist
    from dcdm.commands.study import carry_on, print_verdicts
    from dcdm.config import ConfigError
    from dcdm.reproduction.experiments import chosen_experiments, paper_commands, variants_of
    from dcdm.reproduction.study import read_study, stored_figures
    from dcdm.reproduction.verdicts import judge

    if not names and not list:
        raise ConfigError("name an experiment, or all; `dcdm reproduce --list` shows their names")
    chosen = chosen_experiments(names or ("all",))
    if scale == "paper" and not list:
        print("\n\n".join(paper_commands(one) for one in chosen))
        return
    if not study.is_file():
        raise ConfigError(f"--study {study}: there is no such file; run this in a checkout, or name the study")
    asked = read_study(study)
    if list:
        _show_list(asked, chosen, stored_figures(asked, out))
        return
    only = [*dict.fromkeys(name for one in chosen for name in variants_of(asked, one))]
    if not only:
        raise ConfigError(f"{', '.join(names)}: nothing of it runs at CPU scale; --scale paper has its commands")
    folders_exist(out=out)
    complete, figures = carry_on(asked, work, jobs, only, seeds, out)
    decided = [claim for one in chosen for claim in one.claims]
    print_verdicts([claim for claim in judge(asked, figures) if claim.name in decided])
    if not complete:
        sys.exit(1)


def _show_list(study: Study, chosen: Sequence[Experiment], done: Collection[str]) -> None:
    """The experiments, then the variants that they are made of."""
    from dcdm.reproduction.experiments import variants_of
    from dcdm.viewing.tables import Table

    variants = {one.name: variants_of(study, one) for one in chosen}

    def runs(names: Collection[str]) -> tuple[int, int]:
        wanted = [run.name for run in study.runs() if run.variant in names]
        return len(wanted), sum(name in done for name in wanted)

    texts = ("experiment", "paper", "shows")
    lines = [(one.name, one.paper, one.shows, *runs(variants[one.name])) for one in chosen]
    Table((*texts, "runs", "done"), lines, texts).print()
    print("\nRuns are shared: each is done once and serves every experiment that names it.\n")
    every = [*dict.fromkeys(name for names in variants.values() for name in names)]
    variant_lines = [(name, study.variants[name].label, *runs([name])) for name in every]
    Table(("variant", "what", "runs", "done"), variant_lines, ("variant", "what")).print()
    print(f"\n{runs(every)[0]} runs, {runs(every)[1]} done")
