"""The training loop, top to bottom: batches, losses, gradients, step, balance, evaluation, checkpoint."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcdm.config import ObjectiveConfig
from dcdm.data.loader import InMemory, Loader
from dcdm.diffusion import objectives
from dcdm.diffusion.objectives import Batch, GlobalBatch, Loss, counted, with_prompts
from dcdm.distributed import Precision, World, any_true, precision, sum_over_ranks
from dcdm.keys import Key
from dcdm.model.chunking import max_violation, update_bias
from dcdm.model.transformer import Model
from dcdm.training.checkpoint import Checkpointer, TrainState
from dcdm.training.fsdp import clip_gradients, run_gathered, shard, sync_gradients
from dcdm.training.optimizers import make_optimizer, trainable
from dcdm.training.settings import TrainConfig

Evaluate = Callable[[Model, int], Mapping[str, float]]
"""(model, steps done) → figures; called by all ranks."""


class NotFinite(FloatingPointError):
    """A loss or gradient is not finite; the optimizer has not moved."""

    def __init__(self, step: int, part: str, batches: list[Batch]) -> None:
        super().__init__(f"step {step}: {part} is not finite; lower learning_rate, or look at the batch kept")
        self.step, self.part, self.batches = step, part, batches


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step measured, over all ranks."""

    step: int
    loss: float
    nll: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    """Free tokens of the step."""
    chunk_loss: float | None = None
    moe_loss: float | None = None
    chunk_counts: Tensor | None = None
    """N_k over the step (K,), where the model has chunks."""
    draft_loss: float | None = None

    @property
    def max_violation(self) -> float | None:
        return None if self.chunk_counts is None else float(max_violation(self.chunk_counts))


@dataclass
class Hooks:
    """What the loop tells and asks; the defaults do nothing."""

    accept: Callable[[dict[str, Any]], None] = lambda record: None
    """Sees the record of the checkpoint to resume from, and raises if it is not this run's."""
    on_skipped: Callable[[Path, str], None] = lambda checkpoint, reason: None
    on_resume: Callable[[int], None] = lambda step: None
    on_step: Callable[[StepReport], None] = lambda report: None
    on_evaluation: Callable[[int, Mapping[str, float]], None] = lambda step, figures: None
    should_stop: Callable[[], bool] = lambda: False
    record: dict[str, Any] = field(default_factory=dict)
    """Kept in every checkpoint: settings, and fingerprints of tokenizer and data."""


