"""Texts being written, one forward at a time: what `dcdm.generate` and the server run on.

A `Decoding` holds any number of texts, each with its own prompt, length, seed and decoder. They join and leave
between two forwards, and all that there are share each forward as far as their shapes allow. A canvas is BOS, the
prompt and MASKs; a text that does not fit into one is written window by window, each of which joins like a text of
its own, the end of what is there being its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from dcdm.decoding.commits import View, commit_policy, mixed_commit
from dcdm.decoding.config import DecodingConfig
from dcdm.decoding.constraints import Guide
from dcdm.decoding.drafts import stands_or_instead
from dcdm.decoding.loop import Committed, Filling
from dcdm.decoding.predictors import MixedPredictor
from dcdm.decoding.prefixes import PrefixStore, beginning_of
from dcdm.decoding.routes import AdaBlock, MixedRouter, router_of
from dcdm.decoding.sampling import Sampling
from dcdm.keys import Key
from dcdm.model.layout import stack_rows, widen
from dcdm.model.transformer import Model, Sets

COSTS = ("new_tokens", "forwards", "rounds", "computed", "reused", "reencoded", "prefix")
"""What a text costs; `Statistics` says what each means."""


@dataclass(frozen=True)
class Event:
    """Tokens that one forward committed in one row; those behind an EOS turn out void."""

    row: int
    window: int
    forward: int
    """Number of the row's forward within its window, from 1."""
    chunk: int
    """Number of the chunk within its window, from 1 in the order of filling."""
    positions: list[int]
    """In the row's whole text, BOS at 0."""
    tokens: list[int]
    log_p: list[float]
    """What the model itself gave each token, before temperature and truncation."""
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each token the most probable ones in its place, if the text asks for them."""
    lanes: list[int] = field(default_factory=list)
    """The lane of each position, from 1; [] where the model does not write in lanes."""


@dataclass(frozen=True)
class Ended:
    """How one row ended, for those who do not wait for the whole batch."""

    completion: list[int]
    finished: str
    costs: dict[str, int]


@dataclass
class Text:
    """One text to write, and how far it is."""

    prompt: list[int]
    """Token ids, BOS first, MASK where there is a blank."""
    new_tokens: int
    """To write behind the prompt."""
    decoding: DecodingConfig
    """Resolved for the model."""
    window: int
    """Positions of a canvas."""
    overlap: int
    """Tokens of what is written that begin the next canvas."""
    seed: int = 0
    index: int = 0
    """Seed and index alone decide the text's noise."""
    eos_id: int | None = None
    row: int = 0
    """Its number in events."""
    alternatives: int = 0
    """How many of the most probable tokens events name beside each."""
    guides: Sequence[Guide] = ()
    """What runs of its positions must match; such a text is written in one window."""
    cancel: Callable[[], bool] | None = None
    """Asked between forwards."""
    stop: Callable[[list[int]], bool] | None = None
    """Asked after each window, with the completion so far."""
    on_event: Callable[[Event], None] | None = None
    on_end: Callable[[Ended], None] | None = None
    on_forward: Callable[[], None] | None = None
    """Told of every forward that the text took part in, also where it makes no event."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        """The whole text so far."""
        self.left = self.new_tokens
        self.finished = ""
        """Why it ended: "eos", "length", "stop" or "cancelled"; empty while it is being written."""
        self.costs = dict.fromkeys(COSTS, 0)
        self.number = 0
        self.lanes: list[int] = []
        """Of each position of the window at hand, where the model writes in lanes."""
        self._key = Key(self.seed).fold("generate")

    def canvas(self, bos_id: int, mask_id: int) -> list[int]:
        """The next window: what begins it, and MASKs."""
        self.context = self.tokens
        if self.number:
            self.context = [bos_id, *self.tokens[max(1, len(self.tokens) - self.overlap) :]]
            self.costs["reencoded"] += len(self.context)
        self.size = min(self.left, self.window - len(self.context))
        self.offset = len(self.tokens) - len(self.context)
        return self.context + [mask_id] * self.size

    def noise(self, use: str, length: int) -> Tensor:
        """(1, L) uniform: one number per position, whatever the batch and its padding."""
        drawn = self._key.fold(use, self.index, self.number).uniform(self.window)[None, :length]
        return widen(drawn, length, 0.0)

    def accept(self, line: list[int], mask_id: int) -> None:
        """Take over what a window wrote."""
        start = len(self.context)
        new = line[start : start + self.size]
        blanks = sum(a == mask_id != b for a, b in zip(self.context, line, strict=False))
        before = line[:start] if self.context is self.tokens else self.tokens  # the first window may have blanks
        self.tokens = before + new
        self.left -= self.size
        ends = self.eos_id is not None and self.eos_id in new
        kept = new.index(self.eos_id) + 1 if ends else self.size  # type: ignore[arg-type]
        self.costs["new_tokens"] += blanks + sum(token != mask_id for token in new[:kept])
        if not self.finished:  # not cancelled
            if ends:
                self.tokens = self.tokens[: len(self.tokens) - self.size + kept]
                self.finished = "eos"
            elif self.stop is not None and self.stop(self.completion(mask_id)):
                self.finished = "stop"
            elif self.left <= 0:
                self.finished = "length"
        self.number += 1
        if self.finished and self.on_end is not None:
            self.on_end(Ended(self.completion(mask_id), self.finished, self.costs))

    @property
    def commit(self) -> str:
        """The commit policy of the window that is being filled."""
        return self.decoding.commit

    @property
    def drafts(self) -> int:
        """How many tokens of each lane are guessed ahead; none where they must match something."""
        return 0 if self.guides else self.decoding.drafts or 0

    def forced(self) -> list[int] | None:
        """The tokens to place instead of drawn ones, for the whole canvas; None draws."""
        return None

    def committed(self, event: Event) -> None:
        if self.on_event is not None:
            self.on_event(event)

    def completion(self, mask_id: int) -> list[int]:
        """What follows the prompt, without EOS; of a prompt with blanks its own text with the blanks filled."""
        ids = self.tokens[1 if mask_id in self.prompt else len(self.prompt) :]
        if self.finished == "eos":
            ids = ids[:-1]
        if self.finished == "cancelled" and mask_id in ids:
            ids = ids[: ids.index(mask_id)]
        return ids


class Revision(Text):
    """A draft of which the least sure tokens are written again (`Revise`); its `prompt` is the draft.

    First every group of tokens is hidden once and put back as it was, which tells how probable each is given the
    others; then the least probable are masked and filled like blanks.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.decoding.revise is not None
        self.settings = self.decoding.revise
        self._sure: dict[int, float] = {}
        self._group = self._round = 0

    @property
    def _looking(self) -> bool:
        return self._group < self.settings.groups

    @property
    def commit(self) -> str:
        return "chunk" if self._looking else self.decoding.commit

    def canvas(self, bos_id: int, mask_id: int) -> list[int]:
        """The draft with one group hidden, or with what is to be written again."""
        places = range(1, len(self.tokens))
        hidden = places[self._group :: self.settings.groups] if self._looking else self._least_sure()
        masked = set(hidden)
        self.context = [mask_id if at in masked else token for at, token in enumerate(self.tokens)]
        self.size = self.offset = 0
        return self.context

    def _least_sure(self) -> list[int]:
        order = sorted(self._sure, key=lambda at: (self._sure[at], at))
        if self.settings.share is not None:
            return order[: math.ceil(self.settings.share * len(order))]
        assert self.settings.threshold is not None
        least = math.log(self.settings.threshold)
        return [at for at in order if self._sure[at] < least]

    def forced(self) -> list[int] | None:
        return self.tokens if self._looking else None

    def committed(self, event: Event) -> None:
        if self._looking:
            self._sure.update(zip(event.positions, event.log_p, strict=True))
        else:
            super().committed(event)

    def accept(self, line: list[int], mask_id: int) -> None:
        if self._looking:
            self._group += 1
        elif not self.finished:
            written = [at for at, token in enumerate(self.context) if token == mask_id]
            self.costs["new_tokens"] += len(written)
            self.tokens = line[: len(self.context)]
            self._round += 1
            self._group = 0
        self.number += 1
        if self._round == self.settings.rounds:
            self.finished = self.finished or "length"
        if self.finished and self.on_end is not None:
            self.on_end(Ended(self.completion(mask_id), self.finished, self.costs))

    def completion(self, mask_id: int) -> list[int]:
        """The whole text."""
        return self.tokens[1:]


