"""Text to token shards, once: planned, resumable, and the same whatever the number of workers.

`prepare` is the whole way. Below it are its steps in order: the plan (all that decides the result), what an
earlier run left, the folder in which it works, the tokenizer, the units of work, the manifest. A unit is a stretch
of the source that becomes one shard per split: read (`sources`), tokenised, written (`store.Shard`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dcdm.config import SPLITS, DataConfig, DataError, Split
from dcdm.data.chats import ExampleMaker
from dcdm.data.sources import (
    BETWEEN_WORDS,
    NAMED,
    BadRows,
    Part,
    Skipped,
    SourceFile,
    cut_into_parts,
    examine,
    read_texts,
    resolve,
    split_by_hash,
)
from dcdm.data.store import MANIFEST, PreparedData, Shard, read_manifest, write_manifest
from dcdm.data.tokenizers import Tokenizer, bpe_size, byte_tokenizer, load_tokenizer
from dcdm.files import digest, file_digest, read_json_object, replace_folder, write_whole
from dcdm.progress import Reporter

FORMAT = 1  # raise it when the same source would give other shards
UNIT_BYTES = (2 << 20, 64 << 20)  # least and most source bytes of a unit, and so of a shard
MOST_UNITS = 1024
APART_BYTES = 32 << 20  # source bytes from which on units are written in processes of their own
BPE_SAMPLE = 256 << 20  # bytes of training text that bpe:N looks at
BATCH_CHARACTERS = 1 << 20  # tokenised at one time
BATCH_EXAMPLES = 256
LOCK, PLAN, RECORDS = "lock", "plan", "units"

T = TypeVar("T")


def prepare(
    sources: str | Sequence[str],
    tokenizer: str | Tokenizer = "bytes",
    out: Path | str | None = None,
    *,
    validation: str | Sequence[str] = (),
    settings: DataConfig | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> PreparedData:
    """Tokenise `sources` into `out` (default: a folder of the cache, named by its contents) and open it.

    What is there already is used if source, tokenizer and settings are the same, resumed if an earlier run
    was interrupted, and refused with the reason if they changed (unless `overwrite`). `validation` names
    sources of the validation split, whose files are left out of training; without it a share of the documents is
    held out by hash. `workers` (default: one per core) changes the speed only.
    """
    settings, reporter = settings or DataConfig(), reporter or Reporter()
    sources, validation = ([given] if isinstance(given, str) else list(given) for given in (sources, validation))
    if not sources:
        raise DataError("no source of text was given")
    if workers is not None and workers < 1:
        raise DataError(f"workers={workers} must be at least 1")

    # find the files
    skipped = Skipped()
    found = [file for spec in sources for file in resolve(spec, settings, "train" if validation else None, skipped)]
    found += [file for spec in validation for file in resolve(spec, settings, "validation", skipped)]
    files = examine(found)
    if validation:
        files = _without_validation(files, skipped)
    for file in files:
        if not file.size:
            skipped.add("empty files", file.name)
    for sentence in skipped.sentences():
        reporter.say(sentence)

    # plan: is it there already?
    ready: Tokenizer | None
    if isinstance(tokenizer, Tokenizer):
        spec, ready = "given", tokenizer
    else:  # bpe:N must be learned from the corpus first
        spec, ready = tokenizer, None if bpe_size(tokenizer) is not None else load_tokenizer(tokenizer)
    plan = plan_of(files, settings, spec, ready, bool(validation))
    name = re.sub(r"[^A-Za-z0-9]+", "-", sources[0]).strip("-")[-32:] or "data"
    out = cache_folder() / f"{name}-{digest(plan)[:12]}" if out is None else _absolute(out)
    if (existing := _existing(out, plan, settings, overwrite, reporter)) is not None:
        return existing
    work = out.with_name(f"{out.name}.partial")
    with _writing(out), _locked(work, out, digest(plan), reporter.say):
        if (existing := _existing(out, plan, settings, overwrite, Reporter())) is not None:  # while we waited
            shutil.rmtree(work)
            return existing
        if not (work / MANIFEST).exists():
            # read, tokenise and write what earlier runs left
            units = units_of(files, settings, ready is None or ready.cuts_between_words)
            kept = _kept_tokenizer(work / "tokenizer", ready, spec, units, settings, reporter)
            records = _tokenise(units, work, kept, settings, workers or os.cpu_count() or 1, reporter)

            # seal it with a manifest
            manifest = _manifest(plan, records, kept, work, settings)
            manifest["skipped"] = vars(skipped)
            manifest["given"] = {"tokenizer": spec, "sources": sources, "validation": validation}
            if problem := _unusable(manifest, sources):
                shutil.rmtree(work)
                raise DataError(problem)
            if not manifest["splits"]["validation"]["documents"] and (validation or settings.validation_share > 0):
                reporter.say(
                    "no document fell into validation; name a validation source (--validation), or raise "
                    "validation_share"
                )
            write_manifest(work, manifest)
        _publish(work, out)
    return PreparedData.open(out)


def cache_folder() -> Path:
    """Where preparations without a folder of their own are kept: `$DCDM_CACHE`, or `dcdm` in the user's cache."""
    base = os.environ.get("DCDM_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dcdm"
    return _absolute(base) / "data"


def _absolute(path: Path | str) -> Path:
    return Path(path).expanduser().resolve()


def _without_validation(files: list[SourceFile], skipped: Skipped) -> list[SourceFile]:
    """The files without those for training that hold the same bytes as one for validation: they are that file, a
    link to it or a copy of it."""
    held = {file.sha256 for file in files if file.split == "validation" and file.size}
    kept = []
    for file in files:
        if file.split == "validation" or file.sha256 not in held:
            kept.append(file)
        else:
            skipped.add("files of training that validation (--validation) holds too", file.name)
    if len(kept) < len(files) and not any(file.size for file in kept if file.split != "validation"):
        raise DataError(
            "every file to train on is also a validation file (--validation), so that none is left to train on; "
            "name other files for validation, or leave it out to hold out a share (--validation-share)"
        )
    return kept


# --- the plan, and what an earlier run left ----------------------------------------------------------------------


def plan_of(
    files: Sequence[SourceFile], settings: DataConfig, spec: str, tokenizer: Tokenizer | None, validation: bool
) -> dict[str, Any]:
    """All that decides the result. Two preparations with equal plans give the same bytes.

    A tokenizer that is still to be learned is known by its name `spec`: what it learns from is in the plan.
    """
    return {
        "format": FORMAT,
        "unit_bytes": list(UNIT_BYTES),
        "tokenizer": {"spec": spec} if tokenizer is None else {"fingerprint": tokenizer.fingerprint},
        "settings": settings.identity(validation),
        "source": [file.entry() for file in files],
    }


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Why a preparation by plan `old` does not serve plan `new`, in words."""
    one, other = (
        {**plan["settings"], "format": plan["format"], "unit_bytes": plan["unit_bytes"]}
        | {"tokenizer": next(iter(plan["tokenizer"].values()))[:12]}  # bpe:N, or the fingerprint
        for plan in (old, new)
    )
    names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    reasons = [f"{name} was {one.get(name)!r} and is {other.get(name)!r}" for name in names]
    was, now = ({entry["name"]: entry for entry in plan["source"]} for plan in (old, new))
    if files := sorted(name for name in {*was, *now} if was.get(name) != now.get(name)):
        reasons.append(f"source files changed: {', '.join(files[:3])}{', …' if len(files) > 3 else ''}")
    return "; ".join(reasons) or "the source files are in another order"


def _existing(
    out: Path, plan: dict[str, Any], settings: DataConfig, overwrite: bool, reporter: Reporter
) -> PreparedData | None:
    """The preparation that is in `out` already, if it is the one asked for and what was bad is within the limit."""
    if not out.exists():
        return None
    if not out.is_dir():
        raise DataError(f"{out} is a file; choose another out folder")
    if not (out / MANIFEST).exists():
        if any(out.iterdir()):
            raise DataError(f"{out} exists and holds something else than prepared data; choose another out folder")
        return None
    try:
        manifest = read_manifest(out)
        if manifest["plan"] == plan:
            prepared = PreparedData.open(out)
            _all_bad_rows([manifest["bad"]], settings)
            reporter.say(f"{out} is up to date")
            return prepared
        reason = f"{out} was prepared differently: {differences(manifest['plan'], plan)}"
    except DataError as error:
        reason = str(error)
    if not overwrite:
        raise DataError(f"{reason}. Choose another out folder, or replace this one (overwrite, --overwrite)")
    reporter.say(f"{reason}. Replacing it")
    return None


# --- the folder in which it works: OUT.partial, beside the result ------------------------------------------------


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Failures to write inside are the user's to repair: say what and where."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "free some space" if full else "look at the folder's permissions"
        raise DataError(
            f"cannot write to {out}: {reason}; {fix} or choose another out folder, and start again"
        ) from error


@contextmanager
def _locked(work: Path, out: Path, plan: str, say: Callable[[str], None]) -> Iterator[None]:
    """Make the folder and hold it against other processes; what another plan left in it is removed."""
    lock = _lock(work, out, say)
    try:
        begun = (work / PLAN).read_text() if (work / PLAN).exists() else None
        if begun != plan:
            if begun is not None:
                say(f"removed {work.name}, an unfinished preparation of other text or with other settings")
            for path in work.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != LOCK:
                    path.unlink()
            write_whole(work / PLAN, plan.encode())
        (work / RECORDS).mkdir(exist_ok=True)
        yield
    except (DataError, OSError):
        if not any((work / RECORDS).glob("*.json")):  # nothing to resume from
            shutil.rmtree(work, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _lock(work: Path, out: Path, say: Callable[[str], None]) -> int:
    while True:
        work.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(work / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        except FileNotFoundError:  # renamed between the two lines
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is preparing {out}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        with suppress(OSError):
            if os.path.samestat(os.fstat(handle), os.stat(work / LOCK)):
                return handle
        os.close(handle)  # the folder was finished and renamed meanwhile


def _publish(work: Path, out: Path) -> None:
    """Leave only what belongs to the result, then rename the folder to its final name."""
    shutil.rmtree(work / RECORDS, ignore_errors=True)
    for path in (work / PLAN, work / LOCK, *work.rglob("*.tmp")):
        path.unlink(missing_ok=True)
    replace_folder(work, out)


# --- the tokenizer -----------------------------------------------------------------------------------------------


def _kept_tokenizer(
    folder: Path, ready: Tokenizer | None, spec: str, units: list[Unit], settings: DataConfig, reporter: Reporter
) -> Tokenizer:
    """The tokenizer of this preparation, kept in its folder; `bpe:N` is learned unless an earlier run did so."""
    if (folder / "tokenizer_config.json").exists():  # written last
        return Tokenizer.load(folder)
    if ready is None:
        reporter.say(f"learning {spec}")
        ready = load_tokenizer(spec, _training_texts(units, settings))
    ready.save(folder)
    return ready


def _training_texts(units: list[Unit], settings: DataConfig) -> Iterator[str]:
    """Text of the training split, from all over the corpus, up to a limit."""
    left, bad, maker = BPE_SAMPLE, BadRows(settings.max_bad), ExampleMaker(settings, byte_tokenizer())
    spread = sorted(units, key=lambda unit: digest(["sample", unit.number]))
    for part in (part for unit in spread for part in unit.parts if part.split != "validation"):
        named: Iterable[tuple[bytes, list[str]]]
        if settings.fine_tuning:
            rows = maker.read(part, bad)
            named = ((name, [text for e in examples for text in (e.prompt, e.response)]) for name, examples in rows)
        else:
            named = ((text.encode(), [text]) for text, _ in read_texts(part, settings, bad))
        for name, texts in named:
            if (part.split or split_by_hash(name, settings.validation_share)) == "validation":
                continue
            yield from texts
            left -= sum(map(len, texts))
            if left <= 0:
                return


# --- the units of work -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """What one worker turns into one shard per split."""

    number: int
    parts: tuple[Part, ...]

    @property
    def weight(self) -> int:
        return sum(part.weight for part in self.parts)


def units_of(files: Sequence[SourceFile], settings: DataConfig, cut_documents: bool) -> list[Unit]:
    """The work, in the order of the source; it depends on the source alone, never on the workers."""
    total = sum(file.size for file in files)
    unit_bytes = min(max(total // MOST_UNITS, UNIT_BYTES[0]), UNIT_BYTES[1])
    units: list[Unit] = []
    waiting: list[Part] = []
    weight = 0
    for part in cut_into_parts(files, settings, unit_bytes, cut_documents):
        waiting.append(part)
        weight += part.weight
        if weight >= unit_bytes:
            units.append(Unit(len(units), tuple(waiting)))
            waiting, weight = [], 0
    return [*units, Unit(len(units), tuple(waiting))] if waiting else units


def _tokenise(
    units: list[Unit], folder: Path, tokenizer: Tokenizer, settings: DataConfig, workers: int, reporter: Reporter
) -> list[dict[str, Any]]:
    """The records of all units, in order, once their shards are written."""
    found = {unit.number: _finished_record(folder, unit.number) for unit in units}
    records = {number: record for number, record in found.items() if record is not None}
    if records:
        reporter.say(f"resuming: {len(records)} of {len(units)} units were finished by an earlier run")
    left = [unit for unit in units if unit.number not in records]
    weights, tokens, started = {unit.number: unit.weight for unit in units}, 0, time.monotonic()
    total, done = sum(weights.values()), sum(weights[number] for number in records)
    with closing(_written(left, folder, tokenizer, settings, workers)) as written:
        for record in written:
            records[record["unit"]] = record
            if record["bad"]["count"]:
                _all_bad_rows((records[number]["bad"] for number in sorted(records)), settings)
            tokens += sum(record["splits"][split]["tokens"] for split in SPLITS)
            done += weights[record["unit"]]
            rate = tokens / max(time.monotonic() - started, 1e-3)
            reporter.progress("tokenising", done, total, "bytes", f"{rate / 1e6:.2f}M tokens/s")
    return [records[unit.number] for unit in units]


def _written(
    units: list[Unit], folder: Path, tokenizer: Tokenizer, settings: DataConfig, workers: int
) -> Generator[dict[str, Any]]:
    """The records of the units as they are finished, `workers` at a time."""
    if workers == 1 or sum(unit.weight for unit in units) < APART_BYTES:
        for unit in units:
            yield write_unit(unit, folder, tokenizer, settings)
        return
    waiting = ThreadPoolExecutor(workers)
    try:
        work = [waiting.submit(_write_apart, unit, folder, settings) for unit in units]
        for written in as_completed(work):
            yield written.result()
    finally:
        waiting.shutdown(cancel_futures=True)


def _write_apart(unit: Unit, folder: Path, settings: DataConfig) -> dict[str, Any]:
    """`write_unit` in a process of its own, with the tokenizer that is kept in the folder."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-c", "from dcdm.data.prepare import write_given_unit; write_given_unit()"],
        input=pickle.dumps((unit, folder, settings)), capture_output=True, env=env,
    )  # fmt: skip
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        died = f"a process that tokenises died (code {done.returncode}), perhaps for lack of memory: start it again"
        raise DataError(said or f"{died} with fewer workers (--workers), it resumes")
    return read_json_object(folder / RECORDS / f"{unit.number:05d}.json")


