"""Which chunk comes next: routing policies.

A route is a function of revealed tokens and predicted distributions, never of sampled values still to come.

    B batch   L positions

To add one: write a `Router` and enter it in `router_of`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Self

import torch
from torch import Tensor

from dcdm.config import ModelConfig
from dcdm.decoding.commits import View
from dcdm.decoding.config import AdaBlock, check_routing
from dcdm.model import routing
from dcdm.model.layout import stack_rows
from dcdm.model.transformer import BlockZero, Model, PositionMasks

LATER = torch.iinfo(torch.long).max  # the id of what is not yet routed


@dataclass(frozen=True)
class Route:
    """The next chunk of each row."""

    ids: Tensor
    """(B, L): a position sees those whose id is not larger than its own; −1 padding."""
    active: Tensor
    """(B, L) bool: the positions to fill next, masked when the route was made; none in a row that is full."""
    block_zero: BlockZero | None = None
    """Block 0 of the canvas as it was for the rows that asked, which the next forward pass need not repeat."""

    def level(self) -> Tensor:
        """(B, 1): the id of the active positions; −1 in a row that is full."""
        return self.ids.masked_fill(~self.active, -1).amax(dim=-1, keepdim=True)

    def where(self, rows: Tensor, other: Route) -> Route:
        """This route in `rows` (B,), the other one elsewhere."""
        ids, active = (
            torch.where(rows[:, None], a, b) for a, b in ((self.ids, other.ids), (self.active, other.active))
        )
        return Route(ids, active, self.block_zero)


class Router:
    """A routing policy on the rows of a batch, which may come and go between two forward passes."""

    real: Tensor
    """(B, L): False at padding."""
    policy: Hashable = None
    """Routers of one policy can be joined."""
    narrows = False
    """Cut a chunk by what its first forward pass predicts; see `narrow`."""

    def __init__(self, *, every_step: bool = False, runs_block_zero: bool = False) -> None:
        self.every_step: bool | Tensor = every_step
        """Ask again after every forward pass, not only when a chunk is full; for all rows, or each (B,)."""
        self.runs_block_zero: bool | Tensor = runs_block_zero
        """A call of `next` costs a pass through block 0."""

    def next(self, z: Tensor, revealed: Tensor, route: Route, asking: Tensor) -> Route:
        """From the canvas, what is revealed, the route so far and the rows (B,) that ask: the route of their next
        chunk. What it says of other rows has no meaning."""
        raise NotImplementedError

    def narrow(self, route: Route, view: View, rows: Tensor) -> Route:
        """The route with the chunks of `rows` (B,) cut, from what their first forward pass predicts."""
        return route

    def state(self) -> tuple[str, ...]:
        """The names of the tensors (B, L) that are about rows, which are 0 (False) behind a row's end."""
        return ()

    def join(self, other: Self) -> None:
        """The rows of a router of the same policy behind the own."""
        for name in self.state():
            setattr(self, name, stack_rows(getattr(self, name), getattr(other, name), 0))

    def keep_rows(self, rows: Tensor, length: int) -> None:
        """Forget all rows but these (ascending), and positions from `length` on."""
        for name in self.state():
            setattr(self, name, getattr(self, name)[rows, :length])


def start(positions: PositionMasks) -> Route:
    """The route before the first: nothing is active, and what is given has id 0."""
    ids = torch.where(positions.free, LATER, torch.where(positions.real, 0, -1))
    return Route(ids, torch.zeros_like(positions.free))


