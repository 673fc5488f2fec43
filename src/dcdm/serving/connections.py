"""Connections on which nothing is being answered: how long each may stay, and how many there may be.

They cost a caller nothing, so they must not keep others out: each is closed after a while, and where they become
too many the one that has been silent longest makes room for a new one.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

OTHER_FILES = 128
"""Open files of the process that are no connections: the model, the log, libraries."""


class SilentConnections:
    """Those of one server, the longest silent first, each with the timer that ends it."""

    def __init__(self, most: int, seconds: float) -> None:
        self.most, self.seconds = most, seconds
        self._timers: dict[TimedProtocol, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def add(self, connection: TimedProtocol) -> None:
        """Begin to wait for a request; one that is waited for already keeps its timer, whatever it has sent."""
        if connection in self._timers:
            return
        self._timers[connection] = connection.loop.call_later(self.seconds, self.close, connection)
        if len(self._timers) > self.most:
            self.close(next(iter(self._timers)))

    def remove(self, connection: TimedProtocol) -> None:
        if (timer := self._timers.pop(connection, None)) is not None:
            timer.cancel()

    def close(self, connection: TimedProtocol) -> None:
        self.remove(connection)
        connection.transport.close()


class TimedProtocol(H11Protocol):
    """uvicorn's protocol, with a limit of time until the headers of a request are complete; requests can end it."""

    def __init__(self, *args: Any, silent: SilentConnections, **more: Any) -> None:
        super().__init__(*args, **more)
        self.silent = silent
        self.app_state = {**self.app_state, "abort": self.abort}  # what requests find in their state

    def abort(self) -> None:
        """End the connection, whatever has not been sent."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.silent.remove(self)

    def _watch(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.silent.add(self)
        else:
            self.silent.remove(self)


def connections_possible(wanted: int) -> int:
    """How many silent connections, and as many busy ones, the process may hold.

    Its own limit of open files is raised to what they need, as far as the system allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return max(1, min(wanted, (raised - OTHER_FILES) // 2))
