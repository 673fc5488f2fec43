"""Saving and resuming: bit for bit in the same topology, to 1e-6 in another, and what is kept."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tiny
import toy
from dcdm.diffusion.objectives import Batch, loss
from dcdm.distributed import World
from dcdm.files import file_digest
from dcdm.keys import Key
from dcdm.training import checkpoint, fsdp
from dcdm.training.checkpoint import Checkpointer, TrainState, prune
from dcdm.training.checkpoint_folder import (
    CheckpointError,
    checkpoints,
    load_record,
    load_weights,
    newest_whole,
    read_manifest,
    verify_checkpoint,
    write_manifest,
)
from ranks import on_ranks
from toy import differences

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def small_state(value: float = 0.0) -> TrainState:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    return TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def step_once(state: TrainState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.ones(1, 3)).sum().backward()
    state.optimizer.step()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


# --- the same topology --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "optimizer"), [("bdlm", "adamw"), ("causal", "muon"), ("paper-moe", "muon")])
def test_three_steps_a_resume_and_three_more_equal_six_bit_for_bit(kind, optimizer, tmp_path):
    whole, _ = toy.train(tmp_path / "whole", World(), 6, kind=kind, optimizer=optimizer)
    toy.train(tmp_path / "broken", World(), 3, kind=kind, optimizer=optimizer)
    resumed_run, resumed = toy.train(tmp_path / "broken", World(), 6, kind=kind, optimizer=optimizer)
    assert resumed.step == 3
    assert differences(resumed_run, whole) == []


def interrupted_and_whole(world: World, folder: Path) -> list[toy.Weights]:
    whole, _ = toy.train(folder / "whole", world, 4)
    toy.train(folder / "broken", world, 2)
    resumed_run, resumed = toy.train(folder / "broken", world, 4)
    assert resumed.step == 2
    return [whole, resumed_run]


def moved(world: World, folder: Path, steps: int) -> toy.Weights:
    return toy.train(folder / "moved", world, steps, kind="paper-moe", dtype=torch.float64, optimizer="muon")[0]


def on_two(world: World, folder: Path) -> tuple[list[toy.Weights], toy.Weights]:
    """All that two ranks are asked for here, in one pair of processes."""
    save_between_passes(world, folder)
    return interrupted_and_whole(world, folder), moved(world, folder, 4)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, list[tuple[list[toy.Weights], toy.Weights]]]:
    """A folder and what runs in it gave; that in `moved` was of one process, then of three, then of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    moved(World(), folder, 1)
    on_ranks(3, moved, folder, 2)
    return folder, on_ranks(2, on_two, folder)


def test_two_ranks_resume_bit_for_bit_and_one_process_reads_their_weights(ranks):
    folder, results = ranks
    for (whole, resumed_run), _ in results:
        assert differences(resumed_run, whole) == []
    final = folder / "broken" / "step-00000004"
    assert verify_checkpoint(final) == []
    weights = load_weights(final)
    assert weights.keys() == tiny.model("paper").state_dict().keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(value, whole[name])
    for name, value in load_weights(final, "ema").items():
        np.testing.assert_array_equal(value, whole[f"ema.{name}"])
    with pytest.raises(CheckpointError, match="holds no 'teacher'"):
        load_weights(final, "teacher")


def test_runs_move_between_numbers_of_ranks_as_if_nothing_had_changed(ranks, tmp_path):
    """1 → 3 → 2 → 1, float64, Muon, shards of unequal size among them, against one process throughout."""
    folder, results = ranks
    whole, expected = moved(World(), tmp_path, 4), moved(World(), tmp_path, 5)
    assert [differences(run, whole, tolerance=1e-6) for _, run in results] == [[], []]
    assert differences(moved(World(), folder, 5), expected, tolerance=1e-6) == []


def save_between_passes(world: World, folder: Path) -> None:
    """As a run does that finds its loss not finite: the weights are still gathered then."""
    for kind in ("paper", "causal"):
        state = toy.new_state(kind, world)
        fsdp.run_gathered(state.model, loss, state.model, Batch(tiny.tokens(2, toy.LENGTH)), Key(0))
        with Checkpointer(folder / kind, world) as checkpointer:
            checkpointer.save(0, state)


