"""`dcdm demo` as a user runs it: shows the shipped models, trains, resumes, compares, and writes a report."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

import dcdm
from browser import CHROMIUM, Page, artefacts, chromium, dumped
from dcdm.cli import main
from dcdm.commands.demo import FIGURES, MODELS, ComparedEstimate, compare, held_out, with_error, write
from dcdm.decoding.engine import with_blanks
from dcdm.kinds import parameter_counts
from dcdm.shipped import CHUNKS, LANES
from dcdm.training.settings import resolve
from dcdm.viewing.filling import exercises_for

STEPS = 5
CORPUS = "".join(f"def f{n}(x):\n    return x + {n * n}\n\n" for n in range(120))


def exercises():
    model, tokenizer = dcdm.load(LANES)
    return exercises_for(tokenizer, model.config.context_length)


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
    (folder / "corpus.txt").write_text(CORPUS)
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
    first = folder / "lanes" / "metrics.jsonl"
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
    for name in ("lanes", "bdlm"):
        assert steps_of(folder / name) == list(range(1, STEPS + 1))


def test_the_figures_are_those_of_score_in_terminal_and_report_and_nothing_is_trained_again(finished, place):
    folder, _, done = finished
    before = (folder / "lanes" / "metrics.jsonl").read_bytes()
    assert demo(folder, place / "corpus.txt") == 0
    assert (folder / "lanes" / "metrics.jsonl").read_bytes() == before
    page = (folder / "report.html").read_text()
    models = {name: dcdm.load(folder / name) for name in ("lanes", "bdlm")}
    tokenizer, length = models["lanes"][1], models["lanes"][0].config.context_length
    windows = held_out((str(place / "corpus.txt"),), tokenizer, length)
    found = compare(models["lanes"][0], models["bdlm"][0], windows)
    for line, (name, _, lanes, commit) in zip(found, FIGURES, strict=True):
        ours = dcdm.score(models["lanes"][0], windows, "trajectory", lanes=lanes)
        theirs = dcdm.score(models["bdlm"][0], windows, "trajectory", commit=commit)
        assert ours.forwards.tolist() == theirs.forwards.tolist()
        assert f"{int(ours.forwards.max())} passes" in name
        for model, score in {"lanes": ours, "bdlm": theirs}.items():
            assert getattr(line, model)[0] == pytest.approx(score.per_token, abs=1e-5)
            shown = with_error(getattr(line, model))
            assert shown in page
            assert shown in done.stdout
        assert line.difference[0] == pytest.approx(ours.per_token - theirs.per_token, abs=1e-5)


@pytest.mark.slow
def test_other_settings_are_refused_and_another_folder_is_named(finished, place, capsys):
    assert demo(finished[0], place / "corpus.txt", "--seed", "1") == 2
    assert "another --folder" in capsys.readouterr().err


def test_both_models_have_as_many_parameters_and_the_same_training():
    settings = [resolve(preset, None, {}) for preset, _ in MODELS.values()]
    assert parameter_counts(settings[0].model) == parameter_counts(settings[1].model)
    assert settings[0].train == settings[1].train


def test_the_report_needs_nothing_from_outside_and_the_terminal_says_what_comes_next(finished):
    folder, _, done = finished
    page = (folder / "report.html").read_text()
    assert not re.findall(r"""(?:https?:)?//[\w.]+|\b(?:src|href)\s*=(?!"#)|url\((?!#)|@import""", page)
    assert ">Lanes</text>" in page
    assert ">BDLM</text>" in page
    assert len(re.findall(r"By the exact, \d+ passes figure", page)) == 2  # neither is left out
    assert f"{folder / 'report.html'}" in done.stdout.replace("\n", "")
    assert "dcdm serve opens the playground" in done.stdout
    assert len(re.findall(r"^  dcdm \w+", done.stdout, re.MULTILINE)) == 3


def test_shipped_models_come_first_in_lanes_beside_ars_order_and_then_chunks(finished):
    out = finished[2].stdout
    shown = [out.index(words) for words in (
        f"{LANES}: ", *(exercise.about for exercise in exercises()), f"{CHUNKS}: ", "Now two models",
        "nats per byte, ", "report.html",
    )]  # fmt: skip
    assert shown == sorted(shown)
    for words in ("lanes: forward", "AR’s order (1 lane): forward", "exact −log p"):
        assert out.count(words) >= len(exercises())


@pytest.mark.slow
def test_without_training_the_first_screen_is_all(place, tmp_path, capsys):
    assert demo(tmp_path / "quick", place / "corpus.txt", "--no-train") == 0
    assert not (tmp_path / "quick").exists()
    assert "Now two models" not in capsys.readouterr().out


