"""Small pictures of chunks, as arrays of bytes (H, W, 3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcdm.keys import Key
from dcdm.model.transformer import Model

# Okabe and Ito's colours, told apart with any common colour vision; grey is chunk 0, white is padding
PALETTE = (
    "#ffffff",
    "#bbbbbb",
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#000000",
)


@torch.no_grad()
def chunk_ids(model: Model, tokens: Tensor) -> Tensor | None:
    """Chunk ids (B, L) of clean tokens; the paper's routing shows a fixed half-masked draw. None for AR."""
    if model.config.kind == "ar":
        return None
    if not model.config.routes_from_noise:
        return model.partition(tokens).ids
    masked = (Key(0).uniform(*tokens.shape) < 0.5).to(tokens.device) & model.sets(tokens).free
    return model.encode(tokens, masked).chunk_ids


def chunk_picture(model: Model, tokens: Tensor, cell: int = 6) -> Any:
    """One row of cells per sequence, coloured by chunk; more than eight chunks share colours in turn."""
    ids = chunk_ids(model, tokens)
    shown = torch.zeros_like(tokens) if ids is None else ids
    colours = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in PALETTE], dtype=np.uint8)
    place = torch.where(shown > 0, (shown - 1) % 8 + 2, shown + 1).cpu().numpy()
    rows = colours[place].repeat(cell, axis=1).repeat(2 * cell, axis=0)
    rows[:: 2 * cell] = 255  # a white line between sequences
    return rows
