"""Text to token shards, once: planned, resumable, and the same whatever the number of workers."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dcdm.config import DataError
from dcdm.data.examples import BadRow, ExampleMaker
from dcdm.data.planning import Stamps, Unit, differences, examine, plan_digest, plan_of, sample_order, units_of
from dcdm.data.reading import NAMED, Bad, read_rows, read_texts
from dcdm.data.reporting import Reporter
from dcdm.data.settings import SPLITS, DataConfig, held_out
from dcdm.data.shards import dtype_for, finished
from dcdm.data.sources import resolve
from dcdm.data.store import MANIFEST, PreparedData, read_manifest, write_manifest
from dcdm.data.tokenizers import Tokenizer, bpe_size, byte_tokenizer, load_tokenizer
from dcdm.data.workers import run_units
from dcdm.data.workspace import STAMPS, Workspace, writing
from dcdm.files import digest, file_digest, write_whole

BPE_SAMPLE = 256 << 20  # bytes of training text that bpe:N looks at


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

    What is there already is used if source, tokenizer and settings are the same, continued if an earlier run
    was interrupted, and refused with the reason if they changed (unless `overwrite`). `validation` names
    sources of the validation split; without it a share of the documents is held out by hash. `workers`
    (default: one per core) changes the speed only.
    """
    settings, reporter = settings or DataConfig(), reporter or Reporter()
    sources, validation = _listed(sources), _listed(validation)
    if not sources:
        raise DataError("no source of text was given")
    if workers is not None and workers < 1:
        raise DataError(f"workers={workers} must be at least 1")

    # what there is to read, and what decides the result
    known = _known_stamps(out)
    files = [file for spec in sources for file in resolve(spec, settings, "train" if validation else None)]
    files += [file for spec in validation for file in resolve(spec, settings, "validation")]
    planned, stamps = examine(files, settings, known)
    fixed = _tokenizer_now(tokenizer)
    spec = tokenizer if isinstance(tokenizer, str) else "given"
    identity = {"spec": spec} if fixed is None else {"fingerprint": fixed.fingerprint}
    plan = plan_of(planned, settings, identity, bool(validation))
    out = cache_folder() / f"{_slug(sources[0])}-{plan_digest(plan)[:12]}" if out is None else _absolute(out)

    # is it there already?
    if (there := _reusable(out, plan, settings, overwrite, reporter)) is not None:
        return there
    work = Workspace(out, plan)
    work.remove_others(reporter.say)
    with work.held(reporter.say) as ours:
        if not ours or _is_finished(work.path):
            if ours:
                work.publish()
            return _opened(out, settings)

        # tokenise what earlier runs left
        units = units_of(planned, settings, fixed is None or fixed.cuts_between_words)
        with writing(work.path):
            write_whole(work.path / STAMPS, json.dumps(stamps).encode())
            chosen = _kept_tokenizer(work.path / "tokenizer", fixed, spec, units, settings, reporter)
        records = _tokenise(units, work.path, chosen, settings, workers, reporter)

        # vouch for it and put it in its place
        manifest = _manifest(plan, records, chosen, work.path, settings)
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


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_folder() -> Path:
    """Where preparations without a folder of their own are kept: `$DCDM_CACHE`, or `dcdm` in the user's cache."""
    base = os.environ.get("DCDM_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dcdm"
    return _absolute(base) / "data"


def _tokenise(
    units: list[Unit], folder: Path, tokenizer: Tokenizer, settings: DataConfig,
    workers: int | None, reporter: Reporter,
) -> list[dict[str, Any]]:  # fmt: skip
    records = {unit.number: record for unit in units if (record := finished(folder, unit.number)) is not None}
    left = [unit for unit in units if unit.number not in records]
    if records:
        reporter.say(f"continuing: {len(records)} of {len(units)} units were finished by an earlier run")
    weights, tokens = {unit.number: unit.weight for unit in units}, 0
    total, done = sum(weights.values()), sum(weights[number] for number in records)
    _bad_in(records.values(), settings)
    for record in run_units(left, folder, tokenizer, settings, workers or cores()):
        records[record["unit"]] = record
        if record["bad"]["count"]:
            _bad_in(records.values(), settings)
        tokens += sum(record["splits"][split]["tokens"] for split in SPLITS)
        done += weights[record["unit"]]
        reporter.progress(done, total, tokens)
    return [records[unit.number] for unit in units]


def _bad_in(records: Iterable[dict[str, Any]], settings: DataConfig) -> Bad:
    """All that was bad, if it is within the limit."""
    bad = Bad(settings.max_bad)
    for record in sorted(records, key=lambda record: record["unit"]):
        bad.count += record["bad"]["count"]
        bad.first += [(name, line, reason) for name, line, reason in record["bad"]["first"]]
    bad.first = bad.first[:NAMED]
    bad.check()
    return bad


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
    bad = _bad_in(records, settings)
    return {
        "fingerprint": plan_digest(plan),
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
        reason = f"{out} was prepared otherwise: {differences(manifest['plan'], plan)}"
    except DataError as error:
        reason = str(error)
    if not overwrite:
        raise DataError(f"{reason}. Choose another out folder, or replace this one (overwrite, --overwrite)")
    reporter.say(f"{reason}. Preparing it anew")
    return None


def _opened(out: Path, settings: DataConfig) -> PreparedData:
    prepared = PreparedData.open(out)
    bad = prepared.manifest["bad"]
    Bad(settings.max_bad, bad["count"], [(name, line, reason) for name, line, reason in bad["first"]]).check()
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


def _tokenizer_now(tokenizer: str | Tokenizer) -> Tokenizer | None:
    """The tokenizer, unless it must be learned from the corpus first."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    return None if bpe_size(tokenizer) is not None else load_tokenizer(tokenizer)


def _kept_tokenizer(
    folder: Path, fixed: Tokenizer | None, spec: str, units: list[Unit], settings: DataConfig, reporter: Reporter
) -> Tokenizer:
    """The tokenizer of this preparation, kept in its folder; `bpe:N` is learned unless an earlier run did so."""
    if (folder / "tokenizer_config.json").exists():  # written last
        return Tokenizer.load(folder)
    if fixed is None:
        reporter.say(f"learning {spec}")
        fixed = load_tokenizer(spec, _training_texts(units, settings))
    fixed.save(folder)
    return fixed


def _training_texts(units: list[Unit], settings: DataConfig) -> Iterator[str]:
    """Text of the training split, from all over the corpus, up to a limit."""
    left, bad = BPE_SAMPLE, Bad(settings.max_bad)
    maker = ExampleMaker(settings, byte_tokenizer())
    for part in (part for unit in sample_order(units) for part in unit.parts if part.split != "validation"):
        if settings.fine_tuning:
            pairs = _example_texts(maker, read_rows(part, settings.columns, bad))
        else:
            pairs = ((text.encode(), text) for text, _ in read_texts(part, settings, bad))
        for name, text in pairs:
            if part.split is None and held_out(name, settings.validation_share):
                continue
            yield text
            left -= len(text)
            if left <= 0:
                return


def _example_texts(maker: ExampleMaker, rows: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[tuple[bytes, str]]:
    for _, row in rows:
        try:
            name, examples = maker.of(row)
        except BadRow:  # counted when its unit is tokenised
            continue
        for example in examples:
            yield name, example.prompt
            yield name, example.response


def _known_stamps(out: Path | str | None) -> Stamps:
    """Hashes of source files from earlier runs, finished or not."""
    if out is None:
        folders = [*cache_folder().glob("*")]
    else:
        folders = [_absolute(out), *_absolute(out).parent.glob(f"{glob.escape(_absolute(out).name)}.*.partial")]
    known: Stamps = {}
    for folder in sorted(folders):
        with suppress(OSError, ValueError):
            known |= json.loads((folder / STAMPS).read_bytes())
    return known


def _listed(specs: str | Sequence[str]) -> list[str]:
    return [specs] if isinstance(specs, str) else list(specs)


def _absolute(path: Path | str) -> Path:
    return Path(path).expanduser().resolve()


def _slug(spec: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", spec).strip("-")[-32:] or "data"
