"""How free positions become chunks, where chunk ids do not depend on noise.

The paper's routing does, and is not here: it is `ChunkingAttention.assign`, argmax(r + b) of the noisy stream.

Fixed partitions (MDLM, BDLM and the controls) need positions only. The causal partition is formed in K
rounds, each a function of already revealed tokens; its rule is `choose`, one replaceable function, and
`IncrementalRouter` computes a round's scores at their real price.

    B batch   L positions   K chunks   j = 1…n the rank of a free position among the free ones
    ids: −1 padding, 0 always visible, 1…K chunks   H query heads   G key/value heads   D head size   d hidden size
    X hidden positions and Y newly revealed ones of a round, padded to the longest row
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcdm.config import ModelConfig
from dcdm.keys import Key
from dcdm.model.attention import rotary_tables, rotate
from dcdm.model.blocks import Block
from dcdm.model.chunking import ChunkingAttention
from dcdm.model.layout import RaggedIndex, stack_rows
from dcdm.model.products import at_least_fp32, product_type


def free_rank(free: Tensor) -> Tensor:
    """j: 1…n over the free positions of each row; elsewhere the rank of the last free position before."""
    return free.long().cumsum(dim=-1)


def label(free: Tensor, real: Tensor, ids_of_free: Tensor) -> Tensor:
    """Chunk ids from those of the free positions: 0 where always visible, −1 where padding."""
    return torch.where(free, ids_of_free, torch.where(real, 0, -1))


def chunk_sizes(num_free: Tensor, num_chunks: int) -> Tensor:
    """Sizes of chunks 1…K for n free positions, ⌈remaining / (K−k+1)⌉: (B,) to (B, K). Empty chunks come last."""
    remaining, sizes = num_free.long(), []
    for left in range(num_chunks, 0, -1):
        sizes.append((remaining + left - 1) // left)
        remaining = remaining - sizes[-1]
    return torch.stack(sizes, dim=-1)


def prior(kind: str, rank: Tensor, num_free: Tensor, k: Tensor, num_chunks: int) -> Tensor:
    """What rank j alone says for chunk k (B,): `none` 0, `contiguous` −j/n, `strided` −((j−k) mod K)/K."""
    if kind == "contiguous":
        return -rank.double() / num_free.clamp(min=1)[:, None]
    if kind == "strided":
        return -((rank - k[:, None]) % num_chunks).double() / num_chunks
    return torch.zeros_like(rank, dtype=torch.double)


def choose(
    r_blk: Tensor, candidates: Tensor, size: Tensor, k: Tensor, prior_bl: Tensor, prior_weight: float
) -> Tensor:
    """Chunk k: the `size` candidates with the largest r_k − mean_j r_j + λ·prior; ties go to lower positions.

    With λ = inf the prior decides and the router's score breaks ties. Returns (B, L) bool.
    """
    rows = torch.arange(len(k), device=k.device)
    score = (r_blk[rows, :, k - 1] - r_blk.mean(dim=-1)).double()
    if math.isinf(prior_weight):
        keys = [score, prior_bl]  # sorted by the last key, ties by the one before
    else:
        keys = [score + prior_weight * prior_bl]
    place = torch.arange(score.shape[-1], device=score.device).expand_as(score)
    order = place
    for key in [*keys, candidates.double()]:
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    return candidates & (torch.empty_like(order).scatter_(-1, order, place) < size[:, None])


@torch.no_grad()
def causal_round(r_blk: Tensor, revealed: Tensor, free: Tensor, k: Tensor, config: ModelConfig) -> Tensor:
    """The members of chunk k (B,), from the scores of that round and what is revealed: (B, L) bool."""
    assert config.num_chunks is not None
    num_free = free.sum(dim=-1)
    sizes = chunk_sizes(num_free, config.num_chunks)
    size = sizes.gather(-1, k[:, None] - 1).squeeze(-1)
    prior_bl = prior(config.prior, free_rank(free), num_free, k, config.num_chunks)
    return choose(r_blk, free & ~revealed, size, k, prior_bl, config.prior_weight)


@torch.no_grad()
def causal_partition(
    router: Callable[[Tensor], Tensor], free: Tensor, real: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """All K rounds on known tokens. `router(new)` reveals the positions `new` and gives r (B, L, K) after that.

    Returns the ids (B, L) and the scores (B, L, K) that decided each position's chunk (0 where none did).
    """
    assert config.num_chunks is not None
    new = real & ~free
    revealed = new
    deciding: Tensor | float = 0.0
    ids = label(free, real, torch.zeros_like(free, dtype=torch.long))
    for k in range(1, config.num_chunks + 1):
        r_blk = router(new)
        new = causal_round(r_blk, revealed, free, torch.full_like(ids[:, 0], k), config)
        ids = torch.where(new, k, ids)
        deciding = torch.where(new[..., None], r_blk, deciding)
        revealed = revealed | new
    assert isinstance(deciding, Tensor)
    return ids, deciding


def round_sizes(free: Tensor, real: Tensor, config: ModelConfig) -> list[tuple[int, int]]:
    """The most positions of a row that are revealed before each round, and that are hidden in it."""
    assert config.num_chunks is not None
    num_free = free.sum(dim=-1)
    sizes = chunk_sizes(num_free, config.num_chunks)
    revealed = torch.cat([(real & ~free).sum(dim=-1, keepdim=True), sizes[:, :-1]], dim=-1)
    hidden = num_free[:, None] - sizes.cumsum(dim=-1) + sizes
    return list(zip(revealed.amax(dim=0).tolist(), hidden.amax(dim=0).tolist(), strict=True))


def fixed_partition(config: ModelConfig, free: Tensor, real: Tensor, index: Tensor | None = None) -> Tensor:
    """Ids of the partitions that need no router: MDLM, BDLM, the controls, and priors that decide alone.

    `index` (B,) numbers the sequences; random ids depend on it and on `routing_seed` only.
    """
    if config.prompts == "ordinary":
        free = real
    rank = free_rank(free)
    if config.kind == "mdlm":
        ids = torch.ones_like(rank)
    elif config.kind == "bdlm":
        assert config.block_size is not None
        ids = (rank + config.block_size - 1) // config.block_size
    else:
        assert config.num_chunks is not None
        ids = _control_ids(config, rank, free, index)
    return label(free, real, ids)


def predicting_rows(ids: Tensor) -> Tensor:
    """With shift, the place in z ⊕ x (B, L) whose row predicts each position: that of its left neighbour, noisy in
    the same block and clean in an earlier one; the first token's own.
    """
    length, place = ids.shape[1], torch.arange(ids.shape[1], device=ids.device)
    left = F.pad(ids, (1, 0), value=-1)[:, :length]
    return torch.where(left < 0, place, place - 1 + length * (left != ids))


def _control_ids(config: ModelConfig, rank: Tensor, free: Tensor, index: Tensor | None) -> Tensor:
    assert config.num_chunks is not None
    if config.routing == "strided" or config.prior == "strided":
        return 1 + (rank - 1) % config.num_chunks
    if config.routing == "random":
        rank = _shuffled_rank(config.routing_seed, rank, free, index)
    ends = chunk_sizes(free.sum(dim=-1), config.num_chunks).cumsum(dim=-1)
    return 1 + (rank[..., None] > ends[:, None, :]).sum(dim=-1).clamp(max=config.num_chunks - 1)


def _shuffled_rank(seed: int, rank: Tensor, free: Tensor, index: Tensor | None) -> Tensor:
    numbers = range(len(rank)) if index is None else index.tolist()
    shuffled = rank.clone()
    for row, number in enumerate(numbers):
        count = int(free[row].sum())
        order = torch.randperm(count, generator=Key(seed).fold(number).generator()) + 1
        shuffled[row, free[row]] = order.to(rank.device)
    return shuffled


class IncrementalRouter:
    """The causal routing's scores round by round; `reveal` what is visible from the start before the first round.

    In round k a hidden position's block-0 state needs its attention over the revealed tokens and itself. A clean
    token's block-0 keys and values depend on its own embedding alone, and every hidden position asks the same
    question, MASK, from its own place. So softmax sums are carried from round to round: each round adds the keys
    of the tokens that the last one revealed, and only the still hidden positions continue through the MLP.
    """

    def __init__(
        self,
        config: ModelConfig,
        embed_tokens: nn.Embedding,
        block: Block,
        chunking: ChunkingAttention,
        free: Tensor,
    ) -> None:
        self.config, self.embed_tokens = config, embed_tokens
        self.block, self.chunking = block, chunking
        attention = block.self_attn
        self.hidden = free.clone()
        rows, length = free.shape
        self.mask_d = embed_tokens(torch.full((), config.mask_id, device=free.device))
        mask_11d = block.input_layernorm(self.mask_d)[None, None]
        self.q_1lhd = rotate(
            attention.queries(mask_11d), self._tables(torch.arange(length, device=free.device)[None])
        )
        own_hd, value_hd = attention.keys(mask_11d)[0, 0], attention.values(mask_11d)[0, 0]
        self.heads_per_key = self.q_1lhd.shape[2] // len(own_hd)
        own_hd, value_hd = (x.repeat_interleave(self.heads_per_key, dim=0) for x in (own_hd, value_hd))
        self.scale = 1 / math.sqrt(attention.head_dim)
        # every sum starts with the position's own MASK; RoPE makes its score the same everywhere
        own_h = (attention.queries(mask_11d)[0, 0] * own_hd).sum(-1) * self.scale
        own_h, value_hd = own_h.to(at_least_fp32(own_h)), value_hd.to(at_least_fp32(value_hd))
        self.peak_blh = own_h.expand(rows, length, -1).clone()
        self.sum_blh = torch.ones_like(self.peak_blh)
        self.mean_blhd = value_hd.expand(rows, length, -1, -1).clone()  # numerator over e^peak

    def _tables(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_tables(position, self.config, self.mask_d.dtype)

    def reveal(self, members: Tensor, tokens: Tensor, most: tuple[int, int] | None = None) -> None:
        """Positions (B, L) whose tokens (B, L) later rounds may see; each is revealed once.

        `most` is one of `round_sizes`, where these are known: nothing is read from the device then.
        """
        self.hidden = self.hidden & ~members
        rows = None
        if most is None:
            rows = (members.any(dim=-1) & self.hidden.any(dim=-1)).nonzero().squeeze(-1)
        if len(members if rows is None else rows) == 0:
            return
        revealed, hidden = most or (None, None)
        keys, queries = RaggedIndex(members, rows, revealed), RaggedIndex(self.hidden, rows, hidden)
        if keys.index.shape[1] == 0 or queries.index.shape[1] == 0:
            return
        clean_byd = self.block.input_layernorm(self.embed_tokens(keys.pick(tokens)))
        k_bygd = rotate(self.block.self_attn.keys(clean_byd), self._tables(keys.index))
        v_bygd = self.block.self_attn.values(clean_byd)
        k_byhd, v_byhd = (x.repeat_interleave(self.heads_per_key, dim=2) for x in (k_bygd, v_bygd))
        q_bxhd = queries.pick(self.q_1lhd.expand(len(members), -1, -1, -1))
        score_bhxy = torch.einsum("bxhd,byhd->bhxy", q_bxhd, k_byhd) * self.scale
        score_bhxy.masked_fill_(~keys.valid[:, None, None, :], -torch.inf)
        old_peak = queries.pick(self.peak_blh)
        peak = torch.maximum(old_peak, score_bhxy.amax(dim=-1).transpose(1, 2))
        fading = (old_peak - peak).exp()
        weight_bhxy = score_bhxy.sub_(peak.transpose(1, 2)[..., None]).exp_()
        total = queries.pick(self.sum_blh) * fading + weight_bhxy.sum(dim=-1).transpose(1, 2)
        mean = queries.pick(self.mean_blhd) * fading[..., None]
        mean += torch.einsum("bhxy,byhd->bxhd", weight_bhxy, v_byhd)
        for whole, part in ((self.peak_blh, peak), (self.sum_blh, total), (self.mean_blhd, mean)):
            queries.put(whole, part)

    def scores(self, asking: Tensor | None = None, most: int | None = None) -> Tensor:
        """r (B, L, K) of the hidden positions of the rows `asking` (B,), by default of all; 0 elsewhere.

        `most` is how many a row has at most, where that is known.
        """
        rows = None
        if most is None:
            wanted = self.hidden.any(dim=-1) if asking is None else self.hidden.any(dim=-1) & asking
            rows = wanted.nonzero().squeeze(-1)
        places = RaggedIndex(self.hidden, rows, most)
        out = self.mask_d.new_zeros(*self.hidden.shape, len(self.chunking.mu))
        if places.index.shape[1] == 0:
            return out
        attended = places.pick(self.mean_blhd) / places.pick(self.sum_blh)[..., None]
        h_bxd = self.mask_d + self.block.self_attn.o_proj(attended.flatten(2).to(product_type(self.mask_d)))
        h_bxd = h_bxd + self.block.mlp(self.block.post_attention_layernorm(h_bxd))[0]
        places.put(out, self.chunking.scores(h_bxd))
        return out

    def join(self, other: IncrementalRouter) -> None:
        """The rows of `other`, a router of the same model, behind the own."""
        self.hidden = stack_rows(self.hidden, other.hidden, False)
        for name in ("peak_blh", "sum_blh", "mean_blhd"):
            setattr(self, name, stack_rows(getattr(self, name), getattr(other, name), 1.0))
        self.q_1lhd = max(self.q_1lhd, other.q_1lhd, key=lambda x: x.shape[1])

    def keep_rows(self, rows: Tensor, length: int) -> None:
        """Forget all rows but these, and positions from `length` on."""
        for name in ("hidden", "peak_blh", "sum_blh", "mean_blhd"):
            setattr(self, name, getattr(self, name)[rows, :length])
        self.q_1lhd = self.q_1lhd[:, :length]
