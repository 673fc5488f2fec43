"""Whole runs of `dcdm train`, killed by SIGKILL from the preparation of the data to the last checkpoint.

Each attempt is a process of its own that runs the command with one of its functions watched: at a chosen call of
it the process kills itself. The same command is started again after every kill, and the
run must end with the bytes of one that nobody disturbed.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from corpora import prose, tree
from dcdm.training.checkpoint_folder import load_record, load_weights, newest_whole
from ranks import Child, Fault, found, half_a_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

EVERY = 2  # steps between checkpoints


@dataclass(frozen=True)
class Run:
    """The command, and where it works."""

    folder: Path
    corpus: Path
    steps: int

    @property
    def checkpoints(self) -> Path:
        return self.folder / "run" / "checkpoints"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def events(self) -> Path:
        """What the last attempt did, line by line."""
        return self.folder / "events"

    def arguments(self) -> list[str]:
        settings = {
            "model.num_layers": 2, "model.hidden_size": 32, "model.context_length": 32, "train.warmup_steps": 2,
            "train.ema_decay": 0.9, "evaluate_sequences": 4, "evaluate_samples": 2, "keep_last": 2,
            "tensorboard": "false", "data.workers": 1, "evaluate_every": 5,
        }  # fmt: skip
        return [
            "train", "--preset", "dcdm-debug", "--run", str(self.folder / "run"), "--data", str(self.corpus),
            "--tokenizer", "bpe:300", "--steps", str(self.steps), "--batch-size", "4", "--device", "cpu",
            "--checkpoint-every", str(EVERY), "--set", *(f"{name}={value}" for name, value in settings.items()),
        ]  # fmt: skip


# --- inside the process -------------------------------------------------------------------------------------------


def attempt(run: Run, fault: Fault | None) -> int:
    """The command in this process, with `fault` in it; its exit code, should it live that long."""
    os.environ["DCDM_CACHE"] = str(run.cache)
    output = os.open(run.folder / "output", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    run.events.unlink(missing_ok=True)
    from dcdm.cli import main
    from dcdm.data import prepare as preparing

    preparing.UNIT_BYTES = (2_000, 2_000)  # many units of a small corpus
    watch("dcdm.training.metrics:Recorder.on_resume", lambda _, step: tell(run, "from", step))
    watch("dcdm.training.metrics:Recorder.on_step", lambda _, report: tell(run, "step", report.step + 1))
    watch("dcdm.training.checkpoint:collect", lambda state: tell(run, "saving"))
    if fault is not None:
        fault.arm(lambda: tell(run, "killed", fault.phase))
    try:
        main(run.arguments())
    except SystemExit as ending:
        return int(ending.code or 0)
    return 0


def watch(place: str, before: Callable[..., None]) -> None:
    owner, name, original = found(place)

    def watched(*arguments: Any, **named: Any) -> Any:
        before(*arguments, **named)
        return original(*arguments, **named)

    setattr(owner, name, watched)


def tell(run: Run, *words: object) -> None:
    with open(run.events, "a", encoding="utf-8") as file:
        file.write(" ".join(map(str, words)) + "\n")


def half_a_line(path: Path, row: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row)[:25])


# --- what must hold -----------------------------------------------------------------------------------------------


def finish(run: Run) -> int:
    """An attempt that comes to the end; the step it went on from."""
    code = Child(attempt, run, None).join(120)
    assert code == 0, (run.folder / "output").read_text()
    return int(events(run)[0].removeprefix("from "))


def kill(run: Run, fault: Fault) -> None:
    """One attempt that ends by `fault`, and what must hold after it."""
    before = newest(run)
    child = Child(attempt, run, fault)
    code = child.join(120)
    assert (code, child.exit_code) == (None, -signal.SIGKILL), (run.folder / "output").read_text()
    assert events(run)[-1] == f"killed {fault.phase}"
    kept, begun, step = newest(run), before, before
    for what, *value in (event.split() for event in events(run)):
        step = int(value[0]) if what in ("from", "step") else step
        begun = step if what == "saving" else begun
    assert before <= kept
    assert begun - EVERY <= kept <= begun <= step <= begun + EVERY
    if fault.phase in ("save", "published"):
        assert kept == begun - (EVERY if fault.phase == "save" else 0)
    if fault.phase in ("data", "start"):
        assert step == 0


def events(run: Run) -> list[str]:
    return run.events.read_text().splitlines()


def newest(run: Run) -> int:
    """The step of the newest checkpoint, which must be whole and load; 0 without one."""
    path, skipped = newest_whole(run.checkpoints)
    assert skipped == []
    if path is None:
        return 0
    assert load_weights(path)
    step = int(path.name.removeprefix("step-"))
    assert load_record(path)["loader"]["samples"] == 4 * step
    return step


def result(run: Run) -> dict[str, Any]:
    """Every byte that a run ends with, but times, and files that a killed write left aside."""
    last, skipped = newest_whole(run.checkpoints)
    assert last is not None
    assert skipped == []
    written = {name: data for name, data in tree(run.folder / "run").items()
               if name == "metrics.jsonl" or name.startswith(("settings", "tokenizer/"))
               if not name.endswith(".tmp")}  # fmt: skip
    state = tree(last)
    del state["manifest.json"]
    state["state.json"] = state["state.json"].replace(str(run.cache).encode(), b"cache")
    kept = sorted(path.name for path in run.checkpoints.iterdir())
    return {**written, **state, "data": tree(run.cache), "checkpoints": kept}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02d}.txt").write_text(prose(30, number), encoding="utf-8")
    return folder


# --- the faults ---------------------------------------------------------------------------------------------------

TENSORS = "dcdm.training.checkpoint:write_tensors"
RENAME = "os:rename"
SHORT = [
    Fault("data", "dcdm.data.prepare:write_unit", 3),
    Fault("published", RENAME, only=".partial", call=2, after=True),  # the first are the data's
    Fault("step", "dcdm.training.optimizers:Muon.step", 4, after=True),
    Fault("metrics", "dcdm.training.metrics:_append", 2, instead=half_a_line),
    Fault("save", TENSORS, instead=half_a_file),
    Fault("save", RENAME, only=".partial"),
]
DATA = [
    Fault("data", "dcdm.data.prepare:load_tokenizer"),
    Fault("data", "dcdm.data.prepare:load_tokenizer", after=True),
    Fault("data", "dcdm.data.prepare:write_unit", 2),
    Fault("data", "dcdm.data.store:Shard.close", 3),
    Fault("data", "dcdm.data.prepare:write_manifest"),
    Fault("data", RENAME, only=".partial"),
    Fault("data", RENAME, only=".partial", after=True),
]
START = [
    Fault("start", "dcdm.training.settings:write", after=True),
    Fault("start", "dcdm.data.tokenizers:Tokenizer.save", after=True),
]
LOOP = [
    Fault("published", RENAME, only=".partial", after=True),
    Fault("step", "dcdm.training.trainer:Trainer._gradients", after=True),
    Fault("step", "dcdm.training.optimizers:Muon.step", 2, after=True),
    Fault("save", "dcdm.training.checkpoint:collect", after=True),
    Fault("step", "dcdm.model.chunking:ChunkingAttention.update_bias", 3),
    Fault("save", TENSORS),
    Fault("evaluation", "dcdm.training.run:evaluate"),
    Fault("metrics", "dcdm.training.metrics:_append", 2, instead=half_a_line),
    Fault("save", TENSORS, instead=half_a_file),
    Fault("resume", "dcdm.training.metrics:write_whole"),
    Fault("save", "dcdm.training.checkpoint:write_whole"),
    Fault("resume", "dcdm.training.checkpoint:fill", after=True),
    Fault("save", "dcdm.training.checkpoint:write_manifest"),
    Fault("save", "dcdm.training.checkpoint:write_manifest", after=True),
    Fault("save", RENAME, only=".partial"),
    Fault("published", RENAME, only=".partial", call=3, after=True),
    Fault("published", "dcdm.training.checkpoint:prune"),
    Fault("published", RENAME, only=".deleted", after=True),
    Fault("published", "dcdm.training.checkpoint:prune", 2, after=True),
]


def at_random(count: int, seed: int) -> list[Fault]:
    """Deaths at places of the loop drawn at random, after a random number of calls: the same on any machine."""
    draws = random.Random(seed)
    places = ["dcdm.training.trainer:Trainer._gradients", "dcdm.training.metrics:Recorder.on_step", TENSORS,
              "dcdm.training.checkpoint:file_digest"]  # fmt: skip
    return [Fault("random", draws.choice(places), draws.randint(1, 4), after=draws.random() < 0.5)
            for _ in range(count)]  # fmt: skip


def assert_killed_run_ends_the_same(folder: Path, corpus: Path, steps: int, faults: list[Fault]) -> None:
    undisturbed, killed = (Run(folder / name, corpus, steps) for name in ("undisturbed", "killed"))
    for run in (undisturbed, killed):
        run.folder.mkdir()
    assert finish(undisturbed) == 0
    for fault in faults:
        kill(killed, fault)
    assert 0 < finish(killed) < steps
    ours, theirs = result(killed), result(undisturbed)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if ours[name] != theirs[name]] == []


def test_a_run_killed_in_every_phase_ends_with_the_bytes_of_one_never_disturbed(corpus, tmp_path):
    assert_killed_run_ends_the_same(tmp_path, corpus, 10, SHORT)


@pytest.mark.slow
def test_a_run_killed_forty_times_ends_with_the_bytes_of_one_never_disturbed(corpus, tmp_path):
    late = [*LOOP[1:], *at_random(12, seed=1)]
    random.Random(2).shuffle(late)
    faults = [*DATA, *START, LOOP[0], *late]  # the last but these leaves a checkpoint for them to resume
    assert len(faults) == 40
    assert_killed_run_ends_the_same(tmp_path, corpus, 120, faults)
