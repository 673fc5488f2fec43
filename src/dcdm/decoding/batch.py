"""Texts that are written together, one forward pass at a time: what `dcdm.generate` and the server run on.

A batch has a row for each of any number of texts, each with its own prompt, length, seed and decoder. They join and
leave between two forward passes, and all that there are share each pass as far as their shapes allow. Every window
of a text joins like a text of its own.

    B batch   L positions   A asked positions
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import singledispatch
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor

from dcdm.decoding.caching import Cached, PrefixCache, cached_predictor, shared_prefix
from dcdm.decoding.commits import Sampling, View, commit_policy, mixed_commit
from dcdm.decoding.loop import Committed, DecodingState, Uncached
from dcdm.decoding.routes import MixedRouter, router_of
from dcdm.decoding.text import BatchRow, Event
from dcdm.model.kernels import prepare
from dcdm.model.transformer import Model, PositionMasks


class ContinuousBatch:
    """Texts that are written together: `add` some, and call `step` until none is left. `batch_of` makes one."""

    DRAWS: ClassVar[tuple[str, ...]] = ("token",)
    """The uses of random numbers, one each for every position."""

    def __init__(self, model: Model, prefixes: PrefixCache | None = None) -> None:
        """`prefixes` remembers what texts begin with, for later ones."""
        prepare(model)
        self.model = model
        self.texts: list[BatchRow] = []
        self.forwards = 0
        self._new: list[BatchRow] = []
        self._prefixes = prefixes
        self._cached: Cached | None = None
        nothing = torch.zeros(0, 1, dtype=torch.long, device=model.embed_tokens.weight.device)
        none = nothing.bool()
        self._state = DecodingState(nothing, PositionMasks(none, none, none), MixedRouter(), Uncached(model))

    def add(self, text: BatchRow) -> None:
        """A text that takes part from the next step on."""
        self._new.append(text)

    @property
    def running(self) -> list[BatchRow]:
        """The texts that are not finished."""
        return [*self.texts, *self._new]

    @property
    def positions(self) -> int:
        """Positions that there is memory for in the cache."""
        return 0 if self._cached is None else self._cached.cache.positions

    @torch.no_grad()
    def step(self) -> int:
        """One forward pass for all texts; how many took part. Texts that have ended by then are gone."""
        while self._new:
            self._join(self._new)
            self._settle()
        if not self.texts:
            return 0
        committed = self._state.step(self._commit, self._reveal, self._closed())
        count = len(self.texts)
        if committed is not None:
            self.forwards += 1
            self._record(committed)
        self._settle()
        return count

    # --- joining and leaving -------------------------------------------------------------------------------------

    def _join(self, texts: list[BatchRow]) -> None:
        """Rows for texts, each with its next window."""
        self._new = []
        config, first = self.model.config, len(self.texts)
        lines = [text.canvas(config.bos_id, config.mask_id) for text in texts]
        length = max(map(len, lines))
        rows = [line + [config.pad_id] * (length - len(line)) for line in lines]
        z = torch.tensor(rows, device=self._state.z.device)
        positions = self.model.position_masks(z, z != config.mask_id)
        for _, group in groupby(range(len(texts)), lambda row: self._policy(texts[row])):
            numbers = list(group)
            part, own = slice(numbers[0], numbers[-1] + 1), texts[numbers[0] : numbers[-1] + 1]
            places = PositionMasks(positions.real[part], positions.visible[part], positions.free[part])
            self._state.join(self._rows(z[part], places, own))
            if own[0].decoding.cache != "none":
                prefixes = [
                    shared_prefix(config, line, text.decoding.routing.partition(":")[0])
                    if text.decoding.cache == "exact" and not text.window_number
                    else None
                    for text, line in zip(own, lines[part], strict=True)
                ]
                known = self._cache().add_rows(places.real, first + numbers[0], prefixes)
                for text, count in zip(own, known, strict=True):
                    text.costs["prefix"] += count
        self.texts += texts
        self._refresh()

    def _cache(self) -> Cached:
        """Made for the first text that wants one; rows that nobody adds to it are computed uncached."""
        if self._cached is None:
            self._cached = self._state.predict = cached_predictor(self.model, None, self._prefixes)
        return self._cached

    def _policy(self, text: BatchRow) -> tuple[Hashable, ...]:
        """Neighbours that agree on it join under one router."""
        return text.decoding.routing, text.decoding.adablock, text.decoding.cache == "none"

    def _rows(self, z: Tensor, positions: PositionMasks, texts: list[BatchRow]) -> DecodingState:
        """Canvases of texts with one policy."""
        index, decoding = torch.tensor([text.index for text in texts]), texts[0].decoding
        router = router_of(self.model, positions, index, decoding.routing, decoding.adablock)
        return DecodingState(z, positions, router, self._state.predict, *self._noise(texts, z.shape[1]))

    def _noise(self, texts: list[BatchRow], length: int) -> tuple[Tensor, Tensor]:
        """(B, L) of random commit policies, and (B, L, U) for draws: the first number draws a position's token."""
        order, *draws = (torch.cat([text.noise(use, length) for text in texts]) for use in ("order", *self.DRAWS))
        return order, torch.stack(draws, dim=-1)

    def _keep_rows(self, rows: list[int]) -> None:
        """All texts leave but these."""
        kept = torch.tensor(rows, dtype=torch.long, device=self._state.z.device)
        self._state.keep_rows(kept)
        if self._cached is not None:
            self._cached.keep_rows(kept, self._state.z.shape[1])
        self.texts = [self.texts[row] for row in rows]
        self._refresh()

    def _refresh(self) -> None:
        """What depends on which rows there are, and not on how far they have come."""
        device = self._state.z.device
        if self.texts:
            self._commit = mixed_commit([commit_policy(text.decoding.commit) for text in self.texts])
        self._eos = torch.tensor([-1 if t.eos_id is None else t.eos_id for t in self.texts], device=device)[:, None]
        self._start = torch.tensor([len(t.context) for t in self.texts], device=device)[:, None]

    def _after_eos(self) -> Tensor:
        """(B, L) bool: positions after the first EOS that was written behind a row's context."""
        state, length = self._state, self._state.z.shape[1]
        place = torch.arange(length, device=state.z.device)
        ends = (state.z == self._eos) & state.revealed & (place >= self._start)
        return place > torch.where(ends, place, length).amin(dim=-1, keepdim=True)

    def _closed(self) -> Tensor | None:
        """(B, L) bool: positions that need no token any more, though they are masked."""
        return None

    def _settle(self) -> None:
        """Rows that are full, complete up to an EOS, or cancelled are taken over and leave."""
        if not self.texts:
            return
        state = self._state
        open_before_end = state.real & ~state.revealed & ~self._after_eos()
        over = (~open_before_end.any(dim=-1)).tolist()
        for row, text in enumerate(self.texts):
            if not over[row] and text.cancel is not None and text.cancel():
                text.finished, over[row] = "cancelled", True
        if not any(over):
            return
        leaving = [(text, state.z[row].tolist()) for row, text in enumerate(self.texts) if over[row]]
        for name, counts in vars(state.counts).items():
            for row, text in enumerate(self.texts):
                text.costs[name] += int(counts[row]) if over[row] else 0
        self._keep_rows([row for row in range(len(over)) if not over[row]])
        for text, line in leaving:
            text.accept(line, self.model.config.mask_id)
            if not text.finished:
                self._new.append(text)

    # --- drawing and telling -------------------------------------------------------------------------------------

    def _reveal(self, view: View, fill: Tensor) -> Tensor:
        """Tokens for what is filled, each drawn with its own uniform number."""
        tokens = torch.zeros_like(view.position)
        for sampling, mine in self._samplings():

            def draw(log_p: Tensor, row: Tensor, at: Tensor, sampling: Sampling = sampling) -> Tensor:
                return sampling.draw(sampling.log_p(log_p), self._state.uniform[row, view.position[row, at], 0])

            asked = fill & mine[:, None]
            tokens = torch.where(mine[:, None], view.predicted.measure(draw, asked, 0), tokens)
        return tokens

    def _samplings(self) -> list[tuple[Sampling, Tensor]]:
        """Each way to draw that there is, with the rows (B,) bool that draw so."""
        every = [text.decoding.sampling for text in self.texts]
        device = self._state.z.device
        return [(one, torch.tensor([each == one for each in every], device=device)) for one in dict.fromkeys(every)]

    def _record(self, committed: Committed) -> None:
        """Tell every text what it was given."""
        log_p = committed.log_p()
        for row, text in enumerate(self.texts):
            text.forwards += 1
            fill = committed.fill[row]
            if not bool(fill.any()):
                continue
            places = committed.position[row][fill].tolist()
            text.committed(
                Event(
                    text.row, text.window_number, int(committed.forward[row]), int(committed.chunk[row]),
                    [place + text.offset for place in places], committed.tokens[row][fill].tolist(),
                    log_p[row][fill].tolist(), [text.lanes[place] for place in places if text.lanes],
                )
            )  # fmt: skip


@singledispatch
def batch_of(model: Model, prefixes: PrefixCache | None = None) -> ContinuousBatch:
    """A batch of the model's class, without texts."""
    return ContinuousBatch(model, prefixes)


def write(model: Model, texts: Sequence[BatchRow], together: int) -> None:
    """Write texts to their ends, at most `together` at one time."""
    batch, waiting = batch_of(model), list(reversed(texts))
    while waiting or batch.running:
        while waiting and len(batch.running) < together:
            batch.add(waiting.pop())
        batch.step()
