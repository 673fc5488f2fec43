"""docs/decoding.md quotes the figures of the study `ten-minutes`, to the digit."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = {"MDLM": "mdlm", "BDLM, blocks of 8": "bdlm"}


def table() -> list[list[str]]:
    page = (ROOT / "docs/decoding.md").read_text()
    lines = page[page.index("| | forwards | `steps:N`") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_surest_first_and_far_apart_quote_the_results():
    runs = json.loads((ROOT / "results/ten-minutes.json").read_text())["runs"]
    quoted = {}
    for name, forwards, *nats in table():
        figures = runs[f"{KINDS[name]}-s0"]
        for policy, cell in zip(("steps", "dilated"), nats, strict=True):
            (commit,) = (
                one
                for one, figure in figures.items()
                if one.startswith(policy) and f"{figure['forwards']:.0f}" == forwards
            )
            quoted[name, commit] = cell == f"{figures[commit]['nats_per_token']:.3f}"
    assert all(quoted.values()), quoted
    assert len(quoted) == 12
    assert all(float(far) < float(sure) for *_, sure, far in table())
