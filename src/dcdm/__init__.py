"""Dynamic Chunking Diffusion Models.

Settings and presets load at once; whatever needs PyTorch loads on first use, so that `import dcdm` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dcdm.config import ConfigError, ModelConfig, MoEConfig, ObjectiveConfig
from dcdm.presets import preset, presets

if TYPE_CHECKING:
    from dcdm.diffusion.likelihood import score
    from dcdm.diffusion.objectives import Batch, loss
    from dcdm.model import masks
    from dcdm.model.transformer import build

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "ConfigError",
    "MoEConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "build",
    "loss",
    "masks",
    "preset",
    "presets",
    "score",
]  # fmt: skip

_HOMES = {
    "build": "dcdm.model.transformer",
    "masks": "dcdm.model.masks",
    "Batch": "dcdm.diffusion.objectives",
    "loss": "dcdm.diffusion.objectives",
    "score": "dcdm.diffusion.likelihood",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dcdm' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    return home if name == "masks" else getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
