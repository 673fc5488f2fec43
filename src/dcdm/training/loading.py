"""`dcdm.load`: a model and its tokenizer from a run folder, a checkpoint in it, or an exported folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dcdm.config import ConfigError, ModelConfig
from dcdm.data.tokenizers import Tokenizer
from dcdm.model.transformer import Model, build
from dcdm.training import settings as run_settings
from dcdm.training.checkpoint import load_weights, newest_whole


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
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"{path} is no folder; give a run folder, a checkpoint in it, or an exported folder")
    if (path / "config.json").exists():
        return _exported(path, device, dtype)
    run = path if (path / "settings.yaml").exists() else path.parent.parent
    if not (run / "settings.yaml").exists():
        raise ConfigError(f"{path} is neither a run folder, nor a checkpoint in one, nor an exported folder")
    checkpoint = newest_whole(run / "checkpoints")[0] if path == run else path
    if checkpoint is None:
        raise ConfigError(f"{run} has no whole checkpoint yet; train further with dcdm train --run {run}")
    config = run_settings.read(run / "settings.yaml")
    weights = load_weights(checkpoint)
    if average and config.train.ema_decay:
        weights |= load_weights(checkpoint, "ema")
    model = build(config.model, device=device, dtype=dtype)
    model.load_state_dict(weights)
    return model.eval(), Tokenizer.load(run / "tokenizer")


def _exported(folder: Path, device: str | torch.device, dtype: torch.dtype) -> tuple[Model, Tokenizer]:
    from safetensors.torch import load_file

    settings = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dcdm")
    if settings is None:
        raise ConfigError(f"{folder}/config.json is not that of an exported model: it has no entry 'dcdm'")
    model = build(ModelConfig.from_dict(settings), device=device, dtype=dtype)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    return model.eval(), Tokenizer.load(folder)
