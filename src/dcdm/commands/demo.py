"""`dcdm demo`: a causal DCDM and a BDLM of equal size, trained here, compared, sampled from, and reported on."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcdm.commands.options import print_json
from dcdm.config import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from dcdm.data.tokenizers import Tokenizer
    from dcdm.likelihood.estimators import Estimator, Score
    from dcdm.model.transformer import Model
    from dcdm.viewing.chunks import Filling
    from dcdm.viewing.demo_report import CommandExample, ComparedEstimate, DemoReport

EXAMPLES = ("dcdm demo", "dcdm demo --steps 50 --folder runs/short")

WINDOWS = 128
SAMPLES = 4  # mask sets of the bound, for each window
TEMPERATURE = 0.5
SNIPPET = (
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
    "    def move(self, dx, dy):\n"
)
BLANKS = ("self, x, y", "self.y", "def move")
BEGINNING = "class Reader:\n    def __init__(self, name):\n        self."


@dataclass(frozen=True)
class Recipe:
    """A model of the demo: what it is called, its preset, and what is changed in it."""

    name: str
    preset: str
    says: str
    """How it forms chunks and how it is trained, for readers."""
    changes: Mapping[str, Any] = field(default_factory=dict)


def recipes() -> tuple[Recipe, Recipe]:
    """The two models: as many parameters, as many chunks, as many forwards for a window."""
    dcdm = Recipe(
        "dcdm", "dcdm-debug-causal",
        "DCDM, causal routing: 8 chunks of 16 bytes that lie 8 apart (the strided prior decides), every chunk "
        "trained fully masked",
        {"model.prior": "strided", "model.prior_weight": math.inf, "objective.full_mask_share": 1.0},
    )  # fmt: skip
    # Shares 0, 0.5 and 1 of fully masked blocks, 300 steps, one seed, 96 windows: bound 2.66, 2.76, 2.97 and exact
    # 2.99, 2.96, 2.99. None is best at both; 0 loses 0.03 of the one and gains 0.10 of the other.
    bdlm = Recipe(
        "bdlm", "bdlm-debug",
        "BDLM: 8 blocks of 16 bytes in a row, trained with random noise levels: of three objectives tried for it, "
        "the one with the best bound; training on fully masked blocks, as the DCDM does, made its bound worse",
        # a wider MLP stands in for the chunking attention: the number of parameters is the same
        {"model.block_size": 16, "model.intermediate_size": 416},
    )  # fmt: skip
    return dcdm, bdlm


def demo(
    steps: int = 240,
    seed: int = 0,
    folder: Path = Path("runs/demo"),
    data: tuple[str, ...] = ("stdlib",),
    fresh: bool = False,
    json: bool = False,
) -> None:
    """Train a DCDM and a BDLM on this machine, compare them, watch text being filled in, and write a report.

    It takes a few minutes on two cores. Ctrl-C saves and stops; the same command resumes.

    Args:
        steps: Optimizer steps of each model.
        seed: Seed of the weights, the data order, the noise and the samples.
        folder: Where the two runs and report.html go.
        data: Text to train on: stdlib is the source of this Python's standard library.
        fresh: Delete the two runs of an earlier demo in the folder and start again.
        json: Print the figures as one JSON object; all else goes to standard error.
    """
    from rich.console import Console

    from dcdm.files import write_whole
    from dcdm.io.load import load_model
    from dcdm.viewing.demo_report import demo_page
    from dcdm.viewing.terminal import show_filling

    console = Console(stderr=json)
    if fresh:
        _delete_runs(folder)
    for recipe in recipes():
        console.print(f"[bold]{recipe.name}[/bold]: {recipe.says}", highlight=False)
        if code := _train(recipe, folder / recipe.name, steps, seed, data):
            sys.exit(code)
    loaded = {recipe.name: load_model(folder / recipe.name) for recipe in recipes()}
    models = {name: model for name, (model, _) in loaded.items()}
    tokenizer = loaded["dcdm"][1]
    windows = held_out(data, tokenizer, models["dcdm"].config.context_length)
    lines = compare(models["dcdm"], models["bdlm"], windows, seed)
    show_comparison(lines, console)
    fillings = {
        "infilling": infill(models["dcdm"], tokenizer, seed),
        "completion": complete(models["dcdm"], tokenizer, seed),
    }
    for name, filling in fillings.items():
        console.print(f"[bold]{name}[/bold] by the DCDM, {len(filling.steps)} forwards:", highlight=False)
        show_filling(filling, console)
    console.print("A model this small, trained this briefly, spells badly.", highlight=False)
    report = _report(folder, models, tokenizer, lines, fillings, steps, data)
    place = folder / "report.html"
    write_whole(place, demo_page(report).encode())
    if json:
        print_json({"figures": [line.to_dict() for line in lines], "report": str(place)})
    console.print(f"\n[bold]{place}[/bold] has all this and more: open it in a browser. Then try", highlight=False)
    for command in report.commands[:3]:
        console.print(f"  {command.text}", markup=False, highlight=False, soft_wrap=True)


# --- training ----------------------------------------------------------------------------------------------------


def _train(recipe: Recipe, folder: Path, steps: int, seed: int, data: tuple[str, ...]) -> int:
    from dcdm.training.run import run_training

    changes = {
        "train.steps": steps, "train.learning_rate": 3e-3, "train.warmup_steps": min(40, steps), "train.seed": seed,
        "data.sources": data, "evaluate_every": steps, "evaluate_sequences": 16, "checkpoint_every": 50,
        "log_every": 25, "tensorboard": False, **recipe.changes,
    }  # fmt: skip
    try:
        return run_training(recipe.preset, folder, changes=changes)
    except ConfigError as error:
        if not (folder / "settings.yaml").exists():
            raise
        raise ConfigError(f"{error}; --fresh starts again") from error


def _delete_runs(folder: Path) -> None:
    """Remove the runs of an earlier demo, and nothing else."""
    for recipe in recipes():
        if (folder / recipe.name / "settings.yaml").exists():
            shutil.rmtree(folder / recipe.name)


# --- comparison --------------------------------------------------------------------------------------------------


def held_out(data: tuple[str, ...], tokenizer: Tokenizer, length: int, count: int = WINDOWS) -> Tensor:
    """Windows (N, L) of files that were not trained on, evenly spread over them."""
    import torch

    from dcdm.data.prepare import prepare

    windows = prepare(list(data), tokenizer).dataset("validation", length)
    places = torch.linspace(0, len(windows) - 1, min(count, len(windows))).long().tolist()
    return torch.stack([windows[place]["tokens"] for place in places])


def compare(dcdm: Model, bdlm: Model, windows: Tensor, seed: int = 0) -> list[ComparedEstimate]:
    """Both models on the same windows: by a valid bound, and exactly, as decoders of one forward per chunk."""
    return [_line(estimator, dcdm, bdlm, windows, seed) for estimator in ("bound", "trajectory")]


def _line(estimator: Estimator, dcdm: Model, bdlm: Model, windows: Tensor, seed: int) -> ComparedEstimate:
    from dcdm.likelihood.estimators import score
    from dcdm.likelihood.statistics import mean_and_stderr
    from dcdm.viewing.demo_report import ComparedEstimate

    ours, theirs = (score(model, windows, estimator, SAMPLES, seed, commit="chunk") for model in (dcdm, bdlm))
    exact = estimator == "trajectory"
    return ComparedEstimate(
        name=f"exact, {int(ours.forwards.max())} forwards" if exact else "bound",
        meaning="−log p of the decoder that fills a chunk with each forward" if exact
        else f"an upper bound of −log p, {SAMPLES} draws of masks for each window",
        dcdm=mean_and_stderr(_rows(ours)), bdlm=mean_and_stderr(_rows(theirs)),
        difference=mean_and_stderr([(a - b, n) for (a, n), (b, _) in zip(_rows(ours), _rows(theirs), strict=True)]),
        windows=len(windows), exact=exact,
    )  # fmt: skip


def _rows(scores: Score) -> list[tuple[float, int]]:
    return list(zip(scores.nats.tolist(), scores.tokens.tolist(), strict=True))


def show_comparison(lines: list[ComparedEstimate], console: Console) -> None:
    """The table, and what it means."""
    from rich.table import Table

    from dcdm.viewing.demo_report import CAUTION

    title = f"nats per byte, {lines[0].windows} held-out windows; lower is better"
    table = Table(title=title, title_justify="left")
    for name in ("", "DCDM", "BDLM", "DCDM − BDLM"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for line in lines:
        table.add_row(line.name, *line.cells)
    console.print(table)
    for line in lines:
        console.print(f"{line.name}: {line.meaning}.", highlight=False, style="dim")
    console.print("±: standard error over windows; that of the difference is of window by window.", style="dim")
    for line in lines:
        console.print(line.verdict, highlight=False)
    console.print(CAUTION + "\n", highlight=False, style="dim")


# --- samples -----------------------------------------------------------------------------------------------------


def infill(model: Model, tokenizer: Tokenizer, seed: int = 0) -> Filling:
    """A piece of code with stretches blanked out and filled by the model, one forward per chunk."""
    text = SNIPPET
    for stretch in BLANKS:
        text = text.replace(stretch, f"[[{len(stretch)}]]", 1)
    return _filled(model, text, tokenizer, seed)


def complete(model: Model, tokenizer: Tokenizer, seed: int = 0) -> Filling:
    """The rest of a window behind the beginning of a piece of code."""
    return _filled(model, BEGINNING, tokenizer, seed)


def _filled(model: Model, text: str, tokenizer: Tokenizer, seed: int) -> Filling:
    from dcdm.decoding.engine import generate
    from dcdm.viewing.chunks import filling_of

    done = generate(model, text, tokenizer=tokenizer, commit="chunk", temperature=TEMPERATURE, seed=seed)
    return filling_of(done, tokenizer)


# --- the report --------------------------------------------------------------------------------------------------


def _report(
    folder: Path, models: Mapping[str, Model], tokenizer: Tokenizer, lines: list[ComparedEstimate],
    fillings: Mapping[str, Filling], steps: int, data: tuple[str, ...],
) -> DemoReport:  # fmt: skip
    from dcdm.viewing.chunks import view, window_of
    from dcdm.viewing.demo_report import Curve, DemoReport

    size = sum(p.numel() for p in models["dcdm"].parameters())
    window, _ = window_of(SNIPPET, tokenizer, models["dcdm"].config.context_length)
    return DemoReport(
        summary=f"{size:,} parameters each, {steps} steps on {_corpus(data)}, byte by byte",
        recipes=[recipe.says for recipe in recipes()],
        lines=lines,
        curves=[Curve(recipe.name.upper(), _losses(folder / recipe.name)) for recipe in recipes()],
        chunks={name.upper(): view(model, window, name=name) for name, model in models.items()},
        fillings=dict(fillings),
        commands=_commands(folder / "dcdm"),
    )


def _corpus(data: tuple[str, ...]) -> str:
    return ", ".join("Python’s standard library" if source == "stdlib" else source for source in data)


def _losses(run: Path) -> list[float]:
    """Training loss of every step, in nats per byte."""
    from dcdm.training.metrics import read_rows

    return [row["nll"] for row in read_rows(run / "metrics.jsonl") if isinstance(row.get("nll"), float)]


def _commands(model: Path) -> list[CommandExample]:
    from dcdm.viewing.demo_report import CommandExample

    return [
        CommandExample(
            f'dcdm sample {model} --prompt "def main(" --commit chunk --temperature 0.5', "a text of your own"
        ),
        CommandExample(
            f'dcdm chunks {model} "x = [i for i in range(9)]" --html chunks.html', "its chunks, round by round"
        ),
        CommandExample(
            "dcdm train --preset dcdm-debug-causal --run runs/first --steps 200",
            "a model whose router forms the chunks by itself",
        ),
        CommandExample(f"dcdm export {model} exported", "a folder that transformers loads"),
        CommandExample("dcdm presets", "every model of the paper's table, and more"),
    ]
