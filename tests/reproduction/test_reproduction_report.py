"""The stored results of CPU scale, and the document that quotes them."""

import re
import time
from pathlib import Path

import pytest

from browser import CHROMIUM, DRIVER, MISSING, chromium
from dcdm.cli import main
from dcdm.reproduction.claims import Claim, Comparison, claims
from dcdm.reproduction.experiments import experiments, specs
from dcdm.reproduction.intervals import Interval
from dcdm.reproduction.plots import plots
from dcdm.reproduction.report import REGION, filled, found, page_of, regions
from dcdm.reproduction.results import VALID, Results, is_current, read_results, write_results
from dcdm.reproduction.scale import cpu
from dcdm.reproduction.tables import chance_together, marks, shown
from dcdm.reproduction.variants import variants
from dcdm.reproduction.verdicts import CONFIRMED, CONTRADICTED, UNDECIDED

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def stored() -> Results:
    return read_results(ROOT / "results", "cpu")


def test_stored_results_are_those_of_the_runs_defined_here(stored: Results) -> None:
    defined = {(one.variant.name, one.seed): one for one in specs(cpu(), ["all"])}
    assert defined.keys() == stored.runs.keys() == stored.machines.keys()
    for key, result in stored.runs.items():
        assert is_current(result, defined[key]), key


def test_stored_files_follow_from_what_they_hold(stored: Results, tmp_path: Path) -> None:
    write_results(tmp_path, stored)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (ROOT / "results" / path.name).read_bytes()


def test_tables_and_plots_of_the_document_are_those_of_the_results(stored: Results) -> None:
    text = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert filled(text, regions(stored)) == text, "run `dcdm reproduce report`"
    for name, plot in plots(stored).items():
        drawing = (ROOT / "docs" / "images" / "reproduction" / f"{name}.svg").read_text(encoding="utf-8")
        assert f"points {plot.digest()}" in drawing, "run `dcdm reproduce report`"


