"""Attention under the masks of `masks.py`. The only module that knows kernels.

B batch   H query heads   G key/value heads   Q, S query and key slots   D head size
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dcdm.config import ConfigError, ModelConfig, RopeScaling
from dcdm.model import blockmask, explicit
from dcdm.model.layout import Tile, rows_alike, tiles_of
from dcdm.model.masks import Mask, Slots
from dcdm.model.products import at_least_fp32

Backend = Literal["reference", "sdpa", "sdpa-tiled", "flex"]


def choose_backend(name: str, device: torch.device, training: bool) -> Backend:
    """The backend that `name` ("auto" or one of `Backend`) means; a wrong choice raises with the reason."""
    if name == "auto":
        return "flex" if device.type == "cuda" else "sdpa-tiled"
    if name not in get_args(Backend):
        raise ConfigError(f"backend={name!r} is not known; choose auto or one of {', '.join(get_args(Backend))}")
    if name == "flex" and device.type == "cpu" and training:
        raise ConfigError(
            "backend='flex' cannot train on the CPU: PyTorch's FlexAttention has no backward there; "
            "use backend='sdpa-tiled', or wrap the call in torch.no_grad()"
        )
    if name == "flex" and device.type == "mps":
        raise ConfigError("backend='flex' does not run on MPS; use backend='sdpa-tiled'")
    return name  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """A mask over given slots: what the attention layers of one pass share.

    The first `num_queries` slots ask, all of them may be asked. What a backend needs is made on first use.
    """

    mask: Mask
    slots: Slots
    backend: Backend
    num_queries: int
    device: torch.device
    """Of keys and queries; the slots may be in main memory, where reading them does not wait."""
    _additive: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, mask: Mask, slots: Slots, backend: Backend, device: torch.device | None = None) -> AttentionPlan:
        return cls(mask, slots, backend, slots.chunk.shape[1], device or slots.chunk.device)

    def narrow(self, num_queries: int) -> AttentionPlan:
        """The same keys, fewer queries."""
        return replace(self, num_queries=num_queries, _additive={})

    @cached_property
    def on_device(self) -> Slots:
        return self.slots.to(self.device)

    @cached_property
    def on_host(self) -> Slots:
        return self.slots.to(torch.device("cpu"))

    @cached_property
    def dense(self) -> Tensor:
        """(B, Q, S) bool."""
        return self.mask.dense(self.on_device[:, : self.num_queries], self.on_device)

    @cached_property
    def tiles(self) -> list[Tile]:
        return tiles_of(self.mask, self.on_host, self.num_queries)

    def tile_mask(self, tile: Tile) -> Tensor:
        """(1 or rows, q, k) bool for a tile that needs one; rows alike share it."""
        last = tile.r0 + 1 if self._rows_alike else tile.r1
        queries = self.on_device[tile.r0 : last, tile.q0 : tile.q1]
        keys = self.on_device[tile.r0 : last]
        keys = Slots.cat(keys[:, tile.a0 : tile.a1], keys[:, tile.b0 : tile.b1])
        return self.mask.dense(queries, keys)

    @cached_property
    def _rows_alike(self) -> bool:
        return rows_alike(self.mask, self.on_host)

    @cached_property
    def table(self) -> Tensor:
        """The tiles as numbers (T, 11): r0, r1, q0, q1, a0, a1, b0, b1, own, and of the tile's mask where it
        starts in `additive` and how many rows it has (0: no mask)."""
        numbers, start = [], 0
        for t in self.tiles:
            rows = 0 if not t.masked else 1 if self._rows_alike else t.r1 - t.r0
            numbers.append([t.r0, t.r1, t.q0, t.q1, t.a0, t.a1, t.b0, t.b1, t.own, start, rows])
            start += rows * (t.q1 - t.q0) * t.num_keys
        return torch.tensor(numbers, dtype=torch.long).view(-1, 11)

    def additive(self, dtype: torch.dtype) -> Tensor:
        """The masks of the tiles that need one, 0 / −inf, one behind the other."""
        if dtype not in self._additive:
            allowed = [self.tile_mask(tile).flatten() for tile in self.tiles if tile.masked]
            flat = torch.cat([self.on_device.masked.new_ones(0), *allowed])
            zeros = torch.zeros(len(flat), dtype=dtype, device=flat.device)
            self._additive[dtype] = zeros.masked_fill_(~flat, -torch.inf)
        return self._additive[dtype]

    @cached_property
    def block_mask(self) -> Any:
        return blockmask.from_slots(self.mask, self.on_device, self.num_queries)

    def inputs(self, dtype: torch.dtype) -> AttentionInputs:
        """What `attend` takes: everything made, so that a compiled block only passes it on."""
        tiled, flex = self.backend == "sdpa-tiled", self.backend == "flex"
        return AttentionInputs(
            self.backend,
            self.num_queries,
            self.table if tiled else None,
            self.additive(dtype) if tiled else None,
            self.block_mask if flex else None,
            None if tiled or flex else self.dense,
        )


class KeysAndValues(Protocol):
    """Keys and values of earlier passes in one layer."""

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Those of new slots (B, Q, …) come in; all that there are, (B, S, …), come back."""
        ...


