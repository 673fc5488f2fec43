"""docs/adapting.md quotes the figures of `results/adapting.csv`, to the digit."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODELS = {
    "imported, untrained": "smol-base",
    "AR, 410 steps": "smol-ar-30",
    "lanes, 410 steps": "smol-lanes-30",
    "AR, LoRA, 410 steps": "smol-arlora-30",
    "lanes, LoRA, 410 steps": "smol-lora-30",
    "AR, 1,500 steps": "smol-ar-120",
    "lanes, 1,500 steps": "smol-lanes-120",
    "lanes, LoRA, 1,500 steps": "smol-lora-120",
}
AR_OF = {"smol-lanes-30": "smol-ar-30", "smol-lora-30": "smol-arlora-30", "smol-lanes-120": "smol-ar-120"}
LANES = (1, 2, 4, 8)
PARTITIONS = {
    "lanes, 4": ("smol-lanes-30, 4 lanes", "exact"),
    "lanes, 8": ("smol-lanes-30, 8 lanes", "exact"),
    "blocks of 4, one forward each": ("smol-bdlm-30", "trajectory"),
    "blocks of 4, two forwards each": ("smol-bdlm-30, steps:2", "trajectory"),
    "blocks of 4, a forward a token": ("smol-bdlm-30, position", "trajectory"),
    "8 causal chunks, one forward each": ("smol-causal-30", "trajectory"),
    "8 causal chunks, 4 forwards each": ("smol-causal-30, steps:4", "trajectory"),
    "8 causal chunks, 8 forwards each": ("smol-causal-30, steps:8", "trajectory"),
}


def rows_of(corpus: str) -> list[dict[str, str]]:
    with open(ROOT / "results/adapting.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["corpus"] == corpus]
    assert {(row["windows"], row["window_length"]) for row in rows} == {("32", "256")}
    return rows


def figures(corpus: str) -> dict[str, float]:
    return {row["model"]: float(row["nats_per_token"]) for row in rows_of(corpus) if row["estimator"] == "exact"}


def table(name: str) -> list[list[str]]:
    page = (ROOT / "docs/adapting.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- begin {name} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert found is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].strip().splitlines()[2:]]


def cells_of(known: dict[str, float], model: str) -> list[str]:
    """A model's cells: nats in 1, 2, 4, 8 lanes, and what they are over AR that was trained alike."""
    if model in known:
        return [f"{known[model]:.3f}", "", "", ""]
    cells, ar = [], known.get(AR_OF.get(model, ""))
    for lanes in LANES:
        nats = known[f"{model}, {lanes} lane{'s' * (lanes > 1)}"]
        cells.append(f"{nats:.3f}" + (f" ({100 * (nats / ar - 1):+.1f} %)" if ar else "").replace("-", "−"))
    return cells


def partition_cells(wanted: tuple[str, str]) -> list[str]:
    """Forwards for a window's 255 tokens, and nats."""
    (row,) = (row for row in rows_of("wikitext-2") if (row["model"], row["estimator"]) == wanted)
    lanes = re.search(r"(\d) lanes", wanted[0])
    spent = -(-255 // int(lanes[1])) if lanes else float(row["forwards"]) / int(row["windows"])
    return [f"{spent:.0f}", f"{float(row['nats_per_token']):.3f}"]


@pytest.mark.parametrize("corpus", ["wikitext-2", "state-of-the-union"])
def test_the_page_quotes_the_figures_and_what_they_are_over_ar(corpus: str) -> None:
    known = figures(corpus)
    assert table(corpus) == [[name, *cells_of(known, model)] for name, model in MODELS.items()]


def test_the_page_quotes_partitions_by_their_forwards() -> None:
    assert table("partitions") == [[name, *partition_cells(wanted)] for name, wanted in PARTITIONS.items()]
