"""Every file of a checkpoint, damaged in every way or made by a stranger: found, skipped by `resume`, never run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from dcdm.config import VERSION
from dcdm.training import checkpoint_folder as manifests
from dcdm.training.checkpoint import Checkpointer, TrainState
from dcdm.training.checkpoint_folder import (
    CheckpointError,
    UnusableCheckpoint,
    load_record,
    load_weights,
    verify_checkpoint,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TENSORS = "tensors.safetensors"
FILES = ("manifest.json", TENSORS, "state.json")


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
    "deleted": Path.unlink, "truncated": truncate, "emptied": empty, "lengthened": lengthen,
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
        problems = verify_checkpoint(run / "step-00000002")
        assert len(problems) == 1, (kind, problems)
        assert name in problems[0]
        with pytest.raises(CheckpointError, match="not a whole checkpoint"):
            load_weights(run / "step-00000002")
        with Checkpointer(run) as checkpointer:
            resumed = checkpointer.resume(some_state(0.0))
        assert (resumed.step, resumed.record) == (1, {"step": 1.0}), kind
        assert resumed.skipped == [(run / "step-00000002", problems[0])]


def test_strays_a_folder_under_another_step_s_name_and_all_damages_at_once_are_told(run):
    folder = run / "step-00000002"
    (folder / "more.json").touch()
    (folder / "state.json").unlink()
    flip(0.5)(folder / TENSORS)
    assert len(verify_checkpoint(folder)) == 3
    assert verify_checkpoint(folder)[0] == "more.json is not in the manifest"
    os.rename(run / "step-00000001", run / "step-00000003")
    assert verify_checkpoint(run / "step-00000003") == ["the folder is named after step 3, but holds step 1"]


def test_every_single_byte_of_the_manifest_counts(run):
    folder = run / "step-00000002"
    whole = (folder / "manifest.json").read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        (folder / "manifest.json").write_bytes(data)
        with pytest.raises(CheckpointError, match="damaged"):
            manifests.read_manifest(folder)


# --- what a stranger may write under a manifest of his own --------------------------------------------------------


def seal(folder: Path, without: str | None = None, **changes: object) -> None:
    """A manifest that fits the files as they are now."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["seal"]
    content["files"] = {
        path.name: manifests.file_digest(path) for path in folder.iterdir() if path.name != "manifest.json"
    }
    content |= changes
    content.pop(without, None)
    (folder / "manifest.json").write_bytes(manifests._sealed(content))


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("format", [1, 4])
def test_another_format_is_refused_by_name_in_one_line_and_its_pickle_never_opened(format, run, tmp_path):
    folder, sprung = run / "step-00000002", tmp_path / "sprung"
    (folder / ".metadata").write_bytes(pickle.dumps(Trap(sprung)))
    torch.save(Trap(sprung), folder / "__0_0.distcp")
    seal(folder, format=format)
    said = (
        f"it has format {format}, and this version reads format 3 alone, which has no pickles; "
        f"export it with dcdm {VERSION}, which wrote it"
    )
    assert verify_checkpoint(folder) == [said]
    with pytest.raises(UnusableCheckpoint, match=f"format {format}"):
        load_weights(folder)
    with Checkpointer(run) as checkpointer:
        assert checkpointer.resume(some_state(0.0)).skipped == [(folder, said)]
    assert not sprung.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert sprung.exists(), "the trap works"


@pytest.mark.parametrize("name", FILES[1:])
def test_a_pickle_in_place_of_a_file_is_an_error_and_does_not_run_even_if_the_manifest_names_it(
    name, run, tmp_path
):
    folder, sprung = run / "step-00000002", tmp_path / "sprung"
    (folder / name).write_bytes(pickle.dumps(Trap(sprung)))
    seal(folder)
    assert verify_checkpoint(folder) == []
    with pytest.raises(UnusableCheckpoint, match=name):
        load_weights(folder) if name == TENSORS else load_record(folder)
    assert not sprung.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", ".", "..", "", "a/b", "a\0b"])
def test_names_in_a_manifest_are_plain_names(name, run):
    folder = run / "step-00000002"
    (run / "secret").write_text("secret")
    content = json.loads((folder / "manifest.json").read_text())
    seal(folder, files={**content["files"], name: hashlib.sha256(b"secret").hexdigest()})
    assert verify_checkpoint(folder), name


@pytest.mark.parametrize("kind", ["pipe", "link out", "link to a device"])
def test_files_of_a_checkpoint_are_regular_files_and_no_pipe_is_waited_for(kind, run):
    folder = run / "step-00000002"
    for name in ("state.json", "manifest.json"):
        (folder / name).unlink()
        if kind == "pipe":
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to("/dev/zero" if kind == "link to a device" else "/etc/hostname")
        problems = verify_checkpoint(folder)
        assert len(problems) == 1
        assert name in problems[0]


def test_a_sealed_manifest_that_lacks_something_and_deep_nesting_are_damage_like_any_other(run):
    folder = run / "step-00000002"
    whole = (folder / "manifest.json").read_bytes()
    for missing in ("format", "files", "step", "versions"):
        (folder / "manifest.json").write_bytes(whole)
        seal(folder, without=missing)
        assert verify_checkpoint(folder) == ["manifest.json is damaged"]
    (folder / "manifest.json").write_text("[" * 200_000)
    assert verify_checkpoint(folder) == ["manifest.json is damaged"]
    (run / "step-00000001" / "state.json").write_text("[" * 200_000)
    seal(run / "step-00000001")
    with pytest.raises(UnusableCheckpoint, match="nested too deeply"):
        load_record(run / "step-00000001")
