"""The training objective of every kind, under one interface: `loss(model, batch, generator)`.

B batch   L positions   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dcdm.config import LANE_LENGTH, ModelConfig, ObjectiveConfig
from dcdm.diffusion import noise
from dcdm.keys import Key
from dcdm.model.blocks import load_balancing_loss
from dcdm.model.chunking import chunk_counts, sequence_balance_loss
from dcdm.model.drafting import SHARE, guesses
from dcdm.model.head import weighted_nll
from dcdm.model.routing import fixed_partition
from dcdm.model.transformer import Encoded, Model


@dataclass(frozen=True)
class Batch:
    """Rows of a global batch: tokens, and the numbers that key their randomness.

    `prompt` marks positions that stay visible and are not counted. `rows` are the places of these sequences
    in the global batch of `num_rows` (default: this batch is the whole one); `index` numbers the sequences
    in the data set, for random routing.
    """

    tokens: Tensor
    prompt: Tensor | None = None
    rows: Tensor | None = None
    num_rows: int | None = None
    index: Tensor | None = None


@dataclass(frozen=True)
class GlobalBatch:
    """The global batch that a micro-batch on one rank is a part of."""

    tokens: Tensor
    """Free tokens of the whole step, over all ranks and micro-batches."""
    rows: int
    """Sequences of the whole step."""
    micro_steps: int = 1
    total: Callable[[Tensor], Tensor] = lambda x: x
    """Sums over ranks."""
    step: int | None = None
    """The step's number, from 1, for objectives that grow; None: fully grown."""


@dataclass(frozen=True)
class Loss:
    """`total` is what to minimise; the rest is for reports and for the balance bias.

    For a part of a `GlobalBatch`, all losses are this part's share: they add up over ranks and micro-batches.
    """

    total: Tensor
    nll: Tensor
    """Weighted cross-entropy per free token: a NELBO estimate where no chunk was set to t = 1."""
    tokens: Tensor
    """Free tokens of this batch."""
    chunk_loss: Tensor | None = None
    moe_loss: Tensor | None = None
    counts: Tensor | None = None
    """N_k per sequence (B, K), without BOS and PAD."""
    draft_loss: Tensor | None = None
    """Cross-entropy of the draft head's guesses, of which the rest of the network learns nothing."""


DRAFT_WEIGHT = 0.1
"""Of the draft head's loss: its steps hardly depend on it, the norm at which all gradients are clipped does."""


def loss(
    model: Model,
    batch: Batch,
    generator: Key | torch.Generator | int,
    settings: ObjectiveConfig | None = None,
    global_batch: GlobalBatch | None = None,
) -> Loss:
    """The kind's training loss on one batch.

    `generator` is the step's `Key`, a seed, or a `torch.Generator`; all randomness follows from it and from
    `batch.rows`, so that splitting a batch over processes changes nothing. Without
    `global_batch` the batch is all there is.
    """
    settings = settings or ObjectiveConfig()
    settings.check_fits(model.config)
    key = Key.of(generator)
    task = settings.task_at(model.config, None if global_batch is None else global_batch.step)
    if model.config.kind == "ar":
        free = visibility(model, batch, key, settings)[0][:, 1:]
        encoded = model.encode(batch.tokens)
        states, targets = encoded.states[:, :-1][free], batch.tokens[:, 1:][free]
        weight = torch.ones_like(targets)
    elif model.config.predicts_from_left:
        free, prompt = visibility(model, batch, key, settings)
        lanes = draw_lanes(task, key, _rows(batch)[0], free.sum(dim=-1).cpu())
        ids = _partition(model, task, batch, prompt, lanes)
        encoded = model.encode(batch.tokens, prompt=prompt, chunk_ids=ids)
        states, targets = encoded.states[free], batch.tokens[free]
        weight = torch.ones_like(targets)
    else:
        sample = draw(model, batch, key, settings, task)
        encoded = model.encode(batch.tokens, sample.masked, prompt=sample.prompt, chunk_ids=sample.ids)
        where, free = sample.masked, sample.free
        clean = batch.tokens if where.ndim == 2 else batch.tokens[:, None].expand_as(where)
        states, targets, weight = encoded.states[where], clean[where], sample.weight[where]
    tokens = free.sum()
    global_batch = global_batch or GlobalBatch(tokens, rows=len(batch.tokens))
    summed = weighted_nll(states, model.head_weight(), targets, weight)
    passes = 1 if model.config.kind == "ar" or model.config.predicts_from_left else settings.noise_draws
    nll = summed / (passes * global_batch.tokens.clamp(min=1))
    return _with_balance(model, batch, key, settings, encoded, nll, tokens, global_batch)


def draw_lanes(config: ModelConfig, key: Key, rows: Tensor, num_free: Tensor) -> Tensor | None:
    """How many lanes each row is trained with, (B,): from the list, none shorter than `LANE_LENGTH` if possible."""
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


