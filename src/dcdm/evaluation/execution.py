"""Runs generated programs, each in a process of its own, with limits.

The process gets a fresh folder, an empty environment, limits on processor time, wall time, memory and file size,
and no network: a network namespace of its own where the kernel grants one, and an audit hook that refuses every
socket call. It is not a full sandbox: the program runs as the same user and can read what that user can read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from dcdm.config import ConfigError

CHILD = r"""
import ctypes, os, resource, sys

token, seconds, memory = sys.stdin.readline().strip(), int(sys.argv[1]), int(sys.argv[2])
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
try:
    ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)
except (OSError, AttributeError):
    pass
for limit, value in (
    (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 1 << 24),
    (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64),
):
    try:
        resource.setrlimit(limit, (value, value))
    except (OSError, ValueError):
        sys.exit("cannot set limits")

def refuse(event, arguments):
    if event.startswith("socket."):
        raise PermissionError("the network is cut")

sys.addaudithook(refuse)
answer = os.fdopen(os.dup(1), "w")
program = sys.stdin.read()
sys.stdin = open(os.devnull)
null = os.open(os.devnull, os.O_WRONLY)
os.dup2(null, 1), os.dup2(null, 2)
try:
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
except BaseException as error:
    print("raised", type(error).__name__, file=answer, flush=True)
else:
    print("passed", token, file=answer, flush=True)
os._exit(0)
"""


@dataclass(frozen=True)
class Outcome:
    passed: bool
    reason: str
    """passed, the name of what the program raised, timeout, or killed (by a limit)."""


def run_program(program: str, *, seconds: int = 5, memory: int = 1 << 30) -> Outcome:
    """Run a program to its end: it passes if it raises nothing, and neither exits nor is stopped on the way.

    `seconds` limits processor time; three times as long may pass on the clock. `memory` is in bytes.
    """
    if os.name != "posix":
        raise ConfigError("generated code runs on Linux and macOS only: the limits need them")
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="dcdm-run-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", CHILD, str(seconds), str(memory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True, text=True, errors="replace",
        )  # fmt: skip
        try:
            answer, _ = process.communicate(f"{token}\n{program}", timeout=3 * seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, "timeout")
        finally:
            _end(process)
    words = answer.split()
    if words == ["passed", token]:
        return Outcome(True, "passed")
    return Outcome(False, words[1] if words[:1] == ["raised"] and len(words) > 1 else "killed")


def _end(process: subprocess.Popen[str]) -> None:
    """Kill whatever of the process's own session is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
