"""The decoding cache: keys and values of finished tokens, in memory that rows share.

A pass through `Model.extend` brings new slots. Each layer writes their keys and values behind the cached
ones and attends to both. Some of the new ones stay; the rest (the tokens of the chunk that is still being
filled) is overwritten by the next pass. Slots stand in the order in which they came, so rows of a batch may
hold different numbers of them. Rows come and go between passes: they are kept at the front of one piece of
memory, so that a pass over neighbouring rows reads them where they are, without a copy.

    R rows that there is memory for   B rows of a pass   Q new slots   C capacity   G key/value heads   D head size
    K chunks   h chunk dimension   P slots of a prefix
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from dcdm.config import ModelConfig
from dcdm.model.attention import AttentionInputs
from dcdm.model.masks import CLEAN, Mask, Slots
from dcdm.model.products import product_type


class KVCache:
    """Keys and values of every block, and the chunking attention's projections and values."""

    def __init__(self, config: ModelConfig, weight: Tensor, rows: int = 0, capacity: int = 0) -> None:
        """Room for `capacity` slots of each row, on the device of `weight` and in the type of its products."""
        self.dtype, self.device = product_type(weight), weight.device
        self._capacity: list[int] = []
        self._place = Place()
        size = (config.num_kv_heads, config.head_dim)

        def layer(keys: tuple[int, ...], values: tuple[int, ...]) -> LayerCache:
            return LayerCache(self._place, *(self._zeros(0, 1, *shape) for shape in (keys, values)))

        self.layers = [layer(size, size) for _ in range(config.num_layers)]
        self.chunking: LayerCache | None = None
        if config.num_chunks is not None:
            assert config.chunk_dim is not None
            self.chunking = layer((config.num_chunks, config.chunk_dim), (config.hidden_size,))
        self._slots = Slots(*torch.full((4, 0, 1), -1, device=self.device))
        self.length = torch.zeros(0, dtype=torch.long, device=self.device)
        """(rows,): slots that are remembered, without those that the last pass added."""
        self._kept = self._new = self.length
        if rows:
            self.add_rows(rows, capacity)

    def _zeros(self, rows: int, slots: int, *shape: int) -> Tensor:
        return torch.zeros(rows, slots, *shape, dtype=self.dtype, device=self.device)

    @property
    def rows(self) -> int:
        """Rows that are in use."""
        return len(self.length)

    @property
    def positions(self) -> int:
        """Positions that there is memory for."""
        rows, slots = self._slots.chunk.shape
        return rows * (slots - 1)

    def _held(self) -> list[LayerCache]:
        return self.layers if self.chunking is None else [*self.layers, self.chunking]

    def _tensors(self) -> list[tuple[Tensor, Tensor]]:
        return [(held.keys, held.values) for held in self._held()]

    def add_rows(self, count: int, capacity: int) -> None:
        """`count` empty rows behind those in use, with room for `capacity` slots each."""
        rows, slots = self._slots.chunk.shape
        needed, longest = self.rows + count, 1 + max([capacity, *self._capacity])
        if needed > rows or longest > slots:  # a row that was longer and has left gives its length back
            self._resize(max(rows, needed) if longest == slots else needed, longest)
        self._capacity += [capacity] * count
        more = torch.zeros(count, dtype=torch.long, device=self.device)
        self.length, self._kept, self._new = (torch.cat([x, more]) for x in (self.length, self._kept, self._new))

    def keep_rows(self, rows: Tensor) -> None:
        """Forget all rows but these, which are in ascending order."""
        used = max(1, int((self.length + self._kept).max())) if self.rows else 1
        for to, source in enumerate(rows.tolist()):
            if to != source:
                for held in self._held():
                    held.keys[to, :used] = held.keys[source, :used]
                    held.values[to, :used] = held.values[source, :used]
                for field in fields(Slots):
                    kind = getattr(self._slots, field.name)
                    kind[to, :used] = kind[source, :used]
        self.length, self._kept, self._new = self.length[rows], self._kept[rows], self._new[rows]
        self._capacity = [self._capacity[row] for row in rows.tolist()]
        if 2 * len(rows) <= len(self._slots.chunk):  # half of it lies idle: give memory back
            self._resize(len(rows), 1 + max(self._capacity, default=0))

    def _resize(self, rows: int, slots: int) -> None:
        """Memory for `rows` rows of `slots` slots. The last slot of a row is for fillers, and nobody reads it."""
        count = min(rows, self.rows)
        used = min(slots, self._slots.chunk.shape[1])
        for held in self._held():
            for name in ("keys", "values"):
                old = getattr(held, name)
                new = self._zeros(rows, slots, *old.shape[2:])
                new[:count, :used] = old[:count, :used]
                setattr(held, name, new)
        fresh = Slots(*torch.full((4, rows, slots), -1, device=self.device))
        for field in fields(Slots):
            getattr(fresh, field.name)[:count, :used] = getattr(self._slots, field.name)[:count, :used]
        self._slots = fresh

    def place(self, slots: Slots, keep: Tensor, rows: Tensor | None = None) -> None:
        """Give each new slot (B, Q) its place, those to `keep` first; slots of chunk −1 are fillers.

        They belong to `rows` (B,), ascending; by default to all.
        """
        rows = torch.arange(self.rows, device=self.device) if rows is None else rows
        real = slots.chunk >= 0
        self.length[rows] += self._kept[rows]
        length = self.length[rows]
        kept, new = (keep & real).sum(dim=-1), real.sum(dim=-1)
        self._kept[rows], self._new[rows] = kept, new
        passing = kept[:, None] + (real & ~keep).long().cumsum(dim=-1)
        order = torch.where(keep, keep.long().cumsum(dim=-1), passing) - 1
        place = self._place
        place.set_rows(rows)
        place.index = torch.where(real, length[:, None] + order, self._slots.chunk.shape[1] - 1)
        place.num_keys = max(1, int((length + new).max()))
        first = int(place.index[0, 0])
        run = torch.arange(first, first + place.index.shape[1], device=self.device)
        place.run = slice(first, int(run[-1]) + 1) if bool((place.index == run).all()) else None
        for field in fields(Slots):
            held = getattr(self._slots, field.name)
            held[place.rows[:, None], place.index] = getattr(slots, field.name).to(held.dtype)
        self._queries = slots

    @property
    def num_keys(self) -> int:
        """Slots that the last pass looks at."""
        return self._place.num_keys

    def neighbours(self) -> list[tuple[Tensor, Tensor]] | None:
        """Keys and values of each block (B, C+1, …), for the rows of the last pass, if they are neighbours."""
        rows = self._place.together
        return None if rows is None else [(held.keys[rows], held.values[rows]) for held in self.layers]

    @property
    def index(self) -> Tensor:
        """(B, Q): where the slots of the last pass stand."""
        return self._place.index

    def promote(self, rows: Tensor, index: Tensor, chosen: Tensor) -> None:
        """Keep slots of the last pass of `rows` (B,) that were to be forgotten, as tokens of the text.

        `chosen` (B, X) of those at the places `index` (B, X): draft tokens that were accepted.
        """
        row, at = chosen.nonzero(as_tuple=True)
        first = (self.length + self._kept)[rows]
        where, source = rows[row], index[row, at]
        target = (first[:, None] + chosen.long().cumsum(dim=-1) - 1)[row, at]
        for held in self._held():
            for kind in (held.keys, held.values):
                kind[where, target] = kind[where, source]
        for field in fields(Slots):
            kind = getattr(self._slots, field.name)
            kind[where, target] = kind[where, source]
        self._slots.stream[where, target] = CLEAN
        self._kept[rows] += chosen.sum(dim=-1)

    def allowed(self, mask: Mask) -> Allowed | None:
        """Who sees whom, or None if every query sees every key. Fillers see slot 0, so that no row is empty."""
        place = self._place
        keys = self._slots[place.rows, : place.num_keys]
        count = (self.length + self._new)[place.rows]
        held = torch.arange(place.num_keys, device=self.device) < count[:, None]
        keys = Slots(keys.position, torch.where(held, keys.chunk, -1), keys.stream, keys.masked == 1)
        allowed = mask.dense(self._queries, keys)
        allowed[..., 0] |= self._queries.chunk < 0
        if bool(allowed.all()):
            return None
        bias = torch.zeros(allowed.shape, dtype=self.dtype, device=allowed.device)
        return Allowed(allowed, bias.masked_fill_(~allowed, -torch.inf))

    def prefix(self, row: int, positions: Tensor) -> Prefix:
        """A copy of what is remembered of these positions (P,) of a row."""
        held = self._slots.position[row, : int(self.length[row] + self._kept[row])]
        where = torch.zeros(int(held.max()) + 1, dtype=torch.long, device=self.device)
        where[held] = torch.arange(len(held), device=self.device)
        at = where[positions.to(self.device)]
        slots = torch.stack([getattr(self._slots, field.name)[row, at] for field in fields(Slots)])
        return Prefix(slots, *([x[row, at] for x in kind] for kind in zip(*self._tensors(), strict=True)))

    def load(self, row: int, prefix: Prefix) -> None:
        """Begin a row, which is empty, with a prefix of another."""
        count = prefix.slots.shape[1]
        for held, keys, values in zip(self._held(), prefix.keys, prefix.values, strict=True):
            held.keys[row, :count], held.values[row, :count] = keys, values
        for field, values in zip(fields(Slots), prefix.slots, strict=True):
            getattr(self._slots, field.name)[row, :count] = values
        self.length[row] = count


