"""A run's checkpoint folder on disk: manifests, names, order, and moves that a crash cannot leave half done.

No format notices a single flipped bit by itself, so every file of a checkpoint is held against a SHA-256 in its
manifest. The manifest holds one of itself too: its bytes must be exactly what its content is written as.

step-00001000            a whole checkpoint; it got this name by a rename, when nothing was left to write
step-00001000.partial    being written, or left behind by a run that was killed
step-00001000.replaced   an older checkpoint of the same step while the new one takes its place
step-00001000.deleted    on its way out
.lock                    held by the run that writes here
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy
import torch

from dcdm.config import VERSION, DataError
from dcdm.files import UnreadableFile, file_digest, listed_file, parse_json, read_limited, sync_folder

try:
    import fcntl
except ImportError:  # not on Windows; two runs in one folder are then not noticed
    fcntl = None  # type: ignore[assignment]

PARTIAL, REPLACED, DELETED = ".partial", ".replaced", ".deleted"
LOCK = ".lock"
MANIFEST = "manifest.json"
FORMAT = 2
FORMATS = (1, 2)  # those that can be read; the first kept PyTorch's own metadata, a pickle
STEP_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used; the message names the folder and what to do."""


class UnusableCheckpoint(CheckpointError, DataError):
    """What is on the disk cannot be used: damaged, of another run, locked, or in a place that cannot be written."""


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
    return {
        "dcdm": VERSION,
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
    """The manifest of a checkpoint, whole and unaltered, or an UnusableCheckpoint that says what is wrong."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        raise UnusableCheckpoint(f"{folder}: {MANIFEST} is missing")
    try:
        raw = read_limited(listed_file(folder, MANIFEST))
    except UnreadableFile as error:
        raise UnusableCheckpoint(f"{folder}: {MANIFEST} cannot be read ({error})") from error
    try:
        content = parse_json(raw)
        seal = content.pop("seal")
        if _render(content).encode() != raw:
            raise ValueError(seal)
        if (written := content["format"]) not in FORMATS:
            raise UnusableCheckpoint(
                f"{folder}: format {written} is not one that this version reads ({', '.join(map(str, FORMATS))}); "
                f"it was written by dcdm {content.get('versions', {}).get('dcdm', 'unknown')}"
            )
        files = tuple(FileRecord(**entry) for entry in content.pop("files"))
        manifest = Manifest(files=files, **content)
        _check_types(manifest)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnusableCheckpoint(f"{folder}: {MANIFEST} is damaged") from None
    return manifest


def _check_types(manifest: Manifest) -> None:
    """What a sealed manifest may still have wrong: its seal is no signature."""
    if not (_counts(manifest.step, manifest.ranks) and isinstance(manifest.metrics, dict)):
        raise ValueError("step, ranks or metrics")
    for value in manifest.metrics.values():
        if value is not None and not isinstance(value, int | float):
            raise ValueError("metrics")
    for entry in manifest.files:
        if not (_counts(entry.size) and isinstance(entry.name, str) and isinstance(entry.sha256, str)):
            raise ValueError("files")


def _counts(*values: Any) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


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
        try:
            path = listed_file(folder, entry.name)
            size = path.stat().st_size
            if size != entry.size:
                problems.append(f"{entry.name} has {size} bytes instead of {entry.size}")
            elif record(path).sha256 != entry.sha256:
                problems.append(f"{entry.name} is damaged: its SHA-256 is not the manifest's")
        except UnreadableFile as error:
            problems.append(str(error))
        except FileNotFoundError:
            problems.append(f"{entry.name} is missing")
        except OSError as error:
            problems.append(f"{entry.name} cannot be read ({error.strerror})")
    return problems


# --- the folder -------------------------------------------------------------------------------------------------


class CheckpointFolder:
    """One folder of checkpoints. Only one process of a run changes it; reading needs no `open`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock: IO[str] | None = None

    def open(self, patience: float = 5.0) -> list[str]:
        """Make the folder, lock it and tidy up after a killed run; what was found left over.

        Raises when another run still holds the lock after `patience` seconds.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._acquire(patience)
        found = []
        for left in sorted(self.folder.iterdir()):
            if left.suffix not in (PARTIAL, REPLACED, DELETED) or not STEP_NAME.fullmatch(left.stem):
                continue
            found.append(left.name)
            if left.suffix == REPLACED and not left.with_suffix("").exists():
                os.rename(left, left.with_suffix(""))
            else:
                shutil.rmtree(left)
        return found

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def leave_no_trace(self) -> None:
        """Let go of a folder that nothing was written to: it goes, and the run folder too if that is empty."""
        if self._lock is not None and not self.checkpoints():
            (self.folder / LOCK).unlink(missing_ok=True)  # while it is held: nobody locks a file that is gone
        self.close()
        with suppress(OSError):
            self.folder.rmdir()
            self.folder.parent.rmdir()

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}{PARTIAL}"

    def checkpoints(self) -> list[Path]:
        """Checkpoints under their final names, the latest step first."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if STEP_NAME.fullmatch(path.name)]
        return sorted(found, key=_step, reverse=True)

    def commit(self, step: int) -> Path:
        """Give the partial checkpoint of `step` its final name; its files must be on disk already."""
        final, partial = self.path(step), self.partial(step)
        replaced = final.with_suffix(REPLACED)
        sync_folder(partial)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(final, replaced)
        try:
            os.rename(partial, final)
        except OSError:
            if replaced.exists():
                os.rename(replaced, final)
            raise
        sync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def discard(self, step: int) -> None:
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def prune(
        self,
        newest: Path,
        *,
        keep_last: int,
        keep_best: int,
        metric: str,
        mode: Literal["min", "max"],
        damaged: Collection[Path] = (),
        on_drop: Callable[[], None] = lambda: None,
    ) -> list[Path]:
        """Drop all up to `newest` but the last and the best; those known to be damaged count as neither.

        Later steps than `newest` are not this run's and are left alone.
        """
        past = [path for path in self.checkpoints() if _step(path) <= _step(newest)]
        whole = {path: read for path in past if path not in damaged and (read := _readable(path))}
        sign = 1 if mode == "min" else -1
        scores = {
            path: sign * score for path, read in whole.items() if (score := read.metrics.get(metric)) is not None
        }
        best = sorted(scores, key=lambda path: (scores[path], _step(path)))[:keep_best]
        kept = {newest, *list(whole)[:keep_last], *best}
        dropped = [path for path in past if path not in kept]
        for path in dropped:
            leaving = path.with_suffix(DELETED)
            os.rename(path, leaving)  # at once gone under its own name: never half a checkpoint there
            on_drop()
            shutil.rmtree(leaving, ignore_errors=True)
        return dropped

    def _acquire(self, patience: float) -> None:
        if fcntl is None or self._lock is not None:
            return
        deadline = time.monotonic() + patience
        while (lock := _try_lock(self.folder / LOCK)) is None:
            if time.monotonic() > deadline:
                raise UnusableCheckpoint(
                    f"another run is writing to {self.folder}: {_holder(self.folder / LOCK)}; "
                    "stop it or choose another folder"
                )
            time.sleep(0.1)
        self._lock = lock


def _try_lock(path: Path) -> IO[str] | None:
    """The lock file, held and with the holder's name in it; None where another process holds it."""
    lock = path.open("a+")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with its process, however that ends
    except (BlockingIOError, PermissionError):
        lock.close()
        return None
    except OSError:  # a file system without locks
        return lock
    if not (path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat())):  # removed meanwhile
        lock.close()
        return None
    lock.truncate(0)
    lock.write(json.dumps({"pid": os.getpid(), "host": platform.node(), "since": time.time()}) + "\n")
    lock.flush()
    return lock


def _holder(path: Path) -> str:
    """Who holds the lock, as far as the lock file says."""
    try:
        held = parse_json(read_limited(path, 4096))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(held["since"]))
        return f"process {int(held['pid'])} on {str(held['host'])[:64]}, since {since}"
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        return "a process that left no name"


def _step(path: Path) -> int:
    match = STEP_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _readable(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None
