"""`dcdm demo`: the shipped models at work, two models trained here and compared, and a page about all of it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcdm.commands.options import at_least_one, print_json
from dcdm.config import ConfigError
from dcdm.shipped import card_of, default

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from dcdm.data.tokenizers import Tokenizer
    from dcdm.likelihood.estimators import Score
    from dcdm.model.transformer import Model
    from dcdm.viewing.chunks import ChunkView, Written
    from dcdm.viewing.demo_report import CommandExample, ComparedEstimate, DemoReport
    from dcdm.viewing.exercises import Exercise

EXAMPLES = ("dcdm demo", "dcdm demo --no-train", "dcdm demo --steps 50 --folder runs/short")

WINDOWS = 64
TEMPERATURE = 0.5


# --- the shipped models at work ----------------------------------------------------------------------------------


def write(model: Model, tokenizer: Tokenizer, exercise: Exercise, seed: int = 0) -> list[Written]:
    """The exercise in the model's lanes and in AR's order, with guesses ahead too where it has a draft head.

    The same weights and the same seed.
    """
    from dcdm.model.routing import default_lanes

    ahead = model.config.drafts
    orders = [(default_lanes(model.config), 0), (1, 0), *([(1, ahead)] if ahead else [])]
    return [_written(model, tokenizer, exercise, lanes, drafts, seed) for lanes, drafts in orders]


def _written(model: Model, tokenizer: Tokenizer, exercise: Exercise, lanes: int, drafts: int, seed: int) -> Written:
    import torch

    from dcdm.decoding.engine import generate
    from dcdm.likelihood.estimators import score
    from dcdm.viewing.chunks import Written, filling_of

    ids, blank = exercise.original(tokenizer)
    original, given = torch.tensor([[tokenizer.bos_id, *ids]]), ~torch.tensor([[False, *blank]])
    done = generate(
        model, exercise.prompt(tokenizer), tokenizer=tokenizer, lanes=lanes, temperature=TEMPERATURE, seed=seed,
        eos_id=-1, drafts=drafts,
    )  # fmt: skip
    order = f"{lanes} lanes" if lanes > 1 else "AR’s order (1 lane)"
    return Written(
        label=f"{order}, {drafts} tokens guessed ahead" if drafts else order,
        filling=filling_of(done, tokenizer),
        seconds=done.statistics.seconds,
        nats=score(model, original, "exact", prompt=given, lanes=lanes).per_token,
    )


@dataclass(frozen=True)
class FirstScreen:
    """What the shipped models did."""

    written: dict[str, list[Written]]
    """By what was asked: in lanes, in AR's order, and perhaps with guesses ahead."""
    views: dict[str, ChunkView]
    """The same text as each model divides it."""


def first_screen(console: Console, seed: int = 0) -> FirstScreen:
    """Show the shipped models filling code in lanes beside AR's order, and the chunks of a text."""
    from dcdm.decoding.engine import generate
    from dcdm.io.load import load_model
    from dcdm.viewing.chunks import view, window_of
    from dcdm.viewing.exercises import exercises_for
    from dcdm.viewing.terminal import show_text, show_written

    lanes, chunks = default(), default(chunks=True)
    model, tokenizer = load_model(lanes)
    _say_card(lanes, console)
    generate(model, "x", tokenizer=tokenizer, max_new_tokens=4)  # the first forward of a process is slow
    written = {}
    exercises = exercises_for(tokenizer, model.config.context_length)
    for exercise in exercises:
        written[exercise.about] = write(model, tokenizer, exercise, seed)
        console.print(f"[bold]{exercise.about}[/bold], one model, two orders:", highlight=False)
        show_written(written[exercise.about][:2], console)
        for more in written[exercise.about][2:]:
            console.print(f"{more.label}: {more.sentence}\n", highlight=False)
    loaded = {lanes: (model, tokenizer), chunks: load_model(chunks)}
    texts = [exercises_for(words, one.config.context_length)[0].text for one, words in loaded.values()]
    views = {}
    for name, (one, words) in loaded.items():
        window, _ = window_of(min(texts, key=len), words, one.config.context_length)
        views[name] = view(one, window, name=name)
        if one.config.drafts:
            ahead = f"{name}, guessing ahead"
            views[ahead] = view(one, window, name=ahead, lanes=1, drafts=one.config.drafts)
            console.print(
                "[bold]What one forward brings in AR’s order when it guesses ahead[/bold], along a text:",
                highlight=False,
            )
            show_text(_all_known(views[ahead]), console)
            console.print()
    if chunks != lanes:
        _say_card(chunks, console)
        console.print(
            "[bold]The chunks that it forms from this text[/bold], in the order of filling:", highlight=False
        )
        show_text(_all_known(views[chunks]), console)
    return FirstScreen(written, views)


