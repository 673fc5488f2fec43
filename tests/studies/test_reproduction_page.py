"""docs/reproduction.md is written by hand; every figure and every verdict in it is one of the results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from dcdm.studies.measuring import UNIGRAM
from dcdm.studies.results import Interval, compare, judge
from dcdm.studies.runner import stored_figures
from dcdm.studies.study import read_study

ROOT = Path(__file__).parents[2]
STUDIES = ("claims", "surrogate")


def spelled(value: Interval | None, sign: str) -> set[str]:
    if value is None or value.half is None:
        return set()
    return {value.shown(sign).replace("-", "−")}


def table(page: str, name: str) -> list[list[str]]:
    """The cells of a marked table, without its head."""
    found = re.search(rf"<!-- begin {name} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert found is not None
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in found[1].strip().splitlines()[2:]]


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs/reproduction.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def results():
    found = {}
    for name in STUDIES:
        study = read_study(ROOT / f"studies/{name}.yaml")
        found[name] = study, stored_figures(study, ROOT / f"results/{name}.json")
    return found


def test_every_interval_of_the_page_is_one_of_the_results(page, results):
    known: set[str] = set()
    for study, figures in results.values():
        for row in compare(study, figures):
            known |= spelled(row.mean, "") | spelled(row.difference, "+")
        for claim in judge(study, figures):
            for part in claim.parts:
                known |= spelled(part.difference, "+")
    quoted = re.findall(r"[+−]?\d+\.\d{3} ± \d\.\d{3}", page)
    assert len(quoted) > 10
    assert not [one for one in quoted if one not in known]


def test_the_table_of_verdicts_is_that_of_the_results(page, results):
    rows = table(page, "verdicts")
    wanted = [[claim.says, claim.verdict] for study, figures in results.values() for claim in judge(study, figures)]
    assert [row[:2] for row in rows] == wanted


def test_the_table_of_the_outside_scorer_is_that_of_its_results(page):
    """Means over seeds: forwards, bits per byte, entropy within a text, repeated 4-grams."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in json.loads((ROOT / "results/outside-scorer.json").read_text()):
        rows.setdefault((row["variant"], " ".join(map(str, row["decoding"].values()))), []).append(row)
    wanted = []
    for made in rows.values():
        forwards, bits, entropy, repeated = (
            fmean(row.get(name) or 0.0 for row in made)
            for name in ("forwards", "bits_per_byte", "entropy", "repetition")
        )
        shown = f"{forwards:.1f}" if forwards else ""
        wanted.append([shown, f"{bits:.2f}", f"{entropy:.2f}", f"{100 * repeated:.1f} %"])
    quoted = [row[1:] for row in table(page, "scorer")]
    assert sorted(quoted) == sorted(wanted)


def test_the_table_of_rates_has_the_runs_that_rates_were_chosen_by(page, results):
    study, figures = results["claims"]
    wanted = [
        f"{figures[run.name][study.main_figure(run.variant)]['nats_per_token']:.3f}"
        for run in study.runs()
        if "-rate-" in run.variant
    ]
    quoted = [cell for row in table(page, "rates") for cell in row[1:] if cell]
    assert sorted(quoted) == sorted(wanted)


def test_every_run_of_the_studies_is_in_the_results(results):
    for study, figures in results.values():
        assert not [run.name for run in study.runs() if run.name not in figures]


def test_every_seed_of_every_variant_beats_the_unigram_baseline(results):
    study, figures = results["claims"]
    for run in study.runs():
        main = next(figure for figure in figures[run.name].values() if UNIGRAM in figure)
        assert main["nats_per_token"] < main[UNIGRAM] - 0.3, run.name
