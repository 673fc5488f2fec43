"""How the distributions of the asked positions are computed: afresh, or with the help of what is remembered.

B batch   L positions   A asked positions   N those of all rows   V the tokens that can be predicted
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dcdm.config import NUM_SPECIALS, ConfigError, ModelConfig
from dcdm.decoding.commits import Distributions
from dcdm.decoding.prefixes import Beginning, PrefixStore
from dcdm.decoding.routes import Route, without_hidden
from dcdm.lanes.masks import DRAFTS, led_positions
from dcdm.model.attention import at_least_fp32
from dcdm.model.layout import RaggedIndex, stack_rows, widen
from dcdm.model.masks import CLEAN, NOISY, Slots
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
        return Distributions(valid, states, self.log_p_of, self.model.config.vocab_size)

    def log_p_of(self, states: Tensor) -> Tensor:
        """Log-probabilities (…, V) of the tokens that can be predicted."""
        logits = predictable(self.model, states)
        return logits.to(at_least_fp32(logits)).log_softmax(dim=-1)

    def settle(self, stands: Tensor) -> None:  # noqa: B027
        """Told which guesses (B, L) of the last forward are part of the text."""


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
    """A forward computes the active chunk, and beside it writes what has been finished since the last one.

    Rows may join between two forwards; one that has ended is forgotten and does not come back.
    """

    def __init__(self, model: Model, sets: Sets | None = None, prefixes: PrefixStore | None = None) -> None:
        """Empty, or with the rows of `sets`; `prefixes` remembers beginnings for later rows."""
        super().__init__(model)
        self.cache = model.new_cache()
        self.prefixes = prefixes
        device = model.embed_tokens.weight.device
        self.written = torch.zeros(0, 1, dtype=torch.bool, device=device)
        self.rows = torch.zeros(0, dtype=torch.long, device=device)
        """(R,): the rows of the batch that are remembered, ascending."""
        self.beginnings: list[Beginning | None] = []
        """What of each row may serve others, until it has been written."""
        self._guesses: list[tuple[Tensor, RaggedIndex, Tensor]] = []
        """Of each pass of the last forward that read any: rows, positions, places in the cache."""
        if sets is not None:
            self.add_rows(sets.real)

    def add_rows(self, real: Tensor, first: int = 0, beginnings: Sequence[Beginning | None] = ()) -> list[int]:
        """Rows `first`… of the batch, whose real positions (n, L) are these; how many positions of each are
        remembered from another."""
        start, device = len(self.rows), self.rows.device
        self.cache.add_rows(len(real), int(real.sum(dim=-1).max()))
        self.rows = torch.cat([self.rows, torch.arange(first, first + len(real), device=device)])
        self.written = stack_rows(self.written, torch.zeros_like(real), False)
        self.beginnings += [None] * len(real)
        known = [0] * len(real)
        if self.prefixes is not None:
            for at, beginning in enumerate(beginnings):
                if beginning is None:
                    continue
                self.beginnings[start + at] = beginning
                if (prefix := self.prefixes.find(beginning)) is not None:
                    self.cache.load(start + at, prefix)
                    self.written[start + at, prefix.slots[0]] = True
                    known[at] = len(prefix)
        return known

    def keep_rows(self, rows: Tensor, length: int) -> None:
        """Of the batch all rows leave but these (ascending), and positions from `length` on."""
        self._drop(~torch.isin(self.rows, rows))
        self.rows, self.written = torch.searchsorted(rows, self.rows), self.written[:, :length]

    def __call__(self, z: Tensor, revealed: Tensor, route: Route) -> Predicted:
        self._drop(~route.active.any(dim=-1)[self.rows])
        count, rows = len(z), self.rows
        self.written = widen(self.written, z.shape[1], False)  # a row without a cache may be the longest
        z, revealed, route = z[rows], revealed[rows], Route(route.ids[rows], route.active[rows])
        need = self._needed(z, revealed, route)
        self._guesses = []
        row, position = route.active.nonzero(as_tuple=True)
        slot = torch.where(need.led[row, position], position - 1, position).clamp(min=0)
        sizes = need.size()
        computed, reused = torch.zeros(2, count, dtype=torch.long, device=z.device)
        states: Tensor | None = None
        for together in sharing(sizes.tolist()):
            part = torch.tensor(together, device=z.device)
            found, home = self._pass(z, route, need, part)
            local = torch.full((len(z),), -1, device=z.device)
            local[part] = torch.arange(len(part), device=z.device)
            mine = local[row] >= 0
            answers = found[local[row[mine]], home[local[row[mine]], slot[mine]]]
            if states is None:
                states = answers.new_empty(len(row), answers.shape[-1])
            states[mine] = answers
        self.written |= need.leaders | need.rest
        computed[rows], reused[rows] = sizes, self.cache.length
        self._remember()
        assert states is not None
        return Predicted(states, computed, reused)

    def settle(self, stands: Tensor) -> None:
        stands = stands[self.rows]
        for rows, where, index in self._guesses:
            self.cache.promote(rows, index, where.pick(stands[rows]) & where.valid)
        self._guesses = []
        self.written |= stands

    def _needed(self, z: Tensor, revealed: Tensor, route: Route) -> _Needed:
        """The slots of the next pass.

        Where the model predicts from the left, and in AR, the tokens that were committed last come in and predict
        what stands on their right; elsewhere the active chunk predicts itself.
        """
        level, real, ids = route.level(), route.ids >= 0, route.ids
        nothing = torch.zeros_like(real)
        if self.model.config.predicts_from_left:
            new = real & (ids < level) & revealed & ~self.written
            led = led_positions(ids) & route.active
            asked = F.pad(led[:, 1:], (0, 1))  # the slots on the left of what is led
            guesses = route.active & ~revealed & (z != self.model.config.mask_id)
            led = led | (route.active & F.pad(guesses[:, :-1], (1, 0)))
            return _Needed(asked & new, route.active & ~led, new & ~asked, led, guesses)
        earlier = real & (ids < level) & ~self.written
        if self.model.config.kind == "ar":
            last = real & (ids == level - 1)
            return _Needed(last, nothing, earlier & ~last, route.active, nothing)
        return _Needed(nothing, real & (ids == level), earlier, nothing, nothing)

    def _pass(self, z: Tensor, route: Route, need: _Needed, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The states (n, Q, d) of some rows' leaders, seeds and guesses, and the place of each position (n, L) in
        them."""
        clean = CLEAN if self.model.config.predicts_from_left else NOISY
        z, route = z[rows], Route(route.ids[rows], route.active[rows])
        parts = [RaggedIndex(part[rows]) for part in (need.leaders, need.seeds, need.guesses, need.rest)]
        leaders, seeds, guesses, rest = parts
        slots = Slots.cat(
            self._slots(z, route, leaders, clean), self._slots(z, route, seeds),
            self._slots(z, route, guesses, guesses.pick(_streams(need.guesses[rows]))),
            self._slots(z, route, rest, clean),
        )  # fmt: skip
        stays = (True, False, False, True)
        keep = torch.cat([part.valid & kept for part, kept in zip(parts, stays, strict=True)], dim=1)
        tokens = torch.cat([part.pick(z) for part in parts], dim=1)
        first_seed = leaders.index.shape[1]
        first_guess = first_seed + seeds.index.shape[1]
        answers = first_guess + guesses.index.shape[1]
        states = self.model.extend(tokens, slots, keep, self.cache, answers, rows)
        home = torch.zeros_like(z)
        for part, first in ((leaders, 0), (seeds, first_seed), (guesses, first_guess)):
            part.put(home, first + torch.arange(part.index.shape[1], device=z.device).expand_as(part.index))
        if answers > first_guess:
            self._guesses.append((rows, guesses, self.cache.index[:, first_guess:answers]))
        return states, home

    def _remember(self) -> None:
        """Give beginnings that have just been written to those who may come later."""
        for row, beginning in enumerate(self.beginnings):
            if beginning is not None and self.prefixes is not None:
                self.prefixes.add(beginning, self.cache, row)
                self.beginnings[row] = None

    def _drop(self, ended: Tensor) -> None:
        """Forget rows (R,) bool."""
        if bool(ended.any()):
            kept = (~ended).nonzero().squeeze(-1)
            self.cache.keep_rows(kept)
            self.rows, self.written = self.rows[kept], self.written[kept]
            self.beginnings = [self.beginnings[row] for row in kept.tolist()]

    def _slots(self, z: Tensor, route: Route, where: RaggedIndex, stream: Tensor | int = NOISY) -> Slots:
        chunk = torch.where(where.valid, where.pick(route.ids), -1)
        masked = where.pick(z) == self.model.config.mask_id
        return Slots(where.index, chunk, torch.zeros_like(chunk) + stream, masked)


