"""Making a network from its settings, and counting what one would hold."""

from __future__ import annotations

from functools import cache

import torch

from dcdm.config import ModelConfig
from dcdm.model.attention import choose_backend
from dcdm.model.transformer import Model


def build(
    config: ModelConfig,
    *,
    seed: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
) -> Model:
    """A freshly initialised model. Without `seed`, PyTorch's global generator gives the weights.

    `backend` forces an attention path: `reference`, `sdpa`, `sdpa-tiled` or `flex`.
    """
    choose_backend(backend, torch.device(device), training=False)
    with torch.device("meta"):
        model = Model(config).to(dtype)
    model.to_empty(device=device)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    model.init_weights(generator)
    model.backend = backend
    return model


@cache
def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """(total, active per token), counted on the meta device."""
    with torch.device("meta"):
        model = Model(config)
    total = sum(p.numel() for p in model.parameters())
    if config.moe is None:
        return total, total
    idle = config.moe.num_experts - config.moe.experts_per_token
    per_expert = 3 * config.hidden_size * config.moe.expert_size
    return total, total - config.num_layers * idle * per_expert
