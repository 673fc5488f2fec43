"""`dcdm report`: figures of training runs side by side, and the settings in which they differ."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

from tyro.conf import Positional, arg

from dcdm.commands.options import JsonOption, print_json

EXAMPLES = ("dcdm report runs/first", "dcdm report runs/first runs/second")


def report(runs: Annotated[list[str], Positional, arg(metavar="RUN...")], json: JsonOption = False) -> None:
    """Show training runs side by side: their figures, and the settings in which they differ.

    It reads what the runs have written and takes seconds; runs under way may be read, too. Their curves are for
    TensorBoard, for which every run writes.

    Args:
        runs: Run folders.
    """
    from dcdm.viewing.report import LEGEND, differing, figures_table, read_runs, run_figures, settings_table

    logs = read_runs(runs)
    if json:
        print_json({"runs": [run_figures(log) for log in logs], "differing": differing(logs)})
        return
    figures_table(logs).print(caption=LEGEND)
    print()
    if len(logs) > 1 and differing(logs):
        settings_table(logs).print()
    elif len(logs) > 1:
        print("the runs have the same settings")
    print(f"curves: tensorboard --logdir_spec {shlex.quote(','.join(runs))}", file=sys.stderr)
