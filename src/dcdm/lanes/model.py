"""The network that predicts from the left: the clean slot on its left predicts a token, wherever that is known.

One stream of clean slots, and seed slots where nothing known stands on the left. Lanes are written so, and any
other partition that does not depend on noise can be.

A forward pass predicts one token of each lane. The draft head continues without the network: from the state that
predicted a token and from that token it drafts the next one, from its own state and that draft the one after. The
next forward pass reads the draft tokens beside the last token and accepts or rejects them.

    B batch   L positions   d hidden size   M positions of all rows
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcdm.config import ModelConfig
from dcdm.lanes import masks
from dcdm.lanes.masks import lane_partition
from dcdm.model.masks import Mask
from dcdm.model.packing import Matrix, PackedEmbedding
from dcdm.model.products import Linear, product
from dcdm.model.transformer import BlockZero, Encoded, Model, Output, Partition, substitute

SHARE = 4
"""Training teaches the head on every fourth row: a small head needs no more, and a step stays cheap."""


class LaneModel(Model):
    """A model whose likelihood is exact: every free token is predicted once, given the earlier chunks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.drafting = DraftHead(config) if config.drafts else None
        self._draft_matrix: Matrix | None = None

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        super().init_weights(generator)
        if self.drafting is not None:
            self.drafting.down.weight.zero_()

    def forward(
        self,
        tokens: Tensor,
        masked: Tensor | None = None,
        *,
        prompt: Tensor | None = None,
        chunk_ids: Tensor | None = None,
        index: Tensor | None = None,
        lanes: int | Tensor | None = None,
    ) -> Output:
        """Predict every free token of `tokens` (B, L), clean ids, each given the earlier chunks.

        As `Model.forward`, without `masked`; `lanes` (one number, or one for each row) is the number of lanes.
        """
        encoded = self.encode(tokens, masked, prompt=prompt, chunk_ids=chunk_ids, index=index, lanes=lanes)
        free = self.position_masks(tokens, prompt).free
        logits = substitute(self.head(encoded.states), tokens, free)
        return Output(logits, encoded.chunk_ids, encoded.router_scores)

    def encode(
        self,
        tokens: Tensor,
        masked: Tensor | None = None,
        *,
        prompt: Tensor | None = None,
        chunk_ids: Tensor | None = None,
        index: Tensor | None = None,
        lanes: int | Tensor | None = None,
    ) -> Encoded:
        """`forward` without the head."""
        if masked is not None and not torch.equal(masked, self.position_masks(tokens, prompt).free):
            raise ValueError("a model that predicts from the left predicts every free token: leave `masked` out")
        ids = self.partition(tokens, prompt, index, lanes).ids if chunk_ids is None else chunk_ids
        return self._encode(tokens, ids, ids >= 1, (ids >= 0) & (ids < ids.amax(dim=-1, keepdim=True)))

    def denoise(self, z: Tensor, ids: Tensor, block_zero: BlockZero | None = None) -> Tensor:
        """As `Model.denoise`: `z` holds MASK where nothing is known, and those positions are predicted."""
        real, masked = ids >= 0, z == self.config.mask_id
        return self._encode(z, ids, real & masked, real & ~masked).states

    def partition(
        self,
        tokens: Tensor,
        prompt: Tensor | None = None,
        index: Tensor | None = None,
        lanes: int | Tensor | None = None,
    ) -> Partition:
        """Chunk ids of clean tokens: those of the lanes, or of the partition that the kind has."""
        if self.config.kind != "lanes":
            return super().partition(tokens, prompt, index)
        positions = self.position_masks(tokens, prompt)
        return Partition(lane_partition(self.config, positions.free, positions.real, lanes)[0], None)

    @property
    def trains_drafts_alone(self) -> bool:
        """Whether the head learns and all else is frozen."""
        return self.drafting is not None and not any(part.requires_grad for part in self.layers.parameters())

    def draft_weight(self) -> Tensor:
        """The head's rows of the tokens that can be drafted."""
        return self.head_weight()[: self.config.draft_vocab or None]

    def draft_logits(self, states: Tensor) -> Tensor:
        """Logits (…, D) of the tokens that can be drafted, from the draft head's states."""
        packed, count = self.embed_tokens, self.config.draft_vocab
        if not isinstance(packed, PackedEmbedding):
            return product(states, self.draft_weight())
        if not count or self.lm_head is not None:
            return self.token_logits(states)[..., : count or None]
        if self._draft_matrix is None:
            self._draft_matrix = Matrix(packed.weight[:count], packed.scale[:count])
        return self._draft_matrix(states)

    @property
    def decoding_mask(self) -> Mask:
        return masks.left_with_drafts if self.config.drafts else masks.left

    def _encode(self, tokens: Tensor, ids: Tensor, wanted: Tensor, clean: Tensor) -> Encoded:
        """Slots of the `clean` positions, and seeds where no known token stands on the left of a `wanted` one."""
        place = masks.from_left(ids, wanted, clean, compact=self._compact)
        plan = self._plan(masks.left, place.slots)
        streams = torch.cat([torch.full_like(tokens, self.config.mask_id), tokens], dim=1)
        h_bsd, r, gates = self._run(self.embed(place.gather(streams)), plan)
        return Encoded(place.restore(self.norm(h_bsd)), ids, None if r is None else place.restore(r), gates)


class DraftHead(nn.Module):
    """Two layers on a state and a token's embedding, added to the state."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.draft_width * config.hidden_size
        self.state_norm = nn.RMSNorm(d, eps=config.norm_eps)
        self.token_norm = nn.RMSNorm(d, eps=config.norm_eps)
        self.up = Linear(2 * d, inner, bias=False)
        self.down = Linear(inner, d, bias=False)
        self.norm = nn.RMSNorm(d, eps=config.norm_eps)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """(…, d): the state that predicts what comes behind a token, `embedded`, that `states` predicted."""
        both = torch.cat([self.state_norm(states), self.token_norm(embedded)], dim=-1)
        return self.norm(states + self.down(F.silu(self.up(both))))


def draft_states(
    head: DraftHead, states: Tensor, embedded: Tensor, ids: Tensor, count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """What the n-th of `count` draft tokens in a row is predicted from, n = 1, 2, …: states (B, L − n, d) for the
    positions from n on, and which of them (B, L − n) are drafted.

    `states` (B, L, d) are those that predict each position, `embedded` the true tokens; a token is drafted behind a
    free one for as long as the lane continues.
    """
    continues = masks.led_positions(ids)
    written = ids >= 1
    for number in range(1, count + 1):
        written = written[:, :-1] & continues[:, number:]
        states = head(states[:, :-1], embedded[:, number - 1 : -1])
        yield states, written
