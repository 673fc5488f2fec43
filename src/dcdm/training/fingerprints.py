"""Fingerprints of a run: the settings, tokenizer and data that its checkpoints belong to.

A checkpoint's record holds the settings it was trained with and fingerprints of the tokenizer and of the shards. A
run is resumed, verified and loaded only with these. Shards are hashed before training, and remembered in the run
folder by size, times and inode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcdm.config import ConfigError, DataError
from dcdm.data.store import PreparedData
from dcdm.data.tokenizers import Tokenizer
from dcdm.distributed import Precision
from dcdm.files import UnreadableFile, read_json_object, write_whole
from dcdm.training import settings as run_settings
from dcdm.training.checkpoint_folder import UnusableCheckpoint
from dcdm.training.settings import RunConfig

CHECKPOINTS, SETTINGS, TOKENIZER = "checkpoints", "settings.yaml", "tokenizer"
HASHED = "data_hashed.json"
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


# --- the shards ---------------------------------------------------------------------------------------------------


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
