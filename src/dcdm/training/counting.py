"""What a training step needs, counted while it runs: memory by part, operations, bytes read, written and sent.

`Counter` sees every operation that PyTorch runs, on real tensors as on those of `simulation.py`. Each allocation
and release becomes an event; what an allocation was for is decided afterwards, when it is known what became of it.
"""

from __future__ import annotations

import weakref
from collections import Counter as Tally
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dcdm.training.fsdp import own

Part = Literal["weights", "gathered weights", "gradients", "optimizer", "activations", "temporary"]
PARTS = get_args(Part)


@dataclass(frozen=True)
class Message:
    """What one kind of collective operation sends in a group of ranks."""

    kind: str
    ranks: tuple[int, ...]


@dataclass
class Totals:
    """What the operations of a span of time add up to."""

    operations: float = 0.0
    """Of matrix products, two to a multiply-add."""
    traffic: float = 0.0
    """Bytes read and written by all other operations, one by one, nothing fused."""
    sent: Tally[Message] = field(default_factory=Tally)
    """Bytes that a rank sends."""

    def plus(self, more: Totals, times: int) -> Totals:
        sent = Tally({message: size + times * more.sent[message] for message, size in self.sent.items()})
        return Totals(self.operations + times * more.operations, self.traffic + times * more.traffic, sent)


class Counter(TorchDispatchMode):
    """Counts while it is entered. What is there before is told by `hold`."""

    def __init__(self) -> None:
        super().__init__()
        self.totals, self.first_pass = Totals(), Totals()
        """`first_pass` is the first micro-batch, forward and backward; nothing where there is one alone."""
        self._events: list[tuple[int, int]] = []
        self._sizes: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # of a storage that lives, by its id
        self._part: dict[int, Part] = {}
        self._known = 0
        self._backward, self._turns = False, 0

    def hold(self, part: Part, tensors: Iterable[Tensor]) -> None:
        """Say what these tensors are for."""
        for tensor in tensors:
            self._part[self._number(own(tensor))] = part

    @property
    def held(self) -> int:
        """Bytes that are allocated now."""
        return sum(self._sizes.values())

    def peak(self) -> dict[Part, int]:
        """Bytes by part at the moment when their sum was largest."""
        total = largest = at = 0
        for number, (_, change) in enumerate(self._events):
            total += change
            if total > largest:
                largest, at = total, number + 1
        parts: dict[Part, int] = dict.fromkeys(PARTS, 0)
        for storage, change in self._events[:at]:
            parts[self._part.get(storage, "temporary")] += change
        return parts

    def __enter__(self) -> Counter:
        self._resize = torch.UntypedStorage.resize_
        counter = self

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            counter._resize(storage, size)
            counter._resized(storage, size)

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on shards come here by themselves
        backward = torch._C._current_graph_task_id() != -1
        if backward != self._backward:
            self._turn(backward)
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.device.type != "meta"]
        for tensor in made:
            self._number(tensor)
        if func.namespace == "c10d":
            self._send(func, args)
        elif (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.totals.operations += formula(*args, **kwargs, out_val=out)
        elif not func.is_view:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.totals.traffic += sum(x.numel() * x.element_size() for x in given + made)
        return out

    # --- memory ---------------------------------------------------------------------------------------------------

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor's storage, which is new if it has not been seen."""
        storage = tensor.untyped_storage()
        if (number := self._numbers.get(id(storage))) is not None:
            return number
        number = self._numbers[id(storage)] = self._known
        self._known += 1
        weakref.finalize(storage, self._forget, id(storage), number).atexit = False
        self._change(number, storage.nbytes())
        return number

    def _change(self, number: int, size: int) -> None:
        self._events.append((number, size - self._sizes.get(number, 0)))
        self._sizes[number] = size

    def _forget(self, identity: int, number: int) -> None:
        del self._numbers[identity]
        self._change(number, 0)
        del self._sizes[number]

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """FSDP keeps the tensors of gathered weights and gives back their storage."""
        if (number := self._numbers.get(id(storage))) is not None:
            self._part[number] = "gathered weights"
            self._change(number, size)

    def _turn(self, backward: bool) -> None:
        """What is left where a backward pass begins was kept for it; what it leaves behind are gradients."""
        self._backward = backward
        self._turns += 1
        if self._turns == 2:
            self.first_pass = replace(self.totals, sent=self.totals.sent.copy())
        for number in self._sizes:
            self._part.setdefault(number, "activations" if backward else "gradients")

    # --- messages -------------------------------------------------------------------------------------------------

    def _send(self, func: Any, args: Any) -> None:
        kind = func.overloadpacket.__name__.strip("_").removesuffix("_base")
        boxed = next(x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()))
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed)))
        first = [x for x in tree_leaves(args[0]) if isinstance(x, Tensor)]
        if kind == "allgather":
            self.hold("gathered weights", first)
        if kind == "reduce_scatter":
            self.hold("gradients", first)
            first = [x for x in tree_leaves(args[1]) if isinstance(x, Tensor)]
        size = sum(x.numel() * x.element_size() for x in first)
        share = (len(ranks) - 1) / len(ranks)
        self.totals.sent[Message(kind, ranks)] += int(size * share * (2 if kind == "allreduce" else 1))
