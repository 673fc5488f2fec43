"""`dcdm sample`: prompts from the command line, a file or a pipe; text, JSON or events out."""

from __future__ import annotations

import json as encoder
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dcdm.commands.options import (
    DEBUG,
    AdapterOption,
    DeviceOption,
    DtypeOption,
    ModelIfAny,
    argument_text,
    at_least_one,
    can_ask,
    file_text,
    harmless,
    load_for,
    piped_text,
    print_json,
)
from dcdm.config import ConfigError

if TYPE_CHECKING:
    from dcdm.data.tokenizers import Tokenizer
    from dcdm.decoding.engine import Generation
    from dcdm.decoding.session import Event

EXAMPLES = (
    "dcdm sample",
    'dcdm sample --prompt "def area(self):" --lanes 8 --stream',
    'dcdm sample runs/first --prompt "def main(" --length 64',
    'dcdm sample runs/first --prompt "def [[6]](self):[[24]]return self.name" --commit position --stream',
    "dcdm sample runs/first --jsonl prompts.jsonl --json --temperature 0.7 --top-p 0.9",
)
EXAMPLE = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):"
"""What the default model continues when nothing is asked."""
EXAMPLE_LENGTH = 96
CAREFUL = 0.5
"""The temperature of the default model: a small one writes better if it stays with what it is surer of."""

PICTURES = (".svg", ".html")
DELIMITERS, DELIMITER_THRESHOLD = ("\n",), 0.3


def sample(
    model: ModelIfAny = None,
    adapter: AdapterOption = None,
    prompt: tuple[str, ...] = (),
    file: Path | None = None,
    jsonl: Path | None = None,
    field: str = "prompt",
    length: int | None = None,
    num: int = 1,
    window: int | None = None,
    routing: str = "auto",
    commit: str = "auto",
    lanes: int | None = None,
    drafts: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    delimiters: tuple[str, ...] = DELIMITERS,
    delimiter_threshold: float = DELIMITER_THRESHOLD,
    cache: Literal["auto", "exact", "frozen", "none"] = "auto",
    seed: int = 0,
    blanks: bool = True,
    stop_at_eos: bool = True,
    stream: bool = False,
    picture: Path | None = None,
    batch_size: int = 16,
    json: bool = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "fp32",
) -> None:
    """Complete prompts, or fill the blanks in them.

    In a prompt, [[8]] is a blank of 8 tokens. Without --prompt, --file or --jsonl the prompt is read from standard
    input, without its last line break. `dcdm sample` alone continues an example with the default model.

    Args:
        prompt: The text to continue (--prompt=-x if it begins with a dash); several are completed in one batch.
        file: A text file that is the prompt.
        jsonl: A file with one JSON object per line, each a prompt.
        field: The name of the prompt in those objects.
        length: New tokens after each prompt; by default the rest of the window, or none if there are blanks.
        num: Samples of each prompt.
        window: Positions of a canvas; by default the model's context length. Longer texts take several.
        routing: auto, or paper-chunk, paper-step, appendix-b, blocks:N, adablock where they fit the model.
        commit: auto, chunk, position, steps:N, threshold:P, entropy:H, factor:F, ancestral:N or first-hitting.
        lanes: For models that write in lanes: how many, so many tokens a forward; 1 is AR's order. By
            default 4, or the nearest smaller number that the model was trained with.
        drafts: For models with a draft head: how many tokens of each lane are guessed ahead and verified (default:
            as many as it was trained with); 0 writes one token of each lane a forward.
        temperature: 0 takes the most probable token, 1 draws as the model says (default: 1, or 0.5 where no model
            is named).
        top_k: Draw from the k most probable tokens.
        top_p: Draw from the most probable tokens that together reach this probability.
        delimiters: Where adablock may end a block: tokens of the tokenizer.
        delimiter_threshold: The confidence that such a token needs.
        cache: exact where it is exact; frozen is an approximation for the paper's routing.
        seed: Seed of the draws.
        blanks: Read [[8]] as a blank; --no-blanks takes prompts literally.
        stop_at_eos: End a text at the tokenizer's end-of-text token.
        stream: Show tokens as they are committed: live in a terminal, as JSON lines otherwise.
        picture: Draw how the first text was filled, chunk by chunk or in lanes: an SVG moves by itself, an HTML
            file is a page that replays it.
        batch_size: Prompts that are completed together.
        json: Print one JSON object per sample, statistics included.
    """
    from dcdm.decoding.config import adablock_of
    from dcdm.decoding.engine import generate
    from dcdm.shipped import folder_of

    prompts = _prompts(prompt, file, jsonl, field, has_model=model is not None)
    if temperature is None:
        temperature = 1.0 if model is not None else CAREFUL
    at_least_one(num=num, batch_size=batch_size)
    if picture is not None and picture.suffix not in PICTURES:
        raise ConfigError(f"--picture {picture}: its name must end in {' or '.join(PICTURES)}")
    prompts = [text for text in prompts for _ in range(num)]
    loaded, tokenizer = load_for(model, device, dtype, adapter)
    if prompts[0] == EXAMPLE and length is None:
        length = min(EXAMPLE_LENGTH, loaded.config.context_length - 1 - len(tokenizer.encode(EXAMPLE)))
    _warn_of_window(window, loaded.config.context_length)
    adablock = None
    if routing != "adablock" and (delimiters, delimiter_threshold) != (DELIMITERS, DELIMITER_THRESHOLD):
        raise ConfigError("--delimiters and --delimiter-threshold have no effect without --routing adablock")
    if routing == "adablock":
        ends = [text.replace("\\n", "\n").replace("\\t", "\t") for text in delimiters]
        adablock = adablock_of(loaded.config, tokenizer, ends, delimiter_threshold)
    with _Stream(tokenizer, prompts, stream, blanks) as shown:
        result = generate(
            loaded, prompts, tokenizer=tokenizer, max_new_tokens=length, window=window, routing=routing,
            commit=commit, lanes=lanes, drafts=drafts, temperature=temperature, top_k=top_k, top_p=top_p,
            cache=cache, seed=seed, eos_id=tokenizer.eos_id if stop_at_eos else -1, adablock=adablock,
            batch_size=batch_size, on_event=shown.show if stream else None, blanks=blanks,
        )  # fmt: skip
        shown.end(result.tokens[0].tolist())
    if json:
        for row in range(len(prompts)):
            print_json(_record(row, prompts[row], result))
    elif not stream or (sys.stdout.isatty() and len(prompts) > 1):
        _print(prompts, result, blanks)
    print(_costs(result), file=sys.stderr)
    if picture is not None:
        _draw(result, tokenizer, picture, folder_of(model).name)


