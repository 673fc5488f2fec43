"""How far a piece of work has come, on standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from dcdm.config import harmless

PLAIN_EVERY = 10.0  # seconds between lines where there is no terminal


class Reporter:
    """Hears what a long piece of work does. This one says nothing; `ConsoleProgress` tells people."""

    def say(self, text: str) -> None:
        """One thing that happened, as a sentence."""

    def progress(self, task: str, done: int, total: int, unit: str, note: str = "") -> None:
        """`done` of `total` units (`bytes` are shown as MB) of the task, and what else there is to know."""


class ConsoleProgress(Reporter):
    """Tasks follow each other: naming another one puts its bar in the place of the last one's.

    Not `shown`, it says nothing, as all processes but the main one of a distributed run should.
    """

    def __init__(self, shown: bool = True) -> None:
        self._console = Console(stderr=True, highlight=False, quiet=not shown)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(),
            TextColumn("{task.fields[count]}", markup=False), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=self._console, disable=not (shown and self._console.is_terminal),
        )  # fmt: skip
        self._task: tuple[str, TaskID] | None = None
        self._last_line = time.monotonic()

    def say(self, text: str) -> None:
        self._console.print(harmless(text), markup=False, soft_wrap=True)

    def progress(self, task: str, done: int, total: int, unit: str, note: str = "") -> None:
        count = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB" if unit == "bytes" else f"{done:,} of {total:,} {unit}"
        if self._task is None or self._task[0] != task:
            self._start(task)
        assert self._task is not None
        self._bar.update(self._task[1], completed=done, total=total, count=count, note=note)
        now = time.monotonic()
        if not self._console.is_terminal and (done == total or now - self._last_line >= PLAIN_EVERY):
            self._last_line = now
            self.say(f"{task}: {count}{', ' if note else ''}{note}")

    def _start(self, task: str) -> None:
        if self._task is None:
            self._bar.start()
        else:
            self._bar.remove_task(self._task[1])
        self._task = (task, self._bar.add_task(harmless(task), total=None, count="", note=""))
        self._last_line = time.monotonic()

    def __enter__(self) -> ConsoleProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
