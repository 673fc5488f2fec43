"""`dcdm demo` as a user runs it: trains, resumes, compares, and writes a report that needs nothing else."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

import dcdm
from browser import CHROMIUM, chromium, dumped
from dcdm.cli import main
from dcdm.commands.demo import SAMPLES, SNIPPET, held_out, recipes
from dcdm.model.transformer import parameter_counts
from dcdm.presets import preset
from dcdm.training.settings import resolve
from dcdm.viewing.demo_report import ComparedEstimate, with_error
from dcdm.viewing.plots import Curve, averaged, line_plot

STEPS = 5
TEXT = "".join(f"def f{n}(x):\n    return x + {n * n}\n\n" for n in range(120))


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(run):
    return [row["step"] for row in metrics(run) if "nll" in row]


def demo(folder, corpus, *more):
    try:
        main(["demo", "--steps", str(STEPS), "--folder", str(folder), "--data", str(corpus), *more])
    except SystemExit as left:
        return left.code
    return 0


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a corpus; what is prepared of it is kept there."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "corpus.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCDM_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def finished(place):
    """The folder after an interrupted demo that was started again, and what the two starts said."""
    folder, corpus = place / "runs", place / "corpus.txt"
    command = [sys.executable, "-m", "dcdm", "demo", "--steps", str(STEPS), "--folder", str(folder)]
    process = subprocess.Popen(
        [*command, "--data", str(corpus)], env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    first = folder / "dcdm" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (first.exists() and first.read_text().count("\n")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    done = subprocess.run([*command, "--data", str(corpus)], capture_output=True, text=True, env=os.environ)
    return folder, process.returncode, done


def test_an_interrupted_demo_saves_leaves_with_130_and_resumes(finished):
    folder, code, done = finished
    assert code == 130
    assert done.returncode == 0, done.stderr
    assert "resuming from step" in done.stderr
    for name in ("dcdm", "bdlm"):
        assert steps_of(folder / name) == list(range(1, STEPS + 1))


def test_the_figures_are_those_of_score_in_terminal_json_and_report(finished, place, capsys):
    folder, _, done = finished
    assert demo(folder, place / "corpus.txt", "--json") == 0
    found = json.loads(capsys.readouterr().out)["figures"]
    page = (folder / "report.html").read_text()
    for line, estimator in zip(found, ("bound", "trajectory"), strict=True):
        scores = {}
        for name in ("dcdm", "bdlm"):
            model, tokenizer = dcdm.load(folder / name)
            windows = held_out((str(place / "corpus.txt"),), tokenizer, model.config.context_length)
            scores[name] = dcdm.score(model, windows, estimator, samples=SAMPLES, seed=0, commit="chunk")
            assert line[name][0] == pytest.approx(scores[name].per_token, abs=1e-9)
            shown = with_error(tuple(line[name]))
            assert shown in page
            assert shown in done.stdout
        gap = scores["dcdm"].per_token - scores["bdlm"].per_token
        assert line["difference"][0] == pytest.approx(gap, abs=1e-9)
        if estimator == "trajectory":
            assert scores["dcdm"].forwards.tolist() == scores["bdlm"].forwards.tolist()


def test_a_finished_demo_is_not_trained_again_until_a_fresh_start(finished, place):
    folder = place / "again"
    shutil.copytree(finished[0], folder)
    (folder / "dcdm" / "mark").touch()
    before = (folder / "dcdm" / "metrics.jsonl").read_bytes()
    assert demo(folder, place / "corpus.txt") == 0
    assert (folder / "dcdm" / "mark").exists()
    assert (folder / "dcdm" / "metrics.jsonl").read_bytes() == before
    assert demo(folder, place / "corpus.txt", "--seed", "1") == 2
    assert demo(folder, place / "corpus.txt", "--seed", "1", "--fresh") == 0
    assert not (folder / "dcdm" / "mark").exists()


def test_both_models_have_as_many_parameters_and_as_many_chunks():
    configs = [resolve(recipe.preset, None, recipe.changes).model for recipe in recipes()]
    assert parameter_counts(configs[0]) == parameter_counts(configs[1])
    length = preset("dcdm-debug-causal").context_length
    assert configs[0].num_groups(length - 1) == configs[1].num_groups(length - 1)


def test_the_report_needs_nothing_from_outside_and_the_terminal_says_what_comes_next(finished):
    folder, _, done = finished
    page = (folder / "report.html").read_text()
    assert not re.findall(r"""(?:https?:)?//[\w.]+|\b(?:src|href)\s*=(?!"#)|url\((?!#)|@import""", page)
    assert ">DCDM</text>" in page
    assert ">BDLM</text>" in page
    assert len(re.findall(r"By the (?:bound|exact, 8 forwards) figure", page)) == 2  # neither is left out
    assert f"{folder / 'report.html'}" in done.stdout.replace("\n", "")
    assert "class Point" in done.stdout
    assert "░" in done.stdout
    assert len(re.findall(r"^  dcdm \w+ ", done.stdout, re.MULTILINE)) == 3


