"""`dcdm serve` without an argument: the model that comes with the package, and three examples to click."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading

import httpx
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

import dcdm
import tiny
from browser import Page
from dcdm.commands.serve import language_of
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.engine import generate
from dcdm.serving.app import create_app_for
from dcdm.serving.exercises import exercises_for
from dcdm.serving.served import ServedModel
from dcdm.serving.settings import Settings
from dcdm.shipped import LANES, card_of
from dcdm.training import settings as run_settings
from dcdm.training.checkpoint_folder import SETTINGS
from live import BackgroundServer, live, tiny_model

DNA = {letter: number for number, letter in enumerate("ACGT")}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The server as a newcomer starts it; at the end its terminal is closed."""
    log = tmp_path_factory.mktemp("log") / "log"
    command = [sys.executable, "-m", "dcdm", "serve", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "DCDM_API_KEY"}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        try:
            said = []
            for line in process.stdout:
                said.append(line)
                if found := re.search(r"http://[\d.:]+\d", line):
                    break
            assert card_of(LANES).sentence in said[0]
            yield found[0]
        finally:
            process.send_signal(signal.SIGHUP)
            assert process.wait(60) == 0
            assert "Traceback" not in log.read_text()


def test_it_serves_the_shipped_model_by_its_name(address):
    (model,) = httpx.get(f"{address}/v1/models").json()["data"]
    assert (model["id"], model["dcdm"]["folder"]) == (LANES, LANES)
    assert model["dcdm"]["about"] == card_of(LANES).sentence
    answer = httpx.post(f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 4, "seed": 0})
    assert answer.json()["choices"][0]["finish_reason"] in ("length", "stop")


def served(name: str, **changes) -> ServedModel:
    return ServedModel(
        *(tiny_model(name, **changes) if name in ("ar", "causal") else dcdm.load(name)), name, Settings()
    )


def test_examples_have_blanks_as_long_as_what_stood_there_and_fit_the_kind():
    one = served(LANES)
    tokenizer = one.tokenizer
    blanks, function = exercises_for(tokenizer, one.window_length)
    fill, complete, compare = one.examples
    assert fill == {"name": "Fill blanks", "prompt": blanks.prompt(tokenizer), "length": None, "compare": False}
    (given, none), (rest, length) = function.segments(tokenizer)
    assert (given + rest, none) == (function.text, 0)
    assert (complete["prompt"], complete["length"]) == (given, length)
    assert compare == {**complete, "name": "Compare AR’s order and lanes", "compare": True}
    one_order = served("python-chunks").examples
    assert [each["name"] for each in one_order] == ["Fill blanks", "Complete"]
    assert [each["name"] for each in served("causal", context_length=256).examples][-1] == "Compare two orders"
    assert [each["name"] for each in served("ar", context_length=128).examples] == ["Complete"]
    assert served("causal").examples == [], "they do not fit into 64 tokens"


@pytest.mark.parametrize("model", [models.BPE(DNA, []), models.WordLevel(DNA, unk_token="none")])
def test_examples_that_a_tokenizer_cannot_spell_are_left_out_and_none_is_encoded_on_the_event_loop(
    model, monkeypatch
):
    tokenizer, encode, threads = Tokenizer.over(Backend(model)), Tokenizer.encode, []
    monkeypatch.setattr(
        Tokenizer,
        "encode",
        lambda self, text: threads.append(threading.current_thread().name) or encode(self, text),
    )
    with live(model=(tiny.model("causal", tokenizer.vocab_size - 3, context_length=256), tokenizer)) as server:
        for path in ("/v1/models", "/v1/models/tiny"):
            answer = server.get(path)
            assert answer.status_code == 200
            assert '"examples":[]' in answer.text
    assert threads
    assert "server" not in threads


