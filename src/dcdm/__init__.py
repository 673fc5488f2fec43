"""Dynamic Chunking Diffusion Models.

Settings and presets load at once; whatever needs PyTorch loads on first use, so that `import dcdm` is fast.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from dcdm.config import ConfigError, ModelConfig, MoEConfig, ObjectiveConfig
from dcdm.presets import preset, presets

if TYPE_CHECKING:
    from dcdm.decoding.engine import generate
    from dcdm.diffusion.objectives import Batch, loss
    from dcdm.io.load import load_model as load
    from dcdm.likelihood.estimators import score
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
    "generate",
    "load",
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
    "generate": "dcdm.decoding.engine",
    "load": "dcdm.io.load",
    "loss": "dcdm.diffusion.objectives",
    "score": "dcdm.likelihood.estimators",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dcdm' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    if name == "masks":
        return home
    return getattr(home, "load_model" if name == "load" else name)


_FOLLOWERS = {
    "transformers.models.auto.modeling_auto": "dcdm.hub",
    "lm_eval.models": "dcdm.evaluation.registering",
}  # another package's module: ours that makes it know our models


class _After(importlib.abc.MetaPathFinder):
    """Imports our module as soon as the other one is there, and costs nothing to those who never import it."""

    def __init__(self, awaited: str, follower: str) -> None:
        self.awaited, self.follower = awaited, follower

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == self.awaited and self in sys.meta_path:
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.loader is not None:
                load = spec.loader.exec_module

                def load_and_register(module: Any) -> None:
                    load(module)
                    importlib.import_module(self.follower)

                spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
            return spec
        return None


for _awaited, _follower in _FOLLOWERS.items():
    if _awaited in sys.modules:
        importlib.import_module(_follower)
    else:
        sys.meta_path.insert(0, _After(_awaited, _follower))


def __dir__() -> list[str]:
    return sorted(__all__)
