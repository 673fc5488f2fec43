"""From settings to a network: which class a kind is built from, and what it would hold.

The paper's model and its baselines are `Model`; a model that predicts from the left is a `LaneModel`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dcdm.config import ConfigError, ModelConfig, ObjectiveConfig
from dcdm.lanes import decoding, likelihood, objective, reference  # noqa: F401  what the core asks for by a model's class
from dcdm.lanes.model import LaneModel
from dcdm.model.attention import choose_backend
from dcdm.model.transformer import Model
from dcdm.presets import objective_of, preset

OWN_PARTS = ("chunking.", "drafting.")
"""What names of parameters begin with that no other architecture has: AR weights bring none of them."""


def network(config: ModelConfig) -> Model:
    """The module of a kind, without weights of its own: use it under `torch.device("meta")`, or `build` it."""
    return LaneModel(config) if config.predicts_from_left else Model(config)


def build(
    config: ModelConfig | str,
    *,
    seed: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
) -> Model:
    """A freshly initialised model of settings or of a preset's name, such as "dcdm-debug".

    Without `seed`, PyTorch's global generator gives the weights.

    `backend` forces an attention path: `reference`, `sdpa`, `sdpa-tiled` or `flex`.
    """
    choose_backend(backend, torch.device(device), training=False)
    trained_with = objective_of(config) if isinstance(config, str) else ObjectiveConfig()
    config = preset(config) if isinstance(config, str) else config
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"build takes a ModelConfig or the name of a preset, not {type(config).__name__}")
    with torch.device("meta"):
        model = network(config).to(dtype)
    model.to_empty(device=device)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    model.init_weights(generator)
    model.backend, model.objective = backend, trained_with
    return model


def state_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's state dict; nothing is allocated for it."""
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in network(config).state_dict().items()}


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """(total, active per token). Every layer has as many as the next, so one and two are counted."""
    with torch.device("meta"):
        models = [network(replace(config, num_layers=layers)) for layers in (1, 2)]
    one, two = (sum(p.numel() for p in model.parameters()) for model in models)
    total = one + (config.num_layers - 1) * (two - one)
    if config.moe is None:
        return total, total
    idle = config.moe.num_experts - config.moe.experts_per_token
    per_expert = 3 * config.hidden_size * config.moe.expert_size
    return total, total - config.num_layers * idle * per_expert
