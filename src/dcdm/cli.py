"""The `dcdm` command."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from tyro.conf import Positional, arg


def demo(
    steps: int = 240,
    seed: int = 0,
    folder: Path = Path("runs/demo"),
    data: tuple[str, ...] = ("stdlib",),
    fresh: bool = False,
    json: bool = False,
) -> None:
    """Train a DCDM and a BDLM on this machine, compare them, watch text being filled in, and write a report.

    Ctrl-C saves and leaves; the same command goes on.

    Args:
        steps: Optimizer steps of each model.
        seed: Seed of the weights, the data order, the noise and the samples.
        folder: Where the two runs and report.html go.
        data: Text to train on: stdlib is the source of this Python's standard library.
        fresh: Forget the two runs of an earlier demo in the folder and start again.
        json: Print the figures as one JSON object; all else goes to standard error.
    """
    from dcdm.commands.demo import run

    sys.exit(run(folder, steps=steps, seed=seed, data=data, fresh=fresh, json_out=json))


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
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def train(
    preset: str | None = None,
    run: Annotated[Path, arg(aliases=["--run-folder"])] = Path("runs/default"),
    data: tuple[str, ...] | None = None,
    tokenizer: str | None = None,
    validation: tuple[str, ...] | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    micro_batch: int | None = None,
    learning_rate: float | None = None,
    seed: int | None = None,
    checkpoint_every: int | None = None,
    evaluate_every: int | None = None,
    init: str | None = None,
    config: Path | None = None,
    set: tuple[str, ...] = (),
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    dtype: Literal["auto", "fp32", "bf16", "fp64"] | None = None,
    dry_run: bool = False,
) -> None:
    """Train a model, or go on with the run in a folder.

    Settings come from the preset, then the YAML file, then flags; the resolved ones are kept in the run folder
    and start the same run again. Under torchrun, the same command runs on many devices; there, write
    --run-folder for --run, which torchrun would take for an option of its own.

    Args:
        preset: A name that `dcdm presets` lists; not needed to go on with a run.
        run: The run's folder; if there is a run in it, it goes on.
        data: Text to train on: stdlib, files, patterns, a hub data set, or a folder of `dcdm data prepare`.
        tokenizer: bytes, bpe:N, a folder, or a hub name.
        validation: Sources of the validation split; without them a share is held out.
        steps: Optimizer steps.
        batch_size: Windows of one optimizer step, over all devices.
        micro_batch: Windows of one pass on one device.
        learning_rate: Peak learning rate.
        seed: Seed of the weights, the data order and the noise.
        checkpoint_every: Steps between checkpoints.
        evaluate_every: Steps between evaluations on the validation split.
        init: Start weights: a run, an exported folder, or a local Qwen3 folder of transformers.
        config: A YAML file of settings.
        set: Any other setting, as name=value, such as objective.full_mask_share=0.5.
        device: Where to compute; auto is cuda where there is a GPU, else cpu.
        dtype: What to compute in: bf16 keeps the weights in fp32; auto is bf16 on cuda and fp32 elsewhere.
        dry_run: Print what the run would cost, without starting it.
    """
    from dcdm.training.run import run as start
    from dcdm.viewing.pictures import chunk_picture

    changes = {
        "data.sources": data, "data.tokenizer": tokenizer, "data.validation": validation, "train.steps": steps,
        "train.batch_size": batch_size, "train.micro_batch": micro_batch, "train.learning_rate": learning_rate,
        "train.seed": seed, "checkpoint_every": checkpoint_every, "evaluate_every": evaluate_every, "init": init,
        "train.dtype": dtype,
    }  # fmt: skip
    given = {name: value for name, value in changes.items() if value is not None} | _assignments(set)
    code = start(preset, run, file=config, changes=given, device=device, dry_run=dry_run, picture=chunk_picture)
    sys.exit(code)


def _assignments(texts: tuple[str, ...]) -> dict[str, Any]:
    """Values of name=value, read as YAML."""
    import yaml

    from dcdm.config import ConfigError

    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write it as name=value")
        values[name] = yaml.safe_load(value)
    return values


def export(source: Annotated[Path, Positional], folder: Annotated[Path, Positional], average: bool = True) -> None:
    """Write a trained model as a folder that Hugging Face tools load.

    Args:
        source: A run folder or a checkpoint in it.
        folder: The folder to write; it must not exist.
        average: Take the averaged weights where the run kept any.
    """
    from dcdm.io.export import export as write

    write(source, folder, average=average)
    print(f"{folder}: written; `dcdm verify {folder}` checks it")


def verify(path: Annotated[Path, Positional], json: bool = False) -> None:
    """Check a run, a checkpoint or an exported folder: checksums, finite weights, leaks, reload equality.

    Args:
        path: The folder.
        json: Print one JSON object.
    """
    from dcdm.io.export import verify as checks

    found = {}
    for check in checks(path):
        found[check.name] = check.problems
        if not json:
            print("FAIL" if check.problems else "ok  ", check.name)
            for problem in check.problems:
                print("    ", problem)
    if json:
        import json as encoder

        print(encoder.dumps(found))
    if any(found.values()):
        sys.exit(1)


def bench(
    subject: Annotated[str, Positional],
    repeats: int = 3,
    threads: int = 2,
    memory: bool | None = None,
    compare: str | None = None,
    json: bool = False,
    out: str | None = None,
    plot: Path | None = None,
    models: tuple[Path, ...] = (),
    samples: int = 4,
    windows: int = 16,
) -> None:
    """Measure a part of the system against its literal version, in the same run.

    Subjects: attention, chunking, routing, step, draws, head, moe, decoding, scaling; targets runs all that have a
    goal. estimator measures the Monte-Carlo error of likelihoods. generate compares the decoders of trained models,
    speed beside quality. serving lets eight callers ask one server, batched and one at a time. arithmetic measures
    nothing and prints what the presets cost on GPUs.

    Args:
        subject: What to measure.
        repeats: Timed repetitions of each path, taking turns; for estimator, blocks of 20 scores.
        threads: PyTorch threads.
        memory: Measure peak memory too, each path in a process of its own; by default where it matters.
        compare: An earlier run's JSON file, to show its medians beside the new ones.
        json: Print one JSON line instead of the table.
        out: Write that JSON line to this file as well.
        plot: Draw time and memory against length (generate: quality against speed) into this PNG.
        models: For generate: run folders, checkpoints or exported folders; for serving: one, else random weights.
        samples: For generate: texts that are sampled together.
        windows: For generate: windows of held-out text that are scored.
    """
    from dcdm.commands.bench import run

    run(subject, repeats, threads, memory, compare, json, out, plot, models, samples, windows)


Commands = dict[str, Callable[..., None] | tuple[str, "Commands"]]

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("dcdm demo", "dcdm demo --steps 50 --folder runs/short"),
    "presets": ("dcdm presets", "dcdm presets --json"),
    "train": (
        "dcdm train --preset dcdm-debug-causal --run runs/first --steps 200",
        "dcdm train --preset dcdm-1.7b-k8 --run runs/big --dry-run",
        "torchrun --nproc-per-node 8 -m dcdm train --preset dcdm-0.1b-k8 --run-folder runs/dcdm",
    ),
    "chunks": (
        'dcdm chunks runs/first "for i in range(10): print(i)"',
        'dcdm chunks runs/first "def area(self): return self.width * self.height" --html chunks.html',
    ),
    "sample": (
        'dcdm sample runs/first --prompt "def main(" --length 64',
        'dcdm sample runs/first --prompt "def [[6]](self):[[24]]return self.name" --commit position --stream',
        "dcdm sample runs/first --jsonl prompts.jsonl --json --temperature 0.7 --top-p 0.9",
    ),
    "serve": ("dcdm serve runs/first", "DCDM_API_KEY=secret dcdm serve exported --host 0.0.0.0 --port 8000"),
    "export": ("dcdm export runs/first exported",),
    "verify": ("dcdm verify runs/first", "dcdm verify exported --json"),
    "bench": ("dcdm bench attention", "dcdm bench generate --models runs/first runs/second --plot plot.png"),
    "data prepare": (
        "dcdm data prepare stdlib --tokenizer bytes --out prepared",
        "dcdm data prepare 'texts/*.jsonl.gz' --tokenizer bpe:8000 --out prepared",
    ),
    "eval ppl": (
        "dcdm eval ppl runs/first --data wikitext=wikitext2/test.txt",
        "dcdm eval ppl runs/first runs/second --data a.txt b.jsonl --estimator auto trajectory --markdown table.md",
    ),
    "eval tasks": ("dcdm eval tasks runs/first --tasks piqa --data-dir tasks --limit 20",),
    "reproduce": (
        "dcdm reproduce --list",
        "dcdm reproduce loss-curves --data texts",
        "dcdm reproduce scaling --scale paper",
    ),
    "eval quality": ("dcdm eval quality runs/first --scorer gpt2-folder --num 64",),
}


def _subcommands(commands: Commands, asked: tuple[str, ...], path: tuple[str, ...] = ()) -> Any:
    """The type by which tyro understands commands and, with a description before them, groups of commands.

    A list of commands shows the first line of each; the command that was `asked` for tells all and has examples.
    """
    from tyro.conf import Suppress, subcommand

    choices: list[Any] = [Annotated[None, Suppress]]  # a union needs two members
    for name, command in commands.items():
        own = (*path, name)
        if isinstance(command, tuple):
            group = _subcommands(command[1], asked, own)
            choices.append(Annotated[group, subcommand(name, description=command[0])])
        else:
            text = _description(command, own if asked[: len(own)] == own else None)
            choices.append(Annotated[Any, subcommand(name, constructor=command, description=text)])
    return Union[tuple(choices)]  # noqa: UP007 (built at run time)


def _description(command: Callable[..., None], path: tuple[str, ...] | None) -> str:
    """The first line of a command's documentation; with its path, all but the arguments, and its examples."""
    text = inspect.cleandoc(command.__doc__ or "").partition("\n\nArgs:")[0]
    if path is None:
        return text.splitlines()[0]
    return "\n\n".join([text, "Examples:", *EXAMPLES.get(" ".join(path), ())])


