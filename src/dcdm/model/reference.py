"""The network written out literally: the oracle that the production path must equal, outputs and gradients.

Explicit softmax over dense masks and K softmaxes of S × S (`explicit.py`), both streams in original order, all
logits. It reads the weights of a `Model` and shares with it the predicates of `masks.py` and the rules of
`routing.py`, and nothing that is there for speed.

    B batch   L positions   S slots (L, or 2L for z ⊕ x)   d hidden size   K chunks   h subspace dimension
    H query heads   G key/value heads   D head size   V vocabulary
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcdm.config import NUM_SPECIALS, ModelConfig
from dcdm.model import masks, routing
from dcdm.model.attention import rotary_tables, rotate
from dcdm.model.blocks import Block, Gates
from dcdm.model.chunking import ChunkingAttention
from dcdm.model.explicit import attend, subspace_mixture
from dcdm.model.masks import Mask, Slots
from dcdm.model.transformer import Encoded, Model, Output, substitute


def block(
    layer: Block, h_bsd: Tensor, slots: Slots, allowed_bss: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor | None]:
    """Pre-norm attention and MLP."""
    attention, x_bsd = layer.self_attn, layer.input_layernorm(h_bsd)
    tables = rotary_tables(slots.position, config, h_bsd.dtype)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, attention.head_dim))

    q_bhsd = rotate(attention.q_norm(heads(attention.q_proj(x_bsd))), tables).transpose(1, 2)
    k_bgsd = rotate(attention.k_norm(heads(attention.k_proj(x_bsd))), tables).transpose(1, 2)
    v_bgsd = heads(attention.v_proj(x_bsd)).transpose(1, 2)
    out_bhsd = attend(q_bhsd, k_bgsd, v_bgsd, allowed_bss)
    h_bsd = h_bsd + attention.o_proj(out_bhsd.transpose(1, 2).flatten(2))
    y_bsd, gate_logits = layer.mlp(layer.post_attention_layernorm(h_bsd))
    return h_bsd + y_bsd, gate_logits


def chunking(layer: ChunkingAttention, h_bsd: Tensor, allowed_bss: Tensor) -> tuple[Tensor, Tensor]:
    """H + Y and the scores r (B, S, K)."""
    x_bsd = F.rms_norm(h_bsd, h_bsd.shape[-1:], eps=layer.eps)
    p_bksh = torch.einsum("bsd,kdh->bksh", x_bsd, layer.mu)
    y_bsd = layer.o_proj(subspace_mixture(p_bksh, layer.v_proj(x_bsd), allowed_bss))
    return h_bsd + y_bsd, p_bksh.norm(dim=-1).transpose(1, 2)


class Pass:
    """One pass over given slots under one dense mask."""

    def __init__(self, model: Model, mask: Mask, slots: Slots) -> None:
        self.model, self.slots, self.allowed = model, slots, mask.dense(slots)
        self.r: Tensor | None = None
        self.gates: list[Tensor] = []

    def run(self, h_bsd: Tensor, first: int = 0, last: int | None = None, chunks: bool = True) -> Tensor:
        """Blocks first…last−1, the chunking attention after block 0 where the model has one."""
        for number, layer in list(enumerate(self.model.layers))[first:last]:
            assert isinstance(layer, Block)
            h_bsd, gate = block(layer, h_bsd, self.slots, self.allowed, self.model.config)
            self.gates += [] if gate is None else [gate]
            if number == 0 and chunks and self.model.chunking is not None:
                h_bsd, self.r = chunking(self.model.chunking, h_bsd, self.allowed)
        return h_bsd


def stage_1(model: Model, z: Tensor, masked: Tensor, real: Tensor, chunks: bool = True) -> tuple[Tensor, Pass]:
    """Block 0 and the chunking attention on one stream under M^noise."""
    stage = Pass(model, masks.noise, Slots.of(torch.where(real, 0, -1), masked))
    return stage.run(model.embed_tokens(z), last=1, chunks=chunks), stage


def router_scores(model: Model, z: Tensor, real: Tensor) -> Tensor:
    """r (B, L, K) of `z`, in which MASK hides what is not revealed."""
    assert model.chunking is not None
    h_bld, _ = stage_1(model, z, z == model.config.mask_id, real, chunks=False)
    x_bld = F.rms_norm(h_bld, h_bld.shape[-1:], eps=model.chunking.eps)
    return torch.einsum("bld,kdh->blkh", x_bld, model.chunking.mu).norm(dim=-1)


@singledispatch
def partition(
    model: Model,
    tokens: Tensor,
    prompt: Tensor | None = None,
    index: Tensor | None = None,
) -> Tensor:
    """Chunk ids (B, L) where they do not depend on noise; causal rounds run all of block 0 each."""
    positions = model.position_masks(tokens, prompt)
    if model.config.kind != "dcdm" or model.config.routing != "causal":
        return routing.fixed_partition(model.config, positions.free, positions.real, index)

    revealed = torch.zeros_like(positions.real)

    def router(new: Tensor) -> Tensor:
        revealed.logical_or_(new)
        return router_scores(model, tokens.masked_fill(~revealed, model.config.mask_id), positions.real)

    return routing.causal_partition(router, positions.free, positions.real, model.config)[0]


@singledispatch
def encode(
    model: Model,
    tokens: Tensor,
    masked: Tensor | None = None,
    *,
    prompt: Tensor | None = None,
    chunk_ids: Tensor | None = None,
    index: Tensor | None = None,
) -> Encoded:
    """Final states of the noisy stream, at every position. Other networks register their own version."""
    config, length = model.config, tokens.shape[1]
    positions = model.position_masks(tokens, prompt)
    if config.kind == "ar":
        only = Pass(model, masks.causal, Slots.of(torch.where(positions.real, 0, -1)))
        states = model.norm(only.run(model.embed_tokens(tokens)))
        return Encoded(states, None, None, [Gates(gate, positions.real) for gate in only.gates])
    assert masked is not None
    noisy = tokens.masked_fill(masked, config.mask_id)
    if config.routes_from_noise:
        assert model.chunking is not None
        h_z, stage_z = stage_1(model, noisy, masked, positions.real)
        h_x, stage_x = stage_1(model, tokens, masked, positions.real)
        assert stage_z.r is not None
        ids = torch.where(positions.real, model.chunking.assign(stage_z.r), -1) if chunk_ids is None else chunk_ids
        second = Pass(model, masks.dual_stream, masks.dual_stream_slots(ids))
        h_bsd = second.run(torch.cat([h_z, h_x], dim=1), first=1)
        r: Tensor | None = stage_z.r
        early = [Gates(g, positions.real) for g in stage_z.gates + stage_x.gates]
    else:
        ids = partition(model, tokens, prompt, index) if chunk_ids is None else chunk_ids
        second = Pass(model, masks.dual_stream, masks.dual_stream_slots(ids))
        h_bsd = second.run(model.embed_tokens(torch.cat([noisy, tokens], dim=1)))
        r, early = None if second.r is None else second.r[:, :length], []
    used = masks.read_slots(ids)
    if config.shift:
        h_bsd = shifted(h_bsd, ids)
    gates = [Gates(g, used) for g in second.gates[:-1]]
    gates += [Gates(g[:, :length], used[:, :length]) for g in second.gates[-1:]]
    return Encoded(model.norm(h_bsd[:, :length]), ids, r, early + gates)


def shifted(h_bsd: Tensor, ids: Tensor) -> Tensor:
    """Row i−1 for position i: of z where both are in one block, of x where i−1 stands in an earlier one."""
    length, rows = ids.shape[1], h_bsd.clone()
    for row in range(len(ids)):
        for at in range(1, length):
            before, own = int(ids[row, at - 1]), int(ids[row, at])
            if before >= 0:
                rows[row, at] = h_bsd[row, at - 1 if before == own else at - 1 + length]
    return rows


def forward(model: Model, tokens: Tensor, masked: Tensor | None = None, **options: Any) -> Output:
    """What `Model.forward` returns, all B × L × V logits included."""
    encoded = encode(model, tokens, masked, **options)
    logits = F.linear(encoded.states, model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight)
    if not model.config.predicts_specials:
        logits[..., -NUM_SPECIALS:] = -torch.inf
    if model.config.hidden_token is not None:
        logits[..., model.config.hidden_token] = -torch.inf
    if model.config.kind != "ar":
        logits = substitute(
            logits, tokens, model.position_masks(tokens, options.get("prompt")).free if masked is None else masked
        )
    return Output(logits, encoded.chunk_ids, encoded.router_scores)
