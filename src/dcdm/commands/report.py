"""`dcdm report`: curves and figures of training runs as one page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from dcdm.commands.options import JsonOption, print_json

EXAMPLES = ("dcdm report runs/first", "dcdm report runs/first runs/second --out compared.html")


def report(
    runs: Annotated[list[str], Positional, arg(metavar="RUN...")],
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None,
    json: JsonOption = False,
) -> None:
    """Show training runs side by side: their figures as a table, and curves and settings as one page.

    It reads what the runs have written and takes seconds; runs under way may be read, too.

    Args:
        runs: Run folders.
        out: The page to write; by default report.html in the run's folder, for several runs in the current one.
    """
    from dcdm.files import write_whole
    from dcdm.viewing.report import figures_table, read_runs, run_figures, runs_page

    logs = read_runs(runs)
    place = out or (Path(runs[0]) if len(runs) == 1 else Path()) / "report.html"
    page = runs_page(logs)
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, page.encode())
    if json:
        print_json([run_figures(log) for log in logs])
    else:
        figures_table(logs).print()
    print(f"{place}: written; open it in a browser", file=sys.stderr)