def write_given_unit() -> None:
    """Write the unit that is pickled on standard input; what a user should repair is said on standard error."""
    unit, folder, settings = pickle.load(sys.stdin.buffer)
    try:
        with _writing(folder):
            write_unit(unit, folder, Tokenizer.load(folder / "tokenizer"), settings)
    except DataError as error:
        sys.exit(str(error))


def write_unit(unit: Unit, folder: Path, tokenizer: Tokenizer, settings: DataConfig) -> dict[str, Any]:
    """Write the unit's shards, then its record; the record is there only if the shards are whole."""
    bad = BadRows(settings.max_bad)
    stem, dtype = f"{unit.number:05d}", _dtype(tokenizer)
    shards = {split: Shard(folder / f"{split}-{stem}", dtype) for split in SPLITS}
    encoded = _encoded_examples if settings.fine_tuning else _encoded_texts
    try:
        for split, prompt, learned, size, ends in encoded(unit, tokenizer, settings, bad):
            shards[split].add(prompt, learned, size, ends)
        splits = {split: shard.close() for split, shard in shards.items()}
        record = {"unit": unit.number, "splits": splits, "bad": {"count": bad.count, "first": bad.first}}
        write_whole(folder / RECORDS / f"{stem}.json", json.dumps(record).encode())
    finally:
        for shard in shards.values():
            shard.discard()
    return record


