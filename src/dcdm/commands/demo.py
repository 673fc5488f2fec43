"""`dcdm demo`: the shipped models at work, two models trained here and compared, and a page about all of it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dcdm.commands.options import at_least_one, print_json
from dcdm.config import ConfigError
from dcdm.shipped import card_of, default

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from dcdm.data.tokenizers import Tokenizer
    from dcdm.model.transformer import Model
    from dcdm.viewing.chunks import ChunkView
    from dcdm.viewing.filling import Exercise, Written
    from dcdm.viewing.pages import ComparedEstimate

EXAMPLES = ("dcdm demo", "dcdm demo --no-train", "dcdm demo --steps 50 --folder runs/short")

WINDOWS = 64
TEMPERATURE = 0.5
MODELS = {
    "lanes": ("lanes-debug", "Lanes: trained on 1 to 16 lanes at once, whose loss is an exact likelihood"),
    "bdlm": (
        "bdlm-debug",
        "BDLM: blocks of 8 bytes in a row, trained with the noise levels that suit it best (0.3 to 0.8)",
    ),
}
"""The two models that are trained, as many parameters and steps each: run folder → preset, and a sentence on it."""
FIGURES = (
    ("exact, 16 passes", "−log p of 8 lanes, and of BDLM with one forward pass for each block of 8", 8, "chunk"),
    (
        "exact, 127 passes",
        "−log p of one token with each forward pass: 1 lane, and the surest token of a block",
        1,
        "position",
    ),
)
"""What is compared: name, meaning, lanes of the one, and how the other commits."""
COMMANDS = (
    ('dcdm sample --prompt "def main(" --stream', "a text of your own, written in lanes"),
    ('dcdm chunks "x = [i for i in range(9)]" --html chunks.html', "its chunks, round by round"),
    ("dcdm models", "what comes with dcdm, and how good it is"),
    ("dcdm serve", "the playground, and an API that OpenAI’s clients understand"),
    (
        "dcdm train --preset dcdm-debug-causal --run runs/first --steps 200",
        "a model of your own, whose router forms the chunks",
    ),
    ("dcdm presets", "every model of the paper's table, and more"),
)
"""What to try next, and what it gives."""


def demo(
    steps: int = 240,
    seed: int = 0,
    folder: Path = Path("runs/demo"),
    data: tuple[str, ...] = ("stdlib",),
    train: bool = True,
    fresh: bool = False,
    json: bool = False,
) -> None:
    """Watch the model that comes with dcdm fill in code, then train two small ones and compare them.

    The first screen takes seconds, all of it a few minutes on two cores. Ctrl-C saves and stops; the same command
    resumes.

    Args:
        steps: Optimizer steps of each model that is trained.
        seed: Seed of the weights, the data order, the noise and the samples.
        folder: Where the two runs, report.html and filling.svg go.
        data: Text to train on: stdlib is the source of this Python's standard library.
        train: Train and compare two models; --no-train ends after the first screen.
        fresh: Delete the two runs of an earlier demo in the folder and train again.
        json: Print the figures as one JSON object; all else goes to standard error.
    """
    from rich.console import Console

    from dcdm.files import write_whole
    from dcdm.viewing.filling import moving_picture

    console = Console(stderr=json, highlight=False)
    written = fill_exercises(console, seed)
    views = divide_a_text(console)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "filling.svg"
    lanes_and_ar = next(iter(written.values()))[:2]
    write_whole(picture, moving_picture(lanes_and_ar, "A small model fills blanks in code").encode())
    if train:
        at_least_one(steps=steps)
        if fresh:
            _delete_runs(folder)
        lines = train_and_compare(steps, seed, folder, data, console)
        place = folder / "report.html"
        write_whole(place, _page(folder, written, views, lines, steps, data).encode())
        result = {"figures": [asdict(line) for line in lines], "report": str(place)}
        console.print(f"\n[bold]{place}[/bold] has all this and more: open it in a browser.")
    else:
        result = {"picture": str(picture)}
        console.print(f"\n[bold]{picture}[/bold] is this as a picture that moves.")
    if json:
        print_json(result)
    console.print("[bold]dcdm serve[/bold] opens the playground. Then try")
    for command, _ in COMMANDS[:3]:
        console.print(f"  {command}", markup=False, soft_wrap=True)


# --- the shipped models at work ----------------------------------------------------------------------------------


def fill_exercises(console: Console, seed: int = 0) -> dict[str, list[Written]]:
    """Show the default model filling code in lanes beside AR's order; what was written, by what was asked."""
    from dcdm.decoding.engine import generate
    from dcdm.io.load import load_model
    from dcdm.viewing.filling import exercises_for
    from dcdm.viewing.terminal import show_written

    model, tokenizer = load_model(default())
    _say_card(default(), console)
    generate(model, "x", tokenizer=tokenizer, max_new_tokens=4)  # the first forward pass of a process is slow
    written = {}
    for exercise in exercises_for(tokenizer, model.config.context_length):
        texts = written[exercise.about] = write(model, tokenizer, exercise, seed)
        console.print(f"[bold]{exercise.about}[/bold], one model, two orders:")
        show_written(texts[:2], console)
        for more in texts[2:]:
            console.print(f"{more.label}: {more.sentence}\n")
    return written


