"""The draft head: it drafts the tokens behind the next one, which decoding then verifies.

A forward pass predicts one token of each lane. The head continues without the network: from the state that
predicted a token and from that token it drafts the next one, from its own state and that draft the one after. The
next forward pass reads the draft tokens beside the last token and accepts or rejects them.

    B batch   L positions   d hidden size   M positions of all rows
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcdm.config import ModelConfig
from dcdm.lanes.masks import led_positions
from dcdm.model.products import Linear

SHARE = 4
"""Training teaches the head on every fourth row: a small head needs no more, and a step stays cheap."""


class DraftHead(nn.Module):
    """Two layers on a state and a token's embedding, added to the state."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.state_norm = nn.RMSNorm(d, eps=config.norm_eps)
        self.token_norm = nn.RMSNorm(d, eps=config.norm_eps)
        self.up = Linear(2 * d, 2 * d, bias=False)
        self.down = Linear(2 * d, d, bias=False)
        self.norm = nn.RMSNorm(d, eps=config.norm_eps)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """(…, d): the state that predicts what comes behind a token, `embedded`, that `states` predicted."""
        both = torch.cat([self.state_norm(states), self.token_norm(embedded)], dim=-1)
        return self.norm(states + self.down(F.silu(self.up(both))))


def draft_states(
    head: DraftHead, states: Tensor, embedded: Tensor, tokens: Tensor, ids: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """What `count` draft tokens in a row are predicted from, and their truths: states (M, d), tokens (M,).

    `states` (B, L, d) are those that predict each position, `embedded` the true tokens; a token is drafted behind a
    free one for as long as the lane continues.
    """
    continues = led_positions(ids)
    made, truths = [], []
    written = ids >= 1  # (B, L − n): whether the drafts that begin behind a position have got as far as n
    for number in range(1, count + 1):
        written = written[:, :-1] & continues[:, number:]
        states = head(states[:, :-1], embedded[:, number - 1 : -1])
        made.append(states[written])
        truths.append(tokens[:, number:][written])
    return torch.cat(made), torch.cat(truths)
