"""Text to token shards, once: planned, resumable, and the same whatever the number of workers.

`prepare` is the whole way. Below it stand its steps in order: the plan (all that decides the result), what an
earlier run left, the folder in which it works, the tokenizer, the units of work, the manifest.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from dcdm.config import DataError
from dcdm.data.examples import BadRow, ExampleMaker
from dcdm.data.reading import (
    NAMED,
    BadRows,
    ExaminedFile,
    Part,
    Stamps,
    cut_into_parts,
    examine,
    read_rows,
    read_texts,
)  # fmt: skip
from dcdm.data.settings import SPLITS, DataConfig, held_out
from dcdm.data.shards import RECORDS, Unit, dtype_for, finished_record, write_units, writing
from dcdm.data.sources import PassedOver, resolve
from dcdm.data.store import MANIFEST, PreparedData, read_manifest, write_manifest
from dcdm.data.tokenizers import Tokenizer, bpe_size, byte_tokenizer, load_tokenizer
from dcdm.files import UnreadableFile, digest, file_digest, read_json_object, sync_folder, write_whole

FORMAT = 1  # raise it when the same source would give other shards
UNIT_BYTES = (2 << 20, 64 << 20)  # least and most source bytes of a unit, and so of a shard
MOST_UNITS = 1024
BPE_SAMPLE = 256 << 20  # bytes of training text that bpe:N looks at
PLAN, LOCK, STAMPS = "plan.json", "lock", "source_stamps.json"


class Reporter(Protocol):
    """Hears what a preparation does; `dcdm.progress.ConsoleProgress` shows it to people."""

    def say(self, text: str) -> None:
        """One thing that happened, as a sentence."""

    def progress(self, task: str, done: int, total: int, unit: str, note: str = "") -> None:
        """How far a task has come."""


class Silent(Reporter):
    """Says nothing."""

    def say(self, text: str) -> None:
        return

    def progress(self, task: str, done: int, total: int, unit: str, note: str = "") -> None:
        return


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
    settings, reporter = settings or DataConfig(), reporter or Silent()
    sources, validation = _listed(sources), _listed(validation)
    if not sources:
        raise DataError("no source of text was given")
    if workers is not None and workers < 1:
        raise DataError(f"workers={workers} must be at least 1")

    # what there is to read, and what decides the result
    passed_over, split = PassedOver(), SPLITS[0] if validation else None
    files = [file for spec in sources for file in resolve(spec, settings, split, passed_over)]
    files += [file for spec in validation for file in resolve(spec, settings, "validation", passed_over)]
    examined, stamps = examine(files, settings, _known_stamps(out))
    if validation:
        examined = _without_validation(examined, passed_over)
    passed_over.empty = sum(not file.stamp[0] for file in examined)
    for sentence in passed_over.sentences():
        reporter.say(sentence)
    spec = tokenizer if isinstance(tokenizer, str) else "given"
    ready = _tokenizer_if_ready(tokenizer)
    plan = plan_of(examined, settings, spec, ready, bool(validation))
    out = cache_folder() / f"{_slug(sources[0])}-{digest(plan)[:12]}" if out is None else _absolute(out)

    # is it there already?
    if (existing := _reusable(out, plan, settings, overwrite, reporter)) is not None:
        return existing
    work = Workspace(out, plan)
    work.remove_others(reporter.say)
    with work.held(reporter.say) as is_ours:
        if not is_ours:  # another process finished it meanwhile
            return _opened(out, settings)
        if _is_finished(work.path):
            work.publish()
            return _opened(out, settings)

        # tokenise what earlier runs left
        units = units_of(examined, settings, ready is None or ready.cuts_between_words)
        with writing(work.path):
            write_whole(work.path / STAMPS, json.dumps(stamps).encode())
            kept = _kept_tokenizer(work.path / "tokenizer", ready, spec, units, settings, reporter)
        records = _tokenise(units, work.path, kept, settings, workers or _cores(), reporter)

        # vouch for it and put it in its place
        manifest = _manifest(plan, records, kept, work.path, settings)
        manifest["passed_over"] = passed_over.entry()
        manifest["given"] = {"tokenizer": spec, "sources": list(sources), "validation": list(validation)}
        try:
            _check_filled(manifest, settings, bool(validation), list(sources), reporter)
        except DataError:
            work.discard()
            raise
        with writing(work.path):
            write_manifest(work.path, manifest)
        work.publish()
    return PreparedData.open(out)


def cache_folder() -> Path:
    """Where preparations without a folder of their own are kept: `$DCDM_CACHE`, or `dcdm` in the user's cache."""
    base = os.environ.get("DCDM_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dcdm"
    return _absolute(base) / "data"


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _listed(specs: str | Sequence[str]) -> list[str]:
    return [specs] if isinstance(specs, str) else list(specs)


def _absolute(path: Path | str) -> Path:
    return Path(path).expanduser().resolve()


def _slug(spec: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", spec).strip("-")[-32:] or "data"


def _without_validation(files: list[ExaminedFile], passed_over: PassedOver) -> list[ExaminedFile]:
    """The files without those for training that hold the same bytes as one for validation: they are that file, a
    link to it or a copy of it."""
    held = {file.sha256 for file in files if file.source.split == "validation" and file.stamp[0]}
    kept = [file for file in files if file.source.split == "validation" or file.sha256 not in held]
    passed_over.in_validation = [
        file.source.name for file in files if file.source.split != "validation" and file.sha256 in held
    ]
    if passed_over.in_validation and not any(file.stamp[0] for file in kept if file.source.split != "validation"):
        raise DataError(
            "every file to train on is also a validation file (--validation), so that none is left to train on; "
            "name other files for validation, or leave it out to hold out a share (--validation-share)"
        )
    return kept


# --- the plan ----------------------------------------------------------------------------------------------------


def plan_of(
    files: Sequence[ExaminedFile], settings: DataConfig, spec: str, tokenizer: Tokenizer | None, validation: bool
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
    reasons = []
    if old.get("format") != new["format"]:
        reasons.append(f"it has format {old.get('format')}, this version writes {new['format']}")
    if old.get("unit_bytes") != new["unit_bytes"]:
        reasons.append("it was cut into shards of another size")
    if old.get("tokenizer") != new["tokenizer"]:
        reasons.append(f"the tokenizer was {_called(old.get('tokenizer', {}))} and is {_called(new['tokenizer'])}")
    was, now = old.get("settings", {}), new["settings"]
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            reasons.append(f"{name} was {was.get(name)!r} and is {now.get(name)!r}")
    if old.get("source") != new["source"]:
        reasons.append(_source_difference(old.get("source", []), new["source"]))
    return "; ".join(reasons) or "the plans differ"


def _called(tokenizer: dict[str, Any]) -> str:
    return tokenizer.get("spec") or f"one with fingerprint {tokenizer.get('fingerprint', '')[:12]}"


def _source_difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    was, now = ({entry["name"]: entry for entry in entries} for entries in (old, new))
    both = [name for name in now if name in was]
    groups = {
        "changed": [name for name in both if was[name]["sha256"] != now[name]["sha256"]],
        "new": [name for name in now if name not in was],
        "gone": [name for name in was if name not in now],
        "in another split": [name for name in both if was[name]["split"] != now[name]["split"]],
    }
    words = []
    for word, names in groups.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            words.append(f"{word}: {', '.join(names[:3])}{more}")
    return f"the source differs ({'; '.join(words) or 'its order changed'})"


# --- what an earlier run left ------------------------------------------------------------------------------------


def _known_stamps(out: Path | str | None) -> Stamps:
    """Hashes of source files from earlier runs, finished or not."""
    if out is None:
        folders = [*cache_folder().glob("*")]
    else:
        folders = [_absolute(out), *_absolute(out).parent.glob(f"{glob.escape(_absolute(out).name)}.*.partial")]
    known: Stamps = {}
    for folder in sorted(folders):
        with suppress(UnreadableFile):
            known |= read_json_object(folder / STAMPS)
    return known


def _reusable(
    out: Path, plan: dict[str, Any], settings: DataConfig, overwrite: bool, reporter: Reporter
) -> PreparedData | None:
    """The preparation that is in `out` already, if it is the one asked for."""
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
            prepared = _opened(out, settings)
            reporter.say(f"{out} is up to date")
            return prepared
        reason = f"{out} was prepared differently: {differences(manifest['plan'], plan)}"
    except DataError as error:
        reason = str(error)
    if not overwrite:
        raise DataError(f"{reason}. Choose another out folder, or replace this one (overwrite, --overwrite)")
    reporter.say(f"{reason}. Preparing it anew")
    return None


def _opened(out: Path, settings: DataConfig) -> PreparedData:
    """The finished preparation, if what was bad in it is within today's limit."""
    prepared = PreparedData.open(out)
    _all_bad_rows([prepared.manifest["bad"]], settings)
    return prepared


def _is_finished(work: Path) -> bool:
    """Whether an earlier run came as far as the manifest and died before the folder got its name."""
    if not (work / MANIFEST).exists():
        return False
    try:
        PreparedData.open(work, verify=True)
    except DataError:
        (work / MANIFEST).unlink()
        return False
    return True


# --- the folder in which it works --------------------------------------------------------------------------------


class Workspace:
    """`OUT.<plan>.partial`, beside the result: named by its plan, so that no run takes up another plan's work."""

    def __init__(self, out: Path, plan: dict[str, Any]) -> None:
        self.out, self.plan = out, plan
        self.path = out.with_name(f"{out.name}.{digest(plan)[:12]}.partial")

    @contextmanager
    def held(self, say: Callable[[str], None]) -> Iterator[bool]:
        """Make the folder and hold it against other processes; False if another finished it meanwhile."""
        with writing(self.out.parent):
            lock = self._lock(say)
        if lock is None:
            yield False
            return
        try:
            with writing(self.path):
                (self.path / RECORDS).mkdir(exist_ok=True)
                if not (self.path / PLAN).exists():
                    write_whole(self.path / PLAN, json.dumps(self.plan).encode())
            yield True
        except DataError:
            if not any((self.path / RECORDS).glob("*.json")):  # nothing to resume from
                self.discard()
            raise
        finally:
            os.close(lock)

    def remove_others(self, say: Callable[[str], None]) -> None:
        """Remove what earlier runs with other plans left unfinished, and say why it cannot be used."""
        pattern = re.compile(re.escape(self.out.name) + r"\.[0-9a-f]{12}\.partial")
        for path in sorted(self.out.parent.glob("*.partial")):
            if path == self.path or not pattern.fullmatch(path.name) or _in_use(path):
                continue
            try:
                reason = differences(read_json_object(path / PLAN), self.plan)
            except UnreadableFile:
                reason = "it has no plan"
            say(f"{path.name}, an unfinished preparation, cannot be resumed: {reason}. Removed it")
            with writing(path):
                shutil.rmtree(path)

    def publish(self) -> None:
        """Leave only what belongs to the result, then rename the folder to its final name."""
        with writing(self.path):
            shutil.rmtree(self.path / RECORDS, ignore_errors=True)
            for path in (self.path / PLAN, self.path / LOCK, *self.path.rglob("*.tmp")):
                path.unlink(missing_ok=True)
            sync_folder(self.path)
        with writing(self.out.parent):
            aside = self.out.with_name(f"{self.out.name}.replaced")
            if self.out.exists() and any(self.out.iterdir()):
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(self.out, aside)
            os.rename(self.path, self.out)
            sync_folder(self.out.parent)
            shutil.rmtree(aside, ignore_errors=True)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _lock(self, say: Callable[[str], None]) -> int | None:
        waited = False
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
            except FileNotFoundError:  # renamed between the two lines
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process is preparing {self.out}; waiting for it")
                waited = True
                fcntl.flock(handle, fcntl.LOCK_EX)
            with suppress(OSError):
                if os.path.samestat(os.fstat(handle), os.stat(self.path / LOCK)):
                    return handle
            os.close(handle)
            if waited and self.out.exists():
                return None


def _in_use(path: Path) -> bool:
    try:
        handle = os.open(path / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


# --- the tokenizer -----------------------------------------------------------------------------------------------


def _tokenizer_if_ready(tokenizer: str | Tokenizer) -> Tokenizer | None:
    """The tokenizer, unless it must be learned from the corpus first."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    return None if bpe_size(tokenizer) is not None else load_tokenizer(tokenizer)


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
        for name, text in _named_texts(part, settings, maker, bad):
            if part.split is None and held_out(name, settings.validation_share):
                continue
            yield text
            left -= len(text)
            if left <= 0:
                return


def _named_texts(
    part: Part, settings: DataConfig, maker: ExampleMaker, bad: BadRows
) -> Iterator[tuple[bytes, str]]:
    """The texts of a part, each with the name by which its split is chosen."""
    if not settings.fine_tuning:
        yield from ((text.encode(), text) for text, _ in read_texts(part, settings, bad))
        return
    for _, row in read_rows(part, settings.columns, bad):
        try:
            name, examples = maker.examples_of(row)
        except BadRow:  # counted when its unit is tokenised
            continue
        for example in examples:
            yield name, example.prompt
            yield name, example.response


# --- the units of work -------------------------------------------------------------------------------------------


def units_of(files: Sequence[ExaminedFile], settings: DataConfig, cut_documents: bool) -> list[Unit]:
    """The work, in the order of the source; it depends on the source alone, never on the workers."""
    total = sum(file.stamp[0] for file in files)
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
    if waiting:
        units.append(Unit(len(units), tuple(waiting)))
    return units


def _tokenise(
    units: list[Unit], folder: Path, tokenizer: Tokenizer, settings: DataConfig, workers: int, reporter: Reporter
) -> list[dict[str, Any]]:
    """The records of all units, in order, once their shards are written."""
    records = {
        unit.number: record for unit in units if (record := finished_record(folder, unit.number)) is not None
    }
    left = [unit for unit in units if unit.number not in records]
    if records:
        reporter.say(f"resuming: {len(records)} of {len(units)} units were finished by an earlier run")
    weights, tokens, started = {unit.number: unit.weight for unit in units}, 0, time.monotonic()
    total, done = sum(weights.values()), sum(weights[number] for number in records)
    _all_bad_rows((record["bad"] for record in records.values()), settings)
    for record in write_units(left, folder, tokenizer, settings, workers):
        records[record["unit"]] = record
        if record["bad"]["count"]:
            _all_bad_rows((records[number]["bad"] for number in sorted(records)), settings)
        tokens += sum(record["splits"][split]["tokens"] for split in SPLITS)
        done += weights[record["unit"]]
        rate = tokens / max(time.monotonic() - started, 1e-3)
        reporter.progress("tokenising", done, total, "bytes", f"{rate / 1e6:.2f}M tokens/s")
    return [records[unit.number] for unit in units]


def _all_bad_rows(counts: Iterable[dict[str, Any]], settings: DataConfig) -> BadRows:
    """All that was bad, if it is within the limit."""
    bad = BadRows(settings.max_bad)
    for counted in counts:
        bad.count += counted["count"]
        bad.first += [(name, line, reason) for name, line, reason in counted["first"]]
    bad.first = bad.first[:NAMED]
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
        "dtype": dtype_for(tokenizer.vocab_size),
        "fine_tuning": settings.fine_tuning,
        "splits": splits,
        "tokenizer_files": tokenizer_files,
        "bad": {"count": bad.count, "first": bad.first},
    }


def _check_filled(
    manifest: dict[str, Any], settings: DataConfig, validation_given: bool, sources: list[str], reporter: Reporter
) -> None:
    train, validation = (manifest["splits"][split]["documents"] for split in SPLITS)
    if not train and not validation:
        raise DataError(f"no text was found in {', '.join(sources)}")
    if not train:
        raise DataError(
            "every document fell into validation and none is left to train on; give more text, name a validation "
            "source (--validation), or lower validation_share (--validation-share)"
        )
    if not validation and (validation_given or settings.validation_share > 0):
        reporter.say(
            "no document fell into validation; name a validation source (--validation), or raise validation_share"
        )
