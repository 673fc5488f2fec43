"""Load on one server: callers that wait for their answers, then requests that arrive by themselves.

    python benchmarks/serving.py [MODEL] [--requests N]

Callers that wait for their answer before they ask again slow down with the server and hide what waiting costs. So
requests also arrive as a Poisson process, at three rates, whether or not earlier ones are answered, with short and
long texts mixed. All of it is bounded: the number of requests, and the seconds until those that are not answered
count as lost. A server that batches and one that answers one text at a time run in this process and take turns with
the same requests; without MODEL, models of debug size with random weights, since what matters is which places each
forward pass fills. Prints a table, and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dcdm.bench.paths import environment
from dcdm.config import ModelConfig
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer
from dcdm.io.load import load_model
from dcdm.kinds import build
from dcdm.model.transformer import Model
from dcdm.presets import preset
from dcdm.viewing.tables import Table

PRESETS = ("ar-debug", "bdlm-debug", "lanes-debug", "dcdm-debug-causal")
BATCHES = {"batched": 16, "one at a time": 1}
CALLERS = 8
SHARES = (0.4, 0.7, 0.9)
"""Rates, as parts of what the callers that wait get out of the server that batches."""
LENGTHS = (8, 16, 32, 96)
PROMPTS = (8, 24)
"""New tokens and characters of prompts; each request draws from them."""
WAIT_SECONDS = 120.0

Decoders = Sequence[dict[str, Any]]
"""Fields of a request that choose its decoder; each request draws one."""


@dataclass(frozen=True)
class Arrival:
    at: float
    """Seconds from the beginning."""
    body: dict[str, Any]


@dataclass(frozen=True)
class Answered:
    """How one request fared; seconds from its arrival, None if it was refused or not answered in time."""

    first: float | None
    """The first text that can be read from the beginning."""
    last: float | None
    tokens: int


LOST = Answered(None, None, 0)


@dataclass(frozen=True)
class Load:
    """What all requests of one rate at one server came to; the rate is None for callers that wait."""

    model: str
    server: str
    rate: float | None
    requests: int
    lost: int
    first_p50: float
    first_p95: float
    last_p95: float
    tokens_per_second: float


# --- requests ----------------------------------------------------------------------------------------------------


def request_body(number: int, rng: random.Random, decoders: Decoders) -> dict[str, Any]:
    prompt = "".join(rng.choice("abcdef (),:=") for _ in range(rng.choice(PROMPTS)))
    return {
        "prompt": prompt, "max_tokens": rng.choice(LENGTHS), "seed": number, "stop_at_eos": False, "stream": True,
        "stream_options": {"include_usage": True}, **rng.choice(decoders),
    }  # fmt: skip


def decoders_of(config: ModelConfig) -> Decoders:
    """What requests of mixed kinds ask of a model: numbers of lanes, or commit policies where there are any."""
    if config.lanes is not None:
        return [{"lanes": number} for number in config.lanes]
    return [{}] if config.kind == "ar" or config.predicts_from_left else [{"commit": "auto"}, {"commit": "steps:2"}]


def poisson(rate: float, count: int, seed: int, decoders: Decoders) -> list[Arrival]:
    """`count` requests, on average `rate` of them a second."""
    rng, at, arrivals = random.Random(seed), 0.0, []
    for number in range(count):
        at += rng.expovariate(rate)
        arrivals.append(Arrival(at, request_body(number, rng, decoders)))
    return arrivals


async def ask(port: int, body: dict[str, Any]) -> Answered:
    """One streamed completion over a connection of its own."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    first, tokens, ended = None, 0, False
    try:
        writer.write(head.encode() + content)
        await writer.drain()
        if b" 200 " not in await reader.readline():
            return LOST
        async for line in reader:
            if line.startswith(b"data: {"):
                data = json.loads(line[6:])
                if "error" in data:
                    return LOST
                now = time.perf_counter() - began
                if first is None and any(choice["text"] for choice in data.get("choices", ())):
                    first = now
                if data.get("usage"):
                    tokens = data["usage"]["completion_tokens"]
            ended = ended or line.startswith(b"data: [DONE]")
    finally:
        writer.close()
    last = time.perf_counter() - began
    if not ended:
        return LOST
    return Answered(last if first is None else first, last, tokens)


