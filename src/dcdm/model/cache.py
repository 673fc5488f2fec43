"""The decoding cache: keys and values of finished tokens, preallocated.

A pass through `Model.extend` brings new slots. Each layer writes their keys and values behind the cached
ones and attends to both. Some of the new ones stay; the rest (the tokens of the chunk that is still being
filled) is overwritten by the next pass. Slots stand in the order in which they came, so rows of a batch may
hold different numbers of them.

    B batch   Q new slots   C capacity   G key/value heads   D head size   K chunks   h chunk dimension
"""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from dcdm.config import ModelConfig
from dcdm.model.attention import AttentionInputs, product_type
from dcdm.model.masks import Mask, Slots


class KVCache:
    """Keys and values of every block, and the chunking attention's projections and values."""

    def __init__(self, config: ModelConfig, weight: Tensor, rows: int, capacity: int) -> None:
        """Room for `capacity` slots of each row, on the device of `weight` and in the type of its products."""
        self.dtype = product_type(weight)

        def zeros(*shape: int) -> Tensor:  # one slot more: fillers are written there, and nobody reads it
            return torch.zeros(rows, capacity + 1, *shape, dtype=self.dtype, device=weight.device)

        self._place = Place(torch.arange(rows, device=weight.device)[:, None])
        size = (config.num_kv_heads, config.head_dim)
        self.layers = [LayerCache(self._place, zeros(*size), zeros(*size)) for _ in range(config.num_layers)]
        self.chunking: LayerCache | None = None
        if config.num_chunks is not None:
            assert config.chunk_dim is not None
            projections = zeros(config.num_chunks, config.chunk_dim)
            self.chunking = LayerCache(self._place, projections, zeros(config.hidden_size))
        self._slots = Slots(*torch.full((4, rows, capacity + 1), -1, device=weight.device))
        self.length = torch.zeros(rows, dtype=torch.long, device=weight.device)
        """(B,): remembered slots."""
        self._kept = self._new = self.length

    def keep_rows(self, rows: Tensor) -> None:
        """Forget all rows but these."""
        for held in (*self.layers, *([] if self.chunking is None else [self.chunking])):
            held.keys, held.values = held.keys[rows], held.values[rows]
        self._slots = Slots(*(getattr(self._slots, field.name)[rows] for field in fields(Slots)))
        self._place.rows = self._place.rows[: len(rows)]
        self.length, self._kept, self._new = self.length[rows], self._kept[rows], self._new[rows]

    def place(self, slots: Slots, keep: Tensor) -> None:
        """Give each new slot (B, Q) its place, those to `keep` first; slots of chunk −1 are fillers."""
        real = slots.chunk >= 0
        self.length = self.length + self._kept
        self._kept, self._new = (keep & real).sum(dim=-1), real.sum(dim=-1)
        passing = self._kept[:, None] + (real & ~keep).long().cumsum(dim=-1)
        order = torch.where(keep, keep.long().cumsum(dim=-1), passing) - 1
        place = self._place
        place.index = torch.where(real, self.length[:, None] + order, self._slots.chunk.shape[1] - 1)
        place.num_keys = max(1, int((self.length + self._new).max()))
        for field in fields(Slots):
            held = getattr(self._slots, field.name)
            held[place.rows, place.index] = getattr(slots, field.name).to(held.dtype)
        self._queries = slots

    def allowed(self, mask: Mask) -> Allowed | None:
        """Who sees whom, or None if every query sees every key. Fillers see slot 0, so that no row is empty."""
        keys = self._slots[:, : self._place.num_keys]
        held = torch.arange(self._place.num_keys, device=keys.chunk.device) < (self.length + self._new)[:, None]
        keys = Slots(keys.position, torch.where(held, keys.chunk, -1), keys.stream, keys.masked == 1)
        allowed = mask.dense(self._queries, keys)
        allowed[..., 0] |= self._queries.chunk < 0
        if bool(allowed.all()):
            return None
        bias = torch.zeros(allowed.shape, dtype=self.dtype, device=allowed.device)
        return Allowed(allowed, bias.masked_fill_(~allowed, -torch.inf))


class Allowed(NamedTuple):
    """Who sees whom, (B, Q, keys): as booleans, and as what is added to scores."""

    allowed: Tensor
    bias: Tensor


class Place:
    """Where the new slots go: shared by the layers, which must not hold the whole cache.

    Otherwise nothing would be freed before Python next looks for cycles.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = self.index = rows
        self.num_keys = 0


class LayerCache:
    """Two tensors (B, C+1, …) that grow together."""

    def __init__(self, place: Place, keys: Tensor, values: Tensor) -> None:
        self.place, self.keys, self.values = place, keys, values

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write those of the new slots (B, Q, …); all that there are, (B, keys, …), without a copy."""
        place = self.place
        self.keys[place.rows, place.index] = keys.to(self.keys.dtype)
        self.values[place.rows, place.index] = values.to(self.values.dtype)
        return self.keys[:, : place.num_keys], self.values[:, : place.num_keys]

    def inputs(self, allowed: Allowed | None, num_queries: int) -> AttentionInputs:
        """What `attend` takes."""
        bias = None if allowed is None else allowed.bias[:, :num_queries]
        return AttentionInputs("sdpa", num_queries, None, None, None, bias, self)
