"""Chunking attention: K learnable subspaces that mix tokens softly and score them for routing.

B batch   S slots   d hidden size   K chunks   h subspace dimension
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcdm.config import PAPER_BALANCE
from dcdm.model import explicit
from dcdm.model.attention import AttentionPlan, KeysAndValues
from dcdm.model.layout import Tile
from dcdm.model.masks import there
from dcdm.model.products import Linear, at_least_fp32

BLOCK_BYTES = 4 << 20  # size of the K × queries × keys scores that exist at one time


class ChunkingAttention(nn.Module):
    """H + ((1/√K) Σ_k softmax(A_k)) (x W_V) W_O with A_k = p_k p_kᵀ/√h, p_k = x μ_k, x = RMSNorm(H).

    The paper's layer, for any network with states (B, S, d):

        chunking = ChunkingAttention(d, num_chunks=8, chunk_dim=32)
        h, r = chunking(h, mask)                    # mask: (B, S, S) bool, True where a query may look; or None
        ids = chunking.assign(r)                    # hard chunks 1…K
        loss = loss + 0.01 * chunking.balance_loss(r)
        ...                                         # backward, optimizer step
        chunking.update_bias(chunking.counts(ids))  # once a step

    Adds K·d·h + 2·d² parameters. `balance_bias` is not one of them: it acts in the hard assignment only. W_O starts
    at N(0, out_init_std²), by default at 0, where the layer changes no state yet.
    """

    balance_bias: Tensor

    def __init__(
        self, d: int, num_chunks: int, chunk_dim: int,
        *, norm_eps: float = 1e-6, init_std: float = 0.02, out_init_std: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, size in (("d", d), ("num_chunks", num_chunks), ("chunk_dim", chunk_dim)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"ChunkingAttention: {name}={size!r} must be a whole number of at least 1")
        self.eps, self.init_std, self.out_init_std = norm_eps, init_std, out_init_std
        self.mu = nn.Parameter(torch.empty(num_chunks, d, chunk_dim))
        self.v_proj = Linear(d, d, bias=False)
        self.o_proj = Linear(d, d, bias=False)
        self.register_buffer("balance_bias", torch.zeros(num_chunks))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initial values of μ, W_O and the balance bias; W_V is initialised as every `Linear` is."""
        self.mu.normal_(std=self.init_std, generator=generator)
        self.o_proj.weight.normal_(std=self.out_init_std, generator=generator)
        self.balance_bias.zero_()

    def normed(self, h_bsd: Tensor) -> Tensor:
        return F.rms_norm(h_bsd, h_bsd.shape[-1:], eps=self.eps)

    def project(self, x_bsd: Tensor) -> Tensor:
        """p_{k,ℓ}: (B, K, S, h)."""
        return torch.einsum("bsd,kdh->bksh", x_bsd, self.mu)

    def forward(self, h_bsd: Tensor, mask: Tensor | AttentionPlan | None = None) -> tuple[Tensor, Tensor]:
        """The updated hidden state (B, S, d) and the router's scores r (B, S, K).

        `mask` (B, S, S) is True where a query (second dimension) may look at a key; None: everywhere. A query that
        may look at nothing keeps its state.
        """
        x_bsd = self.normed(h_bsd)
        p_bksh = self.project(x_bsd)
        plan = mask if isinstance(mask, AttentionPlan) else _DensePlan.of(mask, *h_bsd.shape[:2])
        mixed_bsd = subspace_mixture(p_bksh, self.v_proj(x_bsd), plan)
        return h_bsd + self.o_proj(mixed_bsd), alignment(p_bksh)

    def extend(self, h_bqd: Tensor, cache: KeysAndValues, allowed: Tensor | None) -> Tensor:
        """The updated hidden state of new slots, which see the remembered ones too: (B, Q, d)."""
        x_bqd = self.normed(h_bqd)
        p_bqkh = self.project(x_bqd).transpose(1, 2)
        p_bskh, v_bsd = cache.extend(p_bqkh, self.v_proj(x_bqd))
        chunks, size = p_bskh.shape[2:]
        a_bksh = p_bskh.transpose(1, 2)
        p_bkqh = p_bqkh.transpose(1, 2) / math.sqrt(size)
        step = max(16, BLOCK_BYTES // (len(h_bqd) * chunks * p_bskh.shape[1] * p_bskh.element_size()))
        parts = []
        for at in range(0, h_bqd.shape[1], step):
            a_bkqs = p_bkqh[:, :, at : at + step] @ a_bksh.transpose(2, 3)
            if allowed is not None:
                a_bkqs.masked_fill_(~allowed[:, None, at : at + step], -torch.inf)
            parts.append(a_bkqs.softmax(dim=-1).sum(dim=1) @ v_bsd / math.sqrt(chunks))
        return h_bqd + self.o_proj(torch.cat(parts, dim=1))

    def scores(self, h_bsd: Tensor) -> Tensor:
        """r alone, from a hidden state after block 0: (B, S, K). The soft path is not needed for it."""
        return alignment(self.project(self.normed(h_bsd)))

    def assign(self, r_bsk: Tensor) -> Tensor:
        """Hard ids 1…K: argmax_k(r + b), without gradient."""
        return (r_bsk.detach() + self.balance_bias).argmax(dim=-1) + 1

    def balance_loss(
        self, r_bsk: Tensor, counted: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """L_chunk, the paper's loss that spreads each sequence over the chunks, with Gumbel noise of `generator`.

        `counted` (B, S) leaves out positions such as padding.
        """
        gumbel_bsk = -torch.empty_like(r_bsk).exponential_(generator=generator).log()
        counted = torch.ones_like(r_bsk[..., 0], dtype=torch.bool) if counted is None else counted
        return sequence_balance_loss(r_bsk, counted, gumbel_bsk)

    def counts(self, ids: Tensor, counted: Tensor | None = None) -> Tensor:
        """N_k (K,): how many of the `counted` positions (default: all) each chunk has."""
        counted = torch.ones_like(ids, dtype=torch.bool) if counted is None else counted
        return chunk_counts(ids, counted, len(self.mu)).sum(dim=0)

    def update_bias(self, counts_k: Tensor, rate: float = PAPER_BALANCE) -> None:
        """The paper's step of the balance bias: chunks that got more than their share become less attractive."""
        update_bias(self.balance_bias, counts_k, rate)


@dataclass(frozen=True, eq=False)
class _DensePlan:
    """A mask that somebody gives as a matrix, in the form of a plan with one tile."""

    mask: Tensor | None
    tiles: list[Tile]

    @classmethod
    def of(cls, mask: Tensor | None, rows: int, slots: int) -> _DensePlan:
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (rows, slots, slots)):
            raise ValueError(
                f"ChunkingAttention: mask must be bool of the shape {(rows, slots, slots)}, True where a query may "
                f"look at a key, or None; got {mask.dtype} {tuple(mask.shape)}"
            )
        return cls(mask, [Tile(0, rows, 0, slots, 0, slots, masked=mask is not None)])

    def tile_mask(self, tile: Tile) -> Tensor:
        assert self.mask is not None
        return self.mask[tile.r0 : tile.r1, tile.q0 : tile.q1]


def subspace_mixture(p_bksh: Tensor, v_bsd: Tensor, plan: AttentionPlan | _DensePlan) -> Tensor:
    """((1/√K) Σ_k T_k) v with T_k the softmax of A_k over the keys that the plan allows: (B, S, d)."""
    if isinstance(plan, AttentionPlan) and plan.backend == "reference":
        return explicit.subspace_mixture(p_bksh, v_bsd, plan.dense)
    return _Mixture.apply(p_bksh, v_bsd, plan)


def alignment(p_bksh: Tensor) -> Tensor:
    """r_{ℓ,k} = ‖p_{k,ℓ}‖: (B, S, K)."""
    return torch.linalg.vector_norm(p_bksh, dim=-1, dtype=at_least_fp32(p_bksh)).transpose(1, 2)


def sequence_balance_loss(r_bsk: Tensor, counted: Tensor, gumbel_bsk: Tensor, eps: float | None = None) -> Tensor:
    """L_chunk = −(1/BK) ΣΣ log(f + ε), f the mean of straight-through Gumbel samples over `counted` slots.

    `gumbel_bsk` is standard Gumbel noise. `eps` None means 1/L.
    """
    soft_bsk = (r_bsk + gumbel_bsk).softmax(dim=-1)
    hard_bsk = F.one_hot(soft_bsk.argmax(dim=-1), r_bsk.shape[-1]).to(soft_bsk.dtype)
    sample_bsk = hard_bsk + soft_bsk - soft_bsk.detach()
    weight_bs1 = counted.to(sample_bsk.dtype)[..., None]
    f_bk = (sample_bsk * weight_bs1).sum(1) / weight_bs1.sum(1).clamp(min=1)
    return -torch.log(f_bk + (1 / r_bsk.shape[1] if eps is None else eps)).mean()


def chunk_counts(ids: Tensor, counted: Tensor, num_chunks: int) -> Tensor:
    """N_k per sequence over `counted` positions: (B, K), long."""
    in_chunk = ids[..., None] == torch.arange(1, num_chunks + 1, device=ids.device)
    return (in_chunk & counted[..., None]).sum(dim=1)


@torch.no_grad()
def update_bias(bias: Tensor, counts_k: Tensor, rate: float) -> None:
    """b_k ← b_k − η_b (N_k/N − 1/K), in place; counts over the whole optimizer step."""
    total = counts_k.sum()
    change = (counts_k / total.clamp(min=1) - 1 / len(counts_k)) * (total > 0)
    bias -= rate * there(change.to(bias.dtype), bias.device)


def max_violation(counts: Tensor) -> Tensor:
    """MaxVio = K·max_k N_k/N − 1 over the last dimension; 0 is perfect balance, K−1 one chunk for all."""
    total = counts.sum(dim=-1).clamp(min=1)
    return counts.shape[-1] * counts.amax(dim=-1) / total - 1


class _Mixture(torch.autograd.Function):
    """The K softmaxes summed per block of queries, then one product with the values; recomputed in backward.

    Memory is linear in the number of slots: no more than `BLOCK_BYTES` of scores exist at one time.
    """

    @staticmethod
    def forward(ctx: Any, p: Tensor, v: Tensor, plan: AttentionPlan | _DensePlan) -> Tensor:
        ctx.save_for_backward(p, v)
        ctx.plan = plan
        out = torch.zeros_like(v)
        for block in _blocks(plan, p):
            rows, queries = slice(block.r0, block.r1), slice(block.q0, block.q1)
            weight = _softmaxes(plan, block, p).sum(dim=1)
            out[rows, queries] = weight @ _with_own(block, v[rows], 1)
        return out.div_(math.sqrt(p.shape[1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        p, v = ctx.saved_tensors
        dp, dv = torch.zeros_like(p), torch.zeros_like(v)
        grad = grad / math.sqrt(p.shape[1])
        scale = 1 / math.sqrt(p.shape[-1])
        for block in _blocks(ctx.plan, p):
            rows, queries = slice(block.r0, block.r1), slice(block.q0, block.q1)
            t_rkqs = _softmaxes(ctx.plan, block, p)
            grad_rqd = grad[rows, queries]
            _add(block, dv[rows], t_rkqs.sum(dim=1).transpose(1, 2) @ grad_rqd, 1)
            toward_rqs = grad_rqd @ _with_own(block, v[rows], 1).transpose(1, 2)
            da_rkqs = t_rkqs * toward_rqs[:, None]
            da_rkqs.addcmul_(t_rkqs, da_rkqs.sum(dim=-1, keepdim=True), value=-1)
            _add(block, dp[rows], da_rkqs.transpose(2, 3) @ (p[rows, :, queries] * scale), 2)
            dp[rows, :, queries] += da_rkqs @ (_with_own(block, p[rows], 2) * scale)
        return dp, dv, None


def _blocks(plan: AttentionPlan | _DensePlan, p: Tensor) -> Iterator[Tile]:
    """The plan's tiles, cut into blocks of queries (and of rows) that keep to the memory budget."""
    for tile in plan.tiles:
        per_query = p.shape[1] * max(1, tile.num_keys) * p.element_size()
        size = max(16, BLOCK_BYTES // per_query)
        together = max(1, size // (tile.q1 - tile.q0))
        for r0 in range(tile.r0, tile.r1, together):
            for q0 in range(tile.q0, tile.q1, size):
                r1, q1 = min(tile.r1, r0 + together), min(tile.q1, q0 + size)
                yield replace(tile, r0=r0, r1=r1, q0=q0, q1=q1)


def _with_own(block: Tile, x: Tensor, dim: int) -> Tensor:
    """The block's keys, and its queries' own slots behind them where each query sees its own."""
    keys = block.keys(x, dim)
    if not block.own:
        return keys
    return torch.cat([keys, x.narrow(dim, block.q0, block.q1 - block.q0)], dim=dim)


def _add(block: Tile, total: Tensor, part: Tensor, dim: int) -> None:
    """Add `part`, laid out as by `_with_own`, to `total`."""
    ranges = [(block.a0, block.a1), (block.b0, block.b1), *([(block.q0, block.q1)] if block.own else [])]
    at = 0
    for start, end in ranges:
        if end > start:
            total.narrow(dim, start, end - start).add_(part.narrow(dim, at, end - start))
            at += end - start


def _softmaxes(plan: AttentionPlan | _DensePlan, block: Tile, p: Tensor) -> Tensor:
    """T_k of the block's queries over its keys: (R, K, q, k)."""
    rows, queries = slice(block.r0, block.r1), slice(block.q0, block.q1)
    p_rkqh = p[rows, :, queries] * (1 / math.sqrt(p.shape[-1]))
    a_rkqs = p_rkqh @ _with_own(block, p[rows], 2).transpose(2, 3)
    if block.own:
        mine = torch.eye(block.q1 - block.q0, dtype=torch.bool, device=p.device)
        a_rkqs[..., block.num_keys :].masked_fill_(~mine, -torch.inf)
    if not block.masked:
        return a_rkqs.softmax(dim=-1)
    allowed = plan.tile_mask(block)[:, None]
    t_rkqs = a_rkqs.masked_fill_(~allowed, torch.finfo(p.dtype).min).softmax(dim=-1)
    return t_rkqs.masked_fill_(~allowed, 0)  # rows that may attend to nothing
