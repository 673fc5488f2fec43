"""What is measured of a finished run, from its weights and its metrics; each measure is one function.

Figures of text are kept window by window (nats, in the order of the corpus), so that two models can be compared on
the same windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dcdm.config import ModelConfig
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.config import adablock_of
from dcdm.evaluation.corpora import ReadingSettings, Tokens, read_corpus, tokenise
from dcdm.evaluation.studies import balance_of, training_of
from dcdm.evaluation.windows import Batch, Windows, WindowSettings
from dcdm.io.load import load_model
from dcdm.likelihood.estimators import Estimator, default_estimator, score
from dcdm.model.transformer import Model
from dcdm.reproduction.runs import Places, RunSpec
from dcdm.reproduction.scale import FORWARDS_PER_TOKEN, TEST, ZERO_SHOT
from dcdm.viewing.plot import averaged_points

POINTS = 40  # of a training curve
DIGITS = 5

Measure = Callable[[RunSpec, Places], dict[str, Any]]


def measure(name: str, spec: RunSpec, places: Places) -> dict[str, Any]:
    """The figures of the measure `name`."""
    return MEASURES[name](spec, places)


def curve(spec: RunSpec, places: Places) -> dict[str, Any]:
    """Training loss and MaxVio in averaged points, validation by the valid estimator: (tokens, value …)."""
    found = training_of(places.run(spec))
    assert found is not None
    return {
        "training": _rounded(averaged_points(found.loss, POINTS)),
        "violation": _rounded(averaged_points(found.violation, POINTS)),
        "validation": _rounded(found.valid),
        "windows": spec.scale.curve_windows,
        "samples": spec.scale.curve_samples,
    }


def heldout(spec: RunSpec, places: Places) -> dict[str, Any]:
    """WikiText-2's test text: the valid figure, one forward per chunk, and the surrogate where there is one."""
    model, _ = _model(places.model(spec))
    scale, samples = spec.scale, spec.scale.heldout_samples
    batches = _test(spec, places)
    if not model.config.routes_from_noise:
        found = {"valid": _scored(model, batches, default_estimator(model), samples)}
    else:
        found = {
            "valid": _scored(model, batches, "sequential", scale.sequential_samples),
            "surrogate": _scored(model, batches, "surrogate", samples),
        }
    if model.config.kind != "ar":
        found["chunk"] = _scored(model, batches, "trajectory", 1)
    return found


def zeroshot(spec: RunSpec, places: Places) -> dict[str, Any]:
    """The valid figure (and the surrogate where there is one) on texts of other kinds."""
    model, _ = _model(places.model(spec))
    scale, found = spec.scale, {}
    for name, path in ZERO_SHOT.items():
        batches = text(places.data / path, name, places.model(spec), scale.zeroshot_windows)
        noisy = model.config.routes_from_noise
        samples = scale.sequential_samples if noisy else scale.heldout_samples
        found[name] = {"valid": _scored(model, batches, default_estimator(model), samples)}
        if noisy:
            found[name]["surrogate"] = _scored(model, batches, "surrogate", scale.heldout_samples)
    return found


def frontier(spec: RunSpec, places: Places) -> dict[str, Any]:
    """Exact trajectory likelihood at given forwards per token, most confident positions first."""
    model, batches = _for_decoding(spec, places)
    found: dict[str, Any] = {}
    if model.config.kind != "ar":
        found["chunk"] = {"commit": "chunk", **_decoded(model, batches, "chunk")}
    chunks = found["chunk"]["forwards"] if model.config.routes_from_noise else None
    for share in FORWARDS_PER_TOKEN:
        if (commit := commit_for(model.config, share, chunks)) is not None:
            found[f"{share:g}"] = {"commit": commit, **_decoded(model, batches, commit)}
    return found


