"""Files that are either whole or not there, whenever the process dies; and signals that ask it to stop."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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


# --- signals ------------------------------------------------------------------------------------------------------


@contextmanager
def stops_handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handler` on SIGINT, SIGTERM and SIGHUP; whatever handled them before does so again afterwards.

    A SIGHUP that is ignored stays so: `nohup` asks for that.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)
