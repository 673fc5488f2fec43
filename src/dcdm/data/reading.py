"""Files to documents and rows: examined, cut into parts, read; what cannot be read is reported by file and line."""

from __future__ import annotations

import gzip
import json
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcdm.config import DataError
from dcdm.data.settings import MAX_LINE_BYTES, DataConfig, Split, held_out
from dcdm.data.sources import Format, SourceFile
from dcdm.data.tokenizers import BETWEEN_WORDS
from dcdm.files import file_digest

if TYPE_CHECKING:
    import pyarrow as pa

BLANK = re.compile(r"\n(?:[ \t\r]*\n)+")
BOM = b"\xef\xbb\xbf"
PART_BYTES = 64 << 20  # of a part where nobody asks for another size
TABLE_ROWS = 1024  # rows of a table that are Python objects at one time
NAMED = 10  # bad places that a report names
FEW = 5  # expected number of held-out files below which each file gives its end to validation instead
_BLANK_BYTES = re.compile(BLANK.pattern.encode())
_BETWEEN_WORDS_BYTES = re.compile(BETWEEN_WORDS.pattern.encode())

Stamps = dict[str, list[Any]]
"""Path of a file → its size, times, inode and SHA-256."""


@dataclass(frozen=True)
class ExaminedFile:
    """A source file, its size and modification time, and its contents' hash."""

    source: SourceFile
    stamp: tuple[int, int]
    sha256: str

    def entry(self) -> dict[str, Any]:
        source = self.source
        return {"name": source.name, "bytes": self.stamp[0], "sha256": self.sha256, "split": source.split}


@dataclass(frozen=True)
class Part:
    """A stretch of a file: bytes of text and JSONL, rows of Arrow, row groups of Parquet; `stop` is beyond it."""

    path: str
    name: str
    format: Format
    start: int
    stop: int
    weight: int
    """Bytes on the disk, about."""
    stamp: tuple[int, int]
    """Size and modification time of the file when it was examined."""
    split: Split | None = None
    ends: bool = True
    """Whether a document that is the whole file ends here."""
    lenient: bool = False
    max_line_bytes: int = MAX_LINE_BYTES
    """Of a line of JSON."""


@dataclass
class BadRows:
    """Lines and rows that could not be used: how many, the first of them, and how many may be."""

    limit: int
    count: int = 0
    first: list[tuple[str, int, str]] = field(default_factory=list)
    empty: int = 0
    """Documents without any text: no fault, but passed over."""

    def add(self, part: Part, line: int, reason: str) -> None:
        """Count what stands in `line` of a part (in text and JSONL, counted from the part's first)."""
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append((part.name, _lines_before(part) + line, reason))
        self.check()

    def check(self) -> None:
        if self.count > self.limit:
            places = "; ".join(f"{name}:{line}: {reason}" for name, line, reason in self.first)
            raise DataError(
                f"{places}. Bad lines or rows: {self.count}, allowed by max_bad: {self.limit}. "
                "Repair the file, or raise max_bad (--max-bad) to leave them out"
            )


# --- which files there are to read, and what is in them -----------------------------------------------------------


def examine(
    sources: Sequence[SourceFile], settings: DataConfig, known: Stamps
) -> tuple[list[ExaminedFile], Stamps]:
    """Check that every file can be read and has the fields asked for, and hash it.

    Files that look as they did in `known` (size, times, inode) are not read again; the second result is
    `known` for the next time.
    """
    paths = {str(source.path.absolute()): source for source in sources}
    stamps = hash_files([*paths], known)
    for path, source in paths.items():
        if source.format in ("parquet", "arrow") and not _is_unicode(path):
            raise DataError(f"cannot read {path}: pyarrow opens paths in UTF-8 only; rename it")
        if source.format != "text":
            fields = _first_fields(source.path, source.format, settings.max_line_bytes)
            if fields is not None and (missing := [c for c in settings.columns if c not in fields]):
                raise DataError(
                    f"{source.path}: {_missing_fields(missing, fields)}. Name the right one with field (--field), "
                    "prompt_field and response_field, or messages_field"
                )
    files = []
    for source in sources:
        size, modified, *_, sha256 = stamps[str(source.path.absolute())]
        files.append(ExaminedFile(source, (size, modified), sha256))
    return files, stamps