def _finished_record(folder: Path, number: int) -> dict[str, Any] | None:
    """The record of a unit that an earlier run finished, if its shards are what it says."""
    try:
        record = read_json_object(folder / RECORDS / f"{number:05d}.json")
        for split in SPLITS:
            for entry in record["splits"][split]["files"]:
                if file_digest(folder / entry["file"]) != entry["sha256"]:
                    return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record


def _dtype(tokenizer: Tokenizer) -> str:
    """The type of a shard's numbers."""
    return "uint16" if tokenizer.vocab_size <= 65_535 else "uint32"


Encoded = tuple[Split, np.ndarray | None, np.ndarray, int, bool]
"""Split, prompt of an example, tokens to learn, UTF-8 bytes of their text, whether the document ends."""


def _encoded_texts(unit: Unit, tokenizer: Tokenizer, settings: DataConfig, bad: BadRows) -> Iterator[Encoded]:
    for batch in _batches(_pieces(unit, tokenizer, settings, bad), BATCH_CHARACTERS, lambda piece: len(piece[0])):
        ids = tokenizer.encode_arrays([text for text, _, _ in batch])
        for (text, ends, split), tokens in zip(batch, ids, strict=True):
            yield split, None, np.append(tokens, tokenizer.eos_id) if ends else tokens, len(text.encode()), ends


