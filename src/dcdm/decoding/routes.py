"""Which chunk comes next: routing policies.

A route is a function of revealed tokens and predicted distributions, never of sampled values still to come.

    B batch   L positions

To add one: write a function that makes a `Router` and enter it in `router_of`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dcdm.config import ConfigError, ModelConfig
from dcdm.decoding.commits import View
from dcdm.model import routing
from dcdm.model.transformer import Model, Sets, StageOne

LATER = torch.iinfo(torch.long).max  # the id of what is not yet routed


@dataclass(frozen=True)
class Route:
    """The next chunk of each row."""

    ids: Tensor
    """(B, L): a position sees those whose id is not larger than its own; −1 padding."""
    active: Tensor
    """(B, L) bool: the positions to fill next, masked when the route was made; none in a row that is full."""
    stage_one: StageOne | None = None
    """Block 0 of the canvas as it was for the rows that asked, which the next forward need not repeat."""

    def level(self) -> Tensor:
        """(B, 1): the id of the active positions; −1 in a row that is full."""
        return self.ids.masked_fill(~self.active, -1).amax(dim=-1, keepdim=True)

    def where(self, rows: Tensor, other: Route) -> Route:
        """This route in `rows` (B,), the other one elsewhere."""
        ids, active = (
            torch.where(rows[:, None], a, b) for a, b in ((self.ids, other.ids), (self.active, other.active))
        )
        return Route(ids, active, self.stage_one)


@dataclass(frozen=True)
class Router:
    next: Callable[[Tensor, Tensor, Route, Tensor], Route]
    """(z, revealed, the route so far, the rows (B,) that ask) → the route of their next chunk; what it says of
    other rows is void."""
    narrow: Callable[[Route, View, Tensor], Route] | None = None
    """(route, predictions of a chunk's first forward, rows it concerns) → the chunk, cut by what was predicted."""
    every_step: bool = False
    """Ask again after every forward, not only when a chunk is full."""
    counted: bool = False
    """A call of `next` costs a pass through block 0."""
    lanes: Tensor | None = None
    """(B, L): the lane of each position, from 1, for models that write in lanes."""


@dataclass(frozen=True)
class AdaBlock:
    """Block ends at predicted delimiters; training-free, for BDLM and MDLM."""

    delimiters: tuple[int, ...]
    block_size: int
    least: float = 0.3
    """τ_D: the confidence that a delimiter needs."""
    window: int | None = None
    """Positions among which a delimiter is looked for; None means a quarter of the free ones."""

    def __post_init__(self) -> None:
        if not self.delimiters:
            raise ConfigError("routing='adablock' needs delimiters: the ids of the tokens at which blocks may end")
        if self.block_size < 1 or (self.window is not None and self.window < 1):
            raise ConfigError(f"adablock: block_size={self.block_size} and window={self.window} must be at least 1")
        if not 0 <= self.least <= 1:
            raise ConfigError(f"adablock: least={self.least} is a probability and must lie in [0, 1]")


ROUTINGS = ("auto", "paper-chunk", "paper-step", "appendix-b", "blocks", "adablock")


def start(sets: Sets) -> Route:
    """Nothing is active; what is given from the start has id 0."""
    ids = torch.where(sets.free, LATER, torch.where(sets.real, 0, -1))
    return Route(ids, torch.zeros_like(sets.free))


def described(config: ModelConfig) -> str:
    """The kind of a model as people call it."""
    if config.kind == "lanes":
        return "lanes"
    return f"DCDM with {config.routing} routing" if config.kind == "dcdm" else config.kind.upper()


def fitting_routings(config: ModelConfig) -> list[str]:
    """The routings that fit a model's kind; "auto", which is its own, comes first."""
    fits = ["auto"]
    if config.routes_from_noise:
        fits += ["paper-chunk", "paper-step", "appendix-b"]
    if config.kind in ("bdlm", "mdlm") and not config.predicts_from_left:
        fits += ["blocks", "adablock"]
    return fits


def check_routing(config: ModelConfig, name: str) -> None:
    """Refuse by name what does not fit the kind."""
    base, colon, number = name.partition(":")
    fits = fitting_routings(config)
    if base not in ROUTINGS:
        raise ConfigError(f"routing={name!r} is not known; choose one of {', '.join(ROUTINGS)}")
    if base not in fits:
        raise ConfigError(f"routing={name!r} does not fit {described(config)}; choose one of {', '.join(fits)}")
    if colon and (base != "blocks" or not re.fullmatch("0*[1-9][0-9]{0,8}", number)):
        raise ConfigError(f"routing={name!r}: only blocks takes a number, as in blocks:8")
    if name == "blocks" and config.block_size is None:
        raise ConfigError(f"routing={name!r} needs a block size, as in blocks:8")


def router_of(
    model: Model,
    sets: Sets,
    index: Tensor | None = None,
    name: str = "auto",
    adablock: AdaBlock | None = None,
    lanes: int | Tensor | None = None,
) -> Router:
    """The routing policy `name` for a model; "auto" is the one of its kind. `lanes`: of all rows, or each (B,)."""
    config = model.config
    check_routing(config, name)
    if name == "adablock":
        assert adablock is not None
        return _adablock(config, sets, adablock)
    if config.kind == "ar":
        return _next_position(sets)
    if config.routes_from_noise:
        return _from_noise(model, sets, name)
    if config.kind == "dcdm" and config.routing == "causal" and not config.prior_decides:
        return _causal_rounds(model, sets)
    if name.startswith("blocks"):
        return _blocks(config, sets, name)
    lane = None
    if config.kind == "lanes":
        fixed, lane = routing.lane_partition(config, sets.free, sets.real, lanes)
    else:
        fixed = routing.fixed_partition(config, sets.free, sets.real, index)
    return Router(lambda z, revealed, *_: Route(fixed, lowest(fixed, sets.real & ~revealed)), lanes=lane)


def _next_position(sets: Sets) -> Router:
    """AR: the first position that is open; a position sees what stands before it."""
    place = torch.arange(sets.real.shape[1], device=sets.real.device)
    ids = torch.where(sets.real, place, -1)
    return Router(lambda z, revealed, *_: Route(ids, _first(sets.real & ~revealed, 1)))


def _from_noise(model: Model, sets: Sets, name: str) -> Router:
    """The paper's routing on the tokens as they stand: the lowest chunk with open positions is next.

    Revealed tokens count as earlier than it, unless the mask of the paper's appendix is asked for.
    """
    assert model.chunking is not None
    assert model.config.num_chunks is not None
    chunking, last = model.chunking, model.config.num_chunks + 1

    def route_next(z: Tensor, revealed: Tensor, route: Route, asking: Tensor) -> Route:
        stage_one = model.run_stage_one(z[asking], sets.real[asking])
        own = torch.zeros_like(z)
        own[asking] = chunking.assign(stage_one.scores)
        active = lowest(own, sets.real & ~revealed)
        now = own if name == "appendix-b" else torch.full_like(own, last)
        unrevealed = torch.where(active, now, LATER)
        return Route(torch.where(sets.real, torch.where(revealed, own, unrevealed), -1), active, stage_one)

    return Router(route_next, every_step=name == "paper-step", counted=True)


def _causal_rounds(model: Model, sets: Sets) -> Router:
    """Chunk k from the tokens of the chunks before it."""
    config, rounds = model.config, model.rounds(sets.free)
    assert config.num_chunks is not None
    most = config.num_chunks
    unseen = sets.real

    def route_next(z: Tensor, revealed: Tensor, route: Route, asking: Tensor) -> Route:
        nonlocal unseen
        new = revealed & unseen & asking[:, None]
        rounds.reveal(new, z)
        unseen = unseen & ~new
        assigned = torch.where(revealed, route.ids, 0)
        k = (assigned.amax(dim=-1) + 1).clamp(max=most)
        active = routing.causal_round(rounds.scores(asking), revealed, sets.free, k, config)
        ids = torch.where(active, k[:, None], torch.where(revealed, assigned, LATER))
        return Route(torch.where(sets.real, ids, -1), active)

    return Router(route_next, counted=True)


def _blocks(config: ModelConfig, sets: Sets, name: str) -> Router:
    """Blocks in order. For BDLM they are what a position may see; MDLM sees everything and only fills in order."""
    number = name.partition(":")[2]
    size = int(number) if number else config.block_size
    assert size is not None
    block = routing.label(sets.free, sets.real, (routing.free_rank(sets.free) + size - 1) // size)
    ids = block if config.kind == "bdlm" else routing.fixed_partition(config, sets.free, sets.real)
    return Router(lambda z, revealed, *_: Route(ids, lowest(block, sets.real & ~revealed)))


def _adablock(config: ModelConfig, sets: Sets, settings: AdaBlock) -> Router:
    """A window is predicted; the block ends at its surest delimiter, and that forward serves the first commit."""
    grows = config.kind == "bdlm"
    quarter = (sets.free.sum(dim=-1) + 3) // 4
    window = quarter if settings.window is None else torch.full_like(quarter, settings.window)
    window = window.clamp(min=settings.block_size)

    def route_next(z: Tensor, revealed: Tensor, route: Route, asking: Tensor) -> Route:
        active = _first(sets.real & ~revealed, window[:, None])
        if not grows:
            return Route(routing.fixed_partition(config, sets.free, sets.real), active)
        assigned = torch.where(revealed, route.ids, 0)
        k = assigned.amax(dim=-1, keepdim=True) + 1
        ids = torch.where(active, k, torch.where(revealed, assigned, LATER))
        return Route(torch.where(sets.real, ids, -1), active)

    def narrow(route: Route, view: View, rows: Tensor) -> Route:
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
        ids = torch.where(dropped, LATER, route.ids) if grows else route.ids
        return Route(ids, route.active & ~dropped).where(rows, route)

    return Router(route_next, narrow)


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
    config, sets = model.config, model.sets(z, prompt)
    router = router_of(model, sets)
    shown = z != config.mask_id
    route, every = start(sets), torch.ones(len(z), dtype=torch.bool, device=z.device)
    if config.kind == "ar" or config.routes_from_noise:
        return router.next(z, sets.real & shown, route, every).ids
    revealed = sets.real & ~sets.free
    while True:
        route = router.next(z.masked_fill(~revealed, config.mask_id), revealed, route, every)
        full = route.active.any(dim=-1) & (shown | ~route.active).all(dim=-1)
        if not bool(full.any()):
            return route.ids
        revealed = revealed | (route.active & full[:, None])


def without_hidden(route: Route, revealed: Tensor) -> Route:
    """Masked positions that the active ones cannot see become padding: nobody asks for them."""
    return replace(route, ids=torch.where((route.ids <= route.level()) | revealed, route.ids, -1))