class AttentionInputs(NamedTuple):
    """A plan in the form that one backend takes, or what is remembered of earlier passes in a layer."""

    backend: Backend
    num_queries: int
    table: Tensor | None
    masks: Tensor | None
    block_mask: Any
    dense: Tensor | None
    cache: KeysAndValues | None = None


def attend(q_bqhd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, inputs: AttentionInputs) -> Tensor:
    """Scaled dot-product attention under a plan, grouped queries included: (B, Q, H, D)."""
    # under autocast the norms give queries and keys in a wider type than the products give values
    q_bqhd, k_bsgd = q_bqhd.to(v_bsgd.dtype), k_bsgd.to(v_bsgd.dtype)
    if inputs.cache is not None:
        k_bsgd, v_bsgd = inputs.cache.extend(k_bsgd, v_bsgd)
    q, k, v = (x.transpose(1, 2) for x in (q_bqhd, k_bsgd, v_bsgd))
    if inputs.cache is not None:
        mask = None if inputs.dense is None else inputs.dense[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    if inputs.table is not None and inputs.masks is not None:
        if q.device.type == "cpu":
            return tiled_attention(q, k, v, inputs.table, inputs.masks)[0]
        return tiles_by_autograd(q, k, v, inputs.table, inputs.masks).transpose(1, 2)
    if inputs.block_mask is not None:
        return blockmask.flex_attention(q, k, v, inputs.block_mask).transpose(1, 2)
    assert inputs.dense is not None
    if inputs.backend == "sdpa":
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=inputs.dense[:, None], enable_gqa=True)
        return out.transpose(1, 2)
    return explicit.attend(q, k, v, inputs.dense).transpose(1, 2)


def tiles_by_autograd(q: Tensor, k: Tensor, v: Tensor, table: Tensor, masks: Tensor) -> Tensor:
    """The tiles through SDPA and autograd: slower than the CPU's own operator, and runs on any device."""
    out = torch.zeros_like(q)
    row, head, place = (torch.arange(size, device=q.device) for size in q.shape[:3])
    for tile, mask in _parts(table, masks):
        rows, queries = slice(tile.r0, tile.r1), slice(tile.q0, tile.q1)
        k_t, v_t = tile.keys(k[rows], dim=2), tile.keys(v[rows], dim=2)
        if tile.own:  # the query's own slot as one more key, through a mask over the tile's own slots
            size = tile.q1 - tile.q0
            k_t, v_t = (torch.cat([a, x[rows, :, queries]], dim=2) for a, x in ((k_t, k), (v_t, v)))
            mask = q.new_zeros(size, tile.num_keys + size)
            mask[:, tile.num_keys :].fill_(-torch.inf).fill_diagonal_(0)
        part = F.scaled_dot_product_attention(q[rows, :, queries], k_t, v_t, attn_mask=mask, enable_gqa=True)
        out = out.index_put((row[rows, None, None], head[None, :, None], place[None, None, queries]), part)
    return out


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _parts(table: Tensor, masks: Tensor) -> list[tuple[Tile, Tensor | None]]:
    parts: list[tuple[Tile, Tensor | None]] = []
    for r0, r1, q0, q1, a0, a1, b0, b1, own, start, rows in table.tolist():
        tile = Tile(r0, r1, q0, q1, a0, a1, b0, b1, rows > 0, bool(own))
        shape = (rows, 1, q1 - q0, tile.num_keys)
        mask = masks[start : start + math.prod(shape)].view(shape) if rows else None
        parts.append((tile, mask))
    return parts


