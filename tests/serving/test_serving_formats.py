"""Answers that must match: schemas and expressions for completions, chats and blanks."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest

from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding import constraints
from dcdm.serving.app import Workers
from dcdm.serving.schemas import APIError
from dcdm.serving.served import Constraints
from expressions import compile_here
from live import NAME, events, live, tiny_model, until

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}:"
PERSON = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 2, 30]}},
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    model, plain = tiny_model()
    with live(model=(model, Tokenizer(plain.backend, plain.eos_id, TEMPLATE))) as running:
        yield running


@pytest.fixture
def quick(monkeypatch):
    compile_here(monkeypatch)


def regex(text):
    return {"response_format": {"type": "regex", "regex": text}}


def test_the_openai_client_gets_json_that_matches_its_schema(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "who"}], response_format=wanted, seed=seed,
            extra_body={"commit": "chunk"},
        )  # fmt: skip
        jsonschema.validate(json.loads(answer.choices[0].message.content), PERSON)
        assert answer.choices[0].finish_reason in ("stop", "length")


def test_completions_suffixes_blanks_and_streams_match(server, quick):
    body = {"prompt": "n = ", "max_tokens": 12, "seed": 1, "n": 2, **regex("-?[0-9]{2,}")}
    for choice in server.post("/v1/completions", body).json()["choices"]:
        assert re.fullmatch("-?[0-9]{2,}", choice["text"])
    between = server.post("/v1/completions", {**body, "suffix": ";"}).json()["choices"][0]["text"]
    assert re.fullmatch("-?[0-9]{11,12}", between)
    streamed = server.post("/v1/completions", {**body, "n": 1, "stream": True}).text.split("\n\n")
    pieces = [json.loads(line[6:])["choices"][0]["text"] for line in streamed if line.startswith("data: {")]
    assert re.fullmatch("-?[0-9]{2,}", "".join(pieces))
    denoised = events(server.post("/v1/denoise", {"prompt": "a[[3]]b[[4]]c", **regex("[xy]+")}).text)[-1][1]
    assert re.fullmatch("a[xy]{3}b[xy]{4}c", denoised["text"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (regex("a{20}"), "no text of up to 8 tokens"),
        (regex("("), "regex"),
        ({"response_format": {"type": "regex"}}, "only with it"),
        ({"response_format": {"type": "text", "regex": "a"}}, "only with it"),
        ({"response_format": {"type": "json_object"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "'not'"),
        ({**regex("a"), "stop": "b"}, "stop"),
        ({**regex("aa"), "stop_at_eos": False}, "exactly 8 tokens"),
    ],
)
def test_what_cannot_be_matched_is_a_400_before_any_forward(server, quick, more, said):
    before = server.figure("dcdm_batch_texts_count")
    answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 8, **more})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] in ("response_format", "stop")
    assert server.figure("dcdm_batch_texts_count") == before


def test_automata_are_made_once_and_only_so_many_are_held(quick, monkeypatch):
    made = []
    compiled = constraints._compiled
    monkeypatch.setattr(constraints, "_compiled", lambda request: made.append(request) or compiled(request))
    _, tokenizer = tiny_model()
    held = Constraints()
    one = {"type": "object", "required": ["a", "b"], "properties": {name: {"enum": [1]} for name in "ab"}}
    other = {**one, "properties": {name: {"enum": [1]} for name in "ba"}}
    assert held.get(tokenizer, {"schema": one}) is held.get(tokenizer, {"schema": one})
    assert held.get(tokenizer, {"schema": one}) is not held.get(tokenizer, {"schema": other}), "their order counts"
    made.clear()
    held = Constraints(remembered=2, entries=7000)
    for text in ("a", "b", "a", "c", "a"):
        held.get(tokenizer, {"regex": text})
    assert len(made) == 3
    in_use = [held.get(tokenizer, {"regex": text * 3}) for text in "abcd"]
    assert len(in_use) == 4
    with pytest.raises(Exception, match="too many requests are waiting"):
        held.get(tokenizer, {"regex": "e"})


def test_expressions_that_take_long_delay_no_other_request_and_too_many_are_refused(monkeypatch):
    """More than the threads that all other requests share."""
    going_on = threading.Event()

    def slow(**_):
        going_on.wait(60)
        raise constraints.CompilerBusy("regex: other expressions keep the compiler busy; try again")

    monkeypatch.setattr(constraints, "compile_expression", slow)
    body = {"prompt": "x", "max_tokens": 4}
    with live(max_queued=16) as server, ThreadPoolExecutor(45) as pool:
        asked = [pool.submit(server.post, "/v1/completions", {**body, **regex("[qz]{3}")}) for _ in range(45)]
        until(lambda: sum(each.done() for each in asked) == 25)
        assert server.post("/v1/completions", body, timeout=10).status_code == 200
        assert sum(each.done() for each in asked) == 25, "four are compiled, sixteen wait"
        going_on.set()
        assert {each.result().status_code for each in asked} == {429}
        assert all("Retry-After" in each.result().headers for each in asked)


def test_an_expression_whose_turn_does_not_come_is_refused(monkeypatch):
    monkeypatch.setattr("dcdm.serving.app.THREAD_SECONDS", 0.05)

    async def ask():
        workers, going_on = Workers(1, 9), threading.Event()
        first = asyncio.create_task(workers.run(going_on.wait))
        await asyncio.sleep(0)
        with pytest.raises(APIError, match="too many requests"):
            await workers.run(int)
        going_on.set()
        assert await first
        assert await workers.run(int, "3") == 3

    asyncio.run(ask())
