"""The network of every kind: a Qwen3-style backbone, its streams and its chunking stage.

B batch   L positions   S slots (L, or 2L for z ⊕ x)   d hidden size   V vocabulary   K chunks
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcdm.config import NUM_SPECIALS, ModelConfig
from dcdm.model import masks, routing
from dcdm.model.attention import Plan, attend, rotary_tables, rotate
from dcdm.model.chunking import ChunkingAttention
from dcdm.model.masks import Slots
from dcdm.model.moe import Experts, SparseMoE, SwiGLU

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
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x_bsd: Tensor, rotary: Rotary, plan: Plan) -> Tensor:
        q_bhsd = rotate(self.q_norm(self._heads(self.q_proj(x_bsd))), rotary)
        k_bgsd = rotate(self.k_norm(self._heads(self.k_proj(x_bsd))), rotary)
        v_bgsd = self._heads(self.v_proj(x_bsd))
        return self.o_proj(attend(q_bhsd, k_bgsd, v_bgsd, plan).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and MLP: the hidden state and, for a mixture, its router logits (B, S, E)."""

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

    def forward(self, h_bsd: Tensor, rotary: Rotary, plan: Plan) -> tuple[Tensor, Tensor | None]:
        h_bsd = h_bsd + self.self_attn(self.input_layernorm(h_bsd), rotary, plan)
        y_bsd, gate_logits = self.mlp(self.post_attention_layernorm(h_bsd))
        return h_bsd + y_bsd, gate_logits


@dataclass(frozen=True)
class Sets:
    """Which positions are padding, always visible (BOS and prompt) or free to be masked; each (B, L) bool."""

    real: Tensor
    visible: Tensor
    free: Tensor


@dataclass(frozen=True)
class Encoded:
    """Final states of the noisy stream and what was decided on the way to them."""

    states: Tensor
    """(B, L, d), normed: input of the head."""
    chunk_ids: Tensor | None
    """(B, L): −1 padding, 0 always visible (never so in the paper's routing), 1…K; None for AR."""
    router_scores: Tensor | None
    """r (B, L, K) of the noisy stream, with gradient; None for kinds without chunking attention."""
    gate_logits: list[Tensor]
    """Router logits (B, S, E) of each mixture layer."""


@dataclass(frozen=True)
class Output:
    logits: Tensor
    """(B, L, V) of the noisy stream, SUBS applied; AR: raw, position ℓ predicting ℓ+1."""
    chunk_ids: Tensor | None
    router_scores: Tensor | None