def write(model: Model, tokenizer: Tokenizer, exercise: Exercise, seed: int = 0) -> list[Written]:
    """The exercise in the model's lanes and in AR's order, with draft tokens too where it has a draft head.

    The same weights and the same seed.
    """

    ahead = model.config.drafts
    orders = [(model.config.default_lanes, 0), (1, 0), *([(1, ahead)] if ahead else [])]
    return [_written(model, tokenizer, exercise, lanes, drafts, seed) for lanes, drafts in orders]


def _written(model: Model, tokenizer: Tokenizer, exercise: Exercise, lanes: int, drafts: int, seed: int) -> Written:
    import torch

    from dcdm.decoding.engine import generate
    from dcdm.likelihood.estimators import score
    from dcdm.viewing.filling import Written, filling_of

    ids, blank = exercise.original(tokenizer)
    original, given = torch.tensor([[tokenizer.bos_id, *ids]]), ~torch.tensor([[False, *blank]])
    done = generate(
        model, exercise.prompt(tokenizer), tokenizer=tokenizer, lanes=lanes, temperature=TEMPERATURE, seed=seed,
        eos_id=-1, drafts=drafts,
    )  # fmt: skip
    order = f"{lanes} lanes" if lanes > 1 else "AR’s order (1 lane)"
    return Written(
        label=f"{order}, {drafts} draft tokens" if drafts else order,
        filling=filling_of(done, tokenizer),
        seconds=done.statistics.seconds,
        nats=score(model, original, "exact", prompt=given, lanes=lanes).per_token,
    )


def divide_a_text(console: Console) -> list[ChunkView]:
    """Show one text as the shipped models divide it: with draft tokens, where there are any, and into chunks."""
    from dcdm.io.load import load_model
    from dcdm.viewing.chunks import view, window_of
    from dcdm.viewing.filling import exercises_for
    from dcdm.viewing.terminal import show_text

    names = dict.fromkeys([default(), default(chunks=True)])
    loaded = {name: load_model(name) for name in names}
    texts = [exercises_for(tokenizer, model.config.context_length)[0].text for model, tokenizer in loaded.values()]
    views = []
    for name, (model, tokenizer) in loaded.items():
        window, _ = window_of(min(texts, key=len), tokenizer, model.config.context_length)
        views.append(view(model, window, name=name))
        if model.config.kind == "dcdm":
            _say_card(name, console)
            console.print("[bold]The chunks that it forms from this text[/bold], in the order of filling:")
            show_text(_all_known(views[-1]), console)
        if model.config.drafts:
            views.append(view(model, window, name=f"{name}, with drafts", lanes=1, drafts=model.config.drafts))
            console.print("[bold]What one forward pass brings in AR’s order with drafts[/bold], along a text:")
            show_text(_all_known(views[-1]), console)
            console.print()
    return views


def _all_known(view: ChunkView) -> ChunkView:
    """The view with nothing marked as MASK: here one looks at chunks, not at what a router knew."""
    frame = view.frame
    return replace(view, frames=[replace(frame, hidden=[False] * len(frame.hidden))], shown=0)


def _say_card(name: str, console: Console) -> None:
    card = card_of(name)
    assert card is not None
    console.print(f"[bold]{name}[/bold]: {card.sentence}\n")


# --- training and comparing two models ---------------------------------------------------------------------------


