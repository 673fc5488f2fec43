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
from dcdm.commands.demo import MODELS, TEXT, chunks_of, forming, in_orders, what_chunks_hold
from dcdm.data.prepare import prepare
from dcdm.kinds import parameter_counts
from dcdm.training.settings import resolve
from dcdm.viewing.filling import EXERCISES, exercises_for

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
    text = "\n".join([TEXT, *(one.text for one, _ in EXERCISES["english"]), *lines])
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


def test_all_fill_the_same_blanks_a_token_with_each_pass(finished):
    data = json.loads(re.search(r'id="data">(.*?)</script>', finished[2])[1])["fillings"]
    fillings = data["filled-1"]
    assert [one["label"] for one in fillings] == ["DCDM", "BDLM", "MDLM"]
    given = [[token for token, chunk in zip(f["tokens"], f["chunks"], strict=True) if not chunk] for f in fillings]
    assert given[0] == given[1] == given[2]
    assert all(len(step) == 1 for filling in fillings for step in filling["steps"])
    assert len({len(filling["steps"]) for filling in fillings}) == 1
    assert [one["label"] for one in data["filled-2"]][1:] == ["AR’s order (1 lane)", "1 lane with drafts"]


def test_run_again_nothing_is_trained_and_other_settings_are_refused_with_a_way_out(finished, place, monkeypatch):
    folder = finished[0]
    monkeypatch.setattr("dcdm.viewing.filling.exercises_for", lambda *given: [])  # writing is not what takes part
    monkeypatch.setattr(demo, "beyond", lambda *given: {})
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


def test_lanes_and_ars_order_fill_the_same_blanks():
    model, tokenizer = dcdm.load()
    exercise = exercises_for(tokenizer, model.config.context_length)[0]
    lanes, ar = in_orders(model, tokenizer, exercise, drafts=False)
    blank = exercise.original(tokenizer)[1]
    assert ar.forwards == sum(blank)
    assert lanes.forwards == -(-sum(blank) // max(lanes.filling.lanes))
    for text in (lanes, ar):
        assert [group > 0 for group in text.filling.groups] == [False, *blank]


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
}
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
    for name, count in (("viewer", 1), ("filled-1", 3), ("filled-2", 3)):
        assert len(seen[name]) == count
        for blanks in seen[name]:
            left = [number for number in blanks if number]
            assert left == sorted(set(left), reverse=True)
            assert blanks[-1] == 0
    assert seen["bars"] == 8
    assert not seen["wide"]
