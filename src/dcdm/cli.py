"""The `dcdm` command: the table of commands, their help, and exit codes."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from dcdm.commands import (
    adapt,
    bench,
    chat,
    chunks,
    data,
    demo,
    eval_ppl,
    eval_quality,
    eval_tasks,
    export,
    import_model,
    models,
    options,
    presets,
    report,
    reproduce,
    sample,
    serve,
    study,
    train,
    verify,
)
from dcdm.config import VERSION, ConfigError, DataError

WRONG_PATH = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
"""What the system says of a path that a user gave."""


@dataclass(frozen=True)
class Command:
    run: Callable[..., None]
    """Its signature and docstring are the command's options and help."""
    examples: tuple[str, ...]
    details: Callable[[], str] | None = None
    """More for its help: names out of tables that take long to import."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Names of settings in messages, and the options by which users know them, where these differ."""


@dataclass(frozen=True)
class Group:
    says: str
    commands: dict[str, Command]


COMMANDS: dict[str, Command | Group] = {
    "demo": Command(demo.demo, demo.EXAMPLES),
    "models": Command(models.models, models.EXAMPLES),
    "presets": Command(presets.presets, presets.EXAMPLES),
    "train": Command(train.train, train.EXAMPLES, settings=train.OPTION_OF),
    "adapt": Command(adapt.adapt, adapt.EXAMPLES, settings=adapt.OPTION_OF),
    "report": Command(report.report, report.EXAMPLES),
    "chunks": Command(chunks.chunks, chunks.EXAMPLES),
    "sample": Command(sample.sample, sample.EXAMPLES, settings=sample.OPTION_OF),
    "chat": Command(chat.chat, chat.EXAMPLES, settings=chat.OPTION_OF),
    "serve": Command(serve.serve, serve.EXAMPLES),
    "export": Command(export.export, export.EXAMPLES),
    "import": Command(import_model.import_model, import_model.EXAMPLES),
    "verify": Command(verify.verify, verify.EXAMPLES),
    "bench": Command(bench.bench, bench.EXAMPLES, bench.details),
    "data": Group("Prepare text for training.", {"prepare": Command(data.prepare_text, data.EXAMPLES)}),
    "eval": Group(
        "Measure a model.",
        {
            "ppl": Command(eval_ppl.ppl, eval_ppl.EXAMPLES),
            "tasks": Command(eval_tasks.tasks, eval_tasks.EXAMPLES),
            "quality": Command(eval_quality.quality, eval_quality.EXAMPLES),
        },
    ),
    "study": Command(study.study, study.EXAMPLES),
    "reproduce": Command(reproduce.reproduce, reproduce.EXAMPLES, reproduce.details),
}


def all_commands() -> Iterator[tuple[str, Command]]:
    """Every command with the words that call it, such as `eval ppl`."""
    for name, entry in COMMANDS.items():
        if isinstance(entry, Command):
            yield name, entry
        else:
            yield from ((f"{name} {inner}", command) for inner, command in entry.commands.items())


