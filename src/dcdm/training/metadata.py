"""Reading PyTorch's distributed checkpoints without running what stands in them.

Their metadata file is a pickle, and a pickle names the functions that rebuild its objects. Here it may name the
metadata's own classes and nothing else. Tensors are read by PyTorch with `weights_only`.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from dcdm.training.manifest import CheckpointError

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
