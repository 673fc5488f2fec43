"""Where each tensor of a checkpoint lies: written as JSON, read without running anything.

PyTorch's distributed checkpoint keeps this as a pickle, and loading a pickle calls whatever it names. New
checkpoints hold `metadata.json` instead. The pickles of older ones are read as data: a small interpreter follows
their opcodes, calls nothing, and leaves a picture of the objects, out of which the metadata is taken.
"""

from __future__ import annotations

import io
import json
import math
import pickletools
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from dcdm.files import MEGABYTE, UnreadableFile, listed_file, parse_json, read_limited
from dcdm.training.checkpoint_folder import UnusableCheckpoint, write_text

METADATA = "metadata.json"
PICKLE = ".metadata"
LIMIT = 512 * MEGABYTE  # thousands of tensors, each in a piece per rank
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is torch.dtype}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the bytes of a file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class PlainWriter(dcp.FileSystemWriter):
    """A `FileSystemWriter` that keeps its metadata as JSON."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places: dict[tuple[str, tuple[int, ...]], _StorageInfo] = {
            (result.index.fqn, tuple(result.index.offset or ())): result.storage_data
            for part in results
            for result in part
        }
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), f"{name} is no tensor"
            pieces = []
            for chunk in entry.chunks:
                place = places[name, tuple(chunk.offsets)]
                pieces.append([list(chunk.offsets), list(chunk.sizes), place.relative_path, place.offset,
                               place.length])  # fmt: skip
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(entry.size), "pieces": pieces}
        write_text(Path(self.path) / METADATA, json.dumps({"tensors": tensors}, sort_keys=True) + "\n")


class PlainReader(dcp.FileSystemReader):
    """A `FileSystemReader` of checkpoints with JSON metadata, and of older ones whose pickle is read as data."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors = read_tensors(Path(self.path))
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for name, tensor in tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.pieces]
            properties = TensorProperties(tensor.dtype)
            entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
            for number, piece in enumerate(tensor.pieces):
                index = MetadataIndex(name, piece.offsets, number)
                places[index] = _StorageInfo(piece.file, piece.start, piece.length)
        return Metadata(entries, storage_data=places, storage_meta=StorageMeta(load_id=self.load_id))

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        try:
            _check_tensor(_Stretch(file, sinfo.offset, sinfo.length))
        except (_WrongMetadata, zipfile.BadZipFile, ValueError, KeyError, OSError, NotImplementedError) as error:
            raise UnusableCheckpoint(
                f"cannot read {self.path}: a tensor in {sinfo.relative_path}: {error}"
            ) from error
        return super()._slice_file(file, sinfo)


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Names, types, shapes and places of all tensors of a checkpoint, checked against the files that are there."""
    name = METADATA if (folder / METADATA).exists() else PICKLE
    try:
        data = read_limited(listed_file(folder, name), LIMIT)
        found = _from_json(data) if name == METADATA else _from_pickle(data)
        tensors = dict(_checked(found))
        _check_places(folder, tensors)
    except (UnreadableFile, _WrongMetadata) as error:
        raise UnusableCheckpoint(f"cannot read {folder / name}: {error}") from error
    return tensors


class _WrongMetadata(ValueError):
    """What stands there is no metadata of tensors."""


Described = Iterator[tuple[Any, Any, Any, Sequence[Sequence[Any]]]]
"""(name, dtype, shape, pieces) as they stand there, of any type."""


def _from_json(data: bytes) -> Described:
    content = parse_json(data)
    try:
        for name, entry in content["tensors"].items():
            yield name, DTYPES.get(entry["dtype"]), entry["shape"], entry["pieces"]
    except (KeyError, TypeError, AttributeError):
        raise _WrongMetadata("it holds no metadata of tensors") from None


def _checked(found: Described) -> Iterator[tuple[str, StoredTensor]]:
    for name, dtype, shape, pieces in found:
        if not isinstance(name, str) or type(dtype) is not torch.dtype or not _sizes(shape):
            raise _WrongMetadata(f"{str(name)[:80]!r} has no name, type or shape")
        made = []
        for piece in pieces:
            try:
                offsets, sizes, file, start, length = piece
            except (TypeError, ValueError):
                raise _WrongMetadata(f"a piece of {name[:80]!r} is incomplete") from None
            whole = _sizes(offsets) and _sizes(sizes) and _sizes([start, length]) and isinstance(file, str)
            if not whole or not len(offsets) == len(sizes) == len(shape):
                raise _WrongMetadata(f"a piece of {name[:80]!r} is not described by whole numbers")
            if any(o + s > full for o, s, full in zip(offsets, sizes, shape, strict=True)):
                raise _WrongMetadata(f"a piece of {name[:80]!r} lies outside of it")
            made.append(Piece(tuple(offsets), tuple(sizes), file, start, length))
        if sum(math.prod(piece.sizes) for piece in made) != math.prod(shape):
            raise _WrongMetadata(f"the pieces of {name[:80]!r} do not make up the whole")
        yield name, StoredTensor(dtype, tuple(shape), tuple(made))


def _sizes(values: Any) -> bool:
    """Whether these are a few whole numbers, none negative."""
    return (
        isinstance(values, list | tuple)
        and len(values) <= 16
        and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
    )


def _check_places(folder: Path, tensors: dict[str, StoredTensor]) -> None:
    """Every piece must lie inside a file of the folder, and no tensor be larger than the bytes that hold it."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        for piece in tensor.pieces:
            if piece.file not in sizes:
                path = listed_file(folder, piece.file)
                sizes[piece.file] = path.stat().st_size if path.exists() else 0
            needed = math.prod(piece.sizes) * tensor.dtype.itemsize
            if piece.start + piece.length > sizes[piece.file] or needed > piece.length:
                raise _WrongMetadata(f"{piece.file} does not hold {name[:80]!r}, which is said to lie in it")