@singledispatch
def router_of(
    model: Model,
    positions: PositionMasks,
    index: Tensor | None = None,
    name: str = "auto",
    adablock: AdaBlock | None = None,
    lanes: int | Tensor | None = None,
) -> Router:
    """The routing policy `name` for a model; "auto" is the one of its kind.

    `index` (B,) numbers the sequences for random routing; `lanes`, of all rows or each (B,), is for models that
    write in lanes.
    """
    config = model.config
    check_routing(config, name)
    if name == "paper-strided":
        strided = routing.fixed_partition(replace(config, routing="strided"), positions.free, positions.real)
        return Fixed(positions, strided, strided)
    if config.routes_from_noise:
        return (EqualRounds if name == "paper-equal" else FromNoise)(model, positions, name)
    if name == "adablock":
        assert adablock is not None
        return Adaptive(config, positions, adablock)
    if config.kind == "ar":  # the first position that is open; a position sees what stands before it
        place = torch.arange(positions.real.shape[1], device=positions.real.device).expand_as(positions.real)
        return Fixed(positions, place, place)
    if config.kind == "dcdm" and config.routing == "causal" and not config.prior_decides:
        return CausalRounds(model, positions)
    fixed = routing.fixed_partition(config, positions.free, positions.real, index)
    if name == "auto":
        return Fixed(positions, fixed, fixed)
    block = _blocks(config, positions, name)
    # for BDLM blocks are what a position may see; MDLM sees everything and fills in order, as parts of blocks do
    return Fixed(positions, fixed if config.kind == "mdlm" or name.startswith("sub") else block, block)


