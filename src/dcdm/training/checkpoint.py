"""Saving while a run trains, and resuming it bit for bit.

A save gathers the state in rank 0's main memory and lets training continue; there a thread writes it aside, hashes
it, and renames the folder into place. A checkpoint is whole or not there; `checkpoint_folder.py` says what is in
one. Tensors have these names:

    model.<parameter or buffer>    optimizer.<parameter>.<slot>    tensors.<set>.<name>
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import platform
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dcdm.config import ConfigError
from dcdm.distributed import World, from_main
from dcdm.files import (
    file_digest,
    parse_json,
    read_limited,
    replace_folder,
    write_tensors,
    write_whole,
)
from dcdm.training.checkpoint_folder import (
    DTYPES,
    STATE,
    STEP_NAME,
    TENSORS,
    CheckpointError,
    Stored,
    UnusableCheckpoint,
    checkpoints,
    newest_whole,
    opened_tensors,
    read_manifest,
    read_state,
    step_of,
    stored_tensors,
    write_manifest,
)
from dcdm.training.fsdp import own, own_part
from dcdm.training.optimizers import full

Groups = list[dict[str, Any]]

PARTIAL, REPLACED, DELETED, LOCK = ".partial", ".replaced", ".deleted", ".lock"
PATIENCE = 5.0  # seconds to wait for a run that is about to leave the folder

# a run without torch.distributed is the ordinary case here, not worth a warning at each save
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass
class TrainState:
    """What a checkpoint holds. Tensors are filled in place on resume; the record comes back in `Resumed`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """More named sets of tensors: averaged weights, for example, as {"ema": {...}}."""
    record: dict[str, Any] = field(default_factory=dict)
    """JSON, the same on all ranks: schedule, data position, settings."""


@dataclass(frozen=True)
class Resumed:
    step: int
    path: Path
    record: dict[str, Any]
    skipped: list[tuple[Path, str]]
    """Newer checkpoints that were skipped, and why."""