def visibility(model: Model, batch: Batch, key: Key, settings: ObjectiveConfig) -> tuple[Tensor, Tensor]:
    """Free and visible positions of a training batch, random prompts included: two (B, L) bool."""
    sets = model.sets(batch.tokens, batch.prompt)
    if model.config.kind == "ar":
        return sets.free, sets.visible
    rows, free = _rows(batch)[0], sets.free.cpu()
    around = noise.visible_around_blanks(key, rows, free, settings.blank_share)
    spans = noise.visible_spans(key, rows, free, settings.prompt_share) & ~around.any(dim=-1, keepdim=True)
    spans = (spans | around).to(batch.tokens.device)
    return sets.free & ~spans, sets.visible | spans


@dataclass(frozen=True)
class Sample:
    """One draw of training noise."""

    masked: Tensor
    """(B, L) bool; with several noise draws (B, n, L)."""
    weight: Tensor
    """1/t where masked, else 0; of the same shape."""
    free: Tensor
    prompt: Tensor
    ids: Tensor | None
    """Chunk ids where they do not depend on noise; None in the paper's routing."""


def draw(
    model: Model, batch: Batch, key: Key, settings: ObjectiveConfig, task: ModelConfig | None = None
) -> Sample:
    """Which positions of `batch` are visible, masked and with what weight, and its partition.

    `task` has the sizes of blocks that are trained, where they are not yet those of the model.
    """
    tokens, task = batch.tokens, task or model.config
    rows, num_rows = _rows(batch)
    free, prompt = visibility(model, batch, key, settings)
    if model.config.routes_from_noise:
        ids, groups, num_groups = None, free.long(), 1
    else:
        ids = _partition(model, task, batch, prompt)
        groups, num_groups = ids, task.num_groups(tokens.shape[1])
    masked, weight = noise.draws(key, rows, num_rows, groups.cpu(), num_groups, settings)
    if settings.noise_draws == 1:
        masked, weight = masked[:, 0], weight[:, 0]
    return Sample(masked.to(tokens.device), weight.to(tokens.device), free, prompt, ids)


def _partition(
    model: Model, task: ModelConfig, batch: Batch, prompt: Tensor, lanes: Tensor | None = None
) -> Tensor:
    """Chunk ids of the clean tokens; where the task still grows, those of its own sizes."""
    if task is model.config:
        return model.partition(batch.tokens, prompt, batch.index, lanes).ids
    sets = model.sets(batch.tokens, prompt)
    return fixed_partition(task, sets.free, sets.real, batch.index, lanes)


def _with_balance(
    model: Model, batch: Batch, key: Key, settings: ObjectiveConfig,
    encoded: Encoded, nll: Tensor, tokens: Tensor, global_batch: GlobalBatch,
) -> Loss:  # fmt: skip
    """Add the auxiliary losses to the cross-entropy and count the chunks."""
    config, total = model.config, nll
    counted = (batch.tokens != config.pad_id) & (batch.tokens != config.bos_id)
    chunk_loss = moe_loss = draft_loss = counts = None
    if config.kind == "dcdm":
        assert config.num_chunks is not None
        assert encoded.chunk_ids is not None
        assert encoded.router_scores is not None
        counted = counted & (encoded.chunk_ids >= 1)
        counts = chunk_counts(encoded.chunk_ids, counted, config.num_chunks)
        if (weight := settings.chunk_weight_for(config)) > 0:
            r = encoded.router_scores
            gumbel = key.fold("gumbel").gumbel_rows(_rows(batch)[0], *r.shape[1:]).to(r)
            chunk_loss = sequence_balance_loss(r, counted, gumbel, settings.chunk_loss_eps)
            chunk_loss = chunk_loss * (len(batch.tokens) / global_batch.rows)
            total = total + weight * chunk_loss
    if config.moe is not None:
        moe_loss = load_balancing_loss(encoded.gate_logits, config.moe.experts_per_token, global_batch.total)
        moe_loss = moe_loss / global_batch.micro_steps
        total = total + settings.moe_loss_weight * moe_loss
    if config.drafts:
        draft_loss = _draft_loss(model, batch, encoded) / global_batch.tokens.clamp(min=1)
        total = total + DRAFT_WEIGHT * draft_loss
    return Loss(total, nll.detach(), tokens, chunk_loss, moe_loss, counts, draft_loss)


def _draft_loss(model: Model, batch: Batch, encoded: Encoded) -> Tensor:
    """Cross-entropy of the draft head's guesses, scaled to what all rows would add; it moves the head alone."""
    assert model.drafting is not None
    assert encoded.chunk_ids is not None
    rows, num_rows = _rows(batch)
    chosen = (rows % SHARE == 0).to(batch.tokens.device)
    scale = num_rows / -(-num_rows // SHARE) / model.config.drafts
    tokens, ids, states = batch.tokens[chosen], encoded.chunk_ids[chosen], encoded.states[chosen].detach()
    embedded = model.embed_tokens(tokens).detach()
    made, truths = guesses(model.drafting, states, embedded, tokens, ids, model.config.drafts)
    return scale * weighted_nll(made, model.head_weight().detach(), truths, torch.ones_like(truths))


def _rows(batch: Batch) -> tuple[Tensor, int]:
    if batch.rows is None:
        return torch.arange(len(batch.tokens)), len(batch.tokens)
    if batch.num_rows is None:
        raise ValueError("Batch.rows needs Batch.num_rows: the size of the global batch")
    return batch.rows.cpu(), batch.num_rows
