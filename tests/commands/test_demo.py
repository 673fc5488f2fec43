"""`dcdm demo` as a user runs it: trains the paper's model and its baselines, compares them, and writes a page."""

import contextlib
import io
import lzma
import random
import re

import pytest
import torch

import dcdm
from dcdm.cli import main
from dcdm.commands import demo
from dcdm.commands.demo import MODELS, TEXT, chunks_of, untrained, what_chunks_hold
from dcdm.data.prepare import prepare
from dcdm.kinds import parameter_counts
from dcdm.training.settings import resolve
from dcdm.viewing.pages import chunks_page

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
    return place / "runs", out, (place / "runs" / "chunks.html").read_text()


def test_the_three_models_are_trained_alike():
    settings = [resolve(f"{name}-debug", None, {}) for name in MODELS]
    assert all(one.train == settings[0].train for one in settings)
    sizes = [parameter_counts(one.model)[0] for one in settings]
    assert max(sizes) < 1.1 * min(sizes)


def test_the_same_text_is_shown_before_the_first_step_and_while_chunks_form(finished, place):
    folder, out, page = finished
    assert len(re.findall(r"^text .*Fellow", out, re.MULTILINE)) == STEPS + 1
    tokenizer = prepare([str(place / "corpus.txt.xz")], demo.TOKENIZER).tokenizer
    last, first = (
        chunks_of(model, tokenizer) for model in (dcdm.load(folder / "dcdm")[0], untrained(folder / "dcdm", 0))
    )
    assert last.frame.ids != first.frame.ids
    assert not any(last.frame.hidden)
    assert page == chunks_page(last)


def test_bounds_of_all_three_and_the_surrogate_apart_stand_in_the_terminal(finished):
    _, out, _ = finished
    for name in MODELS:
        row = re.search(rf"^{name} +(≤ \S+ ±\S+ \(\S+\)) +\S+ +(.*)$", out, re.MULTILINE)
        assert ("±" in row[2]) == (name == "dcdm")
        assert "≤" not in row[2]


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


def test_the_page_needs_nothing_from_outside_and_the_terminal_says_what_comes_next(finished):
    folder, out, page = finished
    assert not re.findall(r"""(?:https?:)?//[\w.]+|\b(?:src|href)\s*=(?!"#)|url\((?!#)|@import""", page)
    assert str(folder / "chunks.html") in out.replace("\n", "")
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
