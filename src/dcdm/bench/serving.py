"""`dcdm bench serving`: eight callers of one server, with batching and without; and requests that come unasked.

Servers run in this process and take turns. First every caller asks again as soon as it has its answer; then
requests arrive at three rates (`arrivals`).
"""

from __future__ import annotations

import json as encoder
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

from dcdm.bench.arrivals import Decoders, OpenLoop, measure
from dcdm.bench.harness import Case, PathTiming, Run, environment, measure_case, print_table
from dcdm.config import ModelConfig
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer
from dcdm.model.transformer import Model, build
from dcdm.presets import preset
from dcdm.viewing.tables import Table

CLIENTS, REQUESTS, TOKENS = 8, 3, 64
ARRIVALS = 120
"""Requests of each rate."""
KINDS = ("ar-debug", "bdlm-debug", "lanes-debug", "dcdm-debug-causal")
"""Models that requests arrive at, with random weights: what matters is which places each forward fills."""
ALONE = "one at a time"
COMMITS = {"auto": 2.0, "chunk": None}
"""Policies, and the least ratio that batching is meant to reach."""


def cases(model: Path | None, written: dict[tuple[str, str], int] | None = None) -> list[Case]:
    """Of a folder, or of the debug size with random weights; `written` learns how many tokens a run wrote."""
    loaded = _load(model, "dcdm-debug-causal")
    written = {} if written is None else written

    def path(name: str, max_batch: int, commit: str) -> Callable[[], Run]:
        def make() -> Run:
            port = _start(*loaded, max_batch)

            def run() -> None:
                with ThreadPoolExecutor(CLIENTS) as pool:
                    counts = pool.map(lambda number: _caller(port, number, commit), range(CLIENTS))
                    written[_name(commit), name] = sum(counts)

            return run

        return make

    return [
        Case(
            _name(commit), {name: path(name, size, commit) for name, size in (("batched", 16), (ALONE, 1))},
            (ALONE,), target,
        )
        for commit, target in COMMITS.items()
    ]  # fmt: skip


def _name(commit: str) -> str:
    return f"{CLIENTS} callers, {commit}"


def _load(model: Path | None, otherwise: str) -> tuple[Model, Tokenizer]:
    """Of a folder, or of a preset with random weights."""
    if model is None:
        return build(preset(otherwise), seed=0).eval(), byte_tokenizer()
    from dcdm.serving.server import load_safetensors

    return load_safetensors(model)


def _start(model: Model, tokenizer: Tokenizer, max_batch: int) -> int:
    """A server in a thread of its own, which ends with the process; its port."""
    from dcdm.serving.app import create_app
    from dcdm.serving.server import BackgroundServer
    from dcdm.serving.settings import Settings

    settings = Settings(max_batch=max_batch, timeout_seconds=3600, max_queued=4096)
    app = create_app(model, tokenizer, settings)
    return BackgroundServer(app, drain_seconds=1).port


def _caller(port: int, number: int, commit: str) -> int:
    """Ask in turn; the number of tokens that were written."""
    written = 0
    connection = HTTPConnection("127.0.0.1", port)
    for turn in range(REQUESTS):
        body = {
            "prompt": f"def f{number}(", "max_tokens": TOKENS, "seed": number + CLIENTS * turn, "commit": commit
        }  # fmt: skip
        connection.request("POST", "/v1/completions", encoder.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"the server answered {answer.status}: {content.decode()}")
        written += encoder.loads(content)["usage"]["completion_tokens"]
    connection.close()
    return written


def measure_open_loop(model: Path | None, count: int) -> list[OpenLoop]:
    """Poisson arrivals at a server: of a folder, or of each of `KINDS`."""
    rows = []
    for name in KINDS if model is None else (model.name,):
        loaded = _load(model, name)
        ports = {"step": _start(*loaded, 16)}
        rows += [replace(row, model=name) for row in measure(ports, count, _decoders(loaded[0].config))]
    return rows


def _decoders(config: ModelConfig) -> Decoders:
    """What requests of mixed kinds ask of a model: numbers of lanes, or commit policies where there are any."""
    if config.lanes is not None:
        return [{"lanes": number} for number in config.lanes]
    return [{}] if config.kind == "ar" or config.predicts_from_left else [{"commit": "auto"}, {"commit": "steps:2"}]


def _print_open_loop(rows: list[OpenLoop]) -> None:
    names = ("shown_p50", "shown_p95", "first_p50", "first_p95", "last_p95")
    columns = ["model", "requests/s", "schedule", *(name.replace("_", " ") for name in names), "tokens/s", "lost"]
    lines = [
        [row.model, f"{row.rate:.2g}", row.schedule]
        + [f"{getattr(row, name):.3f} s" for name in names]
        + [f"{row.tokens_per_second:.0f}", str(row.lost)]
        for row in rows
    ]
    Table(columns, lines, text=("model", "schedule")).print()


def measure_serving(model: Path | None, repeats: int, json: bool, out: str | None, quick: bool = False) -> None:
    """Measure, and print a table or JSON."""
    from dcdm.serving.settings import require_packages

    require_packages()
    rows: list[PathTiming] = []
    written: dict[tuple[str, str], int] = {}
    for case in cases(model, written):
        rows += measure_case("serving", case, repeats, False, lambda text: None)
    speeds = [
        {"case": row.case, "path": row.path, "tokens_per_second": written[row.case, row.path] / row.median}
        for row in rows
    ]
    arrived = measure_open_loop(model, ARRIVALS if not quick else CLIENTS)
    line = encoder.dumps(
        {
            "environment": environment(), "rows": [row.__dict__ for row in rows], "speeds": speeds,
            "open_loop": [row.__dict__ for row in arrived],
        }
    )  # fmt: skip
    if json:
        print(line)
    else:
        print_table(rows, {})
        for speed in speeds:
            print(f"{speed['case']}, {speed['path']}: {speed['tokens_per_second']:.0f} tokens/s")
        _print_open_loop(arrived)
    if out:
        Path(out).write_text(line + "\n")
