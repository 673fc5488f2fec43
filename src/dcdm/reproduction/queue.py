"""Runs in processes of their own, several at a time, each with one thread; a stop is passed on and all is saved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dcdm.files import stops_handled_by
from dcdm.reproduction.runs import Places, RunSpec, is_done

INTERRUPTED = 130
POLL = 0.5  # seconds
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass
class Running:
    spec: RunSpec
    process: subprocess.Popen[bytes]
    started: float


@dataclass
class State:
    """What an overview shows."""

    waiting: list[RunSpec]
    running: list[Running] = field(default_factory=list)
    done: list[RunSpec] = field(default_factory=list)
    failed: list[RunSpec] = field(default_factory=list)


def work_off(
    specs: Sequence[RunSpec], places: Places, jobs: int, show: Callable[[State], None] = lambda state: None
) -> State:
    """Carry out what is not done yet, in order, `jobs` at a time; SIGINT and SIGTERM stop all, their work saved."""
    finished = [spec for spec in specs if is_done(spec, places)]
    names = {spec.name for spec in finished}
    state = State([spec for spec in specs if spec.name not in names], done=finished)
    with _stopping(state) as stopped:
        while state.running or (state.waiting and not stopped()):
            while not stopped() and len(state.running) < jobs and (spec := _ready(state, places)) is not None:
                state.waiting.remove(spec)
                state.running.append(begun := Running(spec, _start(spec, places), time.time()))
                if stopped():  # while it started, when the signal could not be passed on to it
                    begun.process.send_signal(signal.SIGINT)
            if not state.running:
                break
            show(state)
            time.sleep(POLL)
            _collect(state)
    show(state)
    return state


def _ready(state: State, places: Places) -> RunSpec | None:
    """The first waiting run whose start weights are there, or that has to make them itself."""
    coming = {one.name for one in (*state.waiting, *(running.spec for running in state.running))}

    def ready(spec: RunSpec) -> bool:
        parent = spec.parent
        return parent is None or places.model(parent).exists() or parent.name not in coming

    return next((spec for spec in state.waiting if ready(spec)), None)


def _start(spec: RunSpec, places: Places) -> subprocess.Popen[bytes]:
    given = {
        "scale": spec.scale.name, "variant": spec.variant.name, "seed": spec.seed,
        "data": str(places.data), "work": str(places.work), "results": str(places.results),
    }  # fmt: skip
    log = log_of(spec, places)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "dcdm.reproduction.worker", json.dumps(given)],
            env={**os.environ, **dict.fromkeys(THREADS, "1")}, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True, preexec_fn=lambda: os.nice(10),
        )  # fmt: skip


def log_of(spec: RunSpec, places: Places) -> Path:
    """What a run says while it works."""
    return places.work / spec.scale.name / "logs" / f"{spec.name}.txt"


def _collect(state: State) -> None:
    for one in list(state.running):
        code = one.process.poll()
        if code is None:
            continue
        state.running.remove(one)
        if code == 0:
            state.done.append(one.spec)
        elif code in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
            state.waiting.insert(0, one.spec)
        else:
            state.failed.append(one.spec)


@contextmanager
def _stopping(state: State) -> Iterator[Callable[[], bool]]:
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        for one in state.running:
            one.process.send_signal(signal.SIGKILL if asked else signal.SIGINT)
        asked = True

    with stops_handled_by(ask):
        yield lambda: asked
