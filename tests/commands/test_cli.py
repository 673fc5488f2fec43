import json
import shlex
import subprocess
import sys

import pytest

import dcdm
from dcdm.cli import EXAMPLES, main


def test_presets_lists_every_preset_as_a_table_and_as_json(capsys):
    main(["presets", "--json"])
    assert list(json.loads(capsys.readouterr().out)) == dcdm.presets()
    main(["presets"])
    assert "dcdm-moe-2.8b" in capsys.readouterr().out


def test_help_does_not_load_torch_and_wrong_use_exits_with_2():
    code = "import sys; sys.argv = ['dcdm', '--help']\nfrom dcdm.cli import main\ntry: main()\n"
    code += "except SystemExit as e: assert e.code == 0 and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    wrong = subprocess.run([sys.executable, "-m", "dcdm", "fly"], capture_output=True)
    assert wrong.returncode == 2


def help_of(*command):
    out = subprocess.run(
        [sys.executable, "-m", "dcdm", *command, "--help"], capture_output=True, text=True, check=True
    )
    return out.stdout


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_has_examples_whose_flags_exist(command):
    shown = help_of(*command.split())
    for example in EXAMPLES[command]:
        assert example in shown
        words = shlex.split(example.partition("dcdm ")[2])
        assert words[: len(command.split())] == command.split()
        for flag in (word for word in words if word.startswith("--")):
            assert flag in shown, f"{flag} of: {example}"


def test_the_list_of_commands_is_short_and_complete():
    shown = help_of()
    names = {command.split()[0] for command in EXAMPLES}
    assert all(f"• {name}" in shown for name in names)
    assert shown.count("•") == len(names)
    assert len(shown.splitlines()) < 40


def test_debug_shows_where_an_error_arose():
    command = [sys.executable, "-m", "dcdm", "sample", "nowhere", "--prompt", "x"]
    plain, debug = (subprocess.run([*command, *more], capture_output=True, text=True) for more in ([], ["--debug"]))
    assert plain.returncode == 2
    assert "Traceback" not in plain.stderr
    assert "nowhere is no folder" in plain.stderr
    assert "Traceback" in debug.stderr
