"""The `dcdm` command: the table of commands, their help, and exit codes."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union

from dcdm.commands import (
    bench,
    chunks,
    data,
    demo,
    eval_ppl,
    eval_quality,
    eval_tasks,
    export,
    presets,
    reproduce,
    sample,
    serve,
    train,
    verify,
)
from dcdm.config import ConfigError, DataError


@dataclass(frozen=True)
class Command:
    run: Callable[..., None]
    """Its signature and docstring are the command's options and help."""
    examples: tuple[str, ...]
    details: Callable[[], str] | None = None
    """More for its help: names out of tables that take long to import."""


@dataclass(frozen=True)
class Group:
    says: str
    commands: dict[str, Command]


COMMANDS: dict[str, Command | Group] = {
    "demo": Command(demo.demo, demo.EXAMPLES),
    "presets": Command(presets.presets, presets.EXAMPLES),
    "train": Command(train.train, train.EXAMPLES),
    "chunks": Command(chunks.chunks, chunks.EXAMPLES),
    "sample": Command(sample.sample, sample.EXAMPLES),
    "serve": Command(serve.serve, serve.EXAMPLES),
    "export": Command(export.export, export.EXAMPLES),
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
    import tyro

    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given or "DCDM_DEBUG" in os.environ
    given = [argument for argument in given if argument != "--debug"]
    try:
        tyro.cli(
            _subcommands(COMMANDS, given),
            prog="dcdm",
            description="Dynamic Chunking Diffusion Models: block diffusion whose blocks follow content. "
            "`dcdm COMMAND --help` has examples; --debug, anywhere, shows where an error arose.",
            args=given,
        )
    except (ConfigError, DataError) as error:
        if debug:
            raise
        print(f"dcdm: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("dcdm: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        # the package's own errors say what to do; anything else is a defect and shows where it happened
        if not type(error).__module__.startswith("dcdm.") or debug:
            raise
        print(f"dcdm: {error}", file=sys.stderr)
        sys.exit(1)


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
            choices.append(Annotated[Any, subcommand(name, constructor=entry.run, description=text)])
    return Union[tuple(choices)]  # noqa: UP007 (built at run time)


def _documentation(command: Command) -> str:
    """A command's documentation without its arguments, which tyro shows beside the options."""
    return inspect.cleandoc(command.run.__doc__ or "").partition("\n\nArgs:")[0]


def _long_help(command: Command, given: list[str]) -> str:
    parts = [_documentation(command)]
    if command.details is not None and {"-h", "--help"} & {*given}:
        parts.append(command.details())
    return "\n\n".join([*parts, "Examples:", *command.examples])
