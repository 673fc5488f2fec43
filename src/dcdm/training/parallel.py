"""Many processes: who they are, how the model is spread over them, how they agree. Only this module knows FSDP.

A step under FSDP, exact for any number of ranks and micro-batches:

    model = shard(build(config, seed=seed, device=world.device), world)   # before the optimizer is made
    tokens = sum_over_ranks(this rank's free tokens of the whole step, world)
    for each micro-batch:
        part = run(model, summed_loss, ...) / tokens                      # this rank's share of the global mean
        part.backward()
    norm = clip_gradients(model, 1.0)

Gradients are *summed* over ranks, not averaged as FSDP does by default: a mean of per-rank means weighs tokens
unequally as soon as ranks hold different numbers of them. So each rank divides by the global count, and the sum of
the shares is the loss of the global batch.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from dcdm.model.transformer import Model

T = TypeVar("T")
P = ParamSpec("P")

TIMEOUT = timedelta(minutes=10)
_RUN, _SHARDING = "_run_with_weights", "_sharding"  # what `shard` adds to a model


class ParallelError(RuntimeError):
    """Processes cannot start or cannot reach each other; the message says what to change."""


@dataclass(frozen=True)
class World:
    """The processes of a run, as seen by one of them. The default is a single process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    control: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    """CPU group of the main thread, for objects, flags and barriers."""
    background: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    """CPU group of the saving thread: two threads on one group would mix up their messages."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0


# --- starting and stopping ---------------------------------------------------------------------------------------


def init_distributed(device: torch.device | str = "auto", *, timeout: timedelta = TIMEOUT) -> World:
    """Join the processes that torchrun announces in the environment; without it, a world of one.

    `device` is `auto`, `cpu`, `cuda` or `mps`. A collective that waits longer than `timeout` raises.
    """
    env = os.environ
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if not ("RANK" in env or "WORLD_SIZE" in env):
        return World(device=choose_device(device))
    if missing := [name for name in needed if name not in env]:
        raise ParallelError(f"{', '.join(missing)} not set, though RANK or WORLD_SIZE is; start with torchrun")
    rank, size, local_rank = (_number(env, name) for name in needed[:3])
    if not 0 <= rank < size:
        raise ParallelError(f"RANK={rank} must lie between 0 and WORLD_SIZE-1={size - 1}; start with torchrun")
    place = choose_device(device, local_rank)
    if size == 1:
        return World(device=place)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    elif place.type != "cpu":
        raise ParallelError(f"several processes run on cpu or cuda, not on {place.type}; set device=cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo", timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    background = dist.new_group(backend="gloo", timeout=6 * timeout)  # disks are slow, and nobody waits for them
    return World(rank, size, local_rank, place, control, background)


def shutdown(world: World) -> None:
    """Leave the process group; harmless in a world of one and when called again."""
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ParallelError(f"{name}={env[name]!r} is not a whole number; start with torchrun") from None


def choose_device(device: torch.device | str = "auto", local_rank: int = 0) -> torch.device:
    """`auto` is a GPU where PyTorch sees one; a device that is not there raises."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ParallelError("device=mps, but PyTorch sees no Apple GPU; set device=cpu")
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ParallelError("device=cuda, but PyTorch sees no GPU; set device=cpu")
    index = local_rank if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ParallelError(
            f"process {local_rank} of this machine has no GPU of its own ({torch.cuda.device_count()} visible); "
            "lower --nproc-per-node"
        )
    return torch.device("cuda", index)


