"""Generated programs run within limits."""

from __future__ import annotations

import socket

import pytest

from dcdm.evaluation import execution


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "killed"),
        ("print('passed')\nassert sorted([2, 1]) == [1, 2]", "passed"),
        ("block = bytearray(3 << 30)", "MemoryError"),
        ("open('large', 'wb').write(bytes(1 << 26))", "OSError"),
    ],
)
def test_a_program_passes_if_it_runs_to_its_end_and_what_ends_it_early_is_named(program, reason):
    outcome = execution.run_program(program)
    assert outcome.reason == reason
    assert outcome.passed == (reason == "passed")


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_a_program_that_does_not_end_is_stopped(program):
    outcome = execution.run_program(program, seconds=1)
    assert outcome.reason in ("timeout", "killed")


def test_the_network_is_cut():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = execution.run_program(
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)"
        )
    assert outcome.reason == "PermissionError", "also where the kernel grants no namespace"


def test_a_program_sees_a_fresh_folder_and_none_of_our_environment(monkeypatch):
    monkeypatch.setenv("SOME_SECRET", "1")
    assert execution.run_program(
        "import os\nassert os.listdir('.') == []\nassert 'SOME_SECRET' not in os.environ"
    ).passed
