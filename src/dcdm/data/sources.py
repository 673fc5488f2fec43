"""Text, from its names to its documents: sources to files, files cut into parts, parts read document by document.

A source is the standard library, the addresses that come with dcdm, local files or a data set of the hub; all of
them become files. What cannot be read is named by file and line.
"""

from __future__ import annotations

import difflib
import glob
import gzip
import hashlib
import json
import lzma
import mmap
import os
import re
import sysconfig
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from dcdm.config import DataConfig, DataError, Split
from dcdm.files import file_digest
from dcdm.shipped import HOME

T = TypeVar("T")

FORMATS = {
    ".txt": "text", ".txt.xz": "lines.xz", ".jsonl": "jsonl", ".jsonl.gz": "jsonl.gz", ".parquet": "parquet",
    ".arrow": "arrow",
}  # fmt: skip
_FOREIGN = frozenset({"site-packages", "__pycache__", "lib2to3"})
STDLIB: dict[str, frozenset[str]] = {
    "stdlib": _FOREIGN | {"test", "tests", "idle_test"},
    "stdlib-code": _FOREIGN | {"encodings", "pydoc_data"},
    "stdlib-library": _FOREIGN | {"test", "tests", "idle_test", "encodings", "pydoc_data"},
}
"""Names of the standard library's source → folders left out: its tests, its tables and help texts, or both."""
STDLIB_SHARE = 0.05
ADDRESSES = "addresses"
"""English in the package: the State of the Union addresses, each a document (`shipped/addresses.md`)."""
OWN = (*STDLIB, ADDRESSES)
"""The names whose held-out share is part of what they mean."""
PACKED: dict[str, Callable[..., Any]] = {"lines.xz": lzma.open, "jsonl.gz": gzip.open}
"""What cannot be read from the middle, and how it is opened."""
HUB_COPIES = {
    # 80 parquet files, 8,013,769 documents; the name alone leads to a loading script, which `datasets` 4 and later
    # refuse to run, and refs/convert/parquet has been a part of the corpus only
    "openwebtext": ("Skylion007/openwebtext", "79d93d786212f7344586290adb811d4ae6a1762c"),
}
"""Known corpora of the hub → the repository and commit that `datasets` loads without running a script."""
NAMED = 10  # files and folders that a report names
PATIENCE = 3.0  # seconds in which the hub must answer
PART_BYTES = 64 << 20  # of a part where nobody asks for another size
TABLE_ROWS = 1024  # rows of a table that are Python objects at one time
FEW = 5  # expected number of held-out files below which each file gives its end to validation instead
LINE = re.compile(r"(?<=\n)")
BETWEEN_WORDS = re.compile(r"[A-Za-z](?= [A-Za-z])|[!-~]\n(?=[!-~])")  # long text may be cut where a match ends
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class SourceFile:
    """One file of a source; `name` is how manifests and reports call it."""

    path: Path
    name: str
    format: str
    """One of FORMATS."""
    split: Split | None = None
    """None: each document's hash decides."""
    lenient: bool = False
    """Whether bytes that are not UTF-8 are replaced rather than reported."""
    size: int = 0
    modified: int = 0
    """When, in nanoseconds; with size and hash known once the file was examined."""
    sha256: str = ""

    def entry(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.size, "sha256": self.sha256, "split": self.split}


def listed(names: Sequence[str]) -> str:
    """How many, and the first of them."""
    return f"{len(names)} ({'; '.join(names[:NAMED])}{', …' if len(names) > NAMED else ''})"


# --- names to files ----------------------------------------------------------------------------------------------


def resolve(
    spec: str, settings: DataConfig, split: Split | None = None, say: Callable[[str], None] = lambda _: None
) -> list[SourceFile]:
    """The files of `spec`, in order; all of them of `split` if one is named. `say` hears what is not read.

    `spec` is `stdlib`, `stdlib-code`, `stdlib-library` or `addresses`, a file, a folder, a glob pattern, or a data
    set of the Hugging Face hub (`name`, `owner/name` or `owner/name/config`, each with `:split`; `hf:` before it
    forces this).
    """
    if spec in STDLIB:
        files = _stdlib(settings, spec)
    elif spec == ADDRESSES:
        files = _named([HOME / "addresses.txt.xz"], HOME)
    else:
        local = None if spec.startswith("hf:") else _local(spec, say)
        files = _hub(spec.removeprefix("hf:")) if local is None else local
    if settings.fine_tuning and (plain := next((f for f in files if f.format in ("text", "lines.xz")), None)):
        raise DataError(f"{plain.name} is plain text; prompts and responses come from rows, as in .jsonl")
    return files if split is None else [replace(file, split=split) for file in files]


