"""`dcdm.generate`: prompts in, completed text out, for every kind."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dcdm.config import ConfigError, whole_number
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.batch import write
from dcdm.decoding.config import DecodingConfig
from dcdm.decoding.text import COSTS, BatchRow, Ended, Event
from dcdm.model.kernels import prepare
from dcdm.model.transformer import Model

MOST_BLANK = 1e7
BLANK = re.compile(r"\[\[(\d+)\]\]")
EMPTY = re.compile(r"\[\[0+\]\]")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass
class Statistics:
    """What a generation cost. Tensors are (B,)."""

    forwards: Tensor
    """Passes through all blocks, cache writes included."""
    rounds: Tensor
    """Routing passes through block 0."""
    computed: Tensor
    """Positions that went through all blocks, summed over the forward passes."""
    reused: Tensor
    """Positions read from the cache instead, summed over the forward passes."""
    reencoded: Tensor
    """Positions of earlier text that later windows had to encode again."""
    new_tokens: Tensor
    """Tokens that the model wrote and that stayed, EOS included; neither prompts nor what lay behind an EOS."""
    prefix: Tensor
    """Positions of the prompt that an earlier text with the same beginning had encoded (on a server)."""
    seconds: float = 0.0

    @classmethod
    def of(cls, costs: Sequence[dict[str, int]]) -> Statistics:
        """From the costs of each row."""
        columns = {name: torch.tensor([row[name] for row in costs]) for name in COSTS}
        return cls(**columns)  # type: ignore[arg-type]

    @property
    def tokens_per_forward(self) -> float:
        return float(self.new_tokens.sum() / self.forwards.sum().clamp(min=1))

    @property
    def tokens_per_second(self) -> float:
        return float(self.new_tokens.sum()) / max(self.seconds, 1e-9)

    def summary(self) -> dict[str, float]:
        """Totals over the rows, for printing."""
        totals: dict[str, float] = {name: int(getattr(self, name).sum()) for name in COSTS}
        per_token = self.seconds / max(1, totals["new_tokens"])
        more = {
            "seconds": self.seconds,
            "seconds_per_token": per_token,
            "tokens_per_forward": self.tokens_per_forward,
        }
        return totals | more


@dataclass
class Generation:
    tokens: Tensor
    """(B, L): whole rows, BOS first, PAD behind the shorter ones; MASK where a cancelled row was not filled."""
    completions: list[list[int]]
    """What follows each prompt, without EOS; for a prompt with blanks its own text with the blanks filled."""
    finished: list[str]
    """Why each row ended: "eos", "length", "stop" or "cancelled"."""
    statistics: Statistics
    history: list[Event] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """The completions as text, if there was a tokenizer."""

    @property
    def forwards(self) -> Tensor:
        """(B,)."""
        return self.statistics.forwards


@torch.no_grad()
def generate(
    model: Model,
    prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor,
    *,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int | Sequence[int | None] | None = None,
    window: int | None = None,
    overlap: int | None = None,
    decoding: DecodingConfig | None = None,
    seed: int | Sequence[int] = 0,
    index: Sequence[int] | Tensor | None = None,
    eos_id: int | None = None,
    blanks: bool = True,
    stop: Callable[[int, list[int]], bool] | None = None,
    cancel: Callable[[int], bool] | None = None,
    on_event: Callable[[Event], None] | None = None,
    on_end: Callable[[int, Ended], None] | None = None,
    batch_size: int = 16,
    **options: Any,
) -> Generation:
    """Complete prompts, or fill their blanks.

    `prompts` are token ids, or texts if there is a `tokenizer`; MASK in them (in texts `[[n]]`, n tokens) is a
    blank to fill; `blanks` False takes texts literally. `max_new_tokens` (one number, or one for each prompt) come
    behind each prompt: by default none if it has blanks, else as many as the `window` (the model's context length)
    has room for. Longer texts are written window by window, the last `overlap` tokens (default: half a window)
    being the prompt of the next one.

    The decoder (docs/decoding.md) is chosen by keywords, which are the fields of `DecodingConfig` (`commit`,
    `routing`, `temperature`, …), or by a `DecodingConfig` as `decoding`. A row's result follows from its prompt,
    its `seed` (one for all, or one for each) and its `index` (by default its place) alone: neither the batch nor
    the padding changes it.

    `on_event` receives tokens as they are committed, out of order; `on_end(row, …)` each row that has ended, while
    the others of its batch continue. `cancel(row)` is asked between forwards; `stop(row, completion)` after each
    window.
    """
    config = model.config
    if decoding is not None and options:
        raise ConfigError(f"give {', '.join(options)} in decoding=DecodingConfig(…), or leave decoding out")
    decoding = (decoding or DecodingConfig.of(**options)).resolve(config, tokenizer)
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1")
    if eos_id is None and tokenizer is not None:
        eos_id = tokenizer.eos_id
    window = config.context_length if window is None else window
    given = read_prompts(model, prompts, tokenizer, max_new_tokens, window, overlap, blanks)
    numbers = list(range(len(given.rows))) if index is None else [int(i) for i in index]
    if len(numbers) != len(given.rows):
        raise ConfigError(f"index has {len(numbers)} entries for {len(given.rows)} prompts")
    each = list(seed) if isinstance(seed, Iterable) else [seed] * len(given.rows)
    seeds = [whole_number("seed", one) for one in each]
    if len(seeds) != len(given.rows):
        raise ConfigError(
            f"seed has {len(seeds)} entries for {len(given.rows)} prompts; give one number, or one each"
        )
    history: list[Event] = []

    def record(event: Event) -> None:
        history.append(event)
        if on_event is not None:
            on_event(event)

    texts = [
        BatchRow(
            ids, given.new_tokens[row], decoding, window, given.overlap, seeds[row], numbers[row], eos_id, row,
            cancel=None if cancel is None else partial(cancel, row),
            stop=None if stop is None else partial(stop, row), on_event=record,
            on_end=None if on_end is None else partial(on_end, row),
        )
        for row, ids in enumerate(given.rows)
    ]  # fmt: skip
    prepare(model, sum(given.new_tokens))
    started = time.perf_counter()
    write(model, texts, batch_size)
    length = max(len(text.tokens) for text in texts)
    result = Generation(
        torch.tensor([text.tokens + [config.pad_id] * (length - len(text.tokens)) for text in texts]),
        [text.completion(config.mask_id) for text in texts],
        [text.finished for text in texts],
        Statistics.of([text.costs for text in texts]),
        history,
    )
    result.statistics.seconds = time.perf_counter() - started
    if tokenizer is not None:
        whole = [config.mask_id in row or len(row) < 2 for row in given.rows]  # with blanks, or without a prompt
        result.texts = [
            (tokenizer.decode if alone else tokenizer.continuation)(ids)
            for alone, ids in zip(whole, result.completions, strict=True)
        ]
    return result


# --- prompts in every form that users have them, checked before anything is computed --------------------------


@dataclass(frozen=True)
class Prompts:
    rows: list[list[int]]
    """Token ids, BOS first, MASK where there is a blank."""
    new_tokens: list[int]
    """To write behind each row."""
    overlap: int


def blank_tokens(text: str) -> float:
    """How many tokens the blanks of a text are long together; inf if a number is beyond reason."""
    numbers = BLANK.findall(text)
    return sum(map(int, numbers)) if all(len(number) < 10 for number in numbers) else float("inf")


def with_blanks(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text in which `[[n]]` stands for a blank of n tokens."""
    if blank_tokens(text) >= MOST_BLANK:
        raise ConfigError(f"the blanks of a prompt must together be shorter than {MOST_BLANK:g} tokens")
    if EMPTY.search(text):
        raise ConfigError(
            "[[0]] is a blank of no tokens; write how many it holds, as in [[8]], or take prompts literally "
            "(blanks=False, --set blanks=false)"
        )
    ids: list[int] = []
    for at, part in enumerate(BLANK.split(text)):
        if at % 2:
            ids += [tokenizer.mask_id] * int(part)
        elif part:
            ids += tokenizer.encode(part)
    return ids


def whole_text(prompt: str, completion: str, blanks: bool) -> str:
    """A prompt with its completion, which for a prompt with blanks is the prompt with its blanks filled."""
    return completion if blanks and BLANK.search(prompt) else prompt + completion


def read_prompts(
    model: Model,
    prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor,
    tokenizer: Tokenizer | None,
    max_new_tokens: int | Sequence[int | None] | None,
    window: int,
    overlap: int | None,
    blanks: bool = True,
) -> Prompts:
    """Rows of token ids, and what is to be written behind each."""
    config = model.config
    rows = [_with_bos(row, config.bos_id) for row in _rows(prompts, tokenizer, config.pad_id, blanks)]
    if not rows:
        raise ConfigError("prompts is empty; give at least one prompt (an empty text is one)")
    if not 2 <= window <= config.max_position:
        raise ConfigError(f"window={window} must lie between 2 and max_position={config.max_position}")
    for number, row in enumerate(rows):
        bad = next((t for t in row if not 0 <= t < config.vocab_size), None)
        if bad is not None:
            raise ConfigError(
                f"prompts[{number}] holds the token {bad}, outside the vocabulary of {config.vocab_size}"
            )
        if config.bos_id in row[1:]:
            raise ConfigError(f"prompts[{number}] holds BOS ({config.bos_id}) inside; it may only come first")
        if config.pad_id in row:
            raise ConfigError(f"prompts[{number}] holds PAD ({config.pad_id}) inside; it may only come last")
    has_blanks = [config.mask_id in row for row in rows]
    limits = list(max_new_tokens) if isinstance(max_new_tokens, Sequence) else [max_new_tokens] * len(rows)
    if len(limits) != len(rows):
        raise ConfigError(f"max_new_tokens has {len(limits)} entries for {len(rows)} prompts")
    new_tokens = []
    for number, (row, blank, wanted) in enumerate(zip(rows, has_blanks, limits, strict=True)):
        room = window - len(row)
        wanted = (0 if blank else max(room, 1)) if wanted is None else whole_number("max_new_tokens", wanted)
        if room < (1 if wanted else 0):
            raise ConfigError(
                f"prompts[{number}] of {len(row)} tokens (BOS counted) does not fit into window={window}"
                f"{' with room for one more' if wanted else ''}; shorten it or choose a larger window"
            )
        if wanted < 0 or (wanted == 0 and not blank):
            raise ConfigError(
                f"max_new_tokens={wanted} leaves nothing to do for prompts[{number}]; give at least 1, or blanks"
            )
        new_tokens.append(wanted)
    overlap = window // 2 - 1 if overlap is None else overlap
    if not 0 <= overlap <= window - 2:
        raise ConfigError(f"overlap={overlap} must lie between 0 and window − 2 = {window - 2}")
    return Prompts(rows, new_tokens, overlap)


def _rows(
    prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor,
    tokenizer: Tokenizer | None,
    pad_id: int,
    blanks: bool,
) -> list[list[int]]:
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        prompts = [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        items = [items]
    rows = []
    for number, item in enumerate(items):
        if isinstance(item, str):
            if tokenizer is None:
                raise ConfigError(f"prompts[{number}] is text; give tokenizer=, or token ids")
            if LONE_SURROGATE.search(item):
                raise ConfigError(
                    f"prompts[{number}] holds half of a surrogate pair, as bytes give that are not UTF-8; decode "
                    "them with errors='replace'"
                )
            rows.append(with_blanks(tokenizer, item) if blanks else tokenizer.encode(item))
        elif isinstance(item, Tensor | Sequence):
            ids = [int(t) for t in item]
            while ids and ids[-1] == pad_id:
                ids.pop()
            rows.append(ids)
        else:
            raise ConfigError(f"prompts[{number}] must be text or token ids, got {type(item).__name__}")
    return rows


def _with_bos(row: list[int], bos_id: int) -> list[int]:
    return row if row and row[0] == bos_id else [bos_id, *row]
