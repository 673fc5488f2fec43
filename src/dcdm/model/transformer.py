"""The network of every kind: a Qwen3-style backbone, its streams and its chunking stage.

B batch   L positions   S slots (L, or 2L for z ⊕ x)   d hidden size   V vocabulary   K chunks
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dcdm.config import NUM_SPECIALS, ModelConfig, ObjectiveConfig
from dcdm.model import layout, masks, routing
from dcdm.model.attention import AttentionPlan, Backend, choose_backend, rotary_tables
from dcdm.model.blocks import Block, Experts, Gates, Rotary
from dcdm.model.cache import KVCache
from dcdm.model.chunking import ChunkingAttention
from dcdm.model.kernels import Kernels
from dcdm.model.masks import Slots, there
from dcdm.model.packing import PackedEmbedding, PackedLinear
from dcdm.model.products import Linear, product
from dcdm.model.routing import IncrementalRouter


@dataclass(frozen=True)
class PositionMasks:
    """Which positions are padding, always visible (BOS and prompt) or free to be masked; each (B, L) bool."""

    real: Tensor
    visible: Tensor
    free: Tensor


@dataclass(frozen=True)
class Encoded:
    """Final states of the noisy stream and what was decided on the way to them."""

    states: Tensor
    """(B, L, d), normed: input of the head. Only masked positions are meaningful (AR: all)."""
    chunk_ids: Tensor | None
    """(B, L): −1 padding, 0 always visible (never so in the paper's routing), 1…K; None for AR."""
    router_scores: Tensor | None
    """r (B, L, K) of the noisy stream, with gradient; None for kinds without chunking attention, 0 at positions
    of chunk 0."""
    gates: list[Gates]
    """Of each mixture layer."""

    @property
    def gate_logits(self) -> list[Tensor]:
        """(T, E) at the slots that are computed, padding left out."""
        return [gate.logits[gate.counted] for gate in self.gates]


@dataclass(frozen=True)
class Output:
    logits: Tensor
    """(B, L, V) of the noisy stream, SUBS applied; AR: raw, position ℓ predicting ℓ+1."""
    chunk_ids: Tensor | None
    router_scores: Tensor | None


@dataclass(frozen=True)
class BlockZero:
    """Block 0 of a canvas under M^noise: what the paper's routing looks at, and where the next forward starts."""

    chunking: ChunkingAttention
    place: layout.Layout
    plan: AttentionPlan
    states: Tensor
    """(B, S, d) in the order of `place`."""
    gates: list[Gates]

    @property
    def scores(self) -> Tensor:
        """r (B, L, K)."""
        return self.place.restore(self.chunking.scores(self.states))


class Model(nn.Module):
    """AR, MDLM, BDLM or DCDM, as its `config` says; `dcdm.lanes` has a subclass that predicts from the left."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backend = "auto"
        self.activation_checkpointing = False
        self.kernels: Kernels | None = None
        """Compiled blocks for decoding, if there are any: see `kernels.prepare`."""
        self.kernels_sought = 0
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.objective = ObjectiveConfig()
        """What `dcdm.loss` takes unless it is told otherwise."""
        self.chunking: ChunkingAttention | None = None
        if config.has_chunking:
            assert config.num_chunks is not None
            assert config.chunk_dim is not None
            self.chunking = ChunkingAttention(
                config.hidden_size, config.num_chunks, config.chunk_dim,
                norm_eps=config.norm_eps, init_std=config.init_std, out_init_std=config.chunk_out_init_std,
            )  # fmt: skip
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Every initial value of the model."""
        std = self.config.init_std
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(std=std, generator=generator)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, Experts):
                module.gate_up_proj.normal_(std=std, generator=generator)
                module.down_proj.normal_(std=std, generator=generator)
        if self.chunking is not None:
            self.chunking.reset_parameters(generator)

    def compile_blocks(self) -> None:
        """Compile every block by itself, without graph breaks; lengths may vary from batch to batch."""
        for layer in self.layers:
            layer.compile(fullgraph=True, dynamic=self._backend() != "flex" or None)

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
        """`forward` without the head: the pass of training, which diffusion kinds run over z ⊕ x.

        Decoding runs one stream: `denoise`, or `extend` with a cache. Tokens may be in main memory: what follows
        from them alone is then worked out there, and no value is read from the device.
        """
        positions = self.position_masks(tokens, prompt)
        if self.config.kind == "ar":
            h_bld, _, gates = self._run(self.embed(tokens), self._causal_plan(positions.real))
            return Encoded(self.norm(h_bld), None, None, gates)
        masked = self._checked(tokens, masked, positions)
        if self.config.routes_from_noise:
            return self._encode_from_noise(tokens, masked, positions, chunk_ids)
        ids = self.partition(tokens, prompt, index).ids if chunk_ids is None else chunk_ids
        noisy = tokens.masked_fill(masked, self.config.mask_id)
        place = layout.dual_stream(ids, masked, compact=self._compact)
        plan = self._plan(masks.dual_stream, place.slots)
        h_bsd = self.embed(place.gather(torch.cat([noisy, tokens], dim=1)))
        # with shift a clean token predicts the first one of the next block
        h_bqd, r, gates = self._run(h_bsd, plan, num_out=None if self.config.shift else place.num_noisy)
        states = self._restored(place, h_bqd, ids)
        return Encoded(states, ids, None if r is None else place.restore(r[:, : place.num_noisy]), gates)

    def _encode_from_noise(
        self, tokens: Tensor, masked: Tensor, positions: PositionMasks, chunk_ids: Tensor | None
    ) -> Encoded:
        """The paper's two stages; in the first the streams run apart, stacked in the batch."""
        streams = torch.cat([tokens.masked_fill(masked, self.config.mask_id), tokens])
        block_zero = self.run_block_zero(streams, positions.real.repeat(2, 1), masked.repeat(2, 1))
        h, r = self._chunking_attention(block_zero)
        r_blk = r.chunk(2)[0]
        if chunk_ids is None:
            chunk_ids = torch.where(there(positions.real, r.device), block_zero.chunking.assign(r_blk), -1)
        place = layout.dual_stream(chunk_ids, there(masked, chunk_ids.device), compact=self._compact)
        h_bsd = place.gather(torch.cat(h.chunk(2), dim=1))
        plan = self._plan(masks.dual_stream, place.slots)
        h_bqd, _, more = self._run(h_bsd, plan, first=1, num_out=place.num_noisy)
        return Encoded(place.restore(self.norm(h_bqd)), chunk_ids, r_blk, block_zero.gates + more)

    def denoise(self, z: Tensor, ids: Tensor, block_zero: BlockZero | None = None) -> Tensor:
        """One stream, as in decoding: final states (B, L, d) of `z`, which holds MASK where nothing is known.

        `ids` orders the positions: a position sees those whose id is not larger than its own. The states are
        meaningful where everything in earlier chunks is revealed, and equal the training pass's there. `block_zero`
        is what the paper's routing has computed of the same `z` already.
        """
        real = ids >= 0
        if self.config.kind == "ar":
            return self.norm(self._run(self.embed(z), self._causal_plan(real))[0])
        masked = z == self.config.mask_id
        place = layout.chunk_sorted(ids, masked, compact=self._compact)
        plan = self._plan(masks.chunk_causal, place.slots)
        if self.config.routes_from_noise:
            block_zero = self.run_block_zero(z, real, compact=self._compact) if block_zero is None else block_zero
            h_bld, _ = self._chunking_attention(block_zero)
            h_bld, _, _ = self._run(place.gather(h_bld), plan, first=1)
        else:
            h_bld, _, _ = self._run(self.embed(place.gather(z)), plan)
        return self._restored(place, h_bld, ids, streams=1)

    def _restored(self, place: layout.Layout, h_bsd: Tensor, ids: Tensor, streams: int = 2) -> Tensor:
        """The states that predict each position (B, L)."""
        if not self.config.shift:
            return place.restore(self.norm(h_bsd))
        return place.restore_from(self.norm(h_bsd), routing.predicting_rows(ids) % (streams * ids.shape[1]))

    def extend(
        self, tokens: Tensor, slots: Slots, keep: Tensor, cache: KVCache, num_out: int, rows: Tensor | None = None
    ) -> Tensor:
        """New slots (B, Q) against what `cache` holds of earlier ones: final states of the first `num_out`.

        They belong to the `rows` (B,) of the cache, ascending; by default to all of them.

        Where the ids of `slots` order the positions as in `denoise`, so do the states equal those of `denoise`.
        Slots in `keep` stay in the cache: only such belong there whose states cannot change any more. (With the
        paper's routing there are none; keeping them anyway is the approximation named "frozen".)
        """
        cache.place(slots, keep, rows)
        routed = cache.allowed(self.decoding_mask)
        first = cache.allowed(masks.noise) if self.config.routes_from_noise else routed
        h_bqd = self.embed_tokens(tokens)
        rotary = rotary_tables(slots.position, self.config, h_bqd.dtype)
        fast = None if self.kernels is None else self.kernels.for_pass(tokens, cache)
        for number, (layer, own) in enumerate(zip(self.layers, cache.layers, strict=True)):
            routes = number == 0 and self.chunking is not None
            if fast is not None and not routes:
                h_bqd = fast(number, h_bqd, rotary, None if routed is None else routed.bias)
                break
            is_last = number == len(self.layers) - 1 and not routes
            inputs = own.inputs(first if number == 0 else routed, num_out if is_last else tokens.shape[1])
            h_bqd, _ = layer(h_bqd, rotary, inputs)
            if routes:
                assert self.chunking is not None
                assert cache.chunking is not None
                h_bqd = self.chunking.extend(h_bqd, cache.chunking, None if first is None else first.allowed)
        return self.norm(h_bqd[:, :num_out])

    @property
    def decoding_mask(self) -> masks.Mask:
        """Who sees whom in `extend`."""
        return masks.chunk_causal

    def new_cache(self, rows: int = 0, capacity: int = 0) -> KVCache:
        """An empty cache for `extend`, to which rows can be added."""
        return KVCache(self.config, self.norm.weight, rows, capacity)

    def head(self, states: Tensor) -> Tensor:
        """Logits (…, V) of final states; diffusion kinds never predict BOS, PAD or MASK."""
        logits = self.token_logits(states)
        if self.config.predicts_specials:
            return logits
        return F.pad(logits, (0, NUM_SPECIALS), value=-torch.inf)

    def token_logits(self, states: Tensor) -> Tensor:
        """Logits of the tokens that can be predicted: (…, V) for AR, (…, V−3) where specials cannot be."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        if self.kernels is not None and states.numel() == states.shape[-1] and not torch.is_grad_enabled():
            logits = self.kernels.logits(states)[..., : None if self.config.predicts_specials else -NUM_SPECIALS]
        elif isinstance(head, PackedEmbedding | PackedLinear):
            assert head.matrix is not None
            logits = head.matrix(states)[..., : None if self.config.predicts_specials else -NUM_SPECIALS]
        else:
            logits = product(states, self.head_weight())
        if self.config.hidden_token is not None:
            logits[..., self.config.hidden_token] = -torch.inf
        return logits

    @property
    def weights_type(self) -> str:
        """As reports name it."""
        packed = isinstance(self.embed_tokens, PackedEmbedding)
        return "int8" if packed else str(self.norm.weight.dtype).removeprefix("torch.")

    def head_weight(self) -> Tensor:
        """The head's rows of the tokens that can be predicted."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return weight if self.config.predicts_specials else weight[:-NUM_SPECIALS]

    def position_masks(self, tokens: Tensor, prompt: Tensor | None = None) -> PositionMasks:
        """Padding, always-visible and free positions of `tokens` (B, L)."""
        if tokens.ndim != 2 or tokens.shape[1] < 1:
            raise ValueError(f"tokens must have the shape (batch, length), got {tuple(tokens.shape)}")
        if tokens.shape[1] > self.config.max_position:
            raise ValueError(
                f"length {tokens.shape[1]} exceeds max_position={self.config.max_position}; shorten the input"
            )
        real, visible = tokens != self.config.pad_id, tokens == self.config.bos_id
        if self.config.prompts == "ordinary":
            real, visible = real & ~visible, torch.zeros_like(visible)
        if prompt is not None:
            visible = visible | (prompt & real)
        if self.config.kind == "ar":  # nothing comes before position 0 to predict it from
            visible = visible | (real & (torch.arange(tokens.shape[1], device=tokens.device) == 0))
        return PositionMasks(real, visible, real & ~visible)

    def partition(
        self,
        tokens: Tensor,
        prompt: Tensor | None = None,
        index: Tensor | None = None,
        lanes: int | Tensor | None = None,
    ) -> Partition:
        """Chunk ids of clean tokens, for every diffusion kind whose ids do not depend on noise.

        `lanes` is for models that write in lanes.
        """
        if self.config.kind == "ar" or self.config.routes_from_noise:
            raise ValueError("AR has no chunks, and the paper's routing has none without noise: call the model")
        positions, config = self.position_masks(tokens, prompt), self.config
        if config.kind != "dcdm" or config.routing != "causal" or config.prior_decides:
            return Partition(routing.fixed_partition(config, positions.free, positions.real, index), None)
        sizes = iter(routing.round_sizes(positions.free, positions.real, config))
        free, real, known = (there(x, self.device) for x in (positions.free, positions.real, tokens))
        with torch.no_grad():
            incremental = self.incremental_router(free)

            def router(new: Tensor) -> Tensor:
                most = next(sizes)
                incremental.reveal(new, known, most)
                return incremental.scores(most=most[1])

            ids, scores = routing.causal_partition(router, free, real, config)
        return Partition(ids.to(tokens.device), scores)

    def incremental_router(self, free: Tensor) -> IncrementalRouter:
        """The causal routing's scores, round by round, with the `free` positions (B, L) hidden at first."""
        assert self.chunking is not None
        return IncrementalRouter(self.config, self.embed_tokens, self.layers[0], self.chunking, free)  # type: ignore[arg-type]

    def run_block_zero(
        self, z: Tensor, real: Tensor, masked: Tensor | None = None, compact: bool = False
    ) -> BlockZero:
        """Block 0 of `z` (B, L) under M^noise, in which nobody sees what is `masked`: by default what is MASK."""
        assert self.chunking is not None
        masked = z == self.config.mask_id if masked is None else masked
        place = layout.visible_first(real, masked, compact)
        plan = self._plan(masks.noise, place.slots)
        h_bsd = self.embed(place.gather(z))
        return BlockZero(self.chunking, place, plan, *self._block(0, h_bsd, plan, self._rotary(plan, h_bsd)))

    def router_scores(self, z: Tensor, real: Tensor) -> Tensor:
        """r (B, L, K) of `z`, in which MASK hides what is not revealed: block 0 under M^noise, then μ."""
        return self.run_block_zero(z, real).scores

    def _chunking_attention(self, block_zero: BlockZero) -> tuple[Tensor, Tensor]:
        """The end of stage 1, the chunking attention: states (B, L, d) and r (B, L, K) in original order."""
        h_bsd, r_bsk = block_zero.chunking(block_zero.states, block_zero.plan)
        return block_zero.place.restore(h_bsd), block_zero.place.restore(r_bsk)

    def _run(
        self, h_bsd: Tensor, plan: AttentionPlan, first: int = 0, num_out: int | None = None
    ) -> tuple[Tensor, Tensor | None, list[Gates]]:
        """Blocks `first`… under one plan, the chunking attention after block 0 where the model has one.

        Only the first `num_out` slots leave the last block; of the others it needs keys and values alone.
        """
        r_bsk = None
        gates: list[Gates] = []
        rotary = self._rotary(plan, h_bsd)
        for number in range(first, len(self.layers)):
            is_last = number == len(self.layers) - 1
            routes = number == 0 and self.chunking is not None
            narrows = is_last and num_out is not None and not routes
            if narrows:
                assert num_out is not None
                plan = plan.narrow(num_out)  # of some rows clean slots are among them
            h_bsd, more = self._block(number, h_bsd, plan, rotary, noisy_only=narrows)
            gates += more
            if routes:
                assert self.chunking is not None
                h_bsd, r_bsk = self.chunking(h_bsd, plan)
        return h_bsd if num_out is None else h_bsd[:, :num_out], r_bsk, gates

    def _block(
        self, number: int, h_bsd: Tensor, plan: AttentionPlan, rotary: Rotary, noisy_only: bool = False
    ) -> tuple[Tensor, list[Gates]]:
        """A block's states, and what a mixture's router said; slots that count are real ones, or `noisy_only`."""
        arguments = (h_bsd, rotary, plan.inputs(h_bsd.dtype))
        if self.activation_checkpointing and torch.is_grad_enabled():
            h_bqd, gate_logits = checkpoint(self.layers[number], *arguments, use_reentrant=False)
        else:
            h_bqd, gate_logits = self.layers[number](*arguments)
        if gate_logits is None:
            return h_bqd, []
        slots = plan.on_device[:, : plan.num_queries]
        counted = slots.chunk >= 0
        return h_bqd, [Gates(gate_logits, counted & (slots.stream != masks.CLEAN) if noisy_only else counted)]

    def _rotary(self, plan: AttentionPlan, h: Tensor) -> Rotary:
        return rotary_tables(plan.on_device.position, self.config, h.dtype)

    def _plan(self, mask: masks.Mask, slots: Slots) -> AttentionPlan:
        return AttentionPlan.of(mask, slots, self._backend(), self.device)

    def _causal_plan(self, real: Tensor) -> AttentionPlan:
        return self._plan(masks.causal, Slots.of(torch.where(real, 0, -1)))

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(there(tokens, self.device))

    def _backend(self) -> Backend:
        return choose_backend(self.backend, self.device, torch.is_grad_enabled())

    @property
    def _compact(self) -> bool:
        """Whether slots that nobody reads are left out: not under FlexAttention, which wants static shapes."""
        return self._backend() != "flex"

    def _checked(self, tokens: Tensor, masked: Tensor | None, positions: PositionMasks) -> Tensor:
        if masked is None:
            raise ValueError(f"a {self.config.kind} model needs `masked`: which positions are hidden, (B, L) bool")
        if masked.shape != tokens.shape or masked.dtype != torch.bool:
            raise ValueError(
                f"masked must be bool of the shape {tuple(tokens.shape)}, got {masked.dtype} {tuple(masked.shape)}"
            )
        problem = "masked may not cover BOS, prompt or PAD positions: they are always visible"
        outside = (masked & ~positions.free).any()
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
