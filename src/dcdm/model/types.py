"""The types that sums and products are made in."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> torch.dtype:
    """The type of `x`, or fp32 where that is narrower."""
    return torch.promote_types(x.dtype, torch.float32)


def product_type(x: Tensor) -> torch.dtype:
    """What matrix products of `x` are made in: autocast's type, for those it does not know."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
