"""Perplexity of models on corpora, with its errors and with what was left out.

`evaluate_perplexity` measures many models on many corpora, and finds all that can be wrong before it measures the
first. Processes share the batches, and sums are taken in the order of the windows: their number changes no digit.
Nor does the batch size, beyond rounding: a window's randomness is keyed by its number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from dcdm.config import ConfigError, ModelConfig, many
from dcdm.decoding.config import DecodingConfig
from dcdm.distributed import World, gather_objects
from dcdm.evaluation.corpora import (
    Corpus,
    CorpusWindows,
    TokenisedCorpus,
    WindowBatch,
    WindowSettings,
    check_tokenizer,
    tokenise,
)  # fmt: skip
from dcdm.io.load import ModelSource, find_model
from dcdm.likelihood.estimators import DRAWN, LABELS, Estimator, Score, estimators_of, score
from dcdm.likelihood.estimators import check as check_estimator
from dcdm.likelihood.statistics import known, mean_and_stderr
from dcdm.model.transformer import Model

Advance = Callable[[int, int], None]
"""(windows done, windows in all) of this process."""
Share = tuple[int, float, int, float]
"""What one window adds to one document: its number, nats, tokens, bytes."""


@dataclass(frozen=True)
class EstimatorSettings:
    """How the sampled estimators draw."""

    samples: int | Literal["all"] = 16
    seed: int = 0
    batch_size: int = 16
    lanes: tuple[int, ...] = ()
    """Numbers of lanes to score models with that write in lanes; none means each model's own list."""
    commit: str = "chunk"
    """Decoder of `trajectory` for models that can fill a chunk in several forward passes."""

    def __post_init__(self) -> None:
        if min(self.lanes, default=1) < 1:
            raise ConfigError(f"lanes={self.lanes} must each be at least 1")
        for name in ("samples", "batch_size"):
            value = getattr(self, name)
            if value != "all" and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")


@dataclass(frozen=True)
class Figures:
    """One estimator of one model on one corpus. Errors are standard errors of `nats_per_token`."""

    model: str
    corpus: str
    estimator: str
    label: str
    nats_per_token: float
    perplexity: float
    bits_per_byte: float | None
    """None where the counted tokens stand for no text."""
    monte_carlo_stderr: float | None
    """Of the drawn masks: 0 where nothing is drawn, None for a single sample."""
    document_stderr: float | None
    """Over documents; it includes the Monte-Carlo error. None for a single document."""
    samples: int | str | None
    """None where nothing is drawn."""
    seed: int
    forwards: int
    tokens: int
    bytes: int
    documents: int
    windows: int
    window_length: int
    left_out: dict[str, int] = field(default_factory=dict)
    """Tokens of windows that --limit skipped."""
    documents_cut: int = 0
    """Documents that do not lie whole in one window."""


@dataclass(frozen=True)
class Unsupported:
    """An estimator that a model does not have."""

    model: str
    corpus: str
    estimator: str
    reason: str


def chosen_estimators(config: ModelConfig, asked: tuple[str, ...]) -> tuple[list[Estimator], list[str]]:
    """Of the estimators asked for, those that fit (`auto`: the valid one), each once, and those that do not."""
    for name in asked:
        if name not in ("auto", *get_args(Estimator)):
            choices = ", ".join(("auto", *get_args(Estimator)))
            raise ConfigError(f"unknown estimator {name!r}; choose among {choices}")
    available = estimators_of(config)
    names = dict.fromkeys(available[0] if name == "auto" else name for name in asked)
    fitting = [name for name in available if name in names]
    return fitting, [name for name in names if name not in fitting]


@torch.no_grad()
def measure_perplexity(
    model: Model,
    windows: CorpusWindows,
    estimator: Estimator,
    drawing: EstimatorSettings,
    world: World,
    advance: Advance = lambda done, total: None,
    lanes: int | None = None,
    commit: str = "chunk",
) -> Tally:
    """Score the windows, this process its share of them, and gather all of it on every process."""
    share = (drawing.batch_size, world.rank, world.size)
    total, mine = sum(len(numbers) for numbers, _ in windows.groups(*share)), Tally()
    for batch in windows.batches(*share):
        scored = score(
            model, batch.tokens.to(world.device), estimator, drawing.samples, drawing.seed,
            prompt=batch.prompt.to(world.device), index=batch.index, batch_size=len(batch.tokens), lanes=lanes,
            commit=commit,
        )  # fmt: skip
        mine.add(batch, scored, windows.corpus)
        advance(len(mine.rows), total)
    rows = sorted(row for part in gather_objects(mine.rows, world) for row in part)
    return Tally(rows)