def test_a_report_of_a_mistyped_folder_leaves_all_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "docs" / "reproduction.md"
    document.parent.mkdir()
    document.write_text("<!-- begin kinds -->\n| kept |\n<!-- end -->\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["reproduce", "report", "--results", "result"])
    assert "no finished run at cpu scale" in capsys.readouterr().err
    assert "kept" in document.read_text()
    assert not (tmp_path / "result").exists()


FIGURE = re.compile(r"[+−]?\d+\.\d+ ± \d+\.\d+")
QUOTED = {
    "DCDM − BDLM is {}": ("paper", "bdlm8"),
    "by valid bounds and {} by the paper's own number": ("paper", "bdlm8", ("heldout", "surrogate"), VALID),
    "with half of it for both, it is {}": ("paper-half-rate", "bdlm8-half-rate"),
    "BDLM − MDLM is {}": ("bdlm8", "mdlm"),
    "strided − BDLM is {}": ("strided-full", "bdlm8"),
    "helps strided ones ({})": ("strided-full", "strided"),
    "harms contiguous ones ({})": ("contiguous-full", "contiguous"),
    "shows against BDLM ({})": ("contiguous", "bdlm32"),
    "Surrogate − bound of the same DCDM weights is {}": ("paper", "paper", ("heldout", "surrogate"), VALID),
    "Taking the latter, DCDM − BDLM would be {}": ("paper-half-rate", "bdlm8"),
    "{} between them at 1/16": ("strided-full", "causal-strided-full", ("frontier", "0.0625")),
    "{} at 1/8": ("strided-full", "causal-strided-full", ("frontier", "0.125")),
}
"""Sentences of the document → the difference that each of them quotes."""


def sentences() -> str:
    """The document without what is made from results, on one line."""
    text = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    return " ".join(REGION.sub("", text).split())


def test_figures_in_sentences_are_those_of_the_results(stored: Results) -> None:
    text, quoted = sentences(), set()
    for sentence, difference in QUOTED.items():
        figure = shown(stored.difference(*difference), sign=True)
        assert sentence.format(figure) in text
        quoted.add(figure)
    best = stored.mean("strided-full-k16", VALID)
    assert f"16 best on average ({shown(best)}," in text
    assert set(FIGURE.findall(text)) == {*quoted, shown(best)}, "a figure that no test ties to the results"
    means = [stored.mean(name, VALID) for name in variants(cpu()) if name != "ar"]
    assert best is not None
    assert best.mean == min(mean.mean for mean in means if mean is not None)


def test_counts_in_sentences_are_those_of_the_results(stored: Results) -> None:
    text, stuck = sentences(), stored.at_frequencies()
    scored = [run for run in stored.runs if stored.figure(*run, VALID) is not None]
    assert f"All {len(stored.runs)} runs" in text
    assert f"{len(stuck)} of the {len(scored)} runs that were not fine-tuned" in text
    assert sum(name == "mdlm" for name, _ in stuck) == 3
    assert len(stored.seeds("mdlm")) == 6
    assert f"on {cpu().heldout_windows} windows" in text
    assert f"on {cpu().frontier_windows} of the test windows" in text
    assert f"on {cpu().zeroshot_windows} windows of each text" in text


def test_the_document_names_every_experiment() -> None:
    text = sentences()
    assert all(f"| `{name}` |" in text for name in experiments(cpu()))


def test_the_first_sentences_follow_from_the_verdicts(stored: Results) -> None:
    """The document begins with what was found; other results would need another beginning."""
    order = claims(stored)[0]
    assert [part.verdict for part in order.parts] == [CONTRADICTED, CONFIRMED, UNDECIDED]
    assert not any(claim.verdict == CONFIRMED for claim in claims(stored))


@pytest.fixture(scope="module")
def page(stored: Results) -> str:
    return page_of(stored)


def test_the_page_begins_with_verdicts_counted_and_drawn(stored: Results, page: str) -> None:
    first = page.index("<section")
    summary = page[first : page.index("</section>", first)]
    every = claims(stored)
    for verdict in (CONFIRMED, CONTRADICTED, UNDECIDED):
        count = sum(claim.verdict == verdict for claim in every)
        assert f'<span class="verdict {verdict}">{count} {verdict}</span>' in summary
        assert summary.count(f'<svg class="{verdict}"') == count
        assert summary.count(f">{verdict}</span></div>") == count


def test_intervals_are_drawn_on_the_side_of_zero_where_they_lie(stored: Results) -> None:
    drawn = re.findall(r'<svg class="(\w+)".*?class="interval" x1="([\d.]+)" x2="([\d.]+)"', found(claims(stored)))
    assert len(drawn) == len(claims(stored))
    for verdict, left, right in drawn:
        assert 0 <= float(left) < float(right) <= 200
        holds_zero = float(left) <= 100 <= float(right)
        assert {CONFIRMED: float(right) < 100, CONTRADICTED: float(left) > 100, UNDECIDED: holds_zero}[verdict]


@pytest.mark.parametrize("half", [0.0, None])
def test_a_difference_of_exactly_zero_is_drawn_in_the_middle(half: float | None) -> None:
    part = Comparison("the same twice", Interval(0.0, half, 3), UNDECIDED)
    drawn = found([Claim("same", "one equals the other", "kinds", (part,))])
    assert 'class="mean" x1="100.0" x2="100.0"' in drawn


def test_every_verdict_in_a_table_has_its_colour(page: str) -> None:
    tables = "".join(re.findall(r"(?s)<table>.*?</table>", page))
    plain = re.findall(rf"<td[^>]*>(?:{CONFIRMED}|{CONTRADICTED}|{UNDECIDED})</td>", tables)
    assert not plain
    assert tables.count('<span class="verdict contradicted">contradicted</span>') > 7


LOOK = """
const boxes = [...document.querySelectorAll(".scroll")];
const told = boxes.filter((box) => !box.previousElementSibling.hidden && box.tabIndex === 0);
return {
  wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  right: boxes.every((box) => box.scrollWidth - box.clientWidth > 1 === told.includes(box)),
  told: told.length, of: boxes.length,
};
"""


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING)
@pytest.mark.parametrize("width", [390, 1200])
def test_tables_that_do_not_fit_say_that_they_scroll_and_the_page_does_not(
    page: str, tmp_path: Path, width: int
) -> None:
    pytest.importorskip("selenium")
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    with chromium(tmp_path / "profile") as driver:
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get((tmp_path / "page.html").as_uri())
        time.sleep(0.5)
        seen = driver.execute_script(LOOK)
    assert seen["wider"] == 0
    assert seen["right"]
    assert seen["told"] > seen["of"] / 2 if width == 390 else seen["told"] < seen["of"] / 2


def test_two_tokens_share_a_chunk_by_chance_as_sizes_say() -> None:
    assert chance_together([[1, 1], [2, 0], [0, 0]]) == pytest.approx(0.5)
    assert chance_together([[1]] * 8) == pytest.approx(1 / 8)


def test_marks_of_chunks_survive_markdown() -> None:
    assert marks({"marks": [[["<unk>", 0.5]], [["`", 0.5]]]}) == "1: `<unk>` 50%, 2: `` ` `` 50%"
