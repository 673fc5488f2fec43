import json
import shlex
import subprocess
import sys

import pytest

import dcdm
from dcdm.cli import COMMANDS, all_commands, main
from dcdm.commands.options import OTHER_SPELLINGS, compute_on
from dcdm.config import ConfigError


def test_presets_lists_every_preset_as_a_table_and_as_json(capsys):
    main(["presets", "--json"])
    assert list(json.loads(capsys.readouterr().out)) == dcdm.presets()
    main(["presets"])
    assert "dcdm-moe-2.8b" in capsys.readouterr().out


def test_help_loads_nothing_heavy_and_wrong_use_exits_with_2():
    code = "import sys; sys.argv = ['dcdm', '--help']\nfrom dcdm.cli import main\ntry: main()\n"
    code += "except SystemExit as e: assert e.code == 0\n"
    code += "assert not {'torch', 'numpy', 'transformers', 'rich', 'yaml'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    wrong = subprocess.run([sys.executable, "-m", "dcdm", "fly"], capture_output=True)
    assert wrong.returncode == 2


def help_of(*command):
    out = subprocess.run(
        [sys.executable, "-m", "dcdm", *command, "--help"], capture_output=True, text=True, check=True
    )
    return out.stdout


@pytest.mark.parametrize("command", [name for name, _ in all_commands()])
def test_help_has_examples_whose_flags_exist_and_every_dtype_the_same_names(command):
    shown = help_of(*command.split())
    examples = dict(all_commands())[command].examples
    assert examples
    for example in examples:
        assert example in shown
        words = shlex.split(example.partition("dcdm ")[2])
        assert words[: len(command.split())] == command.split()
        for flag in (word for word in words if word.startswith("--")):
            assert flag in shown, f"{flag} of: {example}"
    types = [line for line in shown.splitlines() if "--dtype" in line]
    assert all("--dtype {auto,fp32,bf16,fp64}" in line for line in types)
    assert types or command != "sample"


def test_the_list_of_commands_is_short_and_complete():
    shown = help_of()
    assert all(f"• {name}" in shown for name in COMMANDS)
    assert shown.count("•") == len(COMMANDS)
    assert len(shown.splitlines()) < 40


def test_the_version_is_told(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"dcdm {dcdm.__version__}\n"


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (["trian", "--run", "x"], "`dcdm train`"),
        (["eval", "pll", "x"], "`dcdm eval ppl`"),
        (["fly"], "known: demo, models"),
    ],
)
def test_an_unknown_command_is_told_with_the_nearest_one(given, hint, capsys):
    with pytest.raises(SystemExit) as left:
        main(given)
    assert left.value.code == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for name, _ in all_commands()])
def test_help_shows_options_that_may_be_left_out_by_their_kind(command):
    assert "None" not in help_of(*command.split())


def test_help_of_train_has_the_defaults_of_the_presets():
    shown = " ".join(help_of("train").replace("│", " ").split())
    assert "(default: 1000 for debug presets, 4000 for small presets, 500000 for others)" in shown
    assert "(default: 16 for debug presets, 16 for small presets, 128 for 0.1B, 512 for others)" in shown
    assert "Text to train on" in shown
    assert "(default: stdlib)" in shown


@pytest.mark.parametrize(
    "given",
    [
        ["bench", "attention", "--compare", "nowhere/earlier.json"],
        ["sample", "nowhere", "--prompt", "x"],
        ["sample", "nowhere", "--file", "nowhere.txt"],
        ["eval", "quality", "--scorer", "nowhere", "--texts", "nowhere.jsonl"],
        ["report", "nowhere"],
        ["train", "--preset", "mdlm-debug", "--set", "steps"],
        ["train", "--preset", "mdlm-debug", "--config", "nowhere.yaml"],
        ["data", "prepare", "nowhere.txt", "--out", "prepared"],
        ["verify", "nowhere"],
        ["export", "nowhere", "exported"],
    ],
    ids=" ".join,
)
def test_a_wrong_path_or_setting_is_one_line_and_exit_code_2(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(given)
    assert left.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_table_that_is_piped_is_not_cut(capsys):
    from dcdm.viewing.tables import Table

    wide = "x" * 300
    Table(["name", "value"], [[wide, 1]], ("name",)).print(caption="short")
    assert wide in capsys.readouterr().out


def test_a_table_shows_names_as_they_are(capsys):
    from dcdm.viewing.tables import Table

    names = ["runs/a[old]c", "runs/a[/b]c", "runs/:dog:", "a|b"]
    table = Table(["[bold]name"], [[name] for name in names], ("[bold]name",))
    table.print(caption="of [x]")
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == ["[bold]name", *names, "of [x]"]
    assert table.to_markdown().splitlines()[-1] == r"| a\|b |"


def test_completion_of_the_shell_knows_commands_and_options(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--tyro-print-completion", "bash"])
    assert not left.value.code
    script = capsys.readouterr().out
    assert "show-settings" in script
    assert "report" in script


def test_messages_name_options_as_they_are_written():
    from dcdm.cli import _by_options

    said = _by_options("max_new_tokens=0 leaves nothing to do; max_position=9", ["sample", "x"])
    assert said == "--length 0 leaves nothing to do; max_position=9"
    assert _by_options("train.steps='many' is wrong", ["train"]) == "--steps 'many' is wrong"
    assert _by_options("batch_size=0 must be 1", ["eval", "ppl"]) == "--batch-size 0 must be 1"
    assert _by_options("--set train.steps=3", ["train"]).startswith("--set")


def test_a_setting_that_is_not_yaml_is_wrong_use(capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", "--preset", "ar-debug", "--dry-run", "--run", "none", "--set", "train.betas=[1"])
    assert left.value.code == 2
    assert "--set train.betas=[1: the value is not YAML" in capsys.readouterr().err


def test_debug_shows_where_an_error_arose(capsys):
    command = ["sample", "nowhere", "--prompt", "x"]
    with pytest.raises(SystemExit) as left:
        main(command)
    assert left.value.code == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="nowhere is not a folder"):  # not caught: Python shows where
        main([*command, "--debug"])


@pytest.mark.parametrize(("given", "type_of_weights"), [
    ("fp64", "float64"), *((other, other) for other in OTHER_SPELLINGS), ("auto", "float32"),
])  # fmt: skip
def test_names_of_types_and_pytorchs_own_are_understood(given, type_of_weights, monkeypatch):
    from dcdm.commands import sample

    asked = []
    monkeypatch.setattr(sample, "load_for", lambda model, device, dtype, _: asked.append((device, dtype)) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["sample", "runs/first", "--prompt", "x", "--device", "cpu", "--dtype", given])
    assert str(compute_on(*asked[0])[1]) == f"torch.{type_of_weights}"


def test_an_unknown_type_is_wrong_use_and_the_message_has_the_names(capsys):
    with pytest.raises(SystemExit) as left:
        main(["sample", "runs/first", "--prompt", "x", "--dtype", "float16"])
    assert left.value.code == 2
    assert "auto, fp32" in capsys.readouterr().err


def test_help_of_bench_and_reproduce_has_every_name_of_their_tables():
    from dcdm.bench.subjects import SUBJECTS
    from dcdm.commands.bench import OTHER_SUBJECTS
    from dcdm.reproduction.experiments import EXPERIMENTS

    bench, reproduce = help_of("bench"), help_of("reproduce")
    assert [name for name in (*SUBJECTS, *OTHER_SUBJECTS) if name not in bench] == []
    assert [name for name in EXPERIMENTS if name not in reproduce] == []
