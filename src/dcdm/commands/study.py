"""`dcdm study`: variants with seeds, trained alike and compared with intervals."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from dcdm.commands.options import JsonOption, folders_exist, print_json

if TYPE_CHECKING:
    from dcdm.studies.results import Judged
    from dcdm.studies.study import Study

EXAMPLES = (
    "dcdm study studies/lanes-128.yaml --work runs/lanes-128 --jobs 2",
    "dcdm study studies/lanes-128.yaml --work runs/lanes-128 --report",
)


def study(
    file: Annotated[Path, Positional, arg(metavar="FILE")],
    work: Annotated[Path, arg(metavar="DIR")],
    jobs: int = 1,
    only: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (),
    report: bool = False,
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None,
    plot: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None,
    curves: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None,
    verdicts: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None,
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
        plot: Draw exact nats per token against forward passes into this PNG or SVG.
        curves: Draw the valid figure while training into this PNG or SVG, for runs with `evaluate_every`.
        verdicts: Draw the comparisons of the study's claims with their intervals into this PNG or SVG.
    """
    from dcdm.config import ConfigError
    from dcdm.likelihood.estimators import LABELS
    from dcdm.studies.plots import draw_curves, draw_frontier, draw_verdicts
    from dcdm.studies.results import compare, judge, summary
    from dcdm.studies.study import read_study
    from dcdm.viewing.tables import Table

    folders_exist(out=out, plot=plot, curves=curves, verdicts=verdicts)
    for name, picture in (("plot", plot), ("curves", curves), ("verdicts", verdicts)):
        if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
            raise ConfigError(f"--{name} {picture}: a picture ends in .png, .svg or .pdf")
    asked = read_study(file)
    complete, figures = carry_on(asked, work, jobs, only, seeds, out, start=not report)
    rows = compare(asked, figures)
    if plot is not None:
        draw_frontier(asked, [row for row in rows if row.variant in (only or asked.variants)], plot)
    if curves is not None:
        draw_curves(asked, figures, curves, only)
    judged = judge(asked, figures)
    if verdicts is not None:
        draw_verdicts(asked, judged, verdicts)
    if json:
        print_json(summary(asked, figures))
    elif rows:
        difference = "difference"
        if asked.against is not None:
            difference = f"minus {asked.against}, {asked.main_figure(asked.against)}"
        columns = ("variant", "figure", "is", "forwards", "nats per token", "seeds", difference)
        lines = [
            (asked.named(row.variant), row.figure,
             LABELS[row.estimator] if row.estimator == "surrogate" else row.estimator,
             None if row.forwards is None else f"{row.forwards:.1f}",
             row.mean.shown(), row.mean.seeds, None if row.difference is None else row.difference.shown("+"))
            for row in rows
        ]  # fmt: skip
        Table(columns, lines, ("variant", "figure", "is")).print()
        if judged:
            print()
            print_verdicts(judged)
    else:
        _say(f"no run of {asked.name} is finished in {work}")
    if not complete:
        _say("unfinished: the same command resumes")
        sys.exit(1)


def carry_on(
    asked: Study, work: Path, jobs: int, only: Sequence[str], seeds: Sequence[int], out: Path | None,
    start: bool = True,
) -> tuple[bool, dict[str, dict[str, Any]]]:  # fmt: skip
    """Make the runs that are missing; whether all are there now, and the figures of those that are."""
    from dcdm.config import ConfigError
    from dcdm.files import write_whole
    from dcdm.studies.results import summary
    from dcdm.studies.runner import carry_out, collected, stored_figures

    if jobs < 1:
        raise ConfigError(f"--jobs {jobs} must be at least 1")
    known = () if out is None else stored_figures(asked, out)
    complete = not start or carry_out(asked, work, jobs, _say, only, seeds, known)
    figures = collected(asked, work, out)
    if out is not None:
        write_whole(out, _as_text(summary(asked, figures)))
    return complete, figures


def print_verdicts(judged: Sequence[Judged]) -> None:
    """A table of the comparisons behind every claim."""
    from dcdm.viewing.tables import Table

    compared = [
        (claim.name if number == 0 else "", part.name, part.difference and part.difference.shown("+"), part.verdict)
        for claim in judged
        for number, part in enumerate(claim.parts)
    ]
    Table(("claim", "holds if", "difference", "verdict"), compared, ("claim", "holds if", "verdict")).print()
    print()
    for claim in judged:
        print(f"{claim.name} ({claim.says}): {claim.verdict}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _as_text(value: object) -> bytes:
    import json

    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
