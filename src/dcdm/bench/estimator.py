"""`dcdm bench estimator`: the Monte-Carlo error of a likelihood for a given number of forwards.

Small models are trained for a moment, then a few held-out windows are scored many times with different seeds. The
error is the spread of these scores, so it owes nothing to the standard errors that the estimator itself reports;
how these compare is a column of its own. `plain` draws t uniformly from [0.001, 1] for every group and pass, masks
each token with probability t and weighs it by 1/t, as training does.

    B windows   L positions   C groups   R repeats
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from json import dumps as encode

import torch
from torch import Tensor

from dcdm.bench.harness import environment
from dcdm.config import ModelConfig
from dcdm.data.loader import pack
from dcdm.data.sources import stdlib_documents
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.decoding.config import DecodingConfig
from dcdm.diffusion import noise
from dcdm.keys import Key
from dcdm.likelihood import subsets
from dcdm.likelihood.estimators import Scorer, score
from dcdm.model.transformer import Model, build
from dcdm.presets import preset
from dcdm.training.loop import TrainConfig, train_windows
from dcdm.viewing.tables import Table

STEPS, WINDOWS, SAMPLES, LENGTH = 200, 4, 16, 64
TARGET = 0.5
Estimate = Callable[[int], Tensor]


@dataclass(frozen=True)
class EstimatorAccuracy:
    case: str
    path: str
    error: float
    """Nats per token of one window, root mean square over the windows."""
    ratio: float
    """To plain sampling."""
    reported: float | None
    """The error that the estimator states, over the one it has."""
    bias: float
    """Mean over the repeats and windows less that of the path as used, in standard errors of the difference."""


def models(windows: Tensor, steps: int) -> Iterator[tuple[str, Model]]:
    """Trained models of the kinds that have a bound; the block size is not part of the weights."""
    for name, kind in (("MDLM", "mdlm-debug"), ("BDLM B=8", "bdlm-debug"), ("DCDM causal", "dcdm-debug-causal")):
        config = replace(preset(kind), num_layers=3, context_length=windows.shape[1])
        model = trained(config, windows, steps)
        yield name, model
        if config.kind == "bdlm":
            shorter = build(replace(config, block_size=4))
            shorter.load_state_dict(model.state_dict())
            yield "BDLM B=4", shorter.eval()


def measure_estimators(repeats: int, json: bool, out: str | None) -> None:
    """Measure every case with `repeats` scores per path; a table, or one JSON line."""
    rows: list[EstimatorAccuracy] = []
    tokenizer = byte_tokenizer()
    held_out = pack(stdlib_documents("validation"), tokenizer, LENGTH)
    tokens = held_out[torch.linspace(0, len(held_out) - 1, WINDOWS).long()]
    train = pack(stdlib_documents("train"), tokenizer, LENGTH)
    for name, model in models(train, STEPS):
        print(f"estimator {name}: trained, now {repeats} repeats", file=sys.stderr, flush=True)
        rows += errors(name, model, tokens, SAMPLES, repeats)
    line = encode({"environment": environment(), "rows": [row.__dict__ for row in rows]})
    if out:
        with open(out, "w", encoding="utf-8") as file:
            file.write(line + "\n")
    if json:
        print(line)
    else:
        print_errors(rows)


def trained(config: ModelConfig, windows: Tensor, steps: int) -> Model:
    model = build(config, seed=0)
    settings = TrainConfig(steps=steps, batch_size=16, learning_rate=2e-3, warmup_steps=min(40, steps // 2), seed=0)
    train_windows(model, windows, settings)
    return model.eval()


@torch.no_grad()
def errors(case: str, model: Model, tokens: Tensor, samples: int, repeats: int) -> list[EstimatorAccuracy]:
    """The error of each way to spend `samples` forwards on each of `tokens` (B, L)."""
    index, length = torch.arange(len(tokens)), tokens.shape[1]
    sets = model.sets(tokens)
    ids = model.partition(tokens, index=index).ids
    groups = model.config.num_groups(length)
    nll_of = Scorer(model, samples, Key(0), DecodingConfig(commit="chunk"))._dual_stream(tokens, sets, ids)

    def plain(seed: int) -> Tensor:
        total = torch.zeros(len(tokens), dtype=torch.float64)
        for number in range(samples):
            key = Key(seed).fold("plain", number)
            t = 1e-3 + (1 - 1e-3) * key.rows(index, groups)
            masked, weight = noise.corrupt(key, index, ids, t)
            total += (nll_of(masked) * weight).sum(dim=-1)
        return total / samples

    def stratified(seed: int) -> Tensor:
        draws = subsets.sampled_subsets(Key(seed), index, ids, groups, samples)
        return sum((nll_of(d.masked) * subsets.spread(d.weight, ids)).sum(dim=-1) for d in draws)  # type: ignore[return-value]

    stated: list[Tensor] = []

    def as_used(seed: int) -> Tensor:
        result = score(model, tokens, "bound", samples, seed)
        stated.append(result.stderr)
        return result.nats

    paths: dict[str, Estimate] = {"plain": plain, "strata": stratified, "as used": as_used}
    drawn = {name: torch.stack([path(seed) for seed in range(repeats)]) for name, path in paths.items()}
    return _rows(case, drawn, torch.stack(stated), int(sets.free[0].sum()))


def _rows(case: str, drawn: dict[str, Tensor], stated: Tensor, tokens: int) -> list[EstimatorAccuracy]:
    rows, used = [], drawn["as used"]
    plain = drawn["plain"].var(dim=0).mean().sqrt().item()
    for name, values in drawn.items():
        error = values.var(dim=0).mean().sqrt().item()
        reported = stated.square().mean().sqrt().item() / error if name == "as used" and error > 1e-9 else None
        noise_of_mean = ((values.var(dim=0) + used.var(dim=0)).sum() / len(values)).sqrt().item()
        bias = (values.mean(dim=0) - used.mean(dim=0)).sum().item() / max(noise_of_mean, 1e-12)
        rows.append(
            EstimatorAccuracy(
                case, name, error / tokens, error / plain, reported, 0.0 if name == "as used" else bias
            )
        )
    return rows


def print_errors(rows: list[EstimatorAccuracy]) -> None:
    columns = ("case", "path", "error, nats/token", "to plain", "target", "reported/error", "bias, σ")
    lines = []
    for row in rows:
        goal = f"≤ {TARGET:.2f}" if row.path == "as used" else ""
        stated = "" if row.reported is None else f"{row.reported:.2f}"
        cells = (f"{row.error:.4f}", f"{row.ratio:.2f}", goal, stated, f"{row.bias:+.1f}")
        lines.append((row.case, row.path, *cells))
    Table(columns, lines, text=("case", "path")).print()
