"""What a model that predicts from the left is trained on: every free token once, given the earlier chunks.

The loss is the exact negative log-likelihood of the decoder that fills a chunk with each forward pass. A draft head
learns beside it, of which the rest of the network learns nothing.

    B batch   L positions
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dcdm.config import LANE_LENGTH, ModelConfig, ObjectiveConfig
from dcdm.diffusion.objectives import Batch, GlobalBatch, Loss, complete_loss, loss_of_part
from dcdm.keys import Key
from dcdm.lanes.model import SHARE, LaneModel, draft_states
from dcdm.model.products import weighted_nll
from dcdm.model.transformer import Encoded

DRAFT_WEIGHT = 0.1
"""Of the draft head's loss: its steps hardly depend on it, the norm at which all gradients are clipped does."""


@loss_of_part.register
def lane_loss(
    model: LaneModel, batch: Batch, key: Key, settings: ObjectiveConfig, global_batch: GlobalBatch
) -> Loss:
    """−log p of every free token, and the draft head's loss where there is one."""
    free = model.position_masks(batch.tokens, batch.prompt).free
    lanes = draw_lanes(model.config, key, batch.numbers()[0], free.sum(dim=-1).cpu())
    ids = model.partition(batch.tokens, batch.prompt, batch.index, lanes).ids
    encoded = model.encode(batch.tokens, prompt=batch.prompt, chunk_ids=ids)
    targets = batch.tokens[free]
    summed = weighted_nll(encoded.states[free], model.head_weight(), targets, torch.ones_like(targets))
    made = complete_loss(model, batch, key, settings, encoded, summed, free.sum(), global_batch)
    if model.drafting is None:
        return made
    draft_loss = _draft_loss(model, batch, encoded) / global_batch.tokens.clamp(min=1)
    return replace(made, total=made.total + DRAFT_WEIGHT * draft_loss, draft_loss=draft_loss)


def draw_lanes(config: ModelConfig, key: Key, rows: Tensor, num_free: Tensor) -> Tensor | None:
    """How many lanes each row is trained with, (B,): from the list, none shorter than LANE_LENGTH if possible."""
    if config.lanes is None:
        return None
    choices = torch.tensor(sorted(config.lanes))
    fits = (num_free[:, None] >= LANE_LENGTH * choices).sum(dim=-1).clamp(min=1)
    drawn = key.fold("lanes").rows(rows, 1)[:, 0]
    if config.lane_weights is None:
        return choices[(drawn * fits).long()]
    by_lanes = dict(zip(config.lanes, config.lane_weights, strict=True))
    upto = torch.tensor([by_lanes[number] for number in choices.tolist()], dtype=torch.float64).cumsum(dim=0)
    reached = (drawn * upto[fits - 1])[:, None] >= upto  # of the weights of those that fit
    return choices[torch.minimum(reached.sum(dim=-1), fits - 1)]


def _draft_loss(model: LaneModel, batch: Batch, encoded: Encoded) -> Tensor:
    """Cross-entropy of the draft head's tokens, scaled to what all rows would add; it moves the head alone."""
    assert model.drafting is not None
    assert encoded.chunk_ids is not None
    rows, num_rows = batch.numbers()
    chosen = (rows % SHARE == 0).to(batch.tokens.device)
    scale = num_rows / -(-num_rows // SHARE) / model.config.drafts
    tokens, ids, states = batch.tokens[chosen], encoded.chunk_ids[chosen], encoded.states[chosen].detach()
    embedded = model.embed_tokens(tokens).detach()
    made, truths = draft_states(model.drafting, states, embedded, tokens, ids, model.config.drafts)
    return scale * weighted_nll(made, model.head_weight().detach(), truths, torch.ones_like(truths))
