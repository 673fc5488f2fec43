"""What is in a checkpoint: tensors by name, the optimizer's settings, and whether they fit a run.

Tensors go through PyTorch's distributed checkpoint, under these names:

    model.<parameter or buffer>    optimizer.<parameter>.<slot>    tensors.<set>.<name>
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dcdm.training.checkpoint_folder import CheckpointError, verify

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
    reader = PlainReader(path)
    _check_fit(path, reader, wanted, ignored="optimizer." if optimizer is None else None)
    try:
        dcp.load(wanted, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if optimizer is not None and groups is not None:
        set_optimizer_state_dict(state.model, optimizer, slots)


def load_weights(path: str | Path, part: str = "model") -> dict[str, Tensor]:
    """The whole weights of a checkpoint in one process, whatever number of ranks wrote them; nothing else is read.

    `part` is `model`, or the name of a set in `TrainState.tensors`.
    """
    path = Path(path)
    if problems := verify(path):
        raise CheckpointError(f"{path} is not a whole checkpoint: {'; '.join(problems)}")
    prefix = "model." if part == "model" else f"tensors.{part}."
    reader = PlainReader(path)
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in _stored(reader).items()
        if name.startswith(prefix)
    }
    if not weights:
        raise CheckpointError(f"{path} holds no {part!r}")
    dcp.load(weights, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}


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
        raise CheckpointError(f"{path} was written with other optimizer groups; resume with the settings it had")
    for group, old in zip(groups, saved, strict=True):
        for name, value in old.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            else:
                group[name] = tuple(value) if isinstance(group.get(name), tuple) else value


def _check_fit(path: Path, reader: PlainReader, wanted: dict[str, Tensor], ignored: str | None) -> None:
    """Names, shapes and types must be the same: distributed checkpoint itself passes over what is not asked for."""
    stored = {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in _stored(reader).items()
        if ignored is None or not name.startswith(ignored)
    }
    asked = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in wanted.items()}
    if stored == asked:
        return
    differing = sorted(name for name in stored.keys() | asked.keys() if stored.get(name) != asked.get(name))
    first = differing[0]
    raise CheckpointError(
        f"{path} does not fit this run: {first} is {_kind(stored.get(first))} there and "
        f"{_kind(asked.get(first))} here ({len(differing)} such tensors); resume with the settings it was made "
        "with or choose another folder"
    )


def _kind(entry: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "absent" if entry is None else f"{str(entry[1]).removeprefix('torch.')} {list(entry[0])}"


def _stored(reader: PlainReader) -> dict[str, TensorStorageMetadata]:
    entries = reader.read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


# --- reading what a stranger may have written -------------------------------------------------------------------
#
# The metadata file of a distributed checkpoint is a pickle, and a pickle names the functions that rebuild objects.
# Here it may name the metadata's own classes and nothing else. Tensors are read by PyTorch with `weights_only`.


_HOME = "torch.distributed.checkpoint"
ALLOWED = {
    *((f"{_HOME}.metadata", name) for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    (f"{_HOME}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("pathlib", name) for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in ALLOWED and not is_type:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class PlainReader(FileSystemReader):
    """A `FileSystemReader` that refuses metadata with anything but metadata in it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        try:
            with open(path, "rb") as file:
                metadata = _Unpickler(file).load()
        except Exception as error:  # a wrong pickle may raise anything
            raise CheckpointError(f"cannot read {path}: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"cannot read {path}: it holds no metadata")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
