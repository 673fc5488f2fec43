"""Units of work to token shards: read, tokenise, write, record; several units at once.

A shard `SPLIT-NNNNN.bin` is a plain array of token ids, little-endian; beside it, for fine-tuning data, is
`SPLIT-NNNNN.idx` with two uint32 per example: its length and its prompt's. The number is the unit's.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dcdm.config import SPLITS, DataConfig, DataError, Split
from dcdm.data.examples import Example, ExampleMaker
from dcdm.data.reading import BadRows, Part, read_texts
from dcdm.data.sources import held_out
from dcdm.data.tokenizers import BETWEEN_WORDS, Tokenizer
from dcdm.files import file_digest, read_json_object, write_whole

BATCH_CHARACTERS = 1 << 20  # tokenised at one time
BATCH_EXAMPLES = 256
RECORDS = "units"  # folder of the records of finished units


@dataclass(frozen=True)
class Unit:
    """What one worker turns into one shard per split."""

    number: int
    parts: tuple[Part, ...]

    @property
    def weight(self) -> int:
        return sum(part.weight for part in self.parts)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Failures to write inside are the user's to repair: say what and where."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "free some space" if full else "look at the folder's permissions"
        raise DataError(
            f"cannot write to {folder}: {reason}; {fix} or choose another out folder, and start again"
        ) from error


def write_units(
    units: list[Unit], folder: Path, tokenizer: Tokenizer, settings: DataConfig, workers: int
) -> Iterator[dict[str, Any]]:
    """The records of `units` as they are finished, in no particular order, by as many threads as there are workers.

    Threads are enough: most of the time goes to `tokenizers`, to hashing and to the disk, which leave the
    interpreter to others.
    """
    stop, threads = threading.Event(), ThreadPoolExecutor(workers)
    try:
        work = [threads.submit(write_unit, unit, folder, tokenizer, settings, stop) for unit in units]
        for done in as_completed(work):
            yield done.result()
    finally:
        stop.set()
        threads.shutdown(cancel_futures=True)


# --- one unit ----------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """The unit is not wanted any more."""


def write_unit(
    unit: Unit, folder: Path, tokenizer: Tokenizer, settings: DataConfig, stop: threading.Event
) -> dict[str, Any]:
    """Write the unit's shards, then its record; the record is there only if the shards are whole."""
    bad = BadRows(settings.max_bad)
    shards = {
        split: Shard(folder / f"{split}-{unit.number:05d}", dtype_for(tokenizer.vocab_size)) for split in SPLITS
    }
    write = _write_examples if settings.fine_tuning else _write_texts
    try:
        with writing(folder):
            for _ in write(unit, shards, tokenizer, settings, bad):
                if stop.is_set():
                    raise Stopped
            splits = {split: shard.close() for split, shard in shards.items()}
            record = {"unit": unit.number, "splits": splits, "bad": {"count": bad.count, "first": bad.first}}
            write_whole(_record_path(folder, unit.number), json.dumps(record).encode())
    finally:
        for shard in shards.values():
            shard.discard()
    return record


def finished_record(folder: Path, number: int) -> dict[str, Any] | None:
    """The record of a unit that an earlier run finished, if its shards are what it says."""
    try:
        record = read_json_object(_record_path(folder, number))
        for split in SPLITS:
            for entry in record["splits"][split]["files"]:
                if file_digest(folder / entry["file"]) != entry["sha256"]:
                    return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record


def _record_path(folder: Path, number: int) -> Path:
    return folder / RECORDS / f"{number:05d}.json"


def dtype_for(vocab_size: int) -> str:
    """The type of a shard's numbers."""
    return "uint16" if vocab_size <= 65_535 else "uint32"


