"""Where documents come from. For now: the corpus that every machine with Python has, its standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_SKIPPED = {"site-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}


def stdlib_files(split: str) -> list[Path]:
    """The standard library's source files of a split, `train` or `validation` (one file in twenty), in order.

    A file's split depends on its name alone.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"unknown split {split!r}; choose train or validation")
    root = Path(sysconfig.get_path("stdlib"))
    chosen = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED.isdisjoint(name.parts):
            held_out = hashlib.sha256(name.as_posix().encode()).digest()[0] < 256 / 20
            if held_out == (split == "validation"):
                chosen.append(path)
    if not chosen:
        raise FileNotFoundError(f"no Python source files under {root}: is the standard library packed in a zip?")
    return chosen


def stdlib_documents(split: str) -> Iterator[str]:
    for path in stdlib_files(split):
        yield path.read_text(encoding="utf-8", errors="replace")