def main(arguments: list[str] | None = None) -> None:
    """Entry point: exit code 0 done, 1 failed, 2 wrong use, 130 interrupted; --debug shows where an error arose."""
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given or "DCDM_DEBUG" in os.environ
    given = [argument for argument in given if argument != "--debug"]
    if given == ["--version"]:
        print(f"dcdm {VERSION}")
        return
    asked = options.DEBUG.set(debug)
    try:
        _refuse_unknown(given)
        _run(given)
    except (ConfigError, DataError) as error:
        if debug:
            raise
        print(f"dcdm: {_by_options(str(error), given)}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("dcdm: interrupted", file=sys.stderr)
        sys.exit(130)
    except WRONG_PATH as error:
        if error.filename is None or debug:
            raise
        print(f"dcdm: {os.fsdecode(error.filename)}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        # the package's own errors say what to do; anything else is a defect and shows where it happened
        if not type(error).__module__.startswith("dcdm.") or debug:
            raise
        print(f"dcdm: {error}", file=sys.stderr)
        sys.exit(1)
    finally:
        options.DEBUG.reset(asked)


def _run(given: list[str]) -> None:
    import tyro

    command = _asked_for(given)
    tyro.cli(
        _subcommands(COMMANDS, given),
        prog="dcdm",
        description="Dynamic Chunking Diffusion Models: block diffusion whose blocks follow content. "
        "`dcdm COMMAND --help` has examples; --debug, anywhere, shows where an error arose; --version shows the "
        "version.",
        args=given if command is None else _with_values(given, flags_of(command.run)),
    )


def _refuse_unknown(given: list[str]) -> None:
    """Refuse a command that does not exist, with the nearest that does."""
    known: Mapping[str, Any] = COMMANDS
    for at, word in enumerate(given[:2]):
        if word.startswith("-"):
            return
        if word not in known:
            said, before = " ".join(given[: at + 1]), " ".join(["dcdm", *given[:at]])
            near = difflib.get_close_matches(word, known, n=1)
            hint = f"did you mean `{before} {near[0]}`?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown command {said!r}; {hint}")
        entry = known[word]
        if isinstance(entry, Command):
            return
        known = entry.commands


def _asked_for(given: list[str]) -> Command | None:
    """The command that the first words name."""
    known = dict(all_commands())
    return known.get(" ".join(given[:1])) or known.get(" ".join(given[:2]))


def flags_of(run: Callable[..., None]) -> set[str]:
    """Every option of a command, as it is written."""
    flags = {"--help"}
    for name in inspect.signature(run).parameters:
        spelled = name.replace("_", "-")
        flags |= {f"--{spelled}", f"--no-{spelled}"}
    return flags


def _with_values(given: list[str], flags: Iterable[str]) -> list[str]:
    """Write `--prompt -x` as `--prompt=-x`: a text may begin like an option, if it is none of this command."""
    written: list[str] = []
    for word in given:
        is_text = word.startswith("-") and word.partition("=")[0] not in flags and word != "-h"
        if is_text and written and written[-1] in options.TEXTS:
            written[-1] = f"{written[-1]}={word}"
        else:
            written.append(word)
    return written


def _by_options(message: str, given: list[str]) -> str:
    """An error's text with settings called as on the command line: `--length 0` for `max_new_tokens=0`."""
    command = _asked_for(given)
    if command is None:
        return message
    names = {name: name for name in inspect.signature(command.run).parameters} | dict(command.settings)
    listed = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    pattern = rf"(?<![\w.\-/])({listed})=(?=[\w'\"\-\[(])"
    return re.sub(pattern, lambda found: f"--{names[found[1]].replace('_', '-')} ", message)


def _subcommands(commands: dict[str, Any], given: list[str]) -> Any:
    """The type by which tyro understands commands and groups of commands.

    A list of commands shows the first line of each; the command that was asked for tells all and has examples.
    """
    from tyro.conf import Suppress, subcommand

    choices: list[Any] = [Annotated[None, Suppress]]  # a union needs two members
    for name, entry in commands.items():
        asked = given[:1] == [name]
        if isinstance(entry, Group):
            group = _subcommands(entry.commands, given[1:] if asked else [])
            choices.append(Annotated[group, subcommand(name, description=entry.says)])
        else:
            text = _long_help(entry, given) if asked else _documentation(entry).splitlines()[0]
            run = _with_plain_options(entry.run) if asked else entry.run
            choices.append(Annotated[Any, subcommand(name, constructor=run, description=text)])
    return Union[tuple(choices)]  # noqa: UP007 (built at run time)


def _with_plain_options(run: Callable[..., None]) -> Callable[..., None]:
    """The command, its help showing what may be left out as INT instead of as {None}|INT (default: None)."""
    from tyro.conf import arg

    hints = get_type_hints(run, include_extras=True)
    for name, parameter in inspect.signature(run).parameters.items():
        kinds = [kind for kind in get_args(hints[name]) if kind is not type(None)]
        if parameter.default is None and get_origin(hints[name]) in (Union, UnionType):
            shown = arg(metavar="|".join(map(_metavar, kinds)), help_behavior_hint="")
            hints[name] = Annotated[hints[name], shown]
    same = FunctionType(run.__code__, run.__globals__, run.__name__, run.__defaults__, run.__closure__)
    same.__doc__, same.__annotations__ = run.__doc__, hints
    return same


def _metavar(kind: Any) -> str:
    """How the help shows a value of this type."""
    if get_origin(kind) is tuple:
        return f"{_metavar(get_args(kind)[0])}..."
    if kind is bool or get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind) or (True, False))) + "}"
    return str(kind.__name__).upper()


def _documentation(command: Command) -> str:
    """A command's documentation without its arguments, which tyro shows beside the options."""
    return inspect.cleandoc(command.run.__doc__ or "").partition("\n\nArgs:")[0]


def _long_help(command: Command, given: list[str]) -> str:
    parts = [_documentation(command)]
    if command.details is not None and {"-h", "--help"} & {*given}:
        parts.append(command.details())
    return "\n\n".join([*parts, "Examples:", *command.examples])
