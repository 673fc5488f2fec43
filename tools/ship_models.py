"""A run made into a model that ships: exported in bf16, measured on held-out files, with its card.

    python tools/ship_models.py RUN NAME --says "What it is, in a sentence." --twins OTHER…

writes `src/dcdm/shipped/NAME`. The run must have been trained on `stdlib`, `stdlib-code` or `addresses`, whose
split by file or document says which of them it never saw, from nothing or from a model that shipped before. Figures
are those of the exported weights, in fp32, over disjoint windows of what was held out; the paper's surrogate, which
is not a bound, is labelled so. Twins are models of another kind whose settings are the same but for what makes the
kind; of those that ship already this is checked.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
from tyro.conf import Positional

from dcdm.config import ConfigError, ModelConfig
from dcdm.data.sources import ADDRESSES, STDLIB_SHARE, stdlib_files
from dcdm.evaluation.corpora import Corpus, CorpusWindows, WindowSettings, read_corpus, tokenise
from dcdm.evaluation.perplexity import EstimatorSettings, Figures, evaluate_perplexity
from dcdm.files import digest, file_digest
from dcdm.io.export import check_free, write_export
from dcdm.io.load import WEIGHTS, find_model, load_model
from dcdm.kinds import parameter_counts
from dcdm.likelihood.estimators import LABELS
from dcdm.likelihood.statistics import with_stderr
from dcdm.presets import preset, presets
from dcdm.shipped import CARD, HOME, START, TRAINING, Card, Figure, folder_of
from dcdm.training import settings as run_settings
from dcdm.training.checkpoint_folder import SETTINGS
from dcdm.training.metrics import read_rows
from dcdm.viewing.chunks import TokenWindows, held_over


@dataclass(frozen=True)
class Text:
    """A source that a shipped model may have been trained on."""

    source: str
    licence: str
    unit: str
    """What one held-out text is."""
    use: str
    """What models of a few million parameters are too small for."""


LIBRARY = Text("Python's standard library", "PSF-2.0", "file", "writing code")
TEXTS = {
    "stdlib": LIBRARY,
    "stdlib-code": replace(
        LIBRARY,
        source=f"{LIBRARY.source} with its tests, without its tables of characters and its help texts",
    ),
    ADDRESSES: Text(
        "the State of the Union addresses, 1790 to 2021", "public domain", "address", "writing anything"
    ),
}
OF_KIND = ("model.kind", "model.block_size", "model.num_chunks", "model.chunk_dim", "model.chunk_out_init_std")
"""Settings in which twins may differ."""
LEVELS = (0.0, 0.3, 0.6, 0.9, 1.0)
"""Noise levels of what a card says about chunks."""
TOLD = 8  # typical tokens of each chunk
WINDOWS = 256
CHECKED = 24  # windows of the figure that tests make again
DRAFTED = 32  # windows of figures with drafts
LARGEST = 12 << 20


def ship(
    run: Annotated[Path, Positional], name: Annotated[str, Positional], says: str, windows: int = WINDOWS,
    twins: tuple[str, ...] = (), overwrite: bool = False, into: Path = HOME,
) -> None:  # fmt: skip
    """Export a run in bf16, measure it on held-out text, and write it, with its card, as a model that ships.

    Args:
        run: A finished run on stdlib, stdlib-code or addresses.
        name: What users will call it.
        says: What it is, in a sentence.
        windows: Windows of held-out text for each figure, spread evenly.
        twins: Names of models of another kind with the same text, size and training, shipped or to be shipped.
        overwrite: Put it in the place of the model that has this name now.
        into: The folder of all shipped models.
    """
    folder = into / name
    if not overwrite:
        check_free(folder)
    settings = _settings(run)
    check_twins(settings, twins, into)
    model, tokenizer = load_model(run)
    with tempfile.TemporaryDirectory(prefix="dcdm-ship-") as place:
        exported = Path(place) / name
        write_export(model, tokenizer, exported, "", dtype=torch.bfloat16, code=False)
        if (size := (exported / WEIGHTS).stat().st_size) > LARGEST:
            raise ConfigError(f"{run}: its weights take {size / 2**20:.1f} MB in bf16, more than 12")
        card = card_of(exported, run, settings, name, says, windows, list(twins))
    more = {CARD: json.dumps(asdict(card), indent=1) + "\n", **training_files(settings, name)}
    before = folder.with_name(f".{name}-before")
    if folder.exists():
        folder.rename(before)
    try:
        write_export(model, tokenizer, folder, model_card(card), dtype=torch.bfloat16, code=False, more=more)
    except BaseException:
        if before.exists():
            before.rename(folder)
        raise
    shutil.rmtree(before, ignore_errors=True)
    print(model_card(card))


def _settings(run: Path) -> run_settings.RunConfig:
    if not (run / SETTINGS).is_file():
        raise ConfigError(f"{run} is not a run folder: it has no {SETTINGS}")
    settings = run_settings.read(run / SETTINGS)
    reading, sources = settings.data.reading, settings.data.sources
    known = len(sources) == 1 and sources[0] in TEXTS
    if not known or settings.data.validation or reading.validation_share != STDLIB_SHARE:
        raise ConfigError(
            f"{run} was not trained on {' or '.join(TEXTS)} with its own held-out part (data.sources={sources}, "
            f"validation_share={reading.validation_share}); a card could not say which text was never seen"
        )
    if settings.init is not None and _start(settings) is None:
        raise ConfigError(f"{run} started from {settings.init}, which has no card: nobody could train it again")
    if (start := _start(settings)) is not None and Card.read(start).start is not None:
        raise ConfigError(
            f"{run} started from {start}, which had initial weights itself; a card tells of one start only"
        )
    if settings.init is not None and settings.data.tokenizer != settings.init:
        raise ConfigError(f"{run} has another tokenizer than its initial weights; name their folder for both")
    return settings


def check_twins(settings: run_settings.RunConfig, twins: Sequence[str], home: Path) -> None:
    """Refuse twins that were trained otherwise; those that are not there yet will be compared with this model."""
    for twin in (name for name in twins if (home / name / TRAINING).is_file()):
        ours, theirs = (
            run_settings.flat(run_settings.to_dict(one))
            for one in (settings, run_settings.read(home / twin / TRAINING))
        )
        free = {*OF_KIND, *run_settings.FREE_TO_CHANGE} - {"data.sources"}
        other = [name for name in ours if ours[name] != theirs.get(name) and name not in free]
        if other:
            raise ConfigError(f"{twin} is no twin: it differs in {', '.join(other)}; leave it out of --twins")


# --- training it again -------------------------------------------------------------------------------------------


def _start(settings: run_settings.RunConfig) -> Path | None:
    """The folder of the shipped model that a run started from; None if it began from nothing.

    Its card is read as it is now: where a model takes the place of the one it started from, that must be a copy.
    """
    folder = None if settings.init is None else folder_of(settings.init)
    return None if folder is None or not (folder / CARD).is_file() else folder


def training_files(settings: run_settings.RunConfig, name: str) -> dict[str, str]:
    """The settings that train it again, its initial weights where the card's command puts them, and theirs."""
    start = _start(settings)
    if start is None:
        return {TRAINING: run_settings.as_yaml(settings)}
    place = f"runs/{name}-start"
    again = replace(settings, init=place, data=replace(settings.data, tokenizer=place))
    return {TRAINING: run_settings.as_yaml(again), START: (start / TRAINING).read_text(encoding="utf-8")}


