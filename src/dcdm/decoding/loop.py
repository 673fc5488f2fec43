"""The loop: route → choose the active chunk → predict its masked positions → commit some → repeat.

Likelihoods run it with the true tokens, generation with drawn ones.

    B batch   L positions   A asked positions
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dcdm.decoding import routes
from dcdm.decoding.commits import Commit, Distributions, View
from dcdm.decoding.drafts import Drafter, Drafts, continues, propose, verify
from dcdm.decoding.predictors import Predictor
from dcdm.decoding.routes import Router
from dcdm.model.layout import RaggedIndex, stack_rows
from dcdm.model.transformer import Sets


@dataclass
class Counts:
    """What a filling cost; each (B,)."""

    forwards: Tensor
    """Passes through all blocks, cache writes included."""
    rounds: Tensor
    """Routing passes through block 0."""
    computed: Tensor
    """Positions that went through all blocks, over all forwards."""
    reused: Tensor
    """Positions whose keys and values came from the cache, over all forwards."""

    @classmethod
    def zero(cls, rows: int) -> Counts:
        return cls(*torch.zeros(4, rows, dtype=torch.long))

    def stack(self, other: Counts) -> Counts:
        return Counts(*(torch.cat(both) for both in zip(self._all(), other._all(), strict=True)))

    def of(self, rows: Tensor) -> Counts:
        return Counts(*(count[rows] for count in self._all()))

    def _all(self) -> tuple[Tensor, ...]:
        return self.forwards, self.rounds, self.computed, self.reused


@dataclass(frozen=True)
class Committed:
    """What one forward filled."""

    position: Tensor
    """(B, A)."""
    tokens: Tensor
    """(B, A)."""
    fill: Tensor
    """(B, A) bool: which of them were filled."""
    predicted: Distributions
    """The model's own distributions at the asked positions."""
    chunk: Tensor
    """(B,): the number of the row's chunk, from 1 in the order of filling."""
    forward: Tensor
    """(B,): the number of the row's forward, from 1."""

    def log_p(self) -> Tensor:
        """(B, A): the model's own log-probability of the token; 0 where nothing was filled."""
        return self.predicted.log_p(self.tokens, self.fill)


Reveal = Callable[[View, Tensor], Tensor]
"""(what was predicted, what will be filled (B, A)) → the tokens (B, A) to place there."""