def policies(spec: RunSpec, places: Places) -> dict[str, Any]:
    """The same, on half of the windows, for decoders that choose their number of forwards themselves."""
    model, _ = _model(places.model(spec))
    batches = _test(spec, places, max(1, spec.scale.frontier_windows // 2))
    if model.config.kind == "ar":
        return {}
    found = {}
    for commit in ("threshold:0.9", "threshold:0.5"):
        found[commit] = _decoded(model, batches, commit)
    if model.config.kind in ("mdlm", "bdlm"):
        _, tokenizer = _model(places.model(spec))
        ada = adablock_of(model.config, tokenizer)
        for commit in ("threshold:0.5", "steps:2", "steps:4"):
            found[f"adablock {commit}"] = _decoded(model, batches, commit, routing="adablock", adablock=ada)
    return found


def balance(spec: RunSpec, places: Places) -> dict[str, Any]:
    """How evenly chunks are filled on the test text; empty for models without chunks."""
    model, _ = _model(places.model(spec))
    if model.config.kind != "dcdm":
        return {}
    found = balance_of(model, _test(spec, places).batches)
    return {
        "sizes": found.sizes, "violation": round(found.violation, DIGITS),
        "window_violation": round(found.window_violation, DIGITS), "windows": found.windows,
    }  # fmt: skip


def contents(spec: RunSpec, places: Places) -> dict[str, Any]:
    """What stands in the chunks of the test text; empty for models without chunks."""
    from dcdm.reproduction.contents import contents_of

    model, tokenizer = _model(places.model(spec))
    if model.config.kind != "dcdm":
        return {}
    return contents_of(model, tokenizer, _test(spec, places).batches)


def tasks(spec: RunSpec, places: Places) -> dict[str, Any]:
    """Benchmarks of the start weights and, after fine-tuning, GSM8K."""
    from dcdm.reproduction.benchmarks import benchmarks

    return benchmarks(spec, places)


MEASURES: dict[str, Measure] = {
    "curve": curve, "heldout": heldout, "zeroshot": zeroshot, "frontier": frontier, "policies": policies,
    "balance": balance, "contents": contents, "tasks": tasks,
}  # fmt: skip


def commit_for(config: ModelConfig, share: float, chunks: float | None = None) -> str | None:
    """The commit policy with at most `share` forwards per token; None where the kind cannot be that fast.

    `chunks` says how many a window really has, where that follows from content.
    """
    if share == 1:
        return "position"
    if config.kind == "ar":
        return None
    forwards = round(share * config.context_length)
    steps = int(forwards // (config.num_groups(config.context_length) if chunks is None else chunks))
    return None if steps == 0 else "chunk" if steps == 1 else f"steps:{steps}"


@lru_cache(maxsize=2)
def _model(folder: Path) -> tuple[Model, Tokenizer]:
    return load_model(folder)


@dataclass(frozen=True)
class Text:
    """Windows of a corpus in batches."""

    batches: list[Batch]
    corpus: Tokens

    def bytes_of(self, batch: Batch, row: int) -> float:
        place = batch.place[row]
        return float(self.corpus.size[place[place >= 0].numpy()].sum())


@lru_cache(maxsize=16)
def text(source: Path, name: str, model: Path, limit: int, few: int | None = None) -> Text:
    """`limit` windows spread over a corpus, or of these only `few`, again spread."""
    network, tokenizer = _model(model)
    return windows(source, name, tokenizer, network.config.context_length, limit, few)


def windows(source: Path, name: str, tokenizer: Tokenizer, length: int, limit: int, few: int | None = None) -> Text:
    """The same for a tokenizer and a length."""
    corpus = tokenise(read_corpus(f"{name}={source}", ReadingSettings()), tokenizer)
    made = Windows(corpus, tokenizer, length, WindowSettings(limit=limit))
    if few is not None:
        made.chosen = made.chosen[np.arange(few) * len(made.chosen) // few]
    return Text(list(made.batches(8)), corpus)


def _test(spec: RunSpec, places: Places, few: int | None = None) -> Text:
    return text(places.data / TEST, "wikitext2", places.model(spec), spec.scale.heldout_windows, few)


def _for_decoding(spec: RunSpec, places: Places) -> tuple[Model, Text]:
    return _model(places.model(spec))[0], _test(spec, places, spec.scale.frontier_windows)


def _scored(model: Model, held: Text, estimator: Estimator, samples: int) -> dict[str, Any]:
    scores = [
        score(model, batch.tokens, estimator, samples, prompt=batch.prompt, index=batch.index)
        for batch in held.batches
    ]
    drawn = estimator in ("bound", "surrogate", "sequential")
    return {
        "estimator": estimator,
        "samples": samples if drawn else None,
        **summed(held, [(one.nats, one.tokens) for one in scores]),
    }


def _decoded(model: Model, held: Text, commit: str, **how: Any) -> dict[str, Any]:
    scores = [
        score(model, batch.tokens, "trajectory", prompt=batch.prompt, index=batch.index, commit=commit, **how)
        for batch in held.batches
    ]
    forwards = torch.cat([one.forwards for one in scores]).double().mean()
    return {"forwards": round(float(forwards), 2), **summed(held, [(one.nats, one.tokens) for one in scores])}


def summed(held: Text, scores: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    """Nats per token, bits per byte, and every window's nats, in the order of the corpus, from a batch's nats and
    tokens."""
    rows = []
    for batch, (nats_b, tokens_b) in zip(held.batches, scores, strict=True):
        for row, number in enumerate(batch.index.tolist()):
            rows.append((number, float(nats_b[row]), int(tokens_b[row]), held.bytes_of(batch, row)))
    rows.sort()
    nats, tokens, size = (math.fsum(row[at] for row in rows) for at in (1, 2, 3))
    return {
        "nats_per_token": round(nats / tokens, DIGITS), "bits_per_byte": round(nats / math.log(2) / size, DIGITS),
        "tokens": int(tokens), "bytes": round(size), "numbers": [row[0] for row in rows],
        "window_nats": [round(row[1], 2) for row in rows], "window_tokens": [row[2] for row in rows],
    }  # fmt: skip


def _rounded(points: Any) -> list[list[float]]:
    return [[round(value, DIGITS) for value in point] for point in points]