class Decoding:
    """Texts that are written together: `add` some, and call `step` until none is left."""

    def __init__(self, model: Model, prefixes: PrefixStore | None = None) -> None:
        """`prefixes` remembers what texts begin with, for later ones."""
        self.model, self.prefixes = model, prefixes
        self.texts: list[Text] = []
        self.forwards = 0
        self._new: list[Text] = []
        self._uniform = torch.zeros(0, 1, 3, dtype=torch.float64)
        """(B, L, 3): numbers for a token, for a guess at it, and for whether the guess stands."""
        self._predict = MixedPredictor(model, prefixes)
        nothing = torch.zeros(0, 1, dtype=torch.long, device=model.embed_tokens.weight.device)
        none = nothing.bool()
        self._filling = Filling(nothing, Sets(none, none, none), MixedRouter(), self._predict)

    def add(self, text: Text) -> None:
        """A text that takes part from the next step on."""
        self._new.append(text)

    @property
    def running(self) -> list[Text]:
        """The texts that are not finished."""
        return [*self.texts, *self._new]

    @property
    def positions(self) -> int:
        """Positions that there is memory for in the cache."""
        return self._predict.cached.cache.positions

    @torch.no_grad()
    def step(self) -> int:
        """One forward for all texts; how many took part. Texts that have ended by then are gone."""
        while self._new:
            self._join(self._new)
            self._settle()
        if not self.texts:
            return 0
        committed = self._filling.step(self._commit, self._reveal, self._void(), self)
        count = len(self.texts)
        if committed is not None:
            self.forwards += 1
            self._record(committed)
        self._settle()
        return count

    def _join(self, texts: list[Text]) -> None:
        """Rows for texts, each with its next window."""
        self._new = []
        config, first, device = self.model.config, len(self.texts), self._filling.z.device
        lines = [text.canvas(config.bos_id, config.mask_id) for text in texts]
        length = max(map(len, lines))
        z = torch.tensor([line + [config.pad_id] * (length - len(line)) for line in lines], device=device)
        sets = self.model.sets(z, z != config.mask_id)
        uses = ("order", "token", "guess", "verify") if config.drafts else ("order", "token")
        order, *chances = (torch.cat([text.noise(use, length) for text in texts]) for use in uses)
        chances += chances * (3 - len(chances))  # without a draft head nobody asks for the last two
        self._uniform = stack_rows(self._uniform, torch.stack(chances, dim=-1), 0.0)

        def alike(row: int) -> tuple[str, AdaBlock | None, bool, bool]:
            decoding = texts[row].decoding
            return decoding.routing, decoding.adablock, decoding.cache == "none", texts[row].drafts > 0

        for (routing, adablock, uncached, paced), group in groupby(range(len(texts)), alike):
            rows = list(group)
            part, own = slice(rows[0], rows[-1] + 1), texts[rows[0] : rows[-1] + 1]
            places = Sets(sets.real[part], sets.visible[part], sets.free[part])
            index = torch.tensor([text.index for text in own])
            lanes = torch.tensor([text.decoding.lanes for text in own]) if config.kind == "lanes" else None
            router = router_of(self.model, places, index, routing, adablock, lanes, paced)
            for at, text in enumerate(own):
                text.lanes = [] if router.lanes is None else router.lanes[at].tolist()
            ahead = torch.tensor([text.drafts for text in own])
            self._filling.join(z[part], places, router, order[part], ahead)
            if not uncached:
                beginnings = [
                    beginning_of(config, lines[row])
                    if texts[row].decoding.cache == "exact" and not texts[row].number
                    else None
                    for row in rows
                ]
                known = self._predict.cached.add_rows(places.real, first + rows[0], beginnings)
                for text, count in zip(own, known, strict=True):
                    text.costs["prefix"] += count
        self.texts += texts
        self._look()

    def _leave(self, rows: list[int]) -> None:
        left = [row for row in range(len(self.texts)) if row not in set(rows)]
        kept = torch.tensor(left, dtype=torch.long, device=self._filling.z.device)
        self._filling.keep_rows(kept)
        length = self._filling.z.shape[1]
        self._predict.keep_rows(kept, length)
        self._uniform = self._uniform[kept.cpu(), :length]
        self.texts = [self.texts[row] for row in left]
        self._look()

    def _look(self) -> None:
        """What depends on which rows there are, and not on how far they have come."""
        device = self._filling.z.device
        if self.texts:
            self._commit = mixed_commit([commit_policy(text.commit) for text in self.texts])
        self._chances = self._uniform.to(device)
        self._eos = torch.tensor([-1 if t.eos_id is None else t.eos_id for t in self.texts], device=device)[:, None]
        self._start = torch.tensor([len(t.context) for t in self.texts], device=device)[:, None]

    def _behind_end(self) -> Tensor:
        """(B, L) bool: positions behind the first EOS that was written behind a row's beginning."""
        filling, length = self._filling, self._filling.z.shape[1]
        place = torch.arange(length, device=filling.z.device)
        ends = (filling.z == self._eos) & filling.revealed & (place >= self._start)
        return place > torch.where(ends, place, length).amin(dim=-1, keepdim=True)

    def _void(self) -> Tensor | None:
        """Positions that need no token any more: in lanes, whose chunks do not depend on what is written, those
        behind an EOS can stay open."""
        return self._behind_end() if self.model.config.kind == "lanes" else None

    def _settle(self) -> None:
        """Rows that are full, complete up to an EOS, or cancelled are taken over and leave."""
        if not self.texts:
            return
        filling = self._filling
        open_before_end = filling.real & ~filling.revealed & ~self._behind_end()
        over = (~open_before_end.any(dim=-1)).tolist()
        leaving = []
        for row, text in enumerate(self.texts):
            if not over[row] and text.cancel is not None and text.cancel():
                text.finished, over[row] = "cancelled", True
            if over[row]:
                leaving.append(row)
        if not leaving:
            return
        texts = [self.texts[row] for row in leaving]
        lines = [filling.z[row].tolist() for row in leaving]
        for row, text in zip(leaving, texts, strict=True):
            for name in ("forwards", "rounds", "computed", "reused"):
                text.costs[name] += int(getattr(filling.counts, name)[row])
        self._leave(leaving)
        for text, line in zip(texts, lines, strict=True):
            text.accept(line, self.model.config.mask_id)
            if not text.finished:
                self._new.append(text)

    def _reveal(self, view: View, fill: Tensor) -> Tensor:
        """Tokens for what is filled, each drawn with its own uniform number."""
        tokens = torch.zeros_like(view.position)
        for sampling, mine in self._samplings():

            def draw(log_p: Tensor, row: Tensor, at: Tensor, sampling: Sampling = sampling) -> Tensor:
                return sampling.draw(sampling.log_p(log_p), self._chances[row, view.position[row, at], 0])

            asked = fill & mine[:, None]
            tokens = torch.where(mine[:, None], view.predicted.measure(draw, asked, 0), tokens)
        for row, text in enumerate(self.texts):
            for guide in text.guides:
                self._guided(view, fill, row, guide, tokens)
            if (forced := text.forced()) is not None:
                tokens[row] = torch.tensor(forced, device=tokens.device)[
                    view.position[row].clamp(max=len(forced) - 1)
                ]
        return tokens

    def _samplings(self) -> list[tuple[Sampling, Tensor]]:
        """Each way to draw that there is, with the rows (B,) bool that draw so."""
        every = [text.decoding.sampling for text in self.texts]
        device = self._filling.z.device
        return [(one, torch.tensor([each == one for each in every], device=device)) for one in dict.fromkeys(every)]

    def guess(self, log_q: Tensor, row: Tensor, position: Tensor) -> Tensor:
        """As `Drafter` says: a guess at each place, drawn with a uniform number of its own."""
        tokens = torch.zeros_like(row)
        for sampling, rows in self._samplings():
            mine = rows[row]
            chance = self._chances[row[mine], position[mine], 1]
            tokens[mine] = sampling.draw(sampling.log_p(log_q[mine]), chance)
        return tokens

    def verify(
        self, log_p: Tensor, log_q: Tensor, row: Tensor, position: Tensor, token: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `Drafter` says."""
        right, instead = torch.zeros_like(row, dtype=torch.bool), torch.zeros_like(row)
        for sampling, rows in self._samplings():
            mine = rows[row]
            draw, accept = (self._chances[row[mine], position[mine], use] for use in (0, 2))
            right[mine], instead[mine] = stands_or_instead(
                sampling, log_p[mine], log_q[mine], token[mine], accept, draw
            )
        return right, instead

    def _guided(self, view: View, fill: Tensor, row: int, guide: Guide, tokens: Tensor) -> None:
        """Draw once more what a row fills within a guide, from what the guide allows."""
        inside = (view.position[row] >= guide.start) & (view.position[row] < guide.start + guide.length)
        asked = torch.zeros_like(fill)
        asked[row] = fill[row] & inside
        if not bool(asked.any()):
            return
        parts: list[Tensor] = []

        def keep(log_p: Tensor, row: Tensor, at: Tensor) -> Tensor:
            parts.append(log_p)
            return at

        view.predicted.measure(keep, asked, 0)
        log_p, columns = torch.cat(parts), asked[row].nonzero().squeeze(-1)
        places = view.position[row, columns]
        order = places.argsort()
        log_p, columns, places = log_p[order], columns[order], places[order]
        sampling, chances = self.texts[row].decoding.sampling, self._chances[row, places, 0]

        def draw(number: int, allowed: Tensor) -> int:
            own = log_p[number].masked_fill(~allowed.to(log_p.device), -torch.inf)[None]
            return int(sampling.draw(sampling.log_p(own), chances[number : number + 1]))

        line = self._filling.z[row, guide.start : guide.start + guide.length].tolist()
        known: list[int | None] = [None if token == self.model.config.mask_id else token for token in line]
        drawn = guide.constraint.fill(known, guide.ends, (places - guide.start).tolist(), draw)
        tokens[row, columns] = torch.tensor(drawn, device=tokens.device)

    def _record(self, committed: Committed) -> None:
        log_p = committed.log_p()
        asked = torch.tensor([text.alternatives > 0 for text in self.texts], device=log_p.device)
        most = max(text.alternatives for text in self.texts)
        alternatives = committed.predicted.most(committed.fill & asked[:, None], most) if most else ()
        for row, text in enumerate(self.texts):
            fill = committed.fill[row]
            if not bool(fill.any()):
                continue
            if text.on_forward is not None:
                text.on_forward()
            places = committed.position[row][fill].tolist()
            others = []
            if text.alternatives:
                ids, values = (x[row][fill, : text.alternatives].tolist() for x in alternatives)
                others = [list(zip(*each, strict=True)) for each in zip(ids, values, strict=True)]
            text.committed(
                Event(
                    text.row, text.number, int(committed.forward[row]), int(committed.chunk[row]),
                    [place + text.offset for place in places], committed.tokens[row][fill].tolist(),
                    log_p[row][fill].tolist(), others, [text.lanes[place] for place in places if text.lanes],
                )
            )  # fmt: skip


def write(model: Model, texts: Sequence[Text], together: int) -> None:
    """Write texts to their ends, at most `together` at one time."""
    decoding, waiting = Decoding(model), list(reversed(texts))
    while waiting or decoding.running:
        while waiting and len(decoding.running) < together:
            decoding.add(waiting.pop())
        decoding.step()