def _blocks(config: ModelConfig, positions: PositionMasks, name: str) -> Tensor:
    """The blocks, or parts of blocks, of a routing: (B, L), 0 where they do not count. Prompts that are tokens like
    others are counted through; but MDLM only fills in this order, so there the blocks begin behind them.
    """
    base, _, number = name.partition(":")
    counted = positions.real if config.prompts == "ordinary" and config.kind == "bdlm" else positions.free
    size = int(number) if number else config.block_size
    assert size is not None
    before = routing.free_rank(counted) - 1
    if base == "from-prompt":
        first = before.masked_fill(~positions.free, LATER).amin(dim=-1, keepdim=True)
        before = before + (-first) % size
    if base == "sub-blocks":
        assert config.block_size is not None
        block, place = before // config.block_size, before % config.block_size
        part = place // size
        if config.shift:  # the block before it predicts its first token, which comes alone
            part = torch.where(place == 0, 0, part + 1)
        return routing.label(counted, positions.real, block * (config.block_size + 1) + part + 1)
    return routing.label(counted, positions.real, before // size + 1)


class Fixed(Router):
    """An order that depends on no token: `ids` say who sees whom, `turn` which positions come next."""

    policy = "fixed"

    def __init__(self, positions: PositionMasks, ids: Tensor, turn: Tensor) -> None:
        super().__init__()
        self.real, self.ids, self.turn = positions.real, ids, turn

    def next(self, z: Tensor, revealed: Tensor, route: Route, asking: Tensor) -> Route:
        return Route(torch.where(self.real, self.ids, -1), lowest(self.turn, self.real & ~revealed))

    def state(self) -> tuple[str, ...]:
        return ("real", "ids", "turn")


class FromNoise(Router):
    """The paper's routing on the tokens so far: the lowest chunk with open positions is next.

    Revealed tokens count as earlier than it, unless the mask of the paper's appendix is asked for.
    """

    def __init__(self, model: Model, positions: PositionMasks, name: str) -> None:
        super().__init__(every_step=name == "paper-step", runs_block_zero=True)
        assert model.chunking is not None
        assert model.config.num_chunks is not None
        self.model, self.chunking, self.last = model, model.chunking, model.config.num_chunks + 1
        self.policy, self.hides_later, self.real = ("noise", name), name == "appendix-b", positions.real

    def next(self, z: Tensor, revealed: Tensor, route: Route, asking: Tensor) -> Route:
        block_zero = self.model.run_block_zero(z[asking], self.real[asking])
        own = torch.zeros_like(z)
        own[asking] = self.chunking.assign(block_zero.scores)
        active = lowest(own, self.real & ~revealed)
        # later than every id, so that it sees all that is revealed
        now = own if self.hides_later else torch.full_like(own, self.last)
        unrevealed = torch.where(active, now, LATER)
        return Route(torch.where(self.real, torch.where(revealed, own, unrevealed), -1), active, block_zero)

    def state(self) -> tuple[str, ...]:
        return ("real",)


class EqualRounds(FromNoise):
    """The paper's routing in K rounds of equal size: round k takes the open positions that fit subspace k best.

    Nothing else is taken from the argmax, which may put an empty page into one chunk. Positions keep the number of
    their round.
    """

    def __init__(self, model: Model, positions: PositionMasks, name: str) -> None:
        super().__init__(model, positions, name)
        self.free = positions.free

    def next(self, z: Tensor, revealed: Tensor, route: Route, asking: Tensor) -> Route:
        block_zero = self.model.run_block_zero(z[asking], self.real[asking])
        assigned = torch.where(revealed, route.ids, 0)
        k = (assigned.amax(dim=-1) + 1).clamp(max=self.last - 1)
        fit = torch.zeros(*z.shape, self.last - 1, dtype=block_zero.scores.dtype, device=z.device)
        fit[asking] = block_zero.scores + self.chunking.balance_bias
        active = routing.causal_round(fit, revealed, self.free, k, self.model.config)
        ids = torch.where(active, k[:, None], torch.where(revealed, assigned, LATER))
        return Route(torch.where(self.real, ids, -1), active, block_zero)

    def state(self) -> tuple[str, ...]:
        return ("real", "free")


class CausalRounds(Router):
    """Chunk k from the tokens of the chunks before it."""

    policy = "rounds"

    def __init__(self, model: Model, positions: PositionMasks) -> None:
        super().__init__(runs_block_zero=True)
        assert model.config.num_chunks is not None
        self.config, self.most = model.config, model.config.num_chunks
        self.router = model.incremental_router(positions.free)
        self.real, self.free, self.unseen = positions.real, positions.free, positions.real

    def next(self, z: Tensor, revealed: Tensor, route: Route, asking: Tensor) -> Route:
        new = revealed & self.unseen & asking[:, None]
        self.router.reveal(new, z)
        self.unseen = self.unseen & ~new
        assigned = torch.where(revealed, route.ids, 0)
        k = (assigned.amax(dim=-1) + 1).clamp(max=self.most)
        active = routing.causal_round(self.router.scores(asking), revealed, self.free, k, self.config)
        ids = torch.where(active, k[:, None], torch.where(revealed, assigned, LATER))
        return Route(torch.where(self.real, ids, -1), active)

    def state(self) -> tuple[str, ...]:
        return ("real", "free", "unseen")

    def join(self, other: Self) -> None:
        super().join(other)
        self.router.join(other.router)

    def keep_rows(self, rows: Tensor, length: int) -> None:
        super().keep_rows(rows, length)
        self.router.keep_rows(rows, length)


class Adaptive(Router):
    """A window is predicted; the block ends at its surest delimiter. That pass serves the first commit, too."""

    narrows = True

    def __init__(self, config: ModelConfig, positions: PositionMasks, settings: AdaBlock) -> None:
        super().__init__()
        self.policy, self.settings, self.grows = ("adablock", settings), settings, config.kind == "bdlm"
        self.real, self.fixed = positions.real, routing.fixed_partition(config, positions.free, positions.real)
        quarter = (positions.free.sum(dim=-1, keepdim=True) + 3) // 4
        window = quarter if settings.window is None else torch.full_like(quarter, settings.window)
        self.window = window.clamp(min=settings.block_size).expand_as(positions.real)

    def next(self, z: Tensor, revealed: Tensor, route: Route, asking: Tensor) -> Route:
        active = _first(self.real & ~revealed, self.window[:, :1])
        if not self.grows:
            return Route(torch.where(self.real, self.fixed, -1), active)
        assigned = torch.where(revealed, route.ids, 0)
        k = assigned.amax(dim=-1, keepdim=True) + 1
        ids = torch.where(active, k, torch.where(revealed, assigned, LATER))
        return Route(torch.where(self.real, ids, -1), active)

    def narrow(self, route: Route, view: View, rows: Tensor) -> Route:
        settings = self.settings
        confidence, token = view.predicted.best
        ends = torch.isin(token, torch.tensor(settings.delimiters).to(token)) & view.candidates
        sure = confidence.exp().masked_fill(~ends, -1.0)
        value, at = sure.max(dim=-1)
        default = view.position.gather(
            1, (view.candidates.sum(dim=-1) - 1).clamp(0, settings.block_size - 1)[:, None]
        )
        chosen = view.position.gather(1, at[:, None])
        last = torch.where((value >= settings.least)[:, None], chosen, default)
        place = torch.arange(route.ids.shape[1], device=last.device)
        dropped = route.active & (place > last)
        ids = torch.where(dropped, LATER, route.ids) if self.grows else route.ids
        return Route(ids, route.active & ~dropped).where(rows, route)

    def state(self) -> tuple[str, ...]:
        return ("real", "fixed", "window")


@dataclass
class _Part:
    """The rows (n,) of a batch, ascending, of one router."""

    rows: Tensor
    router: Router


class MixedRouter(Router):
    """Rows under different policies in one batch; it begins without any."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[_Part] = []
        self.count = 0

    def join(self, other: Router) -> None:
        """The rows of any router that is not mixed itself."""
        added = len(other.real)
        rows = torch.arange(self.count, self.count + added)
        self.count += added
        for part in self.parts:
            if part.router.policy == other.policy:
                part.router.join(other)
                part.rows = torch.cat([part.rows, rows])
                break
        else:
            self.parts.append(_Part(rows, other))
        self._refresh()

    def keep_rows(self, rows: Tensor, length: int) -> None:
        rows, kept = rows.cpu(), []
        for part in self.parts:
            stays = torch.isin(part.rows, rows)
            if bool(stays.any()):
                part.router.keep_rows(stays.nonzero().squeeze(-1), length)
                kept.append(_Part(torch.searchsorted(rows, part.rows[stays]), part.router))
        self.parts, self.count = kept, len(rows)
        self._refresh()

    def _refresh(self) -> None:
        self.narrows = any(part.router.narrows for part in self.parts)
        if len(self.parts) == 1:
            self.every_step = self.parts[0].router.every_step
            self.runs_block_zero = self.parts[0].router.runs_block_zero
            return
        device = self.parts[0].router.real.device if self.parts else None
        every_step, block_zero = torch.zeros(2, self.count, dtype=torch.bool, device=device)
        for part in self.parts:
            every_step[part.rows] = part.router.every_step
            block_zero[part.rows] = part.router.runs_block_zero
        self.every_step, self.runs_block_zero = every_step, block_zero

    def next(self, z: Tensor, revealed: Tensor, route: Route, asking: Tensor) -> Route:
        if len(self.parts) == 1:
            return self.parts[0].router.next(z, revealed, route, asking)
        ids, active = route.ids.clone(), route.active.clone()
        for part in self.parts:
            rows, length = part.rows.to(z.device), part.router.real.shape[1]
            if bool(asking[rows].any()):
                own = Route(route.ids[rows, :length], route.active[rows, :length])
                found = part.router.next(z[rows, :length], revealed[rows, :length], own, asking[rows])
                ids[rows, :length], active[rows, :length] = found.ids, found.active
        return Route(ids, active)

    def narrow(self, route: Route, view: View, rows: Tensor) -> Route:
        for part in self.parts:
            if part.router.narrows:
                mine = torch.zeros_like(rows)
                mine[part.rows.to(rows.device)] = True
                route = part.router.narrow(route, view, rows & mine)
        return route


def _first(pending: Tensor, count: Tensor | int) -> Tensor:
    """The first `count` True of each row, (B, L) bool."""
    return pending & (pending.cumsum(dim=-1) <= count)


def lowest(ids: Tensor, pending: Tensor) -> Tensor:
    """The pending positions that share the smallest id of their row."""
    least = ids.masked_fill(~pending, LATER).amin(dim=-1, keepdim=True)
    return pending & (ids == least)


@torch.no_grad()
def current_ids(model: Model, z: Tensor, prompt: Tensor | None = None) -> Tensor:
    """The order of the positions of a partly filled canvas, for `Model.denoise`: (B, L).

    Chunks are formed one after the other from what is revealed; the first that holds a MASK is the active one,
    and whatever is not yet routed comes after it.
    """
    config, positions = model.config, model.position_masks(z, prompt)
    router = router_of(model, positions)
    shown = z != config.mask_id
    route, every = start(positions), torch.ones(len(z), dtype=torch.bool, device=z.device)
    if config.kind == "ar" or config.routes_from_noise:
        return router.next(z, positions.real & shown, route, every).ids
    revealed = positions.real & ~positions.free
    while True:
        route = router.next(z.masked_fill(~revealed, config.mask_id), revealed, route, every)
        full = route.active.any(dim=-1) & (shown | ~route.active).all(dim=-1)
        if not bool(full.any()):
            return route.ids
        revealed = revealed | (route.active & full[:, None])
