"""One unit of work to its shards: read, tokenise, write, record."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dcdm.config import DataError
from dcdm.data.examples import BadRow, Example, ExampleMaker
from dcdm.data.planning import Unit
from dcdm.data.reading import Bad, read_rows, read_texts
from dcdm.data.settings import SPLITS, DataConfig, Split, held_out
from dcdm.data.tokenizers import BETWEEN_WORDS, Tokenizer
from dcdm.files import ArrayFile, file_digest, write_whole

BATCH = 1 << 20  # characters that are tokenised at one time
JOURNAL = "units"  # folder of the records of finished units


def dtype_for(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 65_535 else "uint32"


@dataclass
class Shard:
    """One split's part of a unit while it is being written."""

    folder: Path
    split: Split
    number: int
    dtype: str
    documents: int = 0
    bytes: int = 0
    learned: int = 0
    """Tokens that are learned: all but prompts."""
    _files: dict[str, ArrayFile] = field(default_factory=dict)

    def add(self, pieces: list[np.ndarray], lengths: list[tuple[int, int]] | None = None) -> None:
        """Append tokens; of examples also their lengths, whole and of the prompt."""
        if any(piece.size for piece in pieces):
            self._file("bin", self.dtype).add(np.concatenate(pieces))
        if lengths:
            self._file("idx", "uint32").add(np.array(lengths, dtype=np.uint32))

    def close(self) -> dict[str, Any]:
        tokens = self._files["bin"].count if self._files else 0
        files = [file.close() for file in self._files.values()]
        counts = {"documents": self.documents, "tokens": tokens, "learned": self.learned, "bytes": self.bytes}
        return {**counts, "files": files}

    def discard(self) -> None:
        for file in self._files.values():
            with suppress(OSError):
                file.discard()

    def _file(self, kind: str, dtype: str) -> ArrayFile:
        if kind not in self._files:
            self._files[kind] = ArrayFile(self.folder / f"{self.split}-{self.number:05d}.{kind}", dtype)
        return self._files[kind]


def write_unit(
    unit: Unit,
    folder: Path,
    tokenizer: Tokenizer,
    settings: DataConfig,
    still_wanted: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Write the unit's shards, then its record; the record is there only if the shards are whole."""
    dtype = dtype_for(tokenizer.vocab_size)
    bad = Bad(settings.max_bad)
    shards = {split: Shard(folder, split, unit.number, dtype) for split in SPLITS}
    write = _write_examples if settings.fine_tuning else _write_texts
    try:
        for _ in write(unit, shards, tokenizer, settings, bad):
            if not still_wanted():
                raise SystemExit(1)
        record = {
            "unit": unit.number,
            "splits": {split: shard.close() for split, shard in shards.items()},
            "bad": {"count": bad.count, "first": bad.first},
        }
        write_whole(record_path(folder, unit.number), json.dumps(record).encode())
    except OSError as error:
        raise DataError(writing_failed(folder, error)) from error
    finally:
        for shard in shards.values():
            shard.discard()
    return record


def record_path(folder: Path, number: int) -> Path:
    return folder / JOURNAL / f"{number:05d}.json"


def finished(folder: Path, number: int) -> dict[str, Any] | None:
    """The record of a unit that an earlier run finished, if its shards are what it says."""
    try:
        record = json.loads(record_path(folder, number).read_bytes())
        for split in SPLITS:
            for entry in record["splits"][split]["files"]:
                if file_digest(folder / entry["file"]) != entry["sha256"]:
                    return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record


def writing_failed(folder: Path, error: OSError) -> str:
    reason = os.strerror(error.errno) if error.errno else str(error)
    fix = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "look at the folder's rights"
    return f"cannot write to {folder}: {reason}; {fix} or choose another out folder, and start again"


def _write_texts(
    unit: Unit, shards: dict[Split, Shard], tokenizer: Tokenizer, settings: DataConfig, bad: Bad
) -> Iterator[None]:
    eos = np.array([tokenizer.eos_id], dtype=shards["train"].dtype)
    for batch in _batches(_pieces(unit, tokenizer, settings, bad)):
        ids = tokenizer.encode_arrays([text for text, _, _ in batch])
        pieces: dict[Split, list[np.ndarray]] = {split: [] for split in SPLITS}
        for (text, ends, split), tokens in zip(batch, ids, strict=True):
            shard = shards[split]
            pieces[split] += [tokens, eos] if ends else [tokens]
            shard.documents += ends
            shard.bytes += len(text.encode())
            shard.learned += len(tokens) + ends
        for split, shard in shards.items():
            shard.add(pieces[split])
        yield


def _pieces(unit: Unit, tokenizer: Tokenizer, settings: DataConfig, bad: Bad) -> Iterator[tuple[str, bool, Split]]:
    """The unit's texts with their splits, long ones in pieces where the tokenizer allows it."""
    for part in unit.parts:
        for text, ends in read_texts(part, settings, bad):
            split = part.split or _split(text.encode(), settings)
            start = 0
            while tokenizer.cuts_between_words and (cut := BETWEEN_WORDS.search(text, start + BATCH)) is not None:
                yield text[start : cut.end()], False, split
                start = cut.end()
            yield text[start:], ends, split


def _batches(pieces: Iterator[tuple[str, bool, Split]]) -> Iterator[list[tuple[str, bool, Split]]]:
    batch: list[tuple[str, bool, Split]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_examples(
    unit: Unit, shards: dict[Split, Shard], tokenizer: Tokenizer, settings: DataConfig, bad: Bad
) -> Iterator[None]:
    maker = ExampleMaker(settings, tokenizer)
    waiting: list[tuple[Example, Split]] = []

    def write() -> None:
        ids = maker.encode([example for example, _ in waiting])
        for (example, split), (prompt, response) in zip(waiting, ids, strict=True):
            shard = shards[split]
            shard.add([prompt, response], [(len(prompt) + len(response), len(prompt))])
            shard.documents += 1
            shard.bytes += len(example.response.encode())
            shard.learned += len(response)
        waiting.clear()

    for part in unit.parts:
        for line, row in read_rows(part, settings.columns, bad):
            try:
                name, examples = maker.of(row)
            except BadRow as error:
                bad.add(part, line, str(error))
                continue
            split = part.split or _split(name, settings)
            waiting.extend((example, split) for example in examples)
            if len(waiting) >= 256:
                write()
                yield
    write()
    yield


def _split(name: bytes, settings: DataConfig) -> Split:
    return "validation" if held_out(name, settings.validation_share) else "train"
