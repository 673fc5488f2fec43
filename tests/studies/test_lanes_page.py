"""docs/lanes.md quotes the figures of the studies in `results`, to the digit."""

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[2]


def means(length: int) -> dict[tuple[str, str], float]:
    """Mean over seeds of every variant's figures."""
    found = defaultdict(list)
    for run, figures in json.loads((ROOT / f"results/lanes-{length}.json").read_text())["runs"].items():
        for name, figure in figures.items():
            found[run.rpartition("-s")[0], name].append(figure["nats_per_token"])
    return {key: fmean(values) for key, values in found.items()}


def rows(length: int) -> list[tuple[str, str]]:
    """The cells with nats and with what they are over AR, of the table for windows of this length."""
    page = (ROOT / "docs/lanes.md").read_text()
    table = page[page.index(f"| windows of {length}") :].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return [(nats, over) for _, _, nats, over, _ in cells]


@pytest.mark.parametrize("length", [128, 512])
def test_the_page_quotes_the_results(length):
    known = means(length)
    ar = known["ar", "valid"]
    digits = {f"{value:.3f}": value for value in known.values()}
    table = rows(length)
    assert table[0] == (f"{ar:.3f}", "")
    for nats, over in table[1:]:
        quoted = re.findall(r"\d\.\d{3}", nats)
        shares = [int(number) for number in re.findall(r"(\d+) %", over)]
        assert len(quoted) == len(shares) >= 1
        for number, share in zip(quoted, shares, strict=True):
            assert round(100 * (digits[number] / ar - 1)) == share
