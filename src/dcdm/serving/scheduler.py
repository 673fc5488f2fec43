"""One thread owns the model and computes texts that wait, as many together as fit.

Requests come from the event loop's thread as a `QueuedRequest` of `Completion`s: what a caller asked for, and the
reader that makes messages of what is written. They join and leave between two forward passes: whoever waits is
taken in as soon as there is room, whatever the others are doing. A completion that joins gets a `BatchRow`, which
the decoder's `ContinuousBatch` writes and which calls back at every commit and at its end. Messages go back into
the queue of the request, in the order in which things happen.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dcdm.decoding.batch import batch_of
from dcdm.decoding.caching import PrefixCache
from dcdm.decoding.config import DecodingConfig
from dcdm.decoding.text import BatchRow, Ended, Event
from dcdm.serving.monitoring import Metrics, ModelMetrics, logger
from dcdm.serving.schemas import APIError, closing, queue_full, too_long
from dcdm.serving.served import ServedModel

T = TypeVar("T")


class Reader(Protocol):
    """What a route makes of a completion's events. It is called in the model's thread."""

    satisfied: bool
    """Nothing more is needed; asked between forward passes."""

    def event(self, event: Event, seconds: float) -> Any:
        """A message for the route, or None. `seconds` count from when it was begun."""

    def end(self, ended: Ended, seconds: float) -> Any:
        """The last message."""


@dataclass
class Completion:
    """One text that a request asks for."""

    prompt: list[int]
    new_tokens: int
    seed: int
    index: int
    decoding: DecodingConfig
    eos_id: int
    reader: Reader
    request: QueuedRequest = field(init=False, repr=False)
    """Of which it is number `index`."""
    size: int = 0
    """Positions of its canvas in a window."""
    row: BatchRow = field(init=False, repr=False)
    """What writes it, once it has joined."""
    began: float = 0.0
    heard: bool = False
    """Its caller has been told something of it."""


@dataclass(frozen=True)
class Last:
    """A completion's last message, and how it ended."""

    message: Any
    ended: Ended


class QueuedRequest:
    """The texts that a request waits for. Leaving its context stops them between two forward passes."""

    def __init__(self, completions: Sequence[Completion], seconds: float) -> None:
        self.completions, self.seconds = completions, seconds
        for one in completions:
            one.request = self
        self.arrived = time.monotonic()
        self.deadline = self.arrived + seconds
        self.given_up = False
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[tuple[Completion, Any]] = asyncio.Queue()

    def __enter__(self) -> QueuedRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self.given_up = True

    async def messages(self) -> AsyncIterator[tuple[Completion, Any]]:
        """Completions and what their readers say, until all have ended; an `APIError` if that cannot be."""
        left = len(self.completions)
        while left:
            try:
                async with asyncio.timeout(self.deadline - time.monotonic()):
                    completion, message = await self._messages.get()
            except TimeoutError:
                raise too_long(self.seconds) from None
            if isinstance(message, APIError):
                raise message
            left -= isinstance(message, Last)
            yield completion, message

    def tell(self, completion: Completion, message: Any) -> None:
        """Called in the model's thread."""
        try:
            self._loop.call_soon_threadsafe(self._messages.put_nowait, (completion, message))
        except RuntimeError:  # the loop is closed: nobody listens any more
            self.given_up = True


