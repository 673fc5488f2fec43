"""Prediction from the left written out literally: the oracle of `LaneModel`, part of the core's reference."""

from __future__ import annotations

import torch
from torch import Tensor

from dcdm.lanes.masks import lane_partition, led_positions, left
from dcdm.lanes.model import LaneModel
from dcdm.model.blocks import Gates
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
    return Encoded(states, ids, r, [Gates(gate, read) for gate in only.gates])