@pytest.mark.parametrize(
    ("sources", "language"),
    [(("stdlib",), "python"), (("addresses",), "english"), (("code/a.py",), "python"), (None, "english")],
)
def test_examples_speak_the_language_that_the_model_was_trained_on(sources, language, tmp_path):
    if sources is not None:
        run_settings.write(run_settings.resolve("mdlm-debug", None, {"data.sources": sources}), tmp_path / SETTINGS)
    assert language_of(tmp_path) == language_of(tmp_path / "checkpoints" / "step-00000001") == language
    assert language_of(LANES) == "python"
    one = ServedModel(*tiny_model("causal", context_length=256), "tiny", Settings(), language=language)
    assert one.examples[0]["prompt"] == exercises_for(one.tokenizer, 256, language)[0].prompt(one.tokenizer)


# --- in a browser ------------------------------------------------------------------------------------------------


def click(page: Page, number: int) -> None:
    watch = "new MutationObserver(() => { window.begun = true }).observe(document.getElementById('runs'), "
    page.driver.execute_script(f"window.begun = false; {watch}{{ attributeFilter: ['aria-busy'] }})")
    page.click(f"#examples .chip:nth-of-type({number})")
    page.until("window.begun", "the run to begin")  # it may be over by then
    page.finished()


def texts(page: Page) -> list[str]:
    page.click("#languages label:last-child")
    both = [page.text("code")]
    if page.js("!document.getElementById('which').hidden"):
        page.click("#which label:last-child")
        both.append(page.text("code"))
    return both


def test_the_page_greets_with_the_model_and_its_examples_run_at_a_click(page, address):
    page.open(address)
    page.until(
        "document.getElementById('status').textContent.includes('forward pass')", "the first example to play"
    )
    page.finished()
    model, tokenizer = dcdm.load()
    blanks, function = exercises_for(tokenizer, model.config.context_length)
    assert page.text("about") == card_of(LANES).sentence
    assert page.js("document.getElementById('prompt').value") == blanks.prompt(tokenizer)
    assert page.js("document.querySelectorAll('#examples .chip').length") == 3
    assert page.js("document.getElementById('models').hidden")

    click(page, 1)
    alike = {"tokenizer": tokenizer, "temperature": 0.5}
    assert texts(page) == generate(model, [blanks.prompt(tokenizer)], **alike).texts
    click(page, 3)
    (given, _), (_, length) = function.segments(tokenizer)
    both = [generate(model, [given], max_new_tokens=length, lanes=lanes, **alike) for lanes in (1, None)]
    assert texts(page) == [given + one.texts[0] for one in both]
    assert f"where A took {int(both[0].forwards[0])}" in page.text("verdict")
    page.click("#languages label:nth-of-type(1)")
    assert f"dcdm sample {LANES}" in page.text("code")
    page.shot("compared-orders")
    page.size(390, 900)
    click(page, 2)
    assert not page.js("document.getElementById('compare').checked")
    assert len(texts(page)) == 1
    assert page.overflow() == 0


def test_a_model_without_lanes_compares_position_by_position_with_chunks(page):
    with live(model=tiny_model("causal", context_length=256)) as other:
        page.open(other.url)
        assert page.js("document.getElementById('about').hidden")
        click(page, 3)
        assert page.js("document.getElementById('a-commit').value") == "position"
        assert page.js("document.getElementById('b-commit').value") == "chunk"


def test_two_models_stand_side_by_side_each_by_its_own_decoder_and_a_replay_shows_where_blanks_will_go(page):
    names = ("paper", "bdlm")
    both = [
        ServedModel(*tiny_model(name, context_length=256), name, Settings(), language="english") for name in names
    ]
    with BackgroundServer(create_app_for(both)) as server:
        page.open(server.url, still=True)
        assert not page.js("document.getElementById('models').hidden")
        click(page, 3)
        blanks = both[0].examples[0]["prompt"]
        alike = {"tokenizer": both[0].tokenizer, "temperature": 0.5}
        assert texts(page) == [generate(one.model, [blanks], **alike).texts[0] for one in both]
        page.scrub(0)
        waiting = [cell for cell in page.cells() if "masked" in cell["look"]]
        assert waiting
        assert all("known" in cell["look"] for cell in waiting)
        page.fill("a-model", "bdlm")
        assert page.text("model").startswith("bdlm")
        assert not page.js(
            "[...document.querySelectorAll('#a-routing option')].some((one) => one.value === 'paper-step')"
        )
