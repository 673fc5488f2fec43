"""A served model that writes in lanes: completions, filling, its card, and the playground's dial."""

import json

import pytest

import dcdm
import tiny
from browser import Page, artefacts, chromium
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer
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


def streamed(server, path, body):
    """The choices of a stream, and its last line."""
    answer = server.post(path, body | {"stream": True, "model": NAME})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


def test_a_stream_tells_ahead_what_it_is_asked_to_and_its_text_stays_the_same(server):
    body = {"prompt": "ab", "max_tokens": 12, "seed": 0, "lanes": 4, "stop_at_eos": False}
    whole = server.post("/v1/completions", body | {"model": NAME}).json()["choices"][0]["text"]
    plain = streamed(server, "/v1/completions", body)
    asked = streamed(server, "/v1/completions", body | {"provisional": True})
    assert "".join(choice["text"] for choice in plain) == whole == "".join(choice["text"] for choice in asked)
    assert all(set(choice) == {"index", "text", "finish_reason", "logprobs"} for choice in plain)
    assert asked[-1]["reading"] == 12
    generated = expected(server, "ab", max_new_tokens=12, lanes=4, eos_id=-1).completions[0]
    tokenizer = server.app.state.served.tokenizer
    ahead = [one for choice in asked for one in choice["provisional"]]
    assert {one["lane"] for one in ahead} == {2, 3, 4}
    for one in ahead:
        assert one["lane"] == 1 + one["position"] // 3
        before, behind = generated[: one["position"]], generated[one["position"] + one["tokens"] :]
        assert tokenizer.decode(before) + one["text"] + tokenizer.decode(behind) == tokenizer.decode(generated)


def test_chats_tell_ahead_too_and_ask_for_a_stream():
    plain = byte_tokenizer()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(plain.backend, plain.eos_id, template)
    network = tiny.model("mdlm", tokenizer.vocab_size - 3, kind="lanes", lanes=(1, 2, 4), scale=6.0).float()
    body = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 12, "seed": 0, "stop_at_eos": False}
    with live(model=(network, tokenizer)) as chatting:
        plain = streamed(chatting, "/v1/chat/completions", body)
        asked = streamed(chatting, "/v1/chat/completions", body | {"provisional": True})
        refused = chatting.post("/v1/chat/completions", body | {"provisional": True})
    texts = ["".join(choice["delta"].get("content", "") for choice in part) for part in (plain, asked)]
    assert texts[0] == texts[1]
    assert not any("provisional" in choice for choice in plain)
    assert any(choice.get("provisional") for choice in asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "provisional"


def test_fillings_say_how_far_they_can_be_read_if_asked(server):
    body = {"prompt": "a[[2]]b", "max_tokens": 7, "lanes": 3, "stop_at_eos": False}
    plain = events(server.post("/v1/denoise", body).text)
    asked = events(server.post("/v1/denoise", body | {"provisional": True}).text)
    free, filled = {2, 3, *range(5, 12)}, set()
    for (name, data), (_, without) in zip(asked, plain, strict=True):
        if name != "commit":
            continue
        filled |= set(data["positions"])
        assert data["reading"] == min(free - filled, default=12)
        assert data["provisional"] == [position > data["reading"] for position in data["positions"]]
        assert not {"reading", "provisional"} & set(without)
        assert without["tokens"] == data["tokens"]


def test_fillings_name_the_lane_of_every_position(server):
    body = {"prompt": "a[[2]]b", "max_tokens": 7, "lanes": 3, "stop_at_eos": False}
    (_, start), *rest = events(server.post("/v1/denoise", body).text)
    assert start["lanes"] == 3
    lane = [place["lane"] for place in start["canvas"]]
    assert lane == [None, None, 1, 1, None, 1, 2, 2, 2, 3, 3, 3]
    commits = [data for name, data in rest if name == "commit"]
    assert [data["lanes"] for data in commits] == [[lane[at] for at in data["positions"]] for data in commits]
    with live("causal") as other:
        (_, start), *rest = events(other.post("/v1/denoise", {"prompt": "a[[4]]"}).text)
        assert "lanes" not in start
        assert not any("lanes" in data for name, data in rest if name == "commit")


def test_numbers_of_lanes_and_drafts_and_policies_that_do_not_fit_are_refused(server):
    body = {"model": NAME, "prompt": "ab", "max_tokens": 12}
    for wrong in ({"lanes": 0}, {"drafts": -1}):
        assert server.post("/v1/completions", body | wrong).status_code in (400, 422)
    for wrong, message in (
        ({"commit": "position"}, "fills part of a chunk"),
        ({"drafts": 2}, "needs a model with a draft head"),
    ):
        refused = server.post("/v1/completions", body | wrong)
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]
    with live("causal") as other:
        refused = other.post("/v1/completions", body | {"lanes": 2})
        assert refused.status_code == 400
        assert "lanes=2 does not fit" in refused.json()["error"]["message"]


