"""Carry out runs: each trained by the ordinary training loop in a folder of its own, measured, and written down.

Whatever is finished is never repeated: training resumes from its checkpoint, every measure is kept beside the
weights, and a run's result is written when all of them are there, then gathered into the results of its scale. A
queue (`work_off`) starts runs in processes of their own (`python -m dcdm.reproduction.run` with settings as JSON),
each with one thread; a stop is passed on to them and all is saved.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcdm.config import VERSION
from dcdm.files import stops_handled_by, write_whole
from dcdm.reproduction.results import (
    FREQUENCIES,
    Places,
    Results,
    changing_results,
    finished_result,
    gather,
    is_done,
    read_results,
)
from dcdm.reproduction.scale import TRAINING, TUNING, VALIDATION, Scale, scale
from dcdm.reproduction.variants import RunSpec, variants

INTERRUPTED = 130
PRESET = "mdlm-debug"  # where settings come from that no run of a comparison changes
POLL = 0.5  # seconds
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
OPERATIONS = 2.6e10  # per second of one core, as measured; used where no finished run says better
MEASURE_SECONDS = {
    "curve": 12, "heldout": 12, "zeroshot": 14, "frontier": 20, "policies": 15, "balance": 2, "contents": 2,
    "tasks": 130,
}  # fmt: skip


def expected_minutes(spec: RunSpec, results: Results) -> float:
    """Of one core: measured where a run of the variant has finished, else estimated."""
    for seed in (spec.seed, *range(spec.variant.seeds)):
        if (machine := results.machines.get((spec.variant.name, seed))) is not None:
            return sum(value for name, value in machine["seconds"].items() if name != "last start") / 60
    from dcdm.model.costs import bill

    training = spec.steps * spec.scale.batch_size * bill(spec.model).training / OPERATIONS
    return (training + sum(MEASURE_SECONDS[name] for name in spec.variant.measures)) / 60


# --- before the first run -----------------------------------------------------------------------------------------


def prepare_data(scale: Scale, places: Places) -> None:
    """Tokenise the training texts once; what is already prepared is reused."""
    from dcdm.data.prepare import prepare
    from dcdm.data.settings import DataConfig

    sources = [str(places.data / name) for name in TRAINING]
    text = prepare(
        sources, scale.tokenizer, places.prepared(scale), validation=[str(places.data / VALIDATION)], workers=1
    )
    if (places.data / TUNING).is_file():
        reading = DataConfig(prompt_field="question", response_field="answer")
        tuning = str(places.data / TUNING)
        prepare([tuning], text.tokenizer, places.prepared(scale, tuning=True), settings=reading, workers=1)


def measure_frequencies(scale: Scale, places: Places) -> None:
    """Store what single tokens' frequencies give on the held-out texts, unless it is stored already."""
    from dcdm.data.store import PreparedData
    from dcdm.reproduction.measures import frequencies

    data = PreparedData.open(places.prepared(scale))
    made_of = {"data": data.fingerprint, "windows": [scale.heldout_windows, scale.zeroshot_windows]}
    if read_results(places.results, scale.name).reference.get("made_of") == made_of:
        return
    measures = frequencies(scale, places, data)
    with changing_results(places.results, scale.name) as results:
        results.reference = {"run": FREQUENCIES, "made_of": made_of, "measures": measures}


# --- one run ------------------------------------------------------------------------------------------------------


def carry_out(spec: RunSpec, places: Places) -> int:
    """Train, measure and write the result into the run's folder, or resume; 130 if interrupted, with all saved."""
    if finished_result(spec, places) is not None or is_done(spec, read_results(places.results, spec.scale.name)):
        return 0
    started = time.time()
    if code := _train(spec, places):
        return code
    parts = {name: _measured(name, spec, places) for name in spec.variant.measures}
    figures = {name: part["figures"] for name, part in parts.items()}
    machine = _machine(spec, places, {name: part["seconds"] for name, part in parts.items()}, started)
    write_whole(places.machine(spec), _as_json(machine))
    write_whole(places.result(spec), _as_json(_result(spec, places, figures)))
    return 0