def examine(files: Sequence[SourceFile]) -> list[SourceFile]:
    """The files with their sizes, times and hashes; every byte is read."""

    def examined(file: SourceFile) -> SourceFile:
        try:
            stat = os.stat(file.path)
            return replace(file, size=stat.st_size, modified=stat.st_mtime_ns, sha256=file_digest(file.path))
        except OSError as error:
            raise DataError(f"cannot read {file.path}: {error.strerror}") from error

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(examined, files))


def split_by_hash(name: bytes, share: float) -> Split:
    """The split of what is called `name`: a matter of its hash alone."""
    number = int.from_bytes(hashlib.sha256(name).digest()[:8], "big")
    return "validation" if number < share * 2**64 else "train"


def stdlib_files(split: str, source: str = "stdlib") -> list[Path]:
    """The standard library's source files of a split, `train` or `validation` (one file in twenty), in order.

    A file's split depends on its name alone.
    """
    files = _stdlib(DataConfig(validation_share=STDLIB_SHARE), source)
    return [file.path for file in files if file.split == split]


def stdlib_documents(split: str) -> Iterator[str]:
    for path in stdlib_files(split):
        yield path.read_bytes().decode("utf-8", errors="replace")


def _stdlib(settings: DataConfig, source: str) -> list[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if not STDLIB[source].intersection(inside.parts[:-1]):
            split = split_by_hash(inside.as_posix().encode(), settings.validation_share)
            files.append(SourceFile(path, inside.as_posix(), "text", split, lenient=True))
    if not files:
        raise DataError(f"{source}: no Python source files under {root}: is the standard library packed in a zip?")
    return files


def _local(spec: str, say: Callable[[str], None]) -> list[SourceFile] | None:
    """Files of a path or pattern; None where `spec` can only be a name on the hub."""
    path = Path(spec).expanduser()
    if path.is_file():
        return _named([path], path.parent)
    if path.is_dir():
        return _folder(path, say)
    if glob.has_magic(spec):
        files = [file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file()]
        if not files:
            raise DataError(f"{path}: no file matches this pattern")
        return _named(files, next(parent for parent in path.parents if not glob.has_magic(str(parent))))
    if spec.startswith((".", "/", "~")) or _format(path) is not None:
        raise DataError(f"{spec}: there is no such file or folder")
    return None


def _named(paths: list[Path], root: Path) -> list[SourceFile]:
    """The files, called by their ways from `root`."""
    files = []
    for path in sorted(paths):
        if (kind := _format(path)) is None:
            raise DataError(f"{path}: unknown kind of file; known are {', '.join(FORMATS)}")
        files.append(SourceFile(path, path.relative_to(root).as_posix(), kind))
    return files


def _format(path: Path) -> str | None:
    return next((kind for suffix, kind in FORMATS.items() if path.name.endswith(suffix)), None)


def _folder(folder: Path, say: Callable[[str], None]) -> list[SourceFile]:
    """Every file of a known kind below `folder`."""
    if (folder / "dataset_dict.json").is_file():
        saved = ", ".join(sorted(str(state.parent) for state in folder.glob("*/state.json")))
        raise DataError(f"{folder} holds a data set of several splits; name one: {saved or 'there is none'}")

    def unreadable(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}; make it readable, or name the files")

    paths: list[Path] = []
    others: list[Path] = []
    for here, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(here, name) for name in sorted(names) if not name.startswith(".")):
            is_state = "state.json" in names and not path.name.startswith("data-")  # of a saved data set
            known = _format(path) is not None and path.is_file() and not is_state
            (paths if known else others).append(path)
    if not paths:
        raise DataError(f"{folder}: the folder holds no file that ends in {', '.join(FORMATS)}")
    if others:
        names = sorted(path.relative_to(folder).as_posix() for path in others)
        say(f"skipping files of other kinds: {listed(names)}")
    return _named(paths, folder)


