"""docs/drafts.md quotes the figures of the studies in `results`, to the digit."""

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from dcdm.reproduction.results import interval

ROOT = Path(__file__).parents[2]
STUDIES = ("128", "512", "wikitext")


def seeds(study: str, variant: str, figure: str) -> dict[int, dict]:
    """The figure of every seed."""
    runs = json.loads((ROOT / f"results/drafts-{study}.json").read_text())["runs"]
    return {
        int(run.rpartition("-s")[2]): figures[figure]
        for run, figures in runs.items()
        if run.rpartition("-s")[0] == variant and figure in figures
    }


def table(study: str) -> list[list[str]]:
    page = (ROOT / "docs/drafts.md").read_text()
    text = re.search(rf"<!-- begin {study} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert text is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text[1].strip().splitlines()[2:]]


@pytest.mark.parametrize("study", STUDIES)
def test_the_page_quotes_the_results(study):
    rows = table(study)
    assert len(rows) >= 8
    for lanes, drafts, forwards, nats, fixed, their_forwards, their_nats, difference in rows:
        ours = seeds(study, "drafted", f"{lanes} lanes, {drafts} drafts")
        theirs = seeds(study, "lanes", f"{fixed} lanes")
        shared = sorted(ours.keys() & theirs.keys())
        assert len(shared) >= 5
        assert forwards == f"{fmean(ours[seed]['forwards'] for seed in shared):.1f}"
        assert nats == f"{fmean(ours[seed]['nats_per_token'] for seed in shared):.3f}"
        assert their_forwards == f"{fmean(theirs[seed]['forwards'] for seed in shared):.0f}"
        assert their_nats == f"{fmean(theirs[seed]['nats_per_token'] for seed in shared):.3f}"
        found = interval([ours[seed]["nats_per_token"] - theirs[seed]["nats_per_token"] for seed in shared])
        assert difference == f"{found.mean:+.3f} ± {found.half:.3f}".replace("-", "−")
        assert float(their_forwards) >= float(forwards)  # whoever has fewer forwards has the harder task


def test_one_lane_is_the_same_at_any_pace():
    for study in STUDIES:
        alone = seeds(study, "drafted", "1 lanes")
        for drafts in (3, 5):
            for seed, figure in seeds(study, "drafted", f"1 lanes, {drafts} drafts").items():
                assert figure["nats_per_token"] == pytest.approx(alone[seed]["nats_per_token"], abs=1e-5)
