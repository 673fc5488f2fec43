"""Worker processes that turn units into shards.

They are plain subprocesses that are told what to do over a pipe: nothing is forked from a process with threads,
no `__main__` is imported again, and a worker whose parent dies notices and ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from dcdm.config import DataError
from dcdm.data.planning import Unit
from dcdm.data.reading import Part
from dcdm.data.settings import DataConfig
from dcdm.data.shards import write_unit
from dcdm.data.tokenizers import Tokenizer

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from dcdm.data.workers import serve; serve()"


def run_units(
    units: list[Unit], folder: Path, tokenizer: Tokenizer, settings: DataConfig, workers: int
) -> Iterator[dict[str, Any]]:
    """The records of `units` as they are finished, in no particular order; one worker is this process itself."""
    if workers <= 1 or len(units) <= 1:
        for unit in units:
            yield write_unit(unit, folder, tokenizer, settings)
        return
    idle: SimpleQueue[_Worker] = SimpleQueue()
    crew = [_Worker(folder, settings) for _ in range(min(workers, len(units)))]
    for worker in crew:
        idle.put(worker)
    threads = ThreadPoolExecutor(len(crew))

    def do(unit: Unit) -> dict[str, Any]:
        worker = idle.get()
        try:
            return worker.do(unit)
        finally:
            idle.put(worker)

    try:
        for done in as_completed([threads.submit(do, unit) for unit in units]):
            yield done.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in crew:
            worker.stop()
        threads.shutdown()


class _Worker:
    """A subprocess and its pipe."""

    def __init__(self, folder: Path, settings: DataConfig) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        self._send({"folder": str(folder), "settings": asdict(settings)})

    def do(self, unit: Unit) -> dict[str, Any]:
        try:
            self._send(asdict(unit))
            assert self._process.stdout is not None
            answer = self._process.stdout.readline()
        except (OSError, ValueError):  # it died, or was stopped meanwhile
            answer = b""
        if not answer:
            raise RuntimeError(f"a worker process ended with code {self._process.wait()}; is the memory full?")
        result = json.loads(answer)
        if "error" in result:
            raise DataError(result["error"])
        return result

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()


def serve() -> None:
    """The worker's side: a line with the task, then a line per unit, until the pipe closes."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not pass for a result
    parent = os.getppid()
    still_wanted: Callable[[], bool] = lambda: os.getppid() == parent  # noqa: E731
    task = json.loads(sys.stdin.readline())
    folder, settings = Path(task["folder"]), DataConfig(**task["settings"])
    tokenizer = Tokenizer.load(folder / "tokenizer")
    for line in sys.stdin:
        unit = json.loads(line)
        parts = tuple(Part(**{**part, "stamp": tuple(part["stamp"])}) for part in unit["parts"])
        try:
            answer = write_unit(Unit(unit["number"], parts), folder, tokenizer, settings, still_wanted)
        except DataError as error:
            answer = {"error": str(error)}
        results.write(json.dumps(answer) + "\n")
        results.flush()
