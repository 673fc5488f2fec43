"""Checkpoints on the disk: what makes one whole, how it is read, and how a run's folder of them changes.

    step-00001000/             a whole checkpoint; it got this name by a rename, when nothing was left to write
      manifest.json            SHA-256 of every other file, step, metrics, versions; and one of its own content
      rank-00000.safetensors   what this rank held: its shards, and where each lies in the whole tensor
      state.json               the run's record and the optimizer's settings
    step-00001000.partial      being written, or left behind by a run that was killed
    step-00001000.replaced     an older checkpoint of the same step while the new one takes its place
    step-00001000.deleted      on its way out
    .lock                      held by the run that writes here

No format notices a single flipped bit by itself, so nothing is read before the manifest holds. It protects against
damage, not against malice: who can write a checkpoint can write its manifest. But all there is to read is JSON and
safetensors, so a stranger's checkpoint can be wrong and cannot run anything. There are no pickles in this format.
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
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from torch import Tensor

from dcdm.config import VERSION, DataError
from dcdm.files import (
    UnreadableFile,
    file_digest,
    listed_file,
    parse_json,
    read_json_object,
    read_limited,
    replace_folder,
    write_whole,
)

try:
    import fcntl
except ImportError:  # not on Windows; two runs in one folder are then not noticed
    fcntl = None  # type: ignore[assignment]

PARTIAL, REPLACED, DELETED = ".partial", ".replaced", ".deleted"
MANIFEST, STATE, LOCK = "manifest.json", "state.json", ".lock"
SHARDS = "shards"  # entry of a safetensors header: {name: [shape of the whole tensor, where the shard begins]}
FORMAT = 3
STEP_NAME = re.compile(r"step-(\d{8,})")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip

Index = tuple[int, ...]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used; the message names the folder and what to do."""


class UnusableCheckpoint(CheckpointError, DataError):
    """What is on the disk cannot be used: damaged, of another run, locked, or in a place that cannot be written."""


# --- manifests ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """Written last, so that its presence says that all the rest is there."""

    step: int
    metrics: dict[str, float | None]
    """Figures of that step; one that was not finite is None."""
    files: dict[str, str]
    """SHA-256 of every other file."""
    versions: dict[str, str]
    format: int = FORMAT


def versions() -> dict[str, str]:
    return {
        "dcdm": VERSION,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_whole(folder / MANIFEST, _sealed(asdict(manifest)))


def _sealed(content: dict[str, Any]) -> bytes:
    """The bytes of a manifest, with a SHA-256 of its own content."""
    seal = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**content, "seal": seal}, indent=1, sort_keys=True) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, whole and unaltered, or an UnusableCheckpoint that says what is wrong."""
    if not os.path.lexists(folder / MANIFEST):
        raise UnusableCheckpoint(f"{folder}: {MANIFEST} is missing")
    try:
        raw = read_limited(listed_file(folder, MANIFEST))
    except UnreadableFile as error:
        raise UnusableCheckpoint(f"{folder}: {MANIFEST} cannot be read ({error})") from error
    try:
        content = parse_json(raw)
        del content["seal"]
        if _sealed(content) != raw:
            raise ValueError("seal")
        if (found := content["format"]) != FORMAT:
            raise UnusableCheckpoint(
                f"{folder}: it has format {found}, and this version reads format {FORMAT} alone, which has no "
                f"pickles; export it with dcdm {content.get('versions', {}).get('dcdm', 'unknown')}, which wrote it"
            )
        manifest = Manifest(**content)
        figures = all(value is None or isinstance(value, int | float) for value in manifest.metrics.values())
        if not (_is_count(manifest.step) and figures and all(isinstance(s, str) for s in manifest.files.values())):
            raise ValueError("a sealed manifest may still be wrong: its seal is no signature")
    except UnusableCheckpoint:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnusableCheckpoint(f"{folder}: {MANIFEST} is damaged") from None
    return manifest


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def verify_checkpoint(path: str | Path) -> list[str]:
    """Everything that is wrong with the checkpoint at `path`; an empty list if it is whole."""
    folder = Path(path)
    if not folder.is_dir():
        return [f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist"]
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error).removeprefix(f"{folder}: ")]
    problems = []
    if (named := STEP_NAME.fullmatch(folder.name)) and int(named[1]) != manifest.step:
        problems.append(f"the folder is named after step {int(named[1])}, but holds step {manifest.step}")
    try:
        strays = sorted({entry.name for entry in folder.iterdir()} - {MANIFEST, *manifest.files})
    except OSError as error:
        return [f"the folder cannot be listed ({error.strerror})"]
    problems += [f"{name} is not in the manifest" for name in strays]
    with ThreadPoolExecutor() as pool:  # hashing frees the interpreter; large checkpoints have many files
        found = pool.map(lambda entry: _damage(folder, *entry), manifest.files.items())
    return problems + [problem for problem in found if problem is not None]


def _damage(folder: Path, name: str, sha256: str) -> str | None:
    """What is wrong with a file that should have this SHA-256."""
    try:
        same = file_digest(listed_file(folder, name)) == sha256
        return None if same else f"{name} is damaged: its SHA-256 is not the manifest's"
    except UnreadableFile as error:
        return str(error)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def check_whole(path: Path) -> None:
    if problems := verify_checkpoint(path):
        raise UnusableCheckpoint(f"{path} is not a whole checkpoint: {'; '.join(problems)}")


def newest_whole(folder: str | Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest checkpoint in `folder` that is whole, and newer ones that are not, with the reason; reads only."""
    skipped: list[tuple[Path, str]] = []
    for path in CheckpointFolder(folder).checkpoints():
        problems = verify_checkpoint(path)
        if not problems:
            return path, skipped
        skipped.append((path, "; ".join(problems)))
    return None, skipped


