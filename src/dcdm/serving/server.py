"""The process: its socket, uvicorn with limits on idle connections, and what signals do."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import resource
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from dcdm.config import ConfigError
from dcdm.files import stops_handled_by


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


OTHER_FILES = 128
"""Open files of the process that are no connections: the model, the log, libraries."""


class SilentConnections:
    """Connections on which nothing is being answered, the longest silent first, each with the timer that ends it.

    They cost a caller nothing, so they must not keep others out: each is closed after a while, and where they
    become too many the one that has been silent longest makes room for a new one.
    """

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


class Server(uvicorn.Server):
    """uvicorn's server, which tells the application when it is asked to stop."""

    def __init__(self, app: FastAPI) -> None:
        settings = app.state.settings
        silent = SilentConnections(connections_possible(settings.max_connections), settings.head_seconds)
        super().__init__(
            uvicorn.Config(
                app, log_config=None, access_log=False, server_header=False, lifespan="on",
                timeout_graceful_shutdown=int(settings.drain_seconds) + 5, h11_max_incomplete_event_size=1 << 16,
                http=cast(Any, partial(TimedProtocol, silent=silent)),
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


class BackgroundServer:
    """A server on a free port of this machine, in a thread of this process."""

    def __init__(self, app: FastAPI) -> None:
        listening = listen("127.0.0.1", 0)
        self.port = int(listening.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = Server(app)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve([listening])), name="server", daemon=True
        )
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server ended before it had started; its log says why")
            time.sleep(0.005)

    def ask_to_stop(self) -> None:
        """What SIGTERM does to a server with a process of its own."""
        self._server.handle_exit(15, None)

    def stop(self, seconds: float = 30) -> None:
        self.ask_to_stop()
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise RuntimeError(f"the server still runs {seconds:g} seconds after it was asked to stop")

    def __enter__(self) -> BackgroundServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
