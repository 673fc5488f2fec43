"""How a model is spread over processes. Only this module knows FSDP.

A step under FSDP, exact for any number of ranks and micro-batches:

    model = shard(build(config, seed=seed, device=world.device), world)   # before the optimizer is made
    tokens = sum_over_ranks(this rank's free tokens of the whole step, world)
    for each micro-batch:
        part = run_gathered(model, summed_loss, ...) / tokens             # this rank's share of the global mean
        part.backward()
    norm = clip_gradients(model, 1.0)

Gradients are *summed* over ranks, not averaged as FSDP does by default: a mean of per-rank means weighs tokens
unequally as soon as ranks hold different numbers of them. So each rank divides by the global count, and the sum of
the shares is the loss of the global batch.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode

from dcdm.distributed import World
from dcdm.model.transformer import Model

T = TypeVar("T")
P = ParamSpec("P")

_RUN, _SHARDING = "_run_with_weights", "_sharding"  # what `shard` adds to a model


@dataclass
class _Sharding:
    """What `shard` has decided for a model; kept on it."""

    frees: list[bool]
    """Which blocks give their gathered weights back after forward."""
    first_stays: bool
    """Causal routing runs block 0, or parts of it, once per round before the pass itself: it is gathered before."""
    whole: bool = False
    """Inside `unsharded`."""


def shard(
    model: Model,
    world: World,
    *,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    replicate: int = 1,
    seed: int | None = None,
) -> Model:
    """Spread the model's parameters over all ranks, one FSDP unit per block and one for the rest; in place.

    Every rank must hold the same full weights, or all of them a model on the meta device: that one is cut first and
    allocated then, and each rank fills its shards with the values that `seed` gives to one process, so that nobody
    ever holds the whole. With `replicate` groups each group of ranks, one after the other, shards a whole model of
    its own. Make the optimizer afterwards: it then holds shards. Weights are gathered and used in `compute_dtype`,
    gradients summed in `reduce_dtype`, both by default in the weights' own type. Buffers (the balance bias) stay
    whole on each rank: whoever changes them must do so equally everywhere. A model that is sharded already, and any
    in a world of one, is returned as it is.

    From here on, whatever uses weights and is not `model(...)` itself goes through `run_gathered` or `unsharded`.
    """
    if world.size == 1 or isinstance(model, FSDPModule):
        return model
    reduce_dtype = reduce_dtype or next(model.parameters()).dtype
    # Inputs are not cast: the embeddings give blocks the right type already, and casting would copy the Plan, whose
    # mask would then be built anew in every block.
    precision = MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False)
    group = world.size // replicate
    shape, names = ((group,), ("shard",)) if replicate == 1 else ((replicate, group), ("replicate", "shard"))
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    place = functools.partial(_placement, ranks=group)
    causal = model.config.kind == "dcdm" and model.config.routing == "causal"
    blocks = range(len(model.layers))
    sharding = _Sharding([reshard_after_forward and not (causal and n == 0) for n in blocks], first_stays=causal)
    for block, free in zip(model.layers, sharding.frees, strict=True):
        fully_shard(block, mesh=mesh, reshard_after_forward=free, mp_policy=precision, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, mp_policy=precision, shard_placement_fn=place)
    for unit in _units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum

    if model.embed_tokens.weight.is_meta:
        model.to_empty(device=world.device)
        with FromWhole():
            model.init_weights(None if seed is None else torch.Generator(world.device).manual_seed(seed))

    def call(self: Model, function: Callable[[], T]) -> T:
        if sharding.first_stays:
            _as_fsdp(self.layers[0]).unshard()
        return function()

    setattr(model, _SHARDING, sharding)
    setattr(model, _RUN, types.MethodType(call, model))
    register_fsdp_forward_method(model, _RUN)
    with torch.no_grad():  # FSDP takes the first module that runs for its root: let that be the model
        run_gathered(model, lambda: None)
    return model


def run_gathered(model: Model, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args, **kwargs)` with the weights outside the blocks gathered, as in the model's own forward.

    For losses and all else that calls `encode`, `token_logits` and the like. Weights are gathered once for the
    whole call, so the number of slices in which a rank computes its logits does not matter to the others; only the
    number of passes through the blocks must be the same on all ranks. What backward starts from must be part of
    the result (dataclasses, tuples, lists and dicts are searched): its hook gathers the weights again.
    """
    if not isinstance(model, FSDPModule):
        return function(*args, **kwargs)
    result = getattr(model, _RUN)(functools.partial(function, *args, **kwargs))
    if not torch.is_grad_enabled() and not getattr(model, _SHARDING).whole:  # else backward gives weights back
        model.reshard()
        _as_fsdp(model.layers[0]).reshard()
    return result


@contextmanager
def unsharded(model: Model) -> Iterator[None]:
    """All weights whole on every rank: inside, ranks may call the model as often as each likes. For evaluation.

    Needs the memory of the full weights in the type of computation; gradients are not meant to be taken inside.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    sharding: _Sharding = getattr(model, _SHARDING)
    sharding.whole = True
    try:
        for block in model.layers:
            _as_fsdp(block).set_reshard_after_forward(False, recurse=False)
        for unit in _units(model):
            unit.unshard()
        yield
    finally:
        sharding.whole = False
        for unit in _units(model):
            unit.reshard()
        for block, free in zip(model.layers, sharding.frees, strict=True):
            _as_fsdp(block).set_reshard_after_forward(free, recurse=False)


def sync_gradients(model: Model, enabled: bool) -> None:
    """Whether the next backward passes sum gradients over ranks.

    Switching it off for all but the last micro-batch saves communication and costs the memory of full gradients.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)


class FromWhole(TorchDispatchMode):
    """Inside, a shard that is filled with random numbers or from a whole tensor gets its part of the whole."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, target = kwargs or {}, args[0] if args else None
        if isinstance(target, DTensor) and func is torch.ops.aten.normal_.default:
            mine = own(target)
            mine.copy_(mine.new_empty(target.shape).normal_(*args[1:], **kwargs)[own_part(target)])
        elif isinstance(target, DTensor) and func is torch.ops.aten.copy_.default and type(args[1]) is not DTensor:
            own(target).copy_(args[1][own_part(target)])
        else:
            return func(*args, **kwargs)
        return target


def own_part(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Which part of the whole this rank holds of a tensor that may be sharded."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))


def own(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _placement(parameter: nn.Parameter, ranks: int) -> Shard:
    """Rows, unless there are so few (experts, chunks, gates) that ranks would hold very unequal shares."""
    if parameter.shape[0] % ranks == 0 or parameter.shape[0] >= 16 * ranks:
        return Shard(0)
    even = [dim for dim, size in enumerate(parameter.shape) if size % ranks == 0]  # all that FSDP allows else
    return Shard(even[0] if even else 0)
