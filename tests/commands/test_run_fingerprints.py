"""A run folder refuses other settings, tokenizers and data than its own. Locks, damaged checkpoints, bad places."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from dcdm.cli import main
from dcdm.config import ConfigError, DataError
from dcdm.data.store import write_manifest
from dcdm.data.tokenizers import Tokenizer
from dcdm.io.load import load_init, load_model
from dcdm.io.verify import verify_model
from dcdm.training.checkpoint import Checkpointer
from dcdm.training.checkpoint_folder import CheckpointError, load_record, newest_whole
from dcdm.training.run import run_training
from ranks import Child

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TEXT = "".join(f"def f{n}(x):\n    return x + {n * n}\n\n" for n in range(300))
SMALL = {
    "model.num_layers": 1, "model.hidden_size": 32, "model.context_length": 32, "train.batch_size": 4,
    "train.warmup_steps": 2, "evaluate_sequences": 4, "evaluate_samples": 2, "tensorboard": False,
    "train.steps": 4, "checkpoint_every": 2, "evaluate_every": 2, "data.tokenizer": "bpe:300",
}  # fmt: skip
run = functools.partial(run_training, load_init=load_init)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A place with a corpus, a cache and a run of four steps, to be copied."""
    place = tmp_path_factory.mktemp("finished")
    (place / "corpus.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCDM_CACHE", str(place / "cache"))
        assert (
            run("bdlm-debug", place / "run", changes={**SMALL, "data.sources": (str(place / "corpus.txt"),)}) == 0
        )
    return place


@pytest.fixture
def place(finished, tmp_path, monkeypatch):
    """The same run with two steps left to do; its cache is its own."""
    folder = tmp_path / "run"
    shutil.copytree(finished / "run", folder)
    shutil.copytree(finished / "cache", tmp_path / "cache")
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))
    return folder


def problems(folder: Path) -> dict[str, list[str]]:
    return {check.name: check.problems for check in verify_model(folder) if check.problems}


def prepared(place: Path) -> Path:
    return next(path.parent for path in (place.parent / "cache").rglob("manifest.json"))


def nll(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["nll"] for row in rows if "nll" in row]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_loading_a_run_or_a_checkpoint_imports_no_training_loop_and_a_pickle_is_never_opened(place):
    loading = "import sys, dcdm; [dcdm.load(path) for path in sys.argv[1:]]; print(*sys.modules)"
    command = [sys.executable, "-c", loading, str(place), str(place / "checkpoints" / "step-00000002")]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "dcdm.io.load" in loaded
    assert not {f"dcdm.training.{name}" for name in ("loop", "run", "checkpoint", "fsdp")} & set(loaded)
    (place / "model.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.pt is a pickle.* never opened"):
        load_model(place / "model.pt")


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [("learning_rate: 0.002", "learning_rate: 0.003"),
                                          ("rope_theta: 10000.0", "rope_theta: 30000.0")])  # fmt: skip
def test_a_flipped_bit_in_the_settings_is_found_by_train_verify_and_load(old, new, place):
    text = (place / "settings.yaml").read_text()
    assert old in text
    (place / "settings.yaml").write_text(text.replace(old, new))
    name = old.partition(":")[0]
    with pytest.raises(ConfigError, match=rf"{name} is .* and was "):
        run(None, place)
    assert (place / "settings.yaml").read_text() == text.replace(old, new)
    assert list(problems(place)) == ["settings"]
    with pytest.raises(ConfigError, match=name):
        load_model(place)
    (place / "settings.yaml").write_text(text.replace("log_every: 10", "log_every: 11"))  # of no consequence
    assert run(None, place) == 0


def test_without_settings_the_checkpoint_s_are_used_and_no_others(place):
    whole = (place / "settings.yaml").read_text()
    (place / "settings.yaml").unlink()
    assert list(problems(place)) == ["settings"]
    with pytest.raises(ConfigError, match=r"other settings.*train\.batch_size"):
        run("bdlm-debug", place)
    assert not (place / "settings.yaml").exists()
    assert run(None, place) == 0
    assert (place / "settings.yaml").read_text() == whole


