"""Folders that a stranger made: they are refused in one line, at once, and nothing outside of them is read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

import tiny
from dcdm.cli import main
from dcdm.config import ConfigError, DataError
from dcdm.data.prepare import prepare
from dcdm.data.store import PreparedData, read_manifest, write_manifest
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer
from dcdm.io.export import write_export
from dcdm.io.load import load_model
from dcdm.io.verify import verify_model

DEEP = "[" * 99_999


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "exported"
    write_export(tiny.model("bdlm", symbols=257).float(), byte_tokenizer(), folder, "card")
    return folder


@pytest.fixture
def exported(written, tmp_path) -> Path:
    shutil.copytree(written, tmp_path / "exported")
    return tmp_path / "exported"


def configure(folder: Path, **changes: object) -> None:
    """Change settings of the model and its checksum too, as a stranger would."""
    config = json.loads((folder / "config.json").read_text())
    config["dcdm"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    reseal(folder)


def reseal(folder: Path, **more: str) -> None:
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}
    del sums["checksums.json"]
    (folder / "checksums.json").write_text(json.dumps(sums | more))


def refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command refuses a folder; its exit code is 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ending:
        main(command)
    said = capsys.readouterr().err
    assert ending.value.code == 2, said
    assert len(said.splitlines()) == 1, said
    return said


# --- weights and configuration ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 10**9}, "num_layers=1000000000, but there are weights of"),
        ({"num_layers": 1}, "num_layers=1, but there are weights of"),
        ({"intermediate_size": 10**6}, r"asks for .*\[.*1000000"),
        ({"intermediate_size": 10**15}, "describes no model|asks for"),
        ({"vocab_size": 10**9}, "tokenizer has 260 tokens, and its model 1000000000"),
        ({"num_layers": "many"}, "num_layers"),
    ],
)
def test_shapes_are_compared_with_the_configuration_before_anything_is_built(
    changes, words, exported, capsys, monkeypatch
):
    configure(exported, **changes)
    monkeypatch.setattr("dcdm.io.load.build", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(ConfigError, match=words):
        load_model(exported)
    refused(["sample", str(exported), "--prompt", "def"], capsys)
    refused(["verify", str(exported)], capsys)


@pytest.mark.parametrize("change", ["{", '{"dcdm": 7}', '{"dcdm": {"kind": []}}', ""])
def test_a_changed_configuration_is_told_in_one_line_with_checksums_and_without(change, exported, capsys):
    (exported / "config.json").write_text(change)
    assert next(iter(verify_model(exported))).problems == ["config.json has changed"]
    assert "config.json has changed" in refused(["sample", str(exported), "--prompt", "def"], capsys)
    (exported / "checksums.json").unlink()
    assert "config.json" in refused(["verify", str(exported)], capsys)
    assert "config.json" in refused(["sample", str(exported), "--prompt", "def"], capsys)


@pytest.mark.parametrize(
    "header", [b"", b"\xff" * 64, (1 << 40).to_bytes(8, "little") + b"{}", b"\2\0\0\0\0\0\0\0{]"]
)
def test_a_wrong_safetensors_header_is_one_line(header, exported, capsys):
    (exported / "model.safetensors").write_bytes(header)
    reseal(exported)
    assert "model.safetensors cannot be read" in refused(["sample", str(exported), "--prompt", "def"], capsys)
    assert "model.safetensors cannot be read" in refused(["verify", str(exported)], capsys)


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", "a/b"])
def test_names_in_checksums_are_plain_names(name, exported):
    (exported.parent / "secret").write_text("secret")
    reseal(exported, **{name: hashlib.sha256(b"secret").hexdigest()})
    first = next(iter(verify_model(exported)))
    assert first.problems == [f"{name!r} is not the name of a file of this folder"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "checksums.json",
                                  "model.safetensors"])  # fmt: skip
@pytest.mark.parametrize("kind", ["pipe", "device", "link out", "deep", "huge", "not UTF-8", "folder"])
def test_whatever_stands_in_place_of_a_file_is_refused_at_once(kind, name, exported, capsys):
    path = exported / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind in ("device", "link out"):
        path.symlink_to("/dev/zero" if kind == "device" else "/etc/hostname")
    elif kind == "folder":
        path.mkdir()
    elif kind == "huge":
        path.touch()
        os.truncate(path, 65 << 20)
    else:
        path.write_bytes(DEEP.encode() if kind == "deep" else b'{"a": "\xff\xfe"}')
    for with_sums in (True, False):
        if not with_sums and name != "checksums.json":
            (exported / "checksums.json").unlink()
        assert name in refused(["sample", str(exported), "--prompt", "def"], capsys)


def test_a_snapshot_of_the_hub_s_cache_whose_files_are_links_to_blobs_loads(exported, tmp_path):
    snapshot, blobs = tmp_path / "models--me--it" / "snapshots" / "abc", tmp_path / "models--me--it" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(exported, blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", path.name))
    load_model(snapshot)


# --- tokenizers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [10**9, -1, "7"])
@pytest.mark.parametrize("place", ["added", "vocabulary"])
def test_ids_of_a_tokenizer_are_numbers_with_few_holes(place, number, exported):
    spec = json.loads((exported / "tokenizer.json").read_text())
    if place == "added":
        spec["added_tokens"][-1]["id"] = number
    else:
        spec["model"]["vocab"]["zz"] = number
    (exported / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(DataError, match=r"tokenizer\.json: .*(leaves out|whole number)"):
        Tokenizer.load(exported)


@pytest.mark.parametrize("config", [{"eos_token": 7}, {"chat_template": [1, {"name": "default"}]},
                                    {"chat_template": {"a": 1}}])  # fmt: skip
def test_a_tokenizer_s_odd_configuration_is_skipped(config, exported):
    (exported / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(exported).chat_template is None


# --- prepared data ------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path) -> Path:
    (tmp_path / "corpus.txt").write_text("some words to read\n" * 400)
    return prepare(str(tmp_path / "corpus.txt"), "bytes", tmp_path / "data", workers=1).folder


def test_names_in_the_manifest_of_prepared_data_stay_inside(data):
    for name in ("../corpus.txt", "/etc/hostname", "a/b/c", "", 7, None):
        manifest = read_manifest(data)
        manifest["splits"]["train"]["files"][0]["file"] = name
        write_manifest(data, manifest)
        with pytest.raises(DataError, match="is not the name of a file of this folder"):
            PreparedData.open(data)


@pytest.mark.parametrize("kind", ["pipe", "link out"])
def test_shards_are_regular_files_of_the_folder(kind, data):
    shard = next(data.glob("train-*.bin"))
    size = shard.stat().st_size
    shard.unlink()
    if kind == "pipe":
        os.mkfifo(shard)
    else:
        (data.parent / "elsewhere").write_bytes(b"\0" * size)
        shard.symlink_to(data.parent / "elsewhere")
    with pytest.raises(DataError, match=shard.name):
        PreparedData.open(data, verify=True)


def test_a_signed_manifest_that_lacks_something_or_is_deep_is_damaged(data):
    whole = read_manifest(data)
    for missing in ("splits", "tokenizer_files", "fingerprint", "vocab_size", "dtype"):
        write_manifest(data, {name: value for name, value in whole.items() if name != missing})
        with pytest.raises(DataError, match="damaged"):
            PreparedData.open(data)
    (data / "manifest.json").write_text(DEEP)
    with pytest.raises(DataError, match="nested too deeply"):
        PreparedData.open(data)
