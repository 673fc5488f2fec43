"""Prediction from the left written out literally: the oracle of `LaneModel`, part of the core's reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dcdm.lanes.masks import lane_partition, led_positions, left
from dcdm.lanes.model import LaneModel
from dcdm.model.masks import dual_stream_slots
from dcdm.model.reference import Pass, encode, partition
from dcdm.model.transformer import Encoded, Model


@partition.register
def lane_chunks(
    model: LaneModel,
    tokens: Tensor,
    prompt: Tensor | None = None,
    index: Tensor | None = None,
    lanes: int | Tensor | None = None,
) -> Tensor:
    """Chunk ids (B, L) of the lanes, or of the partition that the kind has."""
    if model.config.kind != "lanes":
        return partition.dispatch(Model)(model, tokens, prompt, index)
    positions = model.position_masks(tokens, prompt)
    return lane_partition(model.config, positions.free, positions.real, lanes)[0]


@encode.register
def _(
    model: LaneModel,
    tokens: Tensor,
    masked: Tensor | None = None,
    *,
    prompt: Tensor | None = None,
    chunk_ids: Tensor | None = None,
    index: Tensor | None = None,
    lanes: int | Tensor | None = None,
) -> Encoded:
    """All L clean slots, and all L MASK slots, which nobody but themselves sees; each free position takes its own.

    A position whose left neighbour stands exactly one chunk earlier is predicted there, the others by their MASK.
    """
    ids = lane_chunks(model, tokens, prompt, index, lanes) if chunk_ids is None else chunk_ids
    length = tokens.shape[1]
    only = Pass(model, left, dual_stream_slots(ids))
    both = torch.cat([torch.full_like(tokens, model.config.mask_id), tokens], dim=1)
    seed_bld, clean_bld = model.norm(only.run(model.embed_tokens(both))).split(length, dim=1)
    led = led_positions(ids)
    states = torch.where(led[..., None], clean_bld.roll(1, dims=1), seed_bld)
    read = torch.cat([(ids >= 1) & ~led, (ids >= 0) & (ids < ids.amax(dim=-1, keepdim=True))], dim=1)
    r = (
        None
        if only.r is None
        else torch.where(led[..., None], only.r[:, length:].roll(1, dims=1), only.r[:, :length])
    )
    return Encoded(states, ids, r, [gate[read] for gate in only.gates])


def encode_drafted(model: Model, tokens: Tensor, known: Tensor, lane: Tensor) -> Tensor:
    """States (B, L, d) that predict each free position when lanes ran as far as each got, in one pass.

    `known` (B, L) numbers the pass that brought each token, 0 for given ones and −1 for padding; `lane` counts
    from 1. A token whose right neighbour in its lane came with the same pass was a draft token, read in that pass;
    every other one was read by the next. A slot sees what was known before its pass, and its own lane up to
    itself.
    """
    length = tokens.shape[1]
    position = torch.arange(length, device=tokens.device).expand_as(tokens)
    on = (lane > 0) & (lane == F.pad(lane[:, 1:], (0, 1)))  # the lane continues at the next position
    drafted = on & (known == F.pad(known[:, 1:], (0, 1), value=-1))
    view = torch.where(drafted, known - 1, known)

    known_q, known_k = known[:, :, None], known[:, None, :]
    not_later = position[:, None, :] <= position[:, :, None]
    given = (known_q == 0) & (known_k == 0)
    earlier = (known_k >= 0) & (known_k <= view[:, :, None]) & (~given | not_later)
    clean_to_clean = earlier | ((lane[:, :, None] == lane[:, None, :]) & (lane > 0)[:, :, None] & not_later)
    seed_to_clean = (known_k >= 0) & (known_k < known_q)
    itself = torch.eye(length, dtype=torch.bool, device=tokens.device).expand_as(seed_to_clean)
    allowed = torch.cat(
        [torch.cat([itself, seed_to_clean], dim=2), torch.cat([torch.zeros_like(itself), clean_to_clean], dim=2)],
        dim=1,
    )
    only = Pass(model, left, dual_stream_slots(known))
    only.allowed = allowed
    both = torch.cat([torch.full_like(tokens, model.config.mask_id), tokens], dim=1)
    seed_bld, clean_bld = model.norm(only.run(model.embed_tokens(both))).split(length, dim=1)
    led = led_positions(known) | F.pad(drafted[:, :-1], (1, 0))
    return torch.where(led[..., None], clean_bld.roll(1, dims=1), seed_bld)
