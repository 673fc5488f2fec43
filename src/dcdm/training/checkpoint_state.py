"""What is in a checkpoint: tensors by name, the optimizer's settings, and whether they fit a run.

Tensors go through PyTorch's distributed checkpoint, under these names:

    model.<parameter or buffer>    optimizer.<parameter>.<slot>    tensors.<set>.<name>
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dcdm.training.checkpoint_folder import CheckpointError, UnusableCheckpoint, verify
from dcdm.training.checkpoint_metadata import PlainReader, read_tensors

Groups = list[dict[str, Any]]

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


def collect(state: TrainState) -> tuple[dict[str, Tensor], Groups | None]:
    """All tensors by name, and the optimizer's settings: None for an optimizer that has not made a step.

    Asked for the state of such an optimizer, PyTorch would make a step with zero gradients, and count it.
    """
    if state.optimizer is None or not state.optimizer.state:
        return _named(state, {}), None
    slots = _slots(state.model, state.optimizer)
    groups = [{name: _plain(value) for name, value in group.items()} for group in slots["param_groups"]]
    return _named(state, slots["state"]), groups


def fill(path: Path, state: TrainState, groups: Groups | None, group: dist.ProcessGroup | None) -> None:
    """Read a checkpoint that has been verified into `state`. Without a process group, in this process alone."""
    optimizer = state.optimizer
    slots: dict[str, Any] = {"state": {}}
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
        if groups is None:
            optimizer.state.clear()
        else:  # makes the slots, to be filled in place
            slots = _slots(state.model, optimizer)
            _restore_settings(path, slots["param_groups"], groups)
    wanted = _named(state, slots["state"])
    _check_fit(path, wanted, ignored="optimizer." if optimizer is None else None)
    _read(path, wanted, group)
    if optimizer is not None and groups is not None:
        set_optimizer_state_dict(state.model, optimizer, slots)


def load_weights(path: str | Path, part: str = "model") -> dict[str, Tensor]:
    """The whole weights of a checkpoint in one process, whatever number of ranks wrote them; nothing else is read.

    `part` is `model`, or the name of a set in `TrainState.tensors`.
    """
    path = Path(path)
    if problems := verify(path):
        raise UnusableCheckpoint(f"{path} is not a whole checkpoint: {'; '.join(problems)}")
    prefix = _prefix(part)
    weights = {
        name: torch.empty(entry.shape, dtype=entry.dtype)
        for name, entry in read_tensors(path).items()
        if name.startswith(prefix)
    }
    if not weights:
        raise UnusableCheckpoint(f"{path} holds no {part!r}")
    _read(path, weights, None)
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}


def stored_shapes(path: Path, part: str = "model") -> dict[str, tuple[int, ...]]:
    """The shapes of what `load_weights` would give, without reading it."""
    prefix = _prefix(part)
    return {n.removeprefix(prefix): t.shape for n, t in read_tensors(path).items() if n.startswith(prefix)}


def _prefix(part: str) -> str:
    return "model." if part == "model" else f"tensors.{part}."


def _read(path: Path, wanted: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of `wanted` from a verified checkpoint; without a process group, in this process alone."""
    try:
        dcp.load(wanted, storage_reader=PlainReader(path), process_group=group, no_dist=group is None)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        known = next((cause for cause in causes if isinstance(cause, UnusableCheckpoint)), None)
        raise UnusableCheckpoint(str(known or f"cannot read {path}: {causes[0]}")) from error


def _named(state: TrainState, slots: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    named: dict[str, Any] = {f"model.{name}": value for name, value in get_model_state_dict(state.model).items()}
    for parameter, entries in slots.items():
        named |= {f"optimizer.{parameter}.{slot}": value for slot, value in entries.items()}
    for part, tensors in state.tensors.items():
        named |= {f"tensors.{part}.{name}": value for name, value in tensors.items()}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}; a checkpoint holds tensors, and JSON in its record"
            )
    return named


def _slots(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's tensors and settings by the parameters' names; the tensors are its own, not copies."""
    return get_optimizer_state_dict(model, optimizer)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _restore_settings(path: Path, groups: Groups, saved: Groups) -> None:
    if [group["params"] for group in groups] != [group["params"] for group in saved]:
        raise UnusableCheckpoint(f"{path} was written with other optimizer groups; resume with the settings it had")
    for group, old in zip(groups, saved, strict=True):
        for name, value in old.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            else:
                group[name] = tuple(value) if isinstance(group.get(name), tuple) else value


def _check_fit(path: Path, wanted: dict[str, Tensor], ignored: str | None) -> None:
    """Names, shapes and types must be the same: distributed checkpoint itself passes over what is not asked for."""
    stored = {
        name: (entry.shape, entry.dtype)
        for name, entry in read_tensors(path).items()
        if ignored is None or not name.startswith(ignored)
    }
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


def _kind(entry: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "absent" if entry is None else f"{str(entry[1]).removeprefix('torch.')} {list(entry[0])}"