def _all_known(view: ChunkView) -> ChunkView:
    """The view with nothing marked as MASK: here one looks at chunks, not at what a router knew."""
    frame = view.frame
    return replace(view, frames=[replace(frame, hidden=[False] * len(frame.hidden))], shown=0)


def _say_card(name: str, console: Console) -> None:
    card = card_of(name)
    assert card is not None
    console.print(f"[bold]{name}[/bold]: {card.sentence}\n", highlight=False)


# --- the command -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A model that the demo trains: what it is called, its preset, and what is changed in it."""

    name: str
    preset: str
    says: str
    """How it writes and how it is trained, for readers."""
    changes: Mapping[str, Any] = field(default_factory=dict)


def recipes() -> tuple[Recipe, Recipe]:
    """The two models: as many parameters, as many steps, as many forwards for a window."""
    lanes = Recipe(
        "lanes", "lanes-debug",
        "Lanes: trained on 1 to 16 lanes at once, whose loss is an exact likelihood",
    )  # fmt: skip
    bdlm = Recipe(
        "bdlm", "bdlm-debug",
        "BDLM: blocks of 8 bytes in a row, trained with the noise levels that suit it best (0.3 to 0.8)",
    )  # fmt: skip
    return lanes, bdlm


FIGURES = (
    ("exact, 16 forwards", "−log p of 8 lanes, and of BDLM with one forward for each block of 8", 8, "chunk"),
    (
        "exact, 127 forwards",
        "−log p of one token with each forward: 1 lane, and the surest token of a block",
        1,
        "position",
    ),
)
"""What is compared: name, meaning, lanes of the one, and how the other commits."""


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
    from dcdm.viewing.demo_report import demo_page
    from dcdm.viewing.motion import moving_picture

    console = Console(stderr=json)
    shown = first_screen(console, seed)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "filling.svg"
    lanes_and_ar = next(iter(shown.written.values()))[:2]
    write_whole(picture, moving_picture(lanes_and_ar, "A small model fills blanks in code").encode())
    if not train:
        if json:
            print_json({"picture": str(picture)})
        console.print(f"\n[bold]{picture}[/bold] is this as a picture that moves.", highlight=False)
        _say_next(_commands()[:3], console)
        return
    at_least_one(steps=steps)
    if fresh:
        _delete_runs(folder)
    lines = _train_and_compare(steps, seed, folder, data, console)
    report = _report(folder, shown, lines, steps, data)
    place = folder / "report.html"
    write_whole(place, demo_page(report).encode())
    if json:
        print_json({"figures": [line.to_dict() for line in lines], "report": str(place)})
    console.print(f"\n[bold]{place}[/bold] has all this and more: open it in a browser.", highlight=False)
    _say_next(report.commands[:3], console)


def _say_next(commands: Sequence[CommandExample], console: Console) -> None:
    console.print("[bold]dcdm serve[/bold] opens the playground. Then try", highlight=False)
    for command in commands:
        console.print(f"  {command.text}", markup=False, highlight=False, soft_wrap=True)


# --- training ----------------------------------------------------------------------------------------------------


def _train_and_compare(
    steps: int, seed: int, folder: Path, data: tuple[str, ...], console: Console
) -> list[ComparedEstimate]:
    from dcdm.io.load import load_model

    console.print("\n[bold]Now two models from nothing[/bold], trained here:", highlight=False)
    for recipe in recipes():
        console.print(f"[bold]{recipe.name}[/bold]: {recipe.says}", highlight=False)
        if code := _train(recipe, folder / recipe.name, steps, seed, data):
            sys.exit(code)
    lanes, bdlm = (load_model(folder / recipe.name) for recipe in recipes())
    windows = held_out(data, lanes[1], lanes[0].config.context_length)
    lines = compare(lanes[0], bdlm[0], windows)
    show_comparison(lines, console)
    return lines


