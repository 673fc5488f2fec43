"""Every file of a checkpoint, damaged in every way: found by `verify`, passed over by `resume`, never unpickled."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from dcdm.distributed import World
from dcdm.training import checkpoint_folder as manifests
from dcdm.training.checkpoint import Checkpointer, CheckpointError, TrainState, load_weights, verify
from ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FILES = ("manifest.json", ".metadata", "__0_0.distcp", "state.json")


def some_state(value: float) -> TrainState:
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return TrainState(model, optimizer, record={"step": value})


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, some_state(1.0))
        checkpointer.save(2, some_state(2.0))
    return folder


@pytest.fixture
def run(pristine, tmp_path) -> Path:
    """A copy to damage: steps 1 and 2."""
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def flip(place: float) -> Callable[[Path], None]:
    def flip_one_bit(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(place * (len(data) - 1))] ^= 1
        path.write_bytes(data)

    return flip_one_bit


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    "deleted": delete, "truncated": truncate, "emptied": empty, "lengthened": lengthen,
    "first bit flipped": flip(0), "middle bit flipped": flip(0.5), "last bit flipped": flip(1),
    "a folder": replace_by_folder,
}  # fmt: skip


def test_the_files_damaged_here_are_all_the_files_there_are(pristine):
    assert {path.name for path in (pristine / "step-00000002").iterdir()} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_damage_of_any_kind_to_any_file_is_found_and_resume_takes_the_checkpoint_before(name, pristine, tmp_path):
    for kind, damage in DAMAGES.items():
        run = tmp_path / kind
        shutil.copytree(pristine, run)
        damage(run / "step-00000002" / name)
        problems = verify(run / "step-00000002")
        assert len(problems) == 1, (kind, problems)
        assert name in problems[0]
        with pytest.raises(CheckpointError, match="not a whole checkpoint"):
            load_weights(run / "step-00000002")
        state = some_state(0.0)
        with Checkpointer(run) as checkpointer:
            resumed = checkpointer.resume(state)
        assert (resumed.step, resumed.record) == (1, {"step": 1.0}), kind
        assert resumed.skipped == [(run / "step-00000002", problems[0])]


def test_a_file_too_many_and_a_folder_under_another_step_s_name_are_found(run):
    (run / "step-00000002" / "more.json").touch()
    assert verify(run / "step-00000002") == ["more.json is not in the manifest"]
    os.rename(run / "step-00000001", run / "step-00000003")
    assert verify(run / "step-00000003") == ["the folder is named after step 3, but holds step 1"]


def test_all_problems_are_told_at_once(run):
    folder = run / "step-00000002"
    delete(folder / "state.json")
    truncate(folder / ".metadata")
    flip(0.5)(folder / "__0_0.distcp")
    assert len(verify(folder)) == 3


def test_every_single_byte_of_the_manifest_counts(run):
    folder = run / "step-00000002"
    whole = (folder / "manifest.json").read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        (folder / "manifest.json").write_bytes(data)
        with pytest.raises(CheckpointError, match="damaged"):
            manifests.read_manifest(folder)


def test_a_manifest_of_a_later_format_is_passed_over_by_name(run):
    folder = run / "step-00000002"
    content = json.loads((folder / "manifest.json").read_text())
    del content["seal"]
    (folder / "manifest.json").write_text(manifests._render({**content, "format": 2, "novelty": 1}))
    writer = content["versions"]["dcdm"]
    assert verify(folder) == [f"format 2 is not the one this version reads (1); it was written by dcdm {writer}"]


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def test_a_pickle_that_the_manifest_does_not_vouch_for_is_never_opened(run, tmp_path):
    sprung = tmp_path / "sprung"
    (run / "step-00000002" / ".metadata").write_bytes(pickle.dumps(Trap(sprung)))
    assert verify(run / "step-00000002")
    with pytest.raises(CheckpointError):
        load_weights(run / "step-00000002")
    with Checkpointer(run) as checkpointer:
        assert checkpointer.resume(some_state(0.0)).step == 1
    assert not sprung.exists()


def test_a_pickle_that_is_more_than_metadata_does_not_run_even_if_the_manifest_vouches_for_it(run, tmp_path):
    folder, sprung = run / "step-00000002", tmp_path / "sprung"
    (folder / ".metadata").write_bytes(pickle.dumps(Trap(sprung)))
    content = json.loads((folder / "manifest.json").read_text())
    del content["seal"]
    content["files"] = [vars(manifests.record(folder / entry["name"])) for entry in content["files"]]
    (folder / "manifest.json").write_text(manifests._render(content))
    assert verify(folder) == []
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        load_weights(folder)
    assert not sprung.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert sprung.exists(), "the trap works"


def resume_on_two(world: World, run: Path) -> tuple[int, list[str]]:
    with Checkpointer(run, world) as checkpointer:
        resumed = checkpointer.resume(some_state(0.0))
    return resumed.step, [reason for _, reason in resumed.skipped]


def test_ranks_share_the_checking_and_agree_on_what_to_skip(run):
    flip(0.5)(run / "step-00000002" / "state.json")
    first, second = on_ranks(2, resume_on_two, run)
    assert first == second == (1, ["state.json is damaged: its SHA-256 is not the manifest's"])
