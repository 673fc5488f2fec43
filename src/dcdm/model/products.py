"""Products with weight matrices: their types, their kernels, and the head's, of which no M × V tensor exists.

Decoding multiplies a few rows, one or one per lane, with every matrix of the network. PyTorch's own product on a
CPU takes several times as long for 2 to 16 rows as for one; oneDNN's reads the weights once for all of them
(docs/LOG.md has the figures). Training and prompts have hundreds of rows and stay with PyTorch's.

    M positions   d hidden size   V vocabulary
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = 64
SLICE_BYTES = 64 << 20  # size of the logits that exist at one time


def at_least_fp32(x: Tensor) -> torch.dtype:
    """The type of `x`, or fp32 where that is narrower."""
    return torch.promote_types(x.dtype, torch.float32)


def product_type(x: Tensor) -> torch.dtype:
    """What matrix products of `x` are made in: autocast's type, for those it does not know."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, as `F.linear` gives it up to rounding."""
    if _served_by_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _served_by_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_grad_enabled()
        and 0 < x.numel() <= FEW_ROWS * x.shape[-1]
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and type(weight.data) is Tensor  # not a shard
        and torch.backends.mkldnn.is_available()
    )


@cache
@torch.no_grad()
def bf16_slowdown() -> float:
    """How many times as long as in fp32 a product with one position takes in bf16 on this CPU; measured once."""
    weight = torch.ones(16384, 2048)  # more than caches hold
    pairs = [(torch.ones(1, 2048, dtype=dtype), weight.to(dtype)) for dtype in (torch.float32, torch.bfloat16)]
    best = [math.inf, math.inf]
    for _ in range(15):
        for number, pair in enumerate(pairs):
            start = time.perf_counter()
            product(*pair)
            best[number] = min(best[number], time.perf_counter() - start)
    return best[1] / best[0]


class Linear(nn.Linear):
    """`nn.Linear` by `product`."""

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


def products_of(x: Tensor, *layers: Any) -> list[Tensor]:
    """What each of the layers makes of the same states: by one product where they are parts of one matrix."""
    matrix = getattr(layers[0], "matrix", None)
    if matrix is None or any(getattr(layer, "matrix", None) is not matrix for layer in layers):
        return [layer(x) for layer in layers]
    whole = matrix(x)
    return [layer.of_product(whole) for layer in layers]


# --- cross-entropy at chosen positions, a slice of the logits at a time -------------------------------------------


def _slices(states: Tensor, weight: Tensor) -> list[slice]:
    size = max(1, SLICE_BYTES // (weight.shape[0] * 4))
    return [slice(at, at + size) for at in range(0, len(states), size)]


def _logits(states: Tensor, weight: Tensor, hidden: int | None) -> Tensor:
    logits = F.linear(states, weight)
    logits = logits.to(at_least_fp32(logits))
    if hidden is not None:
        logits[:, hidden] = -torch.inf
    return logits


class _WeightedLoss(torch.autograd.Function):
    """Σ w · −log softmax(states Wᵀ)[target]; the gradient is made in the forward pass, slice by slice.

    Targets may be distributions, given as the states (M, d) that predict them.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, targets: Tensor, importance: Tensor, hidden: int | None
    ) -> Tensor:
        need_states, need_weight = ctx.needs_input_grad[:2]
        d_states = torch.zeros_like(states) if need_states else None
        d_weight = torch.zeros_like(weight) if need_weight else None
        total = importance.new_zeros(())
        states, weight = (x.to(product_type(states)) for x in (states, weight))
        for part in _slices(states, weight):
            logits, target = _logits(states[part], weight, hidden), targets[part]
            log_sum = logits.logsumexp(dim=-1, keepdim=True)
            if soft := target.ndim > 1:
                target = _logits(target.to(weight), weight, hidden).softmax(dim=-1)
                nll = log_sum.squeeze(-1) - (target * logits).sum(dim=-1)
            else:
                nll = (log_sum - logits.gather(-1, target[:, None])).squeeze(-1)
            total = total + (nll * importance[part]).sum()
            if d_states is None and d_weight is None:
                continue
            d_logits = logits.sub_(log_sum).exp_()
            if soft:
                d_logits -= target
            else:
                d_logits.scatter_add_(-1, target[:, None], torch.full_like(log_sum, -1.0))
            d_logits = d_logits.mul_(importance[part, None]).to(states.dtype)
            if d_states is not None:
                d_states[part] = d_logits @ weight
            if d_weight is not None:
                _add_product(d_weight, d_logits.T, states[part])
        ctx.save_for_backward(d_states, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        d_states, d_weight = ctx.saved_tensors
        scaled = [None if d is None else d * grad.to(d.dtype) for d in (d_states, d_weight)]
        return scaled[0], scaled[1], None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where the product may have a narrower type than the total."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def weighted_nll(
    states: Tensor, weight: Tensor, targets: Tensor, importance: Tensor, hidden: int | None = None
) -> Tensor:
    """Σ_i importance_i · −log p(targets_i), a scalar; states (M, d), weight (V, d). No M × V tensor exists.

    The token `hidden` has no probability. Targets are tokens (M,), or states (M, d) whose distributions they are.
    """
    importance = importance.to(at_least_fp32(states))
    return _WeightedLoss.apply(states, weight, targets, importance, hidden)


@torch.no_grad()
def token_nll(states: Tensor, targets: Tensor, logits_of: Callable[[Tensor], Tensor], tokens: int) -> Tensor:
    """−log p of each target, without gradient: (M,). `logits_of` makes (n, V) of states (n, d), V is `tokens`."""
    size = max(1, SLICE_BYTES // (tokens * 4))
    parts = [F.cross_entropy(logits.to(at_least_fp32(logits)), target, reduction="none")
             for part, target in zip(states.split(size), targets.split(size), strict=True)
             for logits in [logits_of(part)]]  # fmt: skip
    return torch.cat(parts) if parts else states.new_zeros(0)
