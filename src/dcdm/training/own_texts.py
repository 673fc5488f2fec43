"""Text to train on that a model writes itself: prompts, and what the model draws behind them, as prepared data.

A draft head needs no other text: what it has to guess is what this very model writes. Tokens are kept as they were
drawn, never decoded and read again. Half of the texts are drawn at temperature 1, half at 0.5, nearer to how most
people use a model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dcdm.config import SPLITS, ConfigError, DataConfig, Split
from dcdm.data.chats import ChatTemplate
from dcdm.data.prepare import RECORDS, cache_folder, finished_record, manifest_of, token_type
from dcdm.data.store import MANIFEST, Shard, write_manifest
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.engine import generate
from dcdm.files import digest, write_whole
from dcdm.model.transformer import Model
from dcdm.progress import Reporter

PROMPTS = Path(__file__).with_name("prompts.txt")
"""One in each line. One that ends in … is the beginning of a text; others are messages to answer."""
TOGETHER = 64  # texts of one batch, which is what an interrupted run loses
TEMPERATURES = (1.0, 0.5)
HELD_OUT = 16  # of so many texts one is for validation


def own_texts(
    model: Model, tokenizer: Tokenizer, weights: str, count: int, prompts: Path = PROMPTS, window: int = 256,
    reporter: Reporter | None = None,
) -> Path:  # fmt: skip
    """A prepared folder of `count` texts that fill windows of `window` positions, in the cache; resumed if
    interrupted.

    `weights` is the SHA-256 of the model's.
    """
    reporter = reporter or Reporter()
    lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{prompts} holds no prompt; write one in each line")
    given = encoded_prompts(lines, tokenizer)
    if (length := window - 1 - max(map(len, given))) < 1:
        raise ConfigError(f"{prompts}: the longest prompt leaves no room in data.window={window}")
    settings = DataConfig(prompt_field="prompt", response_field="response")
    source = {"name": "own texts", "weights": weights, "prompts": lines, "count": count, "length": length}
    plan = {
        "settings": settings.identity(True),
        "tokenizer": {"fingerprint": tokenizer.fingerprint},
        "source": [source],
    }
    folder = cache_folder() / f"own-texts-{digest(plan)[:12]}"
    if (folder / MANIFEST).exists():
        return folder
    (folder / RECORDS).mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / "tokenizer")
    records = []
    for unit, first in enumerate(range(0, count, TOGETHER)):
        numbers = range(first, min(first + TOGETHER, count))
        if (record := finished_record(folder, unit)) is None:
            record = _write(model, tokenizer, folder, unit, numbers, given, length)
        records.append(record)
        reporter.progress("writing own texts", numbers.stop, count, "texts", "")
    manifest = manifest_of(plan, records, tokenizer, folder, settings)
    manifest["given"] = {"tokenizer": "given", "sources": ["own texts"], "validation": []}
    write_manifest(folder, manifest)
    return folder


def encoded_prompts(lines: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of prompts, messages by the tokenizer's chat template where it has one."""
    template = None if tokenizer.chat_template is None else ChatTemplate(tokenizer)
    found = []
    for line in lines:
        if line.endswith("…"):
            found.append(tokenizer.encode(line.removesuffix("…")))
        elif template is None:
            found.append(tokenizer.encode(f"{line}\n"))
        else:
            chat = template.render([{"role": "user", "content": line}], answering=True)
            found.append(tokenizer.encode_chat(chat))
    return found


def _write(
    model: Model, tokenizer: Tokenizer, folder: Path, unit: int, numbers: range, given: list[list[int]], length: int
) -> dict[str, object]:
    """The shards of some texts, and their record, as `prepare` writes them."""
    prompts = [given[number % len(given)] for number in numbers]
    found = generate(
        model, prompts, max_new_tokens=length, index=numbers, eos_id=tokenizer.eos_id, batch_size=TOGETHER,
        temperature=TEMPERATURES[unit % len(TEMPERATURES)],
    )  # fmt: skip
    dtype = token_type(tokenizer)
    shards = {split: Shard(folder / f"{split}-{unit:05d}", dtype) for split in SPLITS}
    try:
        for number, prompt, ids, finished in zip(numbers, prompts, found.completions, found.finished, strict=True):
            written = [*ids, tokenizer.eos_id] if finished == "eos" else ids
            split: Split = "validation" if number % HELD_OUT == HELD_OUT - 1 else "train"
            size = len(tokenizer.continuation(ids).encode())
            shards[split].add(np.array(prompt), np.array(written), size, True)
        splits = {split: shard.close() for split, shard in shards.items()}
    finally:
        for shard in shards.values():
            shard.discard()
    record = {"unit": unit, "splits": splits}
    write_whole(folder / RECORDS / f"{unit:05d}.json", json.dumps(record).encode())
    return record
