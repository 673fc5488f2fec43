"""Decoding with a model that predicts from the left: its router of lanes, its cache, and its drafts.

The core asks for these by the model's class: `router_of`, `cached_predictor` and `batch_of`.

    B batch   L positions   A asked positions
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import torch
from torch import Tensor

from dcdm.decoding.batch import ContinuousBatch, batch_of
from dcdm.decoding.caching import Cached, Needed, Part, PrefixCache, cached_predictor
from dcdm.decoding.commits import Commit, View
from dcdm.decoding.config import AdaBlock, check_routing
from dcdm.decoding.loop import Committed, DecodingState, Predicted, Predictor, Reveal
from dcdm.decoding.routes import LATER, Fixed, Route, Router, router_of
from dcdm.decoding.text import BatchRow
from dcdm.lanes.drafts import Drafter, Drafts, accept_or_replace, propose, shifted, verify
from dcdm.lanes.masks import DRAFTS, lane_partition, led_positions
from dcdm.lanes.model import LaneModel
from dcdm.model.layout import RaggedIndex
from dcdm.model.masks import CLEAN
from dcdm.model.transformer import Model, PositionMasks

# --- routing -----------------------------------------------------------------------------------------------------


@router_of.register(LaneModel)
def lane_router(
    model: LaneModel,
    positions: PositionMasks,
    index: Tensor | None = None,
    name: str = "auto",
    adablock: AdaBlock | None = None,
    lanes: int | Tensor | None = None,
) -> Router:
    """Lanes that wait for each other: chunk k is the k-th position of every lane."""
    if model.config.kind != "lanes":  # another partition, predicted from the left
        return router_of.dispatch(Model)(model, positions, index, name, adablock)
    check_routing(model.config, name)
    ids, _ = lane_partition(model.config, positions.free, positions.real, lanes)
    return Fixed(positions, ids, ids)


class DraftedLanes(Router):
    """Lanes that run as far as each gets: the first open position of every one.

    Ids count the forward passes after which a token is known.
    """

    policy = "drafted"

    def __init__(self, positions: PositionMasks, lane: Tensor) -> None:
        """`lane` (B, L), from 1."""
        super().__init__()
        self.real, self.lane = positions.real, lane

    def next(self, z: Tensor, revealed: Tensor, route: Route, asking: Tensor) -> Route:
        pending = self.real & ~revealed
        place = torch.arange(pending.shape[1], device=pending.device)
        upto = torch.where(pending, place, -1).cummax(dim=-1).values
        before = torch.nn.functional.pad(upto[:, :-1], (1, 0), value=-1)  # the open position before each
        active = pending & ((before < 0) | (self.lane.gather(1, before.clamp(min=0)) != self.lane))
        known = torch.where(route.ids < LATER, route.ids, 0)
        ids = torch.where(active, known.amax(dim=-1, keepdim=True) + 1, torch.where(pending, LATER, route.ids))
        return Route(torch.where(self.real, ids, -1), active)

    def state(self) -> tuple[str, ...]:
        return ("real", "lane")


# --- predicting --------------------------------------------------------------------------------------------------


class CachedFromLeft(Cached):
    """The tokens that were committed last come in and predict what stands on their right."""

    def __init__(
        self, model: LaneModel, positions: PositionMasks | None = None, prefixes: PrefixCache | None = None
    ) -> None:
        super().__init__(model, positions, prefixes)
        self._drafts: list[tuple[Tensor, RaggedIndex, Tensor]] = []
        """Of each pass that read draft tokens: rows, positions, places in the cache."""

    def _extended(self, z: Tensor, revealed: Tensor, route: Route) -> Predicted:
        self._drafts = []
        return super()._extended(z, revealed, route)

    def _needed(self, z: Tensor, revealed: Tensor, route: Route) -> Needed:
        """Leaders, which predict what stands on their right; seeds, which predict themselves; draft tokens, which
        are forgotten unless they are accepted; and tokens that are only written."""
        ids = route.ids
        new = (ids >= 0) & (ids < route.level()) & revealed & ~self.written
        led = led_positions(ids) & route.active
        asked = torch.nn.functional.pad(led[:, 1:], (0, 1))  # the slots on the left of what is led
        drafts = route.active & ~revealed & (z != self.model.config.mask_id)
        led = led | (route.active & shifted(drafts))
        predicting = [
            Part(asked & new, stays=True, stream=CLEAN),
            Part(route.active & ~led, stays=False),
            Part(drafts, stays=False, stream=_streams(drafts)),
        ]
        return Needed(predicting, Part(new & ~asked, stays=True, stream=CLEAN), led)

    def _pass(self, z: Tensor, route: Route, need: Needed, rows: Tensor) -> tuple[Tensor, Tensor]:
        states, home = super()._pass(z, route, need, rows)
        drafts = RaggedIndex(need.predicting[-1].where[rows])
        if count := drafts.index.shape[1]:
            answers = states.shape[1]
            self._drafts.append((rows, drafts, self.cache.index[:, answers - count : answers]))
        return states, home

    def keep_accepted(self, accepted: Tensor) -> None:
        """Told which draft tokens (B, L) of the last forward pass are part of the text."""
        accepted = accepted[self.rows]
        for rows, where, index in self._drafts:
            self.cache.promote(rows, index, where.pick(accepted[rows]) & where.valid)
        self._drafts = []
        self.written |= accepted


def _streams(drafts: Tensor) -> Tensor:
    """(B, L): the stream of each draft token, one for every run of them."""
    place = torch.arange(drafts.shape[1], device=drafts.device)
    begins = drafts & ~shifted(drafts)
    return DRAFTS + torch.where(begins, place, 0).cummax(dim=-1).values


cached_predictor.register(LaneModel, CachedFromLeft)

# --- one forward pass --------------------------------------------------------------------------------------------


class LaneState(DecodingState):
    """Canvases some of whose lanes have drafts: a forward pass verifies what was proposed after the one before."""

    POSITIONS: ClassVar[tuple[str, ...]] = (*DecodingState.POSITIONS, "lane")
    ROWS: ClassVar[tuple[str, ...]] = (*DecodingState.ROWS, "ahead")

    def __init__(
        self, z: Tensor, positions: PositionMasks, router: Router, predict: Predictor, order: Tensor | None = None,
        uniform: Tensor | None = None, *, lane: Tensor, ahead: Tensor, drafter: Drafter,
    ) -> None:  # fmt: skip
        """`lane` (B, L) numbers the lanes, `ahead` (B,) says how many tokens of each are drafted."""
        super().__init__(z, positions, router, predict, order, uniform)
        assert isinstance(predict, CachedFromLeft)
        assert isinstance(predict.model, LaneModel)
        self.model, self.cached, self.drafter = predict.model, predict, drafter
        self.lane, self.ahead = lane, ahead.to(z.device)
        self.drafts = Drafts.none(self.model)
        self._reading = Drafts.none(self.model)
        """Those of the pass that is under way."""

    def keep_rows(self, rows: Tensor) -> None:
        super().keep_rows(rows)
        self.drafts = self.drafts.keep_rows(rows)

    def step(self, commit: Commit, reveal: Reveal, closed: Tensor | None = None) -> Committed | None:
        committed = super().step(commit, reveal, closed)
        if committed is not None and bool(self.ahead.any()):
            left = self.real & ~self.revealed
            self._draft(committed, left if closed is None else left & ~closed)
        return committed

    def _read(self, pending: Tensor) -> tuple[Tensor, Tensor]:
        """With the draft tokens in their places; what stands behind each is predicted, too."""
        canvas, asked = super()._read(pending)
        self._reading = drafts = self.drafts[pending[self.drafts.row, self.drafts.position]]
        if not len(drafts):
            return canvas, asked
        asked = asked | (shifted(drafts.places(canvas.shape)) & pending)
        self.route = Route(torch.where(asked, self.route.level(), self.route.ids), asked)
        canvas = canvas.clone()
        canvas[drafts.row, drafts.position] = drafts.token
        return canvas, asked

    def _choose(self, view: View, where: RaggedIndex, commit: Commit, reveal: Reveal) -> tuple[Tensor, Tensor]:
        drafts = self._reading
        if not len(drafts):
            return super()._choose(view, where, commit, reveal)
        checked = verify(self.model, drafts, view, where, drafts.places(self.z.shape), self.drafter)
        self.cached.keep_accepted(checked.accepted)
        fill = commit(view) & checked.fill
        return fill, torch.where(checked.tokens >= 0, checked.tokens, reveal(view, fill))

    def _draft(self, committed: Committed, left: Tensor) -> None:
        """Propose what follows; places behind rejected draft tokens are asked for again. `left` (B, L) is open."""
        again = self.route.active & left & (self.ahead > 0)[:, None]
        self.route = Route(torch.where(again, LATER, self.route.ids), self.route.active & ~again)
        continues = left & (self.lane > 0) & (self.lane == shifted(self.lane))
        self.drafts = propose(self.model, committed, continues, self.ahead, self.drafter)


# --- texts -------------------------------------------------------------------------------------------------------


class LaneBatch(ContinuousBatch):
    """Texts that are written in lanes; the batch samples and verifies their drafts."""

    DRAWS: ClassVar[tuple[str, ...]] = ("token", "guess", "verify")
    """For a token, for a draft token, and for whether that is accepted."""

    def __init__(self, model: LaneModel, prefixes: PrefixCache | None = None) -> None:
        super().__init__(model, prefixes)
        none, no_lane = self._state.real, self._state.z
        uniform = self._state.uniform.expand(-1, -1, len(self.DRAWS))
        self._state = LaneState(
            no_lane, PositionMasks(none, none, none), self._state.router, self._cache(), None, uniform,
            lane=no_lane, ahead=no_lane[:, 0], drafter=self,
        )  # fmt: skip

    def _policy(self, text: BatchRow) -> tuple[Hashable, ...]:
        return *super()._policy(text), bool(text.decoding.drafts)

    def _rows(self, z: Tensor, positions: PositionMasks, texts: list[BatchRow]) -> DecodingState:
        lanes = torch.tensor([text.decoding.lanes for text in texts])
        ids, lane = lane_partition(self.model.config, positions.free, positions.real, lanes)
        for text, row in zip(texts, lane.tolist(), strict=True):
            text.lanes = row
        ahead = torch.tensor([text.decoding.drafts or 0 for text in texts])
        router = DraftedLanes(positions, lane) if bool(ahead.any()) else Fixed(positions, ids, ids)
        noise = self._noise(texts, z.shape[1])
        return LaneState(z, positions, router, self._cache(), *noise, lane=lane, ahead=ahead, drafter=self)

    def _closed(self) -> Tensor | None:
        """Chunks of lanes do not depend on what is written: positions after an EOS can stay masked."""
        return self._after_eos()

    def draft(self, log_q: Tensor, row: Tensor, position: Tensor) -> Tensor:
        """As `Drafter` says: each draft token is drawn with a uniform number of its own."""
        tokens = torch.zeros_like(row)
        for sampling, rows in self._samplings():
            mine = rows[row]
            chance = self._state.uniform[row[mine], position[mine], 1]
            tokens[mine] = sampling.draw(sampling.log_p(log_q[mine]), chance)
        return tokens

    def verify(
        self, log_p: Tensor, log_q: Tensor, row: Tensor, position: Tensor, token: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `Drafter` says."""
        right, instead = torch.zeros_like(row, dtype=torch.bool), torch.zeros_like(row)
        for sampling, rows in self._samplings():
            mine = rows[row]
            draw, accept = (self._state.uniform[row[mine], position[mine], use] for use in (0, 2))
            right[mine], instead[mine] = accept_or_replace(
                sampling, log_p[mine], log_q[mine], token[mine], accept, draw
            )
        return right, instead


@batch_of.register(LaneModel)
def lane_batch(model: LaneModel, prefixes: PrefixCache | None = None) -> ContinuousBatch:
    return (LaneBatch if model.config.kind == "lanes" else ContinuousBatch)(model, prefixes)
