"""Between the socket and the application: the process, its connections, who is answered, and what signals do."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import errno
import gc
import hmac
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcdm.config import ConfigError
from dcdm.files import stops_handled_by
from dcdm.serving.monitoring import Metrics, log_event, logger
from dcdm.serving.schemas import APIError
from dcdm.serving.settings import Settings

# --- connections -------------------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """The listening socket, to be taken before a model is loaded."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port {port} must lie between 0 and 65535; 0 takes a free one")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    listening = socket.socket(family, kind)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        advice = "another program listens there; choose another --port, or 0 for a free one"
        raise ConfigError(
            f"--port {port} on {host}: {advice if error.errno == errno.EADDRINUSE else error.strerror}"
        ) from error
    return listening


# --- who is answered ---------------------------------------------------------------------------------------------

OPEN = ("/healthz", "/readyz")
"""Routes that say nothing but that the server is there."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
OWN_NAME = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
"""A Host header that asks for this machine by a name that nobody else can have, perhaps with a port."""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Gate:
    """Stands before the application; an ASGI middleware, so that streams pass through it unbuffered."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 0
        notes = scope.setdefault("state", {}).setdefault("notes", {"id": f"req-{uuid4().hex}"})

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = notes["id"]
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._admit(scope)
            body = await self._body(scope, receive) if scope["method"] == "POST" else receive
            await self.app(scope, body, sending)
        except APIError as error:  # of this gate: the application answers its own
            await error.response(Connection="close")(scope, receive, sending)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of `tokenizers` is not an Exception; a handler's answers pass by this gate
            logger.exception("defect", extra={"data": {"id": notes["id"]}})
            self.metrics.failures.inc()
            if status:
                raise
            notes["code"] = "failed"
            defect = APIError(500, "the server has a defect; its log says where", code="failed")
            await defect.response()(scope, receive, sending)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.monotonic() - started
            self.metrics.requests.labels(route, str(status or "gone")).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            log_event(
                "request", method=scope["method"], route=route, status=status or None, seconds=round(seconds, 4),
                **notes,
            )  # fmt: skip

    def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may see other requests in it
            raise APIError(
                400, "give Content-Length or Transfer-Encoding, not both: they may disagree on where a body ends",
                code="ambiguous_length",
            )  # fmt: skip
        if scope["path"] in OPEN and scope["method"] != "POST":
            return
        if self.settings.api_key is None:
            if not OWN_NAME.fullmatch(headers.get("host", "")):
                raise APIError(
                    403, "without an API key only localhost, 127.0.0.1 and [::1] are answered; start the server "
                    "with --api-key to reach it by another name", code="host_not_allowed",
                )  # fmt: skip
        elif not _has_key(headers.get("authorization", ""), self.settings.api_key):
            raise APIError(
                401, "give the API key as 'Authorization: Bearer KEY', or as the password of HTTP Basic",
                code="invalid_api_key", headers={"WWW-Authenticate": 'Basic realm="dcdm", charset="UTF-8"'},
            )  # fmt: skip

    async def _body(self, scope: Scope, receive: Receive) -> Receive:
        """The whole body, within its limits, to be received once more."""
        headers, most = Headers(scope=scope), self.settings.max_body_bytes
        too_large = APIError(413, f"the body is larger than {most} bytes, the limit here", code="body_too_large")
        if int(headers.get("content-length", "0")) > most:  # h11 lets only digits through
            raise too_large
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > most:
                raise too_large
        # only now: a connection that is closed over an unread body is reset, and the caller may lose the answer
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise APIError(415, "send the body as Content-Type: application/json", code="unsupported_media_type")
        given = False

        async def again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        return again


def _has_key(authorization: str, key: str) -> bool:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            value = base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(value.strip().encode(), key.encode())


# --- the process -------------------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """uvicorn's server, which tells the application when it is asked to stop."""

    def __init__(self, app: FastAPI) -> None:
        settings = app.state.settings
        super().__init__(
            uvicorn.Config(
                app, log_config=None, access_log=False, server_header=False, lifespan="on",
                timeout_graceful_shutdown=int(settings.drain_seconds) + 5, h11_max_incomplete_event_size=1 << 16,
                http="h11",
            )
        )  # fmt: skip
        self.models, self.drain_seconds = app.state.models, settings.drain_seconds

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.models.drain()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self.drain_seconds, self.models.refuse_all)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # whoever started the thread stops it
            yield
            return
        with stops_handled_by(self.handle_exit):
            yield


def serve_app(app: FastAPI, listening: socket.socket) -> None:
    """Serve until a signal comes; then take no new requests and let the running ones finish."""
    gc.collect()
    gc.freeze()  # what is loaded stays: without it, full collections find what requests left behind too seldom
    asyncio.run(Server(app).serve([listening]))
