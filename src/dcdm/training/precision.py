"""The types a run computes in, from `--dtype` and the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dcdm.config import ConfigError
from dcdm.training.settings import Dtype


@dataclass(frozen=True)
class Precision:
    weights: torch.dtype
    """Of weights, gradients and moments."""
    compute: torch.dtype | None = None
    """Of matrix products, where it is another one."""

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """For passes through weights that are whole; shards bring their own types."""
        return nullcontext() if self.compute is None else torch.autocast(device.type, self.compute)


def precision(dtype: Dtype, device: torch.device) -> Precision:
    """`auto` is bf16 on CUDA and fp32 elsewhere; raises ConfigError for what the device cannot do."""
    if dtype == "auto":
        dtype = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if dtype == "fp64":
        if device.type == "mps":
            raise ConfigError("dtype=fp64: mps has no 64-bit numbers; set dtype=fp32 or device=cpu")
        return Precision(torch.float64)
    if dtype == "fp32":
        return Precision(torch.float32)
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError("dtype=bf16: this GPU does not compute in bf16; set dtype=fp32")
    return Precision(torch.float32, torch.bfloat16)
