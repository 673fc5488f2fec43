"""One thread owns the model and computes texts that wait, as many together as fit.

Requests come from the event loop's thread as a `Ticket` of rows. Messages about them go back into the ticket's
queue, in the order in which things happen.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dcdm.decoding.config import DecodingConfig
from dcdm.decoding.engine import Ended, Event, generate
from dcdm.serving.monitoring import Metrics, logger
from dcdm.serving.schemas import Refusal, closing, queue_full, too_long, too_many_forwards
from dcdm.serving.served import Served


class Reader(Protocol):
    """What a route makes of a row's events. It is called in the model's thread."""

    satisfied: bool
    """Nothing more is needed; asked between forwards."""

    def event(self, event: Event, seconds: float) -> Any:
        """A message for the route, or None. `seconds` count from when the row was begun."""

    def end(self, ended: Ended, seconds: float) -> Any:
        """The row's last message."""


@dataclass
class TextRow:
    """One text to write."""

    prompt: list[int]
    new_tokens: int
    seed: int
    index: int
    decoding: DecodingConfig
    eos_id: int
    reader: Reader
    number: int = 0
    """Its place in the request."""
    forwards: int = 0
    began: float = 0.0
    ended: Ended | None = None

    def same_decoder(self, other: TextRow) -> bool:
        """Whether both can be computed in one batch."""
        return self.decoding == other.decoding and self.eos_id == other.eos_id


@dataclass(frozen=True)
class Last:
    """A row's last message, and how it ended."""

    message: Any
    ended: Ended
    seconds: float


