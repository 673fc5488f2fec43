"""docs/adapting.md quotes the figures of `results/adapting.csv`, to the digit."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODELS = {
    "imported, untrained": "smol-base",
    "AR, 2 hours": "smol-ar-120",
    "lanes, 2 hours": "smol-lanes-120",
}
LANES = (1, 2, 4, 8)


def figures(corpus: str) -> dict[str, float]:
    with open(ROOT / "results/adapting.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["corpus"] == corpus]
    assert {(row["estimator"], row["window_length"]) for row in rows} == {("exact", "256")}
    assert len({row["windows"] for row in rows}) == 1
    return {row["model"]: float(row["nats_per_token"]) for row in rows}


@pytest.mark.parametrize("corpus", ["wikitext-2", "state-of-the-union"])
def test_the_page_quotes_the_figures_and_what_they_are_over_ar(corpus: str) -> None:
    known = figures(corpus)
    page = (ROOT / "docs/adapting.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- begin {corpus} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert found is not None
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].strip().splitlines()[2:]]
    assert [name for name, *_ in rows] == list(MODELS)
    for name, *cells in rows:
        model = MODELS[name]
        if name.startswith("AR"):
            assert cells == [f"{known[model]:.3f}", "", "", ""]
            continue
        for cell, lanes in zip(cells, LANES, strict=True):
            nats = known[f"{model}, {lanes} lane{'s' * (lanes > 1)}"]
            reference = f"smol-ar-{model.rpartition('-')[2]}"
            over = f" ({100 * (nats / known[reference] - 1):+.1f} %)" if reference in known else ""
            assert cell == f"{nats:.3f}{over}".replace("-", "−")
