"""Checkpoints that survive being killed at any moment, and resume bit for bit.

A save copies the state to memory, lets training continue, and works in a thread: every rank writes its shards aside
and hashes them, rank 0 writes the manifest and renames the folder into place. A checkpoint is whole or not there.

Tensors go through PyTorch's distributed checkpoint, which can spread them over another number of ranks when they
are read; where each of them lies is kept as JSON (`checkpoint_metadata.py`). Nothing is read before the manifest
holds.
"""

from __future__ import annotations

import errno
import json
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcdm.config import ConfigError
from dcdm.distributed import World, broadcast_object, gather_objects
from dcdm.files import UnreadableFile, listed_file, read_json_object
from dcdm.training import checkpoint_folder as manifests
from dcdm.training import checkpoint_state
from dcdm.training.checkpoint_folder import (
    CheckpointError,
    CheckpointFolder,
    FileRecord,
    Manifest,
    UnusableCheckpoint,
    verify,
)
from dcdm.training.checkpoint_metadata import METADATA, PlainWriter
from dcdm.training.checkpoint_state import TrainState, load_weights

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Resumed",
    "TrainState",
    "UnusableCheckpoint",
    "load_record",
    "load_weights",
    "newest_whole",
    "read_record",
    "verify",
]

T = TypeVar("T")
Phase = Literal["staged", "written", "hashed", "sealed", "renamed", "dropping", "pruned"]
STATE = "state.json"


@dataclass(frozen=True)
class Resumed:
    step: int
    path: Path
    record: dict[str, Any]
    metrics: dict[str, float | None]
    skipped: list[tuple[Path, str]]
    """Newer checkpoints that were passed over, and why."""


@dataclass(frozen=True)
class _Failure:
    message: str
    kind: type[CheckpointError] = CheckpointError


