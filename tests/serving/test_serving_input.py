"""Bad input of any shape is refused with a 4xx in OpenAI's form, and the server goes on."""

from __future__ import annotations

import json
import os
import socket

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcdm.serving.schemas import ChatRequest, CompletionRequest, DenoiseRequest
from live import live

POSTS = ("/v1/completions", "/v1/chat/completions", "/v1/denoise")
MANY = int(os.environ.get("DCDM_FUZZ", "60"))


@pytest.fixture(scope="module")
def server():
    with live(max_tokens=8, max_texts=3, timeout_seconds=60) as running:
        yield running
        assert running.figure("dcdm_failures_total") == 0


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def check_refused(answer: httpx.Response, *statuses: int) -> dict:
    assert answer.status_code in (statuses or range(400, 500)), answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


def send(http, path, content):
    return http.post(path, content=content, headers={"Content-Type": "application/json"})


BODIES = [
    b"", b"{", b"null", b"[]", b"1", b'"text"', b"\xff\xfe", b"{}", b"[" * 100_000, b'{"a":' * 5000,
    b'{"prompt":' + b"[" * 900 + b"]" * 900 + b"}", b'{"prompt": "\\ud800"}', b'{"prompt": ["\\udfff"]}',
    b'{"prompt": "a", "\\ud800": 1}', b'{"prompt": "a", "model": "\\ud800"}', b'{"prompt": "a", "stop": "\\ud800"}',
    b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": -Infinity}',
    b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "top_p": 1e-999}', b'{"prompt": "a", "seed": 1.5}',
    b'{"prompt": "a", "seed": 1' + b"0" * 30 + b"}", b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
    b'{"prompt": "a", "max_tokens": 1' + b"0" * 30 + b"}", b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "max_tokens": true}', b'{"prompt": "a", "max_tokens": "8"}', b'{"prompt": "a", "n": 0}',
    b'{"prompt": "a", "n": 4}', b'{"prompt": []}', b'{"prompt": [[]], "n": true}', b'{"prompt": [1, "a"]}',
    b'{"prompt": [-1]}', b'{"prompt": [257]}', b'{"prompt": [259]}', b'{"prompt": [1' + b"0" * 40 + b"]}",
    b'{"prompt": ["a","a","a","a"]}', b'{"prompt": "a", "top_k": 0}', b'{"prompt": "a", "commit": "steps:1e300"}',
    b'{"prompt": "a", "commit": "steps:nan"}', b'{"prompt": "a", "commit": "ancestral:1e18"}',
    b'{"prompt": "a", "commit": ":"}', b'{"prompt": "a", "routing": "blocks:\xc2\xb2"}',
    b'{"prompt": "a", "routing": "blocks:99999999999999999999"}', b'{"prompt": "a", "routing": "adablock"}',
    b'{"prompt": "a", "cache": "frozen"}', b'{"prompt": "a", "stop": [""]}', b'{"prompt": "a", "best_of": 1}',
    b'{"prompt": "a", "stop": ["a","b","c","d","e"]}', b'{"prompt": "a", "logprobs": 0}',
    b'{"prompt": "a", "echo": true}', b'{"prompt": "a", "stream_options": {"include_usage": true}}',
    b'{"prompt": "a", "presence_penalty": 1}', b'{"prompt": "a", "logit_bias": {"5": 1}}',
    b'{"prompt": "a", "nonsense": 1}', b'{"prompt": "' + b"a" * 63 + b'"}', b'{"prompt": "a", "model": "other"}',
    b'{"prompt": "a", "suffix": "' + b"b" * 60 + b'", "max_tokens": 4}', b'{"prompt": "a", "max_tokens": 9}',
    b'{"messages": []}', b'{"messages": [{"role": "user"}]}', b'{"messages": [{"role": "god", "content": ""}]}',
    b'{"prompt": "[[99999999999999999999]]"}', b'{"prompt": "' + b"[[99]]" * 9000 + b'"}',
    b'{"prompt": "[[1' + b"0" * 5000 + b']]"}', b'{"prompt": "[[70]]"}', b'{"prompt": "a[[9]]", "max_tokens": 9}',
    b'{"prompt": "a", "max_tokens": 0}', b'{"prompt": "a", "delimiters": []}', b'{"prompt": "a", "stream": 1}',
    b'{"prompt": ' + json.dumps([["x"] * 10] * 3000).encode() + b"}",
    b'{"prompt": "a", "response_format": {"type": "json_object"}}',
]  # fmt: skip


