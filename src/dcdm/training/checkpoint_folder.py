"""The folder that holds a run's checkpoints: names, order, and moves that a crash cannot leave half done.

step-00001000            a whole checkpoint; it got this name by a rename, when nothing was left to write
step-00001000.partial    being written, or left behind by a run that was killed
step-00001000.replaced   an older checkpoint of the same step while the new one takes its place
step-00001000.deleted    on its way out
.lock                    held by the run that writes here
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Literal

from dcdm.files import sync_folder
from dcdm.training.manifest import STEP_NAME, CheckpointError, Manifest, read_manifest

try:
    import fcntl
except ImportError:  # not on Windows; two runs in one folder are then not noticed
    fcntl = None  # type: ignore[assignment]

PARTIAL, REPLACED, DELETED = ".partial", ".replaced", ".deleted"
LOCK = ".lock"


class Shelf:
    """One folder of checkpoints. Only one process of a run changes it; reading needs no `open`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock: IO[str] | None = None

    def open(self, patience: float = 5.0) -> list[str]:
        """Make the folder, lock it and tidy up after a killed run; what was found left over.

        Raises when another run still holds the lock after `patience` seconds.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._acquire(patience)
        found = []
        for left in sorted(self.folder.iterdir()):
            if left.suffix not in (PARTIAL, REPLACED, DELETED) or not STEP_NAME.fullmatch(left.stem):
                continue
            found.append(left.name)
            if left.suffix == REPLACED and not left.with_suffix("").exists():
                os.rename(left, left.with_suffix(""))
            else:
                shutil.rmtree(left)
        return found

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}{PARTIAL}"

    def checkpoints(self) -> list[Path]:
        """Checkpoints under their final names, the latest step first."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if STEP_NAME.fullmatch(path.name)]
        return sorted(found, key=_step, reverse=True)

    def commit(self, step: int) -> Path:
        """Give the partial checkpoint of `step` its final name; its files must be on disk already."""
        final, partial = self.path(step), self.partial(step)
        replaced = final.with_suffix(REPLACED)
        sync_folder(partial)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(final, replaced)
        try:
            os.rename(partial, final)
        except OSError:
            if replaced.exists():
                os.rename(replaced, final)
            raise
        sync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def discard(self, step: int) -> None:
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def prune(
        self,
        newest: Path,
        *,
        keep_last: int,
        keep_best: int,
        metric: str,
        mode: Literal["min", "max"],
        damaged: Collection[Path] = (),
        on_drop: Callable[[], None] = lambda: None,
    ) -> list[Path]:
        """Drop all up to `newest` but the last and the best; those known to be damaged count as neither.

        Later steps than `newest` are not this run's and are left alone.
        """
        past = [path for path in self.checkpoints() if _step(path) <= _step(newest)]
        whole = {path: read for path in past if path not in damaged and (read := _readable(path))}
        sign = 1 if mode == "min" else -1
        scores = {
            path: sign * score for path, read in whole.items() if (score := read.metrics.get(metric)) is not None
        }
        best = sorted(scores, key=lambda path: (scores[path], _step(path)))[:keep_best]
        kept = {newest, *list(whole)[:keep_last], *best}
        dropped = [path for path in past if path not in kept]
        for path in dropped:
            leaving = path.with_suffix(DELETED)
            os.rename(path, leaving)  # at once gone under its own name: never half a checkpoint there
            on_drop()
            shutil.rmtree(leaving, ignore_errors=True)
        return dropped

    def _acquire(self, patience: float) -> None:
        if fcntl is None or self._lock is not None:
            return
        lock = (self.folder / LOCK).open("a")
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with its process, however that ends
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    lock.close()
                    raise CheckpointError(
                        f"another run is writing to {self.folder}; stop it or choose another folder"
                    ) from None
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        self._lock = lock


def _step(path: Path) -> int:
    match = STEP_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _readable(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None
