"""`dcdm demo`: DCDM, BDLM and MDLM trained on English, chunks watched while they form, and a page of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dcdm.commands.chunks import held_out_windows
from dcdm.commands.options import at_least_one
from dcdm.config import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from dcdm.data.store import PreparedData
    from dcdm.data.tokenizers import Tokenizer
    from dcdm.model.transformer import Model
    from dcdm.viewing.chunks import ChunkView
    from dcdm.viewing.contents import Contents
    from dcdm.viewing.tables import Table

EXAMPLES = ("dcdm demo", "dcdm demo --steps 600 --folder runs/longer")

MODELS = {
    "dcdm": "DCDM, the paper's model: a router sends every token to one of 8 chunks",
    "bdlm": "BDLM, block diffusion: every 8 tokens in a row are a block",
    "mdlm": "MDLM, masked diffusion: all tokens at once",
}
"""What is trained, all alike: run folder, of the preset NAME-debug, and a sentence on it."""
TEXT = (
    "Fellow-citizens of the Senate and of the House of Representatives: I congratulate you on the peace and the "
    "prosperity of the United States. In the year 1862 the revenue of the Treasury was 51 millions of dollars, and "
    "the Army and the Navy of the Union were maintained at a cost of 39 millions."
)
"""What is shown again and again while chunks form."""
TOKENIZER, VIEWS, WINDOWS = "bpe:1024", 5, 32
LEGEND_OF_FIGURES = (
    "perplexity per token; ≤: upper bound; ±: standard error over documents; in brackets: of Monte-Carlo"
)
CAUTION = (
    "One seed, and minutes of training: errors over texts do not cover that. Bounds may be compared with bounds; "
    "the surrogate is the number that the paper reports of DCDM, and no bound."
)


def demo(
    steps: int = 140, seed: int = 0, folder: Path = Path("runs/demo"), data: tuple[str, ...] = ("addresses",)
) -> None:
    """Train the paper's model and its two baselines on English, and watch chunks form.

    A few minutes on two cores. Ctrl-C saves and stops; the same command resumes.

    Args:
        steps: Optimizer steps of each model.
        seed: Seed of the weights, the data order, the noise and the samples.
        folder: Where the three runs and chunks.html go.
        data: Text to train on: addresses comes with dcdm, the State of the Union addresses.
    """
    from rich.console import Console

    from dcdm.data.prepare import prepare
    from dcdm.files import write_whole
    from dcdm.io.load import load_model
    from dcdm.progress import ConsoleProgress
    from dcdm.viewing.pages import chunks_page

    at_least_one(steps=steps)
    console = Console(highlight=False)
    with ConsoleProgress() as reporter:
        prepared = prepare(list(data), TOKENIZER, reporter=reporter)
    for name, says in MODELS.items():
        console.print(f"\n[bold]{says}[/bold]")
        train(name, steps, seed, folder, data, prepared.tokenizer, console)

    console.print("\n[bold]What DCDM's chunks hold[/bold], by the tokens of held-out text that are typical of each")
    model, tokenizer = load_model(folder / "dcdm")
    held = what_chunks_hold(model, prepared)
    before = what_chunks_hold(untrained(folder / "dcdm", seed), prepared)
    typical_tokens(held).print()
    console.print(
        f"A frequent token goes to its usual chunk {held.constant or 0:.0%} of the time, where chance gives "
        f"{held.constant_by_chance or 0:.0%}. Before training, when weights are random and the router sees little "
        f"but the token itself, it was {before.constant or 0:.0%}."
    )

    figures = compare(folder, prepared)
    console.print(f"\n[bold]How well each predicts held-out text[/bold], after {steps} steps")
    figures.print(caption=LEGEND_OF_FIGURES)
    console.print(CAUTION, style="dim")

    place = folder / "chunks.html"
    write_whole(place, chunks_page(chunks_of(model, tokenizer)).encode())
    console.print(f"\n[bold]{place}[/bold] has every token's scores: open it in a browser. Then try")
    runs = " ".join(str(folder / name) for name in MODELS)
    for command in (
        f'dcdm chunks {folder / "dcdm"} "the people of the United States" --html chunks.html',
        f"dcdm eval ppl {runs} --data addresses",
        f"dcdm serve {runs}",
        "dcdm train --preset dcdm-small --run runs/small --data addresses",
    ):
        console.print(f"  {command}", markup=False, soft_wrap=True)


# --- the paper's model and its baselines -------------------------------------------------------------------------


def train(
    name: str, steps: int, seed: int, folder: Path, data: tuple[str, ...], tokenizer: Tokenizer, console: Console
) -> None:
    """Train one model into the folder, or resume it; of DCDM, the chunks of `TEXT` are shown while they form."""
    from dcdm.training.run import run_training
    from dcdm.viewing.terminal import show_tokens

    every = max(1, steps // VIEWS)
    changes = {
        "train.steps": steps, "train.warmup_steps": min(40, steps), "train.seed": seed, "data.sources": data,
        "data.tokenizer": TOKENIZER, "checkpoint_every": every, "keep_last": VIEWS + 2, "log_every": 20,
        "evaluate_every": every if name == "dcdm" else steps, "evaluate_first": name == "dcdm",
        "evaluate_sequences": 8, "evaluate_samples": 1, "tensorboard": False,
    }  # fmt: skip

    def shown(model: Model) -> None:
        console.print()
        show_tokens(chunks_of(model, tokenizer), console)

    try:
        watch = shown if name == "dcdm" else None
        code = run_training(f"{name}-debug", folder / name, changes=changes, watch=watch)
    except ConfigError as error:
        there = (folder / name / "settings.yaml").exists()
        raise ConfigError(f"{error}; or take another --folder" if there else str(error)) from error
    if code:
        sys.exit(code)


def chunks_of(model: Model, tokenizer: Tokenizer) -> ChunkView:
    """The chunks of `TEXT` with nothing masked."""
    from dcdm.viewing.chunks import view, window_of

    window, _ = window_of(TEXT, tokenizer, model.config.context_length)
    return view(model, window, name="DCDM", noise=0.0)


def what_chunks_hold(model: Model, prepared: PreparedData) -> Contents:
    """What the chunks of held-out text hold, with nothing masked."""
    from dcdm.viewing.chunks import held_over

    corpus = held_out_windows((str(prepared.folder),), WINDOWS, model, prepared.tokenizer)
    return held_over(model, corpus, [0.0]).frames[0][0]


def typical_tokens(held: Contents) -> Table:
    """A row for each chunk, with the tokens that it holds more often than others do."""
    from dcdm.viewing.tables import Table

    rows = [
        (k, f"{size / held.tokens:.0%}", "  ".join(repr(one.text)[1:-1].replace(" ", "·") for one in words))
        for k, (size, words) in enumerate(zip(held.sizes, held.words, strict=True), start=1)
    ]
    return Table(("chunk", "of all tokens", "typical tokens"), rows, ("typical tokens",))


def compare(folder: Path, prepared: PreparedData) -> Table:
    """What `dcdm eval ppl` says of held-out windows, in few columns."""
    from dcdm.evaluation.corpora import WindowSettings, read_corpora
    from dcdm.evaluation.perplexity import EstimatorSettings, evaluate_perplexity
    from dcdm.viewing.tables import Table, perplexity_table

    corpora = read_corpora([f"held-out={prepared.folder}"], "text", "validation")
    models = [str(folder / name) for name in MODELS]
    measured = evaluate_perplexity(
        models, corpora, ("auto", "surrogate"), EstimatorSettings(samples=4), WindowSettings(limit=WINDOWS)
    )
    whole = perplexity_table(measured)
    return Table(whole.columns[1:6], [row[1:6] for row in whole.rows], ("model",))


def untrained(folder: Path, seed: int) -> Model:
    """The model of a run before its first step."""
    from dcdm.kinds import build
    from dcdm.training.checkpoint_folder import SETTINGS
    from dcdm.training.settings import read

    return build(read(folder / SETTINGS).model, seed=seed)