class Ticket:
    """The rows of one request. Leaving its context before they have ended stops them between two forwards."""

    def __init__(self, rows: Sequence[TextRow], seconds: float, max_forwards: int) -> None:
        self.rows, self.max_forwards, self.seconds = list(rows), max_forwards, seconds
        for number, row in enumerate(self.rows):
            row.number = number
        self.arrived = time.monotonic()
        self.deadline = self.arrived + seconds
        self.given_up = False
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[tuple[TextRow, Any]] = asyncio.Queue()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.given_up = True

    async def messages(self) -> AsyncIterator[tuple[TextRow, Any]]:
        """Rows and what their readers say, until all have ended; raises a `Refusal` if that cannot be."""
        left = len(self.rows)
        while left:
            try:
                async with asyncio.timeout(self.deadline - time.monotonic()):
                    row, message = await self._messages.get()
            except TimeoutError:
                raise too_long(self.seconds) from None
            if isinstance(message, Refusal):
                raise message
            left -= isinstance(message, Last)
            yield row, message

    # --- from here on: the model's thread

    def over(self, row: TextRow) -> bool:
        """Whether a row that has not ended should."""
        return (
            self.given_up or row.reader.satisfied or row.forwards >= self.max_forwards
            or time.monotonic() > self.deadline
        )  # fmt: skip

    def tell(self, row: TextRow, message: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(self._messages.put_nowait, (row, message))
        except RuntimeError:  # the loop is closed: nobody listens any more
            self.given_up = True

    def event(self, row: TextRow, event: Event) -> None:
        row.forwards += 1
        if not self.given_up and (message := row.reader.event(event, time.monotonic() - row.began)) is not None:
            self.tell(row, message)

    def end(self, row: TextRow, ended: Ended) -> Last | Refusal:
        """Note that a row has ended; what is to be told of it."""
        row.ended = ended
        if ended.finished != "cancelled" or row.reader.satisfied:
            seconds = time.monotonic() - row.began
            return Last(row.reader.end(ended, seconds), ended, seconds)
        if row.forwards >= self.max_forwards:
            return too_many_forwards(self.max_forwards)
        return too_long(self.seconds)


class Scheduler:
    """The queue before a model, and the thread that empties it."""

    def __init__(self, served: Served, metrics: Metrics) -> None:
        self.served, self.settings, self.metrics = served, served.settings, metrics
        self.draining = False
        self._waiting: deque[tuple[Ticket, TextRow]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._running: list[Ticket] = []
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        metrics.queued.set_function(lambda: len(self._waiting))

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, rows: Sequence[TextRow]) -> Ticket:
        """Rows into the queue; refused if it is full or the server is closing. Called in the event loop."""
        ticket = Ticket(rows, self.settings.timeout_seconds, self.settings.max_forwards)
        with self._changed:
            if self.draining or self._closed:
                raise closing()
            self._forget_given_up()
            if len(self._waiting) + len(rows) > self.settings.max_queued:
                raise queue_full()
            self._waiting.extend((ticket, row) for row in ticket.rows)
            self._changed.notify_all()
        self.metrics.prompt_tokens.inc(sum(len(row.prompt) for row in ticket.rows))
        return ticket

    def refuse_all(self) -> None:
        """Give up what waits and what is being computed; its callers are told."""
        with self._changed:
            self.draining = True
            for ticket in {ticket for ticket, _ in self._waiting} | set(self._running):
                ticket.tell(ticket.rows[0], closing())
                ticket.given_up = True
            self._waiting.clear()

    def close(self, seconds: float = 10.0) -> None:
        """Stop what is being computed between two forwards, and the thread."""
        self.refuse_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _work(self) -> None:
        while batch := self._take():
            self.metrics.batch.observe(len(batch))
            self.metrics.running.set(len(batch))
            try:
                self._compute(batch)
            except Exception:  # a defect must not end the service
                logger.exception("batch failed", extra={"data": {"texts": len(batch)}})
                self.metrics.failures.inc()
                for ticket, row in batch:
                    if row.ended is None:
                        ticket.tell(row, Refusal(500, "the model failed on this request", code="failed"))
            finally:
                self._running = []
                self.metrics.running.set(0)

    def _take(self) -> list[tuple[Ticket, TextRow]]:
        """The next batch: the text that waits longest, and those behind it that fit; [] when closed."""
        settings = self.settings
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if not self._closed and settings.max_batch > 1:
                    self._changed.wait_for(
                        lambda: self._closed or len(self._waiting) >= settings.max_batch,
                        settings.batch_wait_ms / 1e3,
                    )
                if self._closed:
                    return []
                self._forget_given_up()
                if self._waiting:
                    break
            batch: list[tuple[Ticket, TextRow]] = []
            rest: deque[tuple[Ticket, TextRow]] = deque()
            longest = 0
            for ticket, row in self._waiting:
                size = max(longest, min(self.served.window, 1 + len(row.prompt) + row.new_tokens))
                fits = len(batch) < settings.max_batch and size * (len(batch) + 1) <= settings.max_batch_tokens
                if not batch or (fits and row.same_decoder(batch[0][1])):
                    batch.append((ticket, row))
                    longest = size
                else:
                    rest.append((ticket, row))
            self._waiting = rest
            self._running = [ticket for ticket, _ in batch]
        now = time.monotonic()
        for ticket, row in batch:
            row.began = now
            self.metrics.waited.observe(now - ticket.arrived)
        return batch

    def _forget_given_up(self) -> None:
        kept = [(ticket, row) for ticket, row in self._waiting if not ticket.given_up]
        if len(kept) < len(self._waiting):
            self.metrics.ended.labels("given up").inc(len(self._waiting) - len(kept))
            self._waiting = deque(kept)

    def _compute(self, batch: list[tuple[Ticket, TextRow]]) -> None:
        rows = [row for _, row in batch]

        def end(at: int, ended: Ended) -> None:
            ticket, row = batch[at]
            message = ticket.end(row, ended)
            self.metrics.running.dec()
            self.metrics.new_tokens.inc(ended.costs["new_tokens"])
            self.metrics.forwards.inc(ended.costs["forwards"])
            self.metrics.ended.labels("stop" if row.reader.satisfied else ended.finished).inc()
            ticket.tell(row, message)  # last: whoever has an answer finds it counted

        generate(
            self.served.model,
            [row.prompt for row in rows],
            max_new_tokens=[row.new_tokens for row in rows],
            decoding=rows[0].decoding,
            seed=[row.seed for row in rows],
            index=[row.index for row in rows],
            eos_id=rows[0].eos_id,
            cancel=lambda at: batch[at][0].over(batch[at][1]),
            on_event=lambda event: batch[event.row][0].event(batch[event.row][1], event),
            on_end=end,
            batch_size=len(rows),
        )
