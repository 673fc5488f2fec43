"""Processes for tests: ranks that talk over loopback, started from a server that has imported torch already; and
deaths of a process at a chosen call of a function.

Everything here is bounded in time and ends only processes that it started itself.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pkgutil
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# torch._dynamo: PyTorch imports it at the first step otherwise, in every process anew
_CONTEXT.set_forkserver_preload(["pytest", "torch._dynamo", "dcdm.training.checkpoint", "dcdm.training.trainer"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Child:
    """One process that runs `function(*args)`; its result or its traceback comes back through a pipe."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_report, args=(theirs, function, args), daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def join(self, timeout: float) -> Any:
        """The result; None if the process died without one. Raises what the process raised."""
        if not wait([self.pipe, self.process.sentinel], timeout):
            self.kill()
            raise TimeoutError(f"a test process did not end within {timeout} s")
        try:
            kind, value = self.pipe.recv() if self.pipe.poll() else (None, None)
        except EOFError:
            kind, value = None, None
        self.process.join(timeout)
        if kind == "error":
            raise AssertionError(f"in a test process:\n{value}")
        return value

    @property
    def exit_code(self) -> int | None:
        return self.process.exitcode


def _report(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send(("value", function(*args)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise SystemExit(1) from None


def on_ranks(count: int, function: Callable[..., Any], *args: Any, timeout: float = 90) -> list[Any]:
    """`function(world, *args)` on `count` ranks: every rank's result, None for one that died without it."""
    port = free_port()
    return _joined([Child(_rank, rank, count, port, function, args) for rank in range(count)], timeout)


def _joined(children: list[Child], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    try:
        return [child.join(max(0.1, deadline - time.monotonic())) for child in children]
    finally:
        for child in children:
            child.kill()


def announce(rank: int, count: int, port: int) -> None:
    """Set the environment of a process as torchrun does."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip


def command_on_ranks(count: int, words: list[str], timeout: float = 90) -> list[str]:
    """What a command prints on each of `count` processes that torchrun might have started."""
    port = free_port()
    return _joined([Child(_command, rank, count, port, words) for rank in range(count)], timeout)


def _command(rank: int, count: int, port: int, words: list[str]) -> str:
    announce(rank, count, port)
    from dcdm.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            main(words)
        except SystemExit as left:
            if left.code:
                raise
    return printed.getvalue()


def _rank(rank: int, count: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    announce(rank, count, port)
    from dcdm.distributed import init_distributed, shutdown

    world = init_distributed("cpu", timeout=timedelta(seconds=60))
    try:
        return function(world, *args)
    finally:
        shutdown(world)


# --- deaths -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Die by SIGKILL at the `call`-th call of the function at `place` (module:name), before or after its work."""

    phase: str
    place: str
    call: int = 1
    after: bool = False
    only: str = ""
    """Count only calls with an argument that ends so."""
    instead: Callable[..., None] | None = None
    """What is done in place of the call before dying."""

    def arm(self, last_words: Callable[[], None] = lambda: None) -> None:
        """Let this process die so."""
        owner, name, original = found(self.place)
        calls = 0

        def die() -> None:
            last_words()
            os.kill(os.getpid(), signal.SIGKILL)

        def watched(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            counts = not self.only or any(str(argument).endswith(self.only) for argument in arguments)
            calls += counts
            mine = counts and calls == self.call
            if mine and not self.after:
                if self.instead is not None:
                    self.instead(*arguments, **named)
                die()
            result = original(*arguments, **named)
            if mine:
                die()
            return result

        setattr(owner, name, watched)


def found(place: str) -> tuple[Any, str, Callable[..., Any]]:
    """The module or class that a function belongs to, its name in there, and the function."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = pkgutil.resolve_name(f"{module}:{'.'.join(owners)}" if owners else module)
    return owner, name, getattr(owner, name)


def half_a_file(path: Any, *tensors: Any) -> None:
    path.write_bytes(b"\0" * 999)
