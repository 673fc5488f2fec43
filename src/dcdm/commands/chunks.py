"""`dcdm chunks`: which chunk every token of a text goes to, in the terminal, as JSON or as a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from dcdm.commands.options import (
    DeviceOption,
    DtypeOption,
    ModelIfAny,
    argument_text,
    can_ask,
    load_for,
    piped_text,
    print_json,
)
from dcdm.config import ConfigError
from dcdm.shipped import default, folder_of

if TYPE_CHECKING:
    from dcdm.data.tokenizers import Tokenizer
    from dcdm.model.transformer import Model
    from dcdm.viewing.chunks import TokenWindows

EXAMPLES = (
    "dcdm chunks",
    "dcdm chunks runs/first --corpus addresses --noise 0",
    'dcdm chunks "for i in range(10): print(i)"',
    'dcdm chunks runs/first "for i in range(10): print(i)"',
    'dcdm chunks runs/first "def area(self): return self.width * self.height" --html chunks.html',
)
EXAMPLE = (
    "The people of the United States have asked for peace, and for an army of 50,000 men to keep it. I have "
    "therefore to recommend to Congress that the President be given the power to act, and that the Treasury pay.\n"
)
"""What the default model divides when nothing is given."""


def chunks(
    model: ModelIfAny = None,
    text: Annotated[tuple[str, ...], Positional, arg(metavar="[TEXT]")] = (),
    html: Path | None = None,
    json: bool = False,
    noise: float | None = None,
    corpus: Annotated[tuple[str, ...], arg(metavar="SOURCE...")] = (),
    windows: int = 64,
    seed: int = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "fp32",
) -> None:
    """Show which chunk every token of a text goes to: in colour, with numbers where colour is off, or as a page.

    The text is given here or on standard input. A single argument with a space in it, if it is not a
    folder, is a text for the default model, which shows an example where nothing is given.

    Args:
        text: The text; without it, standard input.
        html: Write a self-contained page: scores of every token, sliders, mask, sizes.
        json: Print tokens, ids, scores and sizes as one JSON object.
        noise: Share of masked tokens, for the paper's routing, whose chunks depend on it (default 0.5).
        corpus: Tell what chunks hold, and what decides them, over held-out windows of these sources: what
            `dcdm data prepare` reads, or a folder that it wrote. Without a text their first window is shown.
        windows: How many windows of the corpus.
        seed: Seed of the masks.
    """
    from dcdm.viewing.chunks import view, window_from, window_of

    if model is not None and not text and " " in str(model) and not folder_of(model).exists():
        model, text = None, (str(model),)
    told = " ".join(text) if text else None
    given = None if corpus and told is None else _given_text(told, model is not None)
    model = Path(default(chunks=True)) if model is None else model
    loaded, tokenizer = load_for(model, device, dtype)
    if given is not None:
        shown, note = window_of(given, tokenizer, loaded.config.context_length)
    counted = held_out_windows(corpus, windows, loaded, tokenizer) if corpus else None
    if given is None and counted is not None:
        shown, note = window_from(counted.tokens[0].tolist(), tokenizer), f"The first of {counted.source}."
    chunked = view(loaded, shown, name=_name(model), noise=noise, seed=seed, corpus=counted, note=note)
    if html is not None:
        from dcdm.files import write_whole
        from dcdm.viewing.pages import chunks_page

        html.parent.mkdir(parents=True, exist_ok=True)
        write_whole(html, chunks_page(chunked).encode())
        print(f"{html}: written; open it in a browser", file=sys.stderr)
    if json:
        print_json(chunked.to_dict())
    elif html is None:
        from rich.console import Console

        from dcdm.viewing.terminal import show

        show(chunked, Console())


def _name(model: Path) -> str:
    """What to call a model: its folder, a checkpoint by its run and step."""
    model = model.resolve()
    return f"{model.parent.parent.name}, {model.name}" if model.parent.name == "checkpoints" else model.name


def _given_text(text: str | None, has_model: bool) -> str:
    if text is not None:
        return argument_text(text)
    if can_ask() and has_model:
        raise ConfigError("no text; give one as an argument or on standard input")
    piped = piped_text()
    if piped or has_model:
        return piped
    return EXAMPLE


def held_out_windows(sources: tuple[str, ...], windows: int, model: Model, tokenizer: Tokenizer) -> TokenWindows:
    """Held-out windows, evenly spread."""
    import torch

    from dcdm.data.prepare import prepare
    from dcdm.data.store import PreparedData
    from dcdm.progress import ConsoleProgress
    from dcdm.viewing.chunks import TokenWindows

    if windows < 1:
        raise ConfigError(f"--windows {windows}: at least 1 is needed")
    if len(sources) == 1 and (Path(sources[0]) / "manifest.json").exists():
        data = PreparedData.open(sources[0])
    else:
        with ConsoleProgress() as reporter:
            data = prepare(list(sources), tokenizer, reporter=reporter)
    if data.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ConfigError(f"--corpus {sources[0]} was prepared with another tokenizer than the model's")
    held_out = data.dataset("validation", model.config.context_length)
    count = min(windows, len(held_out))
    items = [held_out[number * len(held_out) // count] for number in range(count)]
    return TokenWindows(
        f"{count} held-out windows of {', '.join(sources)}",
        torch.stack([item["tokens"] for item in items]),
        torch.stack([item["prompt"] for item in items]),
        torch.tensor([item["index"] for item in items]),
        [tokenizer.pieces(item["tokens"].tolist()) for item in items],
    )
