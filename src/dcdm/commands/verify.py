"""`dcdm verify`: whether a run, a checkpoint or an exported folder is whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from dcdm.commands.options import JsonOption, print_json
from dcdm.config import ConfigError

EXAMPLES = ("dcdm verify runs/first", "dcdm verify exported --json")


def verify(path: Annotated[Path, Positional], json: JsonOption = False) -> None:
    """Check a run, a checkpoint or an exported folder: checksums, finite weights, leaks, reload equality.

    Args:
        path: The folder, or the name of a model that `dcdm models` lists.
    """
    from dcdm.io.verify import verify_model
    from dcdm.shipped import folder_of

    path = folder_of(path)
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give a run, a checkpoint in it, or an exported folder")
    problems = {}
    for check in verify_model(path):
        problems[check.name] = check.problems
        if not json:
            print("FAIL" if check.problems else "ok  ", check.name)
            for problem in check.problems:
                print("    ", problem)
    if json:
        print_json(problems)
    if any(problems.values()):
        sys.exit(1)