@dataclass
class Tally:
    """Of every window: its number, the variance of its score, its forward passes, and its shares."""

    rows: list[tuple[int, float, float, list[Share]]] = field(default_factory=list)

    def add(self, batch: WindowBatch, scored: Score, corpus: TokenisedCorpus) -> None:
        columns = (batch.index.tolist(), scored.stderr.square().tolist(), scored.forwards.tolist())
        for row, (number, variance, forwards) in enumerate(zip(*columns, strict=True)):
            counted = batch.place[row] >= 0
            place = batch.place[row][counted].numpy()
            nats = scored.by_position[row][counted].numpy()
            self.rows.append((number, variance, forwards, _shares(place, nats, corpus)))

    def figures(
        self, model: str, corpus: Corpus, windows: CorpusWindows, estimator: Estimator, drawing: EstimatorSettings
    ) -> Figures:
        shares = [share for *_, row in self.rows for share in row]
        nats = math.fsum(share[1] for share in shares)
        tokens, size = sum(share[2] for share in shares), math.fsum(share[3] for share in shares)
        drawn = estimator in DRAWN
        documents: dict[int, tuple[float, int]] = {}  # nats and tokens of each
        for number, cost, count, _ in shares:
            before = documents.get(number, (0.0, 0))
            documents[number] = (before[0] + cost, before[1] + count)
        mean = nats / tokens
        left_out = {"tokens beyond the limit": windows.left_out}
        return Figures(
            model, corpus.name, estimator, LABELS[estimator], mean, math.exp(mean) if mean < 700 else math.inf,
            nats / math.log(2) / size if size else None,
            known(math.sqrt(math.fsum(variance for _, variance, _, _ in self.rows)) / tokens),
            known(mean_and_stderr(documents.values())[1]),
            drawing.samples if drawn else None, drawing.seed, round(sum(row[2] for row in self.rows)),
            tokens, round(size), len(documents), len(self.rows), windows.length, left_out, windows.cut_documents(),
        )  # fmt: skip


def _shares(place: np.ndarray, nats: np.ndarray, corpus: TokenisedCorpus) -> list[Share]:
    numbers, member = np.unique(corpus.document[place], return_inverse=True)
    sums = [np.bincount(member, weights) for weights in (nats, None, corpus.size[place])]
    return list(zip(numbers.tolist(), *(column.tolist() for column in sums), strict=True))


