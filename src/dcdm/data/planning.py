"""What a preparation will read, cut into units of work that depend on the source alone, never on the workers."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from dcdm.config import DataError
from dcdm.data.reading import BLANK, Part, first_fields, missing_fields, parquet_groups, read_arrow
from dcdm.data.settings import DataConfig, held_out
from dcdm.data.sources import SourceFile
from dcdm.data.tokenizers import BETWEEN_WORDS
from dcdm.files import digest, file_digest

FORMAT = 1  # raise it when the same source would give other shards
UNIT_BYTES = (2 << 20, 64 << 20)  # least and most source bytes of a unit, and so of a shard
MOST_UNITS = 1024
FEW = 5  # expected number of held-out files below which each file gives its end to validation instead
_BLANK = re.compile(BLANK.pattern.encode())
_WORDS = re.compile(BETWEEN_WORDS.pattern.encode())

Stamps = dict[str, list[Any]]


@dataclass(frozen=True)
class PlannedFile:
    """A source file, its size and modification time, and its contents' hash."""

    source: SourceFile
    stamp: tuple[int, int]
    sha256: str

    def entry(self) -> dict[str, Any]:
        source = self.source
        return {"name": source.name, "bytes": self.stamp[0], "sha256": self.sha256, "split": source.split}


@dataclass(frozen=True)
class Unit:
    """What one worker turns into one shard per split."""

    number: int
    parts: tuple[Part, ...]

    @property
    def weight(self) -> int:
        return sum(part.weight for part in self.parts)


def examine(sources: Sequence[SourceFile], settings: DataConfig, known: Stamps) -> tuple[list[PlannedFile], Stamps]:
    """Check that every file can be read and has the fields asked for, and hash it.

    Files that look as they did in `known` (size, times, inode) are not read again; the second result is
    `known` for the next time.
    """
    paths = list({str(source.path.absolute()): source for source in sources}.items())
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        marks = list(pool.map(lambda item: _mark(item[0], known), paths))
    stamps: Stamps = {path: mark for (path, _), mark in zip(paths, marks, strict=True)}
    for _, source in paths:
        if source.format != "text":
            fields = first_fields(source.path, source.format)
            if fields is not None and (missing := [c for c in settings.columns if c not in fields]):
                raise DataError(
                    f"{source.path}: {missing_fields(missing, fields)}. Name the right one with field (--field), "
                    "prompt_field and response_field, or messages_field"
                )
    files = []
    for source in sources:
        mark = stamps[str(source.path.absolute())]
        files.append(PlannedFile(source, (mark[0], mark[1]), mark[-1]))
    return files, stamps


def _mark(path: str, known: Stamps) -> list[Any]:
    try:
        stat = os.stat(path)
        seen = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        before = known.get(path)
        return before if before is not None and before[:-1] == seen else [*seen, file_digest(path)]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def plan_of(
    files: Sequence[PlannedFile], settings: DataConfig, tokenizer: dict[str, Any], validation_given: bool
) -> dict[str, Any]:
    """All that decides the result. Two preparations with equal plans give the same bytes."""
    return {
        "format": FORMAT,
        "unit_bytes": list(UNIT_BYTES),
        "tokenizer": tokenizer,
        "settings": settings.identity(validation_given),
        "source": [file.entry() for file in files],
    }


