"""`dcdm export`: a trained model as a folder for Hugging Face tools, or its adapters alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from dcdm.commands.options import AdapterOption, DtypeOption, ModelArgument, compute_on
from dcdm.config import ConfigError

EXAMPLES = (
    "dcdm export runs/first exported",
    "dcdm export runs/lora adapters --adapter-only",
    "dcdm export base merged --adapter adapters",
)


def export(
    source: ModelArgument,
    folder: Annotated[Path, Positional, arg(metavar="FOLDER")],
    average: bool = True,
    adapter: AdapterOption = None,
    adapter_only: bool = False,
    dtype: DtypeOption = "fp32",
) -> None:
    """Write a trained model as a folder that Hugging Face tools load.

    Args:
        folder: The folder to write; it must not exist.
        average: Take the averaged weights where the run kept any.
        adapter_only: Write what a run of `dcdm adapt --lora` has added to its base, in peft's format; else adapters
            are merged into the weights.
    """
    from dcdm.io.export import export as export_model
    from dcdm.io.export import export_adapter

    if adapter_only and adapter is not None:
        raise ConfigError("--adapter and --adapter-only exclude each other: the first merges, the second does not")
    if adapter_only and (not average or dtype != "fp32"):
        raise ConfigError("--no-average and --dtype have no effect on --adapter-only: it writes what was trained")
    if adapter_only:
        export_adapter(source, folder)
    else:
        export_model(source, folder, average=average, adapter=adapter, dtype=compute_on("cpu", dtype)[1])
    print(f"{folder}: written; `dcdm verify {folder}` checks it")