def train_and_compare(
    steps: int, seed: int, folder: Path, data: tuple[str, ...], console: Console
) -> list[ComparedEstimate]:
    """Train both models into the folder, or resume them, and compare them on held-out text."""
    from dcdm.io.load import load_model
    from dcdm.training.run import run_training

    changes = {
        "train.steps": steps, "train.warmup_steps": min(40, steps), "train.seed": seed,
        "data.sources": data, "evaluate_every": steps, "evaluate_sequences": 16, "checkpoint_every": 50,
        "log_every": 25, "tensorboard": False,
    }  # fmt: skip
    console.print("\n[bold]Now two models from nothing[/bold], trained here:")
    for name, (preset, says) in MODELS.items():
        console.print(f"[bold]{name}[/bold]: {says}")
        try:
            code = run_training(preset, folder / name, changes=changes)
        except ConfigError as error:
            there = (folder / name / "settings.yaml").exists()
            raise ConfigError(f"{error}; --fresh starts again" if there else str(error)) from error
        if code:
            sys.exit(code)
    (lanes, tokenizer), (bdlm, _) = (load_model(folder / name) for name in MODELS)
    lines = compare(lanes, bdlm, held_out(data, tokenizer, lanes.config.context_length))
    show_comparison(lines, console)
    return lines


def _delete_runs(folder: Path) -> None:
    """Remove the runs of an earlier demo, and nothing else."""
    for name in MODELS:
        if (folder / name / "settings.yaml").exists():
            shutil.rmtree(folder / name)


def held_out(data: tuple[str, ...], tokenizer: Tokenizer, length: int, count: int = WINDOWS) -> Tensor:
    """Windows (N, L) of files that were not trained on, evenly spread over them."""
    import torch

    from dcdm.data.prepare import prepare

    windows = prepare(list(data), tokenizer).dataset("validation", length)
    places = torch.linspace(0, len(windows) - 1, min(count, len(windows))).long().tolist()
    return torch.stack([windows[place]["tokens"] for place in places])


def compare(lanes: Model, bdlm: Model, windows: Tensor) -> list[ComparedEstimate]:
    """Both models on the same windows, exactly, by decoders that take the same number of forward passes."""
    from dcdm.likelihood.estimators import score
    from dcdm.likelihood.statistics import mean_and_stderr
    from dcdm.viewing.pages import ComparedEstimate

    lines = []
    for name, meaning, number, commit in FIGURES:
        ours = score(lanes, windows, "exact", lanes=number)
        theirs = score(bdlm, windows, "trajectory", commit=commit, batch_size=len(windows))
        counts = ours.tokens.tolist()
        one, other, apart = (
            mean_and_stderr(list(zip(nats.tolist(), counts, strict=True)))
            for nats in (ours.nats, theirs.nats, ours.nats - theirs.nats)
        )
        lines.append(ComparedEstimate(name, meaning, one, other, apart, windows=len(windows)))
    return lines


def show_comparison(lines: Sequence[ComparedEstimate], console: Console) -> None:
    """The table, and what it means."""
    from rich.table import Table

    from dcdm.viewing.pages import CAUTION, COLUMNS

    title = f"nats per byte, {lines[0].windows} held-out windows; lower is better"
    table = Table(title=title, title_justify="left")
    for name in ("", *COLUMNS):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for line in lines:
        table.add_row(line.name, *line.cells)
    console.print(table)
    for line in lines:
        console.print(f"{line.name}: {line.meaning}.", style="dim")
    console.print("±: standard error over windows; that of the difference is of window by window.", style="dim")
    for line in lines:
        console.print(line.verdict)
    console.print(f"{CAUTION}\n", style="dim")


def _page(
    folder: Path, written: dict[str, list[Written]], views: list[ChunkView], lines: list[ComparedEstimate],
    steps: int, data: tuple[str, ...],
) -> str:  # fmt: skip
    from dcdm.kinds import parameter_counts
    from dcdm.presets import preset
    from dcdm.training.metrics import read_rows
    from dcdm.viewing.pages import COLUMNS, DemoReport, demo_page
    from dcdm.viewing.plots import Curve, averaged

    size = parameter_counts(preset(MODELS["lanes"][0]))[0]
    corpus = ", ".join("Python’s standard library" if source == "stdlib" else source for source in data)
    curves = []
    for called, name in zip(COLUMNS, MODELS, strict=False):
        losses = [(row["step"], row["nll"]) for row in read_rows(folder / name / "metrics.jsonl") if "nll" in row]
        curves.append(Curve(called, averaged(losses)))
    report = DemoReport(
        cards=[card for view in views if (card := card_of(view.model)) is not None],
        views=views,
        written=written,
        summary=f"{size:,} parameters each, {steps} steps on {corpus}, byte by byte",
        recipes=[f"{says}." for _, says in MODELS.values()],
        lines=lines,
        curves=curves,
        commands=COMMANDS,
    )
    return demo_page(report)
