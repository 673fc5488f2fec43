"""Who is answered at all: keys, host names, the size and pace of bodies. And what every answer carries."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import re
import time
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcdm.serving.monitoring import Metrics, log_event, logger
from dcdm.serving.schemas import APIError
from dcdm.serving.settings import Settings

OPEN = ("/healthz", "/readyz")
"""Routes that say nothing but that the server is there."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z.-]+))(?::(?P<port>[0-9]{1,5}))?")
"""A Host header: a name or an address, version 6 in brackets, and perhaps a port."""


def names_loopback(header: str) -> bool:
    """Whether a Host header asks for this machine by a name that nobody else can have."""
    parts = HOST.fullmatch(header)
    if parts is None or int(parts["port"] or 0) >= 2**16:
        return False
    if parts["v6"] is not None:
        return ":" in parts["v6"] and is_loopback(parts["v6"])
    return is_loopback(parts["name"])


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Gate:
    """Stands before the application; an ASGI middleware, so that streams pass through it unbuffered."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self.open_requests = 0

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

        self.open_requests += 1
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
            self.open_requests -= 1
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
        if self.open_requests > self.settings.max_connections:
            raise APIError(503, "too many requests are open", code="busy", headers={"Retry-After": "1"})
        if self.settings.api_key is None:
            if not names_loopback(headers.get("host", "")):
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
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > most:
                        raise too_large
        except TimeoutError:
            raise APIError(
                408, f"the body took longer than {self.settings.body_seconds:g} seconds", code="body_timeout"
            ) from None
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
