"""Files to documents and rows: cut into parts, read; what cannot be read is reported by file and line."""

from __future__ import annotations

import gzip
import json
import mmap
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcdm.config import DataConfig, DataError, Split
from dcdm.data.sources import NAMED, SourceFile, held_out
from dcdm.data.tokenizers import BETWEEN_WORDS

if TYPE_CHECKING:
    import pyarrow as pa

PART_BYTES = 64 << 20  # of a part where nobody asks for another size
TABLE_ROWS = 1024  # rows of a table that are Python objects at one time
FEW = 5  # expected number of held-out files below which each file gives its end to validation instead
LINE = re.compile(r"(?<=\n)")
BLANK = re.compile(r"\n(?:[ \t\r]*\n)+")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Part:
    """A stretch of a file: bytes of text and JSONL, rows of Arrow, row groups of Parquet; `stop` is beyond it."""

    file: SourceFile
    start: int
    stop: int
    weight: int
    """Bytes on the disk, about."""
    split: Split | None = None
    """None: each document's hash decides."""
    ends: bool = True
    """Whether a document that is the whole file ends here."""


@dataclass
class BadRows:
    """Lines and rows that could not be used: how many, the first of them, and how many may be."""

    limit: int
    count: int = 0
    first: list[tuple[str, int, str]] = field(default_factory=list)
    empty: int = 0
    """Documents without any text: no fault, but skipped."""

    def add(self, part: Part, line: int, reason: str) -> None:
        """Count what is in `line` of a part (in text and JSONL, counted from the part's first)."""
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append((part.file.name, _lines_before(part) + line, reason))
        self.check()

    def check(self) -> None:
        if self.count > self.limit:
            places = "; ".join(f"{name}:{line}: {reason}" for name, line, reason in self.first)
            raise DataError(
                f"{places}. Bad lines or rows: {self.count}, allowed by max_bad: {self.limit}. "
                "Repair the file, or raise max_bad (--max-bad) to leave them out"
            )


# --- files to parts ----------------------------------------------------------------------------------------------


