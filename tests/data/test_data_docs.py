import re
import shlex
import subprocess
from pathlib import Path

from dcdm.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_every_command_and_the_python_of_the_data_page_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert {kind for kind, _ in blocks} == {"sh", "python"}
    for kind, block in blocks:
        if kind == "python":
            exec(block, {})
            continue
        for line in block.splitlines():
            if line.startswith("dcdm "):
                main(shlex.split(line)[1:])
            else:
                subprocess.run(["bash", "-ec", line], check=True)
