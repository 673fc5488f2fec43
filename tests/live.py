"""A server on a port of this machine, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

import tiny
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer
from dcdm.decoding.batch import ContinuousBatch
from dcdm.model.transformer import Model
from dcdm.serving.app import create_app
from dcdm.serving.server import Server, listen
from dcdm.serving.settings import Settings

NAME = "tiny"


def tiny_model(kind: str = "causal", **changes: Any) -> tuple[Model, Tokenizer]:
    """A float64 model over bytes: its texts do not depend on rounding."""
    return tiny.model(kind, 257, **changes), byte_tokenizer()


class BackgroundServer:
    """A server on a free port of this machine, in a thread of this process."""

    def __init__(self, app: Any) -> None:
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


class Live(BackgroundServer):
    """A server with a client of its own."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self.app, self.scheduler = app, app.state.scheduler
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.Client(base_url=self.url, timeout=60, limits=limits)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self._client.post(path, **({"json": body} | more))

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self._client.get(path, **more)

    def figure(self, name: str) -> float:
        """A value of /metrics, summed over the labels that are not named; 0 if it has none yet."""
        headers = {"Authorization": f"Bearer {self.app.state.served.settings.api_key}"}
        return figure_of(self.get("/metrics", headers=headers).text, name)


def figure_of(metrics: str, name: str) -> float:
    """The sum of a figure's samples that have the labels in `name`."""
    name, _, labels = name.partition("{")
    wanted = [label for label in labels.rstrip("}").split(",") if label]
    lines = [line for line in metrics.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.split()[-1]) for line in lines if all(label in line for label in wanted))


@contextlib.contextmanager
def live(kind: str = "causal", *, model: Any = None, **settings: Any) -> Iterator[Live]:
    network, tokenizer = model or tiny_model(kind)
    server = Live(create_app(network, tokenizer, Settings(**{"drain_seconds": 5, **settings}), NAME))
    try:
        yield server
    finally:
        server.stop()


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last, "it never came to pass"
        time.sleep(0.005)


def slow_down(monkeypatch: Any, seconds: float = 0.02) -> None:
    """Every forward of a served model takes this much longer."""
    fast = ContinuousBatch.step

    def slow(decoding: Any) -> int:
        time.sleep(seconds)
        return fast(decoding)

    monkeypatch.setattr(ContinuousBatch, "step", slow)


def events(text: str) -> list[tuple[str, dict]]:
    """Server-sent events of /v1/denoise."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found
