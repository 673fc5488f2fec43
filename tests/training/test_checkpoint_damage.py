"""Every file of a checkpoint, damaged in every way: found by `verify`, passed over by `resume`, never unpickled."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dcdm.config import VERSION
from dcdm.distributed import World
from dcdm.training import checkpoint
from dcdm.training import checkpoint_folder as manifests
from dcdm.training.checkpoint import (
    Checkpointer,
    CheckpointError,
    TrainState,
    UnusableCheckpoint,
    load_record,
    load_weights,
    verify,
)
from ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FILES = ("manifest.json", "metadata.json", "__0_0.distcp", "state.json")


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
    truncate(folder / "metadata.json")
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
    (folder / "manifest.json").write_text(manifests._render({**content, "format": 3, "novelty": 1}))
    said = f"format 3 is not one that this version reads (1, 2); it was written by dcdm {VERSION}"
    assert verify(folder) == [said]


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


@pytest.fixture
def version_1(tmp_path, monkeypatch) -> Path:
    """A checkpoint as older versions wrote it: with PyTorch's pickle for its metadata, and format 1."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "PlainWriter", dcp.FileSystemWriter)
        patch.setattr(checkpoint, "METADATA", ".metadata")
        with Checkpointer(tmp_path / "old") as checkpointer:
            checkpointer.save(2, some_state(2.0))
    seal(tmp_path / "old" / "step-00000002", format=1)
    return tmp_path / "old" / "step-00000002"


def seal(folder: Path, **changes: object) -> None:
    """A manifest that vouches for the files as they are now."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["seal"]
    content["files"] = [vars(manifests.record(folder / entry["name"])) for entry in content["files"]]
    content |= changes
    kept = {name: value for name, value in content.items() if value is not None}
    (folder / "manifest.json").write_text(manifests._render(kept))


def test_metadata_is_json_and_older_checkpoints_with_a_pickle_give_the_same_weights(version_1, pristine):
    assert {path.name for path in version_1.iterdir()} == {*FILES, ".metadata"} - {"metadata.json"}
    ours, theirs = load_weights(pristine / "step-00000002"), load_weights(version_1)
    assert ours.keys() == theirs.keys()
    assert torch.equal(ours["weight"], theirs["weight"])
    state = some_state(0.0)
    with Checkpointer(version_1.parent) as checkpointer:
        assert checkpointer.resume(state).step == 2
    assert all(torch.equal(value, state.model.state_dict()[name]) for name, value in theirs.items())


def test_a_pickle_that_the_manifest_does_not_vouch_for_is_never_opened(version_1, tmp_path):
    sprung = tmp_path / "sprung"
    (version_1 / ".metadata").write_bytes(pickle.dumps(Trap(sprung)))
    assert verify(version_1)
    with pytest.raises(CheckpointError):
        load_weights(version_1)
    assert not sprung.exists()


def test_a_pickle_that_is_more_than_metadata_does_not_run_even_if_the_manifest_vouches_for_it(version_1, tmp_path):
    sprung = tmp_path / "sprung"
    (version_1 / ".metadata").write_bytes(pickle.dumps(Trap(sprung)))
    seal(version_1)
    assert verify(version_1) == []
    with pytest.raises(UnusableCheckpoint, match="which no checkpoint needs"):
        load_weights(version_1)
    assert not sprung.exists()
    pickle.loads((version_1 / ".metadata").read_bytes())
    assert sprung.exists(), "the trap works"


def nested_key() -> bytes:
    """A dict whose key is a tuple of itself twice, forty deep: hashing it would take 2⁴⁰ steps."""
    return b"\x80\x04}" + b")" + b"2\x86" * 40 + b"K\x01s."


def change_of_a_class() -> bytes:
    """BUILD on a class that metadata may name: it would change that class for the whole process."""
    return b"\x80\x04cpathlib\nPosixPath\nN}\x8c\x07changedK\x01s\x86b."


@pytest.mark.parametrize("data", [nested_key(), change_of_a_class(), b"", b"}" * 9, b"\x80\x04("])
def test_a_pickle_made_to_hang_or_to_change_the_process_is_refused_at_once(data, version_1):
    (version_1 / ".metadata").write_bytes(data)
    seal(version_1)
    with pytest.raises(UnusableCheckpoint, match=r"\.metadata"):
        load_weights(version_1)
    assert not hasattr(Path, "changed")


# --- what a stranger may write under a manifest of his own --------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": {"model.weight": {"dtype": "float32", "shape": [1 << 40], "pieces": []}}},
        {"tensors": {"model.weight": {"dtype": "float32", "shape": [1 << 20],
                                      "pieces": [[[0], [1 << 20], "__0_0.distcp", 0, 100]]}}},
        {"tensors": {"model.weight": {"dtype": "float32", "shape": [4],
                                      "pieces": [[[0], [4], "../../secret", 0, 100]]}}},
        {"tensors": {"model.weight": {"dtype": "exec", "shape": [4], "pieces": []}}},
        {"tensors": [1, 2]},
        [],
    ],
)  # fmt: skip
def test_metadata_that_does_not_fit_the_files_is_refused_before_anything_is_allocated(change, run):
    folder = run / "step-00000002"
    (folder / "metadata.json").write_text(json.dumps(change))
    seal(folder)
    assert verify(folder) == []
    with pytest.raises(UnusableCheckpoint, match=r"metadata\.json"):
        load_weights(folder)


def replace_weight(folder: Path, data: bytes) -> None:
    """The weight of the linear layer lies at the end of its file and is `data`, and the manifest vouches for it."""
    metadata = json.loads((folder / "metadata.json").read_text())
    piece = metadata["tensors"]["model.weight"]["pieces"][0]
    with (folder / "__0_0.distcp").open("ab") as file:
        piece[3:] = [file.tell(), len(data)]
        file.write(data)
    (folder / "metadata.json").write_text(json.dumps(metadata))
    seal(folder)


def archive(pickled: bytes | None = None, **options: int) -> bytes:
    """What `torch.save` writes of a weight, packed again with another description or in another way."""
    saved, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.full((4, 4), 7.0), saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(packed, "w", **options) as new:
        for entry in old.infolist():
            is_pickle = pickled is not None and entry.filename.endswith("data.pkl")
            new.writestr(entry.filename, pickled if is_pickle else old.read(entry))
    return packed.getvalue()


def shared_tuples() -> bytes:
    """An ordered dict whose key is a tuple of itself twice, forty deep, as PyTorch's reader would accept it."""
    pairs = b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(40))
    return b"\x80\x02ccollections\nOrderedDict\n)" + pairs + b"K\x01\x86\x85\x85R."


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (archive(shared_tuples()), "opcode BINGET"),
        (archive(b"\x80\x02" + b"N0" * 40_000 + b"N."), "too large"),
        (archive(compression=zipfile.ZIP_DEFLATED) + b"\0" * 99, "a tensor in"),
        (b"no archive" * 99, "not a zip file"),
    ],
)
def test_a_tensor_made_to_hang_or_to_unpack_without_end_is_refused_at_once(data, reason, run):
    replace_weight(run / "step-00000002", data)
    assert verify(run / "step-00000002") == []
    with pytest.raises(UnusableCheckpoint, match=reason):
        load_weights(run / "step-00000002")


