"""One optimizer step, top to bottom: prompts, losses, gradients, step, balance. `run.py` has the loop around it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcdm.config import ObjectiveConfig
from dcdm.data.loader import Loader
from dcdm.diffusion import objectives
from dcdm.diffusion.objectives import Batch, GlobalBatch, Loss, counted, with_prompts
from dcdm.distributed import World, precision, sum_over_ranks
from dcdm.keys import Key
from dcdm.model.chunking import max_violation
from dcdm.model.masks import there
from dcdm.model.transformer import Model
from dcdm.training.checkpoint import Checkpointer, Resumed, TrainState
from dcdm.training.fsdp import run_gathered, shard, sync_gradients, unsharded
from dcdm.training.optimizers import clip_gradients, make_optimizer, trainable
from dcdm.training.settings import TrainConfig


class NotFinite(FloatingPointError):
    """A loss or gradient is not finite; the optimizer has not moved."""

    def __init__(self, step: int, part: str, batches: list[Batch]) -> None:
        super().__init__(f"step {step}: {part} is not finite; lower learning_rate, or look at the batch kept")
        self.step, self.part, self.batches = step, part, batches


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step measured, over all ranks."""

    step: int
    """Steps that were done before it."""
    loss: float
    nll: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    """Free tokens of the step."""
    chunk_loss: float | None = None
    moe_loss: float | None = None
    chunk_counts: Tensor | None = None
    """N_k over the step (K,), where the model has chunks; in main memory."""
    draft_loss: float | None = None

    @property
    def max_violation(self) -> float | None:
        return None if self.chunk_counts is None else float(max_violation(self.chunk_counts))


