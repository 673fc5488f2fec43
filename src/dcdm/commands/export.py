"""`dcdm export`: a trained model as a folder for Hugging Face tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

EXAMPLES = ("dcdm export runs/first exported",)


def export(source: Annotated[Path, Positional], folder: Annotated[Path, Positional], average: bool = True) -> None:
    """Write a trained model as a folder that Hugging Face tools load.

    Args:
        source: A run folder or a checkpoint in it.
        folder: The folder to write; it must not exist.
        average: Take the averaged weights where the run kept any.
    """
    from dcdm.io.export import export as write_export

    write_export(source, folder, average=average)
    print(f"{folder}: written; `dcdm verify {folder}` checks it")
