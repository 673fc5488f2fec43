"""`dcdm.load`: a model and its tokenizer from a run folder, a checkpoint in it, or an exported folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcdm.config import ConfigError, ModelConfig
from dcdm.data.tokenizers import Tokenizer
from dcdm.files import file_digest
from dcdm.io.importing import load_qwen3
from dcdm.model.transformer import Model, build
from dcdm.training import settings as run_settings
from dcdm.training.checkpoint import load_weights, newest_whole
from dcdm.training.checkpoint_folder import MANIFEST, read_manifest

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class ModelSource:
    """What stands in a folder, before any weight is read."""

    config: ModelConfig
    tokenizer: Tokenizer
    weights: Callable[[], dict[str, Tensor]]
    place: Path
    """The checkpoint, or the exported folder."""
    run: Path | None = None
    """The run folder that the checkpoint stands in."""

    def identity(self) -> dict[str, Any]:
        """Which weights these are: where they stand, their step, and a SHA-256 that covers all of them."""
        if self.run is None:
            return {"weights": str(self.place), "step": None, "sha256": file_digest(self.place / WEIGHTS)}
        manifest = self.place / MANIFEST  # it holds the SHA-256 of every file
        return {
            "weights": str(self.place), "step": read_manifest(self.place).step, "sha256": file_digest(manifest)
        }  # fmt: skip

    def load(self, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Model:
        """The model with its weights, ready for evaluation."""
        model = build(self.config, device=device, dtype=dtype)
        model.load_state_dict(self.weights())
        return model.eval()


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    average: bool = True,
) -> tuple[Model, Tokenizer]:
    """The model, ready for evaluation, and its tokenizer.

    Of a run folder the newest whole checkpoint is taken; with `average`, its averaged weights where it has any.
    """
    found = find_model(path, average=average)
    return found.load(device, dtype), found.tokenizer


def find_model(path: str | Path, *, average: bool = True) -> ModelSource:
    """Configuration and tokenizer of what `load_model` would load."""
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give a run folder, a checkpoint in it, or an exported folder")
    if (path / "config.json").exists():
        return _exported(path)
    run = path if (path / "settings.yaml").exists() else path.parent.parent
    if not (run / "settings.yaml").exists():
        raise ConfigError(f"{path} is neither a run folder, nor a checkpoint in one, nor an exported folder")
    checkpoint = newest_whole(run / "checkpoints")[0] if path == run else path
    if checkpoint is None:
        raise ConfigError(f"{run} has no whole checkpoint yet; train further with dcdm train --run {run}")
    config = run_settings.read(run / "settings.yaml")

    def weights() -> dict[str, Tensor]:
        averaged = load_weights(checkpoint, "ema") if average and config.train.ema_decay else {}
        return load_weights(checkpoint) | averaged

    return ModelSource(config.model, Tokenizer.load(run / "tokenizer"), weights, checkpoint, run)


def _exported(folder: Path) -> ModelSource:
    text = (folder / "config.json").read_text(encoding="utf-8")
    settings = json.loads(text, object_hook=_special_float).get("dcdm")
    if settings is None:
        raise ConfigError(f"{folder}/config.json is not that of an exported model: it has no entry 'dcdm'")

    def weights() -> dict[str, Tensor]:
        from safetensors.torch import load_file

        stored = load_file(folder / WEIGHTS)
        return {name.removeprefix("model."): value for name, value in stored.items()}

    return ModelSource(ModelConfig.from_dict(settings), Tokenizer.load(folder), weights, folder)


def _special_float(found: dict) -> object:
    """`transformers` writes an infinite number, which JSON has no word for, as {"__float__": "Infinity"}."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def load_init(model: Model, source: str) -> None:
    """Copy start weights, the `init` of a run's settings, into a model.

    `source` is a run, a checkpoint, an exported folder, or a local Qwen3 folder of `transformers`.
    """
    path = Path(source)
    config = path / "config.json"
    if config.exists() and '"qwen3"' in config.read_text(encoding="utf-8"):
        load_qwen3(model, path)
        return
    start, _ = load_model(path)
    wrong = [n for n, p in start.state_dict().items()
             if n not in model.state_dict() or model.state_dict()[n].shape != p.shape]  # fmt: skip
    if wrong:
        raise ConfigError(f"init={source}: its weights do not fit this model ({', '.join(wrong[:3])}, …)")
    model.load_state_dict(start.state_dict(), strict=False)
