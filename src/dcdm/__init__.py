"""Dynamic Chunking Diffusion Models.

Settings and presets load at once; whatever needs PyTorch loads on first use, so that `import dcdm` is fast. Other
libraries learn of our models by an import of their own: `dcdm.hub` for transformers' Auto classes,
`dcdm.evaluation.harness` for the lm-evaluation-harness.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dcdm.config import VERSION, ConfigError, ModelConfig, MoEConfig, ObjectiveConfig
from dcdm.presets import preset, presets

if TYPE_CHECKING:
    from dcdm.commands.train import train_in_python as train
    from dcdm.decoding.engine import generate
    from dcdm.diffusion.objectives import Batch, loss
    from dcdm.io.load import load_model as load
    from dcdm.kinds import build
    from dcdm.likelihood.estimators import score
    from dcdm.model import masks
    from dcdm.model.chunking import ChunkingAttention

__version__ = VERSION

__all__ = [
    "Batch",
    "ChunkingAttention",
    "ConfigError",
    "MoEConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "build",
    "generate",
    "load",
    "loss",
    "masks",
    "preset",
    "presets",
    "score",
    "train",
]  # fmt: skip

_HOMES = {
    "build": "dcdm.kinds",
    "masks": "dcdm.model.masks",
    "Batch": "dcdm.diffusion.objectives",
    "ChunkingAttention": "dcdm.model.chunking",
    "generate": "dcdm.decoding.engine",
    "load": "dcdm.io.load",
    "loss": "dcdm.diffusion.objectives",
    "score": "dcdm.likelihood.estimators",
    "train": "dcdm.commands.train",
}
_OTHER_NAMES = {"load": "load_model", "train": "train_in_python"}
"""What some of these are called where they live."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dcdm' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    if name == "masks":
        return home
    return getattr(home, _OTHER_NAMES.get(name, name))


def __dir__() -> list[str]:
    return sorted(__all__)
