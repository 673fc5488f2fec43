"""Attention under the masks of `masks.py`. The only module that knows kernels.

B batch   H query heads   G key/value heads   Q, S query and key slots   D head size
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dcdm.model.masks import Mask, Slots


@dataclass(frozen=True)
class Plan:
    """A mask over given slots: what the attention layers of one pass share."""

    mask: Mask
    slots: Slots

    @cached_property
    def dense(self) -> Tensor:
        """(B, Q, S) bool."""
        return self.mask.dense(self.slots)


def masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the last dimension where `allowed`; a row that may attend to nothing gives zeros."""
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1) * allowed


def attend(q_bhqd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, plan: Plan) -> Tensor:
    """Scaled dot-product attention under `plan`, grouped queries included: (B, H, Q, D)."""
    groups = q_bhqd.shape[1] // k_bgsd.shape[1]
    k_bhsd = k_bgsd.repeat_interleave(groups, dim=1)
    v_bhsd = v_bgsd.repeat_interleave(groups, dim=1)
    scores_bhqs = q_bhqd @ k_bhsd.transpose(-1, -2) / math.sqrt(q_bhqd.shape[-1])
    return masked_softmax(scores_bhqs, plan.dense[:, None]) @ v_bhsd


def rotary_tables(position: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE for positions (B, S): two tensors (B, 1, S, D)."""
    precision = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, device=position.device, dtype=precision) / head_dim
    angle = position[:, None, :, None].to(precision) * (1.0 / theta**exponent)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_bhsd: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE in the half-split convention of Qwen and Llama."""
    cos, sin = tables
    first, second = x_bhsd.chunk(2, dim=-1)
    return x_bhsd * cos + torch.cat([-second, first], dim=-1) * sin