def test_the_playground_colours_lanes_and_marks_their_heads(server, tmp_path):
    with chromium(tmp_path / "profile") as driver:
        page = Page(driver, artefacts(tmp_path / "pictures"))
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
        assert page.complaints() == []


@pytest.fixture(scope="module")
def drafting():
    tokenizer = byte_tokenizer()
    size = tokenizer.vocab_size - 3
    network = tiny.model("mdlm", size, kind="lanes", lanes=(1, 2, 4), drafts=3, scale=6.0).float()
    with live(model=(network, tokenizer), timeout_seconds=60) as server:
        yield server


@pytest.mark.parametrize("drafts", [None, 0, 2])
def test_texts_with_drafts_are_the_librarys(drafting, drafts):
    assert drafting.get("/v1/models").json()["data"][0]["dcdm"]["drafts"] == 3
    body = {"model": NAME, "prompt": "ab", "max_tokens": 24, "seed": 0, "lanes": 2, "stop_at_eos": False}
    done = drafting.post("/v1/completions", body | ({} if drafts is None else {"drafts": drafts}))
    assert done.status_code == 200, done.text
    alike = expected(drafting, "ab", max_new_tokens=24, lanes=2, drafts=drafts, eos_id=-1)
    assert done.json()["choices"][0]["text"] == alike.texts[0]
    filling = {name: value for name, value in body.items() if name != "model"}
    sent = events(drafting.post("/v1/denoise", filling | ({} if drafts is None else {"drafts": drafts})).text)
    start = sent[0][1]
    assert start.get("drafts", 0) == (3 if drafts is None else drafts)
    assert sum(name == "commit" for name, _ in sent) == int(alike.forwards[0])


def test_texts_that_must_match_are_written_without_drafts(drafting):
    matching = {"type": "regex", "regex": "[ab]{6}"}
    body = {"prompt": "ab", "max_tokens": 8, "lanes": 2, "seed": 3, "response_format": matching}
    done = drafting.post("/v1/completions", body)
    assert done.status_code == 200, done.text
    text = done.json()["choices"][0]["text"]
    assert set(text) <= set("ab")
    assert len(text) == 6
    sent = events(drafting.post("/v1/denoise", body).text)
    assert "drafts" not in sent[0][1]
    whole = [drafting.post("/v1/completions", {**body, "response_format": None, "drafts": n}) for n in (0, 3)]
    assert all(answer.status_code == 200 for answer in whole)


def test_a_stream_with_drafts_is_the_text_in_one_piece(drafting):
    body = {"model": NAME, "prompt": "ab", "max_tokens": 24, "lanes": 2, "seed": 1}
    whole = drafting.post("/v1/completions", body).json()["choices"][0]["text"]
    lines = drafting.post("/v1/completions", body | {"stream": True}).text.splitlines()
    sent = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(one["choices"][0]["text"] for one in sent if one["choices"]) == whole


def test_the_playground_has_dials_for_lanes_and_drafts_where_they_fit(drafting, tmp_path):
    with chromium(tmp_path / "profile") as driver:
        page = Page(driver, artefacts(tmp_path / "pictures"))
        page.open(drafting.url, prompt="ab", length="24", a_lanes="2", a_drafts="2", eos="0")
        assert page.js("['a-lanes', 'a-drafts'].map((id) => document.getElementById(id).value)") == ["2", "2"]
        page.generate()
        page.until("document.querySelector('.play').title === 'Play'", "the canvas to be full")
        forwards = int(expected(drafting, "ab", max_new_tokens=24, lanes=2, drafts=2, eos_id=-1).forwards[0])
        assert f"24 tokens in {forwards} forwards" in page.text("status")
        assert all(flag in page.text("code") for flag in ("--lanes 2", "--drafts 2"))
        with live("causal") as other:
            page.open(other.url, prompt="ab")
            assert page.js("['a-lanes', 'a-drafts'].map((id) => document.getElementById(id))") == [None, None]
            colours = page.js("[...document.querySelectorAll('#colours input')].map((each) => each.value)")
            assert colours == ["chunk", "confidence", "order"]
        assert page.complaints() == []
