"""The weights of a server: safetensors and nothing else."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from dcdm.config import ConfigError
from dcdm.data.tokenizers import Tokenizer
from dcdm.io.export import SUMS, export, wrong_sums
from dcdm.io.load import find_model, load_model
from dcdm.model.transformer import Model


def load(
    path: Path, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Model, Tokenizer]:
    """The model in an exported folder, whose checksums are compared; of a run folder, the model that it exports."""
    if find_model(path).run is None:
        if (path / SUMS).exists() and (wrong := wrong_sums(path)):
            raise ConfigError(f"{path} is not as it was exported: {'; '.join(wrong)}; export it again")
        return load_model(path, device=device, dtype=dtype)
    with tempfile.TemporaryDirectory(prefix="dcdm-serve-") as folder:
        export(path, Path(folder) / "exported")
        print(f"dcdm: {path} is a run; serving what `dcdm export` makes of it", file=sys.stderr)
        return load_model(Path(folder) / "exported", device=device, dtype=dtype)
