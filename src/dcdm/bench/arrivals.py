"""Requests that come when they come: Poisson arrivals at one server, the same for every schedule.

Callers that wait for their answer before they ask again slow down with the server and hide what waiting costs. Here
requests arrive at a given rate whether or not earlier ones are answered, with short and long texts mixed. All of it
is bounded: the number of requests, and the seconds until those that are not answered count as lost.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcdm.config import ConfigError

SHARES = (0.4, 0.7, 0.9)
"""Rates, as parts of what eight callers that wait for their answers get out of the server."""
LENGTHS = (8, 16, 32, 96)
PROMPTS = (8, 24)
"""New tokens and characters of prompts; each request draws from them."""
WAIT_SECONDS = 120.0


@dataclass(frozen=True)
class Arrival:
    at: float
    """Seconds from the beginning."""
    body: dict[str, Any]


@dataclass(frozen=True)
class Answered:
    """How one request fared; seconds from its arrival, None if it was refused or not answered in time."""

    shown: float | None
    """The first text of any place: models that write out of reading order show what they wrote ahead."""
    first: float | None
    """The first text that can be read from the beginning."""
    last: float | None
    tokens: int


LOST = Answered(None, None, None, 0)


@dataclass(frozen=True)
class OpenLoop:
    """What all requests of one rate and one schedule came to."""

    rate: float
    schedule: str
    requests: int
    lost: int
    shown_p50: float
    shown_p95: float
    first_p50: float
    first_p95: float
    last_p95: float
    tokens_per_second: float
    model: str = ""


Decoders = Sequence[dict[str, Any]]
"""Fields of a request that choose its decoder; each request draws one."""


def request_body(number: int, rng: random.Random, decoders: Decoders = ({},)) -> dict[str, Any]:
    prompt = "".join(rng.choice("abcdef (),:=") for _ in range(rng.choice(PROMPTS)))
    return {
        "prompt": prompt, "max_tokens": rng.choice(LENGTHS), "seed": number, "stop_at_eos": False, "stream": True,
        "stream_options": {"include_usage": True}, "provisional": True, **rng.choice(decoders),
    }  # fmt: skip


def poisson(rate: float, count: int, seed: int, decoders: Decoders = ({},)) -> list[Arrival]:
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
    shown, first, tokens, ended = None, None, 0, False
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
                for choice in data.get("choices", ()):
                    if choice["text"] and first is None:
                        first = now
                    if (choice["text"] or choice.get("provisional")) and shown is None:
                        shown = now
                if data.get("usage"):
                    tokens = data["usage"]["completion_tokens"]
            ended = ended or line.startswith(b"data: [DONE]")
    finally:
        writer.close()
    last = time.perf_counter() - began
    if not ended:
        return LOST
    first = last if first is None else first
    return Answered(first if shown is None else shown, first, last, tokens)


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


async def closed_loop(port: int, callers: int, each: int, decoders: Decoders = ({},)) -> float:
    """Answered requests a second of callers that ask again as soon as they are answered, or refused."""
    began = time.perf_counter()

    async def caller(number: int) -> int:
        rng = random.Random(number)
        bodies = (request_body(number * each + turn, rng, decoders) for turn in range(each))
        answers = [await ask(port, body) for body in bodies]
        return sum(answer.last is not None for answer in answers)

    answered = sum(await asyncio.gather(*map(caller, range(callers))))
    return answered / (time.perf_counter() - began)


def measure(ports: dict[str, int], count: int, decoders: Decoders, callers: int = 8) -> list[OpenLoop]:
    """Every rate at every schedule's server, taking turns with the same arrivals."""
    for port in ports.values():
        asyncio.run(closed_loop(port, callers, 1, decoders))  # to warm up
    each = max(1, count // callers)
    capacity = max(asyncio.run(closed_loop(port, callers, each, decoders)) for port in ports.values())
    if not capacity:
        raise ConfigError(f"the server answered no request; has its model room for {max(LENGTHS)} new tokens?")
    rows = []
    for number, share in enumerate(SHARES):
        arrivals = poisson(share * capacity, count, number, decoders)
        for schedule, port in ports.items():
            answers, seconds = asyncio.run(replay(port, arrivals))
            rows.append(summary(share * capacity, schedule, answers, seconds))
    return rows


def summary(rate: float, schedule: str, answers: Sequence[Answered], seconds: float) -> OpenLoop:
    answered = [answer for answer in answers if answer.last is not None]
    shown, first, last = (
        sorted(getattr(answer, name) for answer in answered) for name in ("shown", "first", "last")
    )
    return OpenLoop(
        rate, schedule, len(answers), len(answers) - len(answered), quantile(shown, 0.5), quantile(shown, 0.95),
        quantile(first, 0.5), quantile(first, 0.95), quantile(last, 0.95),
        sum(answer.tokens for answer in answered) / seconds,
    )  # fmt: skip


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values; nan if there are none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")