def hash_files(paths: Sequence[str], known: Stamps) -> Stamps:
    """Size, times, inode and SHA-256 of every file; those that look as they did in `known` are not read again."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(paths, pool.map(lambda path: _stamp(path, known), paths), strict=True))


def _stamp(path: str, known: Stamps) -> list[Any]:
    try:
        stat = os.stat(path)
        seen = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        before = known.get(path)
        known_already = isinstance(before, list) and before[:-1] == seen
        return before if known_already else [*seen, file_digest(path)]  # type: ignore[return-value]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


# --- files to parts -----------------------------------------------------------------------------------------------


def cut_into_parts(
    files: Sequence[ExaminedFile], settings: DataConfig, part_bytes: int = PART_BYTES, cut_documents: bool = False
) -> Iterator[Part]:
    """The files in parts of about `part_bytes` each, in order.

    Where they are cut depends on the files and on `part_bytes` alone. Documents stay whole, but with
    `cut_documents` a text file that is one long document is cut between words.
    """
    undecided = [file for file in files if file.source.format == "text" and file.source.split is None]
    few = len(undecided) * settings.validation_share < FEW
    for file in files:
        source, size = file.source, file.stamp[0]
        part = Part(
            str(source.path.absolute()), source.name, source.format, 0, size, size, file.stamp,
            source.split, lenient=source.lenient, max_line_bytes=settings.max_line_bytes,
        )  # fmt: skip
        if source.format == "jsonl.gz":
            yield part
        elif source.format == "parquet":
            for number, weight in enumerate(_parquet_groups(source.path)):
                yield replace(part, start=number, stop=number + 1, weight=weight)
        elif source.format == "arrow":
            rows = _read_arrow(source.path).num_rows
            step = max(1, rows * part_bytes // max(1, size))
            for start in range(0, rows, step):
                stop = min(rows, start + step)
                yield replace(part, start=start, stop=stop, weight=size * (stop - start) // rows)
        elif size == 0:
            continue
        elif source.format == "text" and settings.documents == "file":
            for whole in _file_documents(part, file.sha256, settings.validation_share, few):
                step = part_bytes if cut_documents else size
                yield from _cut(whole, step, _between_words, keep_open=True)
        else:
            blank = source.format == "text" and settings.documents == "blank-lines"
            yield from _cut(part, part_bytes, _after_blank if blank else _after_line)


def _file_documents(part: Part, sha256: str, share: float, few: bool) -> Iterator[Part]:
    """A text file as one document of one split, or, where files are few, its end as a document of validation."""
    if part.split is not None or share == 0:
        yield replace(part, split=part.split or "train")
    elif not few:
        yield replace(part, split="validation" if held_out(sha256.encode(), share) else "train")
    else:
        with open(part.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            border = _after_line(data, max(1, part.stop - int(part.stop * share)), part.stop)
        yield replace(part, stop=border, weight=border, split="train")
        if border < part.stop:
            yield replace(part, start=border, weight=part.stop - border, split="validation")


def _cut(
    part: Part, step: int, find: Callable[[mmap.mmap, int, int], int], keep_open: bool = False
) -> Iterator[Part]:
    """`part` in stretches of at least `step` bytes, each ending where `find` allows."""
    if part.stop - part.start <= step:
        yield part
        return
    with open(part.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = part.start
        while start < part.stop:
            stop = find(data, start + step, part.stop) if start + step < part.stop else part.stop
            ends = stop == part.stop or not keep_open
            yield replace(part, start=start, stop=stop, weight=stop - start, ends=ends)
            start = stop


def _after_line(data: mmap.mmap, at: int, stop: int) -> int:
    newline = data.find(b"\n", at - 1, stop)
    return stop if newline < 0 else newline + 1


def _after_blank(data: mmap.mmap, at: int, stop: int) -> int:
    match = _BLANK_BYTES.search(data, at, stop)
    return stop if match is None else match.end()


def _between_words(data: mmap.mmap, at: int, stop: int) -> int:
    match = _BETWEEN_WORDS_BYTES.search(data, at, stop)
    return stop if match is None else match.end()


# --- parts to documents and rows ----------------------------------------------------------------------------------


def read_texts(part: Part, settings: DataConfig, bad: BadRows) -> Iterator[tuple[str, bool]]:
    """The documents of a part, none of them empty, each with whether it ends here (or in a later part)."""
    if part.format != "text":
        for line, row in read_rows(part, settings.columns, bad):
            value = row[settings.field]
            if not isinstance(value, str):
                bad.add(part, line, f"{settings.field} is {_kind(value)}, not text")
            elif not _is_unicode(value):
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
        if part.format in ("jsonl", "jsonl.gz"):
            rows = _json_rows(part, bad)
        elif part.format in ("parquet", "arrow"):
            rows = _table_rows(part, columns)
        else:
            raise DataError(f"{part.name} has no rows: it is plain text")
        for line, row in rows:
            if missing := [column for column in columns if column not in row]:
                bad.add(part, line, _missing_fields(missing, list(row)))
            else:
                yield line, row
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {part.path}: {error}") from error
    _check_unchanged(part)


def _first_fields(path: Path, form: Format, max_line_bytes: int) -> list[str] | None:
    """Names of the fields in a file's first row; None where there is no readable row."""
    part = Part(str(path), path.name, form, 0, -1, 0, (0, 0))
    try:
        if form in ("parquet", "arrow"):
            return list(_schema_names(part))
        with _open_lines(part) as file:
            while raw := file.readline(max_line_bytes):  # of a longer one this is no JSON
                if raw.strip():
                    row = json.loads(raw.removeprefix(BOM))
                    return list(row) if isinstance(row, dict) else None
    except (ValueError, RecursionError):  # reported with its line when the row's turn comes
        return None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    return None


