"""Weights in 8 bits, for decoding and scoring on a CPU: one row's scale and whole numbers from −127 to 127.

Two kernels make the products, beside those of compiled blocks (`kernels.py`). For prompts, scoring and the head,
oneDNN's of unsigned by signed bytes, which sums in whole numbers; activations enter it as two bytes each, a coarse
one and one for what that leaves, and keep 15 bits. In the other matrices, for up to 16 rows, fbgemm's with the
whole numbers as fp16, which holds them exactly: one call, where bytes take a dozen small operations. The result is
that of the same weights in fp32, up to 1e-4 and 1e-6, and does not depend on the rows beside it in the same kernel.

    N rows of a weight matrix   K its columns   M positions
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dcdm.model.products import Linear

FEW_ROWS, SMALL = 16, 1 << 23
MOST, FINER, ZERO = 127, 254, 128
SCALE = ".scale"


def can_pack(device: torch.device) -> bool:
    """On a CPU with VNNI that oneDNN may use: elsewhere it is slow, or sums of two bytes' products overflow."""
    return device.type == "cpu" and _sums_are_exact()


@cache
def _sums_are_exact() -> bool:
    if not (torch.cpu._is_vnni_supported() and torch.backends.mkldnn.is_available()):
        return False
    largest = torch.full((64, 64), MOST, dtype=torch.int8)
    found = Matrix(largest, torch.ones(64))(torch.ones(1, 64))
    return torch.allclose(found, torch.tensor(64.0 * MOST))


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers (N, K) and the scale (N,) of each row.

    A scale has 17 bits, and times 127 is still exact: a matrix made of both gives the same bytes and scales again.
    """
    weight = weight.float()
    scale = (weight.abs().amax(dim=-1) / MOST).clamp(min=2.0**-100).view(torch.int32).bitwise_and(-(1 << 7))
    scale = scale.view(torch.float32)
    return (weight / scale[:, None]).round().clamp(-MOST, MOST).to(torch.int8), scale


def dequantised(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state whose matrices may be bytes, as fp32: what products with them are made with."""
    scales = {name.removesuffix(SCALE): value for name, value in state.items() if name.endswith(SCALE)}
    return {
        name: value * scales[name.removesuffix(".weight")][:, None] if value.dtype == torch.int8 else value
        for name, value in state.items()
        if not name.endswith(SCALE)
    }


def in_two_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """(M, K) as unsigned bytes (2M, K), coarse ones before fine ones, and the largest number (M, 1) of each row."""
    largest = x.abs().amax(dim=-1, keepdim=True).clamp(min=2.0**-100)
    exact = x * (MOST / largest)
    coarse = exact.round()
    both = torch.stack([coarse, (exact - coarse) * FINER]) + (ZERO + 0.5)
    return both.to(torch.uint8).view(-1, x.shape[-1]), largest  # rounded towards zero


def joined(products: Tensor, largest: Tensor) -> Tensor:
    """(M, N) from the products (2M, N) of coarse and of fine bytes; or (…, N) from (2, …, N)."""
    coarse, fine = products.view(2, *largest.shape[:-1], products.shape[-1]).unbind()
    return (coarse + fine * (1 / FINER)) * largest


class Matrix:
    """x Wᵀ, with W in bytes and in the order that the kernel reads."""

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.scale = scale
        self._kernel = torch.ops.onednn.qlinear_prepack(numbers, None)
        self._zeros = torch.zeros(len(scale), dtype=torch.int32)
        self._is_small = numbers.numel() <= SMALL

    def __call__(self, x: Tensor) -> Tensor:
        x_mk = x.reshape(-1, x.shape[-1])
        if len(x_mk) <= FEW_ROWS and self._is_small:
            y_mn = torch.ops.quantized.linear_dynamic_fp16(x_mk, self._halves).mul_(self.scale)
        else:
            both, largest = in_two_bytes(x_mk)
            y_mn = joined(self.of_bytes(both), largest)
        return y_mn.view(*x.shape[:-1], -1)

    def of_bytes(self, both: Tensor) -> Tensor:
        """The products (2M, N) with what `in_two_bytes` made of M positions; `joined` puts them together."""
        return torch.ops.onednn.qlinear_pointwise.default(
            both, 1 / MOST, ZERO, self._kernel, self.scale, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    @cached_property
    def _halves(self) -> Any:
        return torch.ops.quantized.linear_prepack_fp16(self.numbers.float(), None)

    @property
    def numbers(self) -> Tensor:
        """(N, K) int8."""
        return self._kernel.to_dense().t().contiguous()

    @cached_property
    def blocks(self) -> Tensor:
        """(N/16, K, 16) int8, so that a vector holds sums of 16 rows; (N, K) if 16 does not divide N."""
        numbers = self.numbers
        return numbers if len(numbers) % 16 else numbers.unflatten(0, (-1, 16)).transpose(1, 2).contiguous()


class PackedLinear(nn.Module):
    """Some of a matrix' rows in the place of a `Linear`."""

    def __init__(self, matrix: Matrix, rows: slice, bias: Tensor | None) -> None:
        super().__init__()
        self.matrix, self.rows, self.bias = matrix, rows, bias

    def forward(self, x: Tensor) -> Tensor:
        return self.of_product(self.matrix(x))

    def of_product(self, whole: Tensor) -> Tensor:
        """Its own part of the product with the whole matrix."""
        y = whole[..., self.rows]
        return y if self.bias is None else y + self.bias

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.matrix.numbers[self.rows]
        destination[f"{prefix}scale"] = self.matrix.scale[self.rows]
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.detach()


class PackedEmbedding(nn.Module):
    """Rows in bytes by their numbers; where the embedding is the head as well, with the matrix of both."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, is_head: bool) -> None:
        super().__init__()
        numbers, scale = quantised(weight)
        self.register_buffer("weight", numbers)
        self.register_buffer("scale", scale)
        self.matrix = Matrix(numbers, scale) if is_head else None

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens] * self.scale[tokens][..., None]


@torch.no_grad()
def pack(model: nn.Module, tied: bool) -> None:
    """Put bytes in the place of the embedding, of the head, and of every matrix that is a `Linear`.

    Mixtures of experts keep theirs, which are stacked. Matrices that a module multiplies the same states with (its
    `TOGETHER`) become one. `tied`: the embedding is the head.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Embedding):
                setattr(module, name, PackedEmbedding(child.weight, tied))
        linear = {name: child for name, child in module.named_children() if isinstance(child, Linear)}
        together = getattr(module, "TOGETHER", ())
        for names in [together, *([name] for name in linear if name not in together)]:
            if not names:
                continue
            parts = [quantised(linear[name].weight) for name in names]
            matrix = Matrix(*(torch.cat(same) for same in zip(*parts, strict=True)))
            start = 0
            for name, (numbers, _) in zip(names, parts, strict=True):
                rows = slice(start, start + len(numbers))
                setattr(module, name, PackedLinear(matrix, rows, linear[name].bias))
                start = rows.stop