def _plain(row: Figures | Unsupported) -> dict[str, Any]:
    """A row as plain values; infinities, which JSON has no word for, as None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in vars(row).items()}


# --- many models on many corpora ---------------------------------------------------------------------------------


Say = Callable[[str], Advance]
"""A piece of work by name → what reports its progress."""


@dataclass
class Evaluation:
    """Every figure, and what is needed to get it again."""

    settings: dict[str, Any]
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    corpora: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[Figures | Unsupported] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "settings": self.settings, "models": self.models, "corpora": self.corpora,
            "results": [_plain(row) for row in self.rows if isinstance(row, Figures)],
            "does_not_apply": [_plain(row) for row in self.rows if isinstance(row, Unsupported)],
        }  # fmt: skip


def evaluate_perplexity(
    models: Sequence[str],
    corpora: Sequence[Corpus],
    estimators: tuple[str, ...] = ("auto",),
    drawing: EstimatorSettings | None = None,
    window: WindowSettings | None = None,
    *,
    world: World | None = None,
    dtype: torch.dtype = torch.float32,
    say: Say = lambda text: lambda done, total: None,
) -> Evaluation:
    """Measure every model (a run, a checkpoint or an exported folder) on every corpus by every estimator."""
    drawing, window, world = drawing or EstimatorSettings(), window or WindowSettings(), world or World()
    sources = {name: find_model(path) for name, path in names_of(models).items()}
    _check(sources, corpora, estimators, window, drawing)
    how = {"estimators": list(estimators), "dtype": str(dtype).removeprefix("torch."), **drawing.__dict__}
    result = Evaluation(how | {f"window_{name}": value for name, value in window.__dict__.items()})
    for corpus in corpora:
        result.corpora[corpus.name] = {
            "source": corpus.source, "sha256": corpus.fingerprint, "detokeniser": corpus.detokeniser,
            "split": corpus.split,
        }  # fmt: skip
    tokens: dict[tuple[str, str], TokenisedCorpus] = {}
    for (name, source), path in zip(sources.items(), models, strict=True):
        say(f"{name}: loading")
        model = source.load(world.device, dtype)
        fitting, others = chosen_estimators(source.config, estimators)
        variants = _variants(name, source.config, drawing)
        commit = drawing.commit if fills_in_steps(source.config) else "chunk"
        result.models |= {variant: _model_described(source, path) for variant in variants}
        for corpus in corpora:
            key = (corpus.name, source.tokenizer.fingerprint)
            if key not in tokens:
                say(f"{corpus.name}: tokenising")
                tokens[key] = tokenise(corpus, source.tokenizer)
            windows = CorpusWindows(
                tokens[key], source.tokenizer, window.length or source.config.context_length, window
            )
            for variant, lanes in variants.items():
                for estimator in fitting:
                    advance = say(f"{variant} on {corpus.name}, {estimator}")
                    tally = measure_perplexity(model, windows, estimator, drawing, world, advance, lanes, commit)
                    result.rows.append(tally.figures(variant, corpus, windows, estimator, drawing))
                why = f"{source.config.kind.upper()} has {', '.join(estimators_of(source.config))}"
                result.rows += [Unsupported(variant, corpus.name, estimator, why) for estimator in others]
    return result


def _variants(name: str, config: ModelConfig, drawing: EstimatorSettings) -> dict[str, int | None]:
    """A line of the table for each number of lanes, or one for a model that has none."""
    numbers = () if config.lanes is None else drawing.lanes or config.lanes
    return {f"{name}, {many(number, 'lane')}": number for number in numbers} or {name: None}


def fills_in_steps(config: ModelConfig) -> bool:
    """Whether a chunk may take several forward passes: with masks, not where the token on the left predicts."""
    return config.kind != "ar" and not config.predicts_from_left


def names_of(models: Sequence[str]) -> dict[str, str]:
    """Short names for paths: the folder's, or the whole path where folders share one."""
    if not models:
        raise ConfigError("no model was given; name a run folder, a checkpoint in it, or an exported folder")
    if len(set(models)) < len(models):
        raise ConfigError("a model was given twice")
    folders = [Path(path).name for path in models]
    return {path if folders.count(name) > 1 else name: path for name, path in zip(folders, models, strict=True)}


def _check(
    sources: dict[str, ModelSource], corpora: Sequence[Corpus], estimators: tuple[str, ...], window: WindowSettings,
    drawing: EstimatorSettings,
) -> None:  # fmt: skip
    unsupported: list[set[str]] = []
    for source in sources.values():
        window.check(window.length or source.config.context_length, source.config.max_position)
        fitting, others = chosen_estimators(source.config, estimators)
        for estimator in fitting:
            check_estimator(source.config, estimator, drawing.samples)
        unsupported.append(set(others))
        if fills_in_steps(source.config):
            DecodingConfig(drawing.commit).resolve(source.config).check_likelihood()
        for corpus in corpora:
            check_tokenizer(corpus, source.tokenizer)
    if drawing.commit != "chunk" and not (
        "trajectory" in estimators and any(fills_in_steps(source.config) for source in sources.values())
    ):
        raise ConfigError(
            f"--commit {drawing.commit} belongs to --estimator trajectory of models that fill a chunk "
            "in several forward passes (mdlm, bdlm, dcdm with masks); leave it out"
        )
    if nowhere := sorted(set.intersection(*unsupported)):
        kinds = ", ".join(sorted({source.config.kind.upper() for source in sources.values()}))
        fitting = sorted({name for source in sources.values() for name in estimators_of(source.config)})
        raise ConfigError(
            f"estimator {', '.join(nowhere)} applies to none of the models ({kinds}); {', '.join(fitting)} do"
        )


def _model_described(source: ModelSource, path: str) -> dict[str, Any]:
    return {
        "path": str(path), "kind": source.config.kind,
        "routing": source.config.routing if source.config.kind == "dcdm" else None,
        "tokenizer": source.tokenizer.fingerprint, "vocab_size": source.config.vocab_size, **source.identity(),
    }  # fmt: skip