def test_ranks_can_save_between_forward_and_backward(ranks):
    for kind in ("paper", "causal"):
        expected = toy.new_state(kind, World()).model.state_dict()
        found = load_weights(ranks[0] / kind / "step-00000000")
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_checkpoint_from_before_the_first_step_resumes_bit_for_bit(tmp_path):
    whole = small_state(0.5)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, whole)
        step_once(whole)
    other = small_state(0.1)
    step_once(other)  # must be forgotten
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.resume(other).step == 0
    assert not other.optimizer.state
    step_once(other)
    assert torch.equal(other.model.weight, whole.model.weight)


def test_record_metrics_and_optimizer_settings_come_back_with_their_types_and_the_manifest_names_all(tmp_path):
    state = small_state()
    step_once(state)
    state.optimizer.param_groups[0].update(lr=0.1 + 0.2, betas=(0.8, 0.99))
    state.record = {"settings": {"weight": float("inf"), "name": "ü"}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state, {"loss": 2.0, "odd": float("nan")})
    other = small_state()
    with Checkpointer(tmp_path) as checkpointer:
        resumed = checkpointer.resume(other)
    assert other.optimizer.state_dict()["param_groups"] == state.optimizer.state_dict()["param_groups"]
    assert resumed.record == state.record
    manifest = read_manifest(resumed.path)
    assert (manifest.step, manifest.metrics, manifest.format) == (3, {"loss": 2.0, "odd": None}, 3)
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.files.keys() == {"tensors.safetensors", "state.json"}


# --- in the background --------------------------------------------------------------------------------------------


