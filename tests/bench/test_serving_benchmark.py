"""`benchmarks/serving.py`: arrivals, what counts as lost, and a small run of the whole."""

import asyncio
import importlib.util
import itertools
import json
import math
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parent.parent.parent / "benchmarks" / "serving.py"


@pytest.fixture(scope="module")
def load():
    spec = importlib.util.spec_from_file_location("serving_benchmark", FILE)
    module = sys.modules["serving_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_rate_meets_a_server_that_batches_and_one_that_does_not(load, monkeypatch, capsys):
    monkeypatch.setattr(load, "PRESETS", ("lanes-debug",))
    monkeypatch.setattr(load, "CALLERS", 2)
    monkeypatch.setattr(load, "LENGTHS", (2, 5))
    monkeypatch.setattr(load, "SHARES", (0.5,))
    load.main(["--requests", "4"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["server"] for row in rows] == ["batched", "one at a time"] * 2
    assert [row["rate"] is None for row in rows] == [True, True, False, False]
    assert all(row["lost"] == 0 < row["first_p95"] <= row["last_p95"] for row in rows)
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_arrivals_are_a_poisson_process_and_what_is_refused_is_lost(load):
    arrivals = load.poisson(5.0, 4000, 1, [{}])
    gaps = [b.at - a.at for a, b in itertools.pairwise(arrivals)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 5, rel=0.05)
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)
    assert load.poisson(5.0, 9, 1, [{}]) == arrivals[:9], "the same for every server"
    answers = [load.Answered(0.2, 0.3, 4), load.Answered(0.3, 0.4, 4), load.LOST]
    row = load.summary("model", "batched", 5.0, answers, 2.0)
    assert (row.requests, row.lost, row.first_p95, row.tokens_per_second) == (3, 1, 0.3, 4.0)


def test_a_stream_that_ends_with_an_error_is_lost(load):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"text": "a"}]}\n\n')
        writer.write(b'data: {"error": {"code": "timeout"}}\n\ndata: [DONE]\n\n')
        await writer.drain()
        writer.close()

    async def asked():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            return await load.ask(server.sockets[0].getsockname()[1], {})

    assert asyncio.run(asked()) == load.LOST
