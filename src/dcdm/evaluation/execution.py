"""Runs generated programs, each in a process of its own, with limits.

The process gets a fresh folder, an empty environment, and limits on processor time, wall time, memory and file
size. It is no sandbox: the program runs as the same user, and can reach what that user can reach.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile

from dcdm.config import ConfigError

PASSED = 97
"""Exit code of a program that ran to its end; what exits by itself gives another."""
CHILD = """
import os, resource, sys

for limit, value in (
    (resource.RLIMIT_CPU, int(sys.argv[1])), (resource.RLIMIT_AS, int(sys.argv[2])),
    (resource.RLIMIT_FSIZE, 1 << 24), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64),
):
    resource.setrlimit(limit, (value, value))
exec(compile(sys.stdin.read(), "<program>", "exec"), {"__name__": "__main__"})
os._exit(int(sys.argv[3]))
"""


def passes(program: str, *, seconds: int = 5, memory: int = 1 << 30) -> bool:
    """Whether a program runs to its end: it raises nothing, and neither exits nor is stopped on the way.

    `seconds` limits processor time; three times as long may pass on the clock. `memory` is in bytes.
    """
    if os.name != "posix":
        raise ConfigError("generated code runs on Linux and macOS only: the limits need them")
    with tempfile.TemporaryDirectory(prefix="dcdm-run-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", CHILD, str(seconds), str(memory), str(PASSED)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True, text=True,
        )  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(program, timeout=3 * seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and whatever it has started
        return process.wait() == PASSED