def _train(spec: RunSpec, places: Places) -> int:
    from dcdm.io.export import export
    from dcdm.io.load import load_init
    from dcdm.training.run import run_training

    folder, done = places.run(spec), places.model(spec)
    _forget_other(spec, folder)
    if done.exists():
        return 0
    if spec.parent is not None and (code := _train(spec.parent, places)):
        return code
    if code := run_training(PRESET, folder, changes=settings_of(spec, places), device="cpu", load_init=load_init):
        return code
    aside = folder / "model.partial"
    shutil.rmtree(aside, ignore_errors=True)
    export(folder, aside)
    aside.rename(done)
    shutil.rmtree(folder / "checkpoints")
    return 0


def settings_of(spec: RunSpec, places: Places) -> dict[str, Any]:
    """All that a run's training is told beside the preset, so that nothing of a comparison rests on the preset."""
    changes: dict[str, Any] = {f"model.{name}": value for name, value in spec.model.to_dict().items()}
    changes |= {f"objective.{name}": value for name, value in spec.objective.to_dict().items()}
    changes |= {
        "objective.t_shape": spec.objective.t_shape, "train.optimizer": "adamw", **spec.train,
        "data.sources": (str(places.prepared(spec.scale, spec.parent is not None)),), "tensorboard": False,
        "evaluate_every": spec.evaluate_every, "evaluate_sequences": spec.scale.curve_windows,
        "evaluate_samples": spec.scale.curve_samples, "checkpoint_every": max(1, spec.steps // 10),
        "keep_last": 1, "keep_best": 0, "log_every": max(1, spec.steps // 20),
    }  # fmt: skip
    if spec.parent is not None:
        changes["init"] = str(places.model(spec.parent))
    return changes


def _forget_other(spec: RunSpec, folder: Path) -> None:
    """Remove what an earlier definition of this run left behind."""
    mark = folder / ".identity"  # hidden: a run begins in a folder that holds nothing else
    if folder.exists() and (not mark.exists() or mark.read_text() != spec.identity()):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(mark, spec.identity().encode())


def _measured(name: str, spec: RunSpec, places: Places) -> dict[str, Any]:
    """A measure's figures and seconds, computed once with the same settings."""
    from dcdm.reproduction.measures import measure_run

    path, settings = places.run(spec) / "measures" / f"{name}.json", spec.scale.measured_with(name)
    if path.exists() and (part := json.loads(path.read_bytes())).get("measured_with") == settings:
        return part
    started = time.perf_counter()
    figures = measure_run(name, spec, places)
    seconds = round(time.perf_counter() - started, 1)
    part = {"figures": figures, "seconds": seconds, "measured_with": settings}
    path.parent.mkdir(exist_ok=True)
    write_whole(path, _as_json(part))
    return part


def _result(spec: RunSpec, places: Places, figures: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    from dcdm.data.store import PreparedData
    from dcdm.io.load import find_model
    from dcdm.model.transformer import parameter_counts

    config = find_model(places.model(spec)).config
    total, active = parameter_counts(config)
    data = PreparedData.open(places.prepared(spec.scale, spec.parent is not None))
    return {
        "run": spec.name, "variant": spec.variant.name, "says": spec.variant.label, "seed": spec.seed,
        "scale": spec.scale.name, "identity": spec.identity(),
        "settings": {
            "model": config.to_dict(), "objective": spec.objective.to_dict(), "train": spec.train,
            "tokenizer": spec.scale.tokenizer, "data": data.fingerprint,
            "parent": None if spec.parent is None else spec.parent.name,
        },
        "parameters": {"total": total, "active": active},
        "versions": {"dcdm": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        "measures": dict(figures), "measured_with": {name: spec.scale.measured_with(name) for name in figures},
    }  # fmt: skip


def _machine(spec: RunSpec, places: Places, measures: Mapping[str, float], started: float) -> dict[str, Any]:
    from dcdm.bench.harness import environment
    from dcdm.training.metrics import read_rows

    rows = list(read_rows(places.run(spec) / "timing.jsonl"))
    before = [0, *(row["step"] for row in rows)]
    seconds = sum(row["seconds_per_step"] * (row["step"] - last) for row, last in zip(rows, before, strict=False))
    speeds = [row["tokens_per_second"] for row in rows]
    return {
        **environment(), "processor": _processor(), "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": {"training": round(seconds, 1), **measures, "last start": round(time.time() - started, 1)},
        "training_tokens_per_second": round(statistics.median(speeds), 1),
    }  # fmt: skip


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _as_json(value: Any) -> bytes:
    """Indented, with a list of numbers on one line."""
    text = json.dumps(value, indent=1, sort_keys=True)
    text = re.sub(r"\[([^\[\]{}\"]*)\]", lambda match: "[" + " ".join(match[1].split()) + "]", text)
    return (text + "\n").encode()


# --- the queue ----------------------------------------------------------------------------------------------------


@dataclass
class RunningProcess:
    spec: RunSpec
    process: subprocess.Popen[bytes]
    started: float


@dataclass
class QueueState:
    """What an overview shows."""

    waiting: list[RunSpec]
    running: list[RunningProcess] = field(default_factory=list)
    done: list[RunSpec] = field(default_factory=list)
    failed: list[RunSpec] = field(default_factory=list)


def work_off(
    specs: Sequence[RunSpec], places: Places, jobs: int, show: Callable[[QueueState], None] = lambda state: None
) -> QueueState:
    """Carry out what is not done yet, in order, `jobs` at a time; SIGINT and SIGTERM stop all, their work saved."""
    results = gather(specs, places, specs[0].scale.name)
    finished = [spec for spec in specs if is_done(spec, results)]
    names = {spec.name for spec in finished}
    state = QueueState([spec for spec in specs if spec.name not in names], done=finished)
    with _stopping(state) as stopped:
        while state.running or (state.waiting and not stopped()):
            while not stopped() and len(state.running) < jobs and (spec := _ready(state, places)) is not None:
                state.waiting.remove(spec)
                state.running.append(begun := RunningProcess(spec, _start(spec, places), time.time()))
                if stopped():  # while it started, when the signal could not be passed on to it
                    begun.process.send_signal(signal.SIGINT)
            if not state.running:
                break
            show(state)
            time.sleep(POLL)
            if ended := _collect(state):
                gather(ended, places, results.scale)
    show(state)
    return state


def _ready(state: QueueState, places: Places) -> RunSpec | None:
    """The first waiting run whose start weights are there, or that has to make them itself."""
    coming = {one.name for one in (*state.waiting, *(running.spec for running in state.running))}

    def ready(spec: RunSpec) -> bool:
        parent = spec.parent
        return parent is None or places.model(parent).exists() or parent.name not in coming

    return next((spec for spec in state.waiting if ready(spec)), None)


def _start(spec: RunSpec, places: Places) -> subprocess.Popen[bytes]:
    settings = {
        "scale": spec.scale.name, "variant": spec.variant.name, "seed": spec.seed,
        "data": str(places.data), "work": str(places.work), "results": str(places.results),
    }  # fmt: skip
    log = places.log(spec)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "dcdm.reproduction.run", json.dumps(settings)],
            env={**os.environ, **dict.fromkeys(THREADS, "1")}, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True, preexec_fn=lambda: os.nice(10),
        )  # fmt: skip


def _collect(state: QueueState) -> list[RunSpec]:
    """Sort processes that have ended into the state; returns the runs that have finished."""
    finished = []
    for one in list(state.running):
        code = one.process.poll()
        if code is None:
            continue
        state.running.remove(one)
        if code == 0:
            finished.append(one.spec)
        elif code in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
            state.waiting.insert(0, one.spec)
        else:
            state.failed.append(one.spec)
    state.done += finished
    return finished


@contextmanager
def _stopping(state: QueueState) -> Iterator[Callable[[], bool]]:
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        for one in state.running:
            one.process.send_signal(signal.SIGKILL if asked else signal.SIGINT)
        asked = True

    with stops_handled_by(ask):
        yield lambda: asked


def main(text: str) -> int:
    """Carry out the run that the queue's settings describe; 130 if asked to stop."""
    settings = json.loads(text)
    chosen = scale(settings["scale"])
    spec = RunSpec(chosen, variants(chosen)[settings["variant"]], settings["seed"])
    places = Places(*(Path(settings[name]) for name in ("data", "work", "results")))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return carry_out(spec, places)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
