"""Checkpoints on the disk: what makes one whole, how it is read, and which run it belongs to.

    step-00001000/             a whole checkpoint; it got this name by a rename, when nothing was left to write
      manifest.json            SHA-256 of every other file, step, metrics, versions; and one of its own content
      rank-00000.safetensors   what this rank held: its shards, and where each lies in the whole tensor
      state.json               the run's record and the optimizer's settings
    step-00001000.partial      being written, or left behind by a run that was killed
    step-00001000.replaced     an older checkpoint of the same step while the new one takes its place
    step-00001000.deleted      on its way out
    .lock                      held by the run that writes here

No format notices a single flipped bit by itself, so nothing is read before the manifest holds. It protects against
damage, not against malice: who can write a checkpoint can write its manifest. But all there is to read is JSON and
safetensors, so a stranger's checkpoint can be wrong and cannot run anything. There are no pickles in this format.

Its record holds the settings it was trained with and fingerprints of the tokenizer and of the shards. A run is
resumed, verified and loaded only with these. Shards are hashed before training, and remembered in the run folder by
size, times and inode.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from dcdm.config import VERSION, ConfigError, DataError
from dcdm.data.store import PreparedData
from dcdm.data.tokenizers import Tokenizer
from dcdm.distributed import Precision
from dcdm.files import (
    UnreadableFile,
    file_digest,
    listed_file,
    parse_json,
    read_json_object,
    read_limited,
    write_whole,
)
from dcdm.training import settings as run_settings
from dcdm.training.settings import RunConfig

CHECKPOINTS, SETTINGS, TOKENIZER, HASHED = "checkpoints", "settings.yaml", "tokenizer", "data_hashed.json"
"""Names in a run's folder."""
MANIFEST, STATE = "manifest.json", "state.json"
SHARDS = "shards"  # entry of a safetensors header: {name: [shape of the whole tensor, where the shard begins]}
FORMAT = 3
STEP_NAME = re.compile(r"step-(\d{8,})")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip

Index = tuple[int, ...]
Stored = tuple[Index, torch.dtype]
"""Shape and type of a whole tensor."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used; the message names the folder and what to do."""


class UnusableCheckpoint(CheckpointError, DataError):
    """What is on the disk cannot be used: damaged, of another run, locked, or in a place that cannot be written."""


# --- manifests ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """Written last, so that its presence says that all the rest is there."""

    step: int
    metrics: dict[str, float | None]
    """Figures of that step; one that was not finite is None."""
    files: dict[str, str]
    """SHA-256 of every other file."""
    versions: dict[str, str]
    format: int = FORMAT


def write_manifest(folder: Path, step: int, metrics: dict[str, float | None], files: dict[str, str]) -> None:
    python = platform.python_version()
    versions = {"dcdm": VERSION, "torch": torch.__version__, "numpy": numpy.__version__, "python": python}
    write_whole(folder / MANIFEST, _sealed(asdict(Manifest(step, metrics, files, versions))))


def _sealed(content: dict[str, Any]) -> bytes:
    """The bytes of a manifest, with a SHA-256 of its own content."""
    seal = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**content, "seal": seal}, indent=1, sort_keys=True) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, whole and unaltered, or an UnusableCheckpoint that says what is wrong."""
    if not os.path.lexists(folder / MANIFEST):
        raise UnusableCheckpoint(f"{folder}: {MANIFEST} is missing")
    try:
        raw = read_limited(listed_file(folder, MANIFEST))
    except UnreadableFile as error:
        raise UnusableCheckpoint(f"{folder}: {MANIFEST} cannot be read ({error})") from error
    try:
        content = parse_json(raw)
        del content["seal"]
        if _sealed(content) != raw:
            raise ValueError("seal")
        if (found := content["format"]) != FORMAT:
            raise UnusableCheckpoint(
                f"{folder}: it has format {found}, and this version reads format {FORMAT} alone, which has no "
                f"pickles; export it with dcdm {content.get('versions', {}).get('dcdm', 'unknown')}, which wrote it"
            )
        manifest = Manifest(**content)
        figures = all(value is None or isinstance(value, int | float) for value in manifest.metrics.values())
        if not (_is_count(manifest.step) and figures and all(isinstance(s, str) for s in manifest.files.values())):
            raise ValueError("a sealed manifest may still be wrong: its seal is no signature")
    except UnusableCheckpoint:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnusableCheckpoint(f"{folder}: {MANIFEST} is damaged") from None
    return manifest


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def verify_checkpoint(path: str | Path) -> list[str]:
    """Everything that is wrong with the checkpoint at `path`; an empty list if it is whole."""
    folder = Path(path)
    if not folder.is_dir():
        return [f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist"]
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error).removeprefix(f"{folder}: ")]
    problems = []
    if (named := STEP_NAME.fullmatch(folder.name)) and int(named[1]) != manifest.step:
        problems.append(f"the folder is named after step {int(named[1])}, but holds step {manifest.step}")
    try:
        strays = sorted({entry.name for entry in folder.iterdir()} - {MANIFEST, *manifest.files})
    except OSError as error:
        return [f"the folder cannot be listed ({error.strerror})"]
    problems += [f"{name} is not in the manifest" for name in strays]
    with ThreadPoolExecutor() as pool:  # hashing frees the interpreter; large checkpoints have many files
        found = pool.map(lambda entry: _damage(folder, *entry), manifest.files.items())
    return problems + [problem for problem in found if problem is not None]


def _damage(folder: Path, name: str, sha256: str) -> str | None:
    """What is wrong with a file that should have this SHA-256."""
    try:
        same = file_digest(listed_file(folder, name)) == sha256
        return None if same else f"{name} is damaged: its SHA-256 is not the manifest's"
    except UnreadableFile as error:
        return str(error)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def check_whole(path: Path) -> None:
    if problems := verify_checkpoint(path):
        raise UnusableCheckpoint(f"{path} is not a whole checkpoint: {'; '.join(problems)}")


def checkpoints(folder: str | Path) -> list[Path]:
    """Checkpoints in `folder` under their final names, the latest step first."""
    found = Path(folder).iterdir() if Path(folder).is_dir() else ()
    return sorted((path for path in found if STEP_NAME.fullmatch(path.name)), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def newest_whole(folder: str | Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest checkpoint in `folder` that is whole, and newer ones that are not, with the reason; reads only."""
    skipped: list[tuple[Path, str]] = []
    for path in checkpoints(folder):
        problems = verify_checkpoint(path)
        if not problems:
            return path, skipped
        skipped.append((path, "; ".join(problems)))
    return None, skipped


