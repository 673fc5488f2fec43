"""The manifest of a checkpoint: what each of its files must be, to the bit.

No format notices a single flipped bit by itself, so every file is held against a SHA-256. The manifest holds one of
itself too: its bytes must be exactly what its content is written as.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from dcdm.files import file_digest

MANIFEST = "manifest.json"
FORMAT = 1
STEP_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used; the message names the folder and what to do."""


@dataclass(frozen=True)
class FileRecord:
    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Written last, so that its presence says that all the rest is there."""

    step: int
    metrics: dict[str, float | None]
    """Figures of that step; one that was not finite is None."""
    ranks: int
    """Processes that wrote it."""
    files: tuple[FileRecord, ...]
    versions: dict[str, str]
    format: int = FORMAT


def versions() -> dict[str, str]:
    from dcdm import __version__

    return {
        "dcdm": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """JSON has no NaN and no infinity."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}


# --- writing ------------------------------------------------------------------------------------------------------


def record(path: Path) -> FileRecord:
    return FileRecord(path.name, path.stat().st_size, file_digest(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_text(folder / MANIFEST, _render(asdict(manifest)))


def write_text(path: Path, text: str) -> None:
    """A whole file, on disk when this returns."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _render(content: dict[str, Any]) -> str:
    seal = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "seal": seal}, indent=1, sort_keys=True) + "\n"


# --- reading ------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, whole and unaltered, or a CheckpointError that says what is wrong with it."""
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: {MANIFEST} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: {MANIFEST} cannot be read ({error.strerror})") from error
    try:
        content = json.loads(raw)
        seal = content.pop("seal")
        if _render(content).encode() != raw:
            raise ValueError(seal)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged") from None
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{folder}: format {content['format']} is not the one this version reads ({FORMAT}); it was written by "
            f"dcdm {content.get('versions', {}).get('dcdm', 'unknown')}"
        )
    files = tuple(FileRecord(**entry) for entry in content.pop("files"))
    return Manifest(files=files, **content)


def verify(path: str | Path) -> list[str]:
    """Everything that is wrong with the checkpoint at `path`; an empty list if it is whole."""
    folder = Path(path)
    if not folder.is_dir():
        return [f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist"]
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error).removeprefix(f"{folder}: ")]
    return stray_files(folder, manifest) + altered_files(folder, manifest.files)


def stray_files(folder: Path, manifest: Manifest) -> list[str]:
    """Entries of the folder that the manifest does not know, and a folder that is named after another step."""
    problems = []
    if (named := STEP_NAME.fullmatch(folder.name)) and int(named[1]) != manifest.step:
        problems.append(f"the folder is named after step {int(named[1])}, but holds step {manifest.step}")
    known = {MANIFEST, *(entry.name for entry in manifest.files)}
    try:
        strays = sorted(entry.name for entry in folder.iterdir() if entry.name not in known)
    except OSError as error:
        return [f"the folder cannot be listed ({error.strerror})"]
    return problems + [f"{name} is not in the manifest" for name in strays]


def altered_files(folder: Path, files: Iterable[FileRecord]) -> list[str]:
    """Those of `files` that are missing, of another size or of other content."""
    problems = []
    for entry in files:
        path = folder / entry.name
        try:
            size = path.stat().st_size
            if size != entry.size:
                problems.append(f"{entry.name} has {size} bytes instead of {entry.size}")
            elif record(path).sha256 != entry.sha256:
                problems.append(f"{entry.name} is damaged: its SHA-256 is not the manifest's")
        except FileNotFoundError:
            problems.append(f"{entry.name} is missing")
        except OSError as error:
            problems.append(f"{entry.name} cannot be read ({error.strerror})")
    return problems