class Gate:
    """Holds a save up once its files are written."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        patch.setattr(checkpoint, "file_digest", self)

    def __call__(self, path: Path) -> str:
        self.reached.set()
        assert self.open.wait(20)
        return file_digest(path)


def test_a_save_keeps_the_values_of_its_step_while_training_continues(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    state = small_state(1.0)
    step_once(state)
    expected = state.model.weight.detach().clone()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        assert gate.reached.wait(20)
        assert names(tmp_path) == ["step-00000001.partial"]
        step_once(state)
        with torch.no_grad():
            state.model.weight.fill_(99.0)
        gate.open.set()
    assert names(tmp_path) == ["step-00000001"]
    assert torch.equal(load_weights(tmp_path / "step-00000001")["weight"], expected)
    other = small_state()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.resume(other)
    assert other.optimizer.state[other.model.weight]["step"].item() == 1


def test_one_save_is_under_way_at_a_time(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    state = small_state()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        assert gate.reached.wait(20)
        second = threading.Thread(target=checkpointer.save, args=(2, state))
        second.start()
        time.sleep(0.2)
        assert second.is_alive()
        assert names(tmp_path) == ["step-00000001.partial"]
        gate.open.set()
        second.join(20)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_step_just_saved_or_resumed_from_is_not_written_again(tmp_path):
    state = small_state()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, wait=True)
        before = (tmp_path / "step-00000001" / "manifest.json").stat().st_mtime_ns
        checkpointer.save(1, state, wait=True)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.resume(state)
        checkpointer.save(1, state, wait=True)
    assert (tmp_path / "step-00000001" / "manifest.json").stat().st_mtime_ns == before


# --- what is kept -------------------------------------------------------------------------------------------------


def test_the_last_and_the_best_are_kept_and_no_best_one_is_needed(tmp_path):
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: float("nan"), 6: 2.0}
    with Checkpointer(tmp_path, keep_last=2, keep_best=1) as checkpointer:
        for step, value in losses.items():
            checkpointer.save(step, small_state(), {"loss": value})
    assert names(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]
    with Checkpointer(tmp_path, keep_last=1, keep_best=0) as checkpointer:
        checkpointer.save(7, small_state(), {"loss": 9.0})
    assert names(tmp_path) == ["step-00000007"]


@given(st.dictionaries(st.integers(1, 9), st.tuples(st.sampled_from([None, 1.0, 2.0]), st.booleans()), min_size=1),
       st.integers(1, 3), st.integers(0, 2), st.integers(1, 9))  # fmt: skip
def test_pruning_keeps_the_newest_the_last_whole_ones_and_the_best_and_leaves_later_steps_alone(
    tmp_path_factory, past, keep_last, keep_best, current
):
    """`past`: step → metric, and whether it is known to be damaged."""
    folder = tmp_path_factory.mktemp("checkpoints")
    past[current] = (past.get(current, (1.0, False))[0], False)
    for step, (metric, _) in past.items():
        (folder / f"step-{step:08}").mkdir()
        write_manifest(folder / f"step-{step:08}", step, {"loss": metric}, {})
    damaged = {folder / f"step-{step:08}" for step, (_, bad) in past.items() if bad}
    prune(folder / f"step-{current:08}", keep_last, keep_best, "loss", damaged)
    left = {int(path.name[5:]) for path in checkpoints(folder)}
    whole = sorted(step for step, (_, bad) in past.items() if not bad and step <= current)
    scored = sorted((past[step][0], step) for step in whole if past[step][0] is not None)
    expected = {current, *whole[-keep_last:], *(step for _, step in scored[:keep_best])}
    assert left == expected | {step for step in past if step > current}


# --- resuming -----------------------------------------------------------------------------------------------------


def test_damaged_checkpoints_are_skipped_with_a_reason_and_later_replaced(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, small_state(step))
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    (tmp_path / "step-00000002" / "state.json").write_text("{}")
    state = small_state()
    with Checkpointer(tmp_path, keep_last=1, keep_best=0) as checkpointer:
        resumed = checkpointer.resume(state)
        assert resumed.step == 1
        assert [(path.name, reason) for path, reason in resumed.skipped] == [
            ("step-00000003", "manifest.json is missing"),
            ("step-00000002", "state.json is damaged: its SHA-256 is not the manifest's"),
        ]
        assert state.model.weight[0, 0] == 1
        checkpointer.save(2, small_state(20.0), wait=True)
        assert names(tmp_path) == ["step-00000002", "step-00000003"]  # the later one is not judged yet
        checkpointer.save(4, small_state(40.0), wait=True)
    assert names(tmp_path) == ["step-00000004"]
    assert verify_checkpoint(tmp_path / "step-00000004") == []


def test_readers_find_the_newest_whole_checkpoint_and_its_record_without_a_run(tmp_path):
    assert newest_whole(tmp_path / "nowhere") == (None, [])
    with Checkpointer(tmp_path / "new" / "folder") as checkpointer:
        assert checkpointer.resume(small_state()) is None
    for step in (1, 2):
        state = small_state()
        state.record = {"at": step}
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(step, state)
    assert newest_whole(tmp_path) == (tmp_path / "step-00000002", [])
    (tmp_path / "step-00000002" / "state.json").unlink()
    path, skipped = newest_whole(tmp_path)
    assert load_record(path) == {"at": 1}
    assert skipped == [(tmp_path / "step-00000002", "state.json is missing")]
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        load_record(tmp_path / "step-00000002")


def test_checkpoints_that_are_all_damaged_stop_a_run_instead_of_starting_it_anew(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, small_state())
    (tmp_path / "step-00000001" / "tensors.safetensors").unlink()
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(CheckpointError, match=r"(?s)no .* whole.*tensors\.safetensors is missing"),
    ):
        checkpointer.resume(small_state())


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_by_name_and_shape(tmp_path):
    saved, groups, average = small_state(), small_state(), small_state()
    step_once(saved)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved)
    groups.optimizer = torch.optim.AdamW([{"params": [p]} for p in groups.model.parameters()])
    average.tensors["ema"] = {"weight": torch.zeros(2, 3)}
    misfits = {
        r"model\.weight is float32 \[2, 3\] there and float32 \[2, 4\] here": TrainState(nn.Linear(4, 2)),
        r"model\.bias is float32 \[2\] there and float64": TrainState(nn.Linear(3, 2, dtype=torch.float64)),
        r"model\.bias is float32 \[2\] there and absent here": TrainState(nn.Linear(3, 2, bias=False)),
        r"ema\.weight is absent there": average,
        "other optimizer groups": groups,
    }
    for message, state in misfits.items():
        with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError, match=message):
            checkpointer.resume(state)


# --- wrong use ----------------------------------------------------------------------------------------------------


def test_what_is_neither_tensor_nor_json_is_refused_before_anything_is_written(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        state = small_state()
        state.record["when"] = object()
        with pytest.raises(CheckpointError, match="record cannot be written as JSON"):
            checkpointer.save(1, state)
        state = small_state()
        state.tensors["ema"] = {"weight": [1.0]}
        with pytest.raises(CheckpointError, match=r"tensors\.ema\.weight is a list"):
            checkpointer.save(1, state)
    assert names(tmp_path) == []


def test_weights_are_not_read_from_what_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere does not exist"):
        load_weights(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        load_weights(tmp_path)
    (tmp_path / "file").touch()
    assert "is not a folder" in verify_checkpoint(tmp_path / "file")[0]