# --- what a checkpoint holds --------------------------------------------------------------------------------------


def load_weights(path: str | Path, part: str = "model") -> dict[str, Tensor]:
    """The whole weights of a checkpoint in one process, whatever number of ranks wrote them; nothing else is read.

    `part` is `model`, or the name of a further set of tensors, such as `ema`.
    """
    path = Path(path)
    check_whole(path)
    prefix = _prefix(part)
    weights = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in read_index(path).items()
        if name.startswith(prefix)
    }
    if not weights:
        raise UnusableCheckpoint(f"{path} holds no {part!r}")
    read_tensors(path, {name: (tensor, (0,) * tensor.dim()) for name, tensor in weights.items()})
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}


def stored_shapes(path: Path, part: str = "model") -> dict[str, Index]:
    """The shapes of what `load_weights` would give, without reading it."""
    prefix = _prefix(part)
    return {n.removeprefix(prefix): shape for n, (shape, _) in read_index(path).items() if n.startswith(prefix)}


def _prefix(part: str) -> str:
    return "model." if part == "model" else f"tensors.{part}."


def load_record(path: str | Path) -> dict[str, Any]:
    """The `record` that was saved with the checkpoint at `path`; see `load_weights` for its tensors."""
    check_whole(Path(path))
    return read_state(Path(path))[0]


