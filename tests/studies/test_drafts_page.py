"""docs/drafts.md quotes the figures of the studies in `results`, to the digit."""

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from dcdm.studies.results import interval

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


def test_one_lane_is_the_same_with_and_without_drafts():
    for study in STUDIES:
        alone = seeds(study, "drafted", "1 lanes")
        for drafts in (3, 5):
            for seed, figure in seeds(study, "drafted", f"1 lanes, {drafts} drafts").items():
                assert figure["nats_per_token"] == pytest.approx(alone[seed]["nats_per_token"], abs=1e-5)


def compared(study: str, lanes: int, drafts: int, fixed: int) -> str:
    """The sentence that README and page say of a comparison."""
    ours, theirs = (
        seeds(study, "drafted", f"{lanes} lanes, {drafts} drafts"),
        seeds(study, "lanes", f"{fixed} lanes"),
    )
    nats = [fmean(figure["nats_per_token"] for figure in part.values()) for part in (ours, theirs)]
    forwards = [fmean(figure["forwards"] for figure in part.values()) for part in (ours, theirs)]
    found = interval([ours[seed]["nats_per_token"] - theirs[seed]["nats_per_token"] for seed in sorted(ours)])
    unit, window = ("token", "") if study == "wikitext" else ("byte", f" for a window of {study}")
    return (
        f"{lanes} lanes with {drafts} drafts cost {nats[0]:.3f} nats per {unit} in {forwards[0]:.1f} "
        f"forwards{window}, {fixed} fixed lanes {nats[1]:.3f} in {forwards[1]:.0f} "
        f"(−{-found.mean:.3f} ± {found.half:.3f})"
    )


@pytest.mark.parametrize("page", ["README.md", "docs/drafts.md"])
def test_the_main_figures_are_quoted(page):
    text = " ".join((ROOT / page).read_text().split())
    assert compared("128", 4, 5, 8) in text
    assert compared("wikitext", 8, 5, 12) in text
    alone = seeds("128", "drafted", "1 lanes, 5 drafts")
    assert f"{fmean(figure['forwards'] for figure in alone.values()):.1f} forwards instead of 127" in text


def test_strided_chunks_are_quoted():
    nats = [f"{figure['nats_per_token']:.3f}" for figure in seeds("128", "strided", "chunk").values()]
    assert f"need {' and '.join(nats)} nats per byte in 16 forwards" in (ROOT / "docs/drafts.md").read_text()