def main(arguments: list[str] | None = None) -> None:
    """Entry point: exit code 0 done, 1 failed, 2 wrong use, 130 interrupted; --debug shows where an error arose."""
    import tyro

    from dcdm.commands import chunks as viewing
    from dcdm.commands import data
    from dcdm.commands import eval_ppl as perplexity
    from dcdm.commands import eval_quality as quality_command
    from dcdm.commands import eval_tasks as tasks_command
    from dcdm.commands import reproduce as reproduction
    from dcdm.commands import sample as sampling
    from dcdm.commands import serve as serving
    from dcdm.config import ConfigError, DataError

    commands: Commands = {
        "demo": demo,
        "presets": presets,
        "train": train,
        "chunks": viewing.chunks,
        "sample": sampling.sample,
        "serve": serving.serve,
        "export": export,
        "verify": verify,
        "bench": bench,
        "data": ("Prepare text for training.", {"prepare": data.prepare_text}),
        "eval": (
            "Measure a model.",
            {"ppl": perplexity.ppl, "tasks": tasks_command.tasks, "quality": quality_command.quality},
        ),
        "reproduce": reproduction.reproduce,
    }
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given or "DCDM_DEBUG" in os.environ
    given = [argument for argument in given if argument != "--debug"]
    try:
        tyro.cli(
            _subcommands(commands, tuple(given)),
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
