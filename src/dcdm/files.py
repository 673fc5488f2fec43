"""Files that are either whole or not there, whatever moment the process dies at."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


def write_whole(path: Path, data: bytes) -> None:
    """Write `path` aside, to the disk, and rename it into place."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Make the renames inside a folder survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def canonical(value: Any) -> bytes:
    """One spelling per value, to be hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def file_digest(path: Path | str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ArrayFile:
    """An array of numbers written piece by piece, hashed on the way, and renamed into place by `close`."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.dtype, self.count = path, np.dtype(dtype).newbyteorder("<"), 0
        self._aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._file = open(self._aside, "wb")  # noqa: SIM115 (closed by close or discard)
        self._hash = hashlib.sha256()

    def add(self, values: np.ndarray) -> None:
        data = values.astype(self.dtype, copy=False).tobytes()
        self._hash.update(data)
        self._file.write(data)
        self.count += values.size

    def close(self) -> dict[str, Any]:
        """Put the file in its place: its entry in a manifest."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._aside, self.path)
        size = self.count * self.dtype.itemsize
        return {"file": self.path.name, "bytes": size, "sha256": self._hash.hexdigest()}

    def discard(self) -> None:
        self._file.close()
        self._aside.unlink(missing_ok=True)


# --- signals ------------------------------------------------------------


@contextmanager
def stops_handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handler` on SIGINT and SIGTERM; whatever handled them before does so again afterwards."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)
