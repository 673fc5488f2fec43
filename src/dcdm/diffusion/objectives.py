"""The training objective: `loss(model, batch, generator)`.

`diffusion_loss` is the paper's, from top to bottom: noise, route, mask, denoise, weigh, balance. AR has its own,
and other networks register theirs with `loss_of_part`.

`loss` is for loops of your own, and moves the balance bias in the backward pass. `dcdm train` takes its steps apart
(training/trainer.py): `with_prompts`, `counted`, `loss_of_part`, and the bias after the optimizer step.

B batch   L positions   K chunks   t noise level
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcdm.config import ObjectiveConfig
from dcdm.diffusion import noise
from dcdm.keys import Key
from dcdm.model.blocks import load_balancing_loss
from dcdm.model.chunking import chunk_counts, sequence_balance_loss
from dcdm.model.masks import there
from dcdm.model.products import weighted_nll
from dcdm.model.transformer import Encoded, Model


@dataclass(frozen=True)
class Batch:
    """Rows of a global batch: tokens, and the numbers that key their randomness; all in main memory.

    `prompt` marks positions that stay visible and are not counted. `rows` are the places of these sequences
    in the global batch of `num_rows` (default: this batch is the whole one); `index` numbers the sequences
    in the data set, for random routing.
    """

    tokens: Tensor
    prompt: Tensor | None = None
    rows: Tensor | None = None
    num_rows: int | None = None
    index: Tensor | None = None

    def numbers(self) -> tuple[Tensor, int]:
        """`rows` on the CPU, and the size of the global batch."""
        if self.rows is None:
            return torch.arange(len(self.tokens)), len(self.tokens)
        if self.num_rows is None:
            raise ValueError("Batch.rows needs Batch.num_rows: the size of the global batch")
        return self.rows.cpu(), self.num_rows


@dataclass(frozen=True)
class GlobalBatch:
    """The global batch that a micro-batch on one rank is a part of."""

    tokens: Tensor
    """Free tokens of the whole step, over all ranks and micro-batches."""
    rows: int
    """Sequences of the whole step."""
    micro_steps: int = 1
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x


@dataclass(frozen=True)
class Loss:
    """`total` is what to minimise; the rest is for reports and for the balance bias.

    For a part of a `GlobalBatch`, all losses are this part's share: they add up over ranks and micro-batches.
    """

    total: Tensor
    nll: Tensor
    """Cross-entropy per free token, weighted by 1/t. It estimates the NELBO (of the paper's routing the surrogate,
    which is not a bound) only where t is uniform on about [0, 1], as in the paper: the debug and small presets draw
    it from 0.3 on, and `full_mask_share` sets some levels to 1."""
    tokens: Tensor
    """Free tokens of this batch."""
    chunk_loss: Tensor | None = None
    moe_loss: Tensor | None = None
    counts: Tensor | None = None
    """N_k per sequence (B, K), without BOS and PAD."""
    draft_loss: Tensor | None = None
    """Cross-entropy of a draft head's tokens, of which the rest of the network learns nothing."""


def loss(
    model: Model,
    batch: Batch | Tensor,
    generator: Key | torch.Generator | int,
    settings: ObjectiveConfig | None = None,
    global_batch: GlobalBatch | None = None,
) -> Loss:
    """The kind's training loss on one batch (tokens alone are a batch): `loss(…).total.backward()` trains on it.

    `generator` is the step's `Key`, a seed, or a `torch.Generator`; all randomness follows from it and from
    `batch.rows`, so that splitting a batch over processes changes nothing. Without `settings` the model's own hold:
    those of its preset. Without `global_batch` the batch is all there is.

    With the paper's routing, the backward pass of `total` also moves the balance bias by this batch's counts, at
    `settings.bias_rate`: a loop of your own balances its chunks without another call.
    """
    settings = settings or model.objective
    settings.check_fits(model.config)
    key = Key.of(generator)
    batch = Batch(batch) if isinstance(batch, Tensor) else batch
    held: dict[str, Any] = {name: value.cpu() for name, value in vars(batch).items() if isinstance(value, Tensor)}
    batch = with_prompts(model, replace(batch, **held), key, settings)
    whole = global_batch or GlobalBatch(counted(model, batch), len(batch.tokens))
    result = loss_of_part(model, batch, key, settings, whole)
    rate = settings.bias_rate_for(model.config)
    if result.total.requires_grad and rate > 0:
        result.total.register_hook(lambda _: _balance(model, result, whole, rate))
    return result


def _balance(model: Model, result: Loss, global_batch: GlobalBatch, rate: float) -> None:
    assert model.chunking is not None
    assert result.counts is not None
    counts_k = global_batch.sum_over_ranks(result.counts.sum(dim=0))
    model.chunking.update_bias(counts_k, rate / global_batch.micro_steps)


def with_prompts(model: Model, batch: Batch, key: Key, settings: ObjectiveConfig) -> Batch:
    """The batch with training's random prompts among what stays visible."""
    if model.config.kind == "ar":
        return batch
    rows, free = batch.numbers()[0], model.position_masks(batch.tokens, batch.prompt).free.cpu()
    around = noise.visible_around_blanks(key, rows, free, settings.blank_share)
    spans = noise.visible_spans(key, rows, free, settings.prompt_share) & ~around.any(dim=-1, keepdim=True)
    shown = (spans | around).to(batch.tokens.device)
    return replace(batch, prompt=shown if batch.prompt is None else batch.prompt | shown)


def counted(model: Model, batch: Batch) -> Tensor:
    """How many tokens of a batch `loss_of_part` predicts."""
    free = model.position_masks(batch.tokens, batch.prompt).free
    return (free[:, 1:] if model.config.kind == "ar" else free).sum()


