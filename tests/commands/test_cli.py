import contextlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import dcdm
import tiny
from dcdm.cli import COMMANDS, main
from dcdm.config import ConfigError
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.progress import ConsoleProgress
from dcdm.viewing.chunks import view, window_of
from dcdm.viewing.tables import Table
from dcdm.viewing.terminal import show

# --- help --------------------------------------------------------------------------------------------------------


def test_help_loads_nothing_heavy():
    code = "import sys; from dcdm.cli import main; main(['--help'])\n"
    code += "assert not {'torch', 'numpy', 'transformers', 'rich', 'yaml'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_help_lists_every_command_and_every_command_of_a_group(capsys):
    main(["--help"])
    shown = capsys.readouterr().out
    assert [line[2:16].rstrip() for line in shown.splitlines() if line[2:3].strip() and line[:2] == "  "] == [
        *COMMANDS
    ]
    main(["eval", "--help"])
    shown = capsys.readouterr().out
    assert "eval tasks" in shown
    assert "train" not in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_examples_whose_flags_exist_and_shows_no_none(command, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    shown = capsys.readouterr().out
    assert "None" not in shown
    assert COMMANDS[command].examples
    for example in COMMANDS[command].examples:
        assert example in shown
        words = shlex.split(example.partition("dcdm ")[2])
        assert words[: len(command.split())] == command.split()
        for flag in (word for word in words if word.startswith("--")):
            assert flag in shown, f"{flag} of: {example}"


# --- wrong use ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "hints"), [
    ("trian --run x", ["did you mean `dcdm train`?"]),
    ("eval pll x", ["did you mean `dcdm eval ppl`?"]),
    ("fly", ["unknown command 'fly'; `dcdm --help` lists them"]),
    ("eval", ["`dcdm eval --help` lists them"]),
    ("train --stpes 3", ["--stpes", "dcdm train --help"]),
    ("train --steps x", ["--steps", "dcdm train --help"]),
    ("adapt base", ["--run", "dcdm adapt --help"]),
    ("eval tasks x --nonsense", ["--nonsense", "dcdm eval tasks --help"]),
    ("sample x --dtype float16", ["--dtype", "dcdm sample --help"]),
])  # fmt: skip
def test_wrong_use_names_the_option_or_the_nearest_command_and_the_help(given, hints, refused):
    said = refused(*given.split())
    assert all(hint in said for hint in hints)


@pytest.mark.parametrize(
    "given",
    [
        ["bench", "step", "--repeats", "0"],
        ["sample", "nowhere", "--prompt", "x"],
        ["report", "nowhere"],
        ["train", "--preset", "mdlm-debug", "--set", "steps"],
        ["train", "--preset", "mdlm-debug", "--set", "train.betas=[1"],
        ["train", "--preset", "mdlm-debug", "--config", "nowhere.yaml"],
        ["data", "prepare", "nowhere.txt", "--out", "prepared"],
        ["verify", "nowhere"],
        ["export", "nowhere", "exported"],
    ],
    ids=" ".join,
)
def test_a_wrong_path_or_setting_is_one_line_and_exit_code_2(given, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    assert len(refused(*given).strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "shown", "code"),
    [
        (OSError(28, "No space left on device"), "dcdm: No space left on device\n", 1),
        (OSError(30, "Read-only file system", "out/x"), "dcdm: out/x: Read-only file system\n", 1),
        (ConfigError("a name \x1b]0;evil\x07 of somebody"), "dcdm: a name ␛]0;evil␇ of somebody\n", 2),
    ],
)
def test_a_full_disk_and_names_that_steer_a_terminal_end_in_one_harmless_line(
    error, shown, code, monkeypatch, capsys
):
    def fails(arguments):
        raise error

    monkeypatch.setattr("dcdm.cli.run", fails)
    with pytest.raises(SystemExit) as stop:
        main(["models"])
    assert (stop.value.code, capsys.readouterr().err) == (code, shown)


def test_names_of_others_reach_a_terminal_without_their_control_characters(monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLORTERM", "truecolor")  # rich remembers how it wrote a style
    evil = "a\x1b]0;evil\x07\x9b31m\udcff"
    Table(["name"], [[evil]]).print()
    shown = view(tiny.model("bdlm", 257), window_of("ab", byte_tokenizer(), 8)[0], name=evil, note=evil)
    show(shown, Console())
    with ConsoleProgress() as progress:
        progress.say(evil)
        progress.progress(evil, 1, 1, "windows")
    out, err = capfd.readouterr()
    assert (out + err).count("a␛]0;evil␇�31m�") >= 5
    assert not re.search(r"\x1b\]|[\x07\x9b]", out + err)


def test_debug_shows_where_an_error_arose(refused):
    command = ["sample", "nowhere", "--prompt", "x"]
    assert "nowhere is not a folder" in refused(*command)
    with pytest.raises(ConfigError, match="nowhere is not a folder"):  # not caught: Python shows where
        main([*command, "--debug"])


# --- values and tables -------------------------------------------------------------------------------------------


def test_presets_lists_every_preset_as_a_table_and_as_json(capsys):
    main(["presets", "--json"])
    assert list(json.loads(capsys.readouterr().out)) == dcdm.presets()
    main(["presets"])
    assert "dcdm-moe-2.8b" in capsys.readouterr().out


def test_a_table_shows_names_as_they_are_and_is_not_cut_when_it_is_piped(capsys):
    names = ["runs/a[old]c", "runs/a[/b]c", "runs/:dog:", "a|b" + "x" * 300]
    table = Table(["[bold]name"], [[name] for name in names], ("[bold]name",))
    table.print(caption="of [x]")
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == ["[bold]name", *names, "of [x]"]


@pytest.fixture
def terminal(monkeypatch, capsys):
    """Runs a command as in a terminal of 80 columns, and without one; the lines and the words of both."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")  # without colours

    def printed(*words):
        shown = []
        for there in (True, False):
            monkeypatch.setattr("sys.stdout.isatty", lambda there=there: there)
            with contextlib.suppress(SystemExit):
                main([*words])
            shown.append(capsys.readouterr().out)
        return shown

    return printed


ROOT = Path(__file__).parents[2]
SURROGATE = str(ROOT / "studies/surrogate.yaml")


@pytest.mark.parametrize(
    "given",
    [
        ["presets"],
        ["models"],
        ["train", "--preset", "dcdm-debug", "--show-settings"],
        ["reproduce", "--list", "--quick", "--study", str(ROOT / "studies/quick.yaml")],
        ["study", SURROGATE, "--work", "none", "--out", str(ROOT / "results/surrogate.json"), "--report"],
    ],
    ids=lambda given: given[0],
)
def test_a_table_fits_a_terminal_of_80_columns_with_all_of_its_words(given, terminal):
    narrow, wide = terminal(*given)
    assert max(len(line) for line in narrow.splitlines() if "   " in line.strip()) <= 80
    assert {*wide.split()} <= {*narrow.split()}


def test_bf16_that_is_slower_than_fp32_is_refused_where_texts_are_written(monkeypatch, refused):
    monkeypatch.setattr("dcdm.model.products.bf16_slowdown", lambda: 2.0)
    assert "2.0 times as long as in fp32; choose int8" in refused(
        "sample", "english-dcdm", "--prompt", "a", "--weights", "bf16"
    )
