"""Small models of every kind, and all sequences of a small vocabulary, for proofs by enumeration."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import dcdm
from dcdm.config import ModelConfig, MoEConfig
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.model.transformer import Model

SYMBOLS = 2
LETTERS = 20  # for tests that do not enumerate
MOE = MoEConfig(num_experts=3, experts_per_token=2, expert_size=12, shared_size=8)

_CHUNKED = {"kind": "dcdm", "num_chunks": 2, "chunk_dim": 4}
KINDS: dict[str, dict[str, object]] = {
    "ar": {"kind": "ar"},
    "mdlm": {"kind": "mdlm"},
    "bdlm": {"kind": "bdlm", "block_size": 2},
    "paper": _CHUNKED,
    "paper-moe": {**_CHUNKED, "moe": MOE, "intermediate_size": None},
    "causal": {**_CHUNKED, "routing": "causal"},
    "causal-contiguous": {**_CHUNKED, "routing": "causal", "prior": "contiguous", "prior_weight": float("inf")},
    "causal-strided": {**_CHUNKED, "routing": "causal", "prior": "strided", "prior_weight": 0.05},
    "causal-moe": {**_CHUNKED, "routing": "causal", "moe": MOE, "intermediate_size": None},
    "positional": {**_CHUNKED, "routing": "positional"},
    "strided": {**_CHUNKED, "routing": "strided"},
    "random": {**_CHUNKED, "routing": "random"},
}
_ORDINARY = {"prompts": "ordinary", "hidden_token": 1}
OTHERS: dict[str, dict[str, object]] = {
    "mdlm-ordinary": {"kind": "mdlm", **_ORDINARY},
    "mdlm-shifted": {"kind": "mdlm", **_ORDINARY, "shift": True},
    "bdlm-ordinary": {"kind": "bdlm", "block_size": 4, **_ORDINARY},
    "bdlm-shifted": {"kind": "bdlm", "block_size": 4, **_ORDINARY, "shift": True},
}
"""With the habits of others' diffusion models."""
DIFFUSION = [name for name in KINDS if name != "ar"]
VALID = [name for name in DIFFUSION if not name.startswith("paper")]
PAPER = [name for name in DIFFUSION if name.startswith("paper")]


def config(name: str, symbols: int = LETTERS, **changes: object) -> ModelConfig:
    base = ModelConfig("mdlm", symbols + 3, 16, 3, 2, 1, 8, 24, context_length=64)
    return replace(base, **{**(KINDS | OTHERS)[name], **changes})  # type: ignore[arg-type]


def model(name: str, symbols: int = LETTERS, seed: int = 0, scale: float = 12.0, **changes: object) -> Model:
    """A float64 model with weights large enough that its predictions and chunks are far from uniform."""
    settings = config(name, symbols, **{"chunk_out_init_std": 0.02, **changes})
    made = dcdm.build(settings, seed=seed, dtype=torch.float64)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter *= scale
    return made.eval()


def exported(name: str, folder: Path, **changes: object) -> Path:
    """A folder that `dcdm.load` takes for an exported model over bytes."""
    exported = model(name, symbols=257, **changes).float()  # type: ignore[arg-type]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dcdm": exported.config.to_dict()}))
    save_file({f"model.{key}": value for key, value in exported.state_dict().items()}, folder / "model.safetensors")
    byte_tokenizer().save(folder)
    return folder


def tokens(rows: int, length: int, symbols: int = LETTERS, seed: int = 0, padding: tuple[int, ...] = ()) -> Tensor:
    """Random rows that start with BOS; `padding` gives the number of PADs at the end of each first row."""
    drawn = torch.randint(symbols, (rows, length), generator=torch.Generator().manual_seed(seed))
    drawn[:, 0] = symbols
    for row, count in enumerate(padding):
        drawn[row, length - count :] = symbols + 1
    return drawn


def noise(made: Model, clean: Tensor, share: float = 0.5, seed: int = 1, prompt: Tensor | None = None) -> Tensor:
    drawn = torch.rand(clean.shape, generator=torch.Generator().manual_seed(seed)) < share
    return drawn & made.position_masks(clean, prompt).free


def every_sequence(length: int, symbols: int = SYMBOLS) -> Tensor:
    """BOS and all `symbols`**length continuations."""
    rows = torch.tensor(list(itertools.product(range(symbols), repeat=length)))
    return torch.cat([torch.full((len(rows), 1), symbols), rows], dim=1)
