"""One run: trained by the ordinary training command in a folder of its own, measured, and written as one JSON file.

Whatever is finished is never repeated: training goes on from its checkpoint, every measure is kept beside the
weights, and the result is written when all are there. It holds what was computed and is the same for an interrupted
and an uninterrupted run; what the machine did stands in a file of its own.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dcdm.config import ConfigError, ModelConfig, MoEConfig, ObjectiveConfig
from dcdm.files import digest, write_whole
from dcdm.reproduction.scale import TEST, TRAINING, TUNING, VALIDATION, ZERO_SHOT, Scale
from dcdm.reproduction.variants import Variant, variants

MACHINE, REFERENCE = "machine", "reference"  # folders beside the results of runs
FREQUENCIES = "frequencies"


@dataclass(frozen=True)
class RunSpec:
    """A variant with a seed at a scale."""

    scale: Scale
    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant.name}-s{self.seed}"

    @property
    def parent(self) -> RunSpec | None:
        if self.variant.parent is None:
            return None
        return RunSpec(self.scale, variants(self.scale)[self.variant.parent], self.seed)

    @property
    def model(self) -> ModelConfig:
        if self.parent is not None:
            return self.parent.model
        changes = dict(self.variant.model)
        if changes.get("moe") is not None:
            changes["moe"] = MoEConfig(**changes["moe"])
        return replace(self.scale.base, **changes)

    @property
    def objective(self) -> ObjectiveConfig:
        if self.parent is not None:
            return self.parent.objective
        rate = self.scale.bias_rate if self.model.routes_from_noise else None
        return ObjectiveConfig(**{"bias_rate": rate, **self.variant.objective})

    @property
    def steps(self) -> int:
        return self.train["train.steps"]

    @property
    def train(self) -> dict[str, Any]:
        return self.scale.train_settings(self.seed, tuning=self.parent is not None, rate=self.variant.rate)

    @property
    def evaluate_every(self) -> int:
        """Steps between points of the validation curve; only at the end where a point would take too long."""
        costly = self.model.routes_from_noise and (self.model.num_chunks or 0) > 8  # sequential bound, many chunks
        return self.steps if self.parent is not None or costly else -(-self.steps // self.scale.evaluations)

    def identity(self) -> str:
        """What weights and curves follow from, as a short hash; measures of the weights do not enter."""
        parts: dict[str, Any] = {
            "model": self.model.to_dict(), "objective": vars(self.objective), "train": self.train,
            "tokenizer": self.scale.tokenizer, "data": [*TRAINING, VALIDATION] if self.parent is None else [TUNING],
            "curve": [self.evaluate_every, self.scale.curve_windows, self.scale.curve_samples],
        }  # fmt: skip
        if self.parent is not None:
            parts["parent"] = self.parent.identity()
        return digest(parts)[:16]


@dataclass(frozen=True)
class Places:
    """Where things are: texts to read, folders to work in, results to keep."""

    data: Path
    work: Path
    results: Path

    def run(self, spec: RunSpec) -> Path:
        return self.work / spec.scale.name / spec.name

    def model(self, spec: RunSpec) -> Path:
        return self.run(spec) / "model"

    def prepared(self, scale: Scale, tuning: bool = False) -> Path:
        return self.work / scale.name / ("gsm8k" if tuning else "text")

    def result(self, spec: RunSpec) -> Path:
        return self.results / spec.scale.name / f"{spec.name}.json"

    def machine(self, spec: RunSpec) -> Path:
        return self.results / spec.scale.name / MACHINE / f"{spec.name}.json"

    def frequencies(self, scale: Scale) -> Path:
        return self.results / scale.name / REFERENCE / f"{FREQUENCIES}.json"

    def check(self) -> None:
        """Refuse a data folder in which something is missing, before anything starts."""
        needed = [*TRAINING, VALIDATION, TEST, *ZERO_SHOT.values()]
        if missing := [name for name in needed if not (self.data / name).is_file()]:
            raise ConfigError(
                f"--data {self.data} lacks {', '.join(missing)}; docs/reproduction.md says what belongs there"
            )


def is_done(spec: RunSpec, places: Places) -> bool:
    """Whether the result is there, of the same settings and with all of its measures."""
    try:
        result = json.loads(places.result(spec).read_bytes())
    except (OSError, ValueError):
        return False
    return is_current(result, spec)


def is_current(result: Mapping[str, Any], spec: RunSpec) -> bool:
    """Whether a stored result is what the run would give as it is defined now."""
    if result.get("identity") != spec.identity():
        return False
    with_, wanted = result.get("measured_with", {}), spec.variant.measures
    return all(name in result["measures"] and with_.get(name) == spec.scale.measured_with(name) for name in wanted)


def prepare_data(scale: Scale, places: Places) -> None:
    """Tokenise the training texts once; finished work is found."""
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


def carry_out(spec: RunSpec, places: Places) -> int:
    """Train, measure and write the result, or go on with it; 130 if interrupted, with all saved."""
    if is_done(spec, places):
        return 0
    started = time.time()
    if code := _train(spec, places):
        return code
    parts = {name: _measured(name, spec, places) for name in spec.variant.measures}
    figures = {name: part["figures"] for name, part in parts.items()}
    places.machine(spec).parent.mkdir(parents=True, exist_ok=True)
    machine = _machine(spec, places, {name: part["seconds"] for name, part in parts.items()}, started)
    write_whole(places.machine(spec), as_json(machine))
    write_whole(places.result(spec), as_json(_result(spec, places, figures)))
    return 0


def _train(spec: RunSpec, places: Places) -> int:
    from dcdm.io.export import export
    from dcdm.training.run import run as train

    folder, done = places.run(spec), places.model(spec)
    _forget_other(spec, folder)
    if done.exists():
        return 0
    if spec.parent is not None and (code := _train(spec.parent, places)):
        return code
    tuning = spec.parent is not None
    changes: dict[str, Any] = {f"model.{name}": value for name, value in spec.model.to_dict().items()}
    changes |= {f"objective.{name}": value for name, value in vars(spec.objective).items()}
    changes |= {
        **spec.train, "data.sources": (str(places.prepared(spec.scale, tuning)),), "tensorboard": False,
        "evaluate_every": spec.evaluate_every, "evaluate_sequences": spec.scale.curve_windows,
        "evaluate_samples": spec.scale.curve_samples, "checkpoint_every": max(1, spec.steps // 10),
        "keep_last": 1, "keep_best": 0, "log_every": max(1, spec.steps // 20),
    }  # fmt: skip
    if spec.parent is not None:
        changes["init"] = str(places.model(spec.parent))
    if code := train("mdlm-debug", folder, changes=changes, device="cpu"):
        return code
    aside = folder / "model.partial"
    shutil.rmtree(aside, ignore_errors=True)
    export(folder, aside)
    aside.rename(done)
    shutil.rmtree(folder / "checkpoints")
    return 0


def _forget_other(spec: RunSpec, folder: Path) -> None:
    """Remove what an earlier definition of this run left behind."""
    mark = folder / "identity"
    if folder.exists() and (not mark.exists() or mark.read_text() != spec.identity()):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(mark, spec.identity().encode())


def _measured(name: str, spec: RunSpec, places: Places) -> dict[str, Any]:
    """A measure's figures and seconds, computed once with the same settings."""
    from dcdm.reproduction.measures import measure

    path, settings = places.run(spec) / "measures" / f"{name}.json", spec.scale.measured_with(name)
    if path.exists() and (part := json.loads(path.read_bytes())).get("measured_with") == settings:
        return part
    started = time.perf_counter()
    figures = measure(name, spec, places)
    seconds = round(time.perf_counter() - started, 1)
    part = {"figures": figures, "seconds": seconds, "measured_with": settings}
    path.parent.mkdir(exist_ok=True)
    write_whole(path, as_json(part))
    return part