def _pieces(
    unit: Unit, tokenizer: Tokenizer, settings: DataConfig, bad: BadRows
) -> Iterator[tuple[str, bool, Split]]:
    """The unit's texts with their splits, long ones in pieces where the tokenizer allows it."""
    for part in unit.parts:
        for text, ends in read_texts(part, settings, bad):
            split = part.split or split_by_hash(text.encode(), settings.validation_share)
            start = 0
            while tokenizer.cuts_between_words and (cut := BETWEEN_WORDS.search(text, start + BATCH_CHARACTERS)):
                yield text[start : cut.end()], False, split
                start = cut.end()
            yield text[start:], ends, split


def _encoded_examples(unit: Unit, tokenizer: Tokenizer, settings: DataConfig, bad: BadRows) -> Iterator[Encoded]:
    maker = ExampleMaker(settings, tokenizer)
    rows = (
        (example, part.split or split_by_hash(name, settings.validation_share))
        for part in unit.parts
        for name, examples in maker.read(part, bad)
        for example in examples
    )
    for batch in _batches(rows, BATCH_EXAMPLES, lambda _: 1):
        ids = maker.encode([example for example, _ in batch])
        for (example, split), (prompt, response) in zip(batch, ids, strict=True):
            yield split, prompt, response, maker.text_bytes(example, response), True