class Checkpointer:
    """The checkpoints of one run. Every method, and the constructor, must be called by all ranks together.

    `keep_last` and `keep_best` checkpoints stay, the best by the smallest `metric` of those given to `save`.
    """

    def __init__(
        self,
        folder: str | Path,
        world: World | None = None,
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        metric: str = "loss",
    ) -> None:
        if keep_last < 1:
            raise ConfigError(f"keep_last={keep_last} must be at least 1: a run needs a checkpoint to resume from")
        if keep_best < 0:
            raise ConfigError(f"keep_best={keep_best} must be 0 or more")
        self.folder, self.world = Path(folder), world or World()
        self.keep_last, self.keep_best, self.metric = keep_last, keep_best, metric
        self._lock: IO[str] | None = None
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._latest: int | None = None
        self._damaged: set[Path] = set()
        try:
            from_main(self._open, self.world)
        except (OSError, UnusableCheckpoint) as error:
            raise UnusableCheckpoint(f"cannot use {folder} for checkpoints: {_advice(error)}") from error

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> None:
        """Make the folder, lock it and tidy up after a killed run; on rank 0."""
        self.folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + PATIENCE
        while (lock := _try_lock(self.folder / LOCK)) is None:
            if time.monotonic() > deadline:
                raise UnusableCheckpoint(
                    f"another run is writing to {self.folder}: {_holder(self.folder / LOCK)}; "
                    "stop it or choose another folder"
                )
            time.sleep(0.1)
        self._lock = lock
        for left in sorted(self.folder.iterdir()):
            if left.suffix not in (PARTIAL, REPLACED, DELETED) or not STEP_NAME.fullmatch(left.stem):
                continue
            if left.suffix == REPLACED and not left.with_suffix("").exists():
                os.rename(left, left.with_suffix(""))
            else:
                shutil.rmtree(left)

    def close(self) -> None:
        """Finish what is under way and let others use the folder; other ranks are not waited for."""
        try:
            self._join()
        finally:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def leave_no_trace(self) -> None:
        """Let go of a folder in which no run has begun: it goes, and the run folder too if that is empty."""
        if self._lock is not None and not checkpoints(self.folder):
            (self.folder / LOCK).unlink(missing_ok=True)  # while it is held: nobody locks a file that is gone
        self.close()
        with suppress(OSError):
            self.folder.rmdir()
            self.folder.parent.rmdir()

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
        tensors, groups = collect(state)
        try:
            shared = json.dumps({"record": state.record, "optimizer": groups}).encode()
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"record cannot be written as JSON: {error}") from error
        figures = {name: float(x) if math.isfinite(x) else None for name, x in (metrics or {}).items()}
        copies = gathered(tensors, self.world)
        self._latest = step
        if self.world.is_main:
            self._thread = threading.Thread(
                target=self._save, args=(step, copies, shared, figures), name=f"checkpoint of step {step}"
            )
            self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when no save is under way; raise CheckpointError if the last one failed."""
        try:
            from_main(self._join, self.world)
        except CheckpointError:
            self._latest = None
            raise

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            message, self._failure = self._failure, None
            raise CheckpointError(message)

    def _save(self, step: int, tensors: dict[str, Tensor], shared: bytes, metrics: dict[str, float | None]) -> None:
        """What the thread does: all files aside, the manifest, the rename, and away with what is old."""
        final = self.folder / f"step-{step:08d}"
        partial = final.with_suffix(PARTIAL)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            write_tensors(partial / TENSORS, tensors)
            write_whole(partial / STATE, shared)
            write_manifest(partial, step, metrics, {name: file_digest(partial / name) for name in (TENSORS, STATE)})
            replace_folder(partial, final)
        except Exception as error:  # told by `wait`
            self._failure = (
                f"cannot save the checkpoint of step {step} in {self.folder}: {_advice(error)}; earlier "
                "checkpoints are untouched"
            )
            shutil.rmtree(partial, ignore_errors=True)
            return
        self._damaged.discard(final)
        try:
            prune(final, self.keep_last, self.keep_best, self.metric, self._damaged)
        except OSError as error:  # the new one is whole all the same
            warnings.warn(f"cannot drop old checkpoints: {_advice(error)}", stacklevel=2)

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
        path, skipped = from_main(lambda: newest_whole(self.folder), self.world)
        if path is None and skipped:
            reasons = "".join(f"\n  {damaged.name}: {reason}" for damaged, reason in skipped)
            raise UnusableCheckpoint(
                f"no checkpoint in {self.folder} is whole; restore one, or move them away to start anew:{reasons}"
            )
        if path is None:
            return None
        record, groups = read_state(path)
        accept(record)
        fill(path, state, groups)
        self._damaged, self._latest = {damaged for damaged, _ in skipped}, step_of(path)
        return Resumed(step_of(path), path, record, skipped)


def prune(newest: Path, keep_last: int, keep_best: int, metric: str, damaged: Collection[Path] = ()) -> None:
    """Drop all checkpoints up to `newest` but the last and the best; damaged ones count as neither.

    Later steps than `newest` are not this run's and are left alone.
    """
    past = [path for path in checkpoints(newest.parent) if step_of(path) <= step_of(newest)]
    figures = {}
    for path in past:
        with suppress(CheckpointError):
            if path not in damaged:
                figures[path] = read_manifest(path).metrics.get(metric)
    scored = [path for path in figures if figures[path] is not None]
    best = sorted(scored, key=lambda path: (figures[path], step_of(path)))[:keep_best]
    for path in past:
        if path not in {newest, *list(figures)[:keep_last], *best}:
            leaving = path.with_suffix(DELETED)
            os.rename(path, leaving)  # at once gone under its own name: never half a checkpoint there
            shutil.rmtree(leaving, ignore_errors=True)


# --- the lock of a folder -----------------------------------------------------------------------------------------


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


# --- the state of a run -------------------------------------------------------------------------------------------


def collect(state: TrainState) -> tuple[dict[str, Tensor], Groups | None]:
    """All tensors by name, and the optimizer's settings: None for an optimizer that has not made a step.

    Asked for the state of such an optimizer, PyTorch would make a step with zero gradients, and count it.
    """
    if state.optimizer is None or not state.optimizer.state:
        return _named(state, {}), None
    slots: Any = get_optimizer_state_dict(state.model, state.optimizer)
    groups = [
        {name: value.item() if isinstance(value, Tensor) else value for name, value in group.items()}
        for group in slots["param_groups"]
    ]
    return _named(state, slots["state"]), groups


def fill(path: Path, state: TrainState, groups: Groups | None) -> None:
    """Read a checkpoint that has been verified into `state`, each rank what it holds of it."""
    optimizer = state.optimizer
    slots: Any = {"state": {}}
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
        if groups is None:
            optimizer.state.clear()
        else:  # makes the slots, to be filled in place
            slots = get_optimizer_state_dict(state.model, optimizer)
            _restore_settings(path, slots["param_groups"], groups)
    wanted = _named(state, slots["state"])
    _check_fit(path, wanted)
    with opened_tensors(path) as stored:
        for name, tensor in wanted.items():
            _read_own(tensor, stored.get_slice(name))
    if optimizer is not None and groups is not None:
        set_optimizer_state_dict(state.model, optimizer, slots)


@torch.no_grad()
def _read_own(tensor: Tensor, whole: Any) -> None:
    """Fill what this rank holds of a tensor from a stored one, of which no more is read."""
    mine = own(tensor)
    if mine.numel():
        mine.copy_(whole[own_part(tensor)])


def _named(state: TrainState, slots: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    named: dict[str, Any] = {f"model.{name}": value for name, value in get_model_state_dict(state.model).items()}
    for parameter, entries in slots.items():
        named |= {f"optimizer.{parameter}.{slot}": value for slot, value in entries.items()}
    for part, tensors in state.tensors.items():
        named |= {f"tensors.{part}.{name}": value for name, value in tensors.items()}
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.dtype not in DTYPES.values():
            raise CheckpointError(
                f"{name} is a {type(value).__name__}; a checkpoint holds tensors of numbers, and JSON in its record"
            )
    return named


@torch.no_grad()
def gathered(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Copies of whole tensors in rank 0's main memory, one after the other; empty elsewhere."""
    copies = {}
    for name, tensor in tensors.items():
        whole = full(tensor)
        if world.is_main:
            copies[name] = whole.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copies