def train(
    model: Model,
    loader: Loader,
    settings: TrainConfig,
    objective: ObjectiveConfig | None = None,
    *,
    world: World | None = None,
    hooks: Hooks | None = None,
    checkpointer: Checkpointer | None = None,
    checkpoint_every: int = 1_000,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 1_000,
    evaluate_first: bool = False,
) -> int:
    """Train `model` in place, resuming from the newest checkpoint if there is one; returns the steps done.

    Every random choice follows from `settings.seed`. Fewer than `settings.steps` steps are returned when
    `hooks.should_stop` is true on any rank; everything is saved then.
    """
    objective, world, hooks = objective or ObjectiveConfig(), world or World(), hooks or Hooks()
    types = precision(settings.dtype, world.device)
    model = shard(model, world, compute_dtype=types.compute)
    if settings.compile:
        model.compile_blocks()
    model.activation_checkpointing = settings.activation_checkpointing
    optimizer = make_optimizer(model, settings)
    average = {name: p.detach().clone() for name, p in trainable(model)} if settings.ema_decay else {}
    state = TrainState(model, optimizer, {"ema": average} if average else {})
    step = _resume(state, loader, checkpointer, hooks)
    hooks.on_resume(step)
    key, bias_rate = Key(settings.seed), objective.bias_rate_for(model.config)
    batches = _batches(loader, world)
    if evaluate is not None and evaluate_first and step == 0:
        hooks.on_evaluation(0, evaluate(model, 0))

    while step < settings.steps:
        micro = next(batches)
        report = _gradients(model, micro, key.fold("noise", step), objective, world, step, settings, types)
        rate = learning_rate(step, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("rate_scale", 1.0)
        optimizer.step()
        if model.chunking is not None and bias_rate > 0:
            assert report.chunk_counts is not None
            update_bias(model.chunking.balance_bias, report.chunk_counts, bias_rate)
        step += 1
        _update_average(average, model, min(settings.ema_decay, (1 + step) / (10 + step)))
        hooks.on_step(report)

        stop = any_true(hooks.should_stop(), world)
        last = stop or step == settings.steps
        figures: Mapping[str, float] = {}
        # also when stopping: a resumed run starts after this step and would never come back to it
        if evaluate is not None and (step % evaluate_every == 0 or step == settings.steps):
            with _averaged(model, average):  # what the run gives: of a run that averages, its averages
                figures = evaluate(model, step)
            hooks.on_evaluation(step, figures)
        if checkpointer is not None and (step % checkpoint_every == 0 or last):
            state.record = {"loader": loader.state_dict(), **hooks.record}
            checkpointer.save(step, state, figures, wait=last)
        if stop:
            break
    return step


def train_windows(
    model: Model,
    windows: Tensor,
    settings: TrainConfig,
    objective: ObjectiveConfig | None = None,
    on_step: Callable[[StepReport], None] = lambda report: None,
) -> None:
    """Train in place on windows (N, L) held in memory, in one process, without checkpoints."""
    batches = Loader(InMemory(windows), seed=settings.seed, global_batch=settings.batch_size)
    train(model, batches, settings, objective, hooks=Hooks(on_step=on_step))


def _gradients(
    model: Model, micro: list[Batch], key: Key, objective: ObjectiveConfig, world: World, step: int,
    settings: TrainConfig, types: Precision,
) -> StepReport:  # fmt: skip
    """Leave the clipped gradient of the global batch in the model; raises before the optimizer moves."""

    def total(x: Tensor) -> Tensor:
        return sum_over_ranks(x, world)

    micro = [with_prompts(model, batch, key, objective) for batch in micro]
    tokens = total(torch.stack([counted(model, batch) for batch in micro]).sum())
    global_batch = GlobalBatch(tokens, settings.batch_size, len(micro), total)
    model.zero_grad(set_to_none=True)
    parts: list[Loss] = []
    for number, batch in enumerate(micro):
        sync_gradients(model, number == len(micro) - 1)
        with types.autocast(world.device) if world.size == 1 else nullcontext():
            part = run_gathered(model, objectives.objective, model, batch, key, objective, global_batch)
        part.total.backward()
        parts.append(part)
    norm = clip_gradients(model, settings.clip)

    names = ("total", "nll", "chunk_loss", "moe_loss", "draft_loss")
    sums = {n: total(torch.stack([getattr(p, n).detach() for p in parts]).sum()).item()
            for n in names if getattr(parts[0], n) is not None}  # fmt: skip
    for name, value in (*sums.items(), ("the gradient's norm", float(norm))):
        if not math.isfinite(value):
            raise NotFinite(step + 1, "the loss" if name == "total" else name, micro)
    counts = None
    if parts[0].counts is not None:
        counts = total(torch.stack([p.counts.sum(dim=0) for p in parts if p.counts is not None]).sum(dim=0))
    rate = learning_rate(step, settings)
    return StepReport(
        step, sums["total"], sums["nll"], float(norm), rate, int(tokens),
        sums.get("chunk_loss"), sums.get("moe_loss"), counts, sums.get("draft_loss"),
    )  # fmt: skip


def _resume(state: TrainState, loader: Loader, checkpointer: Checkpointer | None, hooks: Hooks) -> int:
    resumed = checkpointer.resume(state, hooks.accept) if checkpointer is not None else None
    if resumed is None:
        return 0
    for checkpoint, reason in resumed.skipped:
        hooks.on_skipped(checkpoint, reason)
    loader.load_state_dict(resumed.record["loader"])
    return resumed.step


def _batches(loader: Loader, world: World) -> Iterator[list[Batch]]:
    """The micro-batches of each step, on this rank's device."""
    steps = iter(loader)
    while True:
        group = list(itertools.islice(steps, loader.micro_steps))
        yield [_on_device(batch, world.device) for batch in group]


def _on_device(batch: dict[str, Any], device: torch.device) -> Batch:
    moved: dict[str, Any] = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in batch.items()}
    return Batch(**moved)


@contextmanager
def _averaged(model: Model, average: dict[str, Tensor]) -> Iterator[None]:
    """The model with its averaged weights, where there are any."""
    trained = {name: parameter.detach().clone() for name, parameter in trainable(model)} if average else {}
    with torch.no_grad():
        for name, parameter in trainable(model) if average else ():
            parameter.copy_(average[name])
        try:
            yield
        finally:
            for name, parameter in trainable(model) if average else ():
                parameter.copy_(trained[name])


@torch.no_grad()
def _update_average(average: dict[str, Tensor], model: Model, decay: float) -> None:
    for name, parameter in trainable(model) if average else ():
        average[name].lerp_(parameter, 1 - decay)


def learning_rate(step: int, settings: TrainConfig) -> float:
    """Linear warm-up, then the schedule."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        decay = max(1, round(settings.decay_share * settings.steps))
        return settings.learning_rate * min(1.0, (settings.steps - step) / decay)
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