def _train(recipe: Recipe, folder: Path, steps: int, seed: int, data: tuple[str, ...]) -> int:
    from dcdm.training.run import run_training

    changes = {
        "train.steps": steps, "train.warmup_steps": min(40, steps), "train.seed": seed,
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


def compare(lanes: Model, bdlm: Model, windows: Tensor) -> list[ComparedEstimate]:
    """Both models on the same windows, exactly, by decoders that take the same number of forwards."""
    from dcdm.likelihood.estimators import score
    from dcdm.likelihood.statistics import mean_and_stderr
    from dcdm.viewing.demo_report import ComparedEstimate

    lines = []
    for name, meaning, number, commit in FIGURES:
        ours = _rows(score(lanes, windows, "exact", lanes=number))
        theirs = _rows(score(bdlm, windows, "trajectory", commit=commit, batch_size=len(windows)))
        apart = [(a - b, n) for (a, n), (b, _) in zip(ours, theirs, strict=True)]
        means = [mean_and_stderr(rows) for rows in (ours, theirs, apart)]
        lines.append(ComparedEstimate(name, meaning, means[0], means[1], means[2], windows=len(windows)))
    return lines


def _rows(scores: Score) -> list[tuple[float, int]]:
    return list(zip(scores.nats.tolist(), scores.tokens.tolist(), strict=True))


def show_comparison(lines: list[ComparedEstimate], console: Console) -> None:
    """The table, and what it means."""
    from rich.table import Table

    from dcdm.viewing.demo_report import CAUTION, COLUMNS

    title = f"nats per byte, {lines[0].windows} held-out windows; lower is better"
    table = Table(title=title, title_justify="left")
    for name in ("", *COLUMNS):
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


# --- the report --------------------------------------------------------------------------------------------------


def _report(
    folder: Path, shown: FirstScreen, lines: list[ComparedEstimate], steps: int, data: tuple[str, ...]
) -> DemoReport:
    from dcdm.model.transformer import parameter_counts
    from dcdm.presets import preset
    from dcdm.viewing.demo_report import Curve, DemoReport

    size = parameter_counts(preset(recipes()[0].preset))[0]
    cards = [card for name in shown.views if (card := card_of(name)) is not None]
    return DemoReport(
        cards=cards,
        views=shown.views,
        written=shown.written,
        summary=f"{size:,} parameters each, {steps} steps on {_corpus(data)}, byte by byte",
        recipes=[recipe.says for recipe in recipes()],
        lines=lines,
        curves=[
            Curve(name, _losses(folder / r.name)) for name, r in zip(("Lanes", "BDLM"), recipes(), strict=True)
        ],
        commands=_commands(),
    )


def _corpus(data: tuple[str, ...]) -> str:
    return ", ".join("Python’s standard library" if source == "stdlib" else source for source in data)


def _losses(run: Path) -> list[float]:
    """Training loss of every step, in nats per byte."""
    from dcdm.training.metrics import read_rows

    return [row["nll"] for row in read_rows(run / "metrics.jsonl") if isinstance(row.get("nll"), float)]


def _commands() -> list[CommandExample]:
    from dcdm.viewing.demo_report import CommandExample

    return [
        CommandExample('dcdm sample --prompt "def main(" --stream', "a text of your own, written in lanes"),
        CommandExample('dcdm chunks "x = [i for i in range(9)]" --html chunks.html', "its chunks, round by round"),
        CommandExample("dcdm models", "what comes with dcdm, and how good it is"),
        CommandExample("dcdm serve", "the playground, and an API that OpenAI’s clients understand"),
        CommandExample(
            "dcdm train --preset dcdm-debug-causal --run runs/first --steps 200",
            "a model of your own, whose router forms the chunks",
        ),
        CommandExample("dcdm presets", "every model of the paper's table, and more"),
    ]
