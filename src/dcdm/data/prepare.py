"""Text to token shards, once: planned, resumable, and the same whatever the number of workers.

`prepare` is the whole way. Below it are its steps in order: the plan (all that decides the result), what an
earlier run left, the folder in which it works, the tokenizer, the units of work, the manifest. A unit is a stretch
of the source that becomes one shard per split: read (`sources`), tokenised, written (`store.Shard`). Threads work
on several at a time, and `tokenizers` on every core.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from dcdm.config import SPLITS, DataConfig, DataError, Split
from dcdm.data.chats import Example, ExampleMaker
from dcdm.data.sources import (
    BETWEEN_WORDS,
    Part,
    SourceFile,
    cut_into_parts,
    examine,
    listed,
    resolve,
    split_by_hash,
)
from dcdm.data.store import MANIFEST, PreparedData, Shard, read_manifest, write_manifest
from dcdm.data.tokenizers import Tokenizer, bpe_size, byte_tokenizer, load_tokenizer
from dcdm.files import digest, file_digest, read_json_object, replace_folder, user_cache, write_whole
from dcdm.progress import Reporter

FORMAT = 1  # raise it when the same source would give other shards
UNIT_BYTES = (2 << 20, 64 << 20)  # least and most source bytes of a unit, and so of a shard
MOST_UNITS = 1024
BPE_SAMPLE = 256 << 20  # bytes of training text that bpe:N looks at
BATCH_CHARACTERS = 1 << 20  # tokenised at one time
WORKERS = 2  # units at one time: one is read while the other one is tokenised, on every core
LOCK, PLAN, RECORDS = "lock", "plan", "units"


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
    held out by hash. `workers`, shards at one time, changes the speed only.
    """
    settings, reporter = settings or DataConfig(), reporter or Reporter()
    sources, validation = ([given] if isinstance(given, str) else list(given) for given in (sources, validation))
    if not sources:
        raise DataError("no source of text was given")
    if workers is not None and workers < 1:
        raise DataError(f"workers={workers} must be at least 1")

    # find the files
    own: Split | None = "train" if validation else None
    found = [file for spec in sources for file in resolve(spec, settings, own, reporter.say)]
    found += [file for spec in validation for file in resolve(spec, settings, "validation", reporter.say)]
    files = examine(found)
    if validation:
        files = _without_validation(files, reporter.say)
    if empty := [file.name for file in files if not file.size]:
        reporter.say(f"skipping empty files: {listed(empty)}")

    # plan: is it there already?
    ready: Tokenizer | None
    if isinstance(tokenizer, Tokenizer):
        spec, ready = "given", tokenizer
    else:  # bpe:N must be learned from the corpus first
        spec, ready = tokenizer, None if bpe_size(tokenizer) is not None else load_tokenizer(tokenizer)
    plan = plan_of(files, settings, spec, ready, bool(validation))
    name = re.sub(r"[^A-Za-z0-9]+", "-", sources[0]).strip("-")[-32:] or "data"
    out = cache_folder() / f"{name}-{digest(plan)[:12]}" if out is None else Path(out).expanduser().resolve()
    if (existing := _existing(out, plan, overwrite, reporter)) is not None:
        return existing
    work = out.with_name(f"{out.name}.partial")
    with _writing(out), _locked(work, out, digest(plan), reporter.say):
        if (existing := _existing(out, plan, overwrite, Reporter())) is not None:  # while we waited
            shutil.rmtree(work)
            return existing
        if not (work / MANIFEST).exists():
            # read, tokenise and write what earlier runs left
            units = units_of(files, settings, ready is None or ready.cuts_between_words)
            kept = _kept_tokenizer(work / "tokenizer", ready, spec, units, settings, reporter)
            records = _tokenise(units, work, kept, settings, workers or WORKERS, reporter)

            # seal it with a manifest
            manifest = manifest_of(plan, records, kept, work, settings)
            manifest["given"] = {"tokenizer": spec, "sources": sources, "validation": validation}
            _check_documents(manifest, work, settings, reporter.say)
            write_manifest(work, manifest)
        _publish(work, out)
    return PreparedData.open(out)


def cache_folder() -> Path:
    """Where preparations without a folder of their own are kept."""
    return user_cache() / "data"