def _batches(items: Iterable[T], most: int, weigh: Callable[[T], int]) -> Iterator[list[T]]:
    """The items in lists that weigh at least `most`, but for the last one."""
    batch: list[T] = []
    weight = 0
    for item in items:
        batch.append(item)
        weight += weigh(item)
        if weight >= most:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def _all_bad_rows(counts: Iterable[dict[str, Any]], settings: DataConfig) -> BadRows:
    """All that was bad, if it is within the limit."""
    bad = BadRows(settings.max_bad)
    for counted in counts:
        bad.count += counted["count"]
        bad.first = [*bad.first, *map(tuple, counted["first"])][:NAMED]
    bad.check()
    return bad


# --- the manifest ------------------------------------------------------------------------------------------------


def _manifest(
    plan: dict[str, Any], records: list[dict[str, Any]], tokenizer: Tokenizer, folder: Path, settings: DataConfig
) -> dict[str, Any]:
    splits: dict[str, dict[str, Any]] = {}
    for split in SPLITS:
        parts = [record["splits"][split] for record in records]
        counts = {name: sum(part[name] for part in parts) for name in ("documents", "tokens", "learned", "bytes")}
        splits[split] = {**counts, "files": [entry for part in parts for entry in part["files"]]}
    tokenizer_files = [
        {"file": f"tokenizer/{path.name}", "bytes": path.stat().st_size, "sha256": file_digest(path)}
        for path in sorted((folder / "tokenizer").glob("*.json"))
    ]
    bad = _all_bad_rows((record["bad"] for record in records), settings)
    return {
        "fingerprint": digest(plan),
        "plan": plan,
        "source_fingerprint": digest(plan["source"]),
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "dtype": _dtype(tokenizer),
        "fine_tuning": settings.fine_tuning,
        "splits": splits,
        "tokenizer_files": tokenizer_files,
        "bad": {"count": bad.count, "first": bad.first},
    }


def _unusable(manifest: dict[str, Any], sources: list[str]) -> str | None:
    """Why there is nothing to train on."""
    train, validation = (manifest["splits"][split]["documents"] for split in SPLITS)
    if train:
        return None
    if not validation:
        return f"no text was found in {', '.join(sources)}"
    return (
        "every document fell into validation and none is left to train on; give more text, name a validation "
        "source (--validation), or lower validation_share (--validation-share)"
    )
