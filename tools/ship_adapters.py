"""A run of `dcdm adapt` on a base of `dcdm.shipped.bases` made into an adapter that ships: in bf16, with its card.

    python tools/ship_adapters.py RUN NAME FIGURES.json --says "What it is, in a sentence." --command "dcdm adapt …"

writes `src/dcdm/shipped/NAME`. FIGURES.json is a list of rows, as `tools/check_drafts.py` and `dcdm eval ppl` gave
them; of the run come seed, steps and texts.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import tyro
from tyro.conf import Positional

from dcdm.config import ConfigError
from dcdm.data.store import PreparedData
from dcdm.files import file_digest
from dcdm.io import adapters
from dcdm.io.export import card, check_free, export_adapter
from dcdm.io.load import SUMS, find_model
from dcdm.shipped import CARD, HOME, AdapterCard
from dcdm.training import settings as run_settings
from dcdm.training.checkpoint_folder import SETTINGS

LARGEST = 12 << 20
LICENCE = "Apache-2.0"


def ship(
    run: Annotated[Path, Positional], name: Annotated[str, Positional], figures: Annotated[Path, Positional],
    says: str, command: str, seconds: int, into: Path = HOME,
) -> None:  # fmt: skip
    """Export an adapter in bf16 and write its card.

    Args:
        run: A finished run of `dcdm adapt` with --own-texts.
        name: What users will call it.
        figures: Rows of figures, JSON.
        says: What it is, in a sentence.
        command: Trains it again.
        seconds: Of one core, for the texts and the training.
    """
    check_free(folder := into / name)
    settings, rows = run_settings.read(run / SETTINGS), tuple(json.loads(figures.read_text()))
    found = find_model(run)
    data = PreparedData.open(settings.data.sources[0])
    with tempfile.TemporaryDirectory(prefix="dcdm-ship-") as place:
        made = Path(place) / name
        export_adapter(run, made, torch.bfloat16)
        weights, adapter = made / adapters.WEIGHTS, adapters.read_adapter(made)
        if (size := weights.stat().st_size) > LARGEST:
            raise ConfigError(f"{run}: its adapter takes {size / 2**20:.1f} MB in bf16, more than 12")
        told = AdapterCard(
            name, says, adapter.base, LICENCE, command, settings.train.seed, found.identity()["step"],
            data.documents("train"), seconds, rows,
            {"dtype": "bf16", "bytes": size, "sha256": file_digest(weights), "base_sha256": adapter.base_sha256},
        )  # fmt: skip
        (made / CARD).write_text(json.dumps(asdict(told), indent=1, ensure_ascii=False) + "\n")
        (made / "README.md").write_text(readme(told))
        sums = {path.name: file_digest(path) for path in sorted(made.iterdir()) if path.name != SUMS}
        (made / SUMS).write_text(json.dumps(sums, indent=1))
        shutil.copytree(made, folder)
    print(readme(told))


def readme(told: AdapterCard) -> str:
    """The card for people."""
    columns = list(told.figures[0])
    rows = [
        f"| {' | '.join(str(value) for value in line)} |"
        for line in (columns, ["---"] * len(columns), *(row.values() for row in told.figures))
    ]
    facts = {
        "base": f"`dcdm import {told.base}`, SHA-256 {told.weights['base_sha256'][:16]}…",
        "licence": f"{told.licence}, that of the base",
        "training text": f"{told.texts} texts that the base wrote",
        "training": f"{told.steps:,} steps, seed {told.seed}, {told.seconds / 60:.0f} minutes of one core in all",
        "again": f"`{told.command}`",
        "weights": f"bf16, {told.weights['bytes'] / 1e6:.1f} MB, SHA-256 {told.weights['sha256'][:16]}…",
    }
    lines = ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), "", *rows]
    return card(told.name, told.says, *lines, license=told.licence.lower(), base_model=told.base)


if __name__ == "__main__":
    tyro.cli(ship, description=__doc__)
