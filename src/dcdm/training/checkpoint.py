"""Saving while a run trains, and resuming it bit for bit.

A save copies the state to memory, lets training continue, and works in a thread: every rank writes the shards it
holds aside and hashes them, rank 0 writes the manifest and renames the folder into place. A checkpoint is whole or
not there; `checkpoint_folder.py` says what is in one. Tensors have these names:

    model.<parameter or buffer>    optimizer.<parameter>.<slot>    tensors.<set>.<name>
"""

from __future__ import annotations

import errno
import json
import math
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dcdm.config import ConfigError
from dcdm.distributed import World, broadcast_object, gather_objects
from dcdm.files import file_digest, write_tensors, write_whole
from dcdm.training.checkpoint_folder import (
    DTYPES,
    SHARDS,
    STATE,
    CheckpointError,
    CheckpointFolder,
    Index,
    Manifest,
    UnusableCheckpoint,
    newest_whole,
    read_index,
    read_manifest,
    read_state,
    read_tensors,
    versions,
    write_manifest,
)
from dcdm.training.fsdp import own_shard

T = TypeVar("T")
Groups = list[dict[str, Any]]
Phase = Literal["staged", "written", "hashed", "sealed", "renamed", "dropping", "pruned"]

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
    metrics: dict[str, float | None]
    skipped: list[tuple[Path, str]]
    """Newer checkpoints that were skipped, and why."""


@dataclass(frozen=True)
class _Failure:
    message: str
    kind: type[CheckpointError] = CheckpointError


