"""Likelihoods of a model that predicts from the left: exact, and with drafts an upper bound.

B sequences   L positions
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dcdm.decoding.caching import predictor_of
from dcdm.decoding.commits import Sampling, commit_policy
from dcdm.lanes.decoding import DraftedLanes, LaneState
from dcdm.lanes.masks import lane_partition
from dcdm.lanes.model import LaneModel
from dcdm.likelihood.estimators import AlongText, Part, Scorer, certain, scattered, scorer_of
from dcdm.model.transformer import PositionMasks


@scorer_of.register(LaneModel)
class LaneScorer(Scorer):
    """The estimators of such a model."""

    def exact(self, tokens: Tensor, positions: PositionMasks, index: Tensor) -> Part:
        """Every token predicted once, given the earlier chunks, as when each chunk takes one forward pass."""
        ids = self.model.partition(tokens, positions.visible, index, self.decoder.lanes).ids
        states = self.model.encode(tokens, prompt=positions.visible, chunk_ids=ids).states
        return certain(scattered(self.model, states, tokens, positions.free), positions.free.sum(dim=-1), 1)

    def drafted(self, tokens: Tensor, positions: PositionMasks, index: Tensor) -> Part:
        """Lanes with drafts along the true text: −log p of each token given what its forward pass knew.

        How many draft tokens each forward pass accepts is drawn as it would have come given the text. What is
        summed up is then log p(text, pattern) − log P(pattern | steps before), whose mean over acceptance patterns
        is at most log p(text); with one lane it is the same for any pattern, and log p(text) itself.
        """
        assert isinstance(self.samples, int)
        walks = [self.walk(tokens, positions, index, sample) for sample in range(self.samples)]
        nats = torch.stack([along.nats for along in walks])
        forwards = torch.stack([along.forward for along in walks]).double().mean(dim=0)
        varies = self.decoder.drafts and self.decoder.lanes != 1
        alone = torch.full_like(forwards, torch.nan if varies else 0.0)  # one draw has no spread
        spread = alone if self.samples == 1 else nats.sum(dim=-1).std(dim=0) / math.sqrt(self.samples)
        return Part(nats.mean(dim=0), spread, positions.free.sum(dim=-1).cpu(), forwards)

    @torch.no_grad()
    def walk(self, tokens: Tensor, positions: PositionMasks, index: Tensor, sample: int) -> AlongTextWithDrafts:
        """Lanes with drafts along the true text, with an acceptance pattern drawn for it."""
        model, decoder = self.model, self.decoder
        chances = self.key.fold("pace", sample).rows(index, tokens.shape[1]).to(tokens.device)
        along = AlongTextWithDrafts(tokens, decoder.sampling, chances)
        _, lane = lane_partition(model.config, positions.free, positions.real, decoder.lanes)
        state = LaneState(
            tokens.masked_fill(positions.free, model.config.mask_id), positions, DraftedLanes(positions, lane),
            predictor_of(model, positions, decoder.cache), lane=lane,
            ahead=torch.full_like(index, decoder.drafts or 0), drafter=along,
        )  # fmt: skip
        while state.step(commit_policy("chunk"), along.reveal) is not None:
            pass
        return along


class AlongTextWithDrafts(AlongText):
    """Fills a canvas with the text itself. Draft tokens are right, and are accepted as often as they would have
    been, given that the text came out."""

    def __init__(self, tokens: Tensor, sampling: Sampling, chances: Tensor) -> None:
        """`chances` (B, L) are uniform."""
        super().__init__(tokens, sampling)
        self.chances = chances

    def draft(self, log_q: Tensor, row: Tensor, position: Tensor) -> Tensor:
        return self.tokens[row, position]

    def verify(
        self, log_p: Tensor, log_q: Tensor, row: Tensor, position: Tensor, token: Tensor
    ) -> tuple[Tensor, Tensor]:
        p, q = (self.sampling.log_p(x).gather(-1, token[:, None]).squeeze(-1) for x in (log_p, log_q))
        return self.chances[row, position].to(p) < (q - p).exp(), token
