"""What an operator sees: logs as one JSON object per line, and the figures that Prometheus reads under /metrics.

What callers wrote is in the log only if the operator asks for it.
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
        self.requests = Counter("dcdm_requests", "Answered requests", ["route", "status"], registry=registry)
        self.seconds = Histogram(
            "dcdm_request_seconds", "From arrival to the last byte", ["route"], buckets=SECONDS, registry=registry
        )
        self.waited = Histogram(
            "dcdm_queue_seconds", "How long texts waited to be computed", buckets=SECONDS, registry=registry
        )
        self.batch = Histogram(
            "dcdm_batch_texts", "Texts that were computed together", buckets=ROWS, registry=registry
        )
        self.queued = Gauge("dcdm_queued_texts", "Texts that wait", registry=registry)
        self.running = Gauge("dcdm_running_texts", "Texts that are being computed", registry=registry)
        self.ended = Counter("dcdm_texts", "Texts by how they ended", ["ended"], registry=registry)
        self.prompt_tokens = Counter("dcdm_prompt_tokens", "Tokens of prompts", registry=registry)
        self.new_tokens = Counter("dcdm_new_tokens", "Tokens that the model wrote", registry=registry)
        self.forwards = Counter("dcdm_forwards", "Forwards, counted for every text", registry=registry)
        self.failures = Counter("dcdm_failures", "Batches that failed with a defect", registry=registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)
