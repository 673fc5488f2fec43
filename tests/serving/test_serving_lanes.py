"""A served model that writes in lanes: completions, filling, its card, and the playground's dial."""

import pytest

import dcdm
import tiny
from browser import Page, artefacts, chromium
from dcdm.data.tokenizers import byte_tokenizer
from live import NAME, events, live


@pytest.fixture(scope="module")
def server():
    tokenizer = byte_tokenizer()
    network = tiny.model("mdlm", tokenizer.vocab_size - 3, kind="lanes", lanes=(1, 2, 4), scale=6.0).float()
    with live(model=(network, tokenizer), timeout_seconds=60) as server:
        yield server


def expected(server, prompt, **options):
    served = server.app.state.served
    return dcdm.generate(served.model, [prompt], tokenizer=served.tokenizer, seed=0, **options)


def test_the_card_says_how_many_lanes_the_model_knows(server):
    card = server.get("/v1/models").json()["data"][0]["dcdm"]
    assert (card["lanes"], card["default_lanes"]) == ([1, 2, 4], 4)
    assert [commit["name"] for commit in card["commits"]] == ["chunk"]


@pytest.mark.parametrize("lanes", [1, 2, None])
def test_completions_are_the_librarys_for_every_number_of_lanes(server, lanes):
    body = {"model": NAME, "prompt": "ab", "max_tokens": 12, "seed": 0, "stop_at_eos": False}
    done = server.post("/v1/completions", body | ({} if lanes is None else {"lanes": lanes}))
    assert done.status_code == 200, done.text
    assert (
        done.json()["choices"][0]["text"]
        == expected(server, "ab", max_new_tokens=12, lanes=lanes, eos_id=-1).texts[0]
    )


def test_filling_reports_as_many_tokens_a_forward_as_there_are_lanes(server):
    body = {"prompt": "ab", "max_tokens": 12, "lanes": 4, "stop_at_eos": False}
    sent = events(server.post("/v1/denoise", body).text)
    sizes = [len(data["positions"]) for name, data in sent if name == "commit" or "positions" in data]
    assert sizes == [4, 4, 4]


def test_numbers_of_lanes_and_policies_that_do_not_fit_are_refused(server):
    body = {"model": NAME, "prompt": "ab", "max_tokens": 12}
    assert server.post("/v1/completions", body | {"lanes": 0}).status_code in (400, 422)
    refused = server.post("/v1/completions", body | {"commit": "position"})
    assert refused.status_code == 400
    assert "fills part of a chunk" in refused.json()["error"]["message"]
    with live("causal") as other:
        refused = other.post("/v1/completions", body | {"lanes": 2})
        assert refused.status_code == 400
        assert "lanes=2 does not fit" in refused.json()["error"]["message"]


def test_the_playground_has_a_dial_for_lanes(server, tmp_path):
    pytest.importorskip("selenium")
    with chromium(tmp_path / "profile") as driver:
        page = Page(driver, artefacts(tmp_path / "pictures"))
        page.open(server.url, prompt="ab", length="12", a_lanes="2", eos="0")
        assert page.js("document.getElementById('a-lanes').value") == "2"
        page.generate()
        page.until("document.querySelector('.play').title === 'Play'", "the canvas to be full")
        assert "12 tokens in 6 forwards" in page.text("status")
        assert page.complaints() == []
    with live("causal") as other, chromium(tmp_path / "second") as driver:
        page = Page(driver, artefacts(tmp_path / "pictures"))
        page.open(other.url, prompt="ab")
        assert page.js("document.getElementById('a-lanes').closest('.field').hidden")
