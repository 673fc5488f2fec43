"""Runs that are killed at every phase of a save, and folders that cannot be written.

The runs are processes of their own that kill themselves by SIGKILL at a named phase or inside a named call, and are
started again until they end; they must end with the weights of the run that nobody disturbed.
"""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import toy
from dcdm import distributed
from dcdm.distributed import World
from dcdm.training import checkpoint
from dcdm.training.checkpoint import Checkpointer, TrainState
from dcdm.training.checkpoint_folder import CheckpointError, checkpoints, load_weights, verify_checkpoint
from ranks import Child, Fault, half_a_file, on_ranks
from toy import differences

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STEPS = 16


WRITE_TENSORS, DIGEST = "dcdm.training.checkpoint:write_tensors", "dcdm.training.checkpoint:file_digest"
SEAL, RENAME = "dcdm.training.checkpoint:write_manifest", "os:rename"
FAULTS = [
    Fault("copied", "dcdm.training.checkpoint:gathered", after=True),
    Fault("half the tensors", WRITE_TENSORS, 2, instead=half_a_file), Fault("written", DIGEST),
    Fault("hashed", DIGEST, 2, after=True), Fault("sealed", SEAL, 2, after=True),
    Fault("renamed", RENAME, only=".partial", after=True),
    Fault("dropping", RENAME, only=".deleted", after=True),
    Fault("pruned", "dcdm.training.checkpoint:prune", after=True),
]  # fmt: skip
"""A death in each phase of a save, and between them."""


def train_with(fault: Fault | None, folder: Path) -> toy.Weights:
    if fault is not None:
        fault.arm()
    return toy.train(folder, World(), STEPS)[0]


def test_a_run_killed_in_every_phase_ends_with_the_weights_of_one_never_disturbed(tmp_path):
    undisturbed, _ = toy.train(tmp_path / "undisturbed", World(), STEPS)
    folder = tmp_path / "killed"
    for fault in FAULTS:
        child = Child(train_with, fault, folder)
        assert child.join(60) is None, fault
        assert child.exit_code == -signal.SIGKILL
        assert_all_are_whole(folder)
    weights = Child(train_with, None, folder).join(60)
    assert differences(weights, undisturbed) == []
    assert not [path for path in folder.iterdir() if path.suffix]


def assert_all_are_whole(folder: Path) -> None:
    for path in checkpoints(folder):
        assert verify_checkpoint(path) == []


def lose_a_rank(world: World, folder: Path) -> str | None:
    if world.rank == 1:
        Fault("copied", "dcdm.training.checkpoint:gathered", after=True).arm()
    try:
        toy.train(folder, world, 6, every=3)
    except RuntimeError as error:
        return type(error).__name__
    return None


def after_the_loss(world: World, folder: Path) -> tuple[Any, ...]:
    """All that two ranks are asked for here once a rank was lost, in one pair of processes."""
    runs = [toy.train(folder / name, world, 6, every=3)[0] for name in ("killed", "undisturbed")]
    return differences(*runs), fill_the_disk(world, folder / "disk"), skipped(world, folder / "flipped")


def skipped(world: World, folder: Path) -> tuple[int, list[str]]:
    with Checkpointer(folder, world) as checkpointer:
        resumed = checkpointer.resume(small_state())
    return resumed.step, [reason for _, reason in resumed.skipped]


def test_ranks_agree_on_what_failed_what_to_skip_and_on_an_exact_run_after_one_of_them_was_killed(tmp_path):
    left, second = on_ranks(2, lose_a_rank, tmp_path / "killed")
    assert (left is not None, second) == (True, None)
    assert [path.name for path in checkpoints(tmp_path / "killed")] == ["step-00000003"]
    assert_all_are_whole(tmp_path / "killed")
    with Checkpointer(tmp_path / "flipped") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, small_state())
    (tmp_path / "flipped" / "step-00000002" / "state.json").write_text("?")
    first, second = on_ranks(2, after_the_loss, tmp_path)
    assert first == second
    differing, (told, left), passed = first
    assert differing == []
    assert "no space left" in told
    assert left == ["step-00000001"]
    assert verify_checkpoint(tmp_path / "disk" / "step-00000002") == []
    assert passed == (1, ["state.json is damaged: its SHA-256 is not the manifest's"])


# --- what a killed run leaves behind ------------------------------------------------------------------------------