def _hub(spec: str) -> list[SourceFile]:
    """The files of a data set once `datasets` has fetched it into its cache."""
    import datasets

    asked, _, split = spec.partition(":")
    name, revision = HUB_COPIES.get(asked, (asked, None))
    parts = name.split("/")
    names = [name] if Path(name).is_dir() else ["/".join(parts[:2]), *parts[2:]]  # owner/name, and a configuration
    answers = hub_answers()
    try:
        data = datasets.load_dataset(*names, split=split or "train", revision=revision)
    except Exception as error:  # network, cache, script and split errors have no common base
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        why = f"datasets cannot load it: {reason}"
        if not answers:
            beside = glob.glob(os.path.join(glob.escape(os.path.dirname(spec)), "*"))
            near = difflib.get_close_matches(spec, [*OWN, *beside], n=1)
            why = "the hub, which might have a data set of this name, cannot be reached"
            why += f"; did you mean {near[0]}?" if near else ""
        raise DataError(f"{spec!r} is not a file or folder here, and {why}") from error
    label = Path(name).name if Path(name).is_dir() else "/".join(names)
    paths = [Path(entry["filename"]) for entry in data.cache_files]
    return [SourceFile(path, f"{label}:{split or 'train'}/{path.name}", "arrow") for path in paths]


@cache
def hub_answers() -> bool:
    """Whether the Hugging Face hub, or the mirror that HF_ENDPOINT names, answers anything.

    Where it does not, its libraries look into their caches alone from now on: they would try again for a minute.
    """
    import datasets.config
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        try:
            asked = urllib.request.Request(constants.ENDPOINT, method="HEAD")
            urllib.request.urlopen(asked, timeout=PATIENCE).close()
        except urllib.error.HTTPError:
            pass  # whoever answers is there
        except (OSError, ValueError):
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


# --- files to parts ----------------------------------------------------------------------------------------------


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
        if file.format in PACKED:
            yield whole
        elif file.format == "parquet":
            with _table(file.path) as table:
                groups = table.metadata
            for number in range(groups.num_row_groups):
                weight = groups.row_group(number).total_byte_size
                yield replace(whole, start=number, stop=number + 1, weight=weight)
        elif file.format == "arrow":
            with _table(file.path) as table:
                rows = table.num_rows
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
            yield from _cut(whole, part_bytes, LINE)


def _file_documents(part: Part, share: float, few: bool) -> Iterator[Part]:
    """A text file as one document of one split, or, where files are few, its end as a document of validation."""
    if part.split is not None or share == 0:
        yield replace(part, split=part.split or "train")
    elif not few:
        yield replace(part, split=split_by_hash(part.file.sha256.encode(), share))
    else:
        border = _border(part, LINE, max(1, part.stop - int(part.stop * share)))
        yield replace(part, stop=border, weight=border, split="train")
        if border < part.stop:
            yield replace(part, start=border, weight=part.stop - border, split="validation")


def _cut(part: Part, step: int, border: re.Pattern[str], keep_open: bool = False) -> Iterator[Part]:
    """`part` in stretches of at least `step` bytes, each ending where `border` does."""
    start = part.start
    while start < part.stop:
        stop = _border(part, border, start + step)
        ends = stop == part.stop or not keep_open
        yield replace(part, start=start, stop=stop, weight=stop - start, ends=ends)
        start = stop


