"""Threads for work that one request can make long: who wants much of it delays only others who want the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, fail_after, to_thread

from dcdm.serving.schemas import queue_full

SECONDS = 20.0
"""How long work may wait for a thread."""

T = TypeVar("T")


class Workers:
    """A few threads before which only so many may wait; more are told to come again."""

    def __init__(self, threads: int, most: int) -> None:
        self._threads, self._most = CapacityLimiter(threads), most

    async def run(self, work: Callable[..., T], *given: object) -> T:
        if self._threads.statistics().tasks_waiting >= self._most:
            raise queue_full()
        turn = object()
        try:
            with fail_after(SECONDS):
                await self._threads.acquire_on_behalf_of(turn)
        except TimeoutError:
            raise queue_full() from None
        try:
            return await to_thread.run_sync(work, *given, limiter=CapacityLimiter(1))  # its turn has come already
        finally:
            self._threads.release_on_behalf_of(turn)