def _streams(guesses: Tensor) -> Tensor:
    """(B, L): the stream of each guess, one for every run of them."""
    place = torch.arange(guesses.shape[1], device=guesses.device)
    begins = guesses & ~F.pad(guesses[:, :-1], (1, 0))
    return DRAFTS + torch.where(begins, place, 0).cummax(dim=-1).values


@dataclass(frozen=True)
class _Needed:
    """The positions (R, L) whose slots a pass brings in."""

    leaders: Tensor
    """Tokens that predict what stands on their right; they stay."""
    seeds: Tensor
    """Slots that predict themselves; they pass."""
    rest: Tensor
    """Tokens that are only written; they stay."""
    led: Tensor
    """Of the active positions those that the slot on their left predicts."""
    guesses: Tensor
    """Tokens that may turn out wrong and predict what stands on their right; they pass unless told otherwise."""

    def size(self) -> Tensor:
        return sum(part.sum(dim=-1) for part in (self.leaders, self.seeds, self.guesses, self.rest))  # type: ignore[return-value]


FILLERS = 64
"""Slots that a pass may compute for nothing so that rows of different sizes share it."""


def sharing(sizes: Sequence[int]) -> list[list[int]]:
    """Rows that share a pass, by how many slots each brings in: shorter ones are filled up to the longest.

    A prompt that is read beside texts that are being written would cost each of them its own length: such rows go
    apart. Rows of a pass are in ascending order.
    """
    order = sorted(range(len(sizes)), key=lambda row: -sizes[row])
    groups: list[list[int]] = []
    wasted = 0
    for row in order:
        if groups:
            more = sizes[groups[-1][0]] - sizes[row]
            if wasted + more <= FILLERS or 4 * more <= sizes[groups[-1][0]]:
                groups[-1].append(row)
                wasted += more
                continue
        groups.append([row])
        wasted = 0
    return [sorted(group) for group in groups]