def test_settings_that_are_slow_large_or_say_one_thing_twice_are_refused_at_once(place, tmp_path):
    file = tmp_path / "bomb.yaml"
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]
    for text, reason in (
        ("\n".join(lines), "aliases"), ("[" * 1500, "nested"), ("# " + "x" * (1 << 20), "larger"),
        ("seed: 1\nseed: 2", "line 2 names 'seed' again"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"--config .*{reason}"):
            run("bdlm-debug", tmp_path / "other", file=file)
        (place / "settings.yaml").write_text(text)
        with pytest.raises(ConfigError, match=f"settings.yaml.*{reason}"):
            load_model(place)


# --- tokenizer and data -------------------------------------------------------------------------------------------


def other_tokenizer(folder: Path) -> None:
    """Two merges of the tokenizer change places: the same size, other ids."""
    content = json.loads((folder / "tokenizer.json").read_text())
    merges = content["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    Tokenizer.load(folder)


def test_another_tokenizer_in_the_run_is_found_by_verify_and_load_and_repaired_by_train(place, capsys):
    whole = (place / "tokenizer" / "tokenizer.json").read_bytes()
    other_tokenizer(place / "tokenizer")
    assert list(problems(place)) == ["tokenizer"]
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not the tokenizer"):
        load_model(place)
    assert run(None, place) == 0
    assert "tokenizer is damaged; written again" in capsys.readouterr().err
    assert (place / "tokenizer" / "tokenizer.json").read_bytes() == whole


def test_another_tokenizer_in_the_data_stops_training(place):
    other_tokenizer(prepared(place) / "tokenizer")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        run(None, place)


def test_the_low_bit_of_every_token_of_a_shard_stops_training_and_fails_verify(place):
    assert run(None, place) == 0
    assert problems(place) == {}
    shard = next(prepared(place).glob("train-*.bin"))
    (np.fromfile(shard, dtype="<u2") ^ 1).tofile(shard)
    with pytest.raises(DataError, match=f"{shard.name} does not match its checksum"):
        run(None, place)
    assert list(problems(place)) == ["data"]


def test_other_data_under_the_name_of_the_old_are_refused(place):
    folder = prepared(place)
    shard = next(folder.glob("train-*.bin"))
    (np.fromfile(shard, dtype="<u2") ^ 1).tofile(shard)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    for entry in manifest["splits"]["train"]["files"]:
        entry["sha256"] = hashlib.sha256((folder / entry["file"]).read_bytes()).hexdigest()
    write_manifest(folder, manifest)
    with pytest.raises(ConfigError, match=r"the shards in .* are not those it was trained on"):
        run(None, place)


def test_a_prepared_folder_that_has_moved_resumes_the_run_and_another_text_does_not(place, finished):
    moved, other = place.parent / "moved", place.parent / "other.txt"
    prepared(place).rename(moved)
    other.write_text(TEXT + "pass\n")
    with pytest.raises(ConfigError, match=r"the shards in .* are not those it was trained on"):
        run(None, place, changes={"data.sources": (str(other),)})
    assert run(None, place, changes={"data.sources": (str(moved),)}) == 0
    assert nll(place) == nll(finished / "run")


# --- the lock -----------------------------------------------------------------------------------------------------


def hold(folder):
    held = Checkpointer(folder)
    time.sleep(60)
    held.close()


def test_of_two_starts_at_once_the_loser_changes_nothing_and_says_who_holds_the_folder(place, refused, monkeypatch):
    monkeypatch.setattr("dcdm.training.checkpoint.PATIENCE", 0.2)
    lock = place / "checkpoints" / ".lock"
    lock.write_text("")
    holder = Child(hold, place / "checkpoints")
    try:
        while not lock.read_text().endswith("\n"):
            time.sleep(0.01)
        (place / "settings.yaml").unlink()
        before = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}
        said = refused("train", "--run", str(place))
        assert f"process {holder.process.pid} on " in said
        assert time.strftime("since %Y-%m-%d") in said
        assert "Errno" not in said
        assert {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()} == before
    finally:
        holder.kill()
    assert run(None, place) == 0, "a killed process holds nothing"


def test_a_start_that_waited_for_another_s_end_leaves_the_other_s_settings_alone(place, monkeypatch):
    settings = (place / "settings.yaml").read_text()
    (place / "settings.yaml").rename(place / ".aside")
    (place / "checkpoints").rename(place / ".checkpoints")
    open_folder = Checkpointer._open

    def after_another(self) -> None:  # the other run is there once the lock is free
        (place / ".aside").rename(place / "settings.yaml")
        open_folder(self)

    monkeypatch.setattr(Checkpointer, "_open", after_another)
    with pytest.raises(ConfigError, match="another process began this run just now"):
        run("bdlm-debug", place, changes={**SMALL, "train.seed": 5})
    assert (place / "settings.yaml").read_text() == settings


def test_a_start_that_fails_early_leaves_no_folder_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError):
        run(
            "bdlm-debug",
            tmp_path / "runs" / "new",
            changes={**SMALL, "data.sources": (str(tmp_path / "none.txt"),)},
        )
    assert not (tmp_path / "runs" / "new").exists()


