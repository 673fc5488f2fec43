"""The training loop, top to bottom: batch, loss, backward, step, balance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dcdm.config import ConfigError, ObjectiveConfig
from dcdm.data.ordering import sample_indices
from dcdm.diffusion.objectives import Batch, loss
from dcdm.keys import Key
from dcdm.model.chunking import max_violation, update_bias
from dcdm.model.transformer import Model


@dataclass(frozen=True)
class TrainConfig:
    """How long and how fast to train; the defaults are the paper's."""

    steps: int = 500_000
    batch_size: int = 128
    learning_rate: float = 3e-4
    warmup_steps: int = 2_500
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate={self.learning_rate} must be above 0")


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step measured."""

    step: int
    loss: float
    nll: float
    gradient_norm: float
    learning_rate: float
    chunk_counts: Tensor | None
    """N_k over the batch (K,), where the model has chunks."""

    @property
    def max_violation(self) -> float | None:
        return None if self.chunk_counts is None else float(max_violation(self.chunk_counts))


def train(
    model: Model,
    windows: Tensor,
    settings: TrainConfig,
    objective: ObjectiveConfig | None = None,
    on_step: Callable[[StepReport], None] = lambda report: None,
) -> None:
    """Train `model` in place on `windows` (N, L); every random choice follows from `settings.seed`."""
    objective = objective or ObjectiveConfig()
    optimizer = adamw(model, settings)
    key = Key(settings.seed)
    bias_rate = objective.bias_rate_for(model.config)
    for step in range(settings.steps):
        index = sample_indices(key, step, settings.batch_size, len(windows))
        result = loss(model, Batch(windows[index], index=index), key.fold("noise", step), objective)
        if not bool(torch.isfinite(result.total)):
            raise FloatingPointError(f"the loss of step {step} is {result.total.item()}; lower learning_rate")

        rate = learning_rate(step, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        result.total.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()

        counts = None if result.counts is None else result.counts.sum(dim=0)
        if model.chunking is not None and bias_rate > 0:
            assert counts is not None
            update_bias(model.chunking.balance_bias, counts, bias_rate)
        on_step(StepReport(step, result.total.item(), result.nll.item(), float(norm), rate, counts))


def learning_rate(step: int, settings: TrainConfig) -> float:
    """Linear warm-up, then a cosine to 0."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def adamw(model: Model, settings: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, not on norms and embeddings."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_plain = parameter.ndim < 2 or name.startswith("embed_tokens")
        (plain if is_plain else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, settings.learning_rate, settings.betas, settings.adam_eps)
