"""`dcdm study`: variants with seeds, trained alike and compared with intervals; `dcdm reproduce`: the paper's."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from dcdm.commands.options import JsonOption, at_least_one, folders_exist, print_json
from dcdm.config import ConfigError

if TYPE_CHECKING:
    from dcdm.studies.results import Judged, Row
    from dcdm.studies.study import Experiment, Study

STUDY_EXAMPLES = (
    "dcdm study studies/lanes-128.yaml --work runs/lanes-128 --jobs 2",
    "dcdm study studies/lanes-128.yaml --work runs/lanes-128 --report",
)
REPRODUCE_EXAMPLES = (
    "dcdm reproduce --list",
    "dcdm reproduce loss-curves --quick",
    "dcdm reproduce loss-curves",
)


def study(
    file: Annotated[Path, Positional, arg(metavar="FILE")],
    work: Annotated[Path, arg(metavar="DIR")],
    jobs: int = 1,
    only: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (),
    report: bool = False,
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None,
    curves: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None,
    json: JsonOption = False,
) -> None:
    """Train every variant of a study with every seed, measure all on the same held-out windows, and compare.

    It may take hours; progress is printed, and the same command resumes. The table has nats per token, 95 %
    intervals over seeds, and differences from the study's reference; below it stand verdicts on the study's claims.

    Args:
        file: The study: variants, seeds and settings (docs/reproduction.md).
        work: Where runs and their figures are kept; the same folder resumes.
        jobs: Runs at a time, one thread each.
        only: The variants to carry out now, and to draw; by default all.
        seeds: The seeds to carry out now; by default all of the study.
        report: Compare what is finished; start nothing.
        out: Write the figures of every run there, as JSON. Runs that the file has already, of the same settings,
            stay in it and are not made again: a study may be carried out in parts, on several machines.
        curves: Draw the valid figure while training into this PNG or SVG, for runs with `evaluate_every`.
    """
    from dcdm.studies.plots import draw_curves
    from dcdm.studies.results import compare, judge, summary
    from dcdm.studies.study import read_study

    folders_exist(out=out, curves=curves)
    if curves is not None and curves.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--curves {curves}: a picture ends in .png, .svg or .pdf")
    asked = read_study(file)
    complete, figures = carry_on(asked, work, jobs, only, seeds, out, start=not report)
    rows = compare(asked, figures)
    if curves is not None:
        draw_curves(asked, figures, curves, only)
    if json:
        print_json(summary(asked, figures))
    else:
        print_comparison(asked, rows, judge(asked, figures))
    end(complete)


def carry_on(
    asked: Study, work: Path, jobs: int, only: Sequence[str], seeds: Sequence[int], out: Path | None,
    start: bool = True,
) -> tuple[bool, dict[str, dict[str, Any]]]:  # fmt: skip
    """Make the runs that are missing; whether all are there now, and the figures of those that are."""
    import json

    from dcdm.files import write_whole
    from dcdm.progress import ConsoleProgress
    from dcdm.studies.results import summary
    from dcdm.studies.runner import carry_out, collected, stored_figures

    at_least_one(jobs=jobs)
    known = () if out is None else stored_figures(asked, out)
    with ConsoleProgress() as reporter:
        complete = not start or carry_out(asked, work, jobs, only, seeds, known, reporter)
    figures = collected(asked, work, out)
    if out is not None:
        write_whole(out, (json.dumps(summary(asked, figures), indent=1, sort_keys=True) + "\n").encode())
    return complete, figures


def print_comparison(study: Study, rows: Sequence[Row], judged: Sequence[Judged]) -> None:
    """A table of figures, and one of the comparisons behind every claim, with verdicts."""
    from dcdm.likelihood.estimators import LABELS
    from dcdm.viewing.tables import Table

    if rows:
        minus = "" if study.against is None else f" minus {study.against}, {study.main_figure(study.against)}"
        columns = ("variant", "figure", "is", "forwards", "nats per token", "seeds", f"difference{minus}")
        lines = [
            (study.named(row.variant), row.figure,
             LABELS[row.estimator] if row.estimator == "surrogate" else row.estimator,
             None if row.forwards is None else f"{row.forwards:.1f}",
             row.mean.shown(), row.mean.seeds, row.difference and row.difference.shown("+"))
            for row in rows
        ]  # fmt: skip
        Table(columns, lines, ("variant", "figure", "is")).print()
    else:
        print(f"no run of {study.name} is finished", file=sys.stderr)
    if not judged:
        return
    compared = [
        (claim.name if number == 0 else "", part.name, part.difference and part.difference.shown("+"), part.verdict)
        for claim in judged
        for number, part in enumerate(claim.parts)
    ]
    print()
    Table(("claim", "holds if", "difference", "verdict"), compared, ("claim", "holds if", "verdict")).print()
    print()
    for claim in judged:
        print(f"{claim.name} ({claim.says}): {claim.verdict}")


def end(complete: bool) -> None:
    """Leave with 1 where runs are missing."""
    if not complete:
        print("unfinished: the same command resumes", file=sys.stderr)
        sys.exit(1)


# --- the paper's experiments --------------------------------------------------------------------------------------


def reproduce(
    names: Annotated[tuple[str, ...], Positional, arg(metavar="NAME...")] = (),
    quick: bool = False,
    study: Annotated[Path | None, arg(help_behavior_hint="(default: studies/claims.yaml)")] = None,
    work: Annotated[Path | None, arg(help_behavior_hint="(default: runs/claims)")] = None,
    out: Annotated[Path | None, arg(help_behavior_hint="(default: results/claims.json)")] = None,
    jobs: int = 2,
    seeds: tuple[int, ...] = (),
    list: bool = False,
) -> None:
    """Run the paper's experiments by name, with verdicts.

    At CPU scale an experiment is a part of one study (`dcdm study`), of which a run takes some minutes of a core. A
    finished run is never repeated; Ctrl-C saves and stops, the same command resumes.

    With --quick one seed of a small study, studies/quick.yaml, is done in minutes (loss-curves, k-ablation,
    point-vs-subspace, zero-shot), on text that comes with dcdm, and the paper's figure is drawn.

    Names: loss-curves, downstream, adaptive, scaling, training-steps, k-ablation, point-vs-subspace, zero-shot,
    moe, partitions, learning-rate, or all.

    Args:
        names: Experiments.
        quick: At most ten minutes on two cores for an experiment; runs, figures and pictures go to runs/quick.
        study: The study with the runs, the claims and the experiments (docs/reproduction.md says which texts it
            needs).
        work: Folder of the runs themselves: weights, metrics, logs.
        out: The figures of all finished runs; those that the file has are not made again.
        jobs: Runs at one time, each with one thread.
        seeds: Seeds to run now; by default all that each model has.
        list: Show what each experiment is about, and how many of its runs are done, without starting.
    """
    from dcdm.studies.plots import draw_curves
    from dcdm.studies.results import compare, judge
    from dcdm.studies.runner import stored_figures
    from dcdm.studies.study import read_study

    if not names and not list:
        raise ConfigError("name an experiment, or all; `dcdm reproduce --list` shows their names")
    name = "quick" if quick else "claims"
    study, work = study or Path(f"studies/{name}.yaml"), work or Path(f"runs/{name}")
    out = out or (work / "figures.json" if quick else Path("results/claims.json"))
    if not study.is_file():
        raise ConfigError(f"--study {study}: there is no such file; run this in a checkout, or name the study")
    asked = read_study(study)
    chosen = asked.chosen_experiments(names or ("all",))
    if list:
        _show_list(asked, chosen, stored_figures(asked, out))
        return
    only = asked.variants_in(chosen)
    if not only:
        raise ConfigError(f"{', '.join(names)}: nothing of it runs at CPU scale; docs/scaling.md has the paper's")
    if quick:
        work.mkdir(parents=True, exist_ok=True)
    folders_exist(out=out)
    complete, figures = carry_on(asked, work, jobs, only, seeds, out)
    decided = {claim for one in chosen.values() for claim in one.claims}
    rows = [row for row in compare(asked, figures) if row.variant in only]
    print_comparison(asked, rows, [claim for claim in judge(asked, figures) if claim.name in decided])
    if quick:
        picture = work / f"{'-'.join(chosen)}.png"
        draw_curves(asked, figures, picture, only)
        print(f"\n{picture}: loss and MaxVio against steps")
    end(complete)


def _show_list(study: Study, chosen: Mapping[str, Experiment], done: Collection[str]) -> None:
    from dcdm.viewing.tables import Table

    def runs(names: Iterable[str]) -> tuple[int, int]:
        variants = study.variants_in(names)
        wanted = [run.name for run in study.runs() if run.variant in variants]
        return len(wanted), sum(name in done for name in wanted)

    texts = ("experiment", "paper", "shows")
    lines = [(name, one.paper, one.shows, *runs([name])) for name, one in chosen.items()]
    Table((*texts, "runs", "done"), lines, texts).print()
    print("\nRuns are shared: each is done once and serves every experiment that names it.")
    print(f"{runs(chosen)[0]} runs, {runs(chosen)[1]} done")