# --- damaged checkpoints ------------------------------------------------------------------------------------------


def test_a_skipped_checkpoint_is_announced_with_its_name_and_reason(finished, place, capsys):
    shutil.copytree(finished / "run" / "checkpoints" / "step-00000004", place / "checkpoints" / "step-00000004")
    flip(place / "checkpoints" / "step-00000004" / "state.json", 9)
    assert run(None, place) == 0
    said = capsys.readouterr().err
    assert "step-00000004: state.json is damaged" in said
    assert "resuming from step 2" in said


def test_sample_names_the_damaged_file_of_a_run(place, refused):
    flip(place / "checkpoints" / "step-00000002" / "tensors.safetensors", 99)
    said = refused("sample", str(place), "--prompt", "def")
    assert "step-00000002: tensors.safetensors is damaged" in said
    assert "train further" not in said


# --- bad places and torn files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "under a file", "/proc"])
def test_a_run_folder_that_cannot_be_written_is_refused_in_one_line_before_anything_starts(
    kind, tmp_path, refused, monkeypatch
):
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("mine")
    folder = {"file": tmp_path / "file", "under a file": tmp_path / "file" / "run", "/proc": Path("/proc/run")}[
        kind
    ]
    said = refused("train", "--preset", "bdlm-debug", "--run", str(folder), "--steps", "1")
    assert str(folder) in said
    assert len(said.splitlines()) == 1
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "cache").exists()


TORN = [
    b"123\n", b"[]\n", b"null\n", b'{"step": "x"}\n', b"\x00\xff\xfe\n", b"[" * 99_999 + b"\n",
    b'{"step": 1, "evaluation": 7}\n', b'{"evaluation": {}}\n', b'{"step": 3, "lo',
]  # fmt: skip


def test_torn_lines_of_the_metrics_do_not_stop_training(finished, place):
    rows = (place / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (place / "metrics.jsonl").write_bytes(b"".join([*rows, *TORN]))
    assert run(None, place) == 0
    again = (place / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    whole = (finished / "run" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert [row for row in again if row not in TORN] == whole


def test_a_hangup_saves_and_leaves_like_a_request_to_stop(place, monkeypatch):
    from dcdm.training.metrics import Recorder

    on_step = Recorder.on_step

    def tell(self, report) -> None:
        on_step(self, report)
        os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr(Recorder, "on_step", tell)
    assert run(None, place) == 130
    newest, _ = newest_whole(place / "checkpoints")
    assert newest is not None
    assert newest.name == "step-00000003"
    assert load_record(newest)["loader"]["samples"] == 12
    assert yaml.safe_load((place / "settings.yaml").read_text())["train"]["steps"] == 4
    with pytest.raises(CheckpointError):
        load_record(place)


def test_a_disk_that_fails_while_a_run_trains_is_told_in_one_line_and_the_run_resumes_later(
    place, capsys, monkeypatch
):
    from dcdm.training import metrics

    def full(path: Path, row: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(metrics, "_append", full)
        with pytest.raises(SystemExit) as ending:
            main(["train", "--run", str(place)])
    said = capsys.readouterr().err.splitlines()[-1]
    assert ending.value.code == 1
    assert os.strerror(errno.ENOSPC) in said
    assert "the same command resumes" in said
    assert run(None, place) == 0