def again_by(settings: run_settings.RunConfig, name: str, ends: Sequence[int]) -> str:
    """The commands that train it again, from nothing: its initial weights first, where it has some."""
    own = _command(name, ends)
    start = _start(settings)
    if start is None:
        return own
    before = Card.read(start)
    first = before.command.replace(f"shipped/{before.name}/{TRAINING}", f"shipped/{name}/{START}")
    first = first.replace(f"--run runs/{before.name}", f"--run runs/{name}-first")
    return f"{first} && dcdm export runs/{name}-first runs/{name}-start --dtype bf16 && {own}"


# --- held-out text -----------------------------------------------------------------------------------------------


def held_out_files(source: str) -> dict[str, str]:
    """What is held out, each with its SHA-256: addresses by number, or files of this Python.

    Of the library without tests, which many installations lack.
    """
    if source == ADDRESSES:
        texts = read_corpus(ADDRESSES, split="validation").texts
        return {f"held-out address {n}": digest_of(text) for n, text in enumerate(texts, start=1)}
    root, everywhere = Path(sysconfig.get_path("stdlib")), {*stdlib_files("validation", "stdlib")}
    held_out = [path for path in stdlib_files("validation", source) if path in everywhere]
    return {path.relative_to(root).as_posix(): file_digest(path) for path in held_out}


