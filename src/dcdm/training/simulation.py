"""One rank of many, without the others and without weights: the real model, loss and optimizer on fake tensors.

A fake process group stands for the other ranks; it answers at once and sends nothing. Whatever is computed from
weights is fake: it has a shape and a type and no values, so a model of any size fits anywhere. Tokens, noise and
chunk ids are real, since the sizes of a pass follow from them. Where chunks or experts are chosen by values that do
not exist, each gets an equal share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcdm.distributed import World
from dcdm.model import blocks
from dcdm.model.transformer import Model

aten = torch.ops.aten
_EMPTY = {aten.empty, aten.zeros, aten.ones, aten.empty_strided}
_MADE = {*_EMPTY, aten.full, aten.arange, aten.empty_like, aten.zeros_like}


@contextmanager
def simulated_rank(size: int) -> Iterator[World]:
    """Rank 0 of `size`, alone: inside, floating-point tensors that are made anew have no values."""
    if size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    cut, _fsdp_param._chunk_with_empty = _fsdp_param._chunk_with_empty, _only_the_first
    try:
        with as_on_a_gpu(), _WithoutValues():
            yield World(0, size)
    finally:
        _fsdp_param._chunk_with_empty = cut
        if size > 1:
            dist.destroy_process_group()


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, models on a CPU run grouped products and static shapes, as they do on a GPU."""
    before = blocks.grouped_helps, Model._compact
    blocks.grouped_helps, Model._compact = lambda x_td: True, False  # type: ignore[assignment]
    try:
        yield
    finally:
        blocks.grouped_helps, Model._compact = before  # type: ignore[method-assign]


def _only_the_first(tensor: Tensor, num_chunks: int, dim: int) -> list[Tensor]:
    """How FSDP cuts a parameter: into a thousand shards, to keep that of its own rank, which is here the first."""
    return [tensor.narrow(dim, 0, -(-tensor.shape[dim] // num_chunks))] * num_chunks


class _WithoutValues(TorchDispatchMode):
    """Runs operations on fake tensors as fake, all others as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(isinstance(x, FakeTensor) for x in tensors):
            if not _makes_weights(func.overloadpacket, tensors, kwargs):
                return func(*args, **kwargs)
        elif func is aten._local_scalar_dense.default:
            return 1.0 if tensors[0].is_floating_point() else 1
        elif func is aten.argmax.default:
            return equal_shares(args[0].movedim(args[1], -1))[..., 0]
        elif func in (aten.topk.default, aten.sort.stable):
            with self.fakes:
                values = func(*args, **kwargs)[0]
            return values, equal_shares(args[0])[..., : values.shape[-1]]
        elif func is aten._grouped_mm.default:
            with self.fakes:  # which knows bf16 only
                return func(*(x.bfloat16() for x in args[:2]), *args[2:], **kwargs).to(args[0].dtype)
        elif func.overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            args = (args[0], _as_numbers(args[1]), *args[2:])
        with self.fakes:
            return func(*args, **kwargs)


def _makes_weights(operation: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether an operation on real tensors makes a tensor of floating-point numbers on the device."""
    device = torch.device(kwargs.get("device") or "cpu")
    if operation not in _MADE or device.type != "cpu":
        return False
    if tensors:
        return tensors[0].device.type == "meta"
    dtype = kwargs.get("dtype")
    return operation in _EMPTY if dtype is None else dtype.is_floating_point


def equal_shares(values: Tensor) -> Tensor:
    """Places in the last dimension in an order that differs from row to row, so that each comes first as often."""
    size = values.shape[-1]
    rows = torch.arange(math.prod(values.shape[:-1]))[:, None]
    return ((rows + torch.arange(size)) % size).view(values.shape)


def _as_numbers(index: list[Tensor | None]) -> list[Tensor | None]:
    """Masks as the numbers of the places where they are set: a fake tensor cannot be asked how many these are."""
    numbers: list[Tensor | None] = []
    for part in index:
        masks = part is not None and part.dtype == torch.bool
        numbers += part.nonzero().unbind(1) if masks and part is not None else [part]
    return numbers
