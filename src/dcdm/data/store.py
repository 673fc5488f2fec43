"""A prepared folder: its manifest, its shards written and checked, and windows over their tokens.

A shard `SPLIT-NNNNN.bin` is a plain array of token ids, little-endian; beside it, for fine-tuning data, is
`SPLIT-NNNNN.idx` with two uint32 per example: its length and its prompt's. The number is that of a unit of work.

L positions of a window
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dcdm.config import NUM_SPECIALS, SPLITS, DataError, Split
from dcdm.data.tokenizers import Tokenizer
from dcdm.files import UnreadableFile, digest, file_digest, listed_file, read_json_object, write_whole

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
NEEDED = {"fingerprint", "plan", "vocab_size", "dtype", "fine_tuning", "splits", "tokenizer_files"}
"""What is asked of a manifest later."""
MOST_AT_START = 1 << 30
"""Bytes of data whose checksums a run reads before it begins; it would be minutes for more."""
Overlong = Literal["truncate", "drop"]
Item = dict[str, Any]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder, if it is whole."""
    path = folder / MANIFEST
    if not path.exists():
        raise DataError(f"{folder} holds no prepared data (no {MANIFEST}); run dcdm data prepare")
    try:
        manifest = read_json_object(path)
    except UnreadableFile as error:
        raise DataError(f"cannot read {path}: {error}; prepare the data again") from error
    claimed = manifest.pop("sha256", None)
    if claimed != digest(manifest) or not manifest.keys() >= NEEDED:
        raise DataError(f"{path} is damaged; prepare the data again")
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps({**manifest, "sha256": digest(manifest)}, indent=1)
    write_whole(folder / MANIFEST, text.encode() + b"\n")