def read_state(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """The record and the optimizer's settings of a checkpoint that has been verified."""
    try:
        state = read_json_object(listed_file(path, STATE))
        if not isinstance(state["record"], dict):
            raise UnreadableFile("its record is not a JSON object")
        return state["record"], state["optimizer"]
    except (UnreadableFile, KeyError) as error:
        raise UnusableCheckpoint(f"cannot read {path / STATE}: {error}") from error


def read_index(folder: Path) -> dict[str, Stored]:
    """Types and shapes of all tensors of a checkpoint; refused unless their shards make up the whole."""
    found: dict[str, Stored] = {}
    filled: dict[str, int] = {}
    for file in _shard_files(folder):
        with _opened(file) as (_, shards):
            for name, (entry, start, sizes) in shards.items():
                inside = all(at + size <= full for at, size, full in zip(start, sizes, entry[0], strict=True))
                if not inside or found.setdefault(name, entry) != entry:
                    raise UnusableCheckpoint(f"cannot read {file}: {name[:80]!r} lies outside of its tensor")
                filled[name] = filled.get(name, 0) + math.prod(sizes)
    for name, (shape, _) in found.items():
        if filled[name] != math.prod(shape):
            raise UnusableCheckpoint(f"cannot read {folder}: the shards of {name[:80]!r} do not make up the whole")
    return found


def read_tensors(folder: Path, targets: Mapping[str, tuple[Tensor, Index]]) -> None:
    """Fill tensors in place: each is the part of the whole one that begins at an index, on any number of ranks."""
    for file in _shard_files(folder):
        with _opened(file) as (stored, shards):
            for name in targets.keys() & shards.keys():
                target, here = targets[name]
                _, there, sizes = shards[name]
                low = [max(a, b) for a, b in zip(here, there, strict=True)]
                ends = zip(here, target.shape, there, sizes, strict=True)
                high = [min(a + size, b + other) for a, size, b, other in ends]
                if any(first >= last for first, last in zip(low, high, strict=True)):
                    continue
                into, out_of = (
                    tuple(slice(first - at, last - at) for first, last, at in zip(low, high, start, strict=True))
                    for start in (here, there)
                )
                target[into].copy_(stored.get_slice(name)[out_of])


def _shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.safetensors"))


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, dict[str, tuple[Stored, Index, Index]]]]:
    """An open file of shards, and for each by name: the tensor that it is a part of, its first index, its shape."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(listed_file(file.parent, file.name), framework="pt", device="cpu") as stored:
            places = parse_json((stored.metadata() or {})[SHARDS].encode())
            shards = {}
            for name in stored.keys():  # noqa: SIM118 (it is not a dict)
                view, (shape, start) = stored.get_slice(name), places[name]
                sizes = tuple(view.get_shape())
                if not (len(shape) == len(start) == len(sizes) and all(map(_is_count, [*shape, *start]))):
                    raise ValueError(f"{name[:80]!r} has a wrong shape")
                shards[name] = (tuple(shape), DTYPES[view.get_dtype()]), tuple(start), sizes
            yield stored, shards
    except UnusableCheckpoint:
        raise
    except (SafetensorError, UnreadableFile, OSError, KeyError, TypeError, ValueError) as error:
        raise UnusableCheckpoint(f"cannot read {file}: {error}") from error


# --- which run a checkpoint belongs to ----------------------------------------------------------------------------

Hashed = dict[str, Any]
"""Where the prepared data are, and size, times, inode and SHA-256 of their files."""


def record_of(config: RunConfig, data: PreparedData, types: Precision) -> dict[str, Any]:
    """What every checkpoint of the run remembers."""
    return {
        "computed_in": types.name,
        "settings": run_settings.to_dict(config),
        "tokenizer": data.tokenizer.fingerprint,
        "shards": data.content_fingerprint,
    }


def check_record(
    record: Mapping[str, Any], config: RunConfig, data: PreparedData, types: Precision, folder: Path
) -> None:
    """Refuse to resume from a checkpoint that was trained otherwise."""
    if (before := record.get("computed_in")) != types.name:
        raise ConfigError(
            f"{folder} was computed in {before}, and train.dtype={config.train.dtype} is {types.name} on this "
            f"device; resume it with --dtype {before}"
        )
    problems = settings_problems(record, config, folder)
    if record.get("tokenizer") != data.tokenizer.fingerprint:
        problems.append(f"the tokenizer in {data.folder} is not the one it was trained with")
    if record.get("shards") != data.content_fingerprint:
        problems.append(f"the shards in {data.folder} are not those it was trained on")
    if problems:
        raise ConfigError(
            f"{folder} cannot be resumed: {'; '.join(problems)}. Restore them or choose another --run"
        )


def recorded_settings(record: Mapping[str, Any], checkpoint: Path) -> RunConfig:
    """The settings that a checkpoint was trained with."""
    try:
        return run_settings.from_dict(record["settings"])
    except (ConfigError, KeyError, TypeError, AttributeError) as error:
        raise UnusableCheckpoint(f"{checkpoint}: its settings are wrong: {error}") from error


def settings_problems(record: Mapping[str, Any], config: RunConfig, folder: Path) -> list[str]:
    """How settings differ from those that a checkpoint's record holds."""
    trained = recorded_settings(record, folder)
    if not (names := run_settings.differences(trained, config)):
        return []
    return [
        f"{folder / SETTINGS} is not what its checkpoint was trained with "
        f"({run_settings.with_values(names, config, trained)}); without it the checkpoint's settings are used"
    ]


def tokenizer_problems(record: Mapping[str, Any], folder: Path) -> list[str]:
    """Whether the tokenizer of the run in `folder` can be read and is the one that a checkpoint's record names."""
    try:
        return other_tokenizer(record, Tokenizer.load(folder / TOKENIZER), folder)
    except DataError as error:
        return [str(error)]


def other_tokenizer(record: Mapping[str, Any], tokenizer: Tokenizer, folder: Path) -> list[str]:
    if record.get("tokenizer") == tokenizer.fingerprint:
        return []
    return [f"{folder / TOKENIZER / 'tokenizer.json'} is not the tokenizer that its checkpoint was trained with"]


def hash_data(data: PreparedData, folder: Path) -> Hashed:
    """Hash the shards that the run in `folder` has not hashed before, and compare all with their manifest."""
    known = _hashed(folder).get("files")
    stamps = data.check_hashes(known if isinstance(known, dict) else {})
    return {"folder": str(data.folder.absolute()), "files": stamps}


def remember_hashes(hashed: Hashed, folder: Path) -> None:
    """Keep what `hash_data` found for the next start of the run."""
    if hashed != _hashed(folder):
        write_whole(folder / HASHED, json.dumps(hashed).encode())


def data_problems(record: Mapping[str, Any], folder: Path) -> list[str] | None:
    """What is wrong with the data of the run in `folder`, every byte of it read; None where they are not here."""
    place = _hashed(folder).get("folder")
    if not isinstance(place, str) or not Path(place).is_dir():
        return None
    try:
        data = PreparedData.open(place, verify=True)
    except DataError as error:
        return [str(error)]
    same = record.get("shards") == data.content_fingerprint
    return [] if same else [f"{place} does not hold the shards that the checkpoint was trained on"]


def _hashed(folder: Path) -> Hashed:
    try:
        return read_json_object(folder / HASHED)
    except UnreadableFile:
        return {}