# --- the model ---------------------------------------------------------------------------------------------------


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
) -> Model:
    """Spread the model's parameters over all ranks, one FSDP unit per block and one for the rest; in place.

    Every rank must hold the same full weights. Make the optimizer afterwards: it then holds shards. Weights are
    gathered and used in `compute_dtype`, gradients summed in `reduce_dtype`, both by default in the weights' own
    type. Buffers (the balance bias) stay whole on each rank: whoever changes them must do so equally
    everywhere. In a world of one the model is returned as it is.

    From here on, whatever uses weights and is not `model(...)` itself must go through `run` or `unsharded`.
    """
    if world.size == 1:
        return model
    reduce_dtype = reduce_dtype or next(model.parameters()).dtype
    # Inputs are not cast: the embeddings give blocks the right type already, and casting would copy the Plan, whose
    # mask would then be built anew in every block.
    precision = MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False)
    mesh = init_device_mesh(world.device.type, (world.size,))
    place = functools.partial(_placement, ranks=world.size)
    causal = model.config.kind == "dcdm" and model.config.routing == "causal"
    blocks = range(len(model.layers))
    sharding = _Sharding([reshard_after_forward and not (causal and n == 0) for n in blocks], first_stays=causal)
    for block, free in zip(model.layers, sharding.frees, strict=True):
        fully_shard(block, mesh=mesh, reshard_after_forward=free, mp_policy=precision, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, mp_policy=precision, shard_placement_fn=place)
    for unit in _units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum

    def call(self: Model, function: Callable[[], T]) -> T:
        if sharding.first_stays:
            _as_fsdp(self.layers[0]).unshard()
        return function()

    setattr(model, _SHARDING, sharding)
    setattr(model, _RUN, types.MethodType(call, model))
    register_fsdp_forward_method(model, _RUN)
    with torch.no_grad():  # FSDP takes the first module that runs for its root: let that be the model
        run(model, lambda: None)
    return model


def run(model: Model, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
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


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`; the norm before that."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of a shard, on every rank; a tensor that is no shard as it is. All ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _placement(parameter: nn.Parameter, ranks: int) -> Shard:
    """Rows, unless there are so few (experts, chunks, gates) that ranks would hold very unequal shares."""
    if parameter.shape[0] % ranks == 0 or parameter.shape[0] >= 16 * ranks:
        return Shard(0)
    even = [
        dim for dim, size in enumerate(parameter.shape) if size % ranks == 0
    ]  # all that FSDP allows beyond rows
    return Shard(even[0] if even else 0)


# --- agreement ---------------------------------------------------------------------------------------------------


def sum_over_ranks(tensor: Tensor, world: World) -> Tensor:
    """The sum of every rank's `tensor`, the same on all; no gradient flows through it."""
    total = tensor.detach().clone()
    if world.size > 1:
        dist.all_reduce(total)
    return total


def all_true(flag: bool, world: World) -> bool:
    return _reduce_flag(flag, world, dist.ReduceOp.MIN)


def any_true(flag: bool, world: World) -> bool:
    return _reduce_flag(flag, world, dist.ReduceOp.MAX)


def _reduce_flag(flag: bool, world: World, how: dist.ReduceOp.RedOpType) -> bool:
    if world.size == 1:
        return bool(flag)
    value = torch.tensor([int(flag)])
    dist.all_reduce(value, how, group=world.control)
    return bool(value.item())


def broadcast_object(value: T, world: World, *, background: bool = False) -> T:
    """Rank 0's `value` on every rank."""
    if world.size == 1:
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=0, group=_group(world, background), device=torch.device("cpu"))
    return holder[0]


def gather_objects(value: T, world: World, *, background: bool = False) -> list[T]:
    """Every rank's `value` on every rank, in the order of ranks."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value, group=_group(world, background))
    return values


def barrier(world: World, timeout: timedelta = TIMEOUT) -> None:
    """Wait for all ranks; after `timeout`, rank 0 raises an error that names those that did not come."""
    if world.size == 1:
        return
    try:
        dist.monitored_barrier(group=world.control, timeout=timeout, wait_all_ranks=True)
    except RuntimeError as error:
        raise ParallelError(f"not all {world.size} processes reached the barrier: {error}") from error


def _group(world: World, background: bool) -> dist.ProcessGroup | None:
    return world.background if background else world.control
