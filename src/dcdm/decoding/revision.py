"""Revising a text: the tokens that the model is least sure of, given the others, are written again.

First every group of tokens is hidden once and put back as it was, which tells how probable each is given the
others; then the least probable are masked and filled like blanks.
"""

from __future__ import annotations

import math

from dcdm.decoding.text import Event, Text


class Revision(Text):
    """A text to revise by its decoder's `Revise`; its `prompt` is what there is of it."""

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
        """The text with one group hidden, or with what is to be written again."""
        places = range(1, len(self.tokens))
        masked = set(places[self._group :: self.settings.groups] if self._looking else self._least_sure())
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
            self.costs["new_tokens"] += self.context.count(mask_id)
            self.tokens = line[: len(self.context)]
            self._round += 1
            self._group = 0
        if self._round == self.settings.rounds:
            self.finished = self.finished or "length"
        self._end_window(mask_id)

    def completion(self, mask_id: int) -> list[int]:
        """The whole text."""
        return self.tokens[1:]
