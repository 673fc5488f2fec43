"""Threads for what a request can make long before it reaches a model: rendered chats."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

from dcdm.serving.schemas import queue_full

T = TypeVar("T")

WAIT_SECONDS = 20.0
"""How long work may wait for a thread."""


class Workers:
    """A few threads that callers share by turns, whoever asks for more at once.

    Of one caller one thing is done at a time. Only so much may wait; who asks for more, or waits too long, is told
    to come again. Who is gone (whose task is cancelled) waits no longer.
    """

    def __init__(self, threads: int, most: int) -> None:
        self._threads, self._most = threads, most
        self._busy: set[str] = set()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller; who had the last turn comes last

    async def run(self, caller: str, work: Callable[..., T], *given: object) -> T:
        """What `work` gives, in a thread, when it is the caller's turn."""
        await self._turn(caller)
        try:
            return await to_thread.run_sync(work, *given, limiter=CapacityLimiter(1))  # its turn has come already
        finally:
            self._busy.remove(caller)
            self._next()

    async def _turn(self, caller: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._next()
        try:
            if (
                not turn.done()
                and sum(not one.done() for turns in self._waiting.values() for one in turns) > self._most
            ):
                raise TimeoutError
            async with asyncio.timeout(WAIT_SECONDS):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled():  # it came at that very moment
                self._busy.remove(caller)
                self._next()
            else:
                turn.cancel()
            if isinstance(error, TimeoutError):
                raise queue_full() from None
            raise

    def _next(self) -> None:
        for caller in list(self._waiting):
            if caller in self._busy or len(self._busy) == self._threads:
                continue
            turns = self._waiting.pop(caller)
            while turns and turns[0].cancelled():
                turns.popleft()
            if turns:
                turns.popleft().set_result(None)
                self._busy.add(caller)
            if turns:
                self._waiting[caller] = turns
