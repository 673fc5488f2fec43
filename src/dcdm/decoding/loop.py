"""The loop: route → choose the active chunk → predict its masked positions → commit some → repeat.

Likelihoods run it with the true tokens, generation with drawn ones.

    B batch   L positions   A asked positions   N those of all rows   V the tokens that can be predicted
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from dcdm.config import NUM_SPECIALS
from dcdm.decoding.commits import Commit, Distributions, View
from dcdm.decoding.routes import Route, Router, start
from dcdm.model.layout import RaggedIndex, stack_rows
from dcdm.model.products import at_least_fp32
from dcdm.model.transformer import BlockZero, Model, PositionMasks


@dataclass(frozen=True)
class Predicted:
    states: Tensor
    """(N, d): final states from which the N active positions of all rows are predicted, row by row."""
    computed: Tensor
    """(B,): positions that went through all blocks."""
    reused: Tensor
    """(B,): positions whose keys and values were remembered instead."""


class Predictor(ABC):
    """Makes predictions for the rows that have active positions; the others cost nothing."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @abstractmethod
    def __call__(self, z: Tensor, revealed: Tensor, route: Route) -> Predicted:
        """Predictions for the active positions of `route`."""

    def distributions(self, valid: Tensor, states: Tensor) -> Distributions:
        """Those of `Predicted.states`, at the True places of `valid` (B, A)."""
        return Distributions(valid, states, self.log_p_of, self.model.config.vocab_size)

    def log_p_of(self, states: Tensor) -> Tensor:
        """Log-probabilities (…, V) of the tokens that can be predicted."""
        logits = predictable(self.model, states)
        return logits.to(at_least_fp32(logits)).log_softmax(dim=-1)


class Uncached(Predictor):
    """Every forward pass computes all that the active chunk can see."""

    def __call__(self, z: Tensor, revealed: Tensor, route: Route) -> Predicted:
        rows = route.active.any(dim=-1)
        # masked positions that the active ones cannot see become padding: nobody asks for them
        ids = torch.where((route.ids <= route.level()) | revealed, route.ids, -1)
        states = self.model.denoise(z[rows], ids[rows], route.block_zero)
        if self.model.config.kind == "ar":
            states = states.roll(1, dims=1)  # position ℓ−1 predicts ℓ
        computed = torch.where(rows, (ids >= 0).sum(dim=-1), 0)
        return Predicted(states[route.active[rows]], computed, torch.zeros_like(computed))


def predictable(model: Model, states: Tensor) -> Tensor:
    """Logits (…, V−3) of the tokens that can be predicted; specials are excluded for AR too."""
    logits = model.token_logits(states)
    return logits[..., :-NUM_SPECIALS] if model.config.predicts_specials else logits


@dataclass(frozen=True)
class Counts:
    """What decoding cost; each (B,)."""

    forwards: Tensor
    """Passes through all blocks, cache writes included."""
    rounds: Tensor
    """Routing passes through block 0."""
    computed: Tensor
    """Positions that went through all blocks, over all forward passes."""
    reused: Tensor
    """Positions whose keys and values came from the cache, over all forward passes."""


@dataclass(frozen=True)
class Committed:
    """What one forward pass filled."""

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
    """(B,): the number of the row's forward pass, from 1."""

    def log_p(self) -> Tensor:
        """(B, A): the model's own log-probability of the token; 0 where nothing was filled."""
        return self.predicted.log_p(self.tokens, self.fill)


Reveal = Callable[[View, Tensor], Tensor]
"""(what was predicted, what will be filled (B, A)) → the tokens (B, A) to place there."""


