"""How the distributions of the asked positions are computed: afresh, or with the help of what is remembered.

B batch   L positions   A asked positions   N those of all rows   V the tokens that can be predicted
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dcdm.config import NUM_SPECIALS, ConfigError, ModelConfig
from dcdm.decoding.commits import Distributions
from dcdm.decoding.routes import Route, without_hidden
from dcdm.model.attention import at_least_fp32
from dcdm.model.layout import RaggedIndex
from dcdm.model.masks import CLEAN, NOISY, Slots, led_positions
from dcdm.model.transformer import Model, Sets


@dataclass(frozen=True)
class Predicted:
    states: Tensor
    """(N, d): final states from which the N active positions of all rows are predicted, row by row."""
    computed: Tensor
    """(B,): positions that went through all blocks."""
    reused: Tensor
    """(B,): positions whose keys and values were remembered instead."""


def fitting_caches(config: ModelConfig) -> list[str]:
    """The caches that fit a model's kind; "auto" comes first."""
    return ["auto", "none", "frozen"] if config.routes_from_noise else ["auto", "exact", "none"]


def resolve_cache(config: ModelConfig, cache: str, routing: str = "auto") -> str:
    """The cache that "auto" means, or a refusal of what does not fit the kind and its routing."""
    if cache not in ("auto", "exact", "frozen", "none"):
        raise ConfigError(f"cache={cache!r} is not known; choose one of auto, exact, frozen, none")
    if config.routes_from_noise and cache == "exact":
        raise ConfigError(
            "cache='exact' is impossible with the paper's routing: every revealed token changes all states; "
            "use cache='none', or ask for the approximation by its name, cache='frozen'"
        )
    if not config.routes_from_noise and cache == "frozen":
        raise ConfigError("cache='frozen' is an approximation for the paper's routing; here use cache='exact'")
    if cache == "frozen" and routing == "appendix-b":
        raise ConfigError("cache='frozen' needs revealed tokens that stay visible; routing='appendix-b' hides some")
    if cache == "auto":
        return "none" if config.routes_from_noise else "exact"
    return cache


def predictor_of(model: Model, sets: Sets, cache: str) -> Predictor:
    if resolve_cache(model.config, cache) == "none":
        return Uncached(model)
    return Cached(model, sets)