class MixedPredictor(Predictor):
    """Rows with and without a cache in one batch; it begins without any."""

    def __init__(self, model: Model, prefixes: PrefixStore | None = None) -> None:
        super().__init__(model)
        self.cached, self.uncached = Cached(model, prefixes=prefixes), Uncached(model)

    def keep_rows(self, rows: Tensor, length: int) -> None:
        self.cached.keep_rows(rows, length)

    def settle(self, stands: Tensor) -> None:
        self.cached.settle(stands)

    def __call__(self, z: Tensor, revealed: Tensor, route: Route) -> Predicted:
        busy = route.active.any(dim=-1)
        remembered = torch.zeros_like(busy)
        remembered[self.cached.rows] = True
        if not bool((busy & remembered).any()):
            return self.uncached(z, revealed, route)
        if not bool((busy & ~remembered).any()):
            return self.cached(z, revealed, route)
        parts = []
        for predict, rows in ((self.cached, remembered), (self.uncached, ~remembered)):
            parts.append(predict(z, revealed, Route(route.ids, route.active & rows[:, None])))
        mine = remembered[route.active.nonzero()[:, 0]]
        states = parts[0].states.new_empty(len(mine), parts[0].states.shape[-1])
        states[mine], states[~mine] = parts[0].states, parts[1].states
        return Predicted(states, parts[0].computed + parts[1].computed, parts[0].reused)


def predictable(model: Model, states: Tensor) -> Tensor:
    """Logits (…, V−3) of the tokens that can be predicted; specials are excluded for AR too."""
    logits = model.token_logits(states)
    return logits[..., :-NUM_SPECIALS] if model.config.predicts_specials else logits
