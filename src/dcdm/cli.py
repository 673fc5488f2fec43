"""The `dcdm` command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, Union

from tyro.conf import Positional


def demo(steps: int = 250, seed: int = 0) -> None:
    """Train a small model on this machine's Python standard library and watch it fill in text.

    Args:
        steps: Optimizer steps; 250 take about a minute on two cores.
        seed: Seed of the weights, the data order and the noise.
    """
    from dcdm.demo import run

    run(steps=steps, seed=seed)


def presets(json: bool = False) -> None:
    """List the model presets with their sizes.

    Args:
        json: Print one JSON object instead of a table.
    """
    from dcdm.config import ModelConfig
    from dcdm.model.transformer import parameter_counts
    from dcdm.presets import preset
    from dcdm.presets import presets as names

    def row(config: ModelConfig) -> dict[str, object]:
        total, active = (count if json else f"{count / 1e6:.2f}M" for count in parameter_counts(config))
        return {
            "kind": config.kind, "routing": config.routing if config.kind == "dcdm" else None,
            "N×d": f"{config.num_layers}×{config.hidden_size}", "B": config.block_size,
            "K/h": f"{config.num_chunks}/{config.chunk_dim}" if config.kind == "dcdm" else None,
            "parameters": total, "active": active,
        }  # fmt: skip

    rows = {name: row(preset(name)) for name in names()}
    if json:
        import json as encoder

        print(encoder.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("preset", *next(iter(rows.values()))):
        table.add_column(column, no_wrap=True)
    for name, values in rows.items():
        table.add_row(name, *("–" if value is None else str(value) for value in values.values()))
    Console().print(table)


def bench(
    subject: Annotated[str, Positional],
    repeats: int = 3,
    threads: int = 2,
    memory: bool | None = None,
    compare: str | None = None,
    json: bool = False,
    out: str | None = None,
) -> None:
    """Measure a part of the system against its literal version, in the same run.

    Subjects: attention, chunking, routing, step, draws, head, moe, scaling; targets runs all that have a goal;
    arithmetic measures nothing and prints what the presets cost on GPUs.

    Args:
        subject: What to measure.
        repeats: Timed repetitions of each path, taking turns.
        threads: PyTorch threads.
        memory: Measure peak memory too, each path in a process of its own; by default where it matters.
        compare: An earlier run's JSON file, to show its medians beside the new ones.
        json: Print one JSON line instead of the table.
        out: Write that JSON line to this file as well.
    """
    from dcdm.bench.command import run

    run(subject, repeats, threads, memory, compare, json, out)


Commands = dict[str, Callable[..., None] | tuple[str, "Commands"]]


def _subcommands(commands: Commands) -> Any:
    """The type by which tyro understands commands and, with a description before them, groups of commands."""
    from tyro.conf import Suppress, subcommand

    choices: list[Any] = [Annotated[None, Suppress]]  # a union needs two members
    for name, command in commands.items():
        if isinstance(command, tuple):
            choices.append(Annotated[_subcommands(command[1]), subcommand(name, description=command[0])])
        else:
            choices.append(Annotated[Any, subcommand(name, constructor=command)])
    return Union[tuple(choices)]  # noqa: UP007 (built at run time)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: exit code 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    import tyro

    from dcdm.config import ConfigError
    from dcdm.data import command as data
    from dcdm.data.errors import DataError

    commands: Commands = {
        "demo": demo,
        "presets": presets,
        "bench": bench,
        "data": ("Prepare text for training.", {"prepare": data.prepare}),
    }
    try:
        tyro.cli(
            _subcommands(commands),
            prog="dcdm",
            description="Dynamic Chunking Diffusion Models: block diffusion whose blocks follow content.",
            args=arguments,
        )
    except (ConfigError, DataError) as error:
        print(f"dcdm: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("dcdm: interrupted", file=sys.stderr)
        sys.exit(130)
