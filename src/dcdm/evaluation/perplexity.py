"""Perplexity of a model on a corpus, with its errors and with what was left out.

Neither the batch size nor the number of processes changes a figure beyond the rounding of floating-point sums: a
window's randomness is keyed by its number, and figures are summed in the order of the windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch

from dcdm.config import ConfigError, ModelConfig
from dcdm.data.tokenizers import Tokenizer
from dcdm.distributed import World, gather_objects
from dcdm.evaluation.corpora import Corpus, Tokens
from dcdm.evaluation.windows import Batch, Windows
from dcdm.likelihood.estimators import LABELS, Estimator, Score, estimators_of, score
from dcdm.model.transformer import Model

Advance = Callable[[int, int], None]
"""(windows done, windows in all) of this process."""
Share = tuple[int, float, int, float]
"""What one window adds to one document: its number, nats, tokens, bytes."""


@dataclass(frozen=True)
class Sampling:
    """How the sampled estimators draw."""

    samples: int | Literal["all"] = 16
    seed: int = 0
    batch_size: int = 16

    def __post_init__(self) -> None:
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
    """Of the choice of documents, that of the masks in it; None for a single document."""
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
    """Empty documents and bad rows, and tokens of windows that --limit passed over."""
    documents_cut: int = 0
    """Documents that do not lie whole in one window."""


@dataclass(frozen=True)
class Unfit:
    """An estimator that a model does not have."""

    model: str
    corpus: str
    estimator: str
    reason: str


def chosen_estimators(config: ModelConfig, asked: tuple[str, ...]) -> tuple[list[Estimator], list[str]]:
    """Of the estimators asked for, those that fit (`auto`: the valid one), each once, and those that do not."""
    for name in asked:
        if name not in ("auto", *get_args(Estimator)):
            known = ", ".join(("auto", *get_args(Estimator)))
            raise ConfigError(f"unknown estimator {name!r}; choose among {known}")
    there = estimators_of(config)
    names = dict.fromkeys(there[0] if name == "auto" else name for name in asked)
    fitting = [name for name in there if name in names]
    return fitting, [name for name in names if name not in fitting]


@torch.no_grad()
def measure(
    model: Model,
    windows: Windows,
    estimator: Estimator,
    sampling: Sampling,
    world: World,
    advance: Advance = lambda done, total: None,
) -> Tally:
    """Score the windows, this process its share of them, and gather all of it on every process."""
    total, mine = len(windows.chosen[world.rank :: world.size]), Tally()
    for batch in windows.batches(sampling.batch_size, world.rank, world.size):
        scored = score(
            model, batch.tokens.to(world.device), estimator, sampling.samples, sampling.seed,
            prompt=batch.prompt.to(world.device), index=batch.index, batch_size=len(batch.tokens),
        )  # fmt: skip
        mine.add(batch, scored, windows.corpus)
        advance(len(mine.rows), total)
    rows = sorted(row for part in gather_objects(mine.rows, world) for row in part)
    return Tally(rows)


@dataclass
class Tally:
    """Of every window: its number, the variance of its score, its forwards, and its shares."""

    rows: list[tuple[int, float, int, list[Share]]] = field(default_factory=list)

    def add(self, batch: Batch, scored: Score, corpus: Tokens) -> None:
        columns = (batch.index.tolist(), scored.stderr.square().tolist(), scored.forwards.tolist())
        for row, (number, variance, forwards) in enumerate(zip(*columns, strict=True)):
            counted = batch.place[row] >= 0
            place = batch.place[row][counted].numpy()
            nats = scored.by_position[row][counted].numpy()
            self.rows.append((number, variance, forwards, _shares(place, nats, corpus)))

    def figures(
        self, model: str, corpus: Corpus, windows: Windows, estimator: Estimator, sampling: Sampling
    ) -> Figures:
        shares = [share for *_, row in self.rows for share in row]
        nats = math.fsum(share[1] for share in shares)
        tokens, size = sum(share[2] for share in shares), math.fsum(share[3] for share in shares)
        drawn = estimator in ("bound", "surrogate", "sequential")
        mean, documents = nats / tokens, _by_document(shares)
        left_out = {
            "empty documents": corpus.empty_documents,
            "bad rows": corpus.bad_rows,
            "tokens beyond the limit": windows.left_out(),
        }
        return Figures(
            model, corpus.name, estimator, LABELS[estimator], mean, _exp(mean),
            nats / math.log(2) / size if size else None,
            _known(math.sqrt(math.fsum(variance for _, variance, _, _ in self.rows)) / tokens),
            _document_stderr(documents, mean, tokens),
            sampling.samples if drawn else None, sampling.seed, sum(forwards for _, _, forwards, _ in self.rows),
            tokens, round(size), len(documents), len(self.rows), windows.length, left_out, windows.cut_documents(),
        )  # fmt: skip


def _shares(place: np.ndarray, nats: np.ndarray, corpus: Tokens) -> list[Share]:
    numbers, member = np.unique(corpus.document[place], return_inverse=True)
    sums = [np.bincount(member, weights) for weights in (nats, None, corpus.size[place])]
    return list(zip(numbers.tolist(), *(column.tolist() for column in sums), strict=True))


def _by_document(shares: list[Share]) -> dict[int, tuple[float, int]]:
    """Nats and tokens of each document."""
    documents: dict[int, tuple[float, int]] = {}
    for number, nats, tokens, _ in shares:
        before = documents.get(number, (0.0, 0))
        documents[number] = (before[0] + nats, before[1] + tokens)
    return documents


def _document_stderr(documents: dict[int, tuple[float, int]], mean: float, tokens: int) -> float | None:
    """Standard error of a ratio of sums, documents being drawn: √(D/(D−1) Σ (nats_d − mean·tokens_d)²) / tokens."""
    count = len(documents)
    if count < 2:
        return None
    spread = math.fsum((nats - mean * size) ** 2 for nats, size in documents.values())
    return math.sqrt(spread * count / (count - 1)) / tokens


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def check_vocabulary(name: str, config: ModelConfig, tokenizer: Tokenizer) -> None:
    if config.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"{name}: its tokenizer has {tokenizer.vocab_size:,} ids, its network {config.vocab_size:,}; "
            "this is not the tokenizer that it was trained with"
        )


def as_dict(row: Figures | Unfit) -> dict[str, Any]:
    """A row as plain values; infinities, which JSON has no word for, as None."""
    values = dict(row.__dict__)
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
