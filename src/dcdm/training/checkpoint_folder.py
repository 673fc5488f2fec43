"""Checkpoints on the disk: what makes one whole, how it is read, and which run it belongs to.

    step-00001000/             a whole checkpoint; it got this name by a rename, when nothing was left to write
      manifest.json            SHA-256 of every other file, step, metrics, versions; and one of its own content
      tensors.safetensors      weights, the optimizer's slots, averaged weights: whole, of any number of ranks
      state.json               the run's record and the optimizer's settings
    step-00001000.partial      being written, or left behind by a run that was killed
    step-00001000.replaced     an older checkpoint of the same step while the new one takes its place
    step-00001000.deleted      on its way out
    .lock                      held by the run that writes here

No format notices a single flipped bit by itself, so nothing is read before the manifest holds. It protects against
damage, not against malice: who can write a checkpoint can write its manifest. But all there is to read is JSON and
safetensors, so a stranger's checkpoint can be wrong and cannot run anything. There are no pickles in this format.

Its record holds the settings it was trained with and fingerprints of the tokenizer and of the shards. A run is
resumed, verified and loaded only with these; shards are hashed before training.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
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

CHECKPOINTS, SETTINGS, TOKENIZER = "checkpoints", "settings.yaml", "tokenizer"
"""Names in a run's folder."""
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
FORMAT = 3
STEP_NAME = re.compile(r"step-(\d{8,})")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip

Shape = tuple[int, ...]
Stored = tuple[Shape, torch.dtype]


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
    found = (_damage(folder, name, sha256) for name, sha256 in manifest.files.items())
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
    with opened_tensors(path) as stored:
        names = [name for name in stored.keys() if name.startswith(prefix)]  # noqa: SIM118 (it is not a dict)
        weights = {name.removeprefix(prefix): stored.get_tensor(name) for name in names}
    if not weights:
        raise UnusableCheckpoint(f"{path} holds no {part!r}")
    return weights


def stored_shapes(path: Path, part: str = "model") -> dict[str, Shape]:
    """The shapes of what `load_weights` would give, without reading it."""
    prefix = _prefix(part)
    return {n.removeprefix(prefix): shape for n, (shape, _) in stored_tensors(path).items() if n.startswith(prefix)}


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


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Shapes and types of all tensors of a checkpoint."""
    with opened_tensors(folder) as stored:
        parts = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 (it is not a dict)
        return {name: (tuple(part.get_shape()), DTYPES[part.get_dtype()]) for name, part in parts.items()}


@contextmanager
def opened_tensors(folder: Path) -> Iterator[Any]:
    """The tensors of a checkpoint, as `safetensors.safe_open` gives them."""
    from safetensors import SafetensorError, safe_open

    names = [path.name for path in sorted(folder.glob("*.safetensors"))]
    if len(names) != 1:
        raise UnusableCheckpoint(f"cannot read {folder}: it has {len(names)} files of tensors in place of one")
    try:
        with safe_open(listed_file(folder, names[0]), framework="pt", device="cpu") as stored:
            yield stored
    except (SafetensorError, UnreadableFile, OSError, KeyError) as error:
        raise UnusableCheckpoint(f"cannot read {folder / names[0]}: {error}") from error


# --- which run a checkpoint belongs to ----------------------------------------------------------------------------


def record_of(config: RunConfig, data: PreparedData, types: Precision) -> dict[str, Any]:
    """What every checkpoint of the run remembers."""
    return {
        "computed_in": types.name,
        "settings": run_settings.to_dict(config),
        "tokenizer": data.tokenizer.fingerprint,
        "shards": data.content_fingerprint,
        "data": str(data.folder.absolute()),
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


def data_problems(record: Mapping[str, Any]) -> list[str] | None:
    """What is wrong with the data of a run, every byte of it read; None where they are not here."""
    place = record.get("data")
    if not isinstance(place, str) or not Path(place).is_dir():
        return None
    try:
        data = PreparedData.open(place, verify=True)
    except DataError as error:
        return [str(error)]
    same = record.get("shards") == data.content_fingerprint
    return [] if same else [f"{place} does not hold the shards that the checkpoint was trained on"]
