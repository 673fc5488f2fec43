"""Connections that ask for nothing, or ask in two ways at once: they are closed, and keep nobody out."""

from __future__ import annotations

import contextlib
import resource
import socket
import time

import pytest

from dcdm.serving import answers, app
from dcdm.serving import server as serving_process
from live import live, slow_down, until

BODY = {"prompt": "a", "max_tokens": 4, "seed": 0, "stop_at_eos": False}
HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connected(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has ended it; what it has sent before is skipped."""
    connection.settimeout(0.05)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True
    return True


@pytest.fixture(scope="module")
def hasty():
    with live(head_seconds=0.5) as running:
        yield running


def test_a_connection_without_complete_headers_is_closed_and_one_letter_after_the_other_buys_no_time(hasty):
    begun = (b"", b"GET / HT", HEAD, HEAD + b"\r\n" + HEAD, HEAD + b"Content-Length: 9\r\n\r\nabc")
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(connected(hasty)) for _ in begun]
        for connection, sent in zip(opened, begun, strict=True):
            connection.sendall(sent)
        until(lambda: all(map(is_closed, opened)), 4)  # keep-alive alone would leave them 5 s
        dripping, last = stack.enter_context(connected(hasty)), time.monotonic() + 4
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < last and not is_closed(dripping):
                dripping.sendall(b"X")
        assert time.monotonic() < last


def test_a_request_that_takes_longer_than_headers_may_is_answered(monkeypatch):
    slow_down(monkeypatch, 0.3)
    with live(head_seconds=0.2) as server:
        assert server.post("/v1/completions", {**BODY, "commit": "position"}).status_code == 200


def test_a_caller_who_does_not_read_is_disconnected(monkeypatch):
    async def endless(served, queued, notes):
        with queued:
            while True:
                yield "x" * (1 << 20)

    monkeypatch.setattr(answers, "stream_denoising", endless)
    monkeypatch.setattr(app, "GRACE_SECONDS", 0.3)
    body = b'{"prompt": "a"}'
    head = POST.replace(b"completions", b"denoise") + b"Content-Length: %d\r\n\r\n" % len(body)
    with live(timeout_seconds=0.3) as server, connected(server) as connection:
        connection.sendall(head + body)
        until(lambda: server.figure('dcdm_requests_total{route="/v1/denoise"}') == 1, 10)
        until(lambda: not server._server.server_state.connections, 5)
        assert is_closed(connection)
        assert server.figure("dcdm_failures_total") == 0


def test_the_longest_silent_connection_makes_room_for_a_new_one_and_keeps_nobody_out():
    with live(max_connections=3) as server, contextlib.ExitStack() as stack:
        opened = []
        for _ in range(4):
            opened.append(stack.enter_context(connected(server)))
            time.sleep(0.05)
        until(lambda: is_closed(opened[0]), 5)
        assert not any(is_closed(connection) for connection in opened[1:])
        for _ in range(200):
            stack.enter_context(connected(server)).sendall(b"POST /v1/completions HTTP/1.1\r\n")
        assert server.get("/healthz").status_code == server.post("/v1/completions", BODY).status_code == 200


def test_too_many_open_requests_are_refused_but_health_is_answered():
    with live(max_connections=2, body_seconds=60) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(connected(server))
            connection.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n")
            assert b" 100 " in connection.recv(100)  # it waits for the body
        assert server.get("/healthz").status_code == 200
        refused = server.post("/v1/completions", BODY)
        assert refused.json()["error"]["code"] == "busy"
        assert refused.headers["retry-after"]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [((20_000, 20_000), 1024), ((256, 20_000), 1024), ((1024, 1024), 448), ((64, 64), 1), ((-1, -1), 1024)],
)
def test_connections_leave_room_under_the_limit_of_open_files(monkeypatch, limits, expected):
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, to: raised.append(to))
    assert serving_process.connections_possible(1024) == expected
    assert raised == ([] if limits[0] in (20_000, -1) else [(min(2176, limits[1]), limits[1])])


# --- what a request says about itself ----------------------------------------------------------------------------


OWN_NAMES = ("localhost", "LOCALHOST:1", "127.0.0.1:65535", "127.9.9.9", "[::1]", "[::1]:8000")
OTHERS = (
    "", ":80", "localhost:x", "localhost:80@evil.example", "evil@localhost", "localhost evil.example",
    "[::1]evil.example", "[[::1]]", "[127.0.0.1]", "127.1", "127.0.0.1.", "localhost.evil.example", "10.0.0.1",
)  # fmt: skip


def test_without_a_key_only_names_of_this_machine_are_answered(hasty):
    for host in (*OWN_NAMES, *OTHERS):
        known = host in OWN_NAMES
        answer = hasty.get("/v1/models", headers={"Host": host.encode()})
        assert answer.status_code == (200 if known else 403), host
        assert known or answer.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("path", [b"/v1/completions", b"/healthz"])
def test_a_request_with_two_lengths_is_refused_and_what_follows_it_is_not_read(hasty, path):
    lengths = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with connected(hasty) as connection:
        connection.sendall(POST.replace(b"/v1/completions", path) + lengths + HEAD + b"\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"ambiguous_length" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


def test_every_answer_forbids_foreign_scripts_embedding_and_guesses_of_its_type(hasty):
    for path in ("/", "/v1/models", "/assets/icon.svg", "/healthz", "/nowhere"):
        headers = hasty.get(path).headers
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["content-security-policy"].startswith("default-src 'self'")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-request-id"]
