"""Requests under names of other machines, or with two lengths, and what every answer forbids."""

from __future__ import annotations

import socket

import pytest

from live import live

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connected(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


@pytest.fixture(scope="module")
def server():
    with live() as running:
        yield running


OWN_NAMES = ("localhost", "LOCALHOST:1", "127.0.0.1:65535", "127.9.9.9", "[::1]", "[::1]:8000")
OTHERS = (
    "", ":80", "localhost:x", "localhost:80@evil.example", "evil@localhost", "localhost evil.example",
    "[::1]evil.example", "[[::1]]", "[127.0.0.1]", "127.1", "127.0.0.1.", "localhost.evil.example", "10.0.0.1",
)  # fmt: skip


def test_without_a_key_only_names_of_this_machine_are_answered(server):
    for host in (*OWN_NAMES, *OTHERS):
        known = host in OWN_NAMES
        answer = server.get("/v1/models", headers={"Host": host.encode()})
        assert answer.status_code == (200 if known else 403), host
        assert known or answer.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("path", [b"/v1/completions", b"/healthz"])
def test_a_request_with_two_lengths_is_refused_and_what_follows_it_is_not_read(server, path):
    lengths = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with connected(server) as connection:
        connection.sendall(POST.replace(b"/v1/completions", path) + lengths + HEAD + b"\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"ambiguous_length" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


def test_every_answer_forbids_foreign_scripts_embedding_and_guesses_of_its_type(server):
    for path in ("/", "/v1/models", "/assets/icon.svg", "/healthz", "/nowhere"):
        headers = server.get(path).headers
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["content-security-policy"].startswith("default-src 'self'")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-request-id"]