def _without_validation(files: list[SourceFile], say: Callable[[str], None]) -> list[SourceFile]:
    """The files without those for training that hold the same bytes as one for validation: they are that file, a
    link to it or a copy of it."""
    held = {file.sha256 for file in files if file.split == "validation" and file.size}
    kept = [file for file in files if file.split == "validation" or file.sha256 not in held]
    if copies := [file.name for file in files if file.split == "train" and file.sha256 in held]:
        say(f"skipping files of training that validation (--validation) holds too: {listed(copies)}")
        if not any(file.size for file in kept if file.split == "train"):
            raise DataError(
                "every file to train on is also a validation file (--validation), so that none is left to train "
                "on; name other files for validation, or leave it out to hold out a share (--validation-share)"
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
        reasons.append(f"source files changed: {listed(files)}")
    return "; ".join(reasons) or "the source files are in another order"


def _existing(out: Path, plan: dict[str, Any], overwrite: bool, reporter: Reporter) -> PreparedData | None:
    """The preparation that is in `out` already, if it is the one asked for."""
    if not out.exists():
        return None
    if not (out / MANIFEST).exists():
        if not out.is_dir() or any(out.iterdir()):
            raise DataError(f"{out} exists and is something else than prepared data; choose another out folder")
        return None
    try:
        manifest = read_manifest(out)
        if manifest["plan"] == plan:
            prepared = PreparedData.open(out)
            with suppress(OSError):  # of one that died just after its last rename
                (out / LOCK).unlink()
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
        raise DataError(
            f"cannot write to {out}: {reason}; free some space, look at the folder's permissions or choose another "
            "out folder, and start again"
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
        with suppress(FileNotFoundError):  # the folder was finished and renamed meanwhile
            handle = os.open(work / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process is preparing {out}; waiting for it")
                fcntl.flock(handle, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(handle), os.stat(work / LOCK)):
                return handle
            os.close(handle)


def _publish(work: Path, out: Path) -> None:
    """Leave only what belongs to the result, then rename the folder to its final name."""
    shutil.rmtree(work / RECORDS, ignore_errors=True)
    for path in (work / PLAN, *work.rglob("*.tmp")):
        path.unlink(missing_ok=True)
    replace_folder(work, out)
    (out / LOCK).unlink(missing_ok=True)  # not before: who waits would take the folder for a new one


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
    left, maker = BPE_SAMPLE, ExampleMaker(settings, byte_tokenizer())
    for number in sorted(range(len(units)), key=lambda number: digest(["sample", number])):
        parts = [part for part in units[number] if part.split != "validation"]
        for split, example in _examples(parts, maker):
            if split == "train":
                yield from (example.prompt or "", example.response)
                left -= example.size
                if left <= 0:
                    return


# --- the units of work -------------------------------------------------------------------------------------------


Unit = list[Part]
"""What is turned into one shard per split; units are known by their number."""


def units_of(files: Sequence[SourceFile], settings: DataConfig, cut_documents: bool) -> list[Unit]:
    """The work, in the order of the source; it depends on the source alone, never on the workers."""
    total = sum(file.size for file in files)
    unit_bytes = min(max(total // MOST_UNITS, UNIT_BYTES[0]), UNIT_BYTES[1])
    units: list[Unit] = []
    weight = unit_bytes
    for part in cut_into_parts(files, settings, unit_bytes, cut_documents):
        if weight >= unit_bytes:
            units.append([])
            weight = 0
        units[-1].append(part)
        weight += part.weight
    return units


def _tokenise(
    units: list[Unit], folder: Path, tokenizer: Tokenizer, settings: DataConfig, workers: int, reporter: Reporter
) -> list[dict[str, Any]]:
    """The records of all units, in order, once their shards are written."""
    weights = [sum(part.weight for part in unit) for unit in units]
    written, started = Counter[str](), time.monotonic()
    pool, stop = ThreadPoolExecutor(workers), Event()
    try:
        found = pool.map(lambda number: finished_record(folder, number), range(len(units)))
        records = {number: record for number, record in enumerate(found) if record is not None}
        if records:
            reporter.say(f"resuming: {len(records)} of {len(units)} units were finished by an earlier run")
        done = sum(weights[number] for number in records)
        work = {
            pool.submit(write_unit, number, unit, folder, tokenizer, settings, stop): number
            for number, unit in enumerate(units)
            if number not in records
        }
        for ended in as_completed(work):
            number, record = work[ended], ended.result()
            records[number] = record
            done += weights[number]
            for name in ("documents", "tokens"):
                written[name] += sum(record["splits"][split][name] for split in SPLITS)
            seconds = max(time.monotonic() - started, 1e-3)
            rate = f"{written['documents'] / seconds:,.0f} documents/s, {written['tokens'] / seconds:,.0f} tokens/s"
            reporter.progress("tokenising", done, sum(weights), "bytes", rate)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
    return [records[number] for number in range(len(units))]


def write_unit(
    number: int, unit: Unit, folder: Path, tokenizer: Tokenizer, settings: DataConfig, stop: Event
) -> dict[str, Any]:
    """Write the unit's shards, then its record; the record is there only if the shards are whole."""
    maker = ExampleMaker(settings, tokenizer)
    stem, dtype = f"{number:05d}", token_type(tokenizer)
    shards = {split: Shard(folder / f"{split}-{stem}", dtype) for split in SPLITS}
    try:
        for batch in _batches(_examples(unit, maker), tokenizer.cuts_between_words):
            if stop.is_set():  # after Ctrl-C, or when another unit failed
                raise CancelledError
            encoded = maker.encode([example for _, example in batch])
            for (split, example), (prompt, learned) in zip(batch, encoded, strict=True):
                shards[split].add(prompt, learned, maker.text_bytes(example, learned), example.ends)
        splits = {split: shard.close() for split, shard in shards.items()}
        record = {"unit": number, "splits": splits}
        write_whole(folder / RECORDS / f"{stem}.json", json.dumps(record).encode())
    finally:
        for shard in shards.values():
            shard.discard()
    return record


def _examples(parts: Iterable[Part], maker: ExampleMaker) -> Iterator[tuple[Split, Example]]:
    """What the parts hold, each with its split."""
    for part in parts:
        for name, examples in maker.read(part):
            split = part.split or split_by_hash(name, maker.settings.validation_share)
            yield from ((split, example) for example in examples)


def _batches(
    examples: Iterable[tuple[Split, Example]], cut_documents: bool
) -> Iterator[list[tuple[Split, Example]]]:
    """Lists to be tokenised at one time; with `cut_documents` long texts are in pieces."""
    batch: list[tuple[Split, Example]] = []
    size = 0
    for split, example in examples:
        for piece in _pieces(example) if cut_documents else (example,):
            batch.append((split, piece))
            size += piece.size
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(example: Example) -> Iterator[Example]:
    """A long text in pieces that end between words."""
    start = 0
    while example.prompt is None and (cut := BETWEEN_WORDS.search(example.response, start + BATCH_CHARACTERS)):
        yield replace(example, response=example.response[start : cut.end()], ends=False)
        start = cut.end()
    yield replace(example, response=example.response[start:]) if start else example


def finished_record(folder: Path, number: int) -> dict[str, Any] | None:
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


def token_type(tokenizer: Tokenizer) -> str:
    """The type of a shard's numbers."""
    return "uint16" if tokenizer.vocab_size <= 65_535 else "uint32"


# --- the manifest ------------------------------------------------------------------------------------------------


def manifest_of(
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
    return {
        "fingerprint": digest(plan),
        "plan": plan,
        "source_fingerprint": digest(plan["source"]),
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "dtype": token_type(tokenizer),
        "fine_tuning": settings.fine_tuning,
        "splits": splits,
        "tokenizer_files": tokenizer_files,
    }


def _check_documents(
    manifest: dict[str, Any], work: Path, settings: DataConfig, say: Callable[[str], None]
) -> None:
    """Whether there is something to train on, and to validate with; if not, nothing is kept."""
    train, held = (manifest["splits"][split]["documents"] for split in SPLITS)
    given, fix = manifest["given"], "name a validation source (--validation)"
    if not train:
        shutil.rmtree(work)
        if not held:
            raise DataError(f"no text was found in {', '.join(given['sources'])}")
        raise DataError(
            f"every document fell into validation and none is left to train on; give more text, {fix}, or lower "
            "validation_share (--validation-share)"
        )
    if not held and (given["validation"] or settings.validation_share):
        say(f"no document fell into validation; {fix}, or raise validation_share (--validation-share)")