class Predictor(ABC):
    """Makes predictions for the rows that have active positions; the others cost nothing."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @abstractmethod
    def __call__(self, z: Tensor, revealed: Tensor, route: Route) -> Predicted:
        """Predictions for the active positions of `route`."""

    def distributions(self, valid: Tensor, states: Tensor) -> Distributions:
        """Those of `Predicted.states`, at the True places of `valid` (B, A)."""

        def log_p_of(part: Tensor) -> Tensor:
            logits = predictable(self.model, part)
            return logits.to(at_least_fp32(logits)).log_softmax(dim=-1)

        return Distributions(valid, states, log_p_of, self.model.config.vocab_size)


class Uncached(Predictor):
    """Every forward computes all that the active chunk can see."""

    def __call__(self, z: Tensor, revealed: Tensor, route: Route) -> Predicted:
        rows = route.active.any(dim=-1)
        route, active = without_hidden(route, revealed), route.active[rows]
        states = self.model.denoise(z[rows], route.ids[rows], route.stage_one)
        if self.model.config.kind == "ar":
            states = states.roll(1, dims=1)  # position ℓ−1 predicts ℓ
        computed = torch.where(rows, (route.ids >= 0).sum(dim=-1), 0)
        return Predicted(states[active], computed, torch.zeros_like(computed))


class Cached(Predictor):
    """A forward computes the active chunk, and beside it writes what has been finished since the last one."""

    def __init__(self, model: Model, sets: Sets) -> None:
        super().__init__(model)
        self.cache = model.new_cache(*sets.real.shape)
        self.written = torch.zeros_like(sets.real)
        self.rows = torch.arange(len(sets.real), device=sets.real.device)
        """(R,): the rows that are remembered; one that has ended does not come back."""

    def __call__(self, z: Tensor, revealed: Tensor, route: Route) -> Predicted:
        self._drop(~route.active.any(dim=-1)[self.rows])
        if self.model.config.predicts_from_left:
            return self._from_left(z, revealed, route)
        count, rows, is_ar = len(z), self.rows, self.model.config.kind == "ar"
        z, route = z[rows], Route(route.ids[rows], route.active[rows])
        level, real = route.level(), route.ids >= 0
        own = real & (route.ids == (level - 1 if is_ar else level))  # AR asks the token before
        finished = real & (route.ids < level) & ~own & ~self.written
        first, second = RaggedIndex(own), RaggedIndex(finished)
        slots = Slots.cat(self._slots(z, route, first), self._slots(z, route, second))
        keep = torch.cat([first.valid & is_ar, second.valid], dim=1)
        tokens = torch.cat([first.pick(z), second.pick(z)], dim=1)
        states = self.model.extend(tokens, slots, keep, self.cache, first.index.shape[1])
        self.written |= finished | (own & is_ar)
        row, position = route.active.nonzero(as_tuple=True)
        home = torch.zeros_like(z)
        first.put(home, torch.arange(first.index.shape[1], device=z.device).expand_as(first.index))
        at = torch.zeros_like(row) if is_ar else home[row, position]
        computed, reused = torch.zeros(2, count, dtype=torch.long, device=z.device)
        computed[rows], reused[rows] = (slots.chunk >= 0).sum(dim=-1), self.cache.length
        return Predicted(states[row, at], computed, reused)

    def _from_left(self, z: Tensor, revealed: Tensor, route: Route) -> Predicted:
        """The tokens committed since the last forward come in, and predict what stands on their right.

        Beside them go the seed slots of the active chunk, which nobody reads later.
        """
        count, rows = len(z), self.rows
        z, ids, active = z[rows], route.ids[rows], route.active[rows]
        route = Route(ids, active)
        new = (ids < route.level()) & revealed[rows] & ~self.written
        led = led_positions(ids) & active
        asked = F.pad(led[:, 1:], (0, 1))  # the slots on the left of what is led
        leaders, seeds, rest = RaggedIndex(asked & new), RaggedIndex(active & ~led), RaggedIndex(new & ~asked)
        slots = Slots.cat(
            self._slots(z, route, leaders, CLEAN), self._slots(z, route, seeds), self._slots(z, route, rest, CLEAN)
        )
        keep = torch.cat([leaders.valid, torch.zeros_like(seeds.valid), rest.valid], dim=1)
        tokens = torch.cat([part.pick(z) for part in (leaders, seeds, rest)], dim=1)
        first_seed = leaders.index.shape[1]
        states = self.model.extend(tokens, slots, keep, self.cache, first_seed + seeds.index.shape[1])
        self.written |= new
        home = torch.zeros_like(z)
        for part, first in ((leaders, 0), (seeds, first_seed)):
            part.put(home, first + torch.arange(part.index.shape[1], device=z.device).expand_as(part.index))
        row, position = active.nonzero(as_tuple=True)
        at = torch.where(led[row, position], home[row, (position - 1).clamp(min=0)], home[row, position])
        computed, reused = torch.zeros(2, count, dtype=torch.long, device=z.device)
        computed[rows], reused[rows] = (slots.chunk >= 0).sum(dim=-1), self.cache.length
        return Predicted(states[row, at], computed, reused)

    def _drop(self, ended: Tensor) -> None:
        """Forget rows (R,) bool."""
        if bool(ended.any()):
            kept = (~ended).nonzero().squeeze(-1)
            self.cache.keep_rows(kept)
            self.rows, self.written = self.rows[kept], self.written[kept]

    def _slots(self, z: Tensor, route: Route, where: RaggedIndex, stream: int = NOISY) -> Slots:
        chunk = torch.where(where.valid, where.pick(route.ids), -1)
        return Slots.of(chunk, where.pick(z) == self.model.config.mask_id, stream, position=where.index)


def predictable(model: Model, states: Tensor) -> Tensor:
    """Logits (…, V−3) of the tokens that can be predicted; specials are excluded for AR too."""
    logits = model.token_logits(states)
    return logits[..., :-NUM_SPECIALS] if model.config.predicts_specials else logits