def plan_digest(plan: dict[str, Any]) -> str:
    return digest(plan)


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Why a preparation by plan `old` does not serve plan `new`, in words."""
    reasons = []
    if old.get("format") != new["format"]:
        reasons.append(f"it has format {old.get('format')}, this version writes {new['format']}")
    if old.get("unit_bytes") != new["unit_bytes"]:
        reasons.append("it was cut into shards of another size")
    if old.get("tokenizer") != new["tokenizer"]:
        reasons.append(f"the tokenizer was {_called(old.get('tokenizer', {}))} and is {_called(new['tokenizer'])}")
    was, now = old.get("settings", {}), new["settings"]
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            reasons.append(f"{name} was {was.get(name)!r} and is {now.get(name)!r}")
    if old.get("source") != new["source"]:
        reasons.append(_source_difference(old.get("source", []), new["source"]))
    return "; ".join(reasons) or "the plans differ"


def _called(tokenizer: dict[str, Any]) -> str:
    mark = tokenizer.get("fingerprint", "")[:12]
    return f"{tokenizer.get('spec')} ({mark})" if mark else str(tokenizer.get("spec"))


def _source_difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    was, now = ({entry["name"]: entry for entry in entries} for entries in (old, new))
    changed = [name for name in now if name in was and was[name]["sha256"] != now[name]["sha256"]]
    moved = [name for name in now if name in was and was[name]["split"] != now[name]["split"]]
    groups = {
        "changed": changed, "new": [n for n in now if n not in was], "gone": [n for n in was if n not in now],
        "in another split": moved,
    }  # fmt: skip
    words = []
    for word, names in groups.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            words.append(f"{word}: {', '.join(names[:3])}{more}")
    return f"the source differs ({'; '.join(words) or 'its order changed'})"


def units_of(
    files: Sequence[PlannedFile], settings: DataConfig, cut_documents: bool, unit_bytes: int | None = None
) -> list[Unit]:
    """The work, in the order of the source. `cut_documents`: long files may be cut within a document."""
    if unit_bytes is None:
        total = sum(file.stamp[0] for file in files)
        unit_bytes = min(max(total // MOST_UNITS, UNIT_BYTES[0]), UNIT_BYTES[1])
    units: list[Unit] = []
    waiting: list[Part] = []
    weight = 0
    for part in _parts(files, settings, cut_documents, unit_bytes):
        waiting.append(part)
        weight += part.weight
        if weight >= unit_bytes:
            units.append(Unit(len(units), tuple(waiting)))
            waiting, weight = [], 0
    if waiting:
        units.append(Unit(len(units), tuple(waiting)))
    return units


def _parts(
    files: Sequence[PlannedFile], settings: DataConfig, cut_documents: bool, unit_bytes: int
) -> Iterator[Part]:
    undecided = [file for file in files if file.source.format == "text" and file.source.split is None]
    few = len(undecided) * settings.validation_share < FEW
    for file in files:
        source, size = file.source, file.stamp[0]
        part = Part(
            str(source.path.absolute()), source.name, source.format, 0, size, size, file.stamp,
            source.split, lenient=source.lenient,
        )  # fmt: skip
        if source.format == "jsonl.gz":
            yield part
        elif source.format == "parquet":
            for number, weight in enumerate(parquet_groups(source.path)):
                yield replace(part, start=number, stop=number + 1, weight=weight)
        elif source.format == "arrow":
            rows = read_arrow(source.path).num_rows
            step = max(1, rows * unit_bytes // max(1, size))
            for start in range(0, rows, step):
                stop = min(rows, start + step)
                yield replace(part, start=start, stop=stop, weight=size * (stop - start) // rows)
        elif size == 0:
            continue
        elif source.format == "text" and settings.documents == "file":
            for whole in _file_documents(part, file.sha256, settings.validation_share, few):
                step = unit_bytes if cut_documents else size
                yield from _cut(whole, step, _between_words, keep_open=True)
        else:
            blank = source.format == "text" and settings.documents == "blank-lines"
            yield from _cut(part, unit_bytes, _after_blank if blank else _after_line)


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
    found = data.find(b"\n", at - 1, stop)
    return stop if found < 0 else found + 1


def _after_blank(data: mmap.mmap, at: int, stop: int) -> int:
    found = _BLANK.search(data, at, stop)
    return stop if found is None else found.end()


def _between_words(data: mmap.mmap, at: int, stop: int) -> int:
    found = _WORDS.search(data, at, stop)
    return stop if found is None else found.end()


def sample_order(units: Sequence[Unit]) -> list[Unit]:
    """The units in an order that spreads over the source, for looking at only some of them."""
    return sorted(units, key=lambda unit: digest(["sample", unit.number]))