class Scheduler:
    """The queue before a model, and the thread that empties it.

    Keys and values have room for `max_batch_tokens` positions. The texts that run come first: as many rows as there
    are, each as long as the longest. What is left of it caches prompt prefixes for later texts.
    """

    def __init__(self, served: ServedModel, metrics: ModelMetrics) -> None:
        self.served, self.settings, self.metrics = served, served.settings, metrics
        self.draining = False
        self._waiting: deque[Completion] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._running: list[Completion] = []
        self.prefixes = PrefixCache(self.settings.prefix_tokens)
        self._batch = batch_of(served.model, self.prefixes)
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        metrics.queued.set_function(lambda: len(self._waiting))
        metrics.running.set_function(lambda: len(self._running))
        metrics.positions.set_function(lambda: self._batch.positions)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, completions: Sequence[Completion]) -> QueuedRequest:
        """Completions into the queue; refused if it is full or the server is closing. Called in the event loop."""
        queued = QueuedRequest(completions, self.settings.timeout_seconds)
        with self._changed:
            if self.draining or self._closed:
                raise closing()
            self._forget_given_up()
            if len(self._waiting) + len(completions) > self.settings.max_queued:
                raise queue_full()
            for one in completions:
                one.size = min(self.served.window_length, 1 + len(one.prompt) + one.new_tokens)
                self._waiting.append(one)
            self._changed.notify_all()
        self.metrics.prompt_tokens.inc(sum(len(one.prompt) for one in completions))
        return queued

    def refuse_all(self) -> None:
        """Give up what waits and what is being computed; its callers are told."""
        with self._changed:
            self.draining = True
            for request in {one.request for one in (*self._waiting, *self._running)}:
                request.tell(request.completions[0], closing())
                request.given_up = True
            self._waiting.clear()

    def close(self, seconds: float = 10.0) -> None:
        """Stop what is being computed between two forward passes, and the thread."""
        self.refuse_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _work(self) -> None:
        while self._admit():
            try:
                self.metrics.batch.observe(self._batch.step())
            except Exception:  # a defect must not end the service
                error = self._failed("step failed", texts=len(self._running))
                self._batch = batch_of(self.served.model, self.prefixes)
                for one in self._running:
                    one.request.tell(one, error)
                self._running = []

    def _admit(self) -> bool:
        """Take in what there is room for, and wait if there is nothing to do; False when closed."""
        with self._changed:
            while not self._closed:
                self._forget_given_up()
                if self._waiting:
                    self._join(self._fitting())
                if self._running:
                    return True
                self._changed.wait_for(lambda: self._closed or self._waiting)
        return False

    def _fitting(self) -> list[Completion]:
        """Take those that wait, in their order, as far as they fit beside those that run."""
        settings, taken = self.settings, list[Completion]()
        count, longest = len(self._running), max((one.size for one in self._running), default=0)
        while self._waiting:
            longest = max(longest, self._waiting[0].size)
            if count and (count >= settings.max_batch or longest * (count + 1) > settings.max_batch_tokens):
                break
            taken.append(self._waiting.popleft())
            count += 1
        return taken

    def _join(self, completions: list[Completion]) -> None:
        now = time.monotonic()
        self._running = [*self._running, *completions]
        taken = len(self._running) * max((one.size for one in self._running), default=0)
        self.prefixes.limit = max(0, min(self.settings.prefix_tokens, self.settings.max_batch_tokens - taken))
        self.prefixes.shrink(self.prefixes.limit)
        for one in completions:
            one.began = now
            self.metrics.waited.observe(now - one.request.arrived)
            self._batch.add(self._row(one))

    def _row(self, one: Completion) -> BatchRow:
        request, window = one.request, self.served.window_length

        def over() -> bool:
            return request.given_up or one.reader.satisfied or time.monotonic() > request.deadline

        def event(event: Event) -> None:
            if request.given_up:
                return
            if (message := self._read(one, one.reader.event, event)) is not None:
                self._heard(one)
                request.tell(one, message)
                if isinstance(message, APIError):
                    request.given_up = True

        one.row = BatchRow(
            [self.served.model.config.bos_id, *one.prompt], one.new_tokens, one.decoding, window, window // 2 - 1,
            one.seed, one.index, one.eos_id, one.index,
            cancel=over, on_event=event, on_end=lambda ended: self._end(one, ended),
        )  # fmt: skip
        return one.row

    def _read(self, one: Completion, read: Callable[[T, float], Any], what: T) -> Any:
        """What its reader makes of an event; its defect, or its tokenizer's panic, is this completion's alone."""
        try:
            return read(what, time.monotonic() - one.began)
        except BaseException:  # a panic of `tokenizers` is not an Exception
            return self._failed("reader failed", text=one.index)

    def _failed(self, event: str, **data: int) -> APIError:
        """Log and count the exception that is being handled; what its callers are told."""
        logger.exception(event, extra={"data": data})
        self.metrics.failures.inc()
        return APIError(500, "the model failed on this request", code="failed")

    def _heard(self, one: Completion) -> None:
        if not one.heard:
            one.heard = True
            self.metrics.first.observe(time.monotonic() - one.request.arrived)

    def _end(self, one: Completion, ended: Ended) -> None:
        message: Last | APIError
        if ended.finished != "cancelled" or one.reader.satisfied:
            read = self._read(one, one.reader.end, ended)
            message = read if isinstance(read, APIError) else Last(read, ended)
            self._heard(one)
        else:
            message = too_long(self.settings.timeout_seconds)
        self._running = [other for other in self._running if other is not one]
        self.metrics.new_tokens.inc(ended.costs["new_tokens"])
        self.metrics.forwards.inc(ended.costs["forwards"])
        self.metrics.ended("stop" if one.reader.satisfied else ended.finished)
        one.request.tell(one, message)  # last: whoever has an answer finds it counted

    def _forget_given_up(self) -> None:
        kept = deque(one for one in self._waiting if not one.request.given_up)
        if dropped := len(self._waiting) - len(kept):
            self.metrics.ended("given up", dropped)
            self._waiting = kept


class Models:
    """The models of a server, each with a queue and a thread of its own; requests that name none get the first."""

    def __init__(self, served: Sequence[ServedModel], metrics: Metrics) -> None:
        self.schedulers = {each.name: Scheduler(each, ModelMetrics(metrics, each.name)) for each in served}
        self.all = list(self.schedulers.values())

    def get(self, name: str | None) -> Scheduler:
        if name is None:
            return self.all[0]
        if name not in self.schedulers:
            served = ", ".join(map(repr, self.schedulers))
            message = f"the model {name!r} is not served here; this is {served}"
            raise APIError(404, message, code="model_not_found", param="model")
        return self.schedulers[name]

    @property
    def draining(self) -> bool:
        return any(each.draining for each in self.all)

    @property
    def alive(self) -> bool:
        return all(each.alive for each in self.all)

    def drain(self) -> None:
        """Take nothing new."""
        for each in self.all:
            each.draining = True

    def refuse_all(self) -> None:
        for each in self.all:
            each.refuse_all()