def test_the_same_way_with_what_pytorch_writes_gives_the_weight(run):
    replace_weight(run / "step-00000002", archive())
    assert torch.equal(load_weights(run / "step-00000002")["weight"], torch.full((4, 4), 7.0))


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", ".", "..", "", "a/b", "a\0b", 7, None])
def test_names_in_a_manifest_are_plain_names(name, run):
    folder = run / "step-00000002"
    (run / "secret").write_text("secret")
    content = json.loads((folder / "manifest.json").read_text())
    entry = {"name": name, "size": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    seal(folder, files=[*content["files"], entry])
    assert verify(folder), name


@pytest.mark.parametrize("kind", ["pipe", "link out", "link to a device"])
def test_files_of_a_checkpoint_are_regular_files_and_no_pipe_is_waited_for(kind, run):
    folder = run / "step-00000002"
    for name in ("state.json", "manifest.json"):
        (folder / name).unlink()
        if kind == "pipe":
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to("/dev/zero" if kind == "link to a device" else "/etc/hostname")
        problems = verify(folder)
        assert len(problems) == 1
        assert name in problems[0]


@pytest.mark.parametrize("missing", ["format", "files", "step", "versions"])
def test_a_sealed_manifest_that_lacks_something_is_damaged(missing, run):
    seal(run / "step-00000002")
    content = json.loads((run / "step-00000002" / "manifest.json").read_text())
    del content["seal"], content[missing]
    (run / "step-00000002" / "manifest.json").write_text(manifests._render(content))
    assert verify(run / "step-00000002") == ["manifest.json is damaged"]


def test_deep_nesting_is_damage_like_any_other(run):
    (run / "step-00000002" / "manifest.json").write_text("[" * 200_000)
    assert verify(run / "step-00000002") == ["manifest.json is damaged"]
    (run / "step-00000001" / "state.json").write_text("[" * 200_000)
    seal(run / "step-00000001")
    with pytest.raises(UnusableCheckpoint, match="nested too deeply"):
        load_record(run / "step-00000001")


def resume_on_two(world: World, run: Path) -> tuple[int, list[str]]:
    with Checkpointer(run, world) as checkpointer:
        resumed = checkpointer.resume(some_state(0.0))
    return resumed.step, [reason for _, reason in resumed.skipped]


def test_ranks_share_the_checking_and_agree_on_what_to_skip(run):
    flip(0.5)(run / "step-00000002" / "state.json")
    first, second = on_ranks(2, resume_on_two, run)
    assert first == second == (1, ["state.json is damaged: its SHA-256 is not the manifest's"])
