"""Predictors with a KV cache: what is finished is computed once; and prompt prefixes that later texts begin with.

Where given tokens see only what stands before them (AR, and models that predict from the left), a text takes over
whatever its prompt has in common with an earlier one, piece by piece. Elsewhere given tokens see each other, even
behind a blank: there a text takes over all of them or none. Both are exact: what is remembered is what the text
would compute itself. The prefix cache is bounded by a number of tokens; what has not been used for longest goes
first.

    B batch   R rows with a cache   L positions
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

import torch
import torch.nn.functional as F
from torch import Tensor

from dcdm.config import ConfigError, ModelConfig
from dcdm.decoding.config import resolve_cache
from dcdm.decoding.loop import Predicted, Predictor, Uncached
from dcdm.decoding.routes import Route
from dcdm.model.cache import KVCache, Prefix
from dcdm.model.layout import RaggedIndex, stack_rows, widen
from dcdm.model.masks import NOISY, Slots
from dcdm.model.transformer import Model, PositionMasks

PIECE = 16
"""Tokens that are remembered or forgotten together, where prefixes can be shared in part."""


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
        if not self.model.config.shift:
            return Needed([active], Part(earlier, stays=True), torch.zeros_like(earlier))
        # what predicts the first token of a block is computed, and not written, until that is known
        left = F.pad(ids, (1, 0), value=-1)[:, :-1]
        first = active.where & (z == self.model.config.mask_id) & (left >= 0) & (left < ids)
        edge = first.roll(-1, dims=1)
        return Needed(
            [active, Part(edge, stays=False)], Part(earlier & ~edge, stays=True), route.active & (left >= 0)
        )

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


def predictor_of(model: Model, positions: PositionMasks, cache: str) -> Predictor:
    """For the rows of `positions`, with the cache that is asked for."""
    return Uncached(model) if resolve_cache(model.config, cache) == "none" else cached_predictor(model, positions)


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


# --- prompt prefixes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptPrefix:
    """The given tokens of a canvas, as far as others may share their keys and values."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    piece: int
    """How many of them are taken over together."""

    def __len__(self) -> int:
        return len(self.tokens)


def shared_prefix(config: ModelConfig, canvas: list[int], routing: str = "auto") -> PromptPrefix | None:
    """What of a canvas (BOS first, MASK where something is free) others may share; None if nothing."""
    in_blocks = config.prompts == "ordinary"
    if config.routes_from_noise or (in_blocks and (config.kind == "mdlm" or routing in ("blocks", "from-prompt"))):
        return None
    if config.kind == "ar" or config.predicts_from_left or in_blocks:
        piece, start = PIECE, 0
        if in_blocks:  # whole blocks, of which BOS is none
            assert config.block_size is not None
            piece, start = config.block_size * -(-PIECE // config.block_size), 1
        end = canvas.index(config.mask_id) if config.mask_id in canvas else len(canvas)
        last = start + (end - 1 - start) // piece * piece  # the last one predicts what follows, so it is computed
        return PromptPrefix(tuple(canvas[start:last]), tuple(range(start, last)), piece) if last > start else None
    given = [(at, token) for at, token in enumerate(canvas) if token != config.mask_id]
    if len(given) < PIECE:
        return None
    return PromptPrefix(tuple(token for _, token in given), tuple(at for at, _ in given), len(given))


class PrefixCache:
    """Keys and values of prompt prefixes, up to `limit` tokens."""

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ConfigError(f"prefix_tokens={limit} must be at least 0; 0 remembers nothing")
        self.limit = limit
        self.tokens = self.looked_up = self.found = 0
        self._pieces: OrderedDict[tuple[int, object], tuple[int, Prefix]] = OrderedDict()
        self._number = 0

    def find(self, prefix: PromptPrefix) -> Prefix | None:
        """What is remembered of a prefix, if anything."""
        self.looked_up += len(prefix)
        pieces, keys = [], []
        parent = 0
        for key, _ in self._keys(prefix):
            held = self._pieces.get((parent, key))
            if held is None:
                break
            keys.append((parent, key))
            parent = held[0]
            pieces.append(held[1])
        for used in reversed(keys):  # a piece is never forgotten before those that build on it
            self._pieces.move_to_end(used)
        if not pieces:
            return None
        self.found += sum(map(len, pieces))
        return pieces[0] if len(pieces) == 1 else Prefix.joined(pieces)

    def add(self, prefix: PromptPrefix, cache: KVCache, row: int) -> None:
        """Remember a prefix that a row of a cache has written."""
        if len(prefix) > self.limit:
            return
        whole: Prefix | None = None
        parent, keys = 0, []
        for key, (start, end) in self._keys(prefix):
            held = self._pieces.get((parent, key))
            if held is None:
                if whole is None:
                    whole = cache.prefix(row, torch.tensor(prefix.positions))
                self._number += 1
                held = (self._number, whole.cut(start, end))
                self._pieces[parent, key] = held
                self.tokens += end - start
            keys.append((parent, key))
            parent = held[0]
        for used in reversed(keys):
            self._pieces.move_to_end(used)
        self.shrink(self.limit)

    def shrink(self, limit: int) -> None:
        """Forget until no more than `limit` tokens are remembered."""
        while self.tokens > limit:
            _, (_, prefix) = self._pieces.popitem(last=False)
            self.tokens -= len(prefix)

    @staticmethod
    def _keys(prefix: PromptPrefix) -> list[tuple[object, tuple[int, int]]]:
        """What names each piece, given the piece before it, and where it lies among the tokens."""
        ends = range(prefix.piece, len(prefix) + 1, prefix.piece)
        parts = [(end - prefix.piece, end) for end in ends]
        return [((prefix.tokens[a:b], prefix.positions[a:b]), (a, b)) for a, b in parts]
