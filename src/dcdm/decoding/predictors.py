"""How the distributions of the asked positions are computed: with or without a KV cache.

B batch   L positions   A asked positions   N those of all rows   V the tokens that can be predicted
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from dcdm.config import NUM_SPECIALS
from dcdm.decoding.commits import Distributions
from dcdm.decoding.config import resolve_cache
from dcdm.decoding.prefixes import PrefixCache, PromptPrefix
from dcdm.decoding.routes import Route, without_hidden
from dcdm.model.layout import RaggedIndex, stack_rows, widen
from dcdm.model.masks import NOISY, Slots
from dcdm.model.products import at_least_fp32
from dcdm.model.transformer import Model, PositionMasks


@dataclass(frozen=True)
class Predicted:
    states: Tensor
    """(N, d): final states from which the N active positions of all rows are predicted, row by row."""
    computed: Tensor
    """(B,): positions that went through all blocks."""
    reused: Tensor
    """(B,): positions whose keys and values were remembered instead."""


def predictor_of(model: Model, positions: PositionMasks, cache: str) -> Predictor:
    """For the rows of `positions`, with the cache that is asked for."""
    return Uncached(model) if resolve_cache(model.config, cache) == "none" else cached_predictor(model, positions)


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
        route, active = without_hidden(route, revealed), route.active[rows]
        states = self.model.denoise(z[rows], route.ids[rows], route.block_zero)
        if self.model.config.kind == "ar":
            states = states.roll(1, dims=1)  # position ℓ−1 predicts ℓ
        computed = torch.where(rows, (route.ids >= 0).sum(dim=-1), 0)
        return Predicted(states[active], computed, torch.zeros_like(computed))


@dataclass(frozen=True)
class Part:
    """Positions (R, L) whose slots a pass brings in."""

    where: Tensor
    stays: bool
    """Whether they are written into the cache, as tokens that cannot change any more."""
    stream: int | Tensor = NOISY
    """One for all of them, or that of each position (R, L)."""


@dataclass(frozen=True)
class Needed:
    """The slots of a pass: those that predict something come first, in this order."""

    predicting: list[Part]
    rest: Part
    led: Tensor
    """(R, L): of the active positions those that the slot on their left predicts; the others predict themselves."""

    @property
    def parts(self) -> list[Part]:
        return [*self.predicting, self.rest]


class Cached(Predictor):
    """A forward pass computes the active chunk, and beside it writes what has been finished since the last one.

    Rows may join between two passes; one that has ended is forgotten and does not come back. Rows of the batch that
    were never added have no cache: they are computed whole.
    """

    def __init__(
        self, model: Model, positions: PositionMasks | None = None, prefixes: PrefixCache | None = None
    ) -> None:
        """Empty, or with the rows of `positions`; `prefixes` remembers prompt prefixes for later rows."""
        super().__init__(model)
        self.cache = model.new_cache()
        self.prefixes = prefixes
        self.uncached = Uncached(model)
        device = model.embed_tokens.weight.device
        self.written = torch.zeros(0, 1, dtype=torch.bool, device=device)
        self.rows = torch.zeros(0, dtype=torch.long, device=device)
        """(R,): the rows of the batch that are remembered, ascending."""
        self.unshared: list[PromptPrefix | None] = []
        """What of each row may serve others, until it has been written."""
        if positions is not None:
            self.add_rows(positions.real)

    def add_rows(self, real: Tensor, first: int = 0, shared: Sequence[PromptPrefix | None] = ()) -> list[int]:
        """Rows `first`… of the batch, whose real positions (n, L) are these; how many positions of each are
        remembered from another."""
        start, device = len(self.rows), self.rows.device
        self.cache.add_rows(len(real), int(real.sum(dim=-1).max()))
        self.rows = torch.cat([self.rows, torch.arange(first, first + len(real), device=device)])
        self.written = stack_rows(self.written, torch.zeros_like(real), False)
        self.unshared += [None] * len(real)
        known = [0] * len(real)
        if self.prefixes is not None:
            for at, prompt in enumerate(shared):
                if prompt is None:
                    continue
                self.unshared[start + at] = prompt
                if (prefix := self.prefixes.find(prompt)) is not None:
                    self.cache.load(start + at, prefix)
                    self.written[start + at, prefix.slots[0]] = True
                    known[at] = len(prefix)
        return known

    def keep_rows(self, rows: Tensor, length: int) -> None:
        """Of the batch all rows leave but these (ascending), and positions from `length` on."""
        self._drop(~torch.isin(self.rows, rows))
        self.rows, self.written = torch.searchsorted(rows, self.rows), self.written[:, :length]

    def __call__(self, z: Tensor, revealed: Tensor, route: Route) -> Predicted:
        busy = route.active.any(dim=-1)
        remembered = torch.zeros_like(busy)
        remembered[self.rows] = True
        if not bool((busy & remembered).any()):
            return self.uncached(z, revealed, route)
        if not bool((busy & ~remembered).any()):
            return self._extended(z, revealed, route)
        own, others = (Route(route.ids, route.active & rows[:, None]) for rows in (remembered, ~remembered))
        fast, slow = self._extended(z, revealed, own), self.uncached(z, revealed, others)
        mine = remembered[route.active.nonzero()[:, 0]]
        states = fast.states.new_empty(len(mine), fast.states.shape[-1])
        states[mine], states[~mine] = fast.states, slow.states
        return Predicted(states, fast.computed + slow.computed, fast.reused)

    def _extended(self, z: Tensor, revealed: Tensor, route: Route) -> Predicted:
        """Predictions of the rows that have a cache."""
        self._drop(~route.active.any(dim=-1)[self.rows])
        count, rows = len(z), self.rows
        self.written = widen(self.written, z.shape[1], False)  # a row without a cache may be the longest
        z, revealed, route = z[rows], revealed[rows], Route(route.ids[rows], route.active[rows])
        need = self._needed(z, revealed, route)
        row, position = route.active.nonzero(as_tuple=True)
        slot = torch.where(need.led[row, position], position - 1, position).clamp(min=0)
        sizes = torch.stack([part.where.sum(dim=-1) for part in need.parts]).sum(dim=0)
        computed, reused = torch.zeros(2, count, dtype=torch.long, device=z.device)
        states: Tensor | None = None
        for together in sharing(sizes.tolist()):
            numbers = torch.tensor(together, device=z.device)
            found, home = self._pass(z, route, need, numbers)
            local = torch.full((len(z),), -1, device=z.device)
            local[numbers] = torch.arange(len(numbers), device=z.device)
            mine = local[row] >= 0
            answers = found[local[row[mine]], home[local[row[mine]], slot[mine]]]
            if states is None:
                states = answers.new_empty(len(row), answers.shape[-1])
            states[mine] = answers
        for part in need.parts:
            if part.stays:
                self.written |= part.where
        computed[rows], reused[rows] = sizes, self.cache.length
        self._share()
        assert states is not None
        return Predicted(states, computed, reused)

    def _needed(self, z: Tensor, revealed: Tensor, route: Route) -> Needed:
        """The slots of the next pass: the active chunk predicts itself; in AR the token before it does."""
        level, ids = route.level(), route.ids
        earlier = (ids >= 0) & (ids < level) & ~self.written
        if self.model.config.kind == "ar":
            last = (ids >= 0) & (ids == level - 1)
            return Needed([Part(last, stays=True)], Part(earlier & ~last, stays=True), route.active)
        active = Part((ids >= 0) & (ids == level), stays=False)
        return Needed([active], Part(earlier, stays=True), torch.zeros_like(earlier))

    def _pass(self, z: Tensor, route: Route, need: Needed, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The states (n, Q, d) of some rows' predicting slots, and the place of each position (n, L) in them."""
        z, ids = z[rows], route.ids[rows]
        slots, tokens, keep = [], [], []
        home, answers = torch.zeros_like(z), 0
        for number, part in enumerate(need.parts):
            where = RaggedIndex(part.where[rows])
            chunk, own = torch.where(where.valid, where.pick(ids), -1), where.pick(z)
            stream = part.stream if isinstance(part.stream, int) else where.pick(part.stream[rows])
            slots.append(
                Slots(where.index, chunk, torch.zeros_like(chunk) + stream, own == self.model.config.mask_id)
            )
            tokens.append(own)
            keep.append(where.valid & part.stays)
            if number < len(need.predicting):
                places = torch.arange(own.shape[1], device=z.device).expand_as(own)
                where.put(home, answers + places)
                answers += own.shape[1]
        states = self.model.extend(
            torch.cat(tokens, dim=1), Slots.cat(*slots), torch.cat(keep, dim=1), self.cache, answers, rows
        )
        return states, home

    def _share(self) -> None:
        """Give prompt prefixes that have just been written to those who may come later."""
        for row, prompt in enumerate(self.unshared):
            if prompt is not None and self.prefixes is not None:
                self.prefixes.add(prompt, self.cache, row)
                self.unshared[row] = None

    def _drop(self, ended: Tensor) -> None:
        """Forget rows (R,) bool."""
        if bool(ended.any()):
            kept = (~ended).nonzero().squeeze(-1)
            self.cache.keep_rows(kept)
            self.rows, self.written = self.rows[kept], self.written[kept]
            self.unshared = [self.unshared[row] for row in kept.tolist()]


@singledispatch
def cached_predictor(
    model: Model, positions: PositionMasks | None = None, prefixes: PrefixCache | None = None
) -> Cached:
    """The predictor with a cache of the model's class; see `Cached`."""
    return Cached(model, positions, prefixes)


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


def predictable(model: Model, states: Tensor) -> Tensor:
    """Logits (…, V−3) of the tokens that can be predicted; specials are excluded for AR too."""
    logits = model.token_logits(states)
    return logits[..., :-NUM_SPECIALS] if model.config.predicts_specials else logits