PRESS = """
<pre id="answers"></pre><script>
const seen = {};
for (const name of Object.keys(data.fillings)) {
  const slider = byId(name).querySelector("input");
  seen[name] = data.fillings[name].steps.map((_, number) => {
    slider.value = number;
    slider.dispatchEvent(new Event("input"));
    return byId(name).querySelectorAll(".token.masked").length;
  });
  const button = byId(name).querySelector(".play");
  button.click();
  seen[name].push(button.title);
}
seen.wide = document.documentElement.scrollWidth > innerWidth;
byId("answers").textContent = JSON.stringify(seen);
</script></body>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_browser_shows_fewer_blanks_with_every_forward(finished, tmp_path):
    page = (finished[0] / "report.html").read_text().replace("</body>", PRESS)
    (tmp_path / "page.html").write_text(page)
    shown = dumped(tmp_path / "page.html", tmp_path / "profile")
    seen = json.loads(re.search(r'<pre id="answers">(.*?)</pre>', shown, re.DOTALL)[1])
    for name in ("infilling", "completion"):
        *blanks, button = seen[name]
        assert blanks == sorted(set(blanks), reverse=True)
        assert "Pause" in button
    assert seen["infilling"][0] == sum(map(len, ("self, x, y", "self.y", "def move")))
    assert not seen["wide"]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize("still", [False, True])
def test_the_page_opens_playing_unless_motion_is_not_wanted(finished, tmp_path, still):
    pytest.importorskip("selenium")
    with chromium(tmp_path / "profile") as driver:
        motion = {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [motion]})
        driver.get((finished[0] / "report.html").as_uri())
        time.sleep(1)
        script = "const b = document.getElementById('infilling'); return [b.querySelector('.play').title, "
        button, masked, top = driver.execute_script(
            script + "b.querySelectorAll('.masked').length, b.getBoundingClientRect().top < innerHeight]"
        )
    assert top, "the first thing that one sees"
    assert (button, masked > 0) == (("Play", False) if still else ("Pause", True))


def test_the_sentence_follows_the_sign_and_claims_nothing_within_the_error():
    def line(mean, error, exact=True):
        return ComparedEstimate("exact", "", (1.0, 0.1), (1.0 - mean, 0.1), (mean, error), 8, exact)

    assert "the DCDM does better" in line(-0.5, 0.01).verdict
    assert "1.65 times" in line(-0.5, 0.01).verdict
    assert "the BDLM does better" in line(0.5, 0.01).verdict
    assert "probable" not in line(-0.5, 0.01, exact=False).verdict
    assert "do not differ" in line(0.5, 0.4).verdict
    assert with_error((-0.1234, 0.01), sign=True) == "−0.123 ± 0.010"


def test_a_plot_averages_stretches_and_stands_alone_however_short_the_run():
    assert averaged([1.0, 3.0, 5.0, 7.0], points=2) == [(1.5, 2.0), (3.5, 6.0)]
    for values in ([2.0], [2.0, 2.0], [5.0, 1.0, 3.0] * 50):
        assert line_plot([Curve("a<b", values)], "step", "nats").count("a&lt;b") == 2
    assert line_plot([Curve("empty", [])], "step", "nats") == ""


def test_the_blanked_snippet_fits_into_the_window():
    assert len(SNIPPET.encode()) < preset("dcdm-debug-causal").context_length