def test_known_bad_bodies_are_refused(http):
    blanks = (b"[[9", b'"a[[9', b"[[1", b"[[7", b'"delimiters"')  # a completion takes them literally
    for number, body in enumerate(BODIES):
        fine = any(part in body for part in blanks)
        for path in POSTS if fine or number < 12 else POSTS[:1]:
            answer = send(http, path, body)
            if not fine or answer.status_code != 200:
                check_refused(answer, 400, 404)
    assert http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": "a", "nonsense": 1}, "nonsense", "unknown_field"),
        ({"prompt": "a", "model": "other"}, "model", "model_not_found"),
        ({"prompt": "a" * 63}, "prompt", "context_length_exceeded"),
        ({"prompt": "a", "commit": "steps:0"}, "commit", "invalid_value"),
        ({"prompt": "a", "temperature": -1}, "temperature", "invalid_value"),
        ({"prompt": "a", "max_tokens": 9}, "max_tokens", "invalid_value"),
        ({"prompt": "a", "logprobs": 0}, "logprobs", "unknown_field"),
        ({"prompt": "a", "guided_regex": "a+"}, "guided_regex", "unknown_field"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format", "invalid_value"),
        ({"prompt": "a", "response_format": {"type": "text", "regex": "a"}}, "response_format", "invalid_value"),
        ({"prompt": "a", "response_format": {}}, "response_format", "invalid_value"),
    ],
)
def test_an_error_names_what_is_wrong(http, body, param, code):
    error = check_refused(http.post("/v1/completions", json=body))
    assert (error["param"], error["code"]) == (param, code)


def test_plain_text_is_a_format(http):
    body = {"prompt": "a", "max_tokens": 2, "response_format": {"type": "text"}}
    assert http.post("/v1/completions", json=body).status_code == 200


def test_wrong_methods_types_and_routes_are_refused_in_the_same_form(http):
    for path in POSTS:
        assert check_refused(http.get(path), 405)["code"] == "method_not_allowed"
        assert http.get(path).headers["allow"] == "POST"
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            check_refused(http.post(path, content=b'{"prompt": "a"}', headers={"Content-Type": kind}), 415)
    for path in ("/v1", "/v1/engines", "/%00", "/..%2f..%2fetc/passwd", "/assets/..%2fapp.py", "/assets/nothing.js",
                 "/assets/.", "/docs", "/v1/models/other", "/v1/models/%ff"):  # fmt: skip
        check_refused(http.get(path), 404)


def test_head_tells_of_the_page_and_of_health_what_get_does_without_a_body(http):
    for path in ("/", "/healthz", "/readyz"):
        head, whole = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == whole.headers["content-length"]


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 99999999999999999999999\r\n\r\n{}",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_broken_http_is_answered_or_closed_but_breaks_nothing(server, raw):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert not answer or not answer.split()[1].startswith(b"5"), answer
    assert server.get("/healthz").status_code == 200


NUMBERS = st.one_of(st.integers(), st.floats(), st.integers(-3, 12), st.sampled_from([1e300, -0.0, 2**63, 2**64]))
ODD_TEXT = st.text(alphabet="\ud800[]9a", max_size=9)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), ODD_TEXT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, *DenoiseRequest.model_fields, "other"})
POLICY = st.builds(
    "{}{}{}".format,
    st.sampled_from(
        ["chunk", "steps", "threshold", "entropy", "factor", "ancestral", "blocks", "adablock", "auto"]
    ),
    st.sampled_from(["", ":"]),
    st.one_of(NUMBERS.map(str), st.sampled_from(["", "1", "2", "inf", "nan", "1_0", "²", "1e5"])),
)


@st.composite
def bodies(draw) -> bytes:
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.binary(max_size=60))
    named = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)
    body = {"prompt": draw(st.one_of(VALUES, st.text(max_size=20)))} if kind < 7 else {}
    body |= draw(named)
    if kind % 2:
        body |= {"commit": draw(POLICY), "max_tokens": draw(st.integers(-1, 9))}
    text = json.dumps(body)
    if kind == 3:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(["", "}", '"', "\\", "NaN", "\x00", ","])) + text[at + 1 :]
    return text.encode("utf-8", "surrogatepass")


@settings(max_examples=MANY, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(POSTS), body=bodies())
def test_fuzzed_bodies_never_break_the_server(http, path, body):
    answer = send(http, path, body)
    if answer.status_code == 200:
        assert b'"code":"failed"' not in answer.content
    else:
        check_refused(answer, *range(400, 500))
