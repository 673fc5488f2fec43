"""How evenly a DCDM fills its chunks.

B windows   L positions   K chunks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcdm.evaluation.windows import WindowBatch
from dcdm.keys import Key
from dcdm.model.chunking import chunk_counts, max_violation
from dcdm.model.transformer import Model


@dataclass(frozen=True)
class Balance:
    sizes: list[int]
    """Tokens in each chunk."""
    violation: float
    """MaxVio of these sizes."""
    window_violation: float
    """MaxVio of a window, on average."""
    windows: int


@torch.no_grad()
def balance_of(model: Model, batches: Sequence[WindowBatch]) -> Balance:
    """How evenly a DCDM fills its chunks; with the paper's routing, at half of the tokens masked."""
    device, parts = model.embed_tokens.weight.device, []
    assert model.config.num_chunks is not None
    for batch in batches:
        tokens, prompt = batch.tokens.to(device), batch.prompt.to(device)
        ids = chunk_ids(model, tokens, prompt, batch.index)
        assert ids is not None
        parts.append(chunk_counts(ids, model.sets(tokens, prompt).free, model.config.num_chunks).cpu())
    counts = torch.cat(parts)
    total = counts.sum(dim=0)
    mean = float(max_violation(counts).double().mean())
    return Balance(total.tolist(), float(max_violation(total)), mean, len(counts))


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
