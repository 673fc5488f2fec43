"""Every row of the paper's model table, its ablations and the debug sizes, each a named function's result."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from dcdm.config import ConfigError, ModelConfig, MoEConfig, ObjectiveConfig

GPT2_VOCAB = 50_260  # GPT-2's 50,257 tokens and BOS, PAD, MASK
BYTES_VOCAB = 260  # 256 bytes, EOS and BOS, PAD, MASK
DRAFTS = 3  # draft tokens of a lane that a head learns to predict


def _at_0_1b(**changes: object) -> ModelConfig:
    return replace(ModelConfig("mdlm", GPT2_VOCAB, 768, 12, 12, 12, 128, 3072), **changes)  # type: ignore[arg-type]


def _at_0_5b(**changes: object) -> ModelConfig:
    return replace(ModelConfig("mdlm", GPT2_VOCAB, 1024, 28, 16, 8, 128, 3072), **changes)  # type: ignore[arg-type]


def _at_1_7b(**changes: object) -> ModelConfig:
    return replace(ModelConfig("mdlm", GPT2_VOCAB, 2048, 28, 16, 8, 128, 6144), **changes)  # type: ignore[arg-type]


def _debug(**changes: object) -> ModelConfig:
    """With RoPE for short windows: no worse for AR, and for MDLM a little better on average (docs/LOG.md)."""
    base = ModelConfig("mdlm", BYTES_VOCAB, 128, 4, 4, 2, 32, 384, context_length=128, rope_theta=10_000.0)
    return replace(base, **changes)  # type: ignore[arg-type]


def _small(**changes: object) -> ModelConfig:
    """Three million parameters and a small BPE: between the debug size and the paper's."""
    base = ModelConfig("mdlm", 2_048, 192, 6, 6, 2, 32, 576, context_length=256)
    return replace(base, **changes)  # type: ignore[arg-type]


def _moe(hidden_size: int, num_chunks: int, chunk_dim: int) -> ModelConfig:
    experts = MoEConfig(num_experts=8, experts_per_token=2, expert_size=hidden_size, shared_size=hidden_size)
    return ModelConfig(
        "dcdm", GPT2_VOCAB, hidden_size, 28, 16, 8, 128,
        num_chunks=num_chunks, chunk_dim=chunk_dim, moe=experts,
    )  # fmt: skip


def _chunked(base: Callable[..., ModelConfig], num_chunks: int, chunk_dim: int, **more: object) -> ModelConfig:
    return base(kind="dcdm", num_chunks=num_chunks, chunk_dim=chunk_dim, **more)


_DEBUG_MOE = MoEConfig(num_experts=4, experts_per_token=2, expert_size=128, shared_size=128)

_TABLE: dict[str, Callable[[], ModelConfig]] = {
    "ar-0.1b": partial(_at_0_1b, kind="ar"),
    "mdlm-0.1b": _at_0_1b,
    "bdlm-0.1b": partial(_at_0_1b, kind="bdlm", block_size=8),
    "dcdm-0.1b-k8": partial(_chunked, _at_0_1b, 8, 64),
    "dcdm-0.1b-k8-point": partial(_chunked, _at_0_1b, 8, 1),
    "dcdm-0.1b-k8-h48": partial(_chunked, _at_0_1b, 8, 48),
    "mdlm-0.5b": _at_0_5b,
    "bdlm-0.5b": partial(_at_0_5b, kind="bdlm", block_size=8),
    "dcdm-0.5b-k8": partial(_chunked, _at_0_5b, 8, 256),
    "dcdm-0.5b-k16": partial(_chunked, _at_0_5b, 16, 128),
    "dcdm-0.5b-k32": partial(_chunked, _at_0_5b, 32, 128),
    "dcdm-0.5b-k64": partial(_chunked, _at_0_5b, 64, 96),
    "dcdm-0.5b-k8-h128": partial(_chunked, _at_0_5b, 8, 128),
    "dcdm-0.5b-k64-h128": partial(_chunked, _at_0_5b, 64, 128),
    "mdlm-1.7b": _at_1_7b,
    "bdlm-1.7b": partial(_at_1_7b, kind="bdlm", block_size=8),
    "dcdm-1.7b-k8": partial(_chunked, _at_1_7b, 8, 128),
    "dcdm-1.7b-k16": partial(_chunked, _at_1_7b, 16, 128),
    "dcdm-moe-0.8b": partial(_moe, 896, 8, 128),
    "dcdm-moe-2.8b": partial(_moe, 1792, 12, 192),
    "lanes-0.1b": partial(_at_0_1b, kind="lanes"),
    "lanes-0.5b": partial(_at_0_5b, kind="lanes"),
    "lanes-1.7b": partial(_at_1_7b, kind="lanes"),
    "ar-small": partial(_small, kind="ar"),
    "lanes-small": partial(_small, kind="lanes", lanes=(1, 2, 4, 8)),
    "mdlm-small": _small,
    "bdlm-small": partial(_small, kind="bdlm", block_size=8),
    "dcdm-small": partial(_chunked, _small, 8, 24),
    "ar-debug": partial(_debug, kind="ar"),
    "mdlm-debug": _debug,
    "bdlm-debug": partial(_debug, kind="bdlm", block_size=8),
    "lanes-debug": partial(_debug, kind="lanes"),
    "dcdm-debug": partial(_chunked, _debug, 8, 16),
    "dcdm-moe-debug": partial(_chunked, _debug, 8, 16, intermediate_size=None, moe=_DEBUG_MOE),
}


def _causal_of(parent: Callable[[], ModelConfig]) -> ModelConfig:
    return replace(parent(), routing="causal")


def _with_drafts(parent: Callable[[], ModelConfig]) -> ModelConfig:
    return replace(parent(), drafts=DRAFTS)


_TABLE |= {f"{name}-drafts": partial(_with_drafts, make) for name, make in _TABLE.items() if "lanes" in name}
_TABLE |= {f"{name}-causal": partial(_causal_of, make) for name, make in _TABLE.items() if name.startswith("dcdm")}


def presets() -> list[str]:
    """The names that `preset` knows."""
    return list(_TABLE)


def preset(name: str) -> ModelConfig:
    """The configuration of that name; a name that is not known raises with the nearest ones."""
    if name not in _TABLE:
        near = difflib.get_close_matches(name, _TABLE, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else "`dcdm presets` lists them"
        raise ConfigError(f"unknown preset {name!r}; {hint}")
    return _TABLE[name]()


def objective_of(name: str) -> ObjectiveConfig:
    """What a preset's model is trained with, unless somebody says otherwise."""
    config = preset(name)
    return ObjectiveConfig(**noise(name, config.kind, config.predict))


def noise(name: str, kind: str, predict: str) -> dict[str, Any]:
    """The levels of noise of a preset, for a model of it that may have been changed.

    The paper's are uniform up to 1. Debug and small models of every masked kind leave out the lowest ones, which
    say little to models that learn for minutes or an hour, and keep t = 1, from which texts are written.
    """
    if not ("debug" in name or "small" in name) or kind in ("ar", "lanes") or predict == "left":
        return {}
    return {"t_min": 0.3, "t_max": 1.0}