class Checkpointer:
    """The checkpoints of one run. Every method, and the constructor, must be called by all ranks together.

    `keep_last` and `keep_best` checkpoints stay, the best by the smallest `metric` of those given to `save`.
    `on_phase` is told how far a save has come, mostly from the thread that saves.
    """

    def __init__(
        self,
        folder: str | Path,
        world: World | None = None,
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        metric: str = "loss",
        on_phase: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        if keep_last < 1:
            raise ConfigError(f"keep_last={keep_last} must be at least 1: a run needs a checkpoint to resume from")
        if keep_best < 0:
            raise ConfigError(f"keep_best={keep_best} must be 0 or more")
        self.world = world or World()
        self.keep_last, self.keep_best, self.metric = keep_last, keep_best, metric
        self.on_phase = on_phase
        self._checkpoints = CheckpointFolder(folder)
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._latest: int | None = None
        self._damaged: set[Path] = set()
        self._on_main(self._open, f"cannot use {folder} for checkpoints")

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

    def has_any(self) -> bool:
        """Whether there is a checkpoint, whole or damaged."""
        return bool(self._checkpoints.checkpoints())

    def leave_no_trace(self) -> None:
        """Let go of a folder in which no run has begun."""
        if self.world.is_main:
            self._checkpoints.leave_no_trace()

    def _open(self) -> None:
        try:
            self._checkpoints.open()
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
        tensors, groups = collect(state)
        try:
            shared = json.dumps({"record": state.record, "optimizer": groups})
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"record cannot be written as JSON: {error}") from error
        figures = {name: float(x) if math.isfinite(x) else None for name, x in (metrics or {}).items()}
        shards, places = _copied(tensors, self.world)
        self.on_phase("staged")
        self._thread = threading.Thread(
            target=self._save, args=(step, shards, places, shared, figures), name=f"checkpoint of step {step}"
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

    def _save(
        self, step: int, shards: dict[str, Tensor], places: str, shared: str, metrics: dict[str, float | None]
    ) -> None:
        """What the thread does once the copy is made. All ranks come to the same end."""
        doing = f"cannot save the checkpoint of step {step} in {self.folder}"
        try:
            self._on_main(lambda: self._checkpoints.begin(step), doing, background=True)
            mine = _attempt(doing, lambda: self._write(step, shards, places, shared))
            everyone = gather_objects(mine, self.world, background=True)
            if failures := [result for result in everyone if isinstance(result, _Failure)]:
                self._on_main(lambda: self._checkpoints.discard(step), doing, background=True)
                raise CheckpointError(failures[0].message)
            files = {name: sha256 for part in everyone if isinstance(part, dict) for name, sha256 in part.items()}
            self._on_main(lambda: self._publish(step, files, metrics), doing, background=True)
            self._latest = step
        except CheckpointError as error:
            self._failure = str(error)
        except Exception as error:  # another rank is gone
            self._failure = f"{doing}: lost contact to the other processes ({error})"

    def _write(self, step: int, shards: dict[str, Tensor], places: str, shared: str) -> dict[str, str]:
        """This rank's files, and the SHA-256 of each."""
        partial, names = self._checkpoints.partial(step), [f"rank-{self.world.rank:05d}.safetensors"]
        write_tensors(partial / names[0], shards, {SHARDS: places})
        if self.world.is_main:
            write_whole(partial / STATE, shared.encode())
            names.append(STATE)
        self.on_phase("written")
        digests = {name: file_digest(partial / name) for name in names}
        self.on_phase("hashed")
        return digests

    def _publish(self, step: int, files: dict[str, str], metrics: dict[str, float | None]) -> None:
        """Manifest, rename, and away with what is old; on rank 0."""
        partial = self._checkpoints.partial(step)
        try:
            if {path.name for path in partial.iterdir()} != files.keys():
                raise CheckpointError("rank 0 does not see the files of all; the folder must be one they share")
            write_manifest(partial, Manifest(step, metrics, files, versions()))
            self.on_phase("sealed")
            newest = self._checkpoints.commit(step)
        except BaseException:
            self._checkpoints.discard(step)
            raise
        self.on_phase("renamed")
        self._damaged.discard(newest)
        try:
            self._checkpoints.prune(
                newest, keep_last=self.keep_last, keep_best=self.keep_best, metric=self.metric,
                damaged=self._damaged, on_drop=lambda: self.on_phase("dropping"),
            )  # fmt: skip
        except OSError as error:  # the new one is whole all the same
            warnings.warn(f"cannot drop old checkpoints: {_advice(error)}", stacklevel=2)
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
        path, skipped = self._on_main(lambda: newest_whole(self.folder), f"cannot look into {self.folder}")
        if path is None and skipped:
            reasons = "".join(f"\n  {damaged.name}: {reason}" for damaged, reason in skipped)
            raise UnusableCheckpoint(
                f"no checkpoint in {self.folder} is whole; restore one, or move them away to start anew:{reasons}"
            )
        if path is None:
            return None
        manifest, (record, groups) = read_manifest(path), read_state(path)
        accept(record)
        fill(path, state, groups)
        self._damaged, self._latest = {damaged for damaged, _ in skipped}, manifest.step
        return Resumed(manifest.step, path, record, manifest.metrics, skipped)

    def _on_main(self, action: Callable[[], T], doing: str, *, background: bool = False) -> T:
        """Rank 0's result on all ranks; its failure too."""
        result = _attempt(doing, action) if self.world.is_main else None
        result = broadcast_object(result, self.world, background=background)
        if isinstance(result, _Failure):
            raise result.kind(result.message)
        return result  # type: ignore[return-value]


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
    with torch.no_grad():
        read_tensors(path, {name: own_shard(tensor) for name, tensor in wanted.items()})
    if optimizer is not None and groups is not None:
        set_optimizer_state_dict(state.model, optimizer, slots)


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
def _copied(tensors: dict[str, Tensor], world: World) -> tuple[dict[str, Tensor], str]:
    """Copies in main memory of what this rank writes, and as JSON where each lies in the whole tensor.

    What all ranks hold alike is written by the first.
    """
    shards: dict[str, Tensor] = {}
    places: dict[str, tuple[list[int], Index]] = {}
    for name, tensor in tensors.items():
        own, start = own_shard(tensor)
        if world.is_main or (own.shape != tensor.shape and own.numel()):
            shards[name] = own.to("cpu", copy=True, memory_format=torch.contiguous_format)
            places[name] = list(tensor.shape), start
    return shards, json.dumps(places, sort_keys=True)


def _restore_settings(path: Path, groups: Groups, saved: Groups) -> None:
    if [group["params"] for group in groups] != [group["params"] for group in saved]:
        raise UnusableCheckpoint(f"{path} was written with other optimizer groups; resume with the settings it had")
    for group, old in zip(groups, saved, strict=True):
        for name, value in old.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            else:
                group[name] = tuple(value) if isinstance(group.get(name), tuple) else value


def _check_fit(path: Path, wanted: dict[str, Tensor]) -> None:
    """Refuse a checkpoint whose tensors have other names, shapes or types than those of the run."""
    stored = {name: (entry.shape, entry.dtype) for name, entry in read_index(path).items()}
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


def _kind(entry: tuple[Index, torch.dtype] | None) -> str:
    return "absent" if entry is None else f"{str(entry[1]).removeprefix('torch.')} {list(entry[0])}"


# --- failures -----------------------------------------------------------------------------------------------------


def _attempt(doing: str, action: Callable[[], T]) -> T | _Failure:
    try:
        return action()
    except UnusableCheckpoint as error:
        return _Failure(f"{doing}: {error}", UnusableCheckpoint)
    except Exception as error:
        return _Failure(f"{doing}: {_advice(error)}; earlier checkpoints are untouched")


def _advice(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"no space left ({error}). Free some, keep fewer checkpoints or choose another folder"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"it cannot be written ({error}). Make it writable or choose another folder"
    if number in (errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
        return f"there is no such folder, and it cannot be made ({error}). Choose another folder"
    return str(error) or type(error).__name__
