"""Checks of a run, a checkpoint or an exported folder: files, weights, leaks, reloading, the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from dcdm.config import ConfigError
from dcdm.io.export import wrong_sums
from dcdm.io.load import load_model
from dcdm.keys import Key
from dcdm.likelihood.estimators import score
from dcdm.model.transformer import Model
from dcdm.training.checkpoint import newest_whole
from dcdm.training.checkpoint import verify as verify_checkpoint


@dataclass(frozen=True)
class Check:
    name: str
    problems: list[str]


def verify(path: Path) -> Iterator[Check]:
    """Checks of a run, a checkpoint or an exported folder, one after the other."""
    if (path / "config.json").exists():
        yield Check("checksums", wrong_sums(path))
        stored = load_file(path / "model.safetensors")
    else:
        checkpoint = path
        if (path / "settings.yaml").exists():
            newest, skipped = newest_whole(path / "checkpoints")
            yield Check("newest checkpoint", [f"{place.name}: {why}" for place, why in skipped])
            if newest is None:
                raise ConfigError(f"{path} has no whole checkpoint")
            checkpoint = newest
        yield Check("manifest", verify_checkpoint(checkpoint))
        stored = {}
    model, _ = load_model(path)
    bad = [name for name, value in model.state_dict().items() if not bool(torch.isfinite(value).all())]
    yield Check("finite weights", bad)
    yield Check("no token sees itself", leaks(model))
    again, _ = load_model(path)
    differing = [n for n, v in model.state_dict().items() if not torch.equal(v, again.state_dict()[n])]
    differing += [n for n, v in stored.items() if not torch.equal(v, model.state_dict()[n.removeprefix("model.")])]
    yield Check("reload equality", differing)
    if not model.config.routes_from_noise:  # its cache is an approximation, and says so
        yield Check("cached decoding equals uncached", cache_errors(model))


@torch.no_grad()
def cache_errors(model: Model, length: int = 24) -> list[str]:
    """Score random sequences by the decoder of one position per forward, with the cache and without."""
    tokens = (Key(0).fold("cache").uniform(2, length) * (model.config.vocab_size - 3)).long()
    tokens[:, 0] = model.config.bos_id
    given = torch.zeros_like(tokens, dtype=torch.bool)
    given[0, : length // 3] = True
    commit = "chunk" if model.config.predicts_from_left else "position"
    cached, afresh = (
        score(model, tokens, "trajectory", commit=commit, prompt=given, cache=cache).nats
        for cache in ("exact", "none")
    )
    apart = ((cached - afresh).abs() / afresh.abs()).max()
    return [] if apart < 1e-4 else [f"log-likelihoods differ by {float(apart):.1e} of their size"]


@torch.no_grad()
def leaks(model: Model, length: int = 24) -> list[str]:
    """Perturb masked tokens (AR: later tokens) of a random sequence: predictions of theirs that change."""
    symbols, config = model.config.vocab_size - 3, model.config
    draws = Key(0).fold("leak").uniform(3, length)
    tokens = (draws[0] * symbols).long()[None]
    tokens[0, 0] = config.bos_id
    masked = (draws[1] < 0.5)[None]
    masked[0, 0] = False
    if config.predicts_from_left:
        return _leaks_from_left(model, tokens, draws[2])
    before = model(tokens, masked).logits
    problems = []
    for position in range(1, length):
        other = tokens.clone()
        other[0, position] = (tokens[0, position] + 1 + int(draws[2, position] * (symbols - 1))) % symbols
        after = model(other, masked).logits
        seen = slice(0, position) if config.kind == "ar" else slice(position, position + 1)
        asked = config.kind == "ar" or bool(masked[0, position])
        if asked and not torch.allclose(after[0, seen], before[0, seen], atol=1e-5):
            problems.append(f"position {position} changes what it should not")
    return problems


def _leaks_from_left(model: Model, tokens: Tensor, draws: Tensor) -> list[str]:
    """Positions whose token changes a prediction of its own or an earlier chunk."""
    symbols, problems = model.config.vocab_size - 3, []
    ids = model.partition(tokens).ids
    before = model.encode(tokens, chunk_ids=ids).states
    for position in range(1, tokens.shape[1]):
        other = tokens.clone()
        other[0, position] = (tokens[0, position] + 1 + int(draws[position] * (symbols - 1))) % symbols
        after = model.encode(other, chunk_ids=ids).states
        not_later = (ids[0] >= 1) & (ids[0] <= ids[0, position])
        if not torch.allclose(after[0, not_later], before[0, not_later], atol=1e-5):
            problems.append(f"position {position} changes what it should not")
    return problems
