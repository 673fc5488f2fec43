"""Every table and figure as a named experiment: what it shows, and the runs it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcdm.config import ConfigError
from dcdm.reproduction.runs import RunSpec
from dcdm.reproduction.scale import Scale
from dcdm.reproduction.variants import MAIN, RATED, RATES, TUNED, variants


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper, or one of ours. A run serves every experiment that names its variant."""

    name: str
    shows: str
    paper: str
    """Where it stands in the paper."""
    variants: tuple[str, ...]
    presets: tuple[str, ...]
    """What the paper's scale trains."""


DIFFUSION = ("mdlm", "bdlm8", "paper", "strided-full", "causal-full")


def experiments(scale: Scale) -> dict[str, Experiment]:
    """Name → experiment, in the order of the paper."""
    known = variants(scale)
    sizes = tuple(name for name in known if name.rpartition("-")[2] in scale.sizes)
    widths = tuple(name for name in known if name.startswith("paper-k"))
    counts = tuple(name for name in known if name.startswith("strided-full-k"))
    tuned = tuple(f"{name}-tuned" for name in TUNED)
    made = (
        Experiment(
            "loss-curves", "validation loss over training, every kind, ± one standard deviation over seeds",
            "figure: training loss against steps",
            ("ar", "mdlm", "bdlm8", "bdlm32", "paper", "causal", "causal-full", "strided-full"),
            ("mdlm-0.5b", "bdlm-0.5b", "dcdm-0.5b-k8", "dcdm-0.5b-k8-causal"),
        ),
        Experiment(
            "downstream", "multiple choice of the trained models, GSM8K after fine-tuning, MATH without",
            "table: downstream benchmarks", tuned,
            ("mdlm-0.5b", "bdlm-0.5b", "dcdm-0.5b-k8", "dcdm-moe-0.8b", "mdlm-1.7b", "bdlm-1.7b", "dcdm-1.7b-k8",
             "dcdm-moe-2.8b"),
        ),
        Experiment(
            "adaptive", "answers of GSM8K, MATH and HumanEval decoded by AdaBlock, by fixed blocks and by DCDM",
            "table: adaptive block partitioning", tuned,
            ("mdlm-1.7b", "bdlm-1.7b", "dcdm-1.7b-k8", "dcdm-moe-2.8b"),
        ),
        Experiment(
            "scaling", "loss at three model sizes, equal tokens",
            "figure: parameters against accuracy", ("mdlm", "bdlm8", "paper", "strided-full", *sizes),
            ("mdlm-0.1b", "bdlm-0.1b", "dcdm-0.1b-k8", "mdlm-0.5b", "bdlm-0.5b", "dcdm-0.5b-k8", "mdlm-1.7b",
             "bdlm-1.7b", "dcdm-1.7b-k8"),
        ),
        Experiment(
            "training-steps", "how early in training each kind reaches another's final loss",
            "figure: training steps against accuracy", DIFFUSION, ("mdlm-1.7b", "bdlm-1.7b", "dcdm-1.7b-k8"),
        ),
        Experiment(
            "k-ablation", "K from 4 to 32, with h falling as in the paper and with h fixed; and strided chunks",
            "table: number of clusters", ("paper", "strided-full", *widths, *counts),
            ("dcdm-0.5b-k8", "dcdm-0.5b-k16", "dcdm-0.5b-k32", "dcdm-0.5b-k64", "dcdm-0.5b-k8-h128",
             "dcdm-0.5b-k64-h128"),
        ),
        Experiment(
            "point-vs-subspace", "h=1 against a subspace: loss, and MaxVio over time",
            "figure: point against subspace", ("paper", "paper-point"), ("dcdm-0.1b-k8-point", "dcdm-0.1b-k8-h48"),
        ),
        Experiment(
            "zero-shot", "held-out texts of other kinds",
            "table: zero-shot perplexity",
            ("ar", "mdlm", "bdlm8", "bdlm32", "paper", "causal", "causal-full", "strided-full"),
            ("ar-0.1b", "mdlm-0.1b", "bdlm-0.1b", "dcdm-0.1b-k8"),
        ),
        Experiment(
            "moe", "a mixture of experts in place of every MLP, at equal active size",
            "DCDM (MoE) rows", ("paper", "paper-moe", "strided-full", "strided-full-moe"),
            ("dcdm-0.5b-k8", "dcdm-moe-0.8b", "dcdm-1.7b-k8", "dcdm-moe-2.8b"),
        ),
        Experiment(
            "partitions", "contiguous, strided, random and routed chunks in one network; noise, priors, sizes, W_O",
            "ours",
            ("causal", "causal-full", "causal-strided", "causal-strided-full", "causal-full-growing", "contiguous",
             "contiguous-full", "strided", "strided-full", "random", "random-full", "paper", "paper-wo",
             "strided-full-wo", "bdlm32", "bdlm8", "mdlm", "ar"),
            ("dcdm-0.1b-k8-causal",),
        ),
        Experiment(
            "learning-rate", "a quarter, half and twice the learning rate: whether the order rests on it", "ours",
            tuple(f"{name}{ending}" for name in RATED for ending in RATES),
            ("mdlm-0.1b", "bdlm-0.1b", "dcdm-0.1b-k8"),
        ),
    )  # fmt: skip
    return {one.name: one for one in made}


def chosen_experiments(scale: Scale, names: list[str]) -> list[Experiment]:
    """The experiments called so, or `all`."""
    known = experiments(scale)
    if unknown := sorted(set(names) - {*known, "all"}):
        raise ConfigError(f"no experiment is called {', '.join(unknown)}; there are {', '.join(known)}, and all")
    return [one for one in known.values() if "all" in names or one.name in names]


def specs(scale: Scale, names: list[str], seeds: Sequence[int] = ()) -> list[RunSpec]:
    """The runs of these experiments (or `all`), each once: main kinds seed by seed, then others, extras last.

    `seeds`, where there are any, stand in for those that each variant has of its own.
    """
    table = variants(scale)
    wanted = {variant for one in chosen_experiments(scale, names) for variant in one.variants}
    wanted |= {parent for name in wanted if (parent := table[name].parent) is not None}
    chosen = [one for one in table.values() if one.name in wanted]
    first = [one for one in chosen if one.measures == MAIN]
    rest = [one for one in chosen if one.measures != MAIN and not one.extra]
    extras = [one for one in chosen if one.extra]
    every = seeds or range(max(one.seeds for one in chosen))
    return [
        RunSpec(scale, one, seed)
        for part in (first, rest, extras)
        for seed in every
        for one in part
        if seeds or seed < one.seeds
    ]
