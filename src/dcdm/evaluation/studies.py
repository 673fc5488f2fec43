"""Numbers of one model beside its perplexity: training curves, decoders, confidence, and balance of chunks.

B windows   L positions   K chunks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcdm.config import ModelConfig, lanes_in_words
from dcdm.decoding.commits import View, commit_policy
from dcdm.decoding.config import DecodingConfig, lane_decoders
from dcdm.decoding.loop import fill_canvas
from dcdm.decoding.predictors import predictor_of
from dcdm.decoding.routes import router_of
from dcdm.evaluation.corpora import Corpus, Tokens, tokenise
from dcdm.evaluation.decoders import score_under_decoder
from dcdm.evaluation.perplexity import Say, names_of
from dcdm.evaluation.windows import CorpusWindows, WindowBatch, WindowSettings
from dcdm.io.load import ModelSource, find_model
from dcdm.keys import Key
from dcdm.likelihood.statistics import known
from dcdm.model.chunking import chunk_counts, max_violation
from dcdm.model.transformer import Model
from dcdm.training.metrics import read_rows
from dcdm.training.validation import MAIN

COMMITS = ("chunk", "steps:4", "threshold:0.9", "position")
BINS = 10
CALIBRATED = 16  # times as many windows for calibration: a forward per chunk is cheap


@dataclass(frozen=True)
class ReportPlan:
    """What the studies of a report are made from."""

    corpus: Corpus
    window: WindowSettings
    windows: int
    seed: int = 0
    batch_size: int = 16
    device: str | torch.device = "cpu"
    dtype: torch.dtype = torch.float32
    lanes: tuple[int, ...] = ()
    """Numbers of lanes that models which write in lanes are decoded with; none means each model's own list."""


@dataclass(frozen=True)
class Training:
    """A run's curves; the first number of every entry is of tokens seen."""

    loss: list[tuple[int, float]]
    valid: list[tuple[int, float, float]]
    """Nats per token by the estimator that is valid for the model's kind, and their standard error over windows."""
    violation: list[tuple[int, float]]
    """MaxVio of each step; empty where chunks are fixed."""


@dataclass(frozen=True)
class DecoderFigures:
    """Held-out text under one decoder."""

    commit: str
    forwards: float
    """Per window."""
    bits: float
    """Per token: the exact −log₂ p of the decoder."""
    stderr: float | None
    """Over windows."""
    windows: int
    lanes: int | None = None
    """For models that write in lanes: how many."""