def _grouped(x_bgqd: Tensor, heads: int) -> Tensor:
    """Key/value heads repeated to the number of query heads."""
    return x_bgqd.repeat_interleave(heads // x_bgqd.shape[1], dim=1)


@torch.library.custom_op("dcdm::tiled_attention", mutates_args=(), device_types="cpu")
def tiled_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention tile by tile: out (B, Q, H, D) and the logarithm of each softmax's denominator (B, H, Q).

    An opaque operator: neither the compiler nor autograd sees the tiles, and gradients of keys that several
    tiles share are summed in place.
    """
    rows, heads, queries, size = q.shape
    out = q.new_zeros(rows, queries, heads, size)
    lse = q.new_zeros(rows, heads, queries, dtype=at_least_fp32(q))
    for tile, mask in _parts(table, masks):
        r, own = slice(tile.r0, tile.r1), slice(tile.q0, tile.q1)
        q_t = q[r, :, own]
        if tile.num_keys:
            part, total = _flash(q_t, tile.keys(k[r], 2), tile.keys(v[r], 2), attn_mask=mask)
        else:
            part, total = torch.zeros_like(q_t), lse.new_full(q_t.shape[:3], -torch.inf)
        if tile.own:  # one more key, the query's own slot, merged into the softmax
            score = (q_t * _grouped(k[r, :, own], heads)).sum(-1, dtype=lse.dtype) / math.sqrt(size)
            both = torch.logaddexp(total, score)
            part = part * (total - both).exp()[..., None]
            part += _grouped(v[r, :, own], heads) * (score - both).exp()[..., None]
            total = both
        out[r, own] = part.transpose(1, 2)
        lse[r, :, own] = total
    return out, lse


@torch.library.custom_op("dcdm::tiled_attention_backward", mutates_args=(), device_types="cpu")
def tiled_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Tensor, masks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads, size = q.shape[1], q.shape[-1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for tile, mask in _parts(table, masks):
        r, own = slice(tile.r0, tile.r1), slice(tile.q0, tile.q1)
        q_t, lse_t = q[r, :, own], lse[r, :, own]
        grad_t, out_t = grad[r, own].transpose(1, 2), out[r, own].transpose(1, 2)
        if tile.num_keys:
            parts = _flash_backward(
                grad_t, q_t, tile.keys(k[r], 2), tile.keys(v[r], 2), out_t, lse_t, 0.0, False, attn_mask=mask
            )
            dq[r, :, own] += parts[0]
            first = tile.a1 - tile.a0
            for whole, part in zip((dk, dv), parts[1:], strict=True):
                whole[r, :, tile.a0 : tile.a1] += part[:, :, :first]
                if tile.b1 > tile.b0:
                    whole[r, :, tile.b0 : tile.b1] += part[:, :, first:]
        if tile.own:
            k_own, v_own = _grouped(k[r, :, own], heads), _grouped(v[r, :, own], heads)
            share = ((q_t * k_own).sum(-1, dtype=lse.dtype) / math.sqrt(size) - lse_t).exp()
            delta = (grad_t * (v_own - out_t)).sum(-1)
            step = (share * delta / math.sqrt(size))[..., None]
            dq[r, :, own] += step * k_own
            shape = (tile.r1 - tile.r0, k.shape[1], -1, tile.q1 - tile.q0, size)
            dk[r, :, own] += (step * q_t).view(shape).sum(2)
            dv[r, :, own] += (share[..., None] * grad_t).view(shape).sum(2)
    return dq, dk, dv


@tiled_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, table: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads, queries, size = q.shape
    return q.new_empty(rows, queries, heads, size), q.new_empty(rows, heads, queries, dtype=at_least_fp32(q))


@tiled_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Tensor, masks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, table, masks = inputs
    ctx.save_for_backward(q, k, v, *output, table, masks)
    ctx.set_materialize_grads(False)


def _attention_gradients(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, table, masks = ctx.saved_tensors
    if grad is None:
        return None, None, None, None, None
    gradients = tiled_attention_backward(grad.contiguous(), q, k, v, out, lse, table, masks)
    return *gradients, None, None


tiled_attention.register_autograd(_attention_gradients, setup_context=_save_for_backward)


def rotary_tables(position: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE for positions (B, S): two tensors (B, S, 1, D), the first half of sines negated."""
    precision = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, config.head_dim, 2, device=position.device, dtype=precision) / config.head_dim
    frequency = 1.0 / config.rope_theta**exponent
    if config.rope_scaling is not None:
        frequency = _slowed(frequency, config.rope_scaling)
    angle = position[:, :, None, None].to(precision) * frequency
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def _slowed(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Frequencies of long waves divided by `factor`, those of short waves as they are, a blend between."""
    turns = scaling.original_length * frequency / (2 * math.pi)  # over the original length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def rotate(x_bshd: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE in the half-split convention of Qwen and Llama."""
    cos, sin = tables
    first, second = x_bshd.chunk(2, dim=-1)
    return x_bshd * cos + torch.cat([second, first], dim=-1) * sin
