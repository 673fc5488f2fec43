"""Prompts in every form that users have them, checked before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dcdm.config import ConfigError, whole_number
from dcdm.data.tokenizers import Tokenizer
from dcdm.model.transformer import Model

MOST_BLANK = 1e7
BLANK = re.compile(r"\[\[(\d+)\]\]")
EMPTY = re.compile(r"\[\[0+\]\]")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Prompts:
    rows: list[list[int]]
    """Token ids, BOS first, MASK where there is a blank."""
    new_tokens: list[int]
    """To write behind each row."""
    overlap: int


def blank_runs(row: Sequence[int], mask_id: int) -> list[tuple[int, int]]:
    """Where the blanks of a row begin, and how long each is."""
    runs: list[tuple[int, int]] = []
    for at, token in enumerate(row):
        if token == mask_id:
            start, length = runs[-1] if runs and sum(runs[-1]) == at else (at, 0)
            runs[len(runs) - bool(length) :] = [(start, length + 1)]
    return runs


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
    drafts: bool = False,
) -> Prompts:
    """Rows of token ids, and what is to be written behind each; nothing if they are `drafts`."""
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
        if drafts:
            if blank or wanted:
                raise ConfigError(
                    f"revise takes whole drafts: prompts[{number}] may have neither blanks nor max_new_tokens"
                )
            if len(row) < 2 or room < 0:
                raise ConfigError(f"revise: prompts[{number}] must have at least 1 and at most {window - 1} tokens")
            new_tokens.append(0)
            continue
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
