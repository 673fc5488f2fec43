"""The processes of a run: who they are, which device each has and computes in which types, how they agree.

Without torchrun a run is a world of one process, and every function here is then free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dcdm.config import ConfigError, Dtype

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)


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
    """CPU group for objects and flags."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def init_distributed(device: torch.device | str = "auto", *, timeout: timedelta = TIMEOUT) -> World:
    """Join the processes that torchrun announces in the environment; without it, a world of one.

    `device` is `auto`, `cpu` or `cuda`. A collective that waits longer than `timeout` raises.
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
    own_device = choose_device(device, local_rank)
    if size == 1:
        return World(device=own_device)
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    elif own_device.type != "cpu":
        raise ParallelError(f"several processes run on cpu or cuda, not on {own_device.type}; set device=cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if own_device.type == "cuda" else "gloo", timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    return World(rank, size, local_rank, own_device, control)


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
    if device.type == "mps":
        raise ParallelError(
            "device=mps: Apple GPUs have no 64-bit numbers, in which noise is weighed and tokens are drawn; "
            "set device=cpu"
        )
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


def sum_over_ranks(tensor: Tensor, world: World) -> Tensor:
    """The sum of every rank's `tensor`, the same on all; no gradient flows through it."""
    total = tensor.detach().clone()
    if world.size > 1:
        dist.all_reduce(total)
    return total


def any_true(flag: bool, world: World) -> bool:
    """Whether any rank's `flag` is set."""
    if world.size == 1:
        return bool(flag)
    value = torch.tensor([int(flag)])
    dist.all_reduce(value, dist.ReduceOp.MAX, group=world.control)
    return bool(value.item())


def from_main(action: Callable[[], T], world: World) -> T:
    """The result of rank 0's `action` on every rank; if it fails, all raise its error."""
    result: T | None = None
    failure: Exception | None = None
    if world.is_main:
        try:
            result = action()
        except Exception as error:  # told to the other ranks, which wait for it
            failure = error
    if world.size > 1:
        holder = [(result, failure)]
        dist.broadcast_object_list(holder, src=0, group=world.control, device=torch.device("cpu"))
        result, told = holder[0]
        failure = failure or told
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def gather_objects(value: T, world: World) -> list[T]:
    """Every rank's `value` on every rank, in the order of ranks."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value, group=world.control)
    return values


@contextmanager
def missing_ranks_named(world: World, patience: timedelta = timedelta(seconds=30)) -> Iterator[None]:
    """If a message in here is waited for in vain, the error says which ranks are not there any more."""
    try:
        yield
    except RuntimeError as error:
        if world.size == 1 or not re.search("timed? ?out|connection (closed|reset)", str(error), re.IGNORECASE):
            raise
        try:
            dist.monitored_barrier(world.control, patience, wait_all_ranks=True)
        except RuntimeError as found:  # rank 0 hears from all others
            raise ParallelError(f"a rank died or hangs: {found}; the same command resumes the run") from error
        raise


# --- the types that a device computes in --------------------------------------------------------------------------


@dataclass(frozen=True)
class Precision:
    weights: torch.dtype
    """Of weights, gradients and moments."""
    compute: torch.dtype | None = None
    """Of matrix products, where it is another one."""

    @property
    def name(self) -> str:
        """As `precision` takes it."""
        return {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}[self.compute or self.weights]

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """For passes through weights that are whole; shards bring their own types."""
        return nullcontext() if self.compute is None else torch.autocast(device.type, self.compute)


def precision(dtype: Dtype, device: torch.device) -> Precision:
    """`auto` is bf16 on CUDA and fp32 elsewhere; raises ConfigError for what the device cannot do."""
    if dtype == "auto":
        dtype = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if dtype == "fp64":
        return Precision(torch.float64)
    if dtype == "fp32":
        return Precision(torch.float32)
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError("dtype=bf16: this GPU does not compute in bf16; set dtype=fp32")
    return Precision(torch.float32, torch.bfloat16)