class DecodingState:
    """Canvases (B, L) on their way from MASKs to text: `step` is one forward pass for all of them.

    Rows may join and leave between two steps, if the router is a `MixedRouter`. What a row becomes does not depend
    on the others.
    """

    POSITIONS: ClassVar[tuple[str, ...]] = ("real", "revealed", "order", "uniform")
    """The tensors (B, L, …) about rows beside `z`; 0 (False) behind a row's end."""
    ROWS: ClassVar[tuple[str, ...]] = ("steps", "chunk", "forwards", "rounds", "computed", "reused")
    """Those (B,)."""

    def __init__(
        self, z: Tensor, positions: PositionMasks, router: Router, predict: Predictor, order: Tensor | None = None,
        uniform: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`z` holds MASK at its free positions; `order` (B, L) is the noise of random commit policies, `uniform`
        (B, L, U) that of draws."""
        self.z, self.real, self.router, self.predict = z.clone(), positions.real, router, predict
        nothing = torch.zeros(*z.shape, 1, dtype=torch.float64)
        self.order = (nothing[..., 0] if order is None else order).to(z.device)
        self.uniform = (nothing if uniform is None else uniform).to(z.device)
        self.revealed, self.route = positions.real & ~positions.free, start(positions)
        self.steps = self.chunk = torch.zeros(len(z), dtype=torch.long, device=z.device)
        """(B,): forward passes that the active chunk has had, and its number from 1."""
        self.forwards = self.rounds = self.computed = self.reused = self.steps

    @property
    def counts(self) -> Counts:
        return Counts(*(count.cpu() for count in (self.forwards, self.rounds, self.computed, self.reused)))

    def join(self, new: Self) -> None:
        """The rows of `new` behind the own; the predictor is told by the caller."""
        self.z = stack_rows(self.z, new.z, self.predict.model.config.pad_id)
        for name in self.POSITIONS:
            setattr(self, name, stack_rows(getattr(self, name), getattr(new, name), 0))
        for name in self.ROWS:
            setattr(self, name, torch.cat([getattr(self, name), getattr(new, name)]))
        ids = stack_rows(self.route.ids, new.route.ids, -1)
        self.route = Route(ids, stack_rows(self.route.active, new.route.active, False))
        self.router.join(new.router)

    def keep_rows(self, rows: Tensor) -> None:
        """All rows leave but these, which are in ascending order; positions that nobody has any more go too."""
        length = max(1, int((self.real[rows].any(dim=0)).nonzero().amax()) + 1) if len(rows) else 1
        for name in ("z", *self.POSITIONS):
            setattr(self, name, getattr(self, name)[rows, :length])
        for name in self.ROWS:
            setattr(self, name, getattr(self, name)[rows])
        self.route = Route(self.route.ids[rows, :length], self.route.active[rows, :length])
        self.router.keep_rows(rows, length)

    def step(self, commit: Commit, reveal: Reveal, closed: Tensor | None = None) -> Committed | None:
        """One forward pass: route, choose the active chunk, predict its masked positions, commit some of them.

        None if nothing is left to fill. `closed` (B, L): positions that need no token any more.
        """
        closed = self.revealed if closed is None else self.revealed | closed
        pending = self.real & ~closed
        busy = pending.any(dim=-1)
        if not bool(busy.any()):
            return None
        spent = ~(self.route.active & pending).any(dim=-1)
        block_zero = self._route(closed, busy, spent)
        canvas, asked = self._read(pending)
        predicted = self.predict(canvas, self.revealed, Route(self.route.ids, asked, block_zero))
        where = RaggedIndex(asked)
        distributions = self.predict.distributions(where.valid, predicted.states)
        view = View(distributions, where.valid, where.index, self.steps, where.pick(self.order))
        if self.router.narrows:
            self.route = self.router.narrow(self.route, view, spent & busy)
            view = replace(view, candidates=where.valid & where.pick(self.route.active))
        fill, tokens = self._choose(view, where, commit, reveal)
        row, at = fill.nonzero(as_tuple=True)
        self.z[row, view.position[row, at]] = tokens[row, at]
        self.revealed[row, view.position[row, at]] = True
        self.steps = self.steps + 1
        self.forwards = self.forwards + busy
        self.computed = self.computed + torch.where(busy, predicted.computed, 0)
        self.reused = self.reused + torch.where(busy, predicted.reused, 0)
        return Committed(view.position, tokens, fill, distributions, self.chunk, self.forwards)

    def _route(self, closed: Tensor, busy: Tensor, spent: Tensor) -> BlockZero | None:
        """The next chunk of the `busy` rows whose chunk is `spent`, or that ask after every forward pass.

        Returns block 0 of the canvas, where the router has computed it for all rows that the pass is about.
        """
        asking, block_zero = busy & (spent | self.router.every_step), None
        if bool(asking.any()):
            known = torch.where(asking[:, None], closed, self.revealed)
            found = self.router.next(self.z, known, self.route, asking)
            self.route = found.where(asking, self.route)
            block_zero = found.block_zero if torch.equal(asking, busy) else None
            self.rounds = self.rounds + (asking & self.router.runs_block_zero)
        self.steps, self.chunk = torch.where(spent, 0, self.steps), self.chunk + (spent & busy)
        return block_zero

    def _read(self, pending: Tensor) -> tuple[Tensor, Tensor]:
        """The canvas that the forward pass reads, and the positions (B, L) that it predicts."""
        return self.z, self.route.active & pending

    def _choose(self, view: View, where: RaggedIndex, commit: Commit, reveal: Reveal) -> tuple[Tensor, Tensor]:
        """Which of the predicted positions are filled, and with what: (B, A) each."""
        fill = commit(view)
        return fill, reveal(view, fill)


@torch.no_grad()
def fill_canvas(
    z: Tensor, positions: PositionMasks, router: Router, predict: Predictor, commit: Commit, reveal: Reveal,
    order: Tensor | None = None,
) -> tuple[Tensor, Counts]:  # fmt: skip
    """Fill `z` (B, L), which holds MASK at its free positions, chunk by chunk: the filled canvas and what it cost.

    `order` (B, L) is the noise of random commit policies.
    """
    state = DecodingState(z, positions, router, predict, order)
    while state.step(commit, reveal) is not None:
        pass
    return state.z, state.counts
