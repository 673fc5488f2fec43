"""`dcdm demo` as a user runs it: trains the paper's model and its baselines, compares them, and writes a report."""

import contextlib
import io
import json
import lzma
import random
import re

import pytest
import torch

import dcdm
from browser import CHROMIUM, dumped
from dcdm.cli import main
from dcdm.commands import demo
from dcdm.commands.demo import MODELS, TEXT, chunks_of, forming, replay_of, what_chunks_hold
from dcdm.data.prepare import prepare
from dcdm.kinds import parameter_counts
from dcdm.training.settings import resolve
from dcdm.viewing.chunks import ChunkView, Frame, Held, Token

STEPS = 2


def run(folder, corpus, *more):
    out, errors = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            main(["demo", "--steps", str(STEPS), "--folder", str(folder), "--data", str(corpus), *more])
        except SystemExit as left:
            code = left.code
    return code, out.getvalue(), errors.getvalue()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a corpus of enough words for the demo's tokenizer; what is prepared of it is kept there."""
    folder = tmp_path_factory.mktemp("demo")
    letters = random.Random(0)
    words = ["".join(letters.choices("etaoinshrdlu", k=letters.randint(2, 9))) for _ in range(1500)]
    lines = (" ".join(letters.choices(words, k=30)) for _ in range(400))
    text = "\n".join([TEXT, *lines])
    (folder / "corpus.txt.xz").write_bytes(lzma.compress(text.encode()))  # each line a document
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCDM_CACHE", str(folder / "cache"))
        patch.setattr(demo, "WINDOWS", 4)
        yield folder


@pytest.fixture(scope="module")
def finished(place):
    code, out, errors = run(place / "runs", place / "corpus.txt.xz")
    assert code == 0, errors
    return place / "runs", out, (place / "runs" / "report.html").read_text()


def test_the_three_models_are_trained_alike():
    settings = [resolve(f"{name}-debug", None, {}) for name in MODELS]
    assert all(one.train == settings[0].train for one in settings)
    sizes = [parameter_counts(one.model)[0] for one in settings]
    assert max(sizes) < 1.1 * min(sizes)


def test_the_same_text_is_shown_before_the_first_step_and_while_chunks_form_on_the_page_too(finished, place):
    folder, out, page = finished
    assert len(re.findall(r"^text .*Fellow", out, re.MULTILINE)) == STEPS + 1
    tokenizer = prepare([str(place / "corpus.txt.xz")], demo.TOKENIZER).tokenizer
    views = forming(folder / "dcdm", tokenizer, seed=0)
    assert [step for step, _ in views] == list(range(STEPS + 1))
    assert [page.index(view.coloured) for _, view in views] == sorted(page.index(v.coloured) for _, v in views)
    last = chunks_of(dcdm.load(folder / "dcdm")[0], tokenizer)
    assert views[-1][1].frame.ids == last.frame.ids != views[0][1].frame.ids
    assert not any(last.frame.hidden)


def test_bounds_of_all_three_and_the_surrogate_apart_stand_in_terminal_and_page(finished):
    _, out, page = finished
    for name in MODELS:
        row = re.search(rf"^{name} +(≤ \S+ ±\S+ \(\S+\)) +\S+ +(.*)$", out, re.MULTILINE)
        assert row[1] in page
        assert ("±" in row[2]) == (name == "dcdm")
        assert "≤" not in row[2]


def test_a_replay_has_a_forward_for_each_chunk_with_something_to_fill():
    ids = [1, 3, 3, 2, 3]
    frame = Frame(0.5, ids, [False] * 5, [[0.0] * 4] * 5, [0, 1, 3, 0])
    tokens = [Token(at, letter, free=at > 0) for at, letter in enumerate("^abcd")]
    view = ChunkView("m", "dcdm", "paper", "", "noise", 4, tokens, [frame], 0, [0.0] * 4, Held("", 1, 0, []))
    replay = replay_of(view)
    assert replay["steps"] == [[3], [1, 2, 4]], "BOS alone is in chunk 1, and chunk 4 is empty"
    assert replay["chunks"] == [0, *ids[1:]]


def test_run_again_nothing_is_trained_and_other_settings_are_refused_with_a_way_out(finished, place):
    folder = finished[0]
    before = (folder / "dcdm" / "metrics.jsonl").read_bytes()
    assert run(folder, place / "corpus.txt.xz")[0] == 0
    assert (folder / "dcdm" / "metrics.jsonl").read_bytes() == before
    code, _, errors = run(folder, place / "corpus.txt.xz", "--seed", "1")
    assert code == 2
    assert "another --folder" in errors


def test_interrupted_it_leaves_with_130(place, monkeypatch):
    monkeypatch.setattr("dcdm.training.run.run_training", lambda *given, **more: 130)
    assert run(place / "stopped", place / "corpus.txt.xz")[0] == 130


def test_the_report_needs_nothing_from_outside_and_the_terminal_says_what_comes_next(finished):
    folder, out, page = finished
    assert not re.findall(r"""(?:https?:)?//[\w.]+|\b(?:src|href)\s*=(?!"#)|url\((?!#)|@import""", page)
    assert str(folder / "report.html") in out.replace("\n", "")
    assert len(re.findall(r"^  dcdm \w+", out, re.MULTILINE)) == 4


def test_a_router_that_knows_the_token_only_sends_each_to_one_chunk(finished, place):
    model, _ = dcdm.load(finished[0] / "dcdm")
    first = model.layers[0]
    with torch.no_grad():
        first.self_attn.o_proj.weight.zero_()
        model.chunking.o_proj.weight.zero_()
    held = what_chunks_hold(model, prepare([str(place / "corpus.txt.xz")], demo.TOKENIZER))
    assert held.constant == 1
    assert held.constant_by_chance < 0.9


PRESS = """
<pre id="answers"></pre><script>
const seen = { blanks: [] };
const viewer = byId("viewer");
const slider = viewer.querySelector("input");
for (let number = 0; number <= data.filling.steps.length; number++) {
  slider.value = number;
  slider.dispatchEvent(new Event("input"));
  seen.blanks.push(viewer.querySelectorAll(".token.masked").length);
}
viewer.querySelectorAll(".token")[3].click();
seen.bars = viewer.querySelectorAll(".scores .track").length;
seen.wide = document.documentElement.scrollWidth > innerWidth;
byId("answers").textContent = JSON.stringify(seen);
</script></body>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_shows_fewer_blanks_with_every_forward_and_scores_of_a_token(finished, tmp_path, width):
    (tmp_path / "page.html").write_text(finished[2].replace("</body>", PRESS))
    shown = dumped(tmp_path / "page.html", tmp_path / "profile", f"--window-size={width},900")
    seen = json.loads(re.search(r'<pre id="answers">(.*?)</pre>', shown, re.DOTALL)[1])
    assert seen["blanks"] == sorted({*seen["blanks"]}, reverse=True)
    assert seen["blanks"][-1] == 0
    assert seen["bars"] == 8
    assert not seen["wide"]