async def replay(port: int, arrivals: Sequence[Arrival]) -> tuple[list[Answered], float]:
    """Send every request at its time; how each fared, and the seconds until the last was answered."""
    began = time.perf_counter()

    async def one(arrival: Arrival) -> Answered:
        await asyncio.sleep(max(0.0, began + arrival.at - time.perf_counter()))
        try:
            return await asyncio.wait_for(ask(port, arrival.body), WAIT_SECONDS)
        except (TimeoutError, OSError):
            return LOST

    answers = await asyncio.gather(*map(one, arrivals))
    return list(answers), time.perf_counter() - began


async def waiting_callers(port: int, each: int, decoders: Decoders) -> tuple[list[Answered], float]:
    """Callers that ask again as soon as they are answered, or refused; how requests fared, and the seconds."""
    began = time.perf_counter()

    async def caller(number: int) -> list[Answered]:
        rng = random.Random(number)
        return [await ask(port, request_body(number * each + turn, rng, decoders)) for turn in range(each)]

    answers = await asyncio.gather(*map(caller, range(CALLERS)))
    return [one for several in answers for one in several], time.perf_counter() - began


# --- measuring ---------------------------------------------------------------------------------------------------


def start_server(model: Model, tokenizer: Tokenizer, max_batch: int) -> int:
    """A server in a thread of its own, which ends with the process; its port."""
    from dcdm.serving.app import create_app
    from dcdm.serving.server import listen, serve_app
    from dcdm.serving.settings import Settings

    settings = Settings(max_batch=max_batch, timeout_seconds=3600, max_queued=4096, drain_seconds=1)
    app, listening = create_app(model, tokenizer, settings), listen("127.0.0.1", 0)
    threading.Thread(target=serve_app, args=(app, listening), daemon=True).start()
    return int(listening.getsockname()[1])


def measure(name: str, model: Model, tokenizer: Tokenizer, count: int) -> list[Load]:
    """Waiting callers, then every rate, at each of `BATCHES`; the same requests for all."""
    ports = {server: start_server(model, tokenizer, size) for server, size in BATCHES.items()}
    decoders, rows = decoders_of(model.config), []
    for server, port in ports.items():
        asyncio.run(waiting_callers(port, 1, decoders))  # to warm up
        answers, seconds = asyncio.run(waiting_callers(port, max(1, count // CALLERS), decoders))
        rows.append(summary(name, server, None, answers, seconds))
        if server == "batched":
            capacity = sum(answer.last is not None for answer in answers) / seconds
    if not capacity:
        raise SystemExit(f"the server answered no request; has its model room for {max(LENGTHS)} new tokens?")
    for number, share in enumerate(SHARES):
        arrivals = poisson(share * capacity, count, number, decoders)
        for server, port in ports.items():
            rows.append(summary(name, server, share * capacity, *asyncio.run(replay(port, arrivals))))
    return rows


def summary(model: str, server: str, rate: float | None, answers: Sequence[Answered], seconds: float) -> Load:
    answered = [answer for answer in answers if answer.last is not None]
    first, last = (sorted(getattr(answer, name) for answer in answered) for name in ("first", "last"))
    return Load(
        model, server, rate, len(answers), len(answers) - len(answered),
        quantile(first, 0.5), quantile(first, 0.95), quantile(last, 0.95),
        sum(answer.tokens for answer in answered) / seconds,
    )  # fmt: skip


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values; nan if there are none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def print_loads(rows: Sequence[Load]) -> None:
    names = ("first_p50", "first_p95", "last_p95")
    columns = ["model", "server", "requests/s", *(name.replace("_", " ") for name in names), "tokens/s", "lost"]
    lines = [
        [row.model, row.server, "as answered" if row.rate is None else f"{row.rate:.2g}"]
        + [f"{getattr(row, name):.3f} s" for name in names]
        + [f"{row.tokens_per_second:.0f}", str(row.lost)]
        for row in rows
    ]
    Table(columns, lines, text=("model", "server")).print()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="an exported folder or a run (default: random weights)")
    parser.add_argument("--requests", type=int, default=120, help="of each rate")
    given = parser.parse_args(arguments)
    rows: list[Load] = []
    if given.model is not None:
        rows += measure(given.model.name, *load_model(given.model), given.requests)
    else:
        for name in PRESETS:
            rows += measure(name, build(preset(name), seed=0).eval(), byte_tokenizer(), given.requests)
    print_loads(rows)
    print(json.dumps({"environment": environment(), "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
