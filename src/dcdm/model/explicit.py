"""Attention written out: explicit softmax over dense masks, K of them for the chunking attention.

What `reference.py` is made of, and the backend "reference" of the production path.

    B batch   H query heads   G key/value heads   Q, S query and key slots   D head size
    d hidden size   K chunks   h subspace dimension
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the last dimension where `allowed`; a row that may attend to nothing gives zeros."""
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1) * allowed


def attend(q_bhqd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, allowed_bqs: Tensor) -> Tensor:
    """Scaled dot-product attention under a dense mask, grouped queries included: (B, H, Q, D)."""
    groups = q_bhqd.shape[1] // k_bgsd.shape[1]
    k_bhsd = k_bgsd.repeat_interleave(groups, dim=1)
    v_bhsd = v_bgsd.repeat_interleave(groups, dim=1)
    scores_bhqs = q_bhqd @ k_bhsd.transpose(-1, -2) / math.sqrt(q_bhqd.shape[-1])
    return masked_softmax(scores_bhqs, allowed_bqs[:, None]) @ v_bhsd


def affinities(p_bksh: Tensor) -> Tensor:
    """A_k[ℓ,m] = p_{k,ℓ}·p_{k,m}/√h: (B, K, S, S)."""
    return p_bksh @ p_bksh.transpose(-1, -2) / math.sqrt(p_bksh.shape[-1])


def subspace_mixture(p_bksh: Tensor, v_bsd: Tensor, allowed_bss: Tensor) -> Tensor:
    """((1/√K) Σ_k T_k) v with T_k the softmax of A_k over the allowed keys: (B, S, d)."""
    t_bkss = masked_softmax(affinities(p_bksh), allowed_bss[:, None])
    return t_bkss.sum(dim=1) @ v_bsd / math.sqrt(p_bksh.shape[1])
