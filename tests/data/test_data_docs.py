import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_every_command_and_the_python_of_the_data_page_run_in_order(tmp_path):
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "dcdm"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dcdm "$@"\n')
    command.chmod(0o755)
    env = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert {kind for kind, _ in blocks} == {"sh", "python"}
    for kind, block in blocks:
        start = ["bash", "-ec"] if kind == "sh" else [sys.executable, "-c"]
        done = subprocess.run([*start, block], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{block}\n{done.stderr}"
