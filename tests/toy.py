"""A small training run over the real model, for tests that stop it, kill it and start it again."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tiny
from dcdm import distributed
from dcdm.diffusion.objectives import Batch, loss
from dcdm.distributed import World
from dcdm.keys import Key
from dcdm.model.chunking import update_bias
from dcdm.training import fsdp
from dcdm.training.checkpoint import Checkpointer, Resumed, TrainState
from dcdm.training.loop import TrainConfig, adamw

ROWS, LENGTH = 6, 12
Weights = dict[str, np.ndarray]


def new_state(kind: str, world: World, dtype: torch.dtype = torch.float32, seed: int = 0) -> TrainState:
    """Model, optimizer, averaged weights and what a run remembers, all fresh; global generators too."""
    for seeder in (random.seed, np.random.seed, torch.manual_seed):
        seeder(seed + world.rank)
    model = fsdp.shard(tiny.model(kind, seed=seed).to(dtype), world)
    average = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = adamw(model, TrainConfig(learning_rate=1e-2))
    return TrainState(model, optimizer, {"ema": average}, {"losses": []}, {"rank": world.rank, "draws": []})


def step_once(state: TrainState, step: int, world: World, *, use_generators: bool) -> None:
    """One optimizer step. Without the global generators it is the same for any number of ranks: row by row."""
    model: Any = state.model
    tokens = tiny.tokens(ROWS, LENGTH, seed=step, padding=(3, 1))
    rows = torch.arange(ROWS).tensor_split(world.size)[world.rank]
    scale = 1.0
    if use_generators:  # what data loading or dropout might draw
        drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
        state.rank_record["draws"].append(drawn)
        scale += 0.1 * sum(distributed.gather_objects(sum(drawn), world))
    state.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
    state.optimizer.zero_grad()
    total, counts = torch.zeros(()), torch.zeros((), dtype=torch.long)
    for part in [rows] if use_generators else rows.split(1):
        batch = Batch(tokens[part], rows=part, num_rows=ROWS)
        result = fsdp.run(model, loss, model, batch, Key(0).fold(step))
        share = result.total * scale * len(part) / ROWS
        share.backward()
        total = total + share.detach()
        counts = counts if result.counts is None else counts + result.counts.sum(0)
    fsdp.clip_gradients(model, 1.0)
    state.optimizer.step()
    if model.chunking is not None:
        update_bias(model.chunking.balance_bias, distributed.sum_over_ranks(counts, world), 0.1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            state.tensors["ema"][name].lerp_(value, 0.1)
    state.record["losses"].append(distributed.sum_over_ranks(total, world).item())


def everything(state: TrainState) -> Weights:
    """All that a run ends with, as arrays."""
    found = {name: fsdp.full(value) for name, value in state.model.state_dict().items()}
    found |= {f"ema.{name}": fsdp.full(value) for name, value in state.tensors["ema"].items()}
    slots = state.optimizer.state
    for number, parameter in enumerate(state.model.parameters()):
        found |= {f"slot.{number}.{name}": fsdp.full(value) for name, value in slots[parameter].items()}
    arrays = {name: value.detach().numpy().copy() for name, value in found.items()}
    return {**arrays, "losses": np.array(state.record["losses"])}


def train(
    folder: Path,
    world: World,
    steps: int,
    *,
    kind: str = "paper",
    every: int = 2,
    dtype: torch.dtype = torch.float32,
    use_generators: bool = True,
    on_phase: Callable[[str], None] = lambda phase: None,
    on_step: Callable[[int], None] = lambda step: None,
    keep_last: int = 2,
) -> tuple[Weights, Resumed | None]:
    """Resume if there is something to resume from, go to `steps`, saving on the way and at the end."""
    state = new_state(kind, world, dtype)
    with Checkpointer(folder, world, keep_last=keep_last, keep_best=1, on_phase=on_phase) as checkpointer:
        resumed = checkpointer.resume(state)
        if resumed is not None:
            state.record = resumed.record
            state.rank_record = resumed.rank_record or state.rank_record
        for step in range(0 if resumed is None else resumed.step, steps):
            on_step(step)
            step_once(state, step, world, use_generators=use_generators)
            if (step + 1) % every == 0 or step + 1 == steps:
                checkpointer.save(step + 1, state, {"loss": state.record["losses"][-1]})
    return everything(state), resumed


def differences(found: Weights, expected: Weights, tolerance: float = 0.0) -> list[str]:
    assert found.keys() == expected.keys()
    return [
        name for name in found
        if not (np.array_equal(found[name], expected[name]) if tolerance == 0
                else np.allclose(found[name], expected[name], rtol=tolerance, atol=tolerance))
    ]  # fmt: skip
