"""The `dcdm` command: the table of commands, their help, and exit codes."""

from __future__ import annotations

import difflib
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, get_type_hints

from dcdm.commands import (
    adapt,
    bench,
    chat,
    check,
    chunks,
    data,
    demo,
    evaluate,
    models,
    plan,
    report,
    sample,
    serve,
    study,
    train,
)
from dcdm.config import VERSION, ConfigError, DataError, harmless
from dcdm.shipped.bases import MissingBase

WRONG_PATH = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
"""What the system says of a path that a user gave."""
WRONG_USE = (ConfigError, DataError, *WRONG_PATH)
DESCRIPTION = "Dynamic Chunking Diffusion Models: block diffusion whose chunks follow content."
FOOTER = """`dcdm COMMAND --help` shows a command's options and examples.
--version shows the version; --debug, after any command, shows where an error arose."""
HELP = ("-h", "--help")


@dataclass(frozen=True)
class Command:
    run: Callable[..., None]
    """Its signature and docstring are the command's options and help."""
    examples: tuple[str, ...]

    @property
    def text(self) -> str:
        """The docstring without the arguments, which stand beside the options."""
        return inspect.cleandoc(self.run.__doc__ or "").partition("\n\nArgs:")[0]

    def help(self) -> str:
        return "\n\n".join([self.text, "Examples:", *self.examples])


COMMANDS: dict[str, Command] = {
    "demo": Command(demo.demo, demo.EXAMPLES),
    "models": Command(models.models, models.MODELS_EXAMPLES),
    "presets": Command(models.presets, models.PRESETS_EXAMPLES),
    "train": Command(train.train, train.EXAMPLES),
    "plan": Command(plan.plan, plan.EXAMPLES),
    "check": Command(check.check, check.EXAMPLES),
    "adapt": Command(adapt.adapt, adapt.EXAMPLES),
    "report": Command(report.report, report.EXAMPLES),
    "chunks": Command(chunks.chunks, chunks.EXAMPLES),
    "sample": Command(sample.sample, sample.EXAMPLES),
    "chat": Command(chat.chat, chat.EXAMPLES),
    "serve": Command(serve.serve, serve.EXAMPLES),
    "export": Command(models.export, models.EXPORT_EXAMPLES),
    "import": Command(models.import_model, models.IMPORT_EXAMPLES),
    "verify": Command(models.verify, models.VERIFY_EXAMPLES),
    "bench": Command(bench.bench, bench.EXAMPLES),
    "data prepare": Command(data.prepare_text, data.EXAMPLES),
    "eval ppl": Command(evaluate.ppl, evaluate.PPL_EXAMPLES),
    "eval tasks": Command(evaluate.tasks, evaluate.TASKS_EXAMPLES),
    "study": Command(study.study, study.STUDY_EXAMPLES),
    "reproduce": Command(study.reproduce, study.REPRODUCE_EXAMPLES),
}
"""By the words that call them; those of two words are groups."""
GROUPS = ("data", "eval")


def main(arguments: list[str] | None = None) -> None:
    """Entry point: exit code 0 done, 1 failed, 2 wrong use, 130 interrupted; --debug shows where an error arose."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        run([argument for argument in given if argument != "--debug"])
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("dcdm: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        text = str(error)
        if isinstance(error, OSError) and error.strerror is not None:
            place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
            text = f"{place}{error.strerror}"
        elif not type(error).__module__.startswith("dcdm."):
            raise  # the package's own errors say what to do; anything else is a defect and shows where it happened
        if "--debug" in given:
            raise
        print(f"dcdm: {harmless(text)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, WRONG_USE) else 1)


def run(given: Sequence[str]) -> None:
    """Run the command that the first one or two words name with the options that follow."""
    for count in (1, 2):
        name, rest = " ".join(given[:count]), given[count:]
        if name in COMMANDS:
            run_command(name, rest)
            return
    group = given[0] if given and given[0] in GROUPS else ""
    said, program = " ".join(given[: 2 if group else 1]), f"dcdm {group}".strip()
    if said.removeprefix(group).strip() in HELP:
        print_overview(group)
    elif said == "--version":
        print(f"dcdm {VERSION}")
    elif said == group:
        raise ConfigError(f"no command is given; `{program} --help` lists them")
    else:
        near = difflib.get_close_matches(said, COMMANDS, n=1)
        hint = f"did you mean `dcdm {near[0]}`?" if near else f"`{program} --help` lists them"
        raise ConfigError(f"unknown command {said!r}; {hint}")


def run_command(name: str, arguments: Sequence[str]) -> None:
    import tyro

    command = COMMANDS[name]
    _hide_none(command.run)
    markers = (tyro.conf.DisallowNone,)
    while True:
        try:
            tyro.cli(command.run, prog=f"dcdm {name}", description=command.help(), args=arguments, config=markers)
            return
        except MissingBase as missing:
            if not (sys.stdin.isatty() and sys.stderr.isatty()):
                raise
            print(f"dcdm: {missing}. Fetch it now? [y/N] ", end="", file=sys.stderr, flush=True)
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                sys.exit(2)
            from dcdm.io.pretrained import fetch

            fetch(missing.name)


def _hide_none(run: Callable[..., None]) -> None:
    """Let the help say nothing of a default of None: what is done without the option stands in its description."""
    from tyro.conf import arg

    hints = get_type_hints(run, include_extras=True)
    for name, parameter in inspect.signature(run).parameters.items():
        if parameter.default is None and not hasattr(hints[name], "__metadata__"):
            run.__annotations__[name] = Annotated[hints[name], arg(help_behavior_hint="")]


def print_overview(group: str = "") -> None:
    """Every command, or those of a group, with the first line of its documentation."""
    print(f"usage: {f'dcdm {group}'.strip()} COMMAND [OPTIONS]\n\n{DESCRIPTION}\n")
    width = min(shutil.get_terminal_size().columns, 110)
    for name, command in COMMANDS.items():
        if name.startswith(group):
            line = f"  {name:14}{command.text.splitlines()[0]}"
            print(textwrap.fill(line, width, subsequent_indent=" " * 16))
    print(f"\n{FOOTER}")
