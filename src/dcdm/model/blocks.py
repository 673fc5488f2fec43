"""A decoder block: grouped-query attention and an MLP, in the style of Qwen3.

B batch   Q, S query and key slots   d hidden size   H query heads   G key/value heads   D head size   E experts
"""

from __future__ import annotations

from torch import Tensor, nn

from dcdm.config import ModelConfig
from dcdm.model.attention import Ready, attend, rotate
from dcdm.model.moe import SparseMoE, SwiGLU

Rotary = tuple[Tensor, Tensor]


class SelfAttention(nn.Module):
    """Grouped-query attention with per-head RMSNorm on queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, self.head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(d, config.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(d, config.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(d, config.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * self.head_dim, d, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def queries(self, x_bsd: Tensor) -> Tensor:
        """(B, S, H, D), normed, without RoPE."""
        return self.q_norm(self._heads(self.q_proj(x_bsd)))

    def keys(self, x_bsd: Tensor) -> Tensor:
        """(B, S, G, D), normed, without RoPE."""
        return self.k_norm(self._heads(self.k_proj(x_bsd)))

    def values(self, x_bsd: Tensor) -> Tensor:
        return self._heads(self.v_proj(x_bsd))

    def forward(self, x_bsd: Tensor, rotary: Rotary, ready: Ready) -> Tensor:
        """The first `ready.num_queries` slots attend to all: (B, Q, d)."""
        n = ready.num_queries
        q_bqhd = rotate(self.queries(x_bsd[:, :n]), (rotary[0][:, :n], rotary[1][:, :n]))
        k_bsgd = rotate(self.keys(x_bsd), rotary)
        return self.o_proj(attend(q_bqhd, k_bsgd, self.values(x_bsd), ready).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and MLP: the hidden state and, for a mixture, its router logits (B, Q, E)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp: nn.Module
        if config.moe is not None:
            self.mlp = SparseMoE(config.hidden_size, config.moe)
        else:
            assert config.intermediate_size is not None
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, h_bsd: Tensor, rotary: Rotary, ready: Ready) -> tuple[Tensor, Tensor | None]:
        attended_bqd = self.self_attn(self.input_layernorm(h_bsd), rotary, ready)
        h_bqd = h_bsd[:, : ready.num_queries] + attended_bqd
        y_bqd, gate_logits = self.mlp(self.post_attention_layernorm(h_bqd))
        return h_bqd + y_bqd, gate_logits
