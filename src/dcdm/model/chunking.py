"""Chunking attention: K learnable subspaces that mix tokens softly and score them for routing.

B batch   S slots   d hidden size   K chunks   h subspace dimension
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcdm.config import ModelConfig
from dcdm.model.attention import Plan, masked_softmax


class ChunkingAttention(nn.Module):
    """H + ((1/√K) Σ_k softmax(A_k)) (x W_V) W_O with A_k = p_k p_kᵀ/√h, p_k = x μ_k, x = RMSNorm(H).

    Adds K·d·h + 2·d² parameters. `balance_bias` is not one of them: it acts in the hard assignment only.
    """

    balance_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.num_chunks is not None
        assert config.chunk_dim is not None
        d = config.hidden_size
        self.eps = config.norm_eps
        self.mu = nn.Parameter(torch.empty(config.num_chunks, d, config.chunk_dim))
        self.v_proj = nn.Linear(d, d, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)
        self.register_buffer("balance_bias", torch.zeros(config.num_chunks))

    def normed(self, h_bsd: Tensor) -> Tensor:
        return F.rms_norm(h_bsd, h_bsd.shape[-1:], eps=self.eps)

    def project(self, x_bsd: Tensor) -> Tensor:
        """p_{k,ℓ}: (B, K, S, h)."""
        return torch.einsum("bsd,kdh->bksh", x_bsd, self.mu)

    def forward(self, h_bsd: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """The updated hidden state (B, S, d) and the router's scores r (B, S, K)."""
        x_bsd = self.normed(h_bsd)
        p_bksh = self.project(x_bsd)
        mixed_bsd = subspace_mixture(p_bksh, self.v_proj(x_bsd), plan)
        return h_bsd + self.o_proj(mixed_bsd), alignment(p_bksh)

    def scores(self, h_bsd: Tensor) -> Tensor:
        """r alone, from a hidden state after block 0: (B, S, K). The soft path is not needed for it."""
        return alignment(self.project(self.normed(h_bsd)))

    def assign(self, r_bsk: Tensor) -> Tensor:
        """Hard ids 1…K: argmax_k(r + b), without gradient."""
        return (r_bsk.detach() + self.balance_bias).argmax(dim=-1) + 1


def affinities(p_bksh: Tensor) -> Tensor:
    """A_k[ℓ,m] = p_{k,ℓ}·p_{k,m}/√h: (B, K, S, S)."""
    return p_bksh @ p_bksh.transpose(-1, -2) / math.sqrt(p_bksh.shape[-1])


def subspace_mixture(p_bksh: Tensor, v_bsd: Tensor, plan: Plan) -> Tensor:
    """((1/√K) Σ_k T_k) v with T_k the softmax of A_k over the keys that the plan allows."""
    t_bkss = masked_softmax(affinities(p_bksh), plan.dense[:, None])
    return t_bkss.sum(dim=1) @ v_bsd / math.sqrt(p_bksh.shape[1])


def alignment(p_bksh: Tensor) -> Tensor:
    """r_{ℓ,k} = ‖p_{k,ℓ}‖: (B, S, K)."""
    return torch.linalg.vector_norm(p_bksh, dim=-1).transpose(1, 2)


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
    if total > 0:
        bias -= rate * (counts_k / total - 1 / len(counts_k)).to(bias.dtype)


def max_violation(counts: Tensor) -> Tensor:
    """MaxVio = K·max_k N_k/N − 1 over the last dimension; 0 is perfect balance, K−1 one chunk for all."""
    total = counts.sum(dim=-1).clamp(min=1)
    return counts.shape[-1] * counts.amax(dim=-1) / total - 1