# --- tensors ------------------------------------------------------------------------------------------------------
#
# PyTorch reads a tensor with `weights_only`: nothing in it is called that is not on PyTorch's own list. What is
# left for malice is size, an archive that unpacks to more than it has, and time, a pickle that refers to itself.

_OF_A_TENSOR = {
    "PROTO", "GLOBAL", "BINPUT", "LONG_BINPUT", "MARK", "BINUNICODE", "BINPERSID", "BININT", "BININT1", "BININT2",
    "LONG1", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE", "NEWTRUE", "NEWFALSE", "NONE", "REDUCE", "STOP",
}  # fmt: skip
_LARGEST_PICKLE = 1 << 16


def _check_tensor(stored: _Stretch) -> None:
    with zipfile.ZipFile(stored) as archive:
        entries = archive.infolist()
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if packed or sum(entry.file_size for entry in entries) > stored.length:
            raise _WrongMetadata("it unpacks to more than it is")
        for entry in entries:
            if not entry.filename.endswith(".pkl"):
                continue
            if entry.file_size > _LARGEST_PICKLE:
                raise _WrongMetadata("its description is too large")
            for code, _, _ in pickletools.genops(archive.read(entry)):
                if code.name not in _OF_A_TENSOR:
                    raise _WrongMetadata(f"it has the opcode {code.name}, which no tensor needs")