def cut_into_parts(
    files: Sequence[SourceFile], settings: DataConfig, part_bytes: int = PART_BYTES, cut_documents: bool = False
) -> Iterator[Part]:
    """The files in parts of about `part_bytes` each, in order.

    Where they are cut depends on the files and on `part_bytes` alone. Documents stay whole, but with
    `cut_documents` a text file that is one long document is cut between words.
    """
    undecided = [file for file in files if file.format == "text" and file.split is None]
    few = len(undecided) * settings.validation_share < FEW
    for file in files:
        whole = Part(file, 0, file.size, file.size, file.split)
        if file.format == "jsonl.gz":  # cannot be read from the middle
            yield whole
        elif file.format == "parquet":
            for number, weight in enumerate(_row_group_bytes(file.path)):
                yield replace(whole, start=number, stop=number + 1, weight=weight)
        elif file.format == "arrow":
            rows = _open_arrow(file.path).num_rows
            step = max(1, rows * part_bytes // max(1, file.size))
            for start in range(0, rows, step):
                stop = min(rows, start + step)
                yield replace(whole, start=start, stop=stop, weight=file.size * (stop - start) // rows)
        elif file.size == 0:
            continue
        elif file.format == "text" and settings.documents == "file":
            for document in _file_documents(whole, settings.validation_share, few):
                step = part_bytes if cut_documents else file.size
                yield from _cut(document, step, BETWEEN_WORDS, keep_open=True)
        else:
            by_paragraph = file.format == "text" and settings.documents == "blank-lines"
            yield from _cut(whole, part_bytes, BLANK if by_paragraph else LINE)


def _file_documents(part: Part, share: float, few: bool) -> Iterator[Part]:
    """A text file as one document of one split, or, where files are few, its end as a document of validation."""
    if part.split is not None or share == 0:
        yield replace(part, split=part.split or "train")
    elif not few:
        yield replace(part, split="validation" if held_out(part.file.sha256.encode(), share) else "train")
    else:
        with _mapped(part) as data:
            border = _border(data, LINE, max(1, part.stop - int(part.stop * share)), part.stop)
        yield replace(part, stop=border, weight=border, split="train")
        if border < part.stop:
            yield replace(part, start=border, weight=part.stop - border, split="validation")


def _cut(part: Part, step: int, border: re.Pattern[str], keep_open: bool = False) -> Iterator[Part]:
    """`part` in stretches of at least `step` bytes, each ending where `border` does."""
    if part.stop - part.start <= step:
        yield part
        return
    with _mapped(part) as data:
        start = part.start
        while start < part.stop:
            stop = _border(data, border, start + step, part.stop) if start + step < part.stop else part.stop
            ends = stop == part.stop or not keep_open
            yield replace(part, start=start, stop=stop, weight=stop - start, ends=ends)
            start = stop


@contextmanager
def _mapped(part: Part) -> Iterator[mmap.mmap]:
    with open(part.file.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _border(data: mmap.mmap, border: re.Pattern[str], at: int, stop: int) -> int:
    """Where the first `border` from `at` on ends, or `stop`."""
    match = re.compile(border.pattern.encode()).search(data, at, stop)
    return stop if match is None else match.end()


# --- parts to documents and rows ---------------------------------------------------------------------------------


def read_texts(part: Part, settings: DataConfig, bad: BadRows) -> Iterator[tuple[str, bool]]:
    """The documents of a part, none of them empty, each with whether it ends here (or in a later part)."""
    if part.file.format != "text":
        for line, row in read_rows(part, settings.columns, bad):
            value = row[settings.field]
            if not isinstance(value, str):
                bad.add(part, line, f"{settings.field} is {_kind(value)}, not text")
            elif not is_unicode(value):
                bad.add(part, line, f"{settings.field} holds half a surrogate pair, which no encoding can hold")
            elif value:
                yield value, True
            else:
                bad.empty += 1
        return
    text = _text(part, bad)
    if settings.documents == "file":
        if text or part.start:  # a later part may end the document with no text of its own
            yield text, part.ends
    elif settings.documents == "lines":
        lines = text.removesuffix("\n").split("\n")
        bad.empty += sum(not line.strip() for line in lines)
        yield from ((line.rstrip("\r"), True) for line in lines if line.strip())
    else:
        yield from ((piece.strip("\r\n"), True) for piece in BLANK.split(text) if piece.strip())


def read_rows(part: Part, columns: tuple[str, ...], bad: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a part that hold `columns`, with their lines in the part, or row numbers in a table."""
    try:
        is_table = part.file.format in ("parquet", "arrow")
        yield from _table_rows(part, columns) if is_table else _json_rows(part, columns, bad)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {part.file.path}: {error}") from error
    _check_unchanged(part)


def _text(part: Part, bad: BadRows) -> str:
    """The text of a part, without the lines that are not UTF-8."""
    try:
        with open(part.file.path, "rb") as file:
            file.seek(part.start)
            raw = file.read(part.stop - part.start)
    except OSError as error:
        raise DataError(f"cannot read {part.file.path}: {error.strerror}") from error
    _check_unchanged(part)
    raw = raw.removeprefix(BOM) if part.start == 0 else raw
    try:
        return raw.decode("utf-8", errors="replace" if part.file.lenient else "strict")
    except UnicodeDecodeError:
        kept = []
        for number, line in enumerate(raw.split(b"\n"), start=1):
            try:
                kept.append(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                bad.add(part, number, f"not UTF-8 ({error.reason} at byte {error.start} of the line)")
        return "\n".join(kept)


def _json_rows(part: Part, columns: tuple[str, ...], bad: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    packed, at = part.file.format == "jsonl.gz", part.start
    with gzip.open(part.file.path, "rb") if packed else open(part.file.path, "rb") as lines:
        lines.seek(part.start)
        for number, raw in enumerate(lines, start=1):
            if at >= part.stop and not packed:
                break
            raw, at = raw.removeprefix(BOM) if at == 0 else raw, at + len(raw)
            if not raw.strip():
                continue
            try:
                row = json.loads(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                bad.add(part, number, f"not UTF-8 ({error.reason} at byte {error.start} of the line)")
            except json.JSONDecodeError as error:
                bad.add(part, number, f"not JSON ({error.msg} at column {error.colno})")
            except (ValueError, RecursionError) as error:  # numbers and nestings beyond Python's limits
                bad.add(part, number, f"not JSON ({error})")
            else:
                if not isinstance(row, dict):
                    bad.add(part, number, f"not a JSON object but {_kind(row)}")
                elif missing := _missing(columns, list(row)):
                    bad.add(part, number, missing)
                else:
                    yield number, row


def _table_rows(part: Part, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow.parquet as pq

    path = part.file.path
    with _arrow_errors(path):
        if part.file.format == "parquet":
            file = pq.ParquetFile(path)
            names = file.schema_arrow.names
            number = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
            batches = file.iter_batches(TABLE_ROWS, list(range(part.start, part.stop)), list(columns))
        else:
            table = _open_arrow(path)
            names, number = table.schema.names, part.start
            rows = table.slice(part.start, part.stop - part.start).select([c for c in columns if c in names])
            batches = iter(rows.to_batches(max_chunksize=TABLE_ROWS))
        if missing := _missing(columns, names):
            raise DataError(f"{path}: {missing}")
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield number, row


def _open_arrow(path: Path) -> pa.Table:
    """An Arrow file or stream as a table that lies on the disk, not in memory."""
    import pyarrow as pa

    with _arrow_errors(path), pa.memory_map(str(path), "r") as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        return (pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)).read_all()


def _row_group_bytes(path: Path) -> list[int]:
    import pyarrow.parquet as pq

    with _arrow_errors(path):
        metadata = pq.ParquetFile(path).metadata
        return [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    import pyarrow as pa

    if not is_unicode(str(path)):
        raise DataError(f"cannot read {path}: pyarrow opens paths in UTF-8 only; rename it")
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {str(error).strip().partition(chr(10))[0]}") from error


def _missing(columns: Sequence[str], present: list[str]) -> str | None:
    """What to say where a row lacks one of `columns`."""
    missing = [repr(column) for column in columns if column not in present]
    if not missing:
        return None
    return (
        f"no field {' and no field '.join(missing)}; fields there: {', '.join(present) or 'none'} (choose one with "
        "field, --field, two with prompt_field and response_field, or messages_field)"
    )


def _lines_before(part: Part) -> int:
    """Lines of the file that precede a part; tables number their rows themselves."""
    if part.file.format not in ("text", "jsonl"):
        return 0
    count, left = 0, part.start
    with open(part.file.path, "rb") as file:
        while left > 0 and (raw := file.read(min(left, 1 << 24))):
            count, left = count + raw.count(b"\n"), left - len(raw)
    return count


def _check_unchanged(part: Part) -> None:
    try:
        now = os.stat(part.file.path)
    except OSError as error:
        raise DataError(f"cannot read {part.file.path}: {error.strerror}") from error
    if (now.st_size, now.st_mtime_ns) != (part.file.size, part.file.modified):
        raise DataError(f"{part.file.path} changed while it was being read; start the preparation again")


def is_unicode(text: str) -> bool:
    """Whether text can be encoded: half a surrogate pair cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a truth value", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, dict) else f"a {type(value).__name__}")
