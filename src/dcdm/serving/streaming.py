"""Answers: JSON, and streams that notice when nobody listens any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dcdm.serving.scheduler import Ticket

T = TypeVar("T")


def encode(value: Any) -> str:
    """JSON in ASCII, which holds whatever a caller may have sent."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content).encode()


class EventStream(StreamingResponse):
    """Server-sent events of a ticket, which is given up as soon as the caller is gone."""

    def __init__(self, source: AsyncIterator[str], ticket: Ticket) -> None:
        super().__init__(source, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self.ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self.stream_response(send))
        try:
            await _first(sending, receive)
        except (OSError, ClientDisconnect):
            pass
        finally:
            self.ticket.given_up = True
            await _close(sending)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the caller goes away before."""
    task = asyncio.ensure_future(work)
    try:
        return await _first(task, request.receive)
    finally:
        await _close(task)


async def _first(task: asyncio.Future[T], receive: Receive) -> T:
    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.create_task(gone())
    try:
        both: set[asyncio.Future[Any]] = {task, watching}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watching.cancel()


async def _close(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
    await asyncio.wait({task})
