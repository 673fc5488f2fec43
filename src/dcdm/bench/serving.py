"""`dcdm bench serving`: eight callers of one server, with batching and without.

Both servers run in this process and take turns. Every caller asks again as soon as it has its answer.
"""

from __future__ import annotations

import asyncio
import json as encoder
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

from dcdm.bench.harness import Case, Row, Run, environment, measure, print_table
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer
from dcdm.model.transformer import Model, build
from dcdm.presets import preset

CLIENTS, REQUESTS, TOKENS = 8, 3, 64
COMMITS = {"auto": 2.0, "chunk": None}
"""Policies, and the least ratio that batching is meant to reach."""


def cases(model: Path | None) -> list[Case]:
    """Of a folder, or of the debug size with random weights."""
    loaded = _load(model)

    def path(max_batch: int, commit: str) -> Callable[[], Run]:
        def make() -> Run:
            port = _start(*loaded, max_batch)

            def run() -> None:
                with ThreadPoolExecutor(CLIENTS) as pool:
                    list(pool.map(lambda number: _caller(port, number, commit), range(CLIENTS)))

            return run

        return make

    return [
        Case(
            f"{CLIENTS} callers, {commit}",
            {"batched": path(16, commit), "one at a time": path(1, commit)}, ("one at a time",), target,
        )
        for commit, target in COMMITS.items()
    ]  # fmt: skip


def _load(model: Path | None) -> tuple[Model, Tokenizer]:
    if model is None:
        return build(preset("dcdm-debug-causal"), seed=0).eval(), byte_tokenizer()
    from dcdm.serving.loading import load

    return load(model)


def _start(model: Model, tokenizer: Tokenizer, max_batch: int) -> int:
    """A server in a thread of its own, which ends with the process; its port."""
    from dcdm.serving.app import create_app
    from dcdm.serving.command import listen, server_of
    from dcdm.serving.settings import Settings

    server = server_of(create_app(model, tokenizer, Settings(max_batch=max_batch, timeout_seconds=3600)), 1)
    listening = listen("127.0.0.1", 0)
    threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return int(listening.getsockname()[1])


def _caller(port: int, number: int, commit: str) -> None:
    connection = HTTPConnection("127.0.0.1", port)
    for turn in range(REQUESTS):
        body = {
            "prompt": f"def f{number}(", "max_tokens": TOKENS, "seed": number + CLIENTS * turn, "commit": commit
        }  # fmt: skip
        connection.request("POST", "/v1/completions", encoder.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"the server answered {answer.status}: {said.decode()}")
    connection.close()


def run(model: Path | None, repeats: int, json: bool, out: str | None) -> None:
    """Table to the terminal, JSON on request."""
    from dcdm.serving.command import require_extra

    require_extra()
    rows: list[Row] = []
    for case in cases(model):
        rows += measure("serving", case, repeats, False, lambda text: None)
    asked = CLIENTS * REQUESTS * TOKENS
    speeds = [{"case": row.case, "path": row.path, "tokens_per_second": asked / row.median} for row in rows]
    line = encoder.dumps({
        "environment": environment(), "rows": [row.__dict__ for row in rows], "tokens": asked, "speeds": speeds
    })  # fmt: skip
    if json:
        print(line)
    else:
        print_table(rows, {})
        for speed in speeds:
            print(f"{speed['case']}, {speed['path']}: {speed['tokens_per_second']:.0f} tokens/s")
    print(f"{asked} tokens asked for in each run (fewer where a text ends early)", file=sys.stderr)
    if out:
        Path(out).write_text(line + "\n")