@dataclass(frozen=True)
class Bin:
    """Predictions whose confidence lies in [low, high)."""

    low: float
    high: float
    count: int
    confidence: float
    """Its mean; 0 where there are none."""
    accuracy: float
    """How many of them are right."""

    @property
    def stderr(self) -> float:
        """Binomial."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / max(1, self.count))


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
    decoders: list[DecoderFigures] = field(default_factory=list)
    calibration: Calibration | None = None
    balance: Balance | None = None
    missing: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Studied:
    """A study with the loaded model and the windows (N, L) that were decoded, for whoever wants to draw them."""

    study: Study
    model: Model
    source: ModelSource
    rows: list[list[int]]


# --- all of it ---------------------------------------------------------------------------------------------------


def study_models(models: Sequence[str], plan: ReportPlan, say: Say) -> Iterator[Studied]:
    """A study of every model, one after the other."""
    tokens: dict[str, Tokens] = {}
    for name, path in names_of(models).items():
        source = find_model(path)
        mark = source.tokenizer.fingerprint
        if mark not in tokens:
            tokens[mark] = tokenise(plan.corpus, source.tokenizer)
        yield study_model(name, source, tokens[mark], plan, say)


def study_model(name: str, source: ModelSource, tokens: Tokens, plan: ReportPlan, say: Say) -> Studied:
    """Every part that the model has; `missing` names the others."""
    model = source.load(plan.device, plan.dtype)
    study = described_study(name, source)
    few = _batches(source, tokens, plan, plan.windows)
    for decoder in decoders_of(model.config, plan.lanes):
        advance = say(f"{name}: report, decoding with {decoder_name(decoder.commit, decoder.lanes)}")
        study.decoders.append(decoder_figures(model, few, decoder))
        advance(plan.windows, plan.windows)
    many = _batches(source, tokens, plan, CALIBRATED * plan.windows)
    total = sum(len(batch.tokens) for batch in many)
    advance = say(f"{name}: report, calibration")
    study.calibration = calibrated(model, many, lambda done: advance(done, total))
    if source.config.kind == "dcdm":
        study.balance = balance_of(model, many)
    return Studied(study, model, source, [row for batch in few for row in batch.tokens.tolist()])


def kind_in_words(config: ModelConfig) -> str:
    return f"DCDM, {config.routing} routing" if config.kind == "dcdm" else config.kind.upper()


def described_study(name: str, source: ModelSource) -> Study:
    """What is known of a model before anything is measured, with the reasons for what will be missing."""
    config = source.config
    study = Study(name, kind_in_words(config), None if source.run is None else training_of(source.run))
    if study.training is None:
        why = "an exported folder keeps no curves" if source.run is None else "its run folder has no metrics.jsonl"
        study.missing["training"] = why
    if config.kind == "ar":
        study.missing |= {
            "decoders": "AR writes a token with every forward, so that it has one point",
            "balance": "AR has no chunks", "views": "AR has no chunks",
        }  # fmt: skip
    elif config.kind != "dcdm":
        fixed = {"mdlm": "one chunk holds every token", "lanes": "lanes follow from positions"}.get(
            config.kind, "blocks follow from positions"
        )
        study.missing["balance"] = f"{config.kind.upper()} has nothing to balance: {fixed}"
    return study


def _batches(source: ModelSource, tokens: Tokens, plan: ReportPlan, count: int) -> list[WindowBatch]:
    """Up to `count` of the windows that were measured, spread evenly over them."""
    limit = count if plan.window.limit is None else min(count, plan.window.limit)
    length = plan.window.length or source.config.text_length
    windows = CorpusWindows(tokens, source.tokenizer, length, replace(plan.window, limit=limit))
    return list(windows.batches(plan.batch_size))


# --- parts -------------------------------------------------------------------------------------------------------


def training_of(run: Path) -> Training | None:
    """The curves of a run folder; None where it has none."""
    curves, seen = Training([], [], []), 0
    for row in read_rows(run / "metrics.jsonl"):
        if isinstance(row.get("evaluation"), dict):
            value, error = (row["evaluation"].get(name) for name in (MAIN, f"{MAIN}_stderr"))
            if _finite(value):
                curves.valid.append((seen, value, error if _finite(error) else 0.0))
            continue
        seen += row["tokens"] if isinstance(row.get("tokens"), int) else 0
        for name, curve in (("nll", curves.loss), ("max_violation", curves.violation)):
            if _finite(row.get(name)):
                curve.append((seen, row[name]))
    return curves if curves.loss or curves.valid else None


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def decoders_of(config: ModelConfig, lanes: Sequence[int] = ()) -> list[DecodingConfig]:
    """The decoders that a report compares.

    They differ by commit policy, where there is a choice; for models that write in lanes by the number of lanes
    (default: those of training).
    """
    if config.kind == "lanes":
        made = lane_decoders(config, lanes)
    elif config.predicts_from_left:
        made = [DecodingConfig("chunk")]
    else:
        made = [DecodingConfig(commit) for commit in (("position",) if config.kind == "ar" else COMMITS)]
    return [decoder.resolve(config) for decoder in made]


def decoder_name(commit: str, lanes: int | None) -> str:
    return commit if lanes is None else f"{commit}, {lanes_in_words(lanes)}"


def decoder_figures(model: Model, batches: Sequence[WindowBatch], decoder: DecodingConfig) -> DecoderFigures:
    """Bits per token of the windows under the decoder, and its forwards."""
    score = score_under_decoder(model, batches, decoder)
    bits, stderr = score.bits_per_token
    commit = f"{decoder.drafts} drafts" if decoder.drafts else decoder.commit
    return DecoderFigures(commit, score.forwards_per_window, bits, known(stderr), len(score.nats), decoder.lanes)


def calibrated(
    model: Model, batches: Iterable[WindowBatch], advance: Callable[[int], None] = lambda _: None
) -> Calibration:
    """Whether the decoder of one forward per chunk is right as often as it is sure, at every position it fills."""
    parts, done = [], 0
    for batch in batches:
        parts.append(predictions(model, batch))
        done += len(batch.tokens)
        advance(done)
    confidence, right = (torch.cat(column) for column in zip(*parts, strict=True))
    return calibration(confidence, right)


def predictions(model: Model, batch: WindowBatch) -> tuple[Tensor, Tensor]:
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
    sorted_in = []
    for at in range(bins):
        members = number == at
        count = int(members.sum())
        means = (float(x[members].double().mean()) if count else 0.0 for x in (confidence, right))
        sorted_in.append(Bin(at / bins, (at + 1) / bins, count, *means))
    total = len(confidence)
    error = math.fsum(one.count * abs(one.accuracy - one.confidence) for one in sorted_in) / total
    return Calibration(sorted_in, total, float(confidence.double().mean()), float(right.double().mean()), error)


@torch.no_grad()
def balance_of(model: Model, batches: Sequence[WindowBatch]) -> Balance:
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


@torch.no_grad()
def chunk_ids(
    model: Model, tokens: Tensor, prompt: Tensor | None = None, index: Tensor | None = None
) -> Tensor | None:
    """Chunk ids (B, L) of clean tokens; the paper's routing shows a fixed half-masked draw. None for AR."""
    if model.config.kind == "ar":
        return None
    if not model.config.routes_from_noise:
        return model.partition(tokens, prompt, index).ids
    masked = (Key(0).uniform(*tokens.shape) < 0.5).to(tokens.device) & model.sets(tokens, prompt).free
    return model.encode(tokens, masked, prompt=prompt).chunk_ids