class Trainer:
    """A model in training, its optimizer, its averaged weights and its place in the data.

    Every random choice follows from `settings.seed`. Under several ranks the model is sharded in place.
    """

    def __init__(
        self,
        model: Model,
        loader: Loader,
        settings: TrainConfig,
        objective: ObjectiveConfig | None = None,
        world: World | None = None,
    ) -> None:
        self.settings, self.objective, self.world = settings, objective or ObjectiveConfig(), world or World()
        self.objective.check_fits(model.config)
        self.types = precision(settings.dtype, self.world.device)
        self.model = model
        if self.world.size > 1:
            shard(model, self.world, compute_dtype=self.types.compute, replicate=settings.replicate)
        if settings.compile:
            self.model.compile_blocks()
        self.model.activation_checkpointing = settings.activation_checkpointing
        self.optimizer = make_optimizer(self.model, settings)
        self.average = {name: p.detach().clone() for name, p in trainable(self.model)} if settings.ema_decay else {}
        self.loader, self.step = loader, 0
        """`step` counts the steps done."""
        self._key, self._bias_rate = Key(settings.seed), self.objective.bias_rate_for(model.config)
        self._batches: Iterator[list[Batch]] | None = None

    def resume(
        self, checkpointer: Checkpointer, accept: Callable[[dict[str, Any]], None] = lambda record: None
    ) -> Resumed | None:
        """Continue from the newest whole checkpoint, if there is one; `accept` may refuse its record by raising."""
        if (resumed := checkpointer.resume(self.state(), accept)) is not None:
            self.loader.load_state_dict(resumed.record["loader"])
            self.step = resumed.step
        return resumed

    def save(
        self, checkpointer: Checkpointer, record: Mapping[str, Any], figures: Mapping[str, float], wait: bool
    ) -> None:
        """A checkpoint of this step, in the background unless `wait`."""
        state = self.state({"loader": self.loader.state_dict(), **record})
        checkpointer.save(self.step, state, figures, wait=wait)

    def state(self, record: dict[str, Any] | None = None) -> TrainState:
        """What a checkpoint holds."""
        tensors = {"ema": self.average} if self.average else {}
        return TrainState(self.model, self.optimizer, tensors, record or {})

    def take_step(self) -> StepReport:
        """One optimizer step on the next global batch."""
        self._batches = self._batches or _batches(self.loader)
        settings, rate = self.settings, learning_rate(self.step, self.settings)
        report = self._gradients(next(self._batches), self._key.fold("noise", self.step), rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("rate_scale", 1.0)
        self.optimizer.step()
        if self.model.chunking is not None and self._bias_rate > 0:
            assert report.chunk_counts is not None
            self.model.chunking.update_bias(report.chunk_counts, self._bias_rate)
        self.step += 1
        self._update_average(min(settings.ema_decay, (1 + self.step) / (10 + self.step)))
        return report

    def _gradients(self, micro: list[Batch], key: Key, rate: float) -> StepReport:
        """Leave the clipped gradient of the global batch in the model; raises before the optimizer moves."""
        model, world = self.model, self.world

        def total(x: Tensor) -> Tensor:
            return sum_over_ranks(x, world)

        micro = [with_prompts(model, batch, key, self.objective) for batch in micro]
        tokens = total(torch.stack([counted(model, batch) for batch in micro]).sum())
        global_batch = GlobalBatch(tokens, self.settings.batch_size, len(micro), total)
        model.zero_grad(set_to_none=True)
        parts: list[Loss] = []
        for number, batch in enumerate(micro):
            given = (model, batch, key, self.objective, global_batch)
            if world.size == 1:
                with self.types.autocast(world.device):
                    part = objectives.loss_of_part(*given)
            else:
                sync_gradients(model, number == len(micro) - 1)
                part = run_gathered(model, objectives.loss_of_part, *given)
            part.total.backward()
            parts.append(part)
        norm = clip_gradients(model, self.settings.clip)

        names = [
            "total",
            "nll",
            *(n for n in ("chunk_loss", "moe_loss", "draft_loss") if getattr(parts[0], n) is not None),
        ]
        found = total(torch.stack([torch.stack([getattr(p, n).detach() for p in parts]).sum() for n in names]))
        counts = None
        figures = [found.double(), norm.double()[None]]
        if parts[0].counts is not None:
            counts = total(torch.stack([p.counts.sum(dim=0) for p in parts if p.counts is not None]).sum(dim=0))
            figures.append(there(counts.double(), norm.device))
        # the one reading of a step: what is not finite is found before the optimizer moves
        read = torch.cat(figures).tolist()
        sums, gradient_norm = dict(zip(names, read, strict=False)), read[len(names)]
        if counts is not None:
            counts = torch.tensor(read[len(names) + 1 :], dtype=torch.long)
        for name, value in (*sums.items(), ("the gradient's norm", gradient_norm)):
            if not math.isfinite(value):
                raise NotFinite(self.step + 1, "the loss" if name == "total" else name, micro)
        return StepReport(
            self.step, sums["total"], sums["nll"], gradient_norm, rate, int(tokens),
            sums.get("chunk_loss"), sums.get("moe_loss"), counts, sums.get("draft_loss"),
        )  # fmt: skip

    @contextmanager
    def averaged(self) -> Iterator[Model]:
        """The model that the run gives, to be evaluated: with its averaged weights, where there are any, and whole.

        Inside, every rank may call it as often as it likes.
        """
        trained = {name: p.detach().clone() for name, p in self._averages()}
        with torch.no_grad():
            for name, parameter in self._averages():
                parameter.copy_(self.average[name])
            try:
                with unsharded(self.model) if self.world.size > 1 else nullcontext():
                    yield self.model
            finally:
                for name, parameter in self._averages():
                    parameter.copy_(trained[name])

    @torch.no_grad()
    def _update_average(self, decay: float) -> None:
        for name, parameter in self._averages():
            self.average[name].lerp_(parameter, 1 - decay)

    def _averages(self) -> Iterator[tuple[str, Tensor]]:
        return iter(trainable(self.model) if self.average else ())


def _batches(loader: Loader) -> Iterator[list[Batch]]:
    """The micro-batches of each step, in main memory: what follows from tokens alone is worked out there."""
    steps = iter(loader)
    while True:
        yield [Batch(**batch) for batch in itertools.islice(steps, loader.micro_steps)]


def learning_rate(step: int, settings: TrainConfig) -> float:
    """Linear warm-up, then the schedule."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        decay = max(1, round(settings.decay_share * settings.steps))
        return settings.learning_rate * min(1.0, (settings.steps - step) / decay)
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