@pytest.mark.parametrize("number", [0, 1])
def test_both_orders_fill_the_same_blanks_and_the_likelihood_is_that_of_the_original(number):
    model, tokenizer = dcdm.load(LANES)
    exercise = exercises()[number]
    lanes, ar = write(model, tokenizer, exercise)
    ids, blank = exercise.original(tokenizer)
    assert with_blanks(tokenizer, exercise.prompt(tokenizer)) == [
        tokenizer.mask_id if hole else token for token, hole in zip(ids, blank, strict=True)
    ]
    holes = sum(blank)
    assert ar.forwards == holes == sum(map(len, ar.filling.steps)) == sum(map(len, lanes.filling.steps))
    assert lanes.forwards == -(-holes // max(lanes.filling.lanes))
    tokens = torch.tensor([[tokenizer.bos_id, *ids]])
    for text in (lanes, ar):
        assert [group > 0 for group in text.filling.groups] == [False, *blank]
        given = ~torch.tensor([[False, *blank]])
        by_decoder = dcdm.score(model, tokens, "trajectory", prompt=given, lanes=max(text.filling.lanes))
        assert text.nats == pytest.approx(float(by_decoder.nats) / holes, rel=1e-4)
    assert len(ids) < model.config.context_length


PRESS = """
<pre id="answers"></pre><script>
const seen = {};
for (const [name, fillings] of Object.entries(data.fillings)) {
  const slider = byId(name).querySelector("input");
  const last = Math.max(...fillings.map((each) => each.steps.length));
  const boxes = [...byId(name).querySelectorAll(".filling")];
  seen[name] = boxes.map(() => []);
  for (let number = 0; number <= last; number++) {
    slider.value = number;
    slider.dispatchEvent(new Event("input"));
    boxes.forEach((box, at) => seen[name][at].push(box.querySelectorAll(".token.masked").length));
  }
  boxes[boxes.length - 1].querySelectorAll(".token")[3].click();
  if (name === "viewer") seen.bars = byId(name).querySelectorAll(".scores .track").length;
  const button = byId(name).querySelector(".play");
  button.click();
  seen[name].push(button.title);
}
seen.wide = document.documentElement.scrollWidth > innerWidth;
byId("answers").textContent = JSON.stringify(seen);
</script></body>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_browser_shows_fewer_blanks_with_every_forward_of_both_orders(finished, tmp_path):
    page = (finished[0] / "report.html").read_text().replace("</body>", PRESS)
    (tmp_path / "page.html").write_text(page)
    shown = dumped(tmp_path / "page.html", tmp_path / "profile")
    seen = json.loads(re.search(r'<pre id="answers">(.*?)</pre>', shown, re.DOTALL)[1])
    for name in ("viewer", "written-1", "written-2"):
        *texts, button = seen[name]
        assert len(texts) == 2
        assert "Pause" in button
        for blanks in texts:
            left = [count for count in blanks if count]
            assert left == sorted(set(left), reverse=True)
            assert blanks[-1] == 0
    for blanks in seen["written-1"][:2]:
        assert blanks[0] == sum(exercises()[0].original(dcdm.load()[1])[1])
    assert seen["bars"] == dcdm.load(CHUNKS)[0].config.num_chunks
    assert not seen["wide"]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize("still", [False, True])
def test_the_page_opens_playing_unless_motion_is_not_wanted(finished, tmp_path, still):
    with chromium(tmp_path / "profile") as driver:
        page = Page(driver, artefacts(tmp_path / "pictures"))
        media = {"prefers-reduced-motion": "reduce" if still else "no-preference", "prefers-color-scheme": "dark"}
        page.cdp("Emulation.setEmulatedMedia", features=[{"name": n, "value": v} for n, v in media.items()])
        if still:
            page.size(390, 844)
        driver.get((finished[0] / "report.html").as_uri())
        time.sleep(1)
        script = "const b = document.getElementById('viewer'); return [b.querySelector('.play').title, "
        button, masked, top = driver.execute_script(
            script + "b.querySelectorAll('.masked').length, b.getBoundingClientRect().top < innerHeight]"
        )
        assert page.overflow() == 0
        assert page.complaints() == []
        page.shot(f"demo-{'narrow' if still else 'wide'}-dark")
    assert top, "the first thing that one sees"
    assert (button, masked > 0) == (("Play", False) if still else ("Pause", True))


def test_the_sentence_follows_the_sign_and_claims_nothing_within_the_error():
    def line(mean, error):
        return ComparedEstimate("exact", "", (1.0, 0.1), (1.0 - mean, 0.1), (mean, error), 8)

    assert "lanes do better" in line(-0.5, 0.01).verdict
    assert "1.65 times" in line(-0.5, 0.01).verdict
    assert "BDLM does better" in line(0.5, 0.01).verdict
    assert "do not differ" in line(0.5, 0.4).verdict
    assert with_error((-0.1234, 0.01), sign=True) == "−0.123 ± 0.010"
