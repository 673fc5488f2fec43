"""A served model that writes in lanes: completions, filling, its card, and the playground's dial."""

import json

import pytest

import dcdm
import tiny
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer
from live import NAME, events, live


def lane_server(**changes):
    plain = byte_tokenizer()
    tokenizer = Tokenizer(plain.backend, plain.eos_id)
    size = tokenizer.vocab_size - 3
    network = tiny.model("mdlm", size, kind="lanes", lanes=(1, 2, 4), scale=6.0, **changes).float()
    return live(model=(network, tokenizer), timeout_seconds=60)


@pytest.fixture(scope="module")
def server():
    with lane_server() as server:
        yield server


@pytest.fixture(scope="module")
def drafting():
    with lane_server(drafts=3) as server:
        yield server


@pytest.fixture(scope="module")
def other():
    with live("causal") as server:
        yield server


def expected(server, prompt, **options):
    served = server.app.state.served
    return dcdm.generate(served.model, [prompt], tokenizer=served.tokenizer, **{"seed": 0, **options})


def streamed(server, path, body):
    """The choices of a stream."""
    answer = server.post(path, body | {"stream": True, "model": NAME})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


@pytest.mark.parametrize("lanes", [1, 2, None])
def test_completions_are_the_librarys_for_every_number_of_lanes_that_the_card_names(server, lanes):
    card = server.get("/v1/models").json()["data"][0]["dcdm"]
    dials = {each["name"]: each for each in card["settings"]}
    assert (card["lanes"], dials["lanes"]["means"]) == ([1, 2, 4], 4)
    assert [commit["name"] for commit in dials["commit"]["choices"]] == ["chunk"]
    body = {"model": NAME, "prompt": "ab", "max_tokens": 12, "seed": 0, "stop_at_eos": False, "lanes": lanes}
    text = expected(server, "ab", max_new_tokens=12, lanes=lanes, eos_id=-1).texts[0]
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] == text


def test_fillings_name_the_lane_of_every_position(server, other):
    body = {"prompt": "a[[2]]b", "max_tokens": 7, "lanes": 3, "stop_at_eos": False}
    (_, start), *commits, _ = events(server.post("/v1/denoise", body).text)
    lane = [place["lane"] for place in start["canvas"]]
    assert (start["lanes"], lane) == (3, [None, None, 1, 1, None, 1, 2, 2, 2, 3, 3, 3])
    for _, data in commits:
        assert data["lanes"] == [lane[at] for at in data["positions"]]
    sent = events(other.post("/v1/denoise", {"prompt": "a[[4]]"}).text)
    assert not any("lanes" in data for _, data in sent)


def test_numbers_of_lanes_and_drafts_and_policies_that_do_not_fit_are_refused(server, other):
    body = {"model": NAME, "prompt": "ab", "max_tokens": 12}
    for asked, wrong, message in (
        (server, {"lanes": 0}, "lanes"),
        (server, {"drafts": -1}, "drafts"),
        (server, {"commit": "position"}, "fills part of a chunk"),
        (server, {"drafts": 2}, "needs a model with a draft head"),
        (other, {"lanes": 2}, "lanes=2 does not fit"),
    ):
        refused = asked.post("/v1/completions", body | wrong)
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]


def test_the_playground_colours_lanes_and_marks_their_heads(page, server):
    page.open(server.url, width=390, height=844, dark=True, prompt="a[[2]]b", length="22", a_lanes="4", eos="0")
    page.generate()
    page.until("document.querySelector('.play').title === 'Play'", "the canvas to be full")
    page.scrub(3)
    lane = [0, 0, 1, 1, 0, *[1] * 4, *[2] * 6, *[3] * 6, *[4] * 6]
    heads = [5, 11, 17, 23]
    for position, cell in enumerate(page.cells()):
        if not lane[position]:
            assert "given" in cell["look"]
            continue
        assert f"chunk-{lane[position]}" in cell["look"]
        assert ("lane-head" in cell["look"]) == (position in heads)
        assert ("masked" in cell["look"]) == (cell["forward"] == 0)
    assert sum(cell["forward"] > 0 for cell in page.cells()) == 12
    assert page.overflow() == 0
    widest = "Math.max(...[...document.querySelectorAll('#runs .token')].map((cell) => cell.offsetWidth))"
    assert page.js(widest) < 60, "heads stand in their lines"
    page.shot("playground-lanes-390-dark")
    page.click("#colours label:nth-of-type(3)")  # by confidence
    assert not any(name.startswith("chunk-") for cell in page.cells() for name in cell["look"])


@pytest.mark.parametrize("drafts", [None, 0, 2])
def test_texts_with_drafts_are_the_librarys_whole_and_streamed(drafting, drafts):
    assert drafting.get("/v1/models").json()["data"][0]["dcdm"]["drafts"] == 3
    body = {"prompt": "ab", "max_tokens": 24, "seed": 1, "lanes": 2, "stop_at_eos": False, "drafts": drafts}
    alike = expected(drafting, "ab", seed=1, max_new_tokens=24, lanes=2, drafts=drafts, eos_id=-1)
    assert drafting.post("/v1/completions", body).json()["choices"][0]["text"] == alike.texts[0]
    assert "".join(choice["text"] for choice in streamed(drafting, "/v1/completions", body)) == alike.texts[0]
    sent = events(drafting.post("/v1/denoise", body).text)
    assert sent[0][1].get("drafts", 0) == (3 if drafts is None else drafts)
    assert sum(name == "commit" for name, _ in sent) == int(alike.forwards[0])