class Model(nn.Module):
    """AR, MDLM, BDLM or DCDM, as its `config` says."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.chunking = ChunkingAttention(config) if config.kind == "dcdm" else None
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = (
            None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Every initial value of the model."""
        std = self.config.init_std
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(std=std, generator=generator)
            elif isinstance(module, nn.RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, Experts):
                module.gate_up_proj.normal_(std=std, generator=generator)
                module.down_proj.normal_(std=std, generator=generator)
        if self.chunking is not None:
            self.chunking.mu.normal_(std=std, generator=generator)
            self.chunking.o_proj.weight.normal_(std=self.config.chunk_out_init_std, generator=generator)
            self.chunking.balance_bias.zero_()

    def forward(
        self,
        tokens: Tensor,
        masked: Tensor | None = None,
        *,
        prompt: Tensor | None = None,
        chunk_ids: Tensor | None = None,
        index: Tensor | None = None,
    ) -> Output:
        """Predict `tokens` (B, L), clean ids, where `masked` (B, L) hides them.

        BOS and the positions in `prompt` (bool) are always visible and may not be masked; PAD is ignored.
        `chunk_ids` replaces the model's own partition. `index` (B,) numbers the sequences for random routing.
        """
        encoded = self.encode(tokens, masked, prompt=prompt, chunk_ids=chunk_ids, index=index)
        logits = self.head(encoded.states)
        if self.config.kind != "ar":
            assert masked is not None
            logits = substitute(logits, tokens, masked)
        return Output(logits, encoded.chunk_ids, encoded.router_scores)

    def encode(
        self,
        tokens: Tensor,
        masked: Tensor | None = None,
        *,
        prompt: Tensor | None = None,
        chunk_ids: Tensor | None = None,
        index: Tensor | None = None,
    ) -> Encoded:
        """`forward` without the head."""
        sets = self.sets(tokens, prompt)
        if self.config.kind == "ar":
            plan = Plan(masks.causal, Slots.of(torch.where(sets.real, 0, -1)))
            h_bsd, _, gates = self._run(self.embed_tokens(tokens), plan)
            return Encoded(self.norm(h_bsd), None, None, gates)
        masked = self._checked(tokens, masked, sets)
        noisy = tokens.masked_fill(masked, self.config.mask_id)
        streams = torch.cat([noisy, tokens])  # z and x, stacked in the batch while they run apart
        r: Tensor | None
        if self.config.routes_from_noise:
            h, r, gates = self._stage_1(streams, masked.repeat(2, 1), sets.real.repeat(2, 1))
            r = _streams_side_by_side(r)[:, : tokens.shape[1]]
            ids = self._assign(r, sets.real) if chunk_ids is None else chunk_ids
            plan = Plan(masks.dual_stream, masks.dual_stream_slots(ids))
            gates = [_streams_side_by_side(g) for g in gates]
            h_bsd, _, more = self._run(_streams_side_by_side(h), plan, first=1)
            gates = gates + more
        else:
            ids = self.partition(tokens, prompt, index).ids if chunk_ids is None else chunk_ids
            plan = Plan(masks.dual_stream, masks.dual_stream_slots(ids))
            h_bsd, r, gates = self._run(_streams_side_by_side(self.embed_tokens(streams)), plan)
            r = None if r is None else r[:, : tokens.shape[1]]
        return Encoded(self.norm(h_bsd[:, : tokens.shape[1]]), ids, r, gates)

    def denoise(self, z: Tensor, ids: Tensor) -> Tensor:
        """One stream, as in decoding: final states (B, L, d) of `z`, which holds MASK where nothing is known.

        `ids` orders the positions: a position sees those whose id is not larger than its own. The states are
        meaningful where everything in earlier chunks is revealed, and equal the training pass's there.
        """
        real = ids >= 0
        if self.config.kind == "ar":
            plan = Plan(masks.causal, Slots.of(torch.where(real, 0, -1)))
            return self.norm(self._run(self.embed_tokens(z), plan)[0])
        plan = Plan(masks.chunk_causal, Slots.of(ids))
        if self.config.routes_from_noise:
            h_bld, _, _ = self._stage_1(z, z == self.config.mask_id, real)
            h_bld, _, _ = self._run(h_bld, plan, first=1)
        else:
            h_bld, _, _ = self._run(self.embed_tokens(z), plan)
        return self.norm(h_bld)

    def head(self, states: Tensor) -> Tensor:
        """Logits (…, V) of final states; diffusion kinds never predict BOS, PAD or MASK."""
        logits = self.token_logits(states)
        if self.config.kind == "ar":
            return logits
        return F.pad(logits, (0, NUM_SPECIALS), value=-torch.inf)

    def token_logits(self, states: Tensor) -> Tensor:
        """Logits of the tokens that can be predicted: (…, V) for AR, (…, V−3) for diffusion kinds."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        if self.config.kind != "ar":
            weight = weight[:-NUM_SPECIALS]
        return F.linear(states, weight)

    def sets(self, tokens: Tensor, prompt: Tensor | None = None) -> Sets:
        """Padding, always-visible and free positions of `tokens` (B, L)."""
        if tokens.ndim != 2 or tokens.shape[1] < 1:
            raise ValueError(f"tokens must have the shape (batch, length), got {tuple(tokens.shape)}")
        if tokens.shape[1] > self.config.max_position:
            raise ValueError(
                f"length {tokens.shape[1]} exceeds max_position={self.config.max_position}; shorten the input"
            )
        real = tokens != self.config.pad_id
        visible = tokens == self.config.bos_id
        if prompt is not None:
            visible = visible | (prompt & real)
        if self.config.kind == "ar":  # nothing comes before position 0 to predict it from
            visible = visible | (real & (torch.arange(tokens.shape[1], device=tokens.device) == 0))
        return Sets(real, visible, real & ~visible)

    def partition(self, tokens: Tensor, prompt: Tensor | None = None, index: Tensor | None = None) -> Partition:
        """Chunk ids of clean tokens, for every diffusion kind whose ids do not depend on noise."""
        if self.config.kind == "ar" or self.config.routes_from_noise:
            raise ValueError("AR has no chunks, and the paper's routing has none without noise: call the model")
        sets = self.sets(tokens, prompt)
        if self.config.kind != "dcdm" or self.config.routing != "causal":
            return Partition(routing.fixed_partition(self.config, sets.free, sets.real, index), None)

        def router(revealed: Tensor) -> Tensor:
            return self.router_scores(tokens.masked_fill(~revealed, self.config.mask_id), sets.real)

        return Partition(*routing.causal_partition(router, sets.free, sets.real, self.config))

    def router_scores(self, z: Tensor, real: Tensor) -> Tensor:
        """r (B, L, K) of `z`, in which MASK hides what is not revealed: block 0 under M^noise, then μ."""
        assert self.chunking is not None
        h_bld, _, _ = self._block_0(z, z == self.config.mask_id, real)
        return self.chunking.scores(h_bld)

    def _assign(self, r_blk: Tensor, real: Tensor) -> Tensor:
        assert self.chunking is not None
        return torch.where(real, self.chunking.assign(r_blk), -1)

    def _block_0(self, z: Tensor, masked: Tensor, real: Tensor) -> tuple[Tensor, Plan, list[Tensor]]:
        plan = Plan(masks.noise, Slots.of(torch.where(real, 0, -1), masked))
        h_bld = self.embed_tokens(z)
        h_bld, gate = self.layers[0](h_bld, self._rotary(plan, h_bld), plan)
        return h_bld, plan, [] if gate is None else [gate]

    def _stage_1(self, z: Tensor, masked: Tensor, real: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Block 0 and the chunking attention on one stream under M^noise."""
        assert self.chunking is not None
        h_bld, plan, gates = self._block_0(z, masked, real)
        h_bld, r_blk = self.chunking(h_bld, plan)
        return h_bld, r_blk, gates

    def _run(self, h_bsd: Tensor, plan: Plan, first: int = 0) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Blocks `first`… under one plan, the chunking attention after block 0 where the model has one."""
        rotary = self._rotary(plan, h_bsd)
        r_bsk, gates = None, []
        for number, layer in enumerate(self.layers[first:], first):
            h_bsd, gate = layer(h_bsd, rotary, plan)
            if gate is not None:
                gates.append(gate)
            if number == 0 and self.chunking is not None:
                h_bsd, r_bsk = self.chunking(h_bsd, plan)
        return h_bsd, r_bsk, gates

    def _rotary(self, plan: Plan, h: Tensor) -> Rotary:
        return rotary_tables(plan.slots.position, self.config.head_dim, self.config.rope_theta, h.dtype)

    def _checked(self, tokens: Tensor, masked: Tensor | None, sets: Sets) -> Tensor:
        if masked is None:
            raise ValueError(f"a {self.config.kind} model needs `masked`: which positions are hidden, (B, L) bool")
        if masked.shape != tokens.shape or masked.dtype != torch.bool:
            raise ValueError(
                f"masked must be bool of the shape {tuple(tokens.shape)}, got {masked.dtype} {tuple(masked.shape)}"
            )
        problem = "masked may not cover BOS, prompt or PAD positions: they are always visible"
        outside = (masked & ~sets.free).any()
        if outside.device.type != "cpu":
            torch._assert_async(~outside, problem)  # no host sync
        elif outside:
            raise ValueError(problem)
        return masked


@dataclass(frozen=True)
class Partition:
    ids: Tensor
    """(B, L)."""
    scores: Tensor | None
    """The router's scores (B, L, K) that decided each position's chunk; None where no router did."""


def substitute(logits: Tensor, tokens: Tensor, masked: Tensor) -> Tensor:
    """SUBS: a visible token is carried over, its distribution a point mass."""
    carried = torch.full_like(logits, -torch.inf).scatter_(-1, tokens[..., None], 0.0)
    return torch.where(masked[..., None], logits, carried)


def _streams_side_by_side(x: Tensor) -> Tensor:
    """(2B, L, …) with z before x to (B, 2L, …)."""
    return torch.cat(x.chunk(2), dim=1)


def build(
    config: ModelConfig,
    *,
    seed: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Model:
    """A freshly initialised model. Without `seed`, PyTorch's global generator gives the weights."""
    with torch.device("meta"):
        model = Model(config).to(dtype)
    model.to_empty(device=device)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    model.init_weights(generator)
    return model


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """(total, active per token), counted on the meta device."""
    with torch.device("meta"):
        model = Model(config)
    total = sum(p.numel() for p in model.parameters())
    if config.moe is None:
        return total, total
    idle = config.moe.num_experts - config.moe.experts_per_token
    per_expert = 3 * config.hidden_size * config.moe.expert_size
    return total, total - config.num_layers * idle * per_expert
