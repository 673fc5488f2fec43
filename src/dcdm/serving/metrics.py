"""What Prometheus reads under /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

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
