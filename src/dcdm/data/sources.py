"""Where text comes from: the standard library, local files, data sets of the hub. All of them become files."""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import re
import sysconfig
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dcdm.config import DataConfig, DataError, Split
from dcdm.files import file_digest, listed_file, read_json_object

Format = Literal["text", "jsonl", "jsonl.gz", "parquet", "arrow"]
FORMATS: dict[str, Format] = {
    ".txt": "text", ".jsonl": "jsonl", ".jsonl.gz": "jsonl.gz", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
_FOREIGN = frozenset({"site-packages", "__pycache__", "lib2to3"})
STDLIB: dict[str, frozenset[str]] = {
    "stdlib": _FOREIGN | {"test", "tests", "idle_test"},
    "stdlib-code": _FOREIGN | {"encodings", "pydoc_data"},
    "stdlib-library": _FOREIGN | {"test", "tests", "idle_test", "encodings", "pydoc_data"},
}
"""Names of the standard library's source → folders left out: its tests, its tables and help texts, or both."""
STDLIB_SHARE = 0.05
NAMED = 10  # folders, files and bad places that a report names
PATIENCE = 3.0  # seconds in which the hub must answer


@dataclass(frozen=True)
class SourceFile:
    """One file of a source; `name` is how manifests and reports call it."""

    path: Path
    name: str
    format: Format
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


@dataclass
class Skipped:
    """What was found where text was looked for, and is not read."""

    other_kinds: Counter[str] = field(default_factory=Counter)
    """Files by the ending of their names, "" for none."""
    hidden: int = 0
    """Files and folders whose names begin with a dot."""
    empty: int = 0
    """Files of known kinds without a byte."""
    unreadable: list[str] = field(default_factory=list)
    """Folders that could not be looked into, with the reason."""
    in_validation: list[str] = field(default_factory=list)
    """Files named for training whose text the validation sources hold too."""

    def sentences(self) -> list[str]:
        """What a user should hear; nothing where nothing was skipped."""
        kinds = ", ".join(f"{n} {ending or 'without ending'}" for ending, n in self.other_kinds.most_common(NAMED))
        said = {
            "folders that cannot be read, so that their files are missing": _counted(self.unreadable),
            "files of validation (--validation) left out of training": _counted(self.in_validation),
            "skipped files of other kinds": f"{self.other_kinds.total()} ({kinds})" if kinds else "",
            "skipped empty files": self.empty,
            "skipped hidden files and folders": self.hidden,
        }
        return [f"{what}: {count}" for what, count in said.items() if count]


def _counted(names: list[str]) -> str:
    """How many there are, and the first of them."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{len(names)} ({'; '.join(names[:NAMED])}{more})" if names else ""


def resolve(
    spec: str, settings: DataConfig, split: Split | None = None, skipped: Skipped | None = None
) -> list[SourceFile]:
    """The files of `spec`, in order; all of them of `split` if one is named. `skipped` counts what is not read.

    `spec` is `stdlib`, `stdlib-code` or `stdlib-library`, a file, a folder, a glob pattern, or a data set of the
    Hugging Face hub (`name`, `name/config` or either with `:split`; `hf:` before it forces this reading).
    """
    if spec in STDLIB:
        files = _stdlib(settings, spec)
    elif spec.startswith("hf:"):
        files = _hub(spec.removeprefix("hf:"))
    else:
        local = _local(spec, skipped or Skipped())
        files = _hub(spec) if local is None else local
    if settings.fine_tuning and (plain := next((f for f in files if f.format == "text"), None)):
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


def held_out(name: bytes, share: float) -> bool:
    """Whether what is called `name` belongs to validation: a matter of its hash alone."""
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") < share * 2**64


# --- the standard library ----------------------------------------------------------------------------------------


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
    paths: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in STDLIB[source]]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    files = []
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        split: Split = "validation" if held_out(name.encode(), settings.validation_share) else "train"
        files.append(SourceFile(path, name, "text", split, lenient=True))
    if not files:
        raise DataError(f"{source}: no Python source files under {root}: is the standard library packed in a zip?")
    return files


# --- local files -------------------------------------------------------------------------------------------------


def _local(spec: str, skipped: Skipped) -> list[SourceFile] | None:
    """Files of a path or pattern; None where `spec` can only be a name on the hub."""
    path = Path(spec).expanduser()
    if path.is_file():
        return _named([path], path.parent)
    if path.is_dir():
        return _folder(path, skipped)
    if glob.has_magic(spec):
        return _matches(path)
    folder, colon, split = spec.rpartition(":")
    if colon and (saved := Path(folder).expanduser()).is_dir():
        return _saved_dict(saved, split)
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


def _format(path: Path) -> Format | None:
    return next((kind for suffix, kind in FORMATS.items() if path.name.endswith(suffix)), None)


def _matches(pattern: Path) -> list[SourceFile]:
    files = [path for path in map(Path, glob.glob(str(pattern), recursive=True)) if path.is_file()]
    if not files:
        raise DataError(f"{pattern}: no file matches this pattern")
    root = next(parent for parent in pattern.parents if not glob.has_magic(str(parent)))
    return _named(files, root)


def _folder(folder: Path, skipped: Skipped) -> list[SourceFile]:
    """Every file of a known kind below `folder`, or a data set that `datasets` saved there."""
    if (folder / "dataset_dict.json").is_file():
        return _saved_dict(folder, "train")
    if (folder / "state.json").is_file():
        return _saved(folder)

    def unreadable(error: OSError) -> None:
        skipped.unreadable.append(f"{error.filename}: {error.strerror}")

    paths = []
    for here, folders, names in os.walk(folder, onerror=unreadable):
        skipped.hidden += sum(name.startswith(".") for name in (*folders, *names))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(here, name) for name in names if not name.startswith(".")):
            if _format(path) is not None and path.is_file():
                paths.append(path)
            else:
                skipped.other_kinds[path.suffix] += 1
    if not paths:
        said = "".join(f"; {sentence}" for sentence in skipped.sentences())
        raise DataError(f"{folder}: the folder holds no file that ends in {', '.join(FORMATS)}{said}")
    return _named(paths, folder)


def _saved_dict(folder: Path, split: str) -> list[SourceFile]:
    saved = sorted(p.parent.name for p in folder.glob("*/state.json"))
    if split not in saved:
        raise DataError(f"{folder}: there is no split {split!r}; saved here: {', '.join(saved) or 'none'}")
    return _saved(folder / split)


def _saved(folder: Path) -> list[SourceFile]:
    try:
        state = read_json_object(folder / "state.json")
        names = [listed_file(folder, entry["filename"]).name for entry in state["_data_files"]]
        indexed = bool(state.get("_indices_data_files"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}/state.json is not what datasets saves: {error!r}") from error
    if indexed:
        raise DataError(
            f"{folder}: the saved data set selects rows by index; save it again after flatten_indices()"
        )
    return [SourceFile(folder / name, name, "arrow") for name in names]


# --- the hub -----------------------------------------------------------------------------------------------------


def _hub(spec: str) -> list[SourceFile]:
    """The files of a data set once `datasets` has fetched it into its cache."""
    match = re.fullmatch(r"(?P<name>[^:]+)(?::(?P<split>[\w.-]+))?", spec)
    if match is None:
        raise DataError(f"{spec!r} is neither a file here nor the name of a data set; write name/config:split")
    import datasets

    name, split = match["name"], match["split"] or "train"
    answers, failures = hub_answers(), []
    for arguments in _readings(name):
        try:
            data = datasets.load_dataset(*arguments, split=split)
        except Exception as error:  # network, cache, script and split errors have no common base
            failures.append(str(error).strip().partition("\n")[0] or type(error).__name__)
            continue
        paths = [Path(entry["filename"]) for entry in data.cache_files]
        if not paths:
            raise DataError(f"{spec}: datasets keeps no files of this data set; save it with save_to_disk first")
        label = "/".join(arguments) if not Path(name).is_dir() else Path(name).name
        return [SourceFile(p, f"{label}:{split}/{p.name}", "arrow") for p in paths]
    if answers:
        raise DataError(
            f"{spec!r} is not a file or folder here, and datasets cannot load it: {'; '.join(failures)}"
        )
    beside = glob.glob(os.path.join(glob.escape(os.path.dirname(spec)), "*"))
    near = difflib.get_close_matches(spec, [*STDLIB, *beside], n=1)
    raise DataError(
        f"{spec!r} is not a file or folder here, and the hub, which might have a data set of this name, cannot "
        f"be reached{f'; did you mean {near[0]}?' if near else ''}"
    )


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


def _readings(name: str) -> list[tuple[str, ...]]:
    """What a slash may mean: a folder, owner/name, owner/name/config, or name/config."""
    parts = name.split("/")
    if len(parts) == 1 or Path(name).is_dir():
        return [(name,)]
    if len(parts) == 2:
        return [(name,), (parts[0], parts[1])]
    return [("/".join(parts[:2]), "/".join(parts[2:]))]