@dataclass(frozen=True)
class Prefix:
    """What a cache remembers of some slots of one row, apart from it."""

    slots: Tensor
    """(4, P): the fields of `Slots`."""
    keys: list[Tensor]
    """(P, …) of each block, and of the chunking attention where there is one."""
    values: list[Tensor]

    def __len__(self) -> int:
        return self.slots.shape[1]

    def cut(self, start: int, end: int) -> Prefix:
        """Slots `start` to `end`, in memory of their own."""
        keys, values = ([x[start:end].clone() for x in held] for held in (self.keys, self.values))
        return Prefix(self.slots[:, start:end].clone(), keys, values)

    @staticmethod
    def joined(parts: list[Prefix]) -> Prefix:
        def each(held: list[list[Tensor]]) -> list[Tensor]:
            return [torch.cat(same) for same in zip(*held, strict=True)]

        slots = torch.cat([part.slots for part in parts], dim=1)
        return Prefix(slots, each([part.keys for part in parts]), each([part.values for part in parts]))


class Allowed(NamedTuple):
    """Who sees whom, (B, Q, keys): as booleans, and as what is added to scores."""

    allowed: Tensor
    bias: Tensor


class Place:
    """Where the new slots go: shared by the layers, which must not hold the whole cache.

    Otherwise nothing would be freed before Python next looks for cycles.
    """

    def __init__(self) -> None:
        self.rows = self.index = torch.zeros(0, dtype=torch.long)
        self.together: slice | None = slice(0)
        """The rows as a range, if they are neighbours: those are read without a copy."""
        self.run: slice | None = None
        """Where the new slots of every row go, if that is one range in their order."""
        self.num_keys = 0

    def set_rows(self, rows: Tensor) -> None:
        first, last = int(rows[0]), int(rows[-1])
        self.rows, self.together = rows, slice(first, last + 1) if last - first == len(rows) - 1 else None

    def write(self, held: Tensor, new: Tensor) -> None:
        """Put (B, Q, …) into (R, C+1, …)."""
        if self.together is not None and self.run is not None:
            held[self.together, self.run] = new
        else:
            held[self.rows[:, None], self.index] = new.to(held.dtype)

    def read(self, held: Tensor) -> Tensor:
        """(R, C+1, …) to (B, keys, …)."""
        if self.together is not None:
            return held[self.together, : self.num_keys]
        return held[:, : self.num_keys].index_select(0, self.rows)


class LayerCache:
    """Two tensors (R, C+1, …) that grow together."""

    def __init__(self, place: Place, keys: Tensor, values: Tensor) -> None:
        self.place, self.keys, self.values = place, keys, values

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write those of the new slots (B, Q, …); all that there are, (B, keys, …)."""
        place = self.place
        place.write(self.keys, keys)
        place.write(self.values, values)
        return place.read(self.keys), place.read(self.values)

    def inputs(self, allowed: Allowed | None, num_queries: int) -> AttentionInputs:
        """What `attend` takes."""
        bias = None if allowed is None else allowed.bias[:, :num_queries]
        return AttentionInputs("sdpa", num_queries, None, None, None, bias, self)
