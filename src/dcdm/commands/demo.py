"""`dcdm demo`: the shipped models at work, two models trained here and compared, and a page about all of it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcdm.commands.options import at_least_one
from dcdm.config import ConfigError, many
from dcdm.shipped import Card, card_of, default

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from dcdm.data.tokenizers import Tokenizer
    from dcdm.model.transformer import Model
    from dcdm.viewing.chunks import ChunkView
    from dcdm.viewing.filling import Exercise, Written
    from dcdm.viewing.tables import Table

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
CAUTION = (
    "One seed each, a few minutes of training, each model with an objective of its own: errors over windows do not "
    "cover any of that."
)
COLUMNS = ("Lanes", "BDLM", "Lanes − BDLM")


def demo(
    steps: int = 240,
    seed: int = 0,
    folder: Path = Path("runs/demo"),
    data: tuple[str, ...] = ("stdlib",),
    train: bool = True,
) -> None:
    """Watch the model that comes with dcdm fill in code, then train two small ones and compare them.

    The first screen takes seconds, all of it a few minutes on two cores. Ctrl-C saves and stops; the same command
    resumes.

    Args:
        steps: Optimizer steps of each model that is trained.
        seed: Seed of the weights, the data order, the noise and the samples.
        folder: Where the two runs and report.html go.
        data: Text to train on: stdlib is the source of this Python's standard library.
        train: Train and compare two models; --no-train ends after the first screen.
    """
    from rich.console import Console

    from dcdm.files import write_whole

    at_least_one(steps=steps)
    console = Console(highlight=False)
    written = fill_exercises(console, seed)
    views = divide_a_text(console)
    if train:
        lines = train_and_compare(steps, seed, folder, data, console)
        place = folder / "report.html"
        write_whole(place, demo_page(folder, written, views, lines, steps, data).encode())
        console.print(f"\n[bold]{place}[/bold] has all this and more: open it in a browser.")
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
        show_written(texts, console)
    return written


def write(model: Model, tokenizer: Tokenizer, exercise: Exercise, seed: int = 0) -> list[Written]:
    """The exercise in the model's lanes and in AR's order, with the same weights and the same seed."""
    import torch

    from dcdm.decoding.engine import generate
    from dcdm.likelihood.estimators import score
    from dcdm.viewing.filling import Written, filling_of

    ids, blank = exercise.original(tokenizer)
    original, given = torch.tensor([[tokenizer.bos_id, *ids]]), ~torch.tensor([[False, *blank]])
    texts = []
    for lanes in (model.config.default_lanes, 1):
        done = generate(
            model, exercise.prompt(tokenizer), tokenizer=tokenizer, lanes=lanes, temperature=TEMPERATURE, seed=seed,
            eos_id=-1, drafts=0,
        )  # fmt: skip
        label = f"{lanes} lanes" if lanes > 1 else "AR’s order (1 lane)"
        nats = score(model, original, "exact", prompt=given, lanes=lanes).per_token
        texts.append(Written(label, filling_of(done, tokenizer), done.statistics.seconds, nats))
    return texts


def divide_a_text(console: Console) -> list[ChunkView]:
    """One text as the shipped models divide it, into lanes and into chunks; the chunks are shown."""
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
            frame = views[-1].frame  # with nothing marked as MASK: one looks at chunks, not at what a router knew
            known = replace(frame, hidden=[False] * len(frame.hidden))
            show_text(replace(views[-1], frames=[known], shown=0), console)
    return views


def _say_card(name: str, console: Console) -> None:
    card = card_of(name)
    assert card is not None
    console.print(f"[bold]{name}[/bold]: {card.sentence}\n")


# --- training and comparing two models ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparedEstimate:
    """A likelihood of both models, each with its standard error, in nats per byte."""

    name: str
    meaning: str
    lanes: tuple[float, float]
    bdlm: tuple[float, float]
    difference: tuple[float, float]
    """Lanes − BDLM, window by window."""
    windows: int

    @property
    def cells(self) -> tuple[str, str, str]:
        return with_error(self.lanes), with_error(self.bdlm), with_error(self.difference, sign=True)

    @property
    def verdict(self) -> str:
        """What the difference means, in one sentence."""
        mean, error = self.difference
        if not abs(mean) > 2 * error:
            return f"By the {self.name} figure the two models do not differ by more than chance explains."
        better, worse = ("lanes do", "BDLM") if mean < 0 else ("BDLM does", "lanes")
        return (
            f"By the {self.name} figure {better} better: a byte of held-out text is "
            f"{math.exp(abs(mean)):.2f} times as probable as under {worse} (geometric mean)."
        )


def with_error(value: tuple[float, float], sign: bool = False) -> str:
    """Mean ± standard error."""
    mean, error = value
    return f"{mean:{'+' if sign else ''}.3f} ± {error:.3f}".replace("-", "−")


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
            raise ConfigError(f"{error}; or take another --folder" if there else str(error)) from error
        if code:
            sys.exit(code)
    (lanes, tokenizer), (bdlm, _) = (load_model(folder / name) for name in MODELS)
    lines = compare(lanes, bdlm, held_out(data, tokenizer, lanes.config.context_length))
    show_comparison(lines, console)
    return lines


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


def comparison_table(lines: Sequence[ComparedEstimate]) -> Table:
    from dcdm.viewing.tables import Table

    return Table(("", *COLUMNS), [(line.name, *line.cells) for line in lines], ("",))


def show_comparison(lines: Sequence[ComparedEstimate], console: Console) -> None:
    """The table, and what it means."""
    console.print(f"\nnats per byte, {lines[0].windows} held-out windows; lower is better")
    comparison_table(lines).print()
    for line in lines:
        console.print(f"{line.name}: {line.meaning}.", style="dim")
    console.print("±: standard error over windows; that of the difference is of window by window.", style="dim")
    for line in lines:
        console.print(line.verdict)
    console.print(f"{CAUTION}\n", style="dim")


# --- the page ----------------------------------------------------------------------------------------------------


def demo_page(
    folder: Path, written: Mapping[str, Sequence[Written]], views: Sequence[ChunkView],
    lines: Sequence[ComparedEstimate], steps: int, data: tuple[str, ...],
) -> str:  # fmt: skip
    """All of the demo as one self-contained HTML file."""
    from dcdm.kinds import parameter_counts
    from dcdm.presets import preset
    from dcdm.training.metrics import read_rows
    from dcdm.viewing.pages import Curve, averaged, chart, escape, items, page

    replays = {f"written-{number}": texts for number, texts in enumerate(written.values(), start=1)}
    fillings = {name: [{**asdict(t.filling), "label": t.label} for t in texts] for name, texts in replays.items()}
    cards = [card for view in views if (card := card_of(view.model)) is not None]
    size = parameter_counts(preset(MODELS["lanes"][0]))[0]
    corpus = ", ".join("Python’s standard library" if source == "stdlib" else source for source in data)
    curves = []
    for column, name in zip(COLUMNS, MODELS, strict=False):
        losses = [(row["step"], row["nll"]) for row in read_rows(folder / name / "metrics.jsonl") if "nll" in row]
        curves.append(Curve(column, averaged(losses)))
    return page(
        "demo", "DCDM demo", {"fillings": {"viewer": [_viewed(view) for view in views], **fillings}},
        models=items([f"{card.name}: {card.sentence}" for card in cards]),
        written="".join(_exercise(*asked) for asked in zip(replays, written, replays.values(), strict=True)),
        shipped="".join(_shipped(card) for card in cards),
        summary=escape(f"{size:,} parameters each, {steps} steps on {corpus}, byte by byte"),
        recipes=items([f"{says}." for _, says in MODELS.values()]),
        figures=comparison_table(lines).to_html(),
        windows=lines[0].windows,
        meanings=items([f"{line.name}: {line.meaning}." for line in lines]),
        verdicts="".join(f"<p><strong>{escape(line.verdict)}</strong></p>" for line in lines),
        caution=escape(CAUTION),
        curves=chart(curves, across="step", up="nats per byte"),
        commands="".join(
            f"<dt><code>{escape(command)}</code></dt><dd>{escape(gives)}</dd>" for command, gives in COMMANDS
        ),
    )  # fmt: skip


def _exercise(name: str, about: str, texts: Sequence[Written]) -> str:
    from dcdm.viewing.pages import items, paragraph, section

    what = (
        "Grey text was given. One set of weights, one seed, different orders of writing; the replays move forward "
        "pass by forward pass."
    )
    told = items([f"{text.label}: {text.sentence}." for text in texts])
    inner = f'{paragraph(what)}<div id="{name}"></div><ul class="small">{told}</ul>'
    return section(f"{about}: lanes beside AR’s order", inner, wide=True)


def _shipped(card: Card) -> str:
    """The figures of a card as a table."""
    from dcdm.viewing.pages import escape, grid

    rows = [
        [one.lanes or "–", one.drafts or "–", f"{one.forwards_per_window:g}" if one.forwards_per_window else "–",
         f"{one.nats_per_token:.3f}", f"{one.nats_per_byte:.3f}", one.estimator]
        for one in card.figures
    ]  # fmt: skip
    header = ["lanes", "drafts", "forward passes", "nats/token", "nats/byte", "figure"]
    return f"<div><h3>{escape(card.name)}</h3>{grid(header, rows)}</div>"


def _viewed(view: ChunkView) -> dict[str, Any]:
    """A text that is known, as its model would fill it, with the scores by which it was divided."""
    from dcdm.viewing.filling import as_filling
    from dcdm.viewing.pages import page_data

    data, filling = page_data(view), as_filling(view)
    places = many(view.num_lanes, "lane") if view.lanes else many(view.num_chunks, "chunk")
    passes = many(len(filling.steps), "forward pass", "forward passes")
    return {
        **asdict(filling), "label": f"{view.model}: {places}, {passes}", "rule": view.rule,
        "scores": data["frames"][view.shown]["scores"], "bias": data["bias"],
    }  # fmt: skip