def _restore_settings(path: Path, groups: Groups, saved: Groups) -> None:
    if [group["params"] for group in groups] != [group["params"] for group in saved]:
        raise UnusableCheckpoint(f"{path} was written with other optimizer groups; resume with the settings it had")
    for group, old in zip(groups, saved, strict=True):
        for name, value in old.items():
            group[name] = tuple(value) if isinstance(group.get(name), tuple) else value


def _check_fit(path: Path, wanted: dict[str, Tensor]) -> None:
    """Refuse a checkpoint whose tensors have other names, shapes or types than those of the run."""
    stored = stored_tensors(path)
    asked = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in wanted.items()}
    if stored == asked:
        return
    differing = sorted(name for name in stored.keys() | asked.keys() if stored.get(name) != asked.get(name))
    first = differing[0]
    raise UnusableCheckpoint(
        f"{path} does not fit this run: {first} is {_kind(stored.get(first))} there and "
        f"{_kind(asked.get(first))} here ({len(differing)} such tensors); resume with the settings it was made "
        "with or choose another folder"
    )


def _kind(entry: Stored | None) -> str:
    return "absent" if entry is None else f"{str(entry[1]).removeprefix('torch.')} {list(entry[0])}"


def _advice(error: Exception) -> str:
    """What went wrong, and what to do about it."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"no space left ({error}). Free some, keep fewer checkpoints or choose another folder"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"it cannot be written ({error}). Make it writable or choose another folder"
    if number in (errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
        return f"there is no such folder, and it cannot be made ({error}). Choose another folder"
    return str(error) or type(error).__name__
