"""Documents quote the figures of `results`, to the digit."""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from dcdm.studies.measuring import UNIGRAM
from dcdm.studies.results import Interval, compare, interval, judge
from dcdm.studies.runner import stored_figures
from dcdm.studies.study import read_study

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def runs(study: str) -> dict[str, dict[str, Any]]:
    return json.loads((ROOT / f"results/{study}.json").read_text())["runs"]


def nats(study: str, variant: str, figure: str = "valid") -> dict[int, float]:
    """Seed → nats per token, of the runs of a variant that have the figure."""
    return {seed: one["nats_per_token"] for seed, one in seeds(study, variant, figure).items()}


def seeds(study: str, variant: str, figure: str) -> dict[int, dict[str, Any]]:
    return {
        int(run.rpartition("-s")[2]): figures[figure]
        for run, figures in runs(study).items()
        if run.rpartition("-s")[0] == variant and figure in figures
    }


def cells(text: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    return [
        [cell.strip(" *") for cell in line.strip().strip("|").split("|")] for line in text.strip().splitlines()[2:]
    ]


def table(document: str, name: str) -> list[list[str]]:
    """The cells of a marked table."""
    found = re.search(rf"<!-- begin {name} -->\n(.*?)\n<!-- end -->", page(document), re.DOTALL)
    assert found is not None
    return cells(found[1])


def signed(value: Interval) -> str:
    return value.shown("+").replace("-", "−")


# --- docs/reproduction.md -----------------------------------------------------------------------------------------

CLAIMS = "docs/reproduction.md"


@pytest.fixture(scope="module")
def results():
    studies = {name: read_study(ROOT / f"studies/{name}.yaml") for name in ("claims", "surrogate")}
    return {name: (one, stored_figures(one, ROOT / f"results/{name}.json")) for name, one in studies.items()}


def test_every_interval_of_the_claims_is_one_of_the_results(results):
    known: set[str] = set()
    empty = read_study(ROOT / "studies/empty-page.yaml")
    for study, figures in (*results.values(), (empty, stored_figures(empty, ROOT / "results/empty-page.json"))):
        rows = compare(study, figures)
        known |= {row.mean.shown() for row in rows}
        differences = [row.difference for row in rows]
        differences += [part.difference for claim in judge(study, figures) for part in claim.parts]
        known |= {signed(one) for one in differences if one is not None}
    quoted = re.findall(r"[+−]?\d+\.\d{3} ± \d\.\d{3}", page(CLAIMS))
    assert len(quoted) > 10
    assert not [one for one in quoted if one not in known]


def test_the_table_of_verdicts_is_that_of_the_results(results):
    wanted = [[claim.says, claim.verdict] for study, figures in results.values() for claim in judge(study, figures)]
    assert [row[:2] for row in table(CLAIMS, "verdicts")] == wanted


def test_the_table_of_the_external_language_model_is_that_of_its_results():
    """Means over seeds: forwards, bits per byte, entropy within a text, repeated 4-grams."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in json.loads((ROOT / "results/outside-scorer.json").read_text()):
        rows[row["variant"], " ".join(map(str, row["decoding"].values()))].append(row)
    wanted = []
    for made in rows.values():
        forwards, bits, entropy, repeated = (
            fmean(row.get(name) or 0.0 for row in made)
            for name in ("forwards", "bits_per_byte", "entropy", "repetition")
        )
        shown = f"{forwards:.1f}" if forwards else ""
        wanted.append([shown, f"{bits:.2f}", f"{entropy:.2f}", f"{100 * repeated:.1f} %"])
    assert sorted(row[1:] for row in table(CLAIMS, "scorer")) == sorted(wanted)


def test_the_table_of_rates_has_the_runs_that_rates_were_chosen_by(results):
    study, figures = results["claims"]
    wanted = [
        f"{figures[run.name][study.main_figure(run.variant)]['nats_per_token']:.3f}"
        for run in study.runs()
        if "-rate-" in run.variant
    ]
    assert sorted(cell for row in table(CLAIMS, "rates") for cell in row[1:] if cell) == sorted(wanted)


def test_every_run_of_the_claims_is_there_and_beats_the_unigram_baseline(results):
    for study, figures in results.values():
        assert not [run.name for run in study.runs() if run.name not in figures]
    for name, figures in results["claims"][1].items():
        main = next(figure for figure in figures.values() if UNIGRAM in figure)
        assert main["nats_per_token"] < main[UNIGRAM] - 0.3, name


# --- docs/drafts.md -----------------------------------------------------------------------------------------------

DRAFTS = "docs/drafts.md"


def drafted_and_fixed(study: str, lanes: Any, drafts: Any, fixed: Any) -> tuple[list[float], list[float], Interval]:
    """Mean forwards, mean nats, and the difference in nats, of lanes with drafts and of fixed lanes."""
    name = f"drafts-{study}"
    pair = [seeds(name, "drafted", f"{lanes} lanes, {drafts} drafts"), seeds(name, "lanes", f"{fixed} lanes")]
    shared = sorted(pair[0].keys() & pair[1].keys())
    assert len(shared) >= 5
    forwards, cost = (
        [fmean(side[seed][key] for seed in shared) for side in pair] for key in ("forwards", "nats_per_token")
    )
    found = interval([pair[0][seed]["nats_per_token"] - pair[1][seed]["nats_per_token"] for seed in shared])
    assert found is not None
    return forwards, cost, found


@pytest.mark.parametrize("study", ["128", "512", "wikitext"])
def test_the_tables_of_drafts_quote_the_results(study):
    rows = table(DRAFTS, study)
    assert len(rows) >= 8
    for lanes, drafts, *quoted in rows:
        forwards, cost, found = drafted_and_fixed(study, lanes, drafts, fixed := quoted[2])
        wanted = [f"{forwards[0]:.1f}", f"{cost[0]:.3f}", fixed, f"{forwards[1]:.0f}", f"{cost[1]:.3f}"]
        assert quoted == [*wanted, signed(found)]
        assert float(f"{forwards[1]:.0f}") >= float(f"{forwards[0]:.1f}")  # fewer forwards are the harder task


@pytest.mark.parametrize("study", ["128", "512", "wikitext"])
def test_one_lane_costs_the_same_with_and_without_drafts(study):
    alone = nats(f"drafts-{study}", "drafted", "1 lanes")
    for drafts in (3, 5):
        for seed, value in nats(f"drafts-{study}", "drafted", f"1 lanes, {drafts} drafts").items():
            assert value == pytest.approx(alone[seed], abs=1e-5)


def drafts_in_words(study: str, lanes: int, drafts: int, fixed: int) -> str:
    """The sentence that the page says of a comparison."""
    forwards, cost, found = drafted_and_fixed(study, lanes, drafts, fixed)
    unit, window = ("token", "") if study == "wikitext" else ("byte", f" for a window of {study}")
    return (
        f"{lanes} lanes with {drafts} drafts cost {cost[0]:.3f} nats per {unit} in {forwards[0]:.1f} "
        f"forward passes{window}, {fixed} fixed lanes {cost[1]:.3f} in {forwards[1]:.0f} ({signed(found)})"
    )


def test_the_main_figures_of_drafts_are_quoted():
    text, readme = (" ".join(page(document).split()) for document in (DRAFTS, "README.md"))
    assert drafts_in_words("128", 4, 5, 8) in text
    assert drafts_in_words("wikitext", 8, 5, 12) in text
    alone = seeds("drafts-128", "drafted", "1 lanes, 5 drafts").values()
    passes = f"{fmean(figure['forwards'] for figure in alone):.1f} forward passes instead of 127"
    assert passes in text
    assert passes in readme


# --- docs/lanes.md ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [128, 512])
def test_the_tables_of_lanes_quote_the_results_and_what_they_are_over_ar(length):
    found = defaultdict(list)
    for run, figures in runs(f"lanes-{length}").items():
        for name, figure in figures.items():
            found[run.rpartition("-s")[0], name].append(figure["nats_per_token"])
    ar, digits = fmean(found["ar", "valid"]), {f"{fmean(values):.3f}": fmean(values) for values in found.values()}
    text = page("docs/lanes.md")
    first, *rows = cells(text[text.index(f"| windows of {length}") :].split("\n\n")[0])
    assert first[2:4] == [f"{ar:.3f}", ""]
    for _, _, shown, over, _ in rows:
        quoted, shares = re.findall(r"\d\.\d{3}", shown), re.findall(r"(\d+) %", over)
        assert quoted
        assert [round(100 * (digits[number] / ar - 1)) for number in quoted] == [int(share) for share in shares]


# --- docs/decoding.md, docs/training.md ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "begins", "studies", "least"),
    [
        ("docs/decoding.md", "| | forward passes | `steps:N`", ["ten-minutes"], 12),
        ("docs/training.md", "| preset | steps | valid figure", ["ten-minutes"], 15),
        ("docs/training.md", "| held-out nats per byte | MDLM", ["learn-recipes"], 17),
        ("docs/training.md", "| | steps | AdamW, 0.001", ["learn-rates", "learn-recipes"], 19),
    ],
)
def test_every_figure_of_a_table_is_one_of_the_results(document, begins, studies, least):
    """Of one seed, or the mean over seeds with its interval."""
    found = defaultdict(list)
    for study in studies:
        for run, figures in runs(study).items():
            for name, figure in figures.items():
                found[study, run.rpartition("-s")[0], name].append(figure["nats_per_token"])
    known = {interval(values).shown() for values in found.values()}
    text = page(document)
    rows = cells(text[text.index(begins) :].split("\n\n")[0])
    quoted = re.findall(r"\d\.\d{3}(?: ± \d\.\d{3})?", str(rows))
    assert len(quoted) >= least
    assert not [one for one in quoted if one not in known]


# --- docs/pretrained.md -------------------------------------------------------------------------------------------

ADAPTED = {
    "imported, untrained": "smol-base", "AR, 410 steps": "smol-ar-30", "lanes, 410 steps": "smol-lanes-30",
    "AR, LoRA, 410 steps": "smol-arlora-30", "lanes, LoRA, 410 steps": "smol-lora-30",
    "AR, 1,500 steps": "smol-ar-120", "lanes, 1,500 steps": "smol-lanes-120",
    "lanes, LoRA, 1,500 steps": "smol-lora-120",
}  # fmt: skip
AR_OF = {"smol-lanes-30": "smol-ar-30", "smol-lora-30": "smol-arlora-30", "smol-lanes-120": "smol-ar-120"}
PARTITIONS = {
    "lanes, 4": "smol-lanes-30, 4 lanes", "lanes, 8": "smol-lanes-30, 8 lanes",
    "blocks of 4, one forward pass each": "smol-bdlm-30",
    "blocks of 4, two forward passes each": "smol-bdlm-30, steps:2",
    "blocks of 4, one token per forward pass": "smol-bdlm-30, position",
    "8 causal chunks, one forward pass each": "smol-causal-30",
    "8 causal chunks, 4 forward passes each": "smol-causal-30, steps:4",
    "8 causal chunks, 8 forward passes each": "smol-causal-30, steps:8",
}  # fmt: skip


def adapted(corpus: str) -> list[dict[str, str]]:
    with open(ROOT / "results/adapting.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["corpus"] == corpus]
    assert {(row["windows"], row["window_length"]) for row in rows} == {("32", "256")}
    return rows


@pytest.mark.parametrize("corpus", ["wikitext-2", "state-of-the-union"])
def test_adapted_models_quote_their_figures_and_what_they_are_over_ar(corpus):
    known = {row["model"]: float(row["nats_per_token"]) for row in adapted(corpus) if row["estimator"] == "exact"}

    def wanted(model: str) -> list[str]:
        """Nats in 1, 2, 4, 8 lanes, and what they are over AR that was trained alike."""
        if model in known:
            return [f"{known[model]:.3f}", "", "", ""]
        values = [known[f"{model}, {lanes} lane{'s' * (lanes > 1)}"] for lanes in (1, 2, 4, 8)]
        ar = known.get(AR_OF.get(model, ""))
        over = ["" if ar is None else f" ({100 * (value / ar - 1):+.1f} %)".replace("-", "−") for value in values]
        return [f"{value:.3f}{more}" for value, more in zip(values, over, strict=True)]

    assert table("docs/pretrained.md", corpus) == [[name, *wanted(model)] for name, model in ADAPTED.items()]


def test_adapted_partitions_quote_their_forwards_and_nats():
    quoted = {}
    for row in adapted("wikitext-2"):
        lanes = re.search(r"(\d) lanes", row["model"])
        if row["estimator"] == ("exact" if lanes else "trajectory"):
            spent = -(-255 // int(lanes[1])) if lanes else float(row["forwards"]) / int(row["windows"])
            quoted[row["model"]] = [f"{spent:.0f}", f"{float(row['nats_per_token']):.3f}"]
    assert table("docs/pretrained.md", "partitions") == [[name, *quoted[one]] for name, one in PARTITIONS.items()]
