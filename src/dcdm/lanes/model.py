"""The network that predicts from the left: the clean slot on its left predicts a token, wherever that is known.

One stream of clean slots, and seed slots where nothing known stands on the left. Lanes are written so, and any
other partition that does not depend on noise can be.

    B batch   L positions   d hidden size
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcdm.config import ModelConfig
from dcdm.lanes import masks
from dcdm.lanes.draft_head import DraftHead
from dcdm.lanes.partition import lane_partition
from dcdm.model.masks import Mask
from dcdm.model.transformer import BlockZero, Encoded, Model, Output, Partition, substitute


class LaneModel(Model):
    """A model whose likelihood is exact: every free token is predicted once, given the earlier chunks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.drafting = DraftHead(config) if config.drafts else None

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
    def decoding_mask(self) -> Mask:
        return masks.left_with_drafts if self.config.drafts else masks.left

    def _encode(self, tokens: Tensor, ids: Tensor, wanted: Tensor, clean: Tensor) -> Encoded:
        """Slots of the `clean` positions, and seeds where no known token stands on the left of a `wanted` one."""
        place = masks.from_left(ids, wanted, clean, compact=self._compact)
        plan = self._plan(masks.left, place.slots)
        streams = torch.cat([torch.full_like(tokens, self.config.mask_id), tokens], dim=1)
        h_bsd, r, gates = self._run(self.embed_tokens(place.gather(streams)), plan)
        return Encoded(place.restore(self.norm(h_bsd)), ids, None if r is None else place.restore(r), gates)
