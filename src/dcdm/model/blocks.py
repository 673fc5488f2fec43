"""A decoder block: grouped-query attention and an MLP in the style of Qwen3, or a mixture of experts.

Settings make it a block of Qwen2 (biases, no norms of queries and keys) or of Llama (neither).

The mixture is that of Qwen2-MoE, dropless. That matters beyond quality: dropping tokens by capacity would couple
tokens across chunks and leak.

    B batch   Q, S query and key slots   d hidden size   H query heads   G key/value heads   D head size
    T tokens   E experts   k experts per token   f expert size
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcdm.config import ModelConfig, MoEConfig
from dcdm.model.attention import AttentionInputs, attend, rotate
from dcdm.model.products import Linear, at_least_fp32, product_type, products_of

Rotary = tuple[Tensor, Tensor]


class HeadNorm(nn.RMSNorm):
    """RMSNorm in one type: under autocast heads are bf16 and its weights fp32, which no fused kernel takes."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        return F.rms_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps).to(x.dtype)


class SelfAttention(nn.Module):
    """Grouped-query attention, with per-head RMSNorm on queries and keys where the settings say so."""

    TOGETHER = ("q_proj", "k_proj", "v_proj")
    """Products with the same states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, self.head_dim = config.hidden_size, config.head_dim
        biased = config.attention_bias
        self.q_proj = Linear(d, config.num_heads * self.head_dim, bias=biased)
        self.k_proj = Linear(d, config.num_kv_heads * self.head_dim, bias=biased)
        self.v_proj = Linear(d, config.num_kv_heads * self.head_dim, bias=biased)
        self.o_proj = Linear(config.num_heads * self.head_dim, d, bias=False)
        self.q_norm, self.k_norm = (
            HeadNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def queries(self, x_bsd: Tensor) -> Tensor:
        """(B, S, H, D), without RoPE."""
        return self.q_norm(self._heads(self.q_proj(x_bsd)))

    def keys(self, x_bsd: Tensor) -> Tensor:
        """(B, S, G, D), without RoPE."""
        return self.k_norm(self._heads(self.k_proj(x_bsd)))

    def values(self, x_bsd: Tensor) -> Tensor:
        return self._heads(self.v_proj(x_bsd))

    def forward(self, x_bsd: Tensor, rotary: Rotary, inputs: AttentionInputs) -> Tensor:
        """The first `inputs.num_queries` slots attend to all: (B, Q, d)."""
        n = inputs.num_queries
        if n == x_bsd.shape[1]:
            q, k, v = products_of(x_bsd, self.q_proj, self.k_proj, self.v_proj)
        else:
            q, k, v = self.q_proj(x_bsd[:, :n]), self.k_proj(x_bsd), self.v_proj(x_bsd)
        q_bqhd = rotate(self.q_norm(self._heads(q)), (rotary[0][:, :n], rotary[1][:, :n]))
        k_bsgd = rotate(self.k_norm(self._heads(k)), rotary)
        return self.o_proj(attend(q_bqhd, k_bsgd, self._heads(v), inputs).flatten(2))


class SwiGLU(nn.Module):
    TOGETHER = ("gate_proj", "up_proj")

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        gate, up = products_of(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up), None


class Experts(nn.Module):
    """E SwiGLU experts, their weights stacked as in `transformers`."""

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * config.expert_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, hidden_size, config.expert_size))

    def forward(self, x_td: Tensor, expert_tk: Tensor, weight_tk: Tensor) -> Tensor:
        """Σ_k weight · expert(x). An expert that nobody chose costs nothing."""
        run = self.grouped if grouped_helps(x_td) else self.one_by_one
        return run(x_td, expert_tk, weight_tk)

    def one_by_one(self, x_td: Tensor, expert_tk: Tensor, weight_tk: Tensor) -> Tensor:
        """A loop over experts."""
        out_td = torch.zeros_like(x_td)
        for expert in range(len(self.gate_up_proj)):
            token, choice = (expert_tk == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x_td[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down_proj[expert])
            out_td = out_td.index_add(0, token, y * weight_tk[token, choice, None])
        return out_td

    def grouped(self, x_td: Tensor, expert_tk: Tensor, weight_tk: Tensor) -> Tensor:
        """Grouped matrix products over the choices sorted by expert: no host sync, static shapes."""
        dtype = product_type(x_td)
        order = expert_tk.flatten().argsort(stable=True)
        token = order // expert_tk.shape[1]
        chosen_te = expert_tk.flatten()[:, None] == torch.arange(len(self.gate_up_proj), device=x_td.device)
        ends = chosen_te.sum(dim=0).cumsum(0).to(torch.int32)  # bincount would wait for its largest number
        gate_up, down = self.gate_up_proj.to(dtype).transpose(1, 2), self.down_proj.to(dtype).transpose(1, 2)
        gate, up = F.grouped_mm(x_td[token].to(dtype), gate_up, offs=ends).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, down, offs=ends).to(x_td.dtype)
        return torch.zeros_like(x_td).index_add(0, token, y * weight_tk.flatten()[order, None])


def grouped_helps(x_td: Tensor) -> bool:
    """On a GPU grouped products save launches; on the CPU they beat the loop by 1.6 in fp32.

    Elsewhere they are not to be had: not in float64, and on the CPU neither compiled nor in other types.
    """
    dtype = product_type(x_td)
    if x_td.device.type == "cuda":
        return dtype != torch.float64
    return x_td.device.type == "cpu" and dtype == torch.float32 and not torch.compiler.is_compiling()


class SparseMoE(nn.Module):
    """Softmax over all experts, top-k weights not renormalised, and a shared expert behind a sigmoid gate."""

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.gate = nn.Linear(hidden_size, config.num_experts, bias=False)
        self.experts = Experts(hidden_size, config)
        self.shared_expert = SwiGLU(hidden_size, config.shared_size)
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the router's logits (…, E)."""
        x_td = x.reshape(-1, x.shape[-1])
        logits_te = self.gate(x_td)
        weight_tk, expert_tk = logits_te.softmax(dim=-1, dtype=at_least_fp32(x)).topk(self.experts_per_token)
        routed_td = self.experts(x_td, expert_tk, weight_tk.to(x.dtype))
        shared_td = self.shared_expert_gate(x_td).sigmoid() * self.shared_expert(x_td)[0]
        return (routed_td + shared_td).view_as(x), logits_te.reshape(*x.shape[:-1], -1)


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

    def forward(self, h_bsd: Tensor, rotary: Rotary, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        attended_bqd = self.self_attn(self.input_layernorm(h_bsd), rotary, inputs)
        h_bqd = h_bsd[:, : inputs.num_queries] + attended_bqd
        y_bqd, gate_logits = self.mlp(self.post_attention_layernorm(h_bqd))
        return h_bqd + y_bqd, gate_logits


class Gates(NamedTuple):
    """What a mixture layer's router said."""

    logits: Tensor
    """(B, Q, E)."""
    counted: Tensor
    """(B, Q) bool: slots that are computed, padding left out."""


def load_balancing_loss(
    gates: list[Gates], experts_per_token: int, total: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor:
    """E · Σ_{choice, e} (share of tokens whose choice-th expert is e) · (mean probability of e).

    Tokens of all layers count alike. `total` sums over ranks; then this is the rank's share of the loss over all of
    their tokens.
    """
    counted_t1 = torch.cat([gate.counted.flatten() for gate in gates])[:, None]
    logits_te = torch.cat([gate.logits.flatten(0, 1) for gate in gates])
    probability = logits_te.softmax(dim=-1, dtype=at_least_fp32(logits_te)) * counted_t1
    number, num_experts = total(counted_t1.sum().to(probability)), probability.shape[-1]
    chosen = F.one_hot(logits_te.topk(experts_per_token).indices, num_experts) * counted_t1[..., None]
    chosen = chosen.to(probability.dtype)
    return num_experts * (total(chosen.sum(0)) / number * probability.sum(0) / number).sum()
