"""A small training run by the real loop, for tests that stop it, kill it and start it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tiny
from dcdm.config import ObjectiveConfig
from dcdm.data.loader import Loader
from dcdm.distributed import World
from dcdm.model.transformer import Model
from dcdm.training import fsdp
from dcdm.training.checkpoint import Checkpointer, Resumed, TrainState
from dcdm.training.optimizers import full, make_optimizer
from dcdm.training.trainer import StepReport, TrainConfig, Trainer

ROWS, LENGTH = 6, 12
DTYPES = {torch.float32: "fp32", torch.float64: "fp64"}
Weights = dict[str, np.ndarray]


def settings(steps: int = 1, dtype: torch.dtype = torch.float32, optimizer: str = "adamw") -> TrainConfig:
    """A rate that does not depend on the number of steps, so that shorter runs are beginnings of longer ones."""
    return TrainConfig(
        steps=steps, batch_size=ROWS, learning_rate=1e-2, schedule="constant", decay_share=0.0, warmup_steps=0,
        ema_decay=0.9, dtype=DTYPES[dtype], optimizer=optimizer,
    )  # fmt: skip


def new_state(kind: str, world: World, dtype: torch.dtype = torch.float32) -> TrainState:
    """Model, optimizer and averaged weights as the loop makes them."""
    model = fsdp.shard(tiny.model(kind, seed=0).to(dtype), world)
    average = {name: value.detach().clone() for name, value in model.named_parameters()}
    return TrainState(model, make_optimizer(model, settings()), {"ema": average}, {"losses": []})


class InMemory:
    """Windows (N, L) as a data set for `Loader`."""

    def __init__(self, windows: Tensor, identity: str = "in memory") -> None:
        self.windows, self.identity = windows, identity

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.windows[index]
        return {"tokens": tokens, "prompt": torch.zeros_like(tokens, dtype=torch.bool), "index": index}


class Watched(Checkpointer):
    """Remembers what the loop saved last, and where it resumed."""

    state: TrainState
    resumed: Resumed | None = None

    def save(
        self, step: int, state: TrainState, metrics: Mapping[str, float] | None = None, **options: Any
    ) -> None:
        self.state = state
        super().save(step, state, metrics, **options)

    def resume(self, state: TrainState, *more: Any) -> Resumed | None:
        self.resumed = super().resume(state, *more)
        return self.resumed


def everything(state: TrainState) -> Weights:
    """All that a run ends with, as arrays."""
    found = {name: full(value) for name, value in state.model.state_dict().items()}
    found |= {f"ema.{name}": full(value) for name, value in state.tensors["ema"].items()}
    assert state.optimizer is not None
    slots = state.optimizer.state
    for number, parameter in enumerate(state.model.parameters()):
        found |= {f"slot.{number}.{name}": full(value) for name, value in slots[parameter].items()}
    return {name: value.detach().numpy().copy() for name, value in found.items()}


def train(
    folder: Path,
    world: World,
    steps: int,
    *,
    kind: str = "paper",
    every: int = 2,
    dtype: torch.dtype = torch.float32,
    optimizer: str = "adamw",
    on_step: Callable[[int], None] = lambda step: None,
    keep_last: int = 2,
) -> tuple[Weights, Resumed | None]:
    """Resume if there is something to resume from, go to `steps`, saving on the way and at the end."""
    model = tiny.model(kind, seed=0).to(dtype)
    windows = InMemory(tiny.tokens(4 * ROWS, LENGTH, seed=0))
    batches = Loader(windows, seed=0, global_batch=ROWS, rank=world.rank, world=world.size)
    with Watched(folder, world, keep_last=keep_last, keep_best=1) as checkpointer:
        trainer = Trainer(model, batches, settings(steps, dtype, optimizer), world=world)
        trainer.resume(checkpointer)
        while trainer.step < steps:
            report = trainer.take_step()
            on_step(report.step)
            if trainer.step % every == 0 or trainer.step == steps:
                trainer.save(checkpointer, {}, {"loss": report.loss}, wait=trainer.step == steps)
    return everything(checkpointer.state), checkpointer.resumed


def differences(found: Weights, expected: Weights, tolerance: float = 0.0) -> list[str]:
    assert found.keys() == expected.keys()
    return [
        name for name in found
        if not (np.array_equal(found[name], expected[name]) if tolerance == 0
                else np.allclose(found[name], expected[name], rtol=tolerance, atol=tolerance))
    ]  # fmt: skip


def train_windows(
    model: Model, windows: Tensor, settings: TrainConfig, noise: ObjectiveConfig | None = None
) -> list[StepReport]:
    """Train in place on windows (N, L) held in memory, in one process, without checkpoints."""
    loader = Loader(InMemory(windows), seed=settings.seed, global_batch=settings.batch_size)
    trainer = Trainer(model, loader, settings, noise)
    return [trainer.take_step() for _ in range(settings.steps)]
