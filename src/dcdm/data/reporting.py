"""What a preparation says while it works."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_EVERY = 10.0  # seconds between lines where there is no terminal


class Reporter:
    """Says nothing; the base of those that do."""

    def say(self, text: str) -> None:
        """One thing that happened, as a sentence."""

    def progress(self, done: int, total: int, tokens: int) -> None:
        """Source bytes done and in all, and tokens written so far."""

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the screen in order."""


class ConsoleReporter(Reporter):
    """A progress bar on standard error; plain lines where that is no terminal."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._bar: Progress | None = None
        self._started = self._said = time.monotonic()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def progress(self, done: int, total: int, tokens: int) -> None:
        now = time.monotonic()
        rate = tokens / max(now - self._started, 1e-3)
        if self._console.is_terminal:
            if self._bar is None:
                self._bar = Progress(
                    TextColumn("tokenising"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
                    TextColumn("{task.fields[rate]}"), console=self._console,
                )  # fmt: skip
                self._bar.add_task("", total=total, rate="")
                self._bar.start()
            self._bar.update(self._bar.task_ids[0], completed=done, rate=f"{rate / 1e6:.2f}M tokens/s")
        elif now - self._said >= PLAIN_EVERY:
            self._said = now
            self.say(f"tokenised {done / 1e6:.1f} of {total / 1e6:.1f} MB, {rate / 1e6:.2f}M tokens/s")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
