"""The models of a server: each has a queue and a thread of its own, and is asked for by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dcdm.config import ConfigError
from dcdm.data.chats import ChatTemplate
from dcdm.serving.completions import template_of
from dcdm.serving.monitoring import Metrics, ModelMetrics
from dcdm.serving.scheduler import Scheduler
from dcdm.serving.schemas import APIError
from dcdm.serving.served import Served


@dataclass(frozen=True)
class Entry:
    served: Served
    scheduler: Scheduler

    @cached_property
    def template(self) -> ChatTemplate | None:
        return template_of(self.served)


class Models:
    """One or several; requests that name none get the first."""

    def __init__(self, served: Sequence[Served], metrics: Metrics) -> None:
        names = [each.name for each in served]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"two models are named {twice!r}; rename a folder, or give --name for each")
        self.entries = {
            each.name: Entry(each, Scheduler(each, ModelMetrics(metrics, each.name))) for each in served
        }

    @property
    def first(self) -> Entry:
        return next(iter(self.entries.values()))

    def get(self, name: str | None) -> Entry:
        if name is None:
            return self.first
        if name not in self.entries:
            served = ", ".join(map(repr, self.entries))
            raise APIError(
                404,
                f"the model {name!r} is not served here; this is {served}",
                code="model_not_found",
                param="model",
            )
        return self.entries[name]

    @property
    def schedulers(self) -> list[Scheduler]:
        return [entry.scheduler for entry in self.entries.values()]

    @property
    def draining(self) -> bool:
        return any(scheduler.draining for scheduler in self.schedulers)

    @property
    def alive(self) -> bool:
        return all(scheduler.alive for scheduler in self.schedulers)

    def start(self) -> None:
        for scheduler in self.schedulers:
            scheduler.start()

    def drain(self) -> None:
        """Take nothing new."""
        for scheduler in self.schedulers:
            scheduler.draining = True

    def refuse_all(self) -> None:
        for scheduler in self.schedulers:
            scheduler.refuse_all()

    def close(self) -> None:
        for scheduler in self.schedulers:
            scheduler.close()