# --- what a checkpoint holds --------------------------------------------------------------------------------------


def load_weights(path: str | Path, part: str = "model") -> dict[str, Tensor]:
    """The whole weights of a checkpoint in one process, whatever number of ranks wrote them; nothing else is read.

    `part` is `model`, or the name of a further set of tensors, such as `ema`.
    """
    path = Path(path)
    check_whole(path)
    prefix = _prefix(part)
    stored = {name: entry for name, entry in read_index(path).items() if name.startswith(prefix)}
    if not stored:
        raise UnusableCheckpoint(f"{path} holds no {part!r}")
    weights = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in stored.items()}
    read_tensors(path, {name: (tensor, (0,) * tensor.dim()) for name, tensor in weights.items()})
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}


def stored_shapes(path: Path, part: str = "model") -> dict[str, Index]:
    """The shapes of what `load_weights` would give, without reading it."""
    prefix = _prefix(part)
    return {n.removeprefix(prefix): t.shape for n, t in read_index(path).items() if n.startswith(prefix)}


def _prefix(part: str) -> str:
    return "model." if part == "model" else f"tensors.{part}."


def load_record(path: str | Path) -> dict[str, Any]:
    """The `record` that was saved with the checkpoint at `path`; see `load_weights` for its tensors."""
    check_whole(Path(path))
    return read_state(Path(path))[0]