def _result(spec: RunSpec, places: Places, figures: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    import dcdm
    from dcdm.data.store import PreparedData
    from dcdm.io.load import find_model
    from dcdm.model.transformer import parameter_counts

    config = find_model(places.model(spec)).config
    total, active = parameter_counts(config)
    data = PreparedData.open(places.prepared(spec.scale, spec.parent is not None))
    return {
        "run": spec.name, "variant": spec.variant.name, "says": spec.variant.says, "seed": spec.seed,
        "scale": spec.scale.name, "identity": spec.identity(),
        "settings": {
            "model": config.to_dict(), "objective": vars(spec.objective), "train": spec.train,
            "tokenizer": spec.scale.tokenizer, "data": data.fingerprint,
            "parent": None if spec.parent is None else spec.parent.name,
        },
        "parameters": {"total": total, "active": active},
        "versions": {"dcdm": dcdm.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "measures": dict(figures), "measured_with": {name: spec.scale.measured_with(name) for name in figures},
    }  # fmt: skip


def _machine(spec: RunSpec, places: Places, measures: Mapping[str, float], started: float) -> dict[str, Any]:
    from dcdm.bench.harness import environment

    rows = [json.loads(line) for line in (places.run(spec) / "timing.jsonl").read_text().splitlines()]
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


def as_json(value: Any) -> bytes:
    """As a file of the results: indented, with a list of numbers on one line."""
    text = json.dumps(value, indent=1, sort_keys=True)
    text = re.sub(r"\[([^\[\]{}\"]*)\]", lambda found: "[" + " ".join(found[1].split()) + "]", text)
    return (text + "\n").encode()