def held_out_corpus(source: str, names: list[str]) -> Corpus:
    """These texts of the source, those of them that are there and hold anything."""
    if source == ADDRESSES:
        return read_corpus(ADDRESSES, split="validation")
    root = Path(sysconfig.get_path("stdlib"))
    texts = [(root / name).read_bytes().decode("utf-8", "replace") for name in names if (root / name).is_file()]
    kept = tuple(text for text in texts if text.strip())
    return Corpus("held-out files", source, kept, fingerprint=digest_of("\0".join(kept)))


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def trained_on(source: str) -> dict[str, Any]:
    """What the card says of the training text."""
    text = TEXTS[source]
    if source == ADDRESSES:
        train = read_corpus(ADDRESSES, split="train").texts
        sums, size = [digest_of(one) for one in train], sum(len(one.encode()) for one in train)
        named = {"data": source}
    else:
        train = stdlib_files("train", source)
        sums, size = [file_digest(path) for path in train], sum(path.stat().st_size for path in train)
        named = {"python": sys.version.split()[0]}
    return {
        "source": text.source, "licence": text.licence, **named, "files": len(train), "bytes": size,
        "sha256": digest(sums),
    }  # fmt: skip


def measure(
    folder: Path, corpus: Corpus, windows: int, lanes: tuple[int, ...] = (), estimators: tuple[str, ...] = ()
) -> list[tuple[Figures, Figure]]:
    """The likelihoods of a model, in fp32: exact ones of its decoders, and its bound where it has one."""
    config = find_model(folder).config
    if not estimators:
        estimators = _estimators(config)
    rows = []
    for estimator in estimators:
        drafted = estimator == "drafted"  # a forward for every token, so fewer windows
        sampling = EstimatorSettings(samples=1 if drafted else 4, lanes=lanes)
        limit = min(windows, DRAFTED) if drafted else windows
        window = WindowSettings(limit=limit)
        found = evaluate_perplexity([str(folder)], [corpus], (estimator,), sampling, window).rows
        rows += [row for row in found if isinstance(row, Figures)]
    numbers: Sequence[int | None] = (1,) if config.kind == "ar" else lanes or config.lanes or (None,)
    by_row = [*numbers] * (len(rows) // len(numbers))
    return [(row, _figure(row, number, config.drafts)) for row, number in zip(rows, by_row, strict=True)]


def _estimators(config: ModelConfig) -> tuple[str, ...]:
    if config.lanes is not None:
        return ("exact", "drafted") if config.drafts else ("exact",)
    if config.kind == "ar":
        return ("exact",)
    if config.predicts_from_left:
        return ("trajectory",)
    return ("auto", "surrogate", "trajectory") if config.routes_from_noise else ("auto", "trajectory")


def what_chunks_hold(folder: Path, corpus: Corpus, windows: int) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """What decides the chunks of a DCDM, a row for each noise level, and their most typical tokens."""
    model, tokenizer = load_model(folder)
    config = model.config
    if config.kind != "dcdm":
        return [], []
    whole = CorpusWindows(
        tokenise(corpus, tokenizer), tokenizer, config.context_length, WindowSettings(limit=windows)
    )
    batch = next(whole.batches(windows))  # the longest first
    pieces = [tokenizer.pieces(row) for row in batch.tokens.tolist()]
    levels = LEVELS if config.routes_from_noise else ()
    held = held_over(
        model, TokenWindows("held-out windows", batch.tokens, batch.prompt, batch.index, pieces), levels
    )
    rows = [
        {
            "noise": level, "which": one.which, "tokens": one.tokens, "bits": _bits(one.bits),
            **{name: _bits(getattr(one, name).bits) for name in ("position", "token", "window")},
            "left": _bits(one.left), "neighbour": _bits(one.neighbour.bits),
            "same_chunk": _bits(one.constant), "by_chance": _bits(one.constant_by_chance),
        }
        for level, parts in zip(levels or (None,), held.frames, strict=True)
        for one in parts[1:] or parts
    ]  # fmt: skip
    return rows, [[word.text for word in words[:TOLD]] for words in held.frames[0][0].words]


def _figure(row: Figures, lanes: int | None, drafts: int) -> Figure:
    forwards = None
    if row.estimator in ("trajectory", "drafted"):
        forwards = round(row.forwards / row.windows, 2)
    elif lanes is not None:
        forwards = float(-(-(row.window_length - 1) // lanes))
    return Figure(
        row.estimator, lanes, _digits(row.nats_per_token), _digits(row.document_stderr),
        _digits(row.nats_per_token * row.tokens / row.bytes), forwards,
        drafts if row.estimator == "drafted" else None,
    )  # fmt: skip


def _digits(value: float | None) -> Any:
    return None if value is None else float(f"{value:.5g}")


def _bits(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


# --- the card ----------------------------------------------------------------------------------------------------


def card_of(
    folder: Path, run: Path, settings: run_settings.RunConfig, name: str, says: str, windows: int = WINDOWS,
    twins: Sequence[str] = (),
) -> Card:  # fmt: skip
    """What there is to say of the exported model in `folder`, which came of this run."""
    config, (source,) = find_model(folder).config, settings.data.sources
    start = None if (place := _start(settings)) is None else Card.read(place)
    files = held_out_files(source)
    corpus = held_out_corpus(source, list(files))
    measured = measure(folder, corpus, windows)
    chunks, words = what_chunks_hold(folder, corpus, windows)
    whole = measured[0][0]
    lanes = () if config.lanes is None else (min(config.lanes, key=lambda number: abs(number - 4)),)
    cheapest = "trajectory" if config.routes_from_noise else _estimators(config)[0]
    ((check, quick),) = measure(folder, corpus, CHECKED, lanes, (cheapest,))
    steps, rows = find_model(run).identity()["step"], list(read_rows(run / "metrics.jsonl"))
    if steps < settings.train.steps:
        print(f"{run} has done {steps} of its {settings.train.steps} steps; its card will say so", file=sys.stderr)
    return Card(
        name=name, says=says, kind=config.kind, parameters=parameter_counts(config)[0],
        context_length=config.context_length,
        tokenizer=settings.data.tokenizer if start is None else start.tokenizer,
        vocab_size=config.vocab_size,
        preset=_preset_like(config),
        command=again_by(settings, name, [*earlier_ends(rows, settings.train.warmup_steps), settings.train.steps]),
        seed=settings.train.seed, steps=steps,
        tokens=sum(int(row["tokens"]) for row in rows if "nll" in row and row["step"] <= steps),
        trained_on=trained_on(source),
        held_out={
            "files": files, "texts": len(corpus.texts), "windows": whole.windows,
            "window_length": whole.window_length, "tokens": whole.tokens, "bytes": whole.bytes,
        },
        figures=tuple(figure for _, figure in measured),
        check={"windows": check.windows, **asdict(quick)},
        weights={
            "dtype": "bf16", "bytes": (folder / WEIGHTS).stat().st_size, "sha256": file_digest(folder / WEIGHTS)
        },
        start=None if start is None else {"steps": start.steps, "tokens": start.tokens, "seed": start.seed},
        twins=twins, chunks=chunks, words=words,
    )  # fmt: skip


def earlier_ends(rows: Iterable[Mapping[str, Any]], warmup: int) -> list[int]:
    """The steps at which a run had ended before it was made longer: where its decayed learning rate rose again."""
    rates = [(int(row["step"]), row["learning_rate"]) for row in rows if "learning_rate" in row]
    return [step for (step, rate), (_, after) in pairwise(rates) if step > warmup and after > 2 * rate]


def _command(name: str, ends: Sequence[int]) -> str:
    """What trains it again; a run that was made longer went down to its first end, and from there on."""
    first = f"dcdm train --config src/dcdm/shipped/{name}/{TRAINING} --run runs/{name}"
    if len(ends) == 1:
        return first
    return " && ".join(
        [f"{first} --steps {ends[0]}", *(f"dcdm train --run runs/{name} --steps {n}" for n in ends[1:])]
    )


def _preset_like(config: ModelConfig) -> str | None:
    """The preset of this shape, whatever its vocabulary and its context."""
    same = {"vocab_size": config.vocab_size, "context_length": config.context_length}
    for name in presets():
        if replace(preset(name), **same) == config:  # type: ignore[arg-type]
            return name
    return None


def model_card(card: Card) -> str:
    """The card for people: README.md of the folder."""
    data, out = card.trained_on, card.held_out
    text = next((one for one in TEXTS.values() if one.source == data["source"]), LIBRARY)
    rows = []
    for one in card.figures:
        lanes, drafts, forwards = (
            "–" if value is None else f"{value:g}" for value in (one.lanes, one.drafts, one.forwards_per_window)
        )
        nats = with_stderr(one.nats_per_token, one.stderr)
        label = LABELS[one.estimator]
        rows.append(f"| {lanes} | {drafts} | {forwards} | {nats} | {one.nats_per_byte:.3f} | {label} |")
    fewer = f"\nRows with drafts: {DRAFTED} of these windows." if any(one.drafts for one in card.figures) else ""
    twins = ", ".join(f"`{name}`" for name in card.twins)
    twins = f"\n| twins: same text, tokenizer, size and training | {twins} |" if twins else ""
    plural = text.unit + ("es" if text.unit.endswith("s") else "s")
    python = f" ({data['python']})" if "python" in data else ""
    begun = card.start
    started = (
        f", from the weights of {begun['steps']:,} steps, {begun['tokens'] / 1e6:.1f}M tokens" if begun else ""
    )
    files = "\n".join(f"- `{name}` {sha256[:12]}…" for name, sha256 in out["files"].items())
    return f"""---
library_name: dcdm
license: apache-2.0
---

# {card.name}

{card.says}

A model of kind `{card.kind}` with {card.parameters:,} parameters, a vocabulary of {card.vocab_size:,}
({card.tokenizer}) and a context of {card.context_length} tokens. It shows what the method does; it is far
too small to be of use for {text.use}.

| | |
|---|---|
| training text | {data["source"]}{python}: {data["files"]} {plural}, {data["bytes"] / 1e6:.1f} MB |
| its licence | {data["licence"]} |
| training | {card.steps:,} steps, {card.tokens / 1e6:.1f}M predicted tokens, seed {card.seed}{started} |
| preset of this shape | {card.preset or "none"} |{twins}
| again | `{card.command}` |
| weights | {card.weights["dtype"]}, {card.weights["bytes"] / 1e6:.1f} MB, SHA-256 {card.weights["sha256"][:16]}… |

## Held-out {plural}

{out["windows"]} windows of {out["window_length"]} tokens out of {plural} that were not trained on
({out["tokens"]:,} tokens, {out["bytes"]:,} bytes); ± is the standard error over {plural}. Lower is better.{fewer}

| lanes | drafts | forwards per window | nats per token | nats per byte | what the figure is |
|---|---|---|---|---|---|
{chr(10).join(rows)}
{chunks_in_words(card)}
The {plural}, with the beginnings of their SHA-256:

{files}
"""


def chunks_in_words(card: Card) -> str:
    """What the card tells of chunks, as Markdown; nothing of models without any."""
    if not card.chunks:
        return ""
    names = list(card.chunks[0])
    lines = [
        "| " + " | ".join("–" if row[name] is None else str(row[name]) for name in names) + " |"
        for row in card.chunks
    ]
    heads = " | ".join(name.replace("_", " ") for name in names)
    words = "\n".join(
        f"| {k} | {' '.join(f'`{word}`'.replace(' ', '·') for word in one)} |"
        for k, one in enumerate(card.words, 1)
    )
    return f"""
## What its chunks hold

Bits of the chunk, and how many of them a token's position, the token, and the window alone explain, chance taken
out; what is left is context, noise, and several together; *neighbour* is what the token before tells, as the router
sees it (docs/method.md). *Same chunk*: the share of tokens that go where most of their type go, beside what chance
gives.

| {heads} |
|{"---|" * len(names)}
{chr(10).join(lines)}

| chunk | its most typical tokens, with nothing masked |
|---|---|
{words}
"""


def _quoted(word: str) -> str:
    """A token as code in a cell of a Markdown table, its spaces and line ends to be seen."""
    shown = word.replace(" ", "·").replace("\n", "↵").replace("|", "\\|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


if __name__ == "__main__":
    import tyro

    try:
        tyro.cli(ship)
    except ConfigError as error:
        raise SystemExit(f"dcdm: {error}") from None
