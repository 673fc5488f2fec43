"""Generated programs run within limits."""

from __future__ import annotations

import pytest

from dcdm.evaluation.execution import passes


@pytest.mark.parametrize(
    "program",
    [
        "assert 1 == 2", "def f(:", "import sys; sys.exit(0)", "import os; os._exit(0)", "bytearray(3 << 30)",
        "open('large', 'wb').write(bytes(1 << 26))", "while True: pass", "import time; time.sleep(60)",
    ],
)  # fmt: skip
def test_a_program_that_fails_exits_or_does_not_end_within_its_limits_does_not_pass(program):
    assert not passes(program, seconds=1)


def test_a_program_runs_to_its_end_in_a_fresh_folder_without_our_environment(monkeypatch):
    monkeypatch.setenv("SOME_SECRET", "1")
    assert passes("import os\nprint('x' * 9)\nassert os.listdir('.') == []\nassert 'SOME_SECRET' not in os.environ")
