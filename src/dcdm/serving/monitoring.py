"""What an operator sees: logs as one JSON object per line, and the figures that Prometheus reads under /metrics.

What callers wrote is in neither. Whether a prompt was known already is in the log
and not among the figures: callers can read those, and could try out what others have sent.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

logger = logging.getLogger("dcdm.serving")


class Lines(logging.Formatter):
    """A record as JSON; `extra={"data": {…}}` adds fields."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z", "level": record.levelname.lower(),
            "event": record.getMessage(), **getattr(record, "data", {}),
        }  # fmt: skip
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def start_logging(stream: TextIO | None = None) -> None:
    """Everything of the server's and uvicorn's loggers, one line each."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Lines())
    for name, level in (("dcdm.serving", logging.INFO), ("uvicorn", logging.WARNING)):
        owner = logging.getLogger(name)
        owner.handlers, owner.propagate = [handler], False
        owner.setLevel(level)


def log_event(name: str, **data: Any) -> None:
    logger.info(name, extra={"data": data})


SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
ROWS = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """Counters of one server; every server has a registry of its own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, labels, registry=registry)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(name, about, labels, registry=registry)

        def histogram(name: str, about: str, label: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(name, about, [label], buckets=buckets, registry=registry)

        self.requests = counter("dcdm_requests", "Answered requests", "route", "status")
        self.seconds = histogram("dcdm_request_seconds", "From arrival to the last byte", "route")
        self.failures = counter("dcdm_failures", "Requests and forward passes that failed with a defect")
        self.waited = histogram("dcdm_queue_seconds", "How long texts waited to be computed", "model")
        self.first = histogram("dcdm_first_text_seconds", "From arrival to the first text sent", "model")
        self.batch = histogram("dcdm_batch_texts", "Texts that shared a forward pass", "model", ROWS)
        self.queued = gauge("dcdm_queued_texts", "Texts that wait", "model")
        self.running = gauge("dcdm_running_texts", "Texts that are being computed", "model")
        self.positions = gauge("dcdm_cache_positions", "Positions of running texts in the cache", "model")
        self.ended = counter("dcdm_texts", "Texts by how they ended", "model", "ended")
        self.prompt_tokens = counter("dcdm_prompt_tokens", "Tokens of prompts", "model")
        self.new_tokens = counter("dcdm_new_tokens", "Tokens that the model wrote", "model")
        self.forwards = counter("dcdm_forwards", "Forward passes, counted for every text", "model")

    def text(self) -> bytes:
        return generate_latest(self.registry)


class ModelMetrics:
    """Those of one model."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.failures = metrics.failures
        self.waited, self.first, self.batch = (
            each.labels(model) for each in (metrics.waited, metrics.first, metrics.batch)
        )
        self.queued, self.running, self.positions = (
            each.labels(model) for each in (metrics.queued, metrics.running, metrics.positions)
        )
        self.prompt_tokens, self.new_tokens, self.forwards = (
            each.labels(model) for each in (metrics.prompt_tokens, metrics.new_tokens, metrics.forwards)
        )
        self._ended, self._model = metrics.ended, model

    def ended(self, how: str, texts: int = 1) -> None:
        self._ended.labels(self._model, how).inc(texts)
