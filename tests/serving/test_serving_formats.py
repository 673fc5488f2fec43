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

from dcdm.data.chats import ChatTemplate
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding import constraints
from dcdm.serving.app import create_app_for
from dcdm.serving.scheduler import FairQueue
from dcdm.serving.schemas import APIError
from dcdm.serving.served import Constraints, Served
from dcdm.serving.settings import Settings
from dcdm.serving.workers import Workers
from expressions import compile_here
from live import NAME, Live, events, live, tiny_model, until

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
    held = Constraints(remembered=2, most=4 * held.get(tokenizer, {"regex": "a"}).memory)
    made.clear()
    for text in ("a", "b", "a", "c", "a"):
        held.get(tokenizer, {"regex": text})
    assert len(made) == 3
    in_use = [held.get(tokenizer, {"regex": "y" * 60})]  # more than all that was allowed
    with pytest.raises(APIError, match="too many requests are waiting"):
        held.get(tokenizer, {"regex": "z"})
    in_use.clear()
    assert held.get(tokenizer, {"regex": "z"})


def test_expressions_that_take_long_delay_no_other_request_and_too_many_are_refused(monkeypatch, quick):
    """Neither those without one, nor those whose expression is known, nor small ones of other callers."""
    going_on, compiled = threading.Event(), constraints.compile_expression

    def slow(**wanted):
        if "q" in wanted["regex"]:
            going_on.wait(60)
            raise constraints.CompilerBusy("regex: other expressions keep the compiler busy; try again")
        return compiled(**wanted)

    monkeypatch.setattr(constraints, "compile_expression", slow)
    body = {"prompt": "x", "max_tokens": 4}
    with live(max_queued=16) as server, ThreadPoolExecutor(22) as pool:
        assert server.post("/v1/completions", {**body, **regex("a+")}).status_code == 200
        asked = [pool.submit(server.post, "/v1/completions", {**body, **regex("[qz]{3}")}) for _ in range(22)]
        until(lambda: sum(each.done() for each in asked) == 5)
        for other in ({}, regex("a+"), {**regex("b+"), "user": "other"}):
            assert server.post("/v1/completions", {**body, **other}, timeout=10).status_code == 200
        assert sum(each.done() for each in asked) == 5, "one of the caller's is compiled, sixteen wait"
        server.scheduler.draining = True  # what the signal does first
        going_on.set()
        answers = [each.result() for each in asked]
        codes = [answer.status_code for answer in answers]
        assert (codes.count(429), codes.count(503)) == (6, 16), "what waits is not made any more"
        assert all("Retry-After" in answer.headers for answer in answers)


def test_a_text_that_must_match_counts_twice_in_the_fair_queue(quick, monkeypatch):
    costs, add = [], FairQueue.add
    monkeypatch.setattr(
        FairQueue, "add", lambda queue, row, caller, cost: costs.append(cost) or add(queue, row, caller, cost)
    )
    with live() as server:
        for more in ({}, regex("a+")):
            assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 4, **more}).status_code == 200
    assert costs == [6, 12]


def test_callers_take_turns_and_who_is_gone_waits_no_longer(monkeypatch):
    monkeypatch.setattr("dcdm.serving.workers.WAIT_SECONDS", 0.5)
    done = []

    async def ask():
        workers, going_on = Workers(1, 9), threading.Event()
        first = asyncio.create_task(workers.run("first", going_on.wait))
        more = [
            asyncio.create_task(workers.run(name, done.append, name + number))
            for name, number in ("a1", "a2", "a3", "b1", "c1", "a4")
        ]
        await asyncio.sleep(0.01)
        more[1].cancel()
        going_on.set()
        await asyncio.gather(first, *more, return_exceptions=True)
        assert done == ["a1", "b1", "c1", "a3", "a4"]
        going_on.clear()
        first = asyncio.create_task(workers.run("first", going_on.wait))
        await asyncio.sleep(0)
        with pytest.raises(APIError, match="too many requests"):  # its turn does not come
            await workers.run("other", int)
        going_on.set()
        assert await first
        assert await workers.run("other", int, "3") == 3

    asyncio.run(ask())


def test_chats_of_one_model_do_not_wait_for_a_slow_template_of_another(monkeypatch):
    model, plain = tiny_model()
    tokenizers = {name: Tokenizer(plain.backend, plain.eos_id, TEMPLATE) for name in ("slow", "quick")}
    going_on, render = threading.Event(), ChatTemplate.render

    def held_up(template, *messages, **more):
        if template is slow:
            going_on.wait(60)
        return render(template, *messages, **more)

    monkeypatch.setattr(ChatTemplate, "render", held_up)
    served = [Served(model, tokenizer, name, Settings()) for name, tokenizer in tokenizers.items()]
    slow, server = served[0].template, Live(create_app_for(served))
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    with server, ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(server.post, "/v1/chat/completions", {**body, "model": "slow"}) for _ in range(8)]
        assert server.post("/v1/chat/completions", {**body, "model": "quick"}, timeout=20).status_code == 200
        assert not any(each.done() for each in waiting)
        going_on.set()
        assert {each.result().status_code for each in waiting} == {200}
