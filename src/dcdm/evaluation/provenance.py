"""What is needed to get figures again: the command, and what it ran on."""

from __future__ import annotations

import inspect
import platform
import shlex
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tyro


@dataclass(frozen=True)
class Provenance:
    """What is needed to get figures again."""

    command: str
    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Any]]
    corpora: Mapping[str, Mapping[str, Any]]


def spelled(name: str, command: Callable[..., None], values: Mapping[str, Any]) -> str:
    """The command line that calls `command` with these values, those that are its defaults left out."""
    hints = typing.get_type_hints(command, include_extras=True)
    words, options = ["dcdm", *name.split()], []
    for key, parameter in inspect.signature(command).parameters.items():
        value = values[key]
        if tyro.conf.Positional in getattr(hints[key], "__metadata__", ()):
            words += _words(value)
        elif value != parameter.default:
            options += _option(key.replace("_", "-"), value)
    return shlex.join(words + options)


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", *_words(value)]


def _words(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]


def environment(device: str, processes: int = 1) -> dict[str, Any]:
    """Versions and machine."""
    import torch

    from dcdm.training.checkpoint_folder import versions

    place = torch.cuda.get_device_name() if device.startswith("cuda") else device
    return {
        **versions(), "system": platform.platform(), "device": place, "threads": torch.get_num_threads(),
        "processes": processes,
    }  # fmt: skip
