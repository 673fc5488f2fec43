"""Units of work to token shards: read, tokenise, write, record; in this process or in worker processes.

A shard `SPLIT-NNNNN.bin` is a plain array of token ids, little-endian; beside it, for fine-tuning data, stands
`SPLIT-NNNNN.idx` with two uint32 per example: its length and its prompt's. The number is the unit's.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from dcdm.config import DataError
from dcdm.data.examples import BadRow, Example, ExampleMaker
from dcdm.data.reading import BadRows, Part, read_rows, read_texts
from dcdm.data.settings import SPLITS, DataConfig, Split, held_out
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


# --- one unit ----------------------------------------------------------------------------------------------------


def write_unit(
    unit: Unit,
    folder: Path,
    tokenizer: Tokenizer,
    settings: DataConfig,
    still_wanted: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Write the unit's shards, then its record; the record is there only if the shards are whole."""
    dtype = dtype_for(tokenizer.vocab_size)
    bad = BadRows(settings.max_bad)
    shards = {split: Shard(folder, split, unit.number, dtype) for split in SPLITS}
    write = _write_examples if settings.fine_tuning else _write_texts
    try:
        with writing(folder):
            for _ in write(unit, shards, tokenizer, settings, bad):
                if not still_wanted():
                    raise SystemExit(1)
            record = {
                "unit": unit.number,
                "splits": {split: shard.close() for split, shard in shards.items()},
                "bad": {"count": bad.count, "first": bad.first},
            }
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


def dtype_for(vocab_size: int) -> str:
    """The type of a shard's numbers."""
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
        """Put the files in their places: counts and files as manifests hold them."""
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


class ArrayFile:
    """An array of numbers written piece by piece, hashed on the way, and renamed into place by `close`."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.dtype, self.count = path, np.dtype(dtype).newbyteorder("<"), 0
        self._aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._file = open(self._aside, "wb")  # noqa: SIM115 (closed by close or discard)
        self._hash = hashlib.sha256()

    def add(self, values: np.ndarray) -> None:
        data = values.astype(self.dtype, copy=False).tobytes()
        self._hash.update(data)
        self._file.write(data)
        self.count += values.size

    def close(self) -> dict[str, Any]:
        """Put the file in its place: its entry in a manifest."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._aside, self.path)
        size = self.count * self.dtype.itemsize
        return {"file": self.path.name, "bytes": size, "sha256": self._hash.hexdigest()}

    def discard(self) -> None:
        self._file.close()
        self._aside.unlink(missing_ok=True)


def _record_path(folder: Path, number: int) -> Path:
    return folder / RECORDS / f"{number:05d}.json"


def _write_texts(
    unit: Unit, shards: dict[Split, Shard], tokenizer: Tokenizer, settings: DataConfig, bad: BadRows
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
            shard.add([prompt, response], [(len(prompt) + len(response), len(prompt))])
            shard.documents += 1
            shard.bytes += maker.text_bytes(example, response)
            shard.learned += len(response)
        waiting.clear()

    for part in unit.parts:
        for line, row in read_rows(part, settings.columns, bad):
            try:
                name, examples = maker.examples_of(row)
            except BadRow as error:
                bad.add(part, line, str(error))
                continue
            split = part.split or _split(name, settings)
            waiting.extend((example, split) for example in examples)
            if len(waiting) >= BATCH_EXAMPLES:
                write()
                yield
    write()
    yield


def _split(name: bytes, settings: DataConfig) -> Split:
    return "validation" if held_out(name, settings.validation_share) else "train"


# --- many units --------------------------------------------------------------------------------------------------
# Workers are plain subprocesses that get their units over a pipe: nothing is forked from a process with threads, no
# `__main__` is imported again (as multiprocessing does), and a worker whose parent dies notices and ends.

_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from dcdm.data.shards import serve_units
serve_units()
"""


def write_units(
    units: list[Unit], folder: Path, tokenizer: Tokenizer, settings: DataConfig, workers: int
) -> Iterator[dict[str, Any]]:
    """The records of `units` as they are finished, in no particular order; one worker is this process itself."""
    if workers <= 1 or len(units) <= 1:
        for unit in units:
            yield write_unit(unit, folder, tokenizer, settings)
        return
    idle: SimpleQueue[_Worker] = SimpleQueue()
    crew = [_Worker(folder, settings) for _ in range(min(workers, len(units)))]
    for worker in crew:
        idle.put(worker)
    threads = ThreadPoolExecutor(len(crew))

    def do(unit: Unit) -> dict[str, Any]:
        worker = idle.get()
        try:
            return worker.do(unit)
        finally:
            idle.put(worker)

    try:
        for done in as_completed([threads.submit(do, unit) for unit in units]):
            yield done.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in crew:
            worker.stop()
        threads.shutdown()


class _Worker:
    """A subprocess and its pipe."""

    def __init__(self, folder: Path, settings: DataConfig) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        self._send({"folder": str(folder), "settings": asdict(settings)})

    def do(self, unit: Unit) -> dict[str, Any]:
        try:
            self._send(asdict(unit))
            assert self._process.stdout is not None
            answer = self._process.stdout.readline()
        except (OSError, ValueError):  # it died, or was stopped meanwhile
            answer = b""
        if not answer:
            raise RuntimeError(f"a worker process ended with code {self._process.wait()}; is the memory full?")
        result = json.loads(answer)
        if "error" in result:
            raise DataError(result["error"])
        return result

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()


def serve_units() -> None:
    """The worker's side: a line with the task, then a line per unit, until the pipe closes."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not pass for a result
    parent = os.getppid()
    still_wanted: Callable[[], bool] = lambda: os.getppid() == parent  # noqa: E731
    task = json.loads(sys.stdin.readline())
    folder, settings = Path(task["folder"]), DataConfig(**task["settings"])
    tokenizer = Tokenizer.load(folder / "tokenizer")
    for line in sys.stdin:
        unit = json.loads(line)
        parts = tuple(Part(**{**part, "stamp": tuple(part["stamp"])}) for part in unit["parts"])
        try:
            answer = write_unit(Unit(unit["number"], parts), folder, tokenizer, settings, still_wanted)
        except DataError as error:
            answer = {"error": str(error)}
        results.write(json.dumps(answer) + "\n")
        results.flush()
