"""Draft tokens: proposing them behind every lane, and verifying them with the next forward pass.

Speculative sampling, lane by lane. Each forward pass reads, beside the last token of a lane, what the draft head
proposes to follow, and so predicts several places of the lane at once. A draft token x, drawn from the head's
distribution q, is accepted with probability min(1, p(x) / q(x)); where it is rejected, the token is drawn from what
p has more of than q, and the draft tokens behind it are discarded. So every token follows p, the network's own
distribution, whatever the head proposes: with one lane texts are drawn exactly as without drafts, in fewer forward
passes. With several, lanes run ahead of each other where their text is easy, and a token sees what stood in the
other lanes when its forward pass began.

Draft tokens are seen by their own lane alone. Given a text, a token of probability p was drafted and accepted with
probability min(1, q / p): so the same loop walks along a given text and counts its forward passes.

    B batch   L positions   A asked positions   M draft tokens of all rows   V the tokens that can be predicted
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dcdm.decoding.commits import Sampling, View
from dcdm.decoding.loop import Committed
from dcdm.lanes.model import LaneModel
from dcdm.model.layout import RaggedIndex
from dcdm.model.products import SLICE_BYTES, at_least_fp32


class Drafter(Protocol):
    """Draft sampler and verifier: the number of a row and a position come with each of M."""

    def draft(self, log_q: Tensor, row: Tensor, position: Tensor) -> Tensor:
        """Tokens (M,) from the head's distributions (M, V)."""

    def verify(
        self, log_p: Tensor, log_q: Tensor, row: Tensor, position: Tensor, token: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which draft tokens (M,) the network's distributions accept, and what replaces the others."""


@dataclass(frozen=True)
class Drafts:
    """Draft tokens, row by row and from left to right."""

    row: Tensor
    """(M,)."""
    position: Tensor
    token: Tensor
    states: Tensor
    """(M, d): of the head."""

    @classmethod
    def none(cls, model: LaneModel) -> Drafts:
        weight = model.norm.weight
        nothing = torch.zeros(0, dtype=torch.long, device=weight.device)
        return cls(nothing, nothing, nothing, weight.new_zeros(0, len(weight)))

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: Tensor | slice) -> Drafts:
        return Drafts(self.row[index], self.position[index], self.token[index], self.states[index])

    def keep_rows(self, rows: Tensor) -> Drafts:
        """Those of `rows`, ascending, which are numbered from 0 then."""
        kept = self[torch.isin(self.row, rows)]
        return Drafts(torch.searchsorted(rows, kept.row), kept.position, kept.token, kept.states)

    def places(self, shape: torch.Size) -> Tensor:
        """(B, L) bool: where draft tokens stand."""
        found = torch.zeros(shape, dtype=torch.bool, device=self.row.device)
        found[self.row, self.position] = True
        return found


@dataclass(frozen=True)
class Verified:
    """What a forward pass says of the draft tokens that it read."""

    fill: Tensor
    """(B, A) bool: positions whose prediction holds: a lane's next one, and those behind accepted draft tokens."""
    tokens: Tensor
    """(B, A): the token where there was a draft; −1 elsewhere."""
    accepted: Tensor
    """(B, L) bool: draft tokens that are part of the text."""


def verify(
    model: LaneModel, drafts: Drafts, view: View, where: RaggedIndex, drafted: Tensor, by: Drafter
) -> Verified:
    """Accept or reject `drafts`, which stand at the places `drafted` (B, L), by what the forward pass predicts."""
    columns = where.pick(drafted) & where.valid
    tokens = torch.full_like(view.position, -1)
    done = 0

    def check(log_p: Tensor, row: Tensor, at: Tensor) -> Tensor:
        nonlocal done
        part = drafts[slice(done, done + len(row))]
        done += len(row)
        right, instead = by.verify(log_p, log_q_of(model, part.states), row, part.position, part.token)
        tokens[row, at] = torch.where(right, part.token, instead)
        return right

    right = view.predicted.measure(check, columns, 0, torch.bool)
    behind = shifted(columns) & (view.position == shifted(view.position) + 1) & where.valid
    fill = where.valid & ~behind
    for _ in range(int(columns.sum(dim=-1).max())):
        fill = fill | (behind & shifted(fill & right))
    accepted = torch.zeros_like(drafted)
    where.put(accepted, fill & right)
    return Verified(fill, tokens, accepted & drafted)


def log_q_of(model: LaneModel, states: Tensor) -> Tensor:
    """The head's log-probabilities (n, V) from its states (n, d)."""
    logits = model.draft_logits(states)
    log_q = logits.to(at_least_fp32(logits)).log_softmax(dim=-1)
    return F.pad(log_q, (0, model.config.bos_id - log_q.shape[-1]), value=-torch.inf)


def shifted(x: Tensor) -> Tensor:
    """Each column's left neighbour (B, A); 0 (False) in the first."""
    return F.pad(x[:, :-1], (1, 0))


def propose(model: LaneModel, committed: Committed, continues: Tensor, ahead: Tensor, by: Drafter) -> Drafts:
    """Draft tokens behind the last token of every lane, `ahead` (B,) at most, given what was just `committed`.

    `continues` (B, L): open positions whose left neighbour belongs to the same lane. A lane's last place is never
    drafted: it is predicted anyway.
    """
    assert model.drafting is not None
    further = F.pad(continues, (0, 2))  # places beyond the end are not open
    row, at = (committed.fill & (ahead > 0)[:, None]).nonzero(as_tuple=True)
    position, token = committed.position[row, at], committed.tokens[row, at]
    states = committed.predicted.states_at(row, at)
    made = [Drafts.none(model)]
    for number in range(1, int(ahead.max()) + 1 if len(ahead) else 1):
        use = (number <= ahead[row]) & further[row, position + 1] & further[row, position + 2]
        row, position, token, states = row[use], position[use], token[use], states[use]
        if not len(row):
            break
        states = model.drafting(states, model.embed_tokens(token))
        position = position + 1
        size = max(1, SLICE_BYTES // (4 * model.config.vocab_size))  # of the distributions that exist at one time
        parts = zip(states.split(size), row.split(size), position.split(size), strict=True)
        token = torch.cat([by.draft(log_q_of(model, part), *where) for part, *where in parts])
        made.append(Drafts(row, position, token, states))
    every = Drafts(*(torch.cat([getattr(part, name) for part in made]) for name in Drafts.__dataclass_fields__))
    return every[(every.row * further.shape[1] + every.position).argsort()]


def accept_or_replace(
    sampling: Sampling, log_p: Tensor, log_q: Tensor, token: Tensor, accept: Tensor, draw: Tensor
) -> tuple[Tensor, Tensor]:
    """Speculative sampling: which draft tokens (M,) are accepted, and draws from what p has more of than q for the
    others.

    `accept` and `draw` (M,) are uniform numbers.
    """
    if sampling.greedy:
        best = log_p.argmax(dim=-1)
        return token == best, best
    p, q = (sampling.log_p(x).double() for x in (log_p, log_q))
    at = token[:, None]
    right = accept.to(p) < (p - q).gather(-1, at).squeeze(-1).exp()
    more = (p.exp() - q.exp()).clamp(min=0)
    more = torch.where(more.sum(dim=-1, keepdim=True) > 0, more, p.exp())  # p = q: nothing is rejected then
    return right, sampling.draw(more.log(), draw)
