"""A job whose rank is killed, and checkpoints that other numbers of ranks read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny
import toy
from dcdm.data.loader import Loader
from dcdm.distributed import World
from dcdm.training.checkpoint import Checkpointer
from dcdm.training.checkpoint_folder import CHECKPOINTS, checkpoints, load_weights, step_of
from dcdm.training.metrics import read_rows
from dcdm.training.trainer import Trainer
from ranks import command_on_ranks, on_ranks

PROGRAM = """
import os, signal, sys
from dcdm.cli import main
from dcdm.training.trainer import Trainer

step = Trainer.take_step

def killed(self):
    if self.step == 3 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        print("killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self)

Trainer.take_step = killed
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_rank_is_started_again_by_torchrun_and_the_run_ends_as_if_nothing_had_happened(tmp_path):
    text, program = tmp_path / "text.txt", tmp_path / "program.py"
    text.write_text("".join(f"{a} + {b} = {a + b}\n" for a in range(40) for b in range(40)))
    program.write_text(PROGRAM)

    def words(folder: Path) -> list[str]:
        small = ["model.num_layers=2", "data.window=32", "evaluate_sequences=2", "log_every=1"]
        options = [
            "--steps",
            "6",
            "--batch-size",
            "4",
            "--checkpoint-every",
            "2",
            "--device",
            "cpu",
            "--set",
            *small,
        ]
        return ["train", "--preset", "dcdm-debug", "--run-folder", str(folder), "--data", str(text), *options]

    command_on_ranks(2, words(tmp_path / "undisturbed"))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    ended = subprocess.run(
        [sys.executable, *launch, str(program), *words(tmp_path / "restarted")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=240, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.stdout.count("killed") == 1
    assert "resuming from step 2" in ended.stderr
    first, second = (checkpoints(tmp_path / name / CHECKPOINTS)[0] for name in ("undisturbed", "restarted"))
    assert step_of(first) == step_of(second) == 6
    ours, theirs = load_weights(first), load_weights(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    rows = [list(read_rows(tmp_path / name / "metrics.jsonl")) for name in ("undisturbed", "restarted")]
    assert rows[0] == rows[1]


def saved(world: World, folder: Path) -> None:
    toy.ROWS = 12  # which four ranks divide
    toy.train(folder, world, 2, kind="paper-moe")


def read_back(world: World, folder: Path) -> toy.Weights:
    """The state of a run with other initial weights, after it has resumed."""
    toy.ROWS = 12
    model = tiny.model("paper-moe", seed=1).float()
    batches = Loader(
        toy.InMemory(tiny.tokens(4 * toy.ROWS, toy.LENGTH)), seed=0, global_batch=toy.ROWS, rank=world.rank,
        world=world.size,
    )  # fmt: skip
    trainer = Trainer(model, batches, toy.settings(2, torch.float32, "adamw"), world=world)
    trainer.take_step()
    with Checkpointer(folder, world) as there:
        trainer.resume(there)
    return toy.everything(trainer.state())


def test_a_checkpoint_of_four_ranks_is_read_by_one_and_that_of_one_by_two_and_four(tmp_path, monkeypatch):
    monkeypatch.setattr(toy, "ROWS", toy.ROWS)  # put back what `saved` changes
    on_ranks(4, saved, tmp_path / "four")
    saved(World(), tmp_path / "one")
    for writers, readers in (("four", 2), ("one", 2), ("one", 4)):
        stored = load_weights(checkpoints(tmp_path / writers)[0])
        alone = read_back(World(), tmp_path / writers)
        assert all((alone[name] == value.numpy()).all() for name, value in stored.items())
        for found in on_ranks(readers, read_back, tmp_path / writers):
            assert toy.differences(found, alone) == []
