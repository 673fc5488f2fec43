"""What a model that predicts from the left is trained on: every free token once, given the earlier chunks.

The loss is the exact negative log-likelihood of the decoder that fills a chunk with each forward pass. A draft head
learns beside it, of which the rest of the network learns nothing. Where the rest is frozen, the head learns the
network's own distributions instead of the tokens; and lanes on frozen weights may learn those of one lane.

    B batch   L positions   M drafted places   D the tokens that can be drafted   d hidden size
"""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from dcdm.config import LANE_LENGTH, ModelConfig, ObjectiveConfig
from dcdm.diffusion.objectives import Batch, GlobalBatch, Loss, complete_loss, loss_of_part, picked
from dcdm.keys import Key
from dcdm.lanes.masks import led_positions
from dcdm.lanes.model import SHARE, LaneModel, draft_states
from dcdm.model import lora
from dcdm.model.masks import there
from dcdm.model.products import SLICE_BYTES, at_least_fp32, weighted_nll
from dcdm.model.transformer import Encoded

STATES_BYTES = 2 << 30  # of a frozen network, so that windows which come again are not read again
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
    if model.trains_drafts_alone:
        fixed = model.config.lanes == (1,) and not settings.prompt_share and not settings.blank_share
        prompt = None if batch.prompt is None else there(batch.prompt, model.device)
        there_too = replace(batch, tokens=there(batch.tokens, model.device), prompt=prompt)
        return drafts_alone_loss(model, there_too, there(ids, model.device), key, global_batch, remember=fixed)
    encoded = model.encode(batch.tokens, prompt=batch.prompt, chunk_ids=ids)
    aims = _frozen_in_one_lane(model, batch) if settings.soft_targets else batch.tokens
    states, targets = (picked(x, free, encoded.states.device) for x in (encoded.states, aims))
    summed = weighted_nll(states, model.head_weight(), targets, states.new_ones(len(states)))
    made = complete_loss(model, batch, key, settings, encoded, summed, free.sum(), global_batch)
    if model.drafting is None:
        return made
    draft_loss = _draft_loss(model, batch, encoded) / global_batch.tokens.clamp(min=1)
    return replace(made, total=made.total + DRAFT_WEIGHT * draft_loss, draft_loss=draft_loss)


@torch.no_grad()
def _frozen_in_one_lane(model: LaneModel, batch: Batch) -> Tensor:
    """The states (B, L, d) that predict each position in one lane, without adapters."""
    with lora.switched_off(model):
        return model.encode(batch.tokens, prompt=batch.prompt, lanes=1).states


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
    chosen = (rows % SHARE == 0).nonzero().squeeze(-1)
    scale = num_rows / -(-num_rows // SHARE) / model.config.drafts
    tokens, ids = batch.tokens[chosen], encoded.chunk_ids[chosen]
    states = encoded.states.detach().index_select(0, there(chosen, encoded.states.device))
    embedded = model.embed(tokens).detach()
    drafted = list(draft_states(model.drafting, states, embedded, ids, model.config.drafts))
    made = torch.cat([picked(states, written, states.device) for states, written in drafted])
    truths = torch.cat([tokens[:, number:][written] for number, (_, written) in enumerate(drafted, start=1)])
    weight = model.draft_weight().detach()
    known = there((truths < len(weight)).nonzero().squeeze(-1), made.device)
    made, truths = made[known], there(truths, made.device)[known]
    return scale * weighted_nll(made, weight, truths, torch.ones_like(truths))


# --- a head on a frozen network ----------------------------------------------------------------------------------

_remembered: WeakKeyDictionary[LaneModel, dict[int, tuple[Tensor, Tensor, Tensor]]] = WeakKeyDictionary()
"""By the number of a window in the data set."""


def drafts_alone_loss(
    model: LaneModel, batch: Batch, ids: Tensor, key: Key, global_batch: GlobalBatch, remember: bool = False
) -> Loss:
    """The head's distance to the network's own distributions, −Σ p(v) log q(v) over the tokens that it can draft.

    The n-th draft token matters only where those before it are accepted: whether they are is drawn, as decoding
    would, with probability min(1, q / p) of the true tokens. `remember` keeps the states of windows for the next
    epoch.
    """
    assert model.drafting is not None
    tokens, weight = batch.tokens, model.draft_weight()
    states, log_sum, nll = _frozen_states(model, batch, ids, remember)
    continues, summed = F.pad(led_positions(ids), (0, model.config.drafts)), log_sum.new_zeros(())
    row, at = (ids >= 1).nonzero(as_tuple=True)
    made = states[row, at]
    for number in range(1, model.config.drafts + 1):
        goes_on = continues[row, at + number]
        row, at, made = row[goes_on], at[goes_on], made[goes_on]
        made = model.drafting(made, model.embed_tokens(tokens[row, at + number - 1]))
        log_q = F.linear(made, weight).to(log_sum).log_softmax(dim=-1)
        with torch.no_grad():
            log_p = F.linear(states[row, at + number], weight).to(log_sum) - log_sum[row, at + number, None]
            truths = tokens[row, at + number]
            known = truths.clamp(max=len(weight) - 1)[:, None]
            accepted = (log_q - log_p).gather(-1, known).squeeze(-1).exp() * (truths < len(weight))
            drawn = there(key.fold("reach", number).rows(batch.numbers()[0], tokens.shape[1]), at.device)[row, at]
        summed = summed - (log_p.exp() * log_q).sum()
        row, at, made = (x[drawn < accepted] for x in (row, at, made))
    scale = global_batch.tokens.clamp(min=1)
    total = summed / scale
    return Loss(total, nll.sum() / scale, (ids >= 1).sum(), draft_loss=total.detach())


@torch.no_grad()
def _frozen_states(model: LaneModel, batch: Batch, ids: Tensor, remember: bool) -> tuple[Tensor, Tensor, Tensor]:
    """States (B, L, d) that predict each position, the logarithm of their softmax's sum, and −log p (B, L)."""
    held = _remembered.setdefault(model, {})
    windows = batch.index.tolist() if remember and batch.index is not None else []
    if windows and all(window in held for window in windows):
        return tuple(torch.stack(parts) for parts in zip(*(held[window] for window in windows), strict=True))  # type: ignore[return-value]
    states = model.encode(batch.tokens, prompt=batch.prompt, chunk_ids=ids).states
    free, size = ids >= 1, max(1, SLICE_BYTES // (4 * model.config.vocab_size))
    log_sum, nll = torch.zeros(2, *ids.shape, dtype=at_least_fp32(states), device=ids.device)
    sums, true = [], []
    for part, tokens in zip(states[free].split(size), batch.tokens[free].split(size), strict=True):
        logits = model.token_logits(part).to(log_sum)
        sums.append(logits.logsumexp(dim=-1))
        true.append(logits.gather(-1, tokens[:, None]).squeeze(-1))
    log_sum[free] = torch.cat(sums)
    nll[free] = log_sum[free] - torch.cat(true)
    used = len(held) * (states[0].numel() * states.element_size())
    for window, *parts in zip(windows, states, log_sum, nll, strict=bool(windows)):
        if used < STATES_BYTES:
            held[window] = tuple(part.clone() for part in parts)
    return states, log_sum, nll
