"""Small pictures of chunks, as arrays of bytes (H, W, 3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcdm.keys import Key
from dcdm.model.transformer import Model
from dcdm.viewing import palette


@torch.no_grad()
def chunk_ids(
    model: Model, tokens: Tensor, prompt: Tensor | None = None, index: Tensor | None = None
) -> Tensor | None:
    """Chunk ids (B, L) of clean tokens; the paper's routing shows a fixed half-masked draw. None for AR."""
    if model.config.kind == "ar":
        return None
    if not model.config.routes_from_noise:
        return model.partition(tokens, prompt, index).ids
    masked = (Key(0).uniform(*tokens.shape) < 0.5).to(tokens.device) & model.sets(tokens, prompt).free
    return model.encode(tokens, masked, prompt=prompt).chunk_ids


def chunk_picture(model: Model, tokens: Tensor, cell: int = 6) -> Any:
    """One row of cells per sequence, coloured by chunk; more than eight chunks share colours in turn."""
    ids = chunk_ids(model, tokens)
    shown = torch.zeros_like(tokens) if ids is None else ids
    names = [palette.colour(chunk) for chunk in range(-1, int(shown.max()) + 1)]
    colours = np.array([[int(name[i : i + 2], 16) for i in (1, 3, 5)] for name in names], dtype=np.uint8)
    rows = colours[(shown + 1).cpu().numpy()].repeat(cell, axis=1).repeat(2 * cell, axis=0)
    rows[:: 2 * cell] = 255  # a white line between sequences
    return rows
