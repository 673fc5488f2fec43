"""What a report draws of one model, beside its perplexity: training, decoders, confidence, and balance of chunks.

B windows   L positions   K chunks
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcdm.decoding.commits import View, commit_policy
from dcdm.decoding.loop import fill_canvas
from dcdm.decoding.predictors import predictor_of
from dcdm.decoding.routes import router_of
from dcdm.evaluation.windows import Batch
from dcdm.likelihood.estimators import score
from dcdm.model.chunking import chunk_counts, max_violation
from dcdm.model.transformer import Model
from dcdm.training.validation import MAIN, mean_and_error
from dcdm.viewing.chunks import ChunkView
from dcdm.viewing.pictures import chunk_ids
from dcdm.viewing.plot import Bin

COMMITS = ("chunk", "steps:4", "threshold:0.9", "position")
BINS = 10


@dataclass(frozen=True)
class Training:
    """A run's curves; the first number of every entry is of tokens seen."""

    loss: list[tuple[int, float]]
    valid: list[tuple[int, float, float]]
    """Nats per token by the kind's valid estimator, and their standard error over windows."""
    violation: list[tuple[int, float]]
    """MaxVio of each step; empty where chunks are fixed."""


@dataclass(frozen=True)
class Decoded:
    """Held-out text under one decoder."""

    commit: str
    forwards: float
    """Per window."""
    bits: float
    """Per token: the exact −log₂ p of the decoder."""
    stderr: float | None
    """Over windows."""
    windows: int


@dataclass(frozen=True)
class Calibration:
    bins: list[Bin]
    count: int
    confidence: float
    accuracy: float
    error: float
    """Expected calibration error: mean |accuracy − confidence| of the bins, by their counts."""


@dataclass(frozen=True)
class Balance:
    sizes: list[int]
    """Tokens in each chunk."""
    violation: float
    """MaxVio of these sizes."""
    window_violation: float
    """MaxVio of a window, on average."""
    windows: int


@dataclass
class Study:
    """All of it for one model; `missing` says why a part is not there."""

    name: str
    kind: str
    training: Training | None = None
    decoders: list[Decoded] = field(default_factory=list)
    calibration: Calibration | None = None
    balance: Balance | None = None
    views: list[ChunkView] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values, "views": [{"ids": v.frame.ids, "tokens": [t.id for t in v.tokens]} for v in self.views]}


def training_of(run: Path) -> Training | None:
    """The curves of a run folder; None where it has none."""
    found, seen = Training([], [], []), 0
    for row in _lines(run / "metrics.jsonl"):
        if "evaluation" in row:
            value, error = (row["evaluation"].get(name) for name in (MAIN, f"{MAIN}_stderr"))
            if _finite(value):
                found.valid.append((seen, value, error if _finite(error) else 0.0))
            continue
        seen += row.get("tokens", 0)
        for name, curve in (("nll", found.loss), ("max_violation", found.violation)):
            if _finite(row.get(name)):
                curve.append((seen, row[name]))
    return found if found.loss or found.valid else None


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    if not path.exists():
        return
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:  # the last line of a run that was killed, or is being written
                continue


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def commits_of(model: Model) -> Sequence[str]:
    """The commit policies that a report compares; AR has but one way."""
    return ("position",) if model.config.kind == "ar" else COMMITS


def decoded(model: Model, batches: Sequence[Batch], commit: str) -> Decoded:
    """Bits per token of the windows under the decoder that commits so, and its forwards."""
    device = model.embed_tokens.weight.device
    rows, forwards = [], []
    for batch in batches:
        found = score(
            model, batch.tokens.to(device), "trajectory", commit=commit, prompt=batch.prompt.to(device),
            index=batch.index, batch_size=len(batch.tokens),
        )  # fmt: skip
        rows += list(zip(found.nats.tolist(), found.tokens.tolist(), strict=True))
        forwards += found.forwards.tolist()
    mean, error = mean_and_error(rows)
    bits, spread = mean / math.log(2), error / math.log(2)
    return Decoded(commit, sum(forwards) / len(forwards), bits, spread if len(rows) > 1 else None, len(rows))


def calibrated(
    model: Model, batches: Iterable[Batch], advance: Callable[[int], None] = lambda _: None
) -> Calibration:
    """Whether the decoder of one forward per chunk is right as often as it is sure, at every position it fills."""
    parts, done = [], 0
    for batch in batches:
        parts.append(predictions(model, batch))
        done += len(batch.tokens)
        advance(done)
    confidence, right = (torch.cat(column) for column in zip(*parts, strict=True))
    return calibration(confidence, right)


def predictions(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """The probability of the best token where a chunk is predicted, and whether that token is the true one."""
    device = model.embed_tokens.weight.device
    tokens, prompt = batch.tokens.to(device), batch.prompt.to(device)
    sets = model.sets(tokens, prompt)
    confidence, right = [], []

    def reveal(view: View, fill: Tensor) -> Tensor:
        true, best = tokens.gather(1, view.position), view.predicted.best[1]
        confidence.append(view.confidence()[fill].double().cpu())
        right.append((best == true)[fill].cpu())
        return true

    fill_canvas(
        tokens.masked_fill(sets.free, model.config.mask_id), sets, router_of(model, sets, batch.index),
        predictor_of(model, sets, "auto"), commit_policy("chunk"), reveal,
    )  # fmt: skip
    return torch.cat(confidence), torch.cat(right)


def calibration(confidence: Tensor, right: Tensor, bins: int = BINS) -> Calibration:
    """Predictions (N,) sorted into bins of equal width by their confidence."""
    number = (confidence * bins).long().clamp(0, bins - 1)
    found = []
    for at in range(bins):
        own = number == at
        count = int(own.sum())
        means = (float(x[own].double().mean()) if count else 0.0 for x in (confidence, right))
        found.append(Bin(at / bins, (at + 1) / bins, count, *means))
    total = len(confidence)
    error = math.fsum(one.count * abs(one.accuracy - one.confidence) for one in found) / total
    return Calibration(found, total, float(confidence.double().mean()), float(right.double().mean()), error)


@torch.no_grad()
def balance_of(model: Model, batches: Sequence[Batch]) -> Balance:
    """How evenly a DCDM fills its chunks; with the paper's routing, at half of the tokens masked."""
    device, parts = model.embed_tokens.weight.device, []
    assert model.config.num_chunks is not None
    for batch in batches:
        tokens, prompt = batch.tokens.to(device), batch.prompt.to(device)
        ids = chunk_ids(model, tokens, prompt, batch.index)
        assert ids is not None
        parts.append(chunk_counts(ids, model.sets(tokens, prompt).free, model.config.num_chunks).cpu())
    counts = torch.cat(parts)
    total = counts.sum(dim=0)
    mean = float(max_violation(counts).double().mean())
    return Balance(total.tolist(), float(max_violation(total)), mean, len(counts))