def _missing_fields(missing: list[str], present: list[str]) -> str:
    return f"no field {' and no field '.join(map(repr, missing))}; fields there: {', '.join(present) or 'none'}"


def _text(part: Part, bad: BadRows) -> str:
    """The text of a part, without the lines that are not UTF-8."""
    raw = _bytes(part)
    try:
        return raw.decode("utf-8", errors="replace" if part.lenient else "strict")
    except UnicodeDecodeError:
        kept = []
        for number, line in enumerate(raw.split(b"\n"), start=1):
            try:
                kept.append(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                bad.add(part, number, f"not UTF-8 ({error.reason} at byte {error.start} of the line)")
        return "\n".join(kept)


def _json_rows(part: Part, bad: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, raw in _json_lines(part, bad):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            bad.add(part, line, f"not UTF-8 ({error.reason} at byte {error.start} of the line)")
        except json.JSONDecodeError as error:
            bad.add(part, line, f"not JSON ({error.msg} at column {error.colno})")
        except (ValueError, RecursionError) as error:  # numbers and nestings beyond Python's limits
            bad.add(part, line, f"not JSON ({error})")
        else:
            if isinstance(row, dict):
                yield line, row
            else:
                bad.add(part, line, f"not a JSON object but {_kind(row)}")


def _json_lines(part: Part, bad: BadRows) -> Iterator[tuple[int, bytes]]:
    """The lines of a part with their numbers, but for those that are too long: they count as bad."""
    most = part.max_line_bytes
    with _open_lines(part) as file:
        file.seek(part.start)
        at, number = part.start, 0
        while (at < part.stop or part.format == "jsonl.gz") and (raw := file.readline(most + 2)):
            at, number = at + len(raw), number + 1
            if len(raw.rstrip(b"\r\n")) > most:
                bad.add(part, number, f"longer than max_line_bytes={most} (--max-line-bytes)")
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(1 << 20)
                    at += len(raw)
            else:
                yield number, raw.removeprefix(BOM) if part.start == 0 and number == 1 else raw


def _open_lines(part: Part) -> gzip.GzipFile | BufferedReader:
    return gzip.open(part.path, "rb") if part.format == "jsonl.gz" else open(part.path, "rb")


def _table_rows(part: Part, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        wanted = [name for name in _schema_names(part) if name in columns]
        if part.format == "parquet":
            file = pq.ParquetFile(part.path)
            groups = range(part.start, part.stop)
            number = sum(file.metadata.row_group(g).num_rows for g in range(part.start))
            batches = file.iter_batches(batch_size=TABLE_ROWS, row_groups=list(groups), columns=wanted)
        else:
            number = part.start
            table = _read_arrow(part.path).slice(part.start, part.stop - part.start).select(wanted)
            batches = iter(table.to_batches(max_chunksize=TABLE_ROWS))
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except pa.ArrowException as error:
        raise DataError(f"cannot read {part.path}: {_line(error)}") from error


def _read_arrow(path: str | Path) -> pa.Table:
    """An Arrow file or stream as a table that lies on the disk, not in memory."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path), "r") as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            opened = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            return opened.read_all()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {_line(error)}") from error


def _parquet_groups(path: str | Path) -> list[int]:
    """Bytes of every row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.ParquetFile(path).metadata
        return [metadata.row_group(g).total_byte_size for g in range(metadata.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {_line(error)}") from error


def _schema_names(part: Part) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return (pq.read_schema(part.path) if part.format == "parquet" else _read_arrow(part.path).schema).names
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read {part.path}: {_line(error)}") from error


def _bytes(part: Part) -> bytes:
    try:
        with open(part.path, "rb") as file:
            file.seek(part.start)
            raw = file.read(part.stop - part.start)
    except OSError as error:
        raise DataError(f"cannot read {part.path}: {error.strerror}") from error
    _check_unchanged(part)
    return raw.removeprefix(BOM) if part.start == 0 else raw


def _lines_before(part: Part) -> int:
    """Lines of the file that precede a part; tables number their rows themselves."""
    if part.format not in ("text", "jsonl"):
        return 0
    count, left = 0, part.start
    with open(part.path, "rb") as file:
        while left > 0 and (raw := file.read(min(left, 1 << 24))):
            count, left = count + raw.count(b"\n"), left - len(raw)
    return count


def _check_unchanged(part: Part) -> None:
    try:
        now = os.stat(part.path)
    except OSError as error:
        raise DataError(f"cannot read {part.path}: {error.strerror}") from error
    if (now.st_size, now.st_mtime_ns) != part.stamp:
        raise DataError(f"{part.path} changed while it was being read; start the preparation again")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a truth value", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, dict) else f"a {type(value).__name__}")


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
