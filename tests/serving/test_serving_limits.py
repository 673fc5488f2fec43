"""Who is answered, how much each may ask for, what happens when it is too much, and how the server ends."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

import tiny
from dcdm.cli import main
from dcdm.config import ConfigError
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.batch import ContinuousBatch
from dcdm.serving import monitoring
from dcdm.serving.reading import TextReader
from dcdm.serving.served import ServedModel
from dcdm.serving.settings import Settings
from live import NAME, events, live, slow_down, tiny_model, until

# Nothing here ends by chance: an EOS would end a text that is meant to last.
BODY = {"prompt": "a", "max_tokens": 4, "seed": 0, "stop_at_eos": False}
SLOW = {**BODY, "max_tokens": 500, "commit": "position"}
KEY = "a-key"


# --- access ------------------------------------------------------------------------------------------------------


def test_with_a_key_every_route_but_health_wants_it():
    with live(api_key=KEY) as server:
        basic = base64.b64encode(f"anyone:{KEY}".encode()).decode()
        wrong = base64.b64encode(b"anyone:other").decode()
        for path in ("/", "/assets/x.js", "/v1/models", "/metrics", "/nowhere"):
            for header in (None, "Bearer other", f"Basic {wrong}", "Basic %%%", KEY, "Bearer a-ké"):
                headers = {} if header is None else {"Authorization": header.encode()}
                answer = server.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"].startswith("Basic")
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for header in (f"Bearer {KEY}", f"Basic {basic}", f"bearer  {KEY}"):
            headers = {"Authorization": header, "Host": "models.example"}
            assert server.get("/v1/models", headers=headers).status_code == 200
        assert server.post("/v1/completions", BODY).status_code == 401
        assert server.get("/healthz").status_code == server.get("/readyz").status_code == 200
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        assert client.completions.create(model=NAME, prompt="a", max_tokens=4).choices
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()


@pytest.fixture(scope="module")
def server():
    with live(max_body_bytes=2000) as running:
        yield running


def test_a_body_that_is_too_large_is_refused(server):
    assert server.post("/v1/completions", {**BODY, "user": "x" * 3000}).status_code == 413

    kind, pieces = {"Content-Type": "application/json"}, iter([b"{", b" " * 3000])
    answer = server.post("/v1/completions", json=None, content=pieces, headers=kind)
    assert answer.status_code == 413


def test_a_host_beyond_this_machine_needs_a_key_and_a_taken_port_is_named(capsys, monkeypatch):
    monkeypatch.delenv("DCDM_API_KEY", raising=False)
    for words, said in (
        (["nowhere", "--host", "0.0.0.0"], "DCDM_API_KEY"),
        (["nowhere", "--port", "70000"], "--port 70000"),
        (["nowhere", "--max-batch", "0"], "max_batch=0"),
        (["nowhere", "--threads", "0"], "--threads 0"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["serve", *words])
        assert left.value.code == 2
        assert said in capsys.readouterr().err
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(SystemExit):
            main(["serve", "nowhere"])
        assert "pip install -e '.[serve]'" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit):
            main(["serve", "nowhere", "--port", port])
        assert "another program listens there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0}, {"timeout_seconds": float("nan")}, {"api_key": ""}, {"api_key": "with blank"},
        {"api_key": "schlüssel"}, {"max_queued": 4}, {"prefix_tokens": -1},
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Settings(**wrong)


# --- limits ------------------------------------------------------------------------------------------------------


def test_lengths_beyond_the_limits_are_refused_by_the_name_that_the_caller_used():
    network, plain = tiny_model("mdlm")
    tokenizer = Tokenizer(plain.backend, plain.eos_id, "{% for m in messages %}{{ m.content }}{% endfor %}:")
    complete, fill, chat = "/v1/completions", "/v1/denoise", "/v1/chat/completions"
    hello, much = ([{"role": "user", "content": "a" * length}] for length in (1, 80))
    with live(model=(network, tokenizer), max_tokens=6) as server:
        for path, body, param in (
            (fill, {"prompt": "ab[[7]]"}, "prompt"),
            (fill, {"prompt": "ab[[4]]", "max_tokens": 3}, "max_tokens"),
            (fill, {"prompt": "a long beginning " * 6 + "[[2]]"}, "prompt"),
            (fill, {"prompt": "a[[0]]b"}, "prompt"),
            (complete, {"prompt": "a long beginning" * 6, "suffix": "b", "max_tokens": 2}, "prompt"),
            (complete, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
            (chat, {"messages": much}, "messages"),
            (chat, {"messages": hello, "max_tokens": 7}, "max_tokens"),
            (chat, {"messages": hello, "max_completion_tokens": 7}, "max_completion_tokens"),
        ):
            answer = server.post(path, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
        body = {"prompt": "ab[[4]]", "max_tokens": 2}
        assert events(server.post(fill, body).text)[-1][0] == "done"


def test_a_full_queue_is_answered_with_429_and_what_was_taken_is_finished(monkeypatch):
    slow_down(monkeypatch, 0.05)
    body = {**SLOW, "max_tokens": 10}
    with live(max_queued=3, max_texts=3, max_batch=1) as server, ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: server.post("/v1/completions", body), range(12)))
        codes = sorted(answer.status_code for answer in answers)
        assert set(codes) == {200, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        many = server.post("/v1/completions", {**BODY, "n": 4})
        assert many.status_code == 400, "a request that would never fit is not asked to come again"
        assert server.post("/v1/completions", BODY).status_code == 200


def test_a_request_that_takes_too_long_is_ended_with_408_running_or_waiting(monkeypatch):
    slow_down(monkeypatch)
    with live(timeout_seconds=1.5, max_batch=1) as server, ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: server.post("/v1/completions", SLOW), range(3)))
        for answer in answers:
            assert answer.status_code == 408
            assert answer.json()["error"]["code"] == "timeout"
            assert answer.headers["x-should-retry"] == "false"
        name, data = events(server.post("/v1/denoise", SLOW).text)[-1]
        assert (name, data["error"]["code"]) == ("error", "timeout")
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError, match="longer than"):
            list(client.completions.create(model=NAME, prompt="a", stream=True, extra_body=SLOW))
        until(lambda: server.figure("dcdm_running_texts") == 0)
        assert server.post("/v1/completions", {**BODY, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_computed_for_a_caller_who_is_gone(stream, monkeypatch):
    slow_down(monkeypatch)
    with live() as server, httpx.Client(timeout=30) as client:
        if stream:
            with client.stream("POST", f"{server.url}/v1/denoise", json=SLOW) as answer:
                next(piece for piece in answer.iter_text() if "event: commit" in piece)
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{server.url}/v1/completions", json=SLOW, timeout=httpx.Timeout(30, read=1))
        until(lambda: server.figure('dcdm_texts_total{ended="cancelled"}') == 1)
        assert 1 <= server.figure("dcdm_new_tokens_total") < 400
        until(lambda: server.figure("dcdm_running_texts") == 0)


def test_a_caller_who_leaves_the_queue_is_forgotten(monkeypatch):
    slow_down(monkeypatch)
    with live(max_batch=1) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, "/v1/completions", {**SLOW, "max_tokens": 60})
        until(lambda: server.figure("dcdm_running_texts") == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json=BODY, timeout=httpx.Timeout(30, read=0.2))
        assert first.result().status_code == 200
        until(lambda: server.figure('dcdm_texts_total{ended="given up"}') == 1)


def watched(monkeypatch):
    """How many texts joined at once, and how many ran in each forward."""
    joined, running = [], []
    step = ContinuousBatch.step

    def spy(decoding):
        joined.append(len(decoding.running) - len(decoding.texts))
        running.append(len(decoding.running))
        return step(decoding)

    monkeypatch.setattr(ContinuousBatch, "step", spy)
    return joined, running


def test_texts_with_any_decoder_join_those_that_run_as_far_as_there_is_room(monkeypatch):
    slow_down(monkeypatch, 0.01)
    joined, running = watched(monkeypatch)
    long = {**BODY, "max_tokens": 40, "commit": "position"}
    with live(max_batch_tokens=42 * 3) as server, ThreadPoolExecutor(6) as pool:
        first = pool.submit(server.post, "/v1/completions", long)
        until(lambda: server.figure("dcdm_running_texts") == 1)
        asked = [{**BODY, "commit": "steps:3", "cache": "none"}, {**BODY, "n": 2, "temperature": 0}, BODY]
        assert [a.status_code for a in pool.map(lambda b: server.post("/v1/completions", b), asked)] == [200] * 3
        assert not first.done(), "short texts do not wait for a long one"
        assert first.result().status_code == 200
        assert server.figure("dcdm_first_text_seconds_count") == 5
        assert server.figure("dcdm_cache_positions") == 0
    assert max(running) == 3, "three rows of 42 positions"
    assert sum(joined) == 5


def test_a_defect_in_one_batch_or_route_is_answered_and_does_not_end_the_service(monkeypatch):
    with live() as server:
        with monkeypatch.context() as broken:
            broken.setattr(ContinuousBatch, "step", lambda _: 1 / 0)
            answer = server.post("/v1/completions", BODY)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert server.post("/v1/completions", BODY).status_code == 200
        monkeypatch.setattr(ServedModel, "card", lambda self: 1 / 0)
        answer = server.get("/v1/models")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "failed")
        assert answer.headers["x-request-id"].startswith("req-")
        assert server.figure("dcdm_failures_total") == 2


class Panic(BaseException):
    """As `tokenizers` raises it: not an Exception."""


@pytest.mark.parametrize("stage", ["event", "end"])
def test_a_tokenizers_panic_fails_its_own_request_alone(monkeypatch, stage):
    slow_down(monkeypatch, 0.01)
    right, own = getattr(TextReader, stage), 1 + len("panic")

    def read(reader, *given):
        if reader.first == own:
            raise Panic
        return right(reader, *given)

    monkeypatch.setattr(TextReader, stage, read)
    with live() as server, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(server.post, "/v1/completions", {**SLOW, "max_tokens": 40})
        until(lambda: server.figure("dcdm_running_texts") == 1)
        failed = server.post("/v1/completions", {**BODY, "prompt": "panic"})
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "failed")
        assert beside.result().status_code == server.get("/healthz").status_code == 200
        with monkeypatch.context() as broken:
            broken.setattr(Tokenizer, "encode", lambda *_: (_ for _ in ()).throw(Panic))  # in the request's thread
            failed = server.post("/v1/completions", BODY)
            assert (failed.status_code, failed.json()["error"]["code"]) == (500, "failed")
        assert server.post("/v1/completions", BODY).status_code == 200


# --- watching ----------------------------------------------------------------------------------------------------


def test_logs_are_json_lines_and_hold_nothing_that_callers_wrote():
    stream = io.StringIO()
    monitoring.start_logging(stream)
    try:
        with live() as server:
            server.post("/v1/completions", {**BODY, "prompt": "my secret"})
            server.post("/v1/denoise", {**BODY, "prompt": "my secret"})
            server.post("/v1/completions", {"prompt": "my secret", "temperature": "my secret"})
            server.post("/v1/completions", {"prompt": "my secret", "commit": "none"})
    finally:
        logging.getLogger("dcdm.serving").handlers = []
        logging.getLogger("uvicorn").handlers = []
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    asked = [line for line in lines if line["event"] == "request" and line["method"] == "POST"]
    assert [line["status"] for line in asked] == [200, 200, 400, 400]
    assert asked[0]["prompt_tokens"] == 9
    assert asked[0]["completion_tokens"] == asked[1]["completion_tokens"] == 4
    assert asked[2]["code"] == "invalid_value"
    assert "secret" not in stream.getvalue()


def test_metrics_count_what_happened(server):
    before = server.figure("dcdm_new_tokens_total")
    server.post("/v1/completions", {**BODY, "n": 2})
    assert server.figure("dcdm_new_tokens_total") - before == 8
    until(lambda: server.figure('dcdm_requests_total{route="/v1/completions",status="200"}') >= 1)
    assert server.figure("process_resident_memory_bytes") > 1e6
    server.get("/some/route/that/is/not/there")
    assert "not/there" not in server.get("/metrics").text


# --- the end -----------------------------------------------------------------------------------------------------


def test_at_the_end_nothing_new_is_taken_and_what_runs_is_finished(monkeypatch):
    slow_down(monkeypatch)
    with live(drain_seconds=20) as server, httpx.Client(base_url=server.url, timeout=30) as kept:
        assert kept.get("/readyz").status_code == 200
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.post, "/v1/completions", {**SLOW, "max_tokens": 40})
            until(lambda: server.figure("dcdm_running_texts") == 1)
            server.scheduler.draining = True  # what the signal does first
            assert kept.get("/readyz").status_code == 503
            assert kept.get("/healthz").status_code == 200
            refused = kept.post("/v1/completions", json=BODY)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            server.ask_to_stop()
            assert running.result().status_code == 200
            assert running.result().json()["usage"]["completion_tokens"] == 40


def test_what_runs_longer_than_the_grace_is_cut_off(monkeypatch):
    slow_down(monkeypatch)
    with live(drain_seconds=1) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/completions", SLOW)
        until(lambda: server.figure("dcdm_running_texts") == 1)
        server.stop()
        assert running.result().status_code == 503
        assert running.result().json()["error"]["code"] == "shutting_down"
        assert not server.scheduler.alive


# --- what is loaded ----------------------------------------------------------------------------------------------


def test_the_command_takes_its_key_from_the_environment_and_bounds_what_kernels_are_kept(
    tmp_path, capsys, monkeypatch
):
    exported, served = tiny.exported("causal", tmp_path / "exported"), []
    monkeypatch.setenv("DCDM_API_KEY", KEY)
    monkeypatch.setenv(kept := "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "")
    monkeypatch.delenv(kept)
    monkeypatch.setattr(
        "dcdm.serving.server.serve_app", lambda app, listening: served.append(app) or listening.close()
    )
    monkeypatch.setattr(monitoring, "start_logging", lambda: None)
    main(["serve", str(exported), "--port", "0", "--name", NAME])
    said = capsys.readouterr()
    assert f"serving '{NAME}' on http://127.0.0.1:" in said.out
    assert KEY not in said.out + said.err
    state = served[0].state
    assert state.settings.api_key == KEY
    assert int(os.environ[kept]) < 1024, "of oneDNN's own number memory grows with every shape of a batch"
    assert state.served.card()["dcdm"]["folder"] == str(exported.resolve())