def read_state(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """The record and the optimizer's settings of a checkpoint that has been verified."""
    try:
        state = read_json_object(listed_file(path, STATE))
        if not isinstance(state["record"], dict):
            raise UnreadableFile("its record is not a JSON object")
        return state["record"], state["optimizer"]
    except (UnreadableFile, KeyError) as error:
        raise UnusableCheckpoint(f"cannot read {path / STATE}: {error}") from error


@dataclass(frozen=True)
class StoredTensor:
    dtype: torch.dtype
    shape: Index


def read_index(folder: Path) -> dict[str, StoredTensor]:
    """Types and shapes of all tensors of a checkpoint; refused unless their shards make up the whole."""
    found: dict[str, StoredTensor] = {}
    filled: dict[str, int] = {}
    for file in _shard_files(folder):
        with _opened(file) as (_, shards):
            for name, (entry, start, sizes) in shards.items():
                inside = all(at + size <= full for at, size, full in zip(start, sizes, entry.shape, strict=True))
                if not inside or found.setdefault(name, entry) != entry:
                    raise UnusableCheckpoint(f"cannot read {file}: {name[:80]!r} lies outside of its tensor")
                filled[name] = filled.get(name, 0) + math.prod(sizes)
    for name, entry in found.items():
        if filled[name] != math.prod(entry.shape):
            raise UnusableCheckpoint(f"cannot read {folder}: the shards of {name[:80]!r} do not make up the whole")
    return found


def read_tensors(folder: Path, targets: Mapping[str, tuple[Tensor, Index]]) -> None:
    """Fill tensors in place: each is the part of the whole one that begins at an index, on any number of ranks."""
    for file in _shard_files(folder):
        with _opened(file) as (stored, shards):
            for name in targets.keys() & shards.keys():
                target, here = targets[name]
                _, there, sizes = shards[name]
                low = [max(a, b) for a, b in zip(here, there, strict=True)]
                ends = zip(here, target.shape, there, sizes, strict=True)
                high = [min(a + size, b + other) for a, size, b, other in ends]
                if any(first >= last for first, last in zip(low, high, strict=True)):
                    continue
                into, out_of = (
                    tuple(slice(first - at, last - at) for first, last, at in zip(low, high, start, strict=True))
                    for start in (here, there)
                )
                target[into].copy_(stored.get_slice(name)[out_of])


def _shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.safetensors"))


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, dict[str, tuple[StoredTensor, Index, Index]]]]:
    """An open file of shards, and for each by name: the tensor that it is a part of, its first index, its shape."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(listed_file(file.parent, file.name), framework="pt", device="cpu") as stored:
            places = parse_json((stored.metadata() or {})[SHARDS].encode())
            shards = {}
            for name in stored.keys():  # noqa: SIM118 (it is not a dict)
                view, (shape, start) = stored.get_slice(name), places[name]
                sizes = tuple(view.get_shape())
                if not (len(shape) == len(start) == len(sizes) and all(map(_is_count, [*shape, *start]))):
                    raise ValueError(f"{name[:80]!r} has a wrong shape")
                shards[name] = StoredTensor(DTYPES[view.get_dtype()], tuple(shape)), tuple(start), sizes
            yield stored, shards
    except UnusableCheckpoint:
        raise
    except (SafetensorError, UnreadableFile, OSError, KeyError, TypeError, ValueError) as error:
        raise UnusableCheckpoint(f"cannot read {file}: {error}") from error


# --- the folder of a run ------------------------------------------------------------------------------------------


class CheckpointFolder:
    """One folder of checkpoints. Only one process of a run changes it; reading needs no `open`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock: IO[str] | None = None

    def open(self, patience: float = 5.0) -> None:
        """Make the folder, lock it and tidy up after a killed run.

        Raises when another run still holds the lock after `patience` seconds.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._acquire(patience)
        for left in sorted(self.folder.iterdir()):
            if left.suffix not in (PARTIAL, REPLACED, DELETED) or not STEP_NAME.fullmatch(left.stem):
                continue
            if left.suffix == REPLACED and not left.with_suffix("").exists():
                os.rename(left, left.with_suffix(""))
            else:
                shutil.rmtree(left)

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

    def begin(self, step: int) -> None:
        """An empty place for the files of a checkpoint."""
        self.discard(step)
        self.partial(step).mkdir()

    def discard(self, step: int) -> None:
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def commit(self, step: int) -> Path:
        """Give the partial checkpoint of `step` its final name; its files must be on disk already."""
        replace_folder(self.partial(step), self.path(step))
        return self.path(step)

    def prune(
        self,
        newest: Path,
        *,
        keep_last: int,
        keep_best: int,
        metric: str,
        damaged: Collection[Path] = (),
        on_drop: Callable[[], None] = lambda: None,
    ) -> None:
        """Drop all up to `newest` but the last and the best; those known to be damaged count as neither.

        Later steps than `newest` are not this run's and are left alone.
        """
        past = [path for path in self.checkpoints() if _step(path) <= _step(newest)]
        metrics = {}
        for path in past:
            with suppress(CheckpointError):
                if path not in damaged:
                    metrics[path] = read_manifest(path).metrics.get(metric)
        scored = [path for path in metrics if metrics[path] is not None]
        best = sorted(scored, key=lambda path: (metrics[path], _step(path)))[:keep_best]
        kept = {newest, *list(metrics)[:keep_last], *best}
        for path in past:
            if path in kept:
                continue
            leaving = path.with_suffix(DELETED)
            os.rename(path, leaving)  # at once gone under its own name: never half a checkpoint there
            on_drop()
            shutil.rmtree(leaving, ignore_errors=True)

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
