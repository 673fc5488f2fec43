"""docs/training.md quotes the figures of its studies in `results`, to the digit."""

import json
from pathlib import Path

import pytest

from dcdm.studies.results import interval

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/training.md").read_text().partition("## What makes small diffusion models learn")[2]
RATES = ["adamw-1", "adamw-2", "adamw-4", "muon-1", "muon-2", "muon-5", "muon-10", "muon-20"]
RECIPES = {
    "AdamW, the best of three rates": "adamw", "Muon": "muon", "Muon, noise in a bell": "bell",
    "Muon, noise in a bell, RoPE for short windows": "theta", "Muon, noise between 0.3 and 0.8": "clipped",
    "Muon, a third of the time as AR first": "from-ar", "Muon, blocks that grow": "grown",
    "Muon, complementary pairs": "pairs",
}  # fmt: skip
"""Rows of the table of recipes → endings of the study's variants."""
TEN_MINUTES = {
    "`ar-debug`": "ar", "`lanes-debug`": "lanes", "`mdlm-debug`": "mdlm", "`bdlm-debug`": "bdlm",
    "`dcdm-debug` (paper)": "paper", "`dcdm-debug-causal`": "causal",
}  # fmt: skip


def runs(study: str) -> dict:
    return json.loads((ROOT / f"results/{study}.json").read_text())["runs"]


def cells(begins: str) -> list[str]:
    """The cells behind the first of the table's line that begins so."""
    (line,) = (one.strip() for one in PAGE.splitlines() if one.strip().startswith(f"| {begins} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize(
    ("kind", "begins"),
    [
        ("mdlm", "MDLM, bound"),
        ("bdlm", "BDLM, blocks of 8, bound"),
        ("paper", "DCDM, the paper's routing, sequential bound"),
        ("causal", "DCDM, causal routing, bound"),
    ],
)
def test_the_table_of_rates_quotes_the_results(kind, begins):
    known = runs("learn-rates")
    figures = [known.get(f"{kind}-{column}-s0") for column in RATES]
    assert cells(begins)[1:] == ["" if one is None else f"{one['valid']['nats_per_token']:.3f}" for one in figures]


def mean(known: dict, variant: str, figure: str = "valid") -> str:
    values = [known[run][figure]["nats_per_token"] for run in sorted(known) if run.rpartition("-s")[0] == variant]
    found = interval(values)
    if found is None:
        return ""
    return f"{found.mean:.3f}" + ("" if found.half is None else f" ± {found.half:.3f}")


@pytest.mark.parametrize("row", RECIPES)
def test_the_table_of_recipes_quotes_the_results(row):
    known = runs("learn-recipes")
    assert cells(row) == [mean(known, f"{kind}-{RECIPES[row]}") for kind in ("mdlm", "bdlm", "paper", "causal")]


@pytest.mark.parametrize("kind", ["mdlm", "bdlm", "paper", "causal"])
def test_what_the_interval_does_to_one_forward_per_chunk_quotes_the_results(kind):
    known = runs("learn-recipes")
    variants = [f"{kind}-{noise}" for noise in ("clipped", "bell")]
    if kind == "bdlm":
        clipped, bell = (mean(known, variant, "chunk").split()[0] for variant in variants)
    else:
        clipped, bell = (f"{known[f'{variant}-s0']['chunk']['nats_per_token']:.3f}" for variant in variants)
    assert f"{clipped} instead of {bell}" in " ".join(PAGE.split())


@pytest.mark.parametrize("row", TEN_MINUTES)
def test_the_table_of_ten_minutes_quotes_the_results(row):
    figures = runs("ten-minutes")[f"{TEN_MINUTES[row]}-s0"]
    nats = {name: f"{figure['nats_per_token']:.3f}" for name, figure in figures.items()}
    valid, chunk = cells(row)[1:]
    if "4 lanes" in nats:
        assert valid == f"{nats['4 lanes']} (exact, 4 lanes)"
        by_number = sorted((int(name.split()[0]), value) for name, value in nats.items())
        assert [one for one in chunk.split() if "." in one] == [value for _, value in by_number]
        return
    assert valid.split()[0] == nats["valid"]
    assert ("surrogate" in valid) == ("surrogate" in nats)
    if "surrogate" in nats:
        assert f"surrogate {nats['surrogate']}" in valid
    if "chunk" in nats:
        forwards = figures["chunk"]["forwards"]
        assert chunk == f"{nats['chunk']} ({forwards:.0f} forward{'' if round(forwards) == 1 else 's'})"
