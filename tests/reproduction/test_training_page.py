"""docs/training.md quotes the figures of its studies in `results`, to the digit."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLUMNS = ["adamw-1", "adamw-2", "adamw-4", "muon-1", "muon-2", "muon-5", "muon-10", "muon-20"]


@pytest.mark.parametrize(("kind", "begins"), [("mdlm", "| MDLM, bound"), ("bdlm", "| BDLM, blocks of 8, bound")])
def test_the_table_of_rates_quotes_the_results(kind, begins):
    runs = json.loads((ROOT / "results/learn-rates.json").read_text())["runs"]
    (line,) = (one for one in (ROOT / "docs/training.md").read_text().splitlines() if one.startswith(begins))
    cells = [cell.strip() for cell in line.strip("|").split("|")][2:]
    figures = [runs.get(f"{kind}-{column}-s0") for column in COLUMNS]
    assert cells == ["" if one is None else f"{one['valid']['nats_per_token']:.3f}" for one in figures]
