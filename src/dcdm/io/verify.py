"""Checks of a run, a checkpoint or an exported folder: files, weights, leaks, reloading, the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcdm.config import ConfigError
from dcdm.io import adapters
from dcdm.io.load import CONFIG, PARSED, WEIGHTS, find_model, wrong_sums
from dcdm.keys import Key
from dcdm.likelihood.estimators import score
from dcdm.model.packing import dequantised
from dcdm.model.transformer import Model
from dcdm.training import settings as run_settings
from dcdm.training.checkpoint_folder import (
    CHECKPOINTS,
    SETTINGS,
    data_problems,
    newest_whole,
    read_state,
    settings_problems,
    tokenizer_problems,
    verify_checkpoint,
)

NEEDED = ("manifest", "settings", "tokenizer")
"""Checks without which the model cannot be loaded."""


@dataclass(frozen=True)
class Check:
    name: str
    problems: list[str]


def verify_model(path: Path) -> Iterator[Check]:
    """Checks of a run, a checkpoint or an exported folder, one after the other, as far as they make sense."""
    if (path / CONFIG).exists() or adapters.is_adapter(path):
        yield Check("checksums", wrong_sums(path))
        if wrong_sums(path, (*PARSED, WEIGHTS, *adapters.FILES)):
            return
    else:
        whole = True
        for check in _run_checks(path):
            yield check
            whole = whole and not (check.problems and check.name in NEEDED)
        if not whole:
            return
    source = find_model(path)
    model = source.load()
    bad = [name for name, value in model.state_dict().items() if not bool(torch.isfinite(value).all())]
    yield Check("finite weights", bad)
    yield Check("no token sees itself", leaks(model))
    first, again = (dequantised(loaded.state_dict()) for loaded in (model, source.load()))
    differing = [n for n, v in first.items() if not torch.equal(v, again[n])]
    differing += [n for n, v in source.weights().items() if not torch.equal(v.to(torch.float32), first[n])]
    yield Check("reload equality", differing)
    if not model.config.routes_from_noise:  # its cache is an approximation, and says so
        yield Check("cached decoding equals uncached", cache_errors(model))


def _run_checks(path: Path) -> Iterator[Check]:
    """Checks of a run, or of a checkpoint in one: the checkpoint, and its fingerprints."""
    checkpoint, run = path, path.parent.parent
    if (path / SETTINGS).exists() or (path / CHECKPOINTS).is_dir():
        newest, skipped = newest_whole(path / CHECKPOINTS)
        yield Check("newest checkpoint", [f"{place.name}: {why}" for place, why in skipped])
        if newest is None:
            raise ConfigError(f"{path} has no whole checkpoint")
        checkpoint, run = newest, path
    wrong = verify_checkpoint(checkpoint)
    yield Check("manifest", wrong)
    if wrong:
        return
    record = read_state(checkpoint)[0]
    yield Check("settings", _settings(record, run))
    yield Check("tokenizer", tokenizer_problems(record, run))
    if (problems := data_problems(record)) is not None:
        yield Check("data", problems)


def _settings(record: dict[str, Any], run: Path) -> list[str]:
    if not (run / SETTINGS).exists():
        return [f"{run / SETTINGS} is missing; dcdm train --run {run} writes it again from the checkpoint"]
    try:
        return settings_problems(record, run_settings.read(run / SETTINGS), run)
    except ConfigError as error:
        return [str(error)]


@torch.no_grad()
def cache_errors(model: Model, length: int = 24) -> list[str]:
    """Score random sequences by the decoder of one position per forward, with the cache and without."""
    tokens = (Key(0).fold("cache").uniform(2, length) * (model.config.vocab_size - 3)).long()
    tokens[:, 0] = model.config.bos_id
    given = torch.zeros_like(tokens, dtype=torch.bool)
    given[0, : length // 3] = True
    commit = "chunk" if model.config.predicts_from_left else "position"
    cached, uncached = (
        score(model, tokens, "trajectory", commit=commit, prompt=given, cache=cache).nats
        for cache in ("exact", "none")
    )
    found = _apart("log-likelihoods", cached, uncached)
    if model.config.drafts:  # with one lane they change nothing but the number of forward passes
        drafted, exact = (
            score(model, tokens, name, 1, prompt=given, lanes=1).nats for name in ("drafted", "exact")
        )
        found += _apart("log-likelihoods of one lane with drafts and without", drafted, exact)
    return found


def _apart(what: str, one: Tensor, other: Tensor) -> list[str]:
    apart = ((one - other).abs() / other.abs()).max()
    return [] if apart < 1e-4 else [f"{what} differ by {float(apart):.1e} of their size"]


@torch.no_grad()
def leaks(model: Model, length: int = 24) -> list[str]:
    """Positions of a random sequence whose token, when it changes, changes a prediction that may not see it.

    These are its own where it is masked; earlier ones of AR; and all of its own and earlier chunks where chunks are
    predicted from the left.
    """
    symbols, config = model.config.vocab_size - 3, model.config
    draws = Key(0).fold("leak").uniform(3, length)
    tokens = (draws[0] * symbols).long()[None]
    tokens[0, 0] = config.bos_id
    masked = (draws[1] < 0.5)[None]
    masked[0, 0] = False
    ids = model.partition(tokens).ids if config.predicts_from_left else None

    def predictions(tokens: Tensor) -> Tensor:
        return model(tokens, masked).logits[0] if ids is None else model.encode(tokens, chunk_ids=ids).states[0]

    before, problems = predictions(tokens), []
    for position in range(1, length):
        other = tokens.clone()
        other[0, position] = (tokens[0, position] + 1 + int(draws[2, position] * (symbols - 1))) % symbols
        if ids is not None:
            blind = (ids[0] >= 1) & (ids[0] <= ids[0, position])
        elif config.kind == "ar":
            blind = torch.arange(length) < position
        else:
            blind = masked[0] & (torch.arange(length) == position)
        if not torch.allclose(predictions(other)[blind], before[blind], atol=1e-5):
            problems.append(f"position {position} changes what it should not")
    return problems