class Shard:
    """One split's part of a unit: tokens are written aside as they come, hashed, and renamed into place by `close`.

    Of examples their lengths are kept too, whole and of the prompt. A split without tokens gets no file.
    """

    def __init__(self, stem: Path, dtype: str) -> None:
        self.path, self.dtype = stem.with_suffix(".bin"), np.dtype(dtype).newbyteorder("<")
        self._counts = {"documents": 0, "tokens": 0, "learned": 0, "bytes": 0}
        self._lengths = array("I")
        self._aside = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        self._file = open(self._aside, "wb")  # noqa: SIM115 (closed by close or discard)
        self._hash = hashlib.sha256()

    def add(self, prompt: np.ndarray | None, learned: np.ndarray, text_bytes: int, ends: bool) -> None:
        """Append tokens: of an example with a prompt, or of a text, which may continue in the next ones."""
        pieces = [learned] if prompt is None else [prompt, learned]
        data = b"".join(piece.astype(self.dtype, copy=False).tobytes() for piece in pieces)
        size = len(data) // self.dtype.itemsize
        if prompt is not None:
            self._lengths.extend((size, len(prompt)))
        for name, more in zip(self._counts, (ends, size, len(learned), text_bytes), strict=True):
            self._counts[name] += more
        self._file.write(data)
        self._hash.update(data)

    def close(self) -> dict[str, Any]:
        """Put the files in their places: counts and files as manifests hold them."""
        files = []
        if self._counts["tokens"]:
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._aside, self.path)
            size = self._counts["tokens"] * self.dtype.itemsize
            files.append({"file": self.path.name, "bytes": size, "sha256": self._hash.hexdigest()})
        if self._lengths:
            index, data = self.path.with_suffix(".idx"), np.array(self._lengths, dtype="<u4").tobytes()
            write_whole(index, data)
            files.append({"file": index.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        return {**self._counts, "files": files}

    def discard(self) -> None:
        """Leave nothing aside."""
        with suppress(OSError):  # of a full disk: what was written last is not wanted
            self._file.close()
        self._aside.unlink(missing_ok=True)


class PreparedData:
    """A folder that `prepare` wrote. One preparation serves every window length."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest

    @classmethod
    def open(cls, folder: Path | str, verify: bool = False) -> PreparedData:
        """Open a prepared folder. The manifest and all sizes are checked; `verify` reads every checksum too."""
        folder = Path(folder).expanduser()
        prepared = cls(folder, read_manifest(folder))
        for entry in prepared._entries():
            path, said = prepared._path(entry), f"its manifest says {entry['bytes']} bytes; prepare the data again"
            try:
                size = path.stat().st_size
            except OSError as error:
                raise DataError(f"{path}: {error.strerror}, {said}") from error
            if size != entry["bytes"]:
                raise DataError(f"{path} has {size} bytes, {said}")
        if verify:
            prepared.check_hashes()
        return prepared

    def check_hashes(self) -> None:
        """Read every file and compare it with the manifest's checksum; DataError at the first that differs."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda entry: _check_hash(self._path(entry), entry["sha256"]), self._entries()))

    def check_at_start(self) -> None:
        """What a run checks before it begins: every checksum. Of large data shards are checked as they are read."""
        if not self._is_large:
            self.check_hashes()

    @property
    def _is_large(self) -> bool:
        return sum(entry["bytes"] for entry in self._entries()) > MOST_AT_START

    @property
    def fingerprint(self) -> str:
        """Names the contents: equal for equal source, tokenizer and settings."""
        return self.manifest["fingerprint"]

    @property
    def content_fingerprint(self) -> str:
        """Names the bytes of all shards, wherever they are and however they came about."""
        return digest({split: [entry["sha256"] for entry in self._split(split)["files"]] for split in SPLITS})

    @property
    def fine_tuning(self) -> bool:
        return self.manifest["fine_tuning"]

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder / "tokenizer")

    def documents(self, split: Split) -> int:
        """Documents, or examples of fine-tuning data."""
        return self._split(split)["documents"]

    def tokens(self, split: Split) -> int:
        """Tokens, EOS of every document among them."""
        return self._split(split)["tokens"]

    def text_bytes(self, split: Split) -> int:
        """UTF-8 bytes of the text that is learned (responses of fine-tuning data), for bits per byte."""
        return self._split(split)["bytes"]

    def dataset(self, split: Split, length: int, overlong: Overlong = "truncate") -> TextWindows | ExampleWindows:
        """The split in windows of `length` tokens, BOS first.

        Fine-tuning data gives one example per window. Of one longer than the window, `overlong` cuts the end
        of the response (`truncate`) or leaves it out (`drop`); both are counted and said.
        """
        if length < 2:
            raise DataError(f"length={length} must be at least 2: BOS and a token")
        if overlong not in ("truncate", "drop"):
            raise DataError(f"overlong={overlong!r} is not known; choose truncate or drop")
        where = f"the {split} split of {self.folder}"
        more = "give more text"
        if split == "validation":
            more += ", name a validation source (--validation), raise validation_share (--validation-share)"
        identity = f"{self.fingerprint}/{split}/{length}"
        bos_id, pad_id, _ = range(self.vocab_size - NUM_SPECIALS, self.vocab_size)
        if not self.fine_tuning:
            windows = TextWindows(self.stream(split), length, bos_id, identity)
            if not len(windows):
                raise DataError(
                    f"{where} has {self.tokens(split)} tokens, fewer than one window of {length - 1} and BOS; "
                    f"{more} or a shorter length"
                )
            return windows
        identity = f"{identity}/{overlong}"
        examples = ExampleWindows(
            self.stream(split), self.lengths(split), length, bos_id, pad_id, overlong, identity
        )
        if examples.truncated or examples.dropped:
            log.warning(
                "%s: of %d examples, %d are cut and %d left out, being longer than a window of %d",
                where, self.documents(split), examples.truncated, examples.dropped, length,
            )  # fmt: skip
        if not len(examples):
            raise DataError(f"{where} has no example for a window of {length}; {more} or a longer length")
        return examples

    def stream(self, split: Split) -> TokenStream:
        """All tokens of a split, in order."""
        shards = [entry for entry in self._split(split)["files"] if entry["file"].endswith(".bin")]
        hashes = [entry["sha256"] for entry in shards] if self._is_large else []
        return TokenStream([self._path(entry) for entry in shards], self.manifest["dtype"], hashes)

    def lengths(self, split: Split) -> np.ndarray:
        """Lengths of the examples of a split (N, 2): whole, and of the prompt."""
        indexes = [self._path(entry) for entry in self._split(split)["files"] if entry["file"].endswith(".idx")]
        arrays = [np.fromfile(path, dtype="<u4") for path in indexes]
        return np.concatenate([np.empty(0, dtype="<u4"), *arrays]).reshape(-1, 2).astype(np.int64)

    def summary(self) -> str:
        """A few lines for people."""
        lines = []
        for split in SPLITS:
            documents, tokens, size = (self._split(split)[name] for name in ("documents", "tokens", "bytes"))
            what = "examples" if self.fine_tuning else "documents"
            lines.append(f"{split}: {documents:,} {what}, {tokens:,} tokens, {size:,} bytes of text")
        return "\n".join(lines)

    def _split(self, split: Split) -> dict[str, Any]:
        if split not in SPLITS:
            raise DataError(f"unknown split {split!r}; choose {' or '.join(SPLITS)}")
        return self.manifest["splits"][split]

    def _path(self, entry: dict[str, Any]) -> Path:
        try:
            return listed_file(self.folder, entry.get("file"), depth=2)  # tokenizer/tokenizer.json
        except UnreadableFile as error:
            raise DataError(f"{self.folder / MANIFEST}: {error}; prepare the data again") from error

    def _entries(self) -> list[dict[str, Any]]:
        shards = [entry for split in SPLITS for entry in self._split(split)["files"]]
        return shards + self.manifest["tokenizer_files"]


def _check_hash(path: Path, sha256: str) -> None:
    if file_digest(path) != sha256:
        raise DataError(f"{path} does not match its checksum in the manifest; prepare the data again")


class TokenStream:
    """The shards of a split as one long array on the disk; with `hashes` each is compared when it is first read."""

    def __init__(self, paths: list[Path], dtype: str, hashes: Sequence[str] = ()) -> None:
        self._paths, self._dtype, self._hashes = paths, np.dtype(dtype).newbyteorder("<"), hashes
        sizes = [path.stat().st_size // self._dtype.itemsize for path in paths]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._maps: list[np.ndarray | None] = [None] * len(paths)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start…stop−1 as int64, across the borders of shards."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start}…{stop} of {len(self)}")
        tokens, at = np.empty(stop - start, dtype=np.int64), start
        for shard in range(int(np.searchsorted(self._ends, start, side="right")), len(self._ends)):
            end = min(stop, int(self._ends[shard]))
            first = int(self._ends[shard - 1]) if shard else 0
            tokens[at - start : end - start] = self._map(shard)[at - first : end - first]
            at = end
            if at == stop:
                break
        return tokens

    def _map(self, shard: int) -> np.ndarray:
        opened = self._maps[shard]
        if opened is None:
            if self._hashes:
                _check_hash(self._paths[shard], self._hashes[shard])
            opened = self._maps[shard] = np.memmap(self._paths[shard], dtype=self._dtype, mode="r")
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": [None] * len(self._paths)}  # a pickled map would carry its contents


class TextWindows:
    """A split's stream of tokens in windows: window i is BOS and the next L−1 tokens after window i−1's.

    An item holds `tokens` (L,), `prompt` (L,), here all False, and `index`.
    """

    def __init__(self, stream: TokenStream, length: int, bos_id: int, identity: str) -> None:
        self.stream, self.length, self.bos_id, self.identity = stream, length, bos_id, identity

    def __len__(self) -> int:
        return len(self.stream) // (self.length - 1)

    def __getitem__(self, index: int) -> Item:
        _check_index(index, self)
        tokens = np.full(self.length, self.bos_id, dtype=np.int64)
        tokens[1:] = self.stream.read(index * (self.length - 1), (index + 1) * (self.length - 1))
        return _item(tokens, np.zeros(self.length, dtype=bool), index)


class ExampleWindows:
    """One example per window: BOS, prompt, response with its EOS, then PAD; `prompt` is True on the first two.

    `truncated` counts the examples whose response's end is cut off, `dropped` those that are left out: all
    that are too long if asked for, and those whose prompt leaves no place for a response.
    """

    def __init__(
        self, stream: TokenStream, lengths: np.ndarray, length: int, bos_id: int, pad_id: int,
        overlong: Overlong, identity: str,
    ) -> None:  # fmt: skip
        self.stream, self.length, self.bos_id, self.pad_id, self.identity = stream, length, bos_id, pad_id, identity
        whole, prompts = lengths.T
        room = length - 1
        kept = whole <= room if overlong == "drop" else prompts < room
        self.truncated = int((kept & (whole > room)).sum())
        self.dropped = int((~kept).sum())
        starts = np.cumsum(whole) - whole
        self._starts, self._lengths, self._prompts = starts[kept], np.minimum(whole[kept], room), prompts[kept]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Item:
        _check_index(index, self)
        start, size, prompt_size = (int(a[index]) for a in (self._starts, self._lengths, self._prompts))
        tokens = np.full(self.length, self.pad_id, dtype=np.int64)
        tokens[0] = self.bos_id
        tokens[1 : size + 1] = self.stream.read(start, start + size)
        return _item(tokens, np.arange(self.length) <= prompt_size, index)


def _item(tokens: np.ndarray, prompt: np.ndarray, index: int) -> Item:
    import torch  # here, since preparing text needs no PyTorch

    return {"tokens": torch.from_numpy(tokens), "prompt": torch.from_numpy(prompt), "index": index}


def _check_index(index: int, windows: TextWindows | ExampleWindows) -> None:
    if not 0 <= index < len(windows):
        raise IndexError(f"window {index} of {len(windows)}")
