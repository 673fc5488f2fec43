"""The causal routing's rounds at their real price.

In round k a hidden position's block-0 state needs its attention over the revealed tokens and itself. A clean
token's block-0 keys and values depend on its own embedding alone, and every hidden position asks the same
question, MASK, from its own place. So softmax sums are carried from round to round: each round adds the keys
of the tokens that the last one revealed, and only the still hidden positions continue through the MLP.

    B batch   L positions   H query heads   G key/value heads   D head size   d hidden size   K chunks
    X hidden positions and Y newly revealed ones of a round, padded to the longest row
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dcdm.config import ModelConfig
from dcdm.model.attention import rotary_tables, rotate
from dcdm.model.blocks import Block
from dcdm.model.chunking import ChunkingAttention
from dcdm.model.layout import RaggedIndex, stack_rows
from dcdm.model.products import at_least_fp32, product_type


class IncrementalRouter:
    """Router scores round by round; `reveal` before the first `scores` with what is visible from the start."""

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
        self.mask_d = embed_tokens(torch.tensor(config.mask_id, device=free.device))
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

    def reveal(self, members: Tensor, tokens: Tensor) -> None:
        """Positions (B, L) whose tokens (B, L) later rounds may see; each is revealed once."""
        self.hidden = self.hidden & ~members
        rows = (members.any(dim=-1) & self.hidden.any(dim=-1)).nonzero().squeeze(-1)
        if len(rows) == 0:
            return
        asked, asking = RaggedIndex(members, rows), RaggedIndex(self.hidden, rows)
        clean_byd = self.block.input_layernorm(self.embed_tokens(asked.pick(tokens)))
        k_bygd = rotate(self.block.self_attn.keys(clean_byd), self._tables(asked.index))
        v_bygd = self.block.self_attn.values(clean_byd)
        k_byhd, v_byhd = (x.repeat_interleave(self.heads_per_key, dim=2) for x in (k_bygd, v_bygd))
        q_bxhd = asking.pick(self.q_1lhd.expand(len(members), -1, -1, -1))
        score_bhxy = torch.einsum("bxhd,byhd->bhxy", q_bxhd, k_byhd) * self.scale
        score_bhxy.masked_fill_(~asked.valid[:, None, None, :], -torch.inf)
        old_peak = asking.pick(self.peak_blh)
        peak = torch.maximum(old_peak, score_bhxy.amax(dim=-1).transpose(1, 2))
        fading = (old_peak - peak).exp()
        weight_bhxy = score_bhxy.sub_(peak.transpose(1, 2)[..., None]).exp_()
        total = asking.pick(self.sum_blh) * fading + weight_bhxy.sum(dim=-1).transpose(1, 2)
        mean = asking.pick(self.mean_blhd) * fading[..., None]
        mean += torch.einsum("bhxy,byhd->bxhd", weight_bhxy, v_byhd)
        for whole, part in ((self.peak_blh, peak), (self.sum_blh, total), (self.mean_blhd, mean)):
            asking.put(whole, part)

    def scores(self, asking: Tensor | None = None) -> Tensor:
        """r (B, L, K) of the hidden positions of the rows `asking` (B,), by default of all; 0 elsewhere."""
        wanted = self.hidden.any(dim=-1) if asking is None else self.hidden.any(dim=-1) & asking
        places = RaggedIndex(self.hidden, wanted.nonzero().squeeze(-1))
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
