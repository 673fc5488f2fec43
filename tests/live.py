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
from dcdm.commands.serve import listen, server_of
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer
from dcdm.model.transformer import Model
from dcdm.serving import scheduler
from dcdm.serving.app import create_app
from dcdm.serving.settings import Settings

NAME = "tiny"


def tiny_model(kind: str = "causal", **changes: Any) -> tuple[Model, Tokenizer]:
    """A float64 model over bytes: its texts do not depend on rounding."""
    return tiny.model(kind, 257, **changes), byte_tokenizer()


class Live:
    def __init__(self, app: Any, drain_seconds: float = 5) -> None:
        self.app, self.scheduler = app, app.state.scheduler
        listening = listen("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.Client(base_url=self.url, timeout=60, limits=limits)
        self.server = server_of(app, drain_seconds)
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([listening])), daemon=True)
        self._thread.start()
        until(lambda: self.server.started)

    def ask_to_end(self) -> None:
        """What the signal does."""
        self.server.handle_exit(15, None)

    def end(self) -> None:
        self.ask_to_end()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self._client.post(path, **({"json": body} | more))

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self._client.get(path, **more)

    def figure(self, name: str) -> float:
        """A value of /metrics, 0 if it has none yet."""
        headers = {"Authorization": f"Bearer {self.app.state.served.settings.api_key}"}
        lines = self.get("/metrics", headers=headers).text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)


@contextlib.contextmanager
def live(kind: str = "causal", *, drain_seconds: float = 5, model: Any = None, **settings: Any) -> Iterator[Live]:
    made, tokenizer = model or tiny_model(kind)
    server = Live(create_app(made, tokenizer, Settings(**settings), NAME), drain_seconds)
    try:
        yield server
    finally:
        server.end()


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last, "it never came to pass"
        time.sleep(0.005)


def slow_down(monkeypatch: Any, seconds: float = 0.02) -> None:
    """Every forward of a served model takes this much longer."""
    fast = scheduler.generate

    def slow(*args: Any, cancel: Any, **more: Any) -> Any:
        def asked(row: int) -> bool:
            time.sleep(seconds)
            return cancel(row)

        return fast(*args, cancel=asked, **more)

    monkeypatch.setattr(scheduler, "generate", slow)


def events(text: str) -> list[tuple[str, dict]]:
    """Server-sent events of /v1/denoise."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found