class Checkpointer:
    """The checkpoints of one run. Every method, and the constructor, must be called by all ranks together.

    `keep_last` and `keep_best` checkpoints stay, the best by `metric` (of those given to `save`), whose good end
    `mode` names. `on_phase` is told how far a save has come, mostly from the thread that saves.
    """

    def __init__(
        self,
        folder: str | Path,
        world: World | None = None,
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        metric: str = "loss",
        mode: Literal["min", "max"] = "min",
        on_phase: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        if keep_last < 1:
            raise ConfigError(f"keep_last={keep_last} must be at least 1: a run needs a checkpoint to resume from")
        if keep_best < 0:
            raise ConfigError(f"keep_best={keep_best} must be 0 or more")
        if mode not in ("min", "max"):
            raise ConfigError(f"mode={mode!r} must be 'min' or 'max'")
        self.world = world or World()
        self.keep_last, self.keep_best, self.metric, self.mode = keep_last, keep_best, metric, mode
        self.on_phase = on_phase
        self._checkpoints = CheckpointFolder(folder)
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._latest: int | None = None
        self._damaged: set[Path] = set()
        self.leftovers: list[str] = self._on_main(self._opened, f"cannot use {folder} for checkpoints")
        """What a killed run had left half done; it has been tidied up."""

    @property
    def folder(self) -> Path:
        return self._checkpoints.folder

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish what is under way and let others use the folder."""
        try:
            self.wait()
        finally:
            self._checkpoints.close()

    def leave_no_trace(self) -> None:
        """Let go of a folder in which no run has begun."""
        if self.world.is_main:
            self._checkpoints.leave_no_trace()

    def _opened(self) -> list[str]:
        try:
            return self._checkpoints.open()
        except OSError as error:
            raise UnusableCheckpoint(_advice(error)) from error

    # --- saving ---------------------------------------------------------------------------------------------------

    def save(
        self, step: int, state: TrainState, metrics: Mapping[str, float] | None = None, *, wait: bool = False
    ) -> None:
        """Save `state` as of `step`, in the background unless `wait`.

        When this returns, `state` has been copied and may change. One save is under way at a time: a second one
        waits for the first. Raises CheckpointError if that, or this one when waited for, has failed; checkpoints of
        earlier steps are whole in any case. A step that was just saved or resumed from is not saved again.
        """
        self.wait()
        if step == self._latest:
            return
        tensors, groups = checkpoint_state.collect(state)
        shared = _json({"record": state.record, "optimizer": groups}, "record")
        figures = manifests.finite(dict(metrics or {}))
        if self.world.is_main:
            self._checkpoints.discard(step)
        written = dcp.async_save(
            tensors,
            storage_writer=PlainWriter(self._checkpoints.partial(step)),
            process_group=self.world.background,
            no_dist=self.world.size == 1,
        )
        assert isinstance(written, Future)
        self.on_phase("staged")
        self._thread = threading.Thread(
            target=self._finish, args=(step, written, shared, figures), name=f"checkpoint of step {step}"
        )
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when no save is under way; raise CheckpointError if the last one failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            message, self._failure = self._failure, None
            raise CheckpointError(message)

    def _finish(self, step: int, written: Future[Any], shared: str, metrics: dict[str, float | None]) -> None:
        """What the thread does once the copy is made. All ranks come to the same end."""
        doing = f"cannot save the checkpoint of step {step} in {self.folder}"
        try:
            mine = _attempt(doing, lambda: self._write_rest(step, written, shared))
            everyone = gather_objects(mine, self.world, background=True)
            outcome: Path | _Failure | None = None
            if self.world.is_main:
                failed = [result for result in everyone if isinstance(result, _Failure)]
                records = [entry for result in everyone if isinstance(result, list) for entry in result]
                outcome = failed[0] if failed else _attempt(doing, lambda: self._seal(step, records, metrics))
                if isinstance(outcome, _Failure):
                    self._checkpoints.discard(step)
                elif isinstance(
                    failure := _attempt("cannot drop old checkpoints", lambda: self._prune(step)), _Failure
                ):
                    warnings.warn(failure.message, stacklevel=2)  # the new one is whole all the same
            outcome = broadcast_object(outcome, self.world, background=True)
        except Exception as error:  # another rank is gone
            outcome = _Failure(f"{doing}: lost contact to the other processes ({error})")
        if isinstance(outcome, _Failure):
            self._failure = outcome.message
        else:
            self._latest = step

    def _write_rest(self, step: int, written: Future[Any], shared: str) -> list[FileRecord]:
        """This rank's other files, and the digests of all of its files."""
        written.result()
        self.on_phase("written")
        partial, rank = self._checkpoints.partial(step), self.world.rank
        mine = list(partial.glob(f"__{rank}_*"))
        if self.world.is_main:
            manifests.write_text(partial / STATE, shared)
            mine += [partial / STATE, partial / METADATA]
        records = [manifests.record(path) for path in mine]
        self.on_phase("hashed")
        return records

    def _seal(self, step: int, records: list[FileRecord], metrics: dict[str, float | None]) -> Path:
        """Manifest and rename."""
        partial = self._checkpoints.partial(step)
        records = sorted(records, key=lambda entry: entry.name)
        present = sorted(path.name for path in partial.iterdir())
        if present != [entry.name for entry in records]:
            raise CheckpointError(
                f"rank 0 sees {len(present)} files where {len(records)} were written; "
                "the folder must be one that all machines share"
            )
        manifests.write_manifest(
            partial, Manifest(step, metrics, self.world.size, tuple(records), manifests.versions())
        )
        self.on_phase("sealed")
        final = self._checkpoints.commit(step)
        self.on_phase("renamed")
        return final

    def _prune(self, step: int) -> None:
        newest = self._checkpoints.path(step)
        self._damaged.discard(newest)
        self._checkpoints.prune(
            newest,
            keep_last=self.keep_last,
            keep_best=self.keep_best,
            metric=self.metric,
            mode=self.mode,
            damaged=self._damaged,
            on_drop=lambda: self.on_phase("dropping"),
        )
        self.on_phase("pruned")

    # --- resuming -------------------------------------------------------------------------------------------------

    def resume(
        self, state: TrainState, accept: Callable[[dict[str, Any]], None] = lambda record: None
    ) -> Resumed | None:
        """Fill `state` from the newest checkpoint whose manifest holds; None where there is no checkpoint at all.

        `accept` sees its record before anything is filled, and raises if the checkpoint is not this run's. Raises
        UnusableCheckpoint if there are checkpoints but none is whole, rather than start again unasked, and if
        the newest whole one does not fit the model or the optimizer.
        """
        self.wait()
        skipped: list[tuple[Path, str]] = []
        for path in self._on_main(self._checkpoints.checkpoints, f"cannot look into {self.folder}"):
            manifest, problems = self._verify_together(path)
            if manifest is not None and not problems:
                self._damaged = {bad for bad, _ in skipped}
                resumed = self._load(path, manifest, state, skipped, accept)
                self._latest = resumed.step
                return resumed
            skipped.append((path, "; ".join(problems)))
        if skipped:
            reasons = "".join(f"\n  {path.name}: {reason}" for path, reason in skipped)
            raise UnusableCheckpoint(
                f"no checkpoint in {self.folder} is whole; restore one, or move them away to start anew:{reasons}"
            )
        return None

    def _verify_together(self, path: Path) -> tuple[Manifest | None, list[str]]:
        """`verify`, the files divided among the ranks."""
        manifest, problems = None, []
        if self.world.is_main:
            try:
                manifest = manifests.read_manifest(path)
                problems = manifests.stray_files(path, manifest)
            except CheckpointError as error:
                problems = [str(error).removeprefix(f"{path}: ")]
        manifest, problems = broadcast_object((manifest, problems), self.world)
        if manifest is None:
            return None, problems
        mine = manifests.altered_files(path, manifest.files[self.world.rank :: self.world.size])
        return manifest, problems + [problem for part in gather_objects(mine, self.world) for problem in part]

    def _load(
        self, path: Path, manifest: Manifest, state: TrainState, skipped: list[tuple[Path, str]],
        accept: Callable[[dict[str, Any]], None],
    ) -> Resumed:  # fmt: skip
        record, groups = _read_shared(path)
        accept(record)
        checkpoint_state.fill(path, state, groups, self.world.control)
        return Resumed(manifest.step, path, record, manifest.metrics, skipped)

    def _on_main(self, action: Callable[[], T], doing: str) -> T:
        """Rank 0's result on all ranks; its failure too."""
        result = _attempt(doing, action) if self.world.is_main else None
        result = broadcast_object(result, self.world)
        if isinstance(result, _Failure):
            raise result.kind(result.message)
        return result  # type: ignore[return-value]


def newest_whole(folder: str | Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest checkpoint in `folder` that is whole, and newer ones that are not, with the reason; reads only."""
    skipped: list[tuple[Path, str]] = []
    for path in CheckpointFolder(folder).checkpoints():
        problems = verify(path)
        if not problems:
            return path, skipped
        skipped.append((path, "; ".join(problems)))
    return None, skipped


def load_record(path: str | Path) -> dict[str, Any]:
    """The `record` that was saved with the checkpoint at `path`; see `load_weights` for its tensors."""
    if problems := verify(path):
        raise UnusableCheckpoint(f"{path} is not a whole checkpoint: {'; '.join(problems)}")
    return read_record(Path(path))


def read_record(path: Path) -> dict[str, Any]:
    """`load_record` of a checkpoint that has been verified."""
    return _read_shared(path)[0]


def _read_shared(path: Path) -> tuple[dict[str, Any], checkpoint_state.Groups | None]:
    """The record and the optimizer's settings of a verified checkpoint."""
    try:
        shared = read_json_object(listed_file(path, STATE))
        if not isinstance(shared["record"], dict):
            raise UnreadableFile("its record is no JSON object")
        return shared["record"], shared["optimizer"]
    except (UnreadableFile, KeyError) as error:
        raise UnusableCheckpoint(f"cannot read {path / STATE}: {error}") from error


def _json(content: dict[str, Any], name: str) -> str:
    try:
        return json.dumps(content)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} cannot be written as JSON: {error}") from error


# --- failures -----------------------------------------------------------------------------------------------------


def _attempt(doing: str, action: Callable[[], T]) -> T | _Failure:
    try:
        return action()
    except UnusableCheckpoint as error:
        return _Failure(f"{doing}: {error}", UnusableCheckpoint)
    except (Exception, CheckpointException) as error:  # the second is not an Exception
        return _Failure(f"{doing}: {_advice(error)}; earlier checkpoints are untouched")


def _advice(error: BaseException) -> str:
    cause = _root(error)
    number = cause.errno if isinstance(cause, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"no space left ({cause}). Free some, keep fewer checkpoints or choose another folder"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"it cannot be written ({cause}). Make it writable or choose another folder"
    if number in (errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
        return f"there is no such folder, and it cannot be made ({cause}). Choose another folder"
    return str(cause) or type(cause).__name__


def _root(error: BaseException) -> BaseException:
    """The first cause: an OSError, where there is one behind what PyTorch raises."""
    if isinstance(error, CheckpointException):
        return _root(next(iter(error.failures.values()))[0])
    seen = error
    while not isinstance(seen, OSError) and (behind := seen.__cause__ or seen.__context__) is not None:
        seen = behind
    return seen if isinstance(seen, OSError) else error