def _prompts(
    prompt: tuple[str, ...], file: Path | None, jsonl: Path | None, field: str, has_model: bool
) -> list[str]:
    if sum((bool(prompt), file is not None, jsonl is not None)) > 1:
        raise ConfigError("--prompt, --file and --jsonl exclude each other")
    if prompt:
        return [argument_text(text) for text in prompt]
    if jsonl is not None:
        return _json_lines(jsonl, field)
    if file is not None:
        return [file_text("file", file)]
    if can_ask() and has_model:
        raise ConfigError("give --prompt TEXT, --file FILE or --jsonl FILE, or pipe a text into the command")
    piped = piped_text()
    return [piped if piped or has_model else EXAMPLE]


def _warn_of_window(window: int | None, trained: int) -> None:
    if window is not None and window > trained:
        print(
            f"dcdm: --window {window} is beyond the {trained} positions that the model was trained on; "
            "what it writes there may make less sense",
            file=sys.stderr,
        )


def _json_lines(path: Path, field: str) -> list[str]:
    prompts = []
    for number, line in enumerate(file_text("jsonl", path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = encoder.loads(line)[field]
        except (encoder.JSONDecodeError, KeyError, TypeError):
            raise ConfigError(
                f"{path}:{number} is not a JSON object with a {field!r}; --field names another"
            ) from None
        if not isinstance(value, str):
            raise ConfigError(f"{path}:{number}: {field!r} is not a text")
        prompts.append(value)
    if not prompts:
        raise ConfigError(f"--jsonl {path} holds no prompt")
    return prompts


def _record(row: int, prompt: str, result: Generation) -> dict[str, Any]:
    costs = result.statistics
    return {
        "prompt": prompt, "completion": result.texts[row], "finished": result.finished[row],
        "tokens": result.completions[row], "new_tokens": int(costs.new_tokens[row]),
        "forwards": int(costs.forwards[row]), "rounds": int(costs.rounds[row]),
        "computed": int(costs.computed[row]), "reused": int(costs.reused[row]),
        "reencoded": int(costs.reencoded[row]), "seconds_of_all": costs.seconds,
    }  # fmt: skip


def _print(prompts: list[str], result: Generation, blanks: bool) -> None:
    from dcdm.decoding.prompts import whole_text

    for row, (prompt, text) in enumerate(zip(prompts, result.texts, strict=True)):
        if len(prompts) > 1:
            print(f"--- {row + 1} of {len(prompts)} ({result.finished[row]})")
        whole = whole_text(prompt, text, blanks)
        print(harmless(whole) if sys.stdout.isatty() else whole)


def _draw(result: Generation, tokenizer: Tokenizer, picture: Path, model: str) -> None:
    """How the first text was filled: SVG moves, HTML has buttons."""
    from dcdm.files import write_whole
    from dcdm.viewing.filling import Written, filling_of, moving_picture
    from dcdm.viewing.page import many
    from dcdm.viewing.pages import replay_page

    filling = filling_of(result, tokenizer)
    picture.parent.mkdir(parents=True, exist_ok=True)
    tokens, forwards = int(result.statistics.new_tokens[0]), int(result.forwards[0])
    sentence = f"{model}: {tokens} tokens in {forwards} forwards."
    if picture.suffix == ".svg":
        lanes = max(filling.lanes, default=0)
        label = many(lanes, "lane") if lanes else many(max(filling.chunks), "chunk")
        write_whole(
            picture, moving_picture([Written(label, filling, result.statistics.seconds)], sentence).encode()
        )
    else:
        what = "Colours are lanes, numbers forwards" if filling.lanes else "Colours and numbers are chunks"
        page = replay_page(filling, "A text being written", f"{sentence} {what}; grey text was given.")
        write_whole(picture, page.encode())


def _costs(result: Generation) -> str:
    costs = result.statistics
    total = costs.summary()
    text = (
        f"{total['new_tokens']} tokens in {total['forwards']} forwards ({costs.tokens_per_forward:.2f} each), "
        f"{costs.seconds:.2f} s, {costs.tokens_per_second:.0f} tokens/s"
    )
    if not DEBUG.get():
        return text
    return (
        f"{text}; {total['computed']} positions computed, {total['reused']} from the cache, "
        f"{total['rounds']} routing rounds, {total['reencoded']} encoded again"
    )


class _Stream:
    """Shows events while they come: the canvas of the first row in a terminal, JSON lines elsewhere.

    Colours of the canvas are chunks, or lanes, whose newest tokens are reversed.
    """

    def __init__(self, tokenizer: Tokenizer, prompts: list[str], on: bool, blanks: bool) -> None:
        self.tokenizer, self.on = tokenizer, on
        self.live: Any = None
        self.known: dict[int, int] = {}
        self.colour: dict[int, int] = {}
        self.heads: set[int] = set()
        if on:
            from dcdm.decoding.prompts import with_blanks

            given = with_blanks(tokenizer, prompts[0]) if blanks else tokenizer.encode(prompts[0])
            self.known = dict(enumerate(given, start=1))

    def __enter__(self) -> _Stream:
        if self.on and sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(auto_refresh=False)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def end(self, tokens: list[int]) -> None:
        """Show the first text as it is now: what others had written behind its end is gone."""
        if self.live is not None:
            self.known = {at: token for at, token in enumerate(tokens) if at and token != self.tokenizer.pad_id}
            self.heads = set()
            self.live.update(self._canvas(), refresh=True)

    def show(self, event: Event) -> None:
        if self.live is None:
            text = [self.tokenizer.decode([token]) for token in event.tokens]
            lanes = {"lanes": event.lanes} if event.lanes else {}
            print_json(
                {**{name: value for name, value in vars(event).items() if name != "lanes"}, **lanes, "text": text}
            )
        elif event.row == 0:
            self.known.update(zip(event.positions, event.tokens, strict=True))
            groups = event.lanes or [event.chunk] * len(event.positions)
            self.colour.update(zip(event.positions, groups, strict=True))
            self.heads = set(event.positions) if event.lanes else set()
            self.live.update(self._canvas(), refresh=True)

    def _canvas(self) -> Any:
        from rich.text import Text

        from dcdm.viewing.palette import on_colour

        text = Text()
        for position in range(1, max(self.known, default=0) + 1):
            token = self.known.get(position, self.tokenizer.mask_id)
            shown = "░" if token == self.tokenizer.mask_id else harmless(self.tokenizer.decode([token]))
            style = on_colour(self.colour[position]) if position in self.colour else "dim"
            text.append(shown, style=f"bold reverse {style}" if position in self.heads else style)
        return text