def small_state(value: float = 0.0) -> TrainState:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return TrainState(model)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_leftovers_are_tidied_and_a_checkpoint_put_aside_comes_back(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, small_state(step))
    os.rename(tmp_path / "step-00000001", tmp_path / "step-00000001.deleted")
    os.rename(tmp_path / "step-00000003", tmp_path / "step-00000003.replaced")  # killed before the new one came in
    (tmp_path / "step-00000002.replaced").mkdir()
    (tmp_path / "step-00000003.partial").mkdir()
    (tmp_path / "notes.partial").touch()  # not ours
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.resume(small_state()).step == 3
    assert names(tmp_path) == ["notes.partial", "step-00000002", "step-00000003"]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced_without_a_moment_of_having_none(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, small_state(1.0))
        checkpointer.save(2, small_state(2.0))
    (tmp_path / "step-00000002" / "state.json").write_text("?")
    seen: list[list[str]] = []
    rename = os.rename

    def watched(source: Path, target: Path) -> None:
        rename(source, target)
        seen.append(names(tmp_path))

    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.resume(small_state()).step == 1
        monkeypatch.setattr(os, "rename", watched)
        checkpointer.save(2, small_state(20.0))
    assert all("step-00000001" in moment for moment in seen)
    assert load_weights(tmp_path / "step-00000002")["weight"][0, 0] == 20


def test_a_checkpoint_whose_replacement_fails_at_the_rename_keeps_its_place(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, small_state(1.0))
    rename = os.rename

    def fail_for_partial(source: Path, target: Path) -> None:
        if source.suffix == ".partial":
            raise OSError(errno.EIO, "broken")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_for_partial)
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError, match="broken"):
        checkpointer.save(1, small_state(2.0), wait=True)
    assert names(tmp_path) == ["step-00000001"]
    assert load_weights(tmp_path / "step-00000001")["weight"][0, 0] == 1


# --- folders that cannot be written -------------------------------------------------------------------------------


def failing(number: int):
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


FULL, READ_ONLY = (errno.ENOSPC, "no space left.*Free some"), (errno.EROFS, "cannot be written.*writable")


@pytest.mark.parametrize(
    ("where", "number", "message"),
    [("tensors", *FULL), ("records", *READ_ONLY), ("manifest", *FULL), ("rename", *READ_ONLY)],
)
def test_a_write_that_fails_anywhere_names_folder_and_fix_and_leaves_earlier_checkpoints_whole(
    where, number, message, tmp_path, monkeypatch
):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, small_state(1.0), wait=True)
        targets = {
            "tensors": (checkpoint, "write_tensors"), "records": (checkpoint, "write_whole"),
            "manifest": (checkpoint, "write_manifest"), "rename": (os, "rename"),
        }  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(*targets[where], failing(number))
            checkpointer.save(2, small_state(2.0))
            with pytest.raises(CheckpointError, match=f"(?s)step 2 in {tmp_path}.*{message}.*untouched"):
                checkpointer.wait()
        assert names(tmp_path) == ["step-00000001"]
        assert verify_checkpoint(tmp_path / "step-00000001") == []
        checkpointer.wait()  # told once
        checkpointer.save(2, small_state(2.0))  # and when there is space again, all is well
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_failed_save_is_told_at_the_next_save_at_the_latest(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as checkpointer, monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_manifest", failing(errno.ENOSPC))
        checkpointer.save(1, small_state())
        with pytest.raises(CheckpointError, match="step 1"):
            checkpointer.save(2, small_state())


def test_old_checkpoints_that_cannot_be_dropped_do_not_spoil_the_new_one(tmp_path, monkeypatch, recwarn):
    with Checkpointer(tmp_path, keep_last=1, keep_best=0) as checkpointer:
        checkpointer.save(1, small_state(), wait=True)
        monkeypatch.setattr(checkpoint, "prune", failing(errno.EACCES))
        checkpointer.save(2, small_state(), wait=True)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert any("cannot drop old checkpoints" in str(warning.message) for warning in recwarn)


def fill_the_disk(world: World, folder: Path) -> tuple[str | None, list[str]]:
    with Checkpointer(folder, world) as checkpointer:
        checkpointer.save(1, small_state(1.0), wait=True)
        told = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "file_digest", failing(errno.ENOSPC))
            try:
                checkpointer.save(2, small_state(2.0), wait=True)
            except CheckpointError as error:
                told = str(error)
        left = names(folder)
        distributed.gather_objects("looked", world)
        checkpointer.save(2, small_state(2.0), wait=True)
    return told, left
