"""The loop: route → choose the active chunk → predict its masked positions → commit some → repeat.

Likelihoods run it with the true tokens, generation with drawn ones.

    B batch   L positions   A asked positions
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dcdm.decoding import routes
from dcdm.decoding.commits import Commit, View
from dcdm.decoding.predictors import Predictor
from dcdm.decoding.routes import Router
from dcdm.model.layout import RaggedIndex
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


@dataclass(frozen=True)
class Committed:
    """What one forward filled."""

    position: Tensor
    """(B, A)."""
    tokens: Tensor
    """(B, A)."""
    fill: Tensor
    """(B, A) bool: which of them were filled."""
    log_p: Tensor
    """(B, A): the model's own log-probability of the token; 0 where nothing was filled."""
    chunk: Tensor
    """(B,): the number of the row's chunk, from 1 in the order of filling."""
    forward: Tensor
    """(B,): the number of the row's forward, from 1."""


Reveal = Callable[[View, Tensor], Tensor]
"""(what was predicted, what will be filled (B, A)) → the tokens (B, A) to place there."""


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
    settled: Callable[[Tensor, Tensor, Counts], Tensor] | None = None,
    on_commit: Callable[[Committed], None] | None = None,
) -> tuple[Tensor, Counts]:
    """Fill `z` (B, L), which holds MASK at its free positions, chunk by chunk.

    `order` (B, L) is the noise of random commit policies. `settled(z, revealed, counts)` names positions (B, L)
    that need no token any more; it is asked between forwards and once more at the end. Returns the filled canvas
    and what it cost.
    """
    order = torch.zeros(z.shape, device=z.device) if order is None else order.to(z.device)
    revealed, route = sets.real & ~sets.free, routes.start(sets)
    counts = Counts.zero(len(z))
    step = chunk = torch.zeros(len(z), dtype=torch.long, device=z.device)
    z = z.clone()
    while True:
        closed = revealed if settled is None else revealed | settled(z, revealed, counts)
        pending = sets.real & ~closed
        busy = pending.any(dim=-1)
        if not bool(busy.any()):
            return z, counts
        spent = ~(route.active & pending).any(dim=-1)
        asking = busy & (spent | router.every_step)
        stage_one = None
        if bool(asking.any()):
            route = router.next(z, torch.where(asking[:, None], closed, revealed), route, asking).where(
                asking, route
            )
            stage_one = route.stage_one if torch.equal(asking, busy) else None
            counts.rounds += (asking & router.counted).cpu()
        step, chunk = torch.where(spent, 0, step), chunk + (spent & busy)
        asked = route.active & pending
        predicted = predict(z, revealed, routes.Route(route.ids, asked, stage_one))
        where = RaggedIndex(asked)
        distributions = predict.distributions(where.valid, predicted.states)
        view = View(distributions, where.valid, where.index, step, where.pick(order))
        if router.narrow is not None:
            route = router.narrow(route, view, spent & busy)
            view = View(distributions, where.valid & where.pick(route.active), view.position, step, view.order)
        fill = commit(view)
        tokens = reveal(view, fill)
        row, at = fill.nonzero(as_tuple=True)
        z[row, view.position[row, at]] = tokens[row, at]
        revealed[row, view.position[row, at]] = True
        step = step + 1
        counts.forwards += busy.cpu()
        counts.computed += torch.where(busy, predicted.computed, 0).cpu()
        counts.reused += torch.where(busy, predicted.reused, 0).cpu()
        if on_commit is not None:
            on_commit(
                Committed(view.position, tokens, fill, distributions.log_p(tokens, fill), chunk, counts.forwards)
            )