class Filling:
    """Canvases (B, L) on their way from MASKs to text: `step` is one forward for all of them.

    Rows may join and leave between two steps, if router and predictor are of the mixed kinds. What a row becomes
    does not depend on the others.
    """

    def __init__(
        self, z: Tensor, sets: Sets, router: Router, predict: Predictor, order: Tensor | None = None,
        ahead: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`z` holds MASK at its free positions; `order` (B, L) is the noise of random commit policies, `ahead` (B,)
        how many tokens of each lane are guessed ahead, where lanes have a pace of their own."""
        self.z, self.real, self.router, self.predict = z.clone(), sets.real, router, predict
        self.order = (
            torch.zeros(z.shape, dtype=torch.float64, device=z.device) if order is None else order.to(z.device)
        )
        self.revealed, self.route = sets.real & ~sets.free, routes.start(sets)
        self.counts = Counts.zero(len(z))
        self.steps = self.chunk = torch.zeros(len(z), dtype=torch.long, device=z.device)
        """(B,): forwards that the active chunk has had, and its number from 1."""
        self.ahead = torch.zeros_like(self.steps) if ahead is None else ahead.to(z.device)
        self.lane = torch.zeros_like(z) if router.lanes is None else router.lanes
        self.drafts = Drafts.none(predict.model)

    def join(self, z: Tensor, sets: Sets, router: Router, order: Tensor, ahead: Tensor | None = None) -> None:
        """Rows behind those that are there; the predictor is told by the caller."""
        pad = self.predict.model.config.pad_id
        new = Filling(z, sets, router, self.predict, order, ahead)
        for name, filler in (("z", pad), ("real", False), ("revealed", False), ("order", 0.0), ("lane", 0)):
            setattr(self, name, stack_rows(getattr(self, name), getattr(new, name), filler))
        self.route = routes.Route(
            stack_rows(self.route.ids, new.route.ids, -1), stack_rows(self.route.active, new.route.active, False)
        )
        self.counts = self.counts.stack(new.counts)
        for name in ("steps", "chunk", "ahead"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(new, name)]))
        self.router.join(router)

    def keep_rows(self, rows: Tensor) -> None:
        """All rows leave but these, which are in ascending order; positions that nobody has any more go too."""
        length = max(1, int(self.real[rows].sum(dim=-1).max())) if len(rows) else 1
        for name in ("z", "real", "revealed", "order", "lane"):
            setattr(self, name, getattr(self, name)[rows, :length])
        self.route = routes.Route(self.route.ids[rows, :length], self.route.active[rows, :length])
        self.counts = self.counts.of(rows.cpu())
        self.steps, self.chunk, self.ahead = self.steps[rows], self.chunk[rows], self.ahead[rows]
        self.drafts = self.drafts.keep_rows(rows)
        self.router.keep_rows(rows, length)

    def step(
        self, commit: Commit, reveal: Reveal, closed: Tensor | None = None, drafter: Drafter | None = None
    ) -> Committed | None:
        """One forward; None if nothing is left to fill. `closed` (B, L): positions that need no token any more.

        Rows whose lanes have a pace of their own need a `drafter`.
        """
        router, revealed, z = self.router, self.revealed, self.z
        closed = revealed if closed is None else revealed | closed
        pending = self.real & ~closed
        busy = pending.any(dim=-1)
        if not bool(busy.any()):
            return None
        spent = ~(self.route.active & pending).any(dim=-1)
        asking = busy & (spent | router.every_step)
        stage_one = None
        if bool(asking.any()):
            found = router.next(z, torch.where(asking[:, None], closed, revealed), self.route, asking)
            self.route = found.where(asking, self.route)
            stage_one = found.stage_one if torch.equal(asking, busy) else None
            self.counts.rounds += (asking & router.counted).cpu()
        self.steps, self.chunk = torch.where(spent, 0, self.steps), self.chunk + (spent & busy)
        asked, given = self.route.active & pending, z
        drafts, drafted = self.drafts, None
        if len(drafts):
            drafts = drafts[pending[drafts.row, drafts.position]]
        if len(drafts):
            drafted, now = drafts.places(z.shape), self.route.level()
            asked = asked | (torch.nn.functional.pad(drafted[:, :-1], (1, 0)) & pending)
            self.route = routes.Route(torch.where(asked, now, self.route.ids), asked)
            given = z.clone()
            given[drafts.row, drafts.position] = drafts.token
        predicted = self.predict(given, revealed, routes.Route(self.route.ids, asked, stage_one))
        where = RaggedIndex(asked)
        distributions = self.predict.distributions(where.valid, predicted.states)
        view = View(distributions, where.valid, where.index, self.steps, where.pick(self.order))
        if router.narrows:
            self.route = router.narrow(self.route, view, spent & busy)
            view = replace(view, candidates=where.valid & where.pick(self.route.active))
        fill, instead = commit(view), None
        if drafted is not None:
            assert drafter is not None
            checked = verify(drafts, view, where, drafted, self.predict.log_p_of, drafter)
            fill, instead = fill & checked.fill, checked.tokens
            self.predict.settle(checked.stands)
        tokens = reveal(view, fill)
        if instead is not None:
            tokens = torch.where(instead >= 0, instead, tokens)
        row, at = fill.nonzero(as_tuple=True)
        z[row, view.position[row, at]] = tokens[row, at]
        revealed[row, view.position[row, at]] = True
        self.steps = self.steps + 1
        if drafter is not None and bool(self.ahead.any()):
            self._look_ahead(view, fill, tokens, pending & ~revealed, drafter)
        counts = self.counts
        counts.forwards += busy.cpu()
        counts.computed += torch.where(busy, predicted.computed, 0).cpu()
        counts.reused += torch.where(busy, predicted.reused, 0).cpu()
        return Committed(view.position, tokens, fill, distributions, self.chunk, counts.forwards)

    def _look_ahead(self, view: View, fill: Tensor, tokens: Tensor, left: Tensor, drafter: Drafter) -> None:
        """Guess what follows; places behind guesses that fell are asked for again. `left` (B, L) is still open."""
        void = self.route.active & left & (self.ahead > 0)[:, None]
        self.route = routes.Route(torch.where(void, routes.LATER, self.route.ids), self.route.active & ~void)
        predict = self.predict
        self.drafts = propose(
            predict.model, view, fill, tokens, continues(self.lane, left), self.ahead, predict.log_p_of, drafter
        )


@torch.no_grad()
def fill_canvas(
    z: Tensor,
    sets: Sets,
    router: Router,
    predict: Predictor,
    commit: Commit,
    reveal: Reveal,
    *,
    order: Tensor | None = None,
    ahead: Tensor | None = None,
    drafter: Drafter | None = None,
) -> tuple[Tensor, Counts]:
    """Fill `z` (B, L), which holds MASK at its free positions, chunk by chunk.

    `order` (B, L) is the noise of random commit policies; `ahead` (B,) and `drafter` are for lanes with drafts.
    Returns the filled canvas and what it cost.
    """
    filling = Filling(z, sets, router, predict, order, ahead)
    while filling.step(commit, reveal, drafter=drafter) is not None:
        pass
    return filling.z, filling.counts
