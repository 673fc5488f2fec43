"""Answers: JSON, and streams that notice when nobody listens any more."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dcdm.serving.scheduler import QueuedRequest

GRACE_SECONDS = 10.0
"""How long after its deadline a stream may still be read."""

T = TypeVar("T")


def encode(value: Any) -> str:
    """JSON in ASCII, which holds whatever a caller may have sent."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content).encode()


class EventStream(StreamingResponse):
    """Server-sent events of a queued request, which is given up as soon as the caller is gone.

    A caller who stays and does not read holds up the sending, and with it whatever would look at the deadline.
    """

    def __init__(self, source: AsyncIterator[str], queued: QueuedRequest) -> None:
        super().__init__(source, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self.queued = queued

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self.stream_response(send))
        try:
            await _first(sending, receive, self.queued.deadline - time.monotonic() + GRACE_SECONDS)
        except TimeoutError:
            if abort := scope["state"].get("abort"):  # of our own server; closing would wait until all is read
                abort()
        except (OSError, ClientDisconnect):
            pass
        finally:
            self.queued.given_up = True
            await _close(sending)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the caller goes away before."""
    task = asyncio.ensure_future(work)
    try:
        return await _first(task, request.receive)
    finally:
        await _close(task)


async def _first(task: asyncio.Future[T], receive: Receive, seconds: float | None = None) -> T:
    """The result of a task, if it comes before the caller goes and within so many seconds."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.create_task(gone())
    try:
        both: set[asyncio.Future[Any]] = {task, watching}
        done, _ = await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise TimeoutError
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watching.cancel()


async def _close(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
    await asyncio.wait({task})