def _border(part: Part, border: re.Pattern[str], at: int) -> int:
    """Where the first `border` from `at` on ends, or the part."""
    if at >= part.stop:
        return part.stop
    pattern = re.compile(border.pattern.encode())
    with open(part.file.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return next((match.end() for match in pattern.finditer(data, at, part.stop)), part.stop)


# --- parts to documents and rows ---------------------------------------------------------------------------------


class BadRow(Exception):
    """A row that cannot be used; the message says why."""


def _refused(part: Part, line: int, reason: str) -> DataError:
    """What is wrong in `line` of a part, in text and JSONL counted from the part's first."""
    return DataError(f"{part.file.name}:{_lines_before(part) + line}: {reason}; repair it, or leave it out")


def read_texts(part: Part, settings: DataConfig) -> Iterator[tuple[str, bool]]:
    """The documents of a part, none of them empty, each with whether it ends here (or in a later part)."""
    kind = {"text": settings.documents, "lines.xz": "lines"}.get(part.file.format, "rows")
    if kind == "file":
        text = _text(part)
        if text or part.start:  # a later part may end the document with no text of its own
            yield text, part.ends
        return
    texts: Iterable[str]
    if kind == "rows":
        texts = read_rows(part, (settings.field,), lambda row: text_of(row, settings.field))
    else:
        texts = (line.removesuffix("\n").rstrip("\r") for line in _decoded(part, _lines(part)))
    for text in texts:
        if text if kind == "rows" else text.strip():
            yield text, True


def read_rows(part: Part, columns: tuple[str, ...], use: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """What `use` makes of every row of a part that holds `columns`; it raises BadRow where a row cannot be used."""
    is_table = part.file.format in ("parquet", "arrow")
    rows: Iterator[tuple[int, Any]] = _table_rows(part, columns) if is_table else _lines(part)
    with _reading(part):
        for number, row in rows:
            if not is_table and not row.strip():
                continue
            try:
                yield use(row if is_table else _parsed(row, columns))
            except BadRow as error:
                raise _refused(part, number, str(error)) from error


def text_of(row: dict[str, Any], name: str) -> str:
    """The text in a row's field `name`."""
    value = row.get(name)
    if not isinstance(value, str):
        raise BadRow(f"{name} is {json.dumps(value, default=str)[:40]}, not text")
    if not is_unicode(value):
        raise BadRow(f"{name} holds half a surrogate pair, which no encoding can hold")
    return value


def is_unicode(text: str) -> bool:
    """Whether text can be encoded: half a surrogate pair cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def _reading(part: Part) -> Iterator[None]:
    """Name the file that cannot be read, or that changes while it is read."""
    try:
        yield
        now = os.stat(part.file.path)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"cannot read {part.file.path}: {error}") from error
    if (now.st_size, now.st_mtime_ns) != (part.file.size, part.file.modified):
        raise DataError(f"{part.file.path} changed while it was being read; start the preparation again")


def _text(part: Part) -> str:
    with _reading(part), open(part.file.path, "rb") as file:
        file.seek(part.start)
        raw = file.read(part.stop - part.start)
    raw = raw.removeprefix(BOM) if part.start == 0 else raw
    try:
        return raw.decode("utf-8", errors="replace" if part.file.lenient else "strict")
    except UnicodeDecodeError:
        return "\n".join(_decoded(part, enumerate(raw.split(b"\n"), start=1)))  # names the line


def _decoded(part: Part, lines: Iterable[tuple[int, bytes]]) -> Iterator[str]:
    """Lines as text."""
    with _reading(part):
        for number, raw in lines:
            try:
                yield raw.decode("utf-8", errors="replace" if part.file.lenient else "strict")
            except UnicodeDecodeError as error:
                reason = f"not UTF-8 ({error.reason} at byte {error.start} of the line)"
                raise _refused(part, number, reason) from error


def _lines(part: Part) -> Iterator[tuple[int, bytes]]:
    """The lines of a part, numbered from 1."""
    packed, at = part.file.format in PACKED, part.start
    with PACKED.get(part.file.format, open)(part.file.path, "rb") as lines:
        lines.seek(part.start)
        for number, raw in enumerate(lines, start=1):
            if at >= part.stop and not packed:
                break
            yield number, raw.removeprefix(BOM) if at == 0 else raw
            at += len(raw)


def _parsed(line: bytes, columns: tuple[str, ...]) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadRow(f"not JSON in UTF-8 ({error})") from error
    if not isinstance(row, dict):
        raise BadRow(f"not a JSON object but {json.dumps(row)[:40]}")
    if missing := _missing(columns, list(row)):
        raise BadRow(missing)
    return row


def _table_rows(part: Part, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    with _table(part.file.path) as table:
        names = (table.schema_arrow if part.file.format == "parquet" else table.schema).names
        if missing := _missing(columns, names):
            raise DataError(f"{part.file.path}: {missing}")
        if part.file.format == "parquet":
            number = sum(table.metadata.row_group(group).num_rows for group in range(part.start))
            batches = table.iter_batches(TABLE_ROWS, list(range(part.start, part.stop)), list(columns))
        else:
            number = part.start
            rows = table.slice(part.start, part.stop - part.start).select(list(columns))
            batches = rows.to_batches(max_chunksize=TABLE_ROWS)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=number + 1)


@contextmanager
def _table(path: Path) -> Iterator[Any]:
    """An Arrow file or stream as a table, or an opened Parquet file; both lie on the disk, not in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not is_unicode(str(path)):
        raise DataError(f"cannot read {path}: pyarrow opens paths in UTF-8 only; rename it")
    try:
        if _format(path) == "parquet":
            yield pq.ParquetFile(path)
            return
        with pa.memory_map(str(path), "r") as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            yield (pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)).read_all()
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
        while raw := file.read(min(left, 1 << 24)):
            count, left = count + raw.count(b"\n"), left - len(raw)
    return count
