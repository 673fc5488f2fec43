"""Whose text is next: callers share the model by tokens, whoever asks for more at once.

Weighted fair queueing with equal weights. Every text has a tag: when its caller's earlier texts would have been
served if all callers were served at the same rate, token by token. Texts are taken in the order of their tags. The
clock of the tags advances with the tokens that are taken, the slower the more callers wait; a caller who comes back
after a pause starts from now and has saved up nothing. So nobody waits for ever, and one who sends a hundred texts
delays another's single one by no more than what is being computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Item(NamedTuple, Generic[T]):
    tag: float
    number: int
    item: T
    caller: str
    cost: float


class FairQueue(Generic[T]):
    """Items in the order in which they are to be served."""

    def __init__(self) -> None:
        self._items: list[_Item[T]] = []
        self._now = 0.0
        self._served_until: dict[str, float] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return (entry.item for entry in self._items)

    def add(self, item: T, caller: str, cost: float) -> None:
        """An item that costs so many tokens."""
        tag = max(self._now, self._served_until.get(caller, 0.0))
        self._served_until[caller] = tag + cost
        self._number += 1
        self._items.append(_Item(tag, self._number, item, caller, cost))
        self._items.sort(key=lambda entry: entry[:2])

    def take(self, wanted: Callable[[T], bool]) -> list[T]:
        """Remove the items that are `wanted`, asked in turn, up to the first that is not."""
        taken: list[T] = []
        rest: list[_Item[T]] = []
        callers = len({entry.caller for entry in self._items})
        for at, entry in enumerate(self._items):
            if wanted(entry.item):
                taken.append(entry.item)
                self._now = max(self._now, entry.tag) + entry.cost / callers
            else:
                rest = self._items[at:]
                break
        self._items = rest
        # those who are not ahead, or all if nobody waits, start from now when they come again
        ahead = {caller: until for caller, until in self._served_until.items() if until > self._now}
        self._served_until = ahead if rest else {}
        return taken

    def drop(self, unwanted: Callable[[T], bool]) -> int:
        """Remove what nobody waits for any more; how many there were."""
        kept: list[_Item[T]] = []
        dropped = 0
        for entry in self._items:
            if not unwanted(entry.item):
                kept.append(entry)
                continue
            dropped += 1
            if entry.caller in self._served_until:  # what is not done costs its caller nothing
                self._served_until[entry.caller] -= entry.cost
        self._items = kept
        return dropped
