"""Files that are either whole or not there, whenever the process dies; files that strangers wrote, read within
limits; and signals that ask the process to stop."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def user_cache() -> Path:
    """What dcdm keeps for the user: `$DCDM_CACHE`, or `dcdm` in the user's cache."""
    base = os.environ.get("DCDM_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dcdm"
    return Path(base).expanduser().resolve()


def write_whole(path: Path, data: bytes) -> None:
    """Write `path` aside, to the disk, and rename it into place."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def write_tensors(path: Path, tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file to the disk, readable by those who may read other files here; raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
    path.chmod(mode)  # safetensors writes aside, as 0600, and renames
    sync_folder(path)


def sync_folder(path: Path) -> None:
    """Make the renames inside a folder, or what a file holds, survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_folder(aside: Path, final: Path) -> None:
    """Give a folder whose files are on the disk its final name; the old one is removed once the new one is there.

    A process that dies in between leaves the old folder as `final` or as `final`.replaced.
    """
    replaced = final.with_name(f"{final.name}.replaced")
    sync_folder(aside)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    try:
        os.rename(aside, final)
    except OSError:
        if replaced.exists():
            os.rename(replaced, final)
        raise
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def canonical(value: Any) -> bytes:
    """One spelling per value, to be hashed; names of files that are not UTF-8 have one too."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="surrogatepass")


def digest(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def file_digest(path: Path | str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- what a stranger may have written -----------------------------------------------------------------------------

MEGABYTE = 1 << 20
JSON_LIMIT = 64 * MEGABYTE  # far above any configuration, manifest or record
YAML_LIMIT = MEGABYTE // 4  # reading a megabyte takes half a minute


class UnreadableFile(ValueError):
    """A file is missing, too large, or not what its name says; the message is the reason, without the path."""


def read_limited(path: Path | str, limit: int = JSON_LIMIT) -> bytes:
    """All bytes of a regular file, if there are no more than `limit`; never waits for a pipe or a device."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise UnreadableFile("it is not a regular file")
            data = file.read(min(found.st_size, limit) + 1)  # a buffer of the limit would be asked for at once
    except OSError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    if len(data) > limit:
        raise UnreadableFile(f"it is larger than {limit / MEGABYTE:g} MB, which nothing of its kind is")
    return data


def read_text(path: Path | str, limit: int = JSON_LIMIT) -> str:
    """The text of a file in UTF-8, within `limit` bytes."""
    try:
        return read_limited(path, limit).decode()
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"it is not UTF-8 ({error.reason} at byte {error.start})") from error


def read_json(path: Path | str, limit: int = JSON_LIMIT, **options: Any) -> Any:
    """The content of a JSON file; `options` are those of `json.loads`."""
    return parse_json(read_limited(path, limit), **options)


def parse_json(data: bytes, **options: Any) -> Any:
    try:
        return json.loads(data, **options)
    except RecursionError as error:
        raise UnreadableFile("it is nested too deeply") from error
    except ValueError as error:
        raise UnreadableFile(f"it is not JSON ({error})") from error


def read_json_object(path: Path | str, limit: int = JSON_LIMIT, **options: Any) -> dict[str, Any]:
    """The content of a JSON file that must hold an object."""
    content = read_json(path, limit, **options)
    if not isinstance(content, dict):
        raise UnreadableFile("it holds no JSON object")
    return content


def read_yaml(path: Path | str, limit: int = YAML_LIMIT) -> Any:
    """The content of a YAML file of plain values: each name once, and no aliases, which can stand for gigabytes."""
    import yaml

    class PlainLoader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise UnreadableFile("it has aliases (*name), which settings do without; write the values out")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key.value, str) and key.value in seen:
                    raise UnreadableFile(
                        f"line {key.start_mark.line + 1} names {key.value!r} again; keep one of them"
                    )
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(read_text(path, limit), PlainLoader)
    except RecursionError as error:
        raise UnreadableFile("it is nested too deeply") from error
    except yaml.YAMLError as error:
        raise UnreadableFile(f"it is not YAML: {' '.join(str(error).split())}") from error
    except UnreadableFile:
        raise
    except ValueError as error:  # a date that does not exist, a number of 5,000 digits
        raise UnreadableFile(f"it is not YAML: {error}") from error


def listed_file(folder: Path, name: Any, depth: int = 1) -> Path:
    """The file of `folder` that a list in it names; `depth` is how many parts the name may have.

    Refused are names that lead out of the folder, and what is there but not a regular file. A link must end inside
    the folder, or among the blobs of the hub's cache, whose snapshots are links. A missing file is the caller's to
    notice.
    """
    parts = name.split("/") if isinstance(name, str) else []
    if not 1 <= len(parts) <= depth or any(part in ("", ".", "..") for part in parts) or "\0" in name:
        raise UnreadableFile(f"{name!r} is not the name of a file of this folder")
    path = folder / name
    try:
        mode = path.stat().st_mode
        home, end = folder.resolve(), path.resolve()
    except FileNotFoundError:
        if path.is_symlink():
            raise UnreadableFile(f"{name} is a link to nothing") from None
        return path
    except (OSError, RuntimeError) as error:  # the second: a link in a circle, in older Pythons
        raise UnreadableFile(f"{name} cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not stat.S_ISREG(mode):
        raise UnreadableFile(f"{name} is not a regular file")
    if not (end.is_relative_to(home) or end.is_relative_to(home.parent.parent / "blobs")):
        raise UnreadableFile(f"{name} is a link out of the folder")
    return path


# --- signals ------------------------------------------------------------------------------------------------------


@contextmanager
def stops_handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handler` on SIGINT, SIGTERM and SIGHUP; whatever handled them before does so again afterwards.

    A SIGHUP that is ignored stays so: `nohup` asks for that.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)