class Shard:
    """One split's part of a unit: tokens are written aside as they come, hashed, and renamed into place by `close`.

    Of examples their lengths are kept too, whole and of the prompt. A split without tokens gets no file.
    """

    def __init__(self, stem: Path, dtype: str) -> None:
        self.path, self.dtype = stem.with_suffix(".bin"), np.dtype(dtype).newbyteorder("<")
        self.documents = self.tokens = self.bytes = 0
        self.learned = 0
        """Tokens that are learned: all but prompts."""
        self.lengths: list[tuple[int, int]] = []
        self._aside = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()

    def add(self, pieces: list[np.ndarray]) -> None:
        """Append tokens."""
        data = b"".join(piece.astype(self.dtype, copy=False).tobytes() for piece in pieces)
        if not data:
            return
        if self._file is None:
            self._file = open(self._aside, "wb")  # noqa: SIM115 (closed by close or discard)
        self._file.write(data)
        self._hash.update(data)
        self.tokens += len(data) // self.dtype.itemsize

    def close(self) -> dict[str, Any]:
        """Put the files in their places: counts and files as manifests hold them."""
        files = []
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._aside, self.path)
            size = self.tokens * self.dtype.itemsize
            files.append({"file": self.path.name, "bytes": size, "sha256": self._hash.hexdigest()})
        if self.lengths:
            index, data = self.path.with_suffix(".idx"), np.array(self.lengths, dtype="<u4").tobytes()
            write_whole(index, data)
            files.append({"file": index.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        counts = {"documents": self.documents, "tokens": self.tokens, "learned": self.learned, "bytes": self.bytes}
        return {**counts, "files": files}

    def discard(self) -> None:
        """Leave nothing aside."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
                self._aside.unlink(missing_ok=True)


def _write_texts(
    unit: Unit, shards: dict[Split, Shard], tokenizer: Tokenizer, settings: DataConfig, bad: BadRows
) -> Iterator[None]:
    eos = np.array([tokenizer.eos_id])
    for batch in _batches(_pieces(unit, tokenizer, settings, bad)):
        ids = tokenizer.encode_arrays([text for text, _, _ in batch])
        for (text, ends, split), tokens in zip(batch, ids, strict=True):
            shard = shards[split]
            shard.add([tokens, eos] if ends else [tokens])
            shard.documents += ends
            shard.bytes += len(text.encode())
            shard.learned += len(tokens) + ends
        yield


def _pieces(
    unit: Unit, tokenizer: Tokenizer, settings: DataConfig, bad: BadRows
) -> Iterator[tuple[str, bool, Split]]:
    """The unit's texts with their splits, long ones in pieces where the tokenizer allows it."""
    for part in unit.parts:
        for text, ends in read_texts(part, settings, bad):
            split = part.split or _split(text.encode(), settings)
            start = 0
            while tokenizer.cuts_between_words and (cut := BETWEEN_WORDS.search(text, start + BATCH_CHARACTERS)):
                yield text[start : cut.end()], False, split
                start = cut.end()
            yield text[start:], ends, split


def _batches(pieces: Iterator[tuple[str, bool, Split]]) -> Iterator[list[tuple[str, bool, Split]]]:
    batch: list[tuple[str, bool, Split]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_examples(
    unit: Unit, shards: dict[Split, Shard], tokenizer: Tokenizer, settings: DataConfig, bad: BadRows
) -> Iterator[None]:
    maker = ExampleMaker(settings, tokenizer)
    waiting: list[tuple[Example, Split]] = []

    def write() -> None:
        ids = maker.encode([example for example, _ in waiting])
        for (example, split), (prompt, response) in zip(waiting, ids, strict=True):
            shard = shards[split]
            shard.add([prompt, response])
            shard.lengths.append((len(prompt) + len(response), len(prompt)))
            shard.documents += 1
            shard.bytes += maker.text_bytes(example, response)
            shard.learned += len(response)
        waiting.clear()

    for part in unit.parts:
        for name, examples in maker.read(part, bad):
            split = part.split or _split(name, settings)
            waiting.extend((example, split) for example in examples)
            if len(waiting) >= BATCH_EXAMPLES:
                write()
                yield
    write()


def _split(name: bytes, settings: DataConfig) -> Split:
    return "validation" if held_out(name, settings.validation_share) else "train"