class _Stretch(io.RawIOBase):
    """Part of a file as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self.file, self.start, self.length, self.at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence])
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.length - self.at)
        self.file.seek(self.start + self.at)
        data = self.file.read(left if size is None or size < 0 else min(size, left))
        self.at += len(data)
        return data


# --- pickles as data ----------------------------------------------------------------------------------------------

_HOME = "torch.distributed.checkpoint"
ALLOWED = {
    *((f"{_HOME}.metadata", name) for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    (f"{_HOME}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local")
      for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
}  # fmt: skip
"""What the pickled metadata of a checkpoint names; nothing of it is called here."""


@dataclass(frozen=True)
class _Name:
    module: str
    name: str


@dataclass(eq=False)
class _Object:
    """What a call would have made: of what, with which arguments, and the state given to it afterwards."""

    made_of: Any
    arguments: Any = ()
    state: Any = None


class _Pairs(list):
    """A dict as a list of pairs: nothing in it is hashed or compared."""


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Picture:
    """Follows the opcodes of a pickle and calls nothing."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self, data: bytes) -> Any:
        for code, argument, _ in pickletools.genops(data):
            if code.name == "STOP":
                return self.stack.pop()
            self.step(code.name, argument)
        raise _WrongMetadata("it ends too early")

    def step(self, code: str, argument: Any) -> None:
        stack = self.stack
        if code in ("PROTO", "FRAME"):
            return
        if code in _VALUES:
            stack.append(argument)
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif code in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif code in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif code == "MARK":
            stack.append(_MARK)
        elif code in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"):
            stack.append({"EMPTY_DICT": _Pairs, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[code]())
        elif code in _TUPLES:
            count = _TUPLES[code]
            stack[-count:] = [tuple(stack[-count:])]
        elif code == "TUPLE":
            stack.append(tuple(self.since_mark()))
        elif code in ("APPEND", "APPENDS"):
            items = [stack.pop()] if code == "APPEND" else self.since_mark()
            self.top(list).extend(items)
        elif code in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if code == "SETITEM" else self.since_mark()
            self.top(_Pairs).extend(zip(items[::2], items[1::2], strict=True))
        elif code in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(_named(*(argument.split(" ") if code == "GLOBAL" else self.since(2))))
        elif code in ("NEWOBJ", "REDUCE"):
            stack.append(_Object(*self.since(2)))
        elif code == "BUILD":
            state = stack.pop()
            self.top(_Object).state = state
        else:
            raise _WrongMetadata(f"it has the opcode {code}, which no checkpoint needs")

    def since(self, count: int) -> list[Any]:
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def since_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise _WrongMetadata("it has no mark where one is needed")
        taken = self.stack[place + 1 :]
        del self.stack[place:]
        return taken

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise _WrongMetadata("it changes something that is not its own")
        return self.stack[-1]


def _named(module: Any, name: Any) -> _Name:
    if (module, name) not in ALLOWED and not (module == "torch" and name in DTYPES):
        raise _WrongMetadata(f"it asks for {module}.{name}, which no checkpoint needs")
    return _Name(module, name)


def _from_pickle(data: bytes) -> Described:
    try:
        whole = _state_of(_Picture().read(data), "Metadata")
        yield from _described(whole)
    except _WrongMetadata:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _WrongMetadata(f"it is no pickle of metadata ({error})") from error


def _described(whole: dict[str, Any]) -> Described:
    places: dict[tuple[str, tuple[int, ...]], tuple[Any, Any, Any]] = {}
    for index, storage in whole["storage_data"]:
        key, place = _state_of(index, "MetadataIndex"), _state_of(storage, "_StorageInfo")
        if place.get("transform_descriptors"):
            raise _WrongMetadata("its tensors are packed in a way that dcdm never writes")
        places[_text(key["fqn"]), _shape(key.get("offset"))] = (
            place["relative_path"], place["offset"], place["length"],
        )  # fmt: skip
    for name, entry in whole["state_dict_metadata"]:
        tensor = _state_of(entry, "TensorStorageMetadata")
        properties = tensor["properties"]
        if not (isinstance(properties, _Object) and isinstance(properties.state, tuple)):
            raise _WrongMetadata("a tensor has no properties")
        dtype, pieces, budget = properties.state[0], [], len(places)
        for chunk in tensor["chunks"]:
            if (budget := budget - 1) < 0:
                raise _WrongMetadata("a tensor has more pieces than there are places")
            box = _state_of(chunk, "ChunkStorageMetadata")
            offsets = _shape(box["offsets"])
            pieces.append((offsets, _shape(box["sizes"]), *places[_text(name), offsets]))
        yield name, DTYPES.get(dtype.name) if isinstance(dtype, _Name) else None, _shape(tensor["size"]), pieces


def _state_of(value: Any, name: str) -> dict[str, Any]:
    """The fields of an object of one of the metadata's classes."""
    if not (isinstance(value, _Object) and isinstance(value.made_of, _Name) and value.made_of.name == name):
        raise _WrongMetadata(f"it holds no {name} where one belongs")
    if not isinstance(value.state, _Pairs):
        raise _WrongMetadata(f"a {name} in it is empty")
    return {_text(field): content for field, content in value.state}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _WrongMetadata("a name in it is no text")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    """The numbers of a `torch.Size`; none where there is no offset."""
    if value is None:
        return ()
    sizes = value.arguments[0] if isinstance(value, _Object) and value.arguments else ()
    if not _sizes(sizes):
        raise _WrongMetadata("a shape in it is not made of whole numbers")
    return tuple(sizes)
