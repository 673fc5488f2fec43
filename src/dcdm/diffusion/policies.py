"""How a canvas is filled: which chunk comes next (routing) and which of its positions are filled (commit).

Both are functions of revealed tokens and predicted distributions, never of sampled values, and both serve
likelihoods and decoding alike through one loop, `walk`.

    B batch   L positions   V the tokens that can be predicted
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dcdm.config import NUM_SPECIALS
from dcdm.model import routing
from dcdm.model.transformer import Model, Sets
from dcdm.model.types import at_least_fp32


@dataclass(frozen=True)
class Route:
    """The next chunk of each row."""

    ids: Tensor
    """(B, L): a position sees those whose id is not larger than its own; −1 padding."""
    active: Tensor
    """(B, L) bool: the members of the next chunk, none revealed yet."""


Router = Callable[[Tensor, Tensor, Route], Route]
"""(z, revealed, the route so far) → the route of the next chunk of every row."""

Commit = Callable[[Tensor, Tensor], Tensor]
"""(log-probabilities (B, L, V), candidates (B, L)) → which of them to fill: at least one where there are any."""


def router_of(model: Model, sets: Sets, index: Tensor | None = None) -> Router:
    """The routing policy of the model's kind."""
    config = model.config
    later = torch.iinfo(torch.long).max

    def next_position(z: Tensor, revealed: Tensor, route: Route) -> Route:
        pending = sets.real & ~revealed
        return Route(routing.label(sets.free, sets.real, sets.free.long()), first_of(pending))

    def from_noise(z: Tensor, revealed: Tensor, route: Route) -> Route:
        assert model.chunking is not None
        assert config.num_chunks is not None
        own = model.chunking.assign(model.router_scores(z, sets.real))
        active = lowest(own, sets.real & ~revealed)
        unrevealed = torch.where(active, config.num_chunks + 1, later)
        return Route(torch.where(sets.real, torch.where(revealed, own, unrevealed), -1), active)

    def causal_rounds(z: Tensor, revealed: Tensor, route: Route) -> Route:
        assert config.num_chunks is not None
        assigned = torch.where(revealed, route.ids, 0)
        k = (assigned.amax(dim=-1) + 1).clamp(max=config.num_chunks)
        active = routing.causal_round(model.router_scores(z, sets.real), revealed, sets.free, k, config)
        ids = torch.where(active, k[:, None], torch.where(revealed, assigned, later))
        return Route(torch.where(sets.real, ids, -1), active)

    if config.kind == "ar":
        return next_position
    if config.routes_from_noise:
        return from_noise
    if config.kind == "dcdm" and config.routing == "causal":
        return causal_rounds
    fixed = routing.fixed_partition(config, sets.free, sets.real, index)
    return lambda z, revealed, route: Route(fixed, lowest(fixed, sets.real & ~revealed))


def first_of(pending: Tensor) -> Tensor:
    """The first True of each row, (B, L) bool."""
    return pending & (pending.cumsum(dim=-1) == 1)


def lowest(ids: Tensor, pending: Tensor) -> Tensor:
    """The pending positions that share the smallest id of their row."""
    least = ids.masked_fill(~pending, torch.iinfo(torch.long).max).amin(dim=-1, keepdim=True)
    return pending & (ids == least)


def whole_chunk(log_p: Tensor, candidates: Tensor) -> Tensor:
    """One forward per chunk: fill all of it."""
    return candidates


def most_confident(log_p: Tensor, candidates: Tensor) -> Tensor:
    """One position per forward: the one whose best token is most probable; lower positions first in ties."""
    confidence = log_p.amax(dim=-1).masked_fill(~candidates, -torch.inf)
    return candidates & torch.zeros_like(candidates).scatter_(-1, confidence.argmax(-1, keepdim=True), True)


COMMITS: dict[str, Commit] = {"chunk": whole_chunk, "position": most_confident}


def predict(model: Model, z: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities (B, L, V−3) of every position's token; specials are excluded for AR too."""
    states = model.denoise(z, ids)
    if model.config.kind == "ar":
        states = states.roll(1, dims=1)  # position ℓ−1 predicts ℓ
    logits = model.token_logits(states)
    if model.config.kind == "ar":
        logits = logits[..., :-NUM_SPECIALS]
    return logits.to(at_least_fp32(logits)).log_softmax(dim=-1)


@torch.no_grad()
def current_ids(model: Model, z: Tensor, prompt: Tensor | None = None) -> Tensor:
    """The order of the positions of a partly filled canvas, for `Model.denoise`: (B, L).

    Chunks are formed one after the other from what is revealed; the first that holds a MASK is the active one,
    and whatever is not yet routed comes after it.
    """
    config, sets = model.config, model.sets(z, prompt)
    route_next = router_of(model, sets)
    shown = z != config.mask_id
    revealed = sets.real & ~sets.free if not config.routes_from_noise else sets.real & shown
    route = Route(routing.label(sets.free, sets.real, torch.zeros_like(z)), torch.zeros_like(revealed))
    while True:
        seen = z.masked_fill(~revealed, config.mask_id)
        route = route_next(seen if not config.routes_from_noise else z, revealed, route)
        full = route.active.any(dim=-1) & (shown | ~route.active).all(dim=-1)
        if config.kind == "ar" or config.routes_from_noise or not bool(full.any()):
            return route.ids
        revealed = revealed | (route.active & full[:, None])


@torch.no_grad()
def walk(
    model: Model,
    z: Tensor,
    revealed: Tensor,
    sets: Sets,
    commit: Commit,
    reveal: Callable[[Tensor, Tensor], Tensor],
    index: Tensor | None = None,
) -> Tensor:
    """Fill `z` (B, L), which holds MASK where `revealed` is False, chunk by chunk.

    `reveal(log_p, fill)` gives the tokens (B, L) to place where `fill` is True: the true ones to measure a
    likelihood, sampled ones to generate. Returns the forwards that each row needed, (B,).
    """
    route_next = router_of(model, sets, index)
    route = Route(routing.label(sets.free, sets.real, torch.zeros_like(z)), torch.zeros_like(revealed))
    forwards = torch.zeros(len(z), dtype=torch.long, device=z.device)
    while bool((pending := sets.real & ~revealed).any()):
        spent = ~(route.active & pending).any(dim=-1, keepdim=True)
        if bool(spent.any()):
            new = route_next(z, revealed, route)
            route = Route(torch.where(spent, new.ids, route.ids), torch.where(spent, new.active, route.active))
        log_p = predict(model, z, route.ids)
        fill = commit(log_p, route.active & pending)
        z = torch.where(fill, reveal(log_p, fill), z)
        revealed = revealed | fill
        forwards += fill.any(dim=-1)
    return forwards