@singledispatch
def loss_of_part(
    model: Model, batch: Batch, key: Key, settings: ObjectiveConfig, global_batch: GlobalBatch
) -> Loss:
    """The loss of a part of a global batch, whose prompts have been drawn (`with_prompts`)."""
    if model.config.kind == "ar":
        return next_token_loss(model, batch, key, settings, global_batch)
    return diffusion_loss(model, batch, key, settings, global_batch)


def diffusion_loss(
    model: Model, batch: Batch, key: Key, settings: ObjectiveConfig, global_batch: GlobalBatch
) -> Loss:
    """The NELBO of MDLM and BDLM, the paper's surrogate of it for DCDM, and what balances the chunks."""
    # noise: which positions of z hold MASK
    sample, tokens = draw(model, batch, key, settings), batch.tokens
    masked = sample.masked

    # route, mask, denoise: block 0 and μ give the ids, the other blocks see z ⊕ x under the mask of these chunks
    encoded = model.encode(tokens, masked, prompt=batch.prompt, chunk_ids=sample.ids)

    # weigh: −log p of the masked tokens, each by 1/t (`noise.corrupt` made the weights)
    chosen = (picked(x, masked, encoded.states.device) for x in (encoded.states, tokens, sample.weight))
    states, targets, weights = chosen
    summed = weighted_nll(states, model.head_weight(), targets, weights, model.config.hidden_token)

    # balance: L_chunk, and N_k for the bias of the hard assignment
    return complete_loss(model, batch, key, settings, encoded, summed, sample.free.sum(), global_batch)


@dataclass(frozen=True)
class Sample:
    """One draw of training noise; each (B, L)."""

    masked: Tensor
    weight: Tensor
    """1/t where masked, else 0."""
    free: Tensor
    ids: Tensor | None
    """Chunk ids where they do not depend on noise; None in the paper's routing."""


def draw(model: Model, batch: Batch, key: Key, settings: ObjectiveConfig) -> Sample:
    """Which tokens are masked: at one level t where chunks follow from the noisy stream, else one for each."""
    tokens, config = batch.tokens, model.config
    rows, num_rows = batch.numbers()
    positions = model.position_masks(tokens, batch.prompt)
    free = positions.free
    if config.routes_from_noise:
        ids, groups, num_groups = None, free.long(), 1
    else:
        ids = model.partition(tokens, batch.prompt, batch.index).ids
        groups = ids.masked_fill(positions.visible, 0)
        num_groups = config.num_groups(tokens.shape[1])
    t = noise.levels(key, rows, num_rows, num_groups, settings)
    masked, weight = noise.corrupt(key, rows, groups.cpu(), t)
    return Sample(masked.to(tokens.device), weight.to(tokens.device), free, ids)


def picked(values: Tensor, where: Tensor, device: torch.device) -> Tensor:
    """`values` (B, L, …) at the places `where` (B, L) on a device, which is not asked how many these are as long as
    `where` is in main memory: (M, …)."""
    places = where.flatten().nonzero().squeeze(-1)
    return there(values.flatten(0, 1).index_select(0, there(places, values.device)), device)


def next_token_loss(
    model: Model, batch: Batch, key: Key, settings: ObjectiveConfig, global_batch: GlobalBatch
) -> Loss:
    """AR: position ℓ predicts ℓ+1."""
    free = F.pad(model.position_masks(batch.tokens, batch.prompt).free[:, 1:], (0, 1))  # by what predicts them
    encoded = model.encode(batch.tokens)
    states, targets = (picked(x, free, encoded.states.device) for x in (encoded.states, batch.tokens.roll(-1, 1)))
    summed = weighted_nll(states, model.head_weight(), targets, torch.ones_like(targets))
    return complete_loss(model, batch, key, settings, encoded, summed, free.sum(), global_batch)


def complete_loss(
    model: Model, batch: Batch, key: Key, settings: ObjectiveConfig,
    encoded: Encoded, summed: Tensor, tokens: Tensor, global_batch: GlobalBatch,
) -> Loss:  # fmt: skip
    """The cross-entropy per token with the losses that balance chunks and experts, and the chunks counted.

    `summed` is the weighted cross-entropy of the batch, `tokens` how many of its tokens are free.
    """
    config = model.config
    nll = total = summed / global_batch.tokens.clamp(min=1)
    chunk_loss = moe_loss = counts = None
    if config.kind == "dcdm":
        assert config.num_chunks is not None
        assert encoded.chunk_ids is not None
        assert encoded.router_scores is not None
        ordinary = (batch.tokens != config.pad_id) & (batch.tokens != config.bos_id)
        in_chunk = there(ordinary, encoded.chunk_ids.device) & (encoded.chunk_ids >= 1)
        counts = chunk_counts(encoded.chunk_ids, in_chunk, config.num_chunks)
        if (weight := settings.chunk_weight_for(config)) > 0:
            r = encoded.router_scores
            gumbel = key.fold("gumbel").gumbel_rows(batch.numbers()[0], *r.shape[1:]).to(r.dtype)
            in_chunk, gumbel = there(in_chunk, r.device), there(gumbel, r.device)
            chunk_loss = sequence_balance_loss(r, in_chunk, gumbel, settings.chunk_loss_eps)
            chunk_loss = chunk_loss * (len(batch.tokens) / global_batch.rows)
            total = total + weight * chunk_loss
    if config.moe is not None:
        moe_loss = load_balancing_loss(encoded.gates, config.moe.experts_per_token, global_batch.sum_over_ranks)
        moe_loss = moe_loss / global_batch.micro_steps
        total = total + settings.moe_loss_weight * moe_loss
    return Loss(total, nll.detach(), tokens, chunk_loss, moe_loss, counts)
