"""`dcdm reproduce`: the paper's experiments by name, which are parts of one study."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from dcdm.studies.study import Experiment, Study

EXAMPLES = (
    "dcdm reproduce --list",
    "dcdm reproduce loss-curves",
    "dcdm reproduce scaling --scale paper",
)


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

    At CPU scale an experiment is a part of one study (`dcdm study`), of which a run takes some minutes of a core. A
    finished run is never repeated; Ctrl-C saves and stops, the same command resumes.

    Names: loss-curves, downstream, adaptive, scaling, training-steps, k-ablation, point-vs-subspace, zero-shot,
    moe, partitions, learning-rate, or all.

    Args:
        names: Experiments.
        scale: cpu runs here; paper writes commands and costs without starting.
        study: The study with the runs, the claims and the experiments (docs/reproduction.md says which texts it
            needs).
        work: Folder of the runs themselves: weights, metrics, logs.
        out: The figures of all finished runs; those that the file has are not made again.
        jobs: Runs at one time, each with one thread.
        seeds: Seeds to run now; by default all that each model has.
        list: Show what each experiment is about, and how many of its runs are done, without starting.
    """
    from dcdm.commands.options import folders_exist
    from dcdm.commands.study import carry_on, print_verdicts
    from dcdm.config import ConfigError
    from dcdm.studies.paper import paper_commands
    from dcdm.studies.results import judge
    from dcdm.studies.runner import stored_figures
    from dcdm.studies.study import read_study

    if not names and not list:
        raise ConfigError("name an experiment, or all; `dcdm reproduce --list` shows their names")
    if not study.is_file():
        raise ConfigError(f"--study {study}: there is no such file; run this in a checkout, or name the study")
    asked = read_study(study)
    chosen = asked.chosen_experiments(names or ("all",))
    if list:
        _show_list(asked, chosen, stored_figures(asked, out))
        return
    if scale == "paper":
        print("\n\n".join(paper_commands(name, one) for name, one in chosen.items()))
        return
    only = asked.variants_in(chosen)
    if not only:
        raise ConfigError(f"{', '.join(names)}: nothing of it runs at CPU scale; --scale paper has its commands")
    folders_exist(out=out)
    complete, figures = carry_on(asked, work, jobs, only, seeds, out)
    decided = [claim for one in chosen.values() for claim in one.claims]
    print_verdicts([claim for claim in judge(asked, figures) if claim.name in decided])
    if not complete:
        sys.exit(1)


def _show_list(study: Study, chosen: Mapping[str, Experiment], done: Collection[str]) -> None:
    """The experiments, then the variants that they are made of."""
    from dcdm.viewing.tables import Table

    def runs(names: Collection[str]) -> tuple[int, int]:
        wanted = [run.name for run in study.runs() if run.variant in names]
        return len(wanted), sum(name in done for name in wanted)

    texts = ("experiment", "paper", "shows")
    lines = [(name, one.paper, one.shows, *runs(study.variants_in([name]))) for name, one in chosen.items()]
    Table((*texts, "runs", "done"), lines, texts).print()
    print("\nRuns are shared: each is done once and serves every experiment that names it.\n")
    every = study.variants_in(chosen)
    variant_lines = [(name, study.variants[name].label, *runs([name])) for name in every]
    Table(("variant", "what", "runs", "done"), variant_lines, ("variant", "what")).print()
    print(f"\n{runs(every)[0]} runs, {runs(every)[1]} done")
