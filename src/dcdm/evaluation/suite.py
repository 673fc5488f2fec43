"""Many models on many corpora: all that can be wrong is found before the first of them is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dcdm.config import ConfigError
from dcdm.distributed import World
from dcdm.evaluation.corpora import PAPER, Corpus, Tokens, check_tokenizer, tokenise
from dcdm.evaluation.perplexity import (
    Advance,
    Figures,
    Sampling,
    Unfit,
    as_dict,
    check_vocabulary,
    chosen_estimators,
    measure,
)  # fmt: skip
from dcdm.evaluation.windows import Windows, WindowSettings
from dcdm.io.load import ModelSource, find_model
from dcdm.likelihood.estimators import estimators_of

Say = Callable[[str], Advance]
"""A piece of work by name → what reports its progress."""


@dataclass
class Evaluation:
    """Every figure, and what is needed to get it again."""

    settings: dict[str, Any]
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    corpora: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[Figures | Unfit] = field(default_factory=list)

    @property
    def no_data(self) -> list[str]:
        """The paper's corpora that were not given."""
        return [name for name in PAPER if name not in self.corpora]

    def to_dict(self) -> dict[str, Any]:
        return {
            "settings": self.settings, "models": self.models, "corpora": self.corpora,
            "results": [as_dict(row) for row in self.rows if isinstance(row, Figures)],
            "does_not_fit": [as_dict(row) for row in self.rows if isinstance(row, Unfit)],
            "no_data": self.no_data,
        }  # fmt: skip


def evaluate(
    models: Sequence[str],
    corpora: Sequence[Corpus],
    estimators: tuple[str, ...] = ("auto",),
    sampling: Sampling | None = None,
    window: WindowSettings | None = None,
    *,
    world: World | None = None,
    dtype: torch.dtype = torch.float32,
    say: Say = lambda text: lambda done, total: None,
) -> Evaluation:
    """Measure every model (a run, a checkpoint or an exported folder) on every corpus by every estimator."""
    sampling, window, world = sampling or Sampling(), window or WindowSettings(), world or World()
    found = {name: find_model(path) for name, path in names_of(models).items()}
    _check(found, corpora, estimators, window)
    result = Evaluation(_settings(estimators, sampling, window, dtype))
    result.corpora = {corpus.name: _described(corpus) for corpus in corpora}
    tokens: dict[tuple[str, str], Tokens] = {}
    for (name, there), path in zip(found.items(), models, strict=True):
        say(f"{name}: loading")
        model = there.load(world.device, dtype)
        result.models[name] = _model_described(there, path)
        fitting, unfit = chosen_estimators(there.config, estimators)
        for corpus in corpora:
            key = (corpus.name, there.tokenizer.fingerprint)
            if key not in tokens:
                say(f"{corpus.name}: tokenising")
                tokens[key] = tokenise(corpus, there.tokenizer)
            windows = Windows(tokens[key], there.tokenizer, window.length or there.config.context_length, window)
            for estimator in fitting:
                advance = say(f"{name} on {corpus.name}, {estimator}")
                tally = measure(model, windows, estimator, sampling, world, advance)
                result.rows.append(tally.figures(name, corpus, windows, estimator, sampling))
            why = f"{there.config.kind.upper()} has {', '.join(estimators_of(there.config))}"
            result.rows += [Unfit(name, corpus.name, estimator, why) for estimator in unfit]
    return result


def names_of(models: Sequence[str]) -> dict[str, str]:
    """Short names for paths: the folder's, or the whole path where folders share one."""
    if not models:
        raise ConfigError("no model was given; name a run folder, a checkpoint in it, or an exported folder")
    if len(set(models)) < len(models):
        raise ConfigError("a model was given twice")
    folders = [Path(path).name for path in models]
    return {path if folders.count(name) > 1 else name: path for name, path in zip(folders, models, strict=True)}


def _check(
    found: dict[str, ModelSource], corpora: Sequence[Corpus], estimators: tuple[str, ...], window: WindowSettings
) -> None:
    unfit: list[set[str]] = []
    for name, there in found.items():
        check_vocabulary(name, there.config, there.tokenizer)
        window.check(window.length or there.config.context_length, there.config.max_position)
        unfit.append(set(chosen_estimators(there.config, estimators)[1]))
        for corpus in corpora:
            check_tokenizer(corpus, there.tokenizer)
    if nowhere := sorted(set.intersection(*unfit)):
        kinds = ", ".join(sorted({there.config.kind.upper() for there in found.values()}))
        fitting = sorted({name for there in found.values() for name in estimators_of(there.config)})
        raise ConfigError(
            f"estimator {', '.join(nowhere)} fits none of the models ({kinds}); {', '.join(fitting)} do"
        )


def _settings(
    estimators: tuple[str, ...], sampling: Sampling, window: WindowSettings, dtype: torch.dtype
) -> dict[str, Any]:
    chosen = {"estimators": list(estimators), "dtype": str(dtype).removeprefix("torch.")}
    return {**chosen, **sampling.__dict__, **{f"window_{k}": v for k, v in window.__dict__.items()}}


def _model_described(there: ModelSource, path: str) -> dict[str, Any]:
    return {
        "path": str(path), "kind": there.config.kind,
        "routing": there.config.routing if there.config.kind == "dcdm" else None,
        "tokenizer": there.tokenizer.fingerprint, "vocab_size": there.config.vocab_size, **there.identity(),
    }  # fmt: skip


def _described(corpus: Corpus) -> dict[str, Any]:
    return {
        "source": corpus.source, "sha256": corpus.fingerprint, "detokeniser": corpus.detokeniser,
        "split": corpus.split if corpus.prepared is not None else None,
    }  # fmt: skip
