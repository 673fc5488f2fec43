"""Counts where a program waits for its device: every value read from it, and every copy that is not asynchronous.

The device is PyTorch's meta device, on which nothing has a value, so that no reading goes unseen: each raises
unless it is answered here. Main memory is real.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
DEVICE = torch.device("meta")
SIZED_BY_VALUES = {aten.nonzero, aten.masked_select, aten._unique2, aten.bincount, aten.repeat_interleave}
COPIES = {aten._to_copy, aten.copy_}


class Reads(TorchDispatchMode):
    """`found` counts by the name of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = [x for x in tensors if x.is_meta]
        if not there and torch.device(kwargs.get("device") or "cpu") != DEVICE:
            return func(*args, **kwargs)
        if packet in COPIES:
            return self._copy(func, args, kwargs)
        if packet in (aten._local_scalar_dense, aten.equal):
            self.found["a number"] += 1
            return 1.0 if there[0].is_floating_point() else 1
        if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            if any(x is not None and (x.dtype == torch.bool or not x.is_meta) for x in args[1]):
                self.found["places of a mask, or from main memory"] += 1
                args = (args[0], [None if x is None else self._places(x) for x in args[1]], *args[2:])
        elif packet in SIZED_BY_VALUES:
            self.found[f"a size: {packet.__name__}"] += 1
            return tree_map_only(Tensor, lambda x: x.to(DEVICE), func(*on_host((args, kwargs))[0], **kwargs))
        elif any(x.device.type == "cpu" and x.ndim for x in tensors):
            raise AssertionError(f"{func} would mix tensors of the device with others")
        elif packet is aten._grouped_mm:
            return func(*(x.bfloat16() for x in args[:2]), *args[2:], **kwargs).to(args[0].dtype)
        return func(*args, **kwargs)

    def _places(self, index: Tensor) -> Any:
        if index.dtype != torch.bool:
            return index.to(DEVICE, non_blocking=True)
        return torch.empty(7, dtype=torch.long, device=DEVICE) if index.ndim == 1 else index

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        source = args[1] if func.overloadpacket is aten.copy_ else args[0]
        to = (
            args[0].device
            if func.overloadpacket is aten.copy_
            else torch.device(kwargs.get("device") or source.device)
        )
        if source.is_meta and to != DEVICE:
            self.found["a copy to main memory"] += 1
            return on_host(source).to(kwargs.get("dtype") or source.dtype)
        if not source.is_meta and source.ndim and not (kwargs.get("non_blocking") or args[-1] is True):
            self.found["a copy to the device that is waited for"] += 1
        return func(*args, **kwargs)


def on_host(tree: Any) -> Any:
    """Values for what has none."""
    return tree_map_only(Tensor, lambda x: torch.ones(x.shape, dtype=x.dtype) if x.is_meta else x, tree)
