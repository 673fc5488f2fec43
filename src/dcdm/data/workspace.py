"""The folder beside the result in which a preparation works, and the moment it becomes the result."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dcdm.config import DataError
from dcdm.data.planning import differences, plan_digest
from dcdm.data.shards import JOURNAL, writing_failed
from dcdm.files import sync_folder, write_whole

PLAN, LOCK, STAMPS = "plan.json", "lock", "source_stamps.json"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Failures to write inside are the user's to repair: say what and where."""
    try:
        yield
    except OSError as error:
        raise DataError(writing_failed(folder, error)) from error


class Workspace:
    """`OUT.<plan>.partial`: named by its plan, so that no run takes up another plan's work."""

    def __init__(self, out: Path, plan: dict[str, Any]) -> None:
        self.out, self.plan = out, plan
        self.path = out.with_name(f"{out.name}.{plan_digest(plan)[:12]}.partial")

    @contextmanager
    def held(self, say: Callable[[str], None]) -> Iterator[bool]:
        """Make the folder and hold it against other processes; False if another finished it meanwhile."""
        with writing(self.out.parent):
            lock = self._lock(say)
        if lock is None:
            yield False
            return
        try:
            with writing(self.path):
                (self.path / JOURNAL).mkdir(exist_ok=True)
                if not (self.path / PLAN).exists():
                    write_whole(self.path / PLAN, json.dumps(self.plan).encode())
            yield True
        except DataError:
            if not any((self.path / JOURNAL).glob("*.json")):  # nothing to go on from
                self.discard()
            raise
        finally:
            os.close(lock)

    def remove_others(self, say: Callable[[str], None]) -> None:
        """Remove what earlier runs with other plans left unfinished, and say why it cannot be used."""
        pattern = re.compile(re.escape(self.out.name) + r"\.[0-9a-f]{12}\.partial")
        for path in sorted(self.out.parent.glob("*.partial")):
            if path == self.path or not pattern.fullmatch(path.name) or _in_use(path):
                continue
            try:
                reason = differences(json.loads((path / PLAN).read_bytes()), self.plan)
            except (OSError, ValueError):
                reason = "it has no plan"
            say(f"{path.name}, an unfinished preparation, cannot be continued: {reason}. Removed it")
            with writing(path):
                shutil.rmtree(path)

    def publish(self) -> None:
        """Leave only what belongs to the result, then rename the folder to its final name."""
        with writing(self.path):
            shutil.rmtree(self.path / JOURNAL, ignore_errors=True)
            for path in (self.path / PLAN, self.path / LOCK, *self.path.rglob("*.tmp")):
                path.unlink(missing_ok=True)
            sync_folder(self.path)
        with writing(self.out.parent):
            aside = self.out.with_name(f"{self.out.name}.replaced")
            if self.out.exists() and any(self.out.iterdir()):
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(self.out, aside)
            os.rename(self.path, self.out)
            sync_folder(self.out.parent)
            shutil.rmtree(aside, ignore_errors=True)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _lock(self, say: Callable[[str], None]) -> int | None:
        waited = False
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
            except FileNotFoundError:  # renamed between the two lines
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process is preparing {self.out}; waiting for it")
                waited = True
                fcntl.flock(handle, fcntl.LOCK_EX)
            with suppress(OSError):
                if os.path.samestat(os.fstat(handle), os.stat(self.path / LOCK)):
                    return handle
            os.close(handle)
            if waited and self.out.exists():
                return None


def _in_use(path: Path) -> bool:
    try:
        handle = os.open(path / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
