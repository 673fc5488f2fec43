"""Products with weight matrices, each by the kernel that serves its shape.

Decoding multiplies a few rows, one or one per lane, with every matrix of the network. PyTorch's own product on a
CPU takes several times as long for 2 to 16 rows as for one; oneDNN's reads the weights once for all of them
(docs/LOG.md has the figures). Training and prompts have hundreds of rows and stay with PyTorch's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = 64


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


class Linear(nn.Linear):
    """`nn.Linear` by `product`."""

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)
