"""A study is a YAML file: variants with seeds, how they are trained and measured, and what is to be decided.

name: lanes-128
about: one sentence
seeds: [0, 1, 2]
settings: {train.steps: 1200, train.optimizer: muon}     # of every run, by the names of `dcdm train --set`
variants:
  ar: {preset: ar-debug}
  lanes: {preset: lanes-debug, label: lanes, settings: {}, init: ar}   # init: whose weights it starts from
windows: 256          # held-out windows that every run is scored on
corpora: {lambada: data/lambada.jsonl}                   # other texts, without decoders
samples: 4            # Monte-Carlo samples of a bound
against: ar           # the variant that the others are compared with
claims:               # comparisons of variants, by their main figures or those named behind them
  price: {says: lanes cost nothing, below: [lanes 1 lanes < ar]}
experiments:          # claims and variants under a name, for `dcdm reproduce`
  lanes: {shows: what lanes cost, claims: [price]}
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcdm.config import ConfigError, ModelConfig, require
from dcdm.files import UnreadableFile, digest, read_yaml

if TYPE_CHECKING:
    from dcdm.training.settings import RunConfig

BALANCE, STEP = "MaxVio", "step "
"""Figures of claims beside those that are measured: the balance of chunks, and the valid one while training."""
QUIET: dict[str, Any] = {"tensorboard": False, "evaluate_every": 1_000_000, "keep_last": 1, "keep_best": 0}
"""What all runs of studies are started with: their figures are measured once, at the end."""


@dataclass(frozen=True)
class Variant:
    """One model of a study."""

    preset: str
    label: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    init: str | None = None
    """The variant whose run of the same seed gives the initial weights."""
    lanes: tuple[int, ...] = ()
    """Numbers of lanes to score with; by default those that the model is trained with."""
    commits: tuple[str, ...] = ()
    """Commit policies to score with beside one forward pass per chunk, for models that can fill a chunk in parts;
    with `adablock` and a space before one, under AdaBlock's routing."""
    drafts: tuple[int, ...] = ()
    """Numbers of draft tokens to score each number of lanes with too, for models with a draft head."""
    seeds: tuple[int, ...] = ()
    """Of the study's seeds those that it runs with; by default all."""
    corpora: tuple[str, ...] | None = None
    """Of the study's other texts those that it is measured on; None: all."""
    retired: str = ""
    """Why it can no longer be trained; its stored figures stay."""


@dataclass(frozen=True)
class Claim:
    """What is to be decided, and the comparisons that it rests on."""

    says: str
    below: tuple[str, ...]
    """`one < other`, each a variant, with a figure behind it where it is not the variant's main one."""


@dataclass(frozen=True)
class Experiment:
    """A part of a study under a name: a table or figure of the paper, or one of ours."""

    shows: str
    paper: str = "ours"
    """Where it stands in the paper."""
    claims: tuple[str, ...] = ()
    """Those of the study that it decides."""
    variants: tuple[str, ...] = ()
    """Of the study, beside those that the claims compare."""


@dataclass(frozen=True)
class Study:
    """What is compared, on what, and how."""

    name: str
    variants: Mapping[str, Variant]
    about: str = ""
    seeds: tuple[int, ...] = (0, 1, 2)
    settings: Mapping[str, Any] = field(default_factory=dict)
    windows: int = 256
    samples: int = 4
    corpora: Mapping[str, str] = field(default_factory=dict)
    """Name → file of other texts: as many windows, by all figures but those of decoders."""
    against: str | None = None
    minutes: float | None = None
    """What the steps of a run take, on the machine that they were counted for: the unit of curves; None: steps."""
    claims: Mapping[str, Claim] = field(default_factory=dict)
    experiments: Mapping[str, Experiment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.variants and self.seeds), "a study needs variants and seeds")
        for group, names in (("variants", self.variants), ("corpora", self.corpora)):
            for name in names:
                require(
                    re.fullmatch(r"\w[\w.-]{0,99}", name) is not None,
                    f"{group}.{name[:100]!r}: a name has at most 100 letters, digits, '-', '_' and '.', and begins "
                    "with a letter or digit, as files are called so",
                )
        seeds = {*self.seeds}
        require(len(seeds) == len(self.seeds), f"seeds={list(self.seeds)} must name each seed once")
        for counted in ("windows", "samples"):
            require(getattr(self, counted) >= 1, f"{counted}={getattr(self, counted)} must be at least 1")
        for name, variant in self.variants.items():
            place, known = f"variants.{name}", {None, *self.variants}
            require(variant.init in known, f"{place}.init={variant.init!r} is not a variant of this study")
            require({*variant.seeds} <= seeds, f"{place}.seeds: not all are among the study's {list(self.seeds)}")
            strange = sorted({*(variant.corpora or ())} - {*self.corpora})
            require(not strange, f"{place}.corpora: {strange} are not among the study's corpora")
            for init in self.ancestors(name):
                weightless = sorted({*self.seeds_of(name)} - {*self.seeds_of(init)})
                require(not weightless, f"{place}: its initial weights, {init}, have no seeds {weightless}")
        require(
            self.against in (None, *self.variants),
            f"against={self.against!r} is not a variant; choose one of {', '.join(self.variants)}",
        )

    def named(self, variant: str) -> str:
        """A variant with its label, for readers."""
        label = self.variants[variant].label
        return f"{variant}: {label}" if label else variant

    def ancestors(self, name: str) -> list[str]:
        """The variants whose weights this one comes from, the nearest first."""
        found: list[str] = []
        while (init := self.variants[name].init) is not None:
            if init in found:
                raise ConfigError(f"variants.{name}.init={init!r}: initial weights go round in a circle")
            found.append(init)
            name = init
        return found

    def seeds_of(self, name: str) -> tuple[int, ...]:
        return self.variants[name].seeds or self.seeds

    def corpora_of(self, name: str) -> dict[str, str]:
        """Name → file of the other texts that a variant is measured on."""
        own = self.variants[name].corpora
        return {text: path for text, path in self.corpora.items() if own is None or text in own}

    def runs(self) -> list[Run]:
        """Seed by seed, so that an unfinished study has something of every variant; parents before children."""
        names = sorted(self.variants, key=lambda name: len(self.ancestors(name)))
        return [Run(self, name, seed) for seed in self.seeds for name in names if seed in self.seeds_of(name)]

    def config(self, name: str) -> RunConfig:
        """The settings of a variant's runs, but for the seed and the place of initial weights."""
        if name not in self._configs:
            self._configs[name] = Run(self, name, self.seeds_of(name)[0]).config(Path())
        return self._configs[name]

    @cached_property
    def _configs(self) -> dict[str, RunConfig]:
        return {}

    def figures_asked(self, name: str) -> dict[str, dict[str, Any]]:
        """Name → how to score, of all figures that a variant gets on held-out windows."""
        variant = self.variants[name]
        return asked_figures(self.config(name).model, variant.lanes, variant.commits, variant.drafts)

    def main_figure(self, name: str) -> str:
        """The figure that stands for a variant: `valid`; of lanes of the model's default number, else the first."""

        model = self.config(name).model
        if model.lanes is None:
            return "valid"
        numbers = self.variants[name].lanes or model.lanes
        return f"{default if (default := model.default_lanes) in numbers else numbers[0]} lanes"

    def sides(self, text: str) -> tuple[tuple[str, str], tuple[str, str]]:
        """Variant and figure on both sides of a comparison such as `paper surrogate < bdlm`."""
        left, less, right = text.partition(" < ")
        if not less:
            raise ConfigError(f"{text!r} is not a comparison such as 'one < other'")
        found = []
        for side in (left, right):
            variant, _, figure = side.strip().partition(" ")
            if variant not in self.variants:
                raise ConfigError(f"{text!r}: {variant!r} is not a variant; choose from {', '.join(self.variants)}")
            found.append((variant, figure.strip() or self.main_figure(variant)))
        return found[0], found[1]

    def chosen_experiments(self, names: Sequence[str]) -> dict[str, Experiment]:
        """The experiments called so, or `all`."""
        if unknown := sorted({*names} - {*self.experiments, "all"}):
            known = ", ".join(self.experiments) or "none of its own"
            raise ConfigError(f"no experiment is called {', '.join(unknown)}; choose from {known}, or all")
        return {name: one for name, one in self.experiments.items() if "all" in names or name in names}

    def variants_in(self, experiments: Iterable[str]) -> list[str]:
        """The variants that experiments are made of."""
        found: list[str] = []
        for one in (self.experiments[name] for name in experiments):
            compared = [text for claim in one.claims for text in self.claims[claim].below]
            found += [variant for text in compared for variant, _ in self.sides(text)]
            found += one.variants
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Run:
    """A variant with a seed."""

    study: Study
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}-s{self.seed}"

    @property
    def parent(self) -> Run | None:
        init = self.study.variants[self.variant].init
        return None if init is None else Run(self.study, init, self.seed)

    def settings(self, work: Path) -> dict[str, Any]:
        """Dotted settings of the training run."""
        from dcdm.training.settings import flat

        variant = self.study.variants[self.variant]
        changes = {**QUIET, **flat(self.study.settings), **flat(variant.settings), "train.seed": self.seed}
        if self.parent is not None:
            changes["init"] = str(work / self.parent.name)
        return changes

    def config(self, work: Path) -> RunConfig:
        from dcdm.training.settings import resolve

        return resolve(self.study.variants[self.variant].preset, None, self.settings(work))

    def measured_with(self) -> str:
        """What its figures follow from, as the study names it: how it was trained, and how it was measured.

        What a preset means is not part of it: a study that is to last names what its comparison rests on.
        """
        variant = self.study.variants[self.variant]
        measured: list[Any] = [self.study.windows, self.study.samples, list(variant.lanes), list(variant.commits)]
        measured += [list(variant.drafts)] if variant.drafts else []
        measured += [corpora] if (corpora := self.study.corpora_of(self.variant)) else []
        return digest([self._trained_with(), measured])[:16]

    def trained_with(self) -> str:
        """What its weights and its curve follow from."""
        return digest(self._trained_with())[:16]

    def _trained_with(self) -> list[Any]:
        preset, before = self.study.variants[self.variant].preset, self.parent
        return [preset, self.settings(Path()), [] if before is None else before.measured_with()]


# --- figures ------------------------------------------------------------------------------------------------------


def asked_figures(
    config: ModelConfig, lanes: Sequence[int] = (), commits: Sequence[str] = (), drafts: Sequence[int] = ()
) -> dict[str, dict[str, Any]]:
    """Name → how to score, of all figures that a model of this kind gets on held-out windows."""
    from dcdm.likelihood.estimators import estimators_of

    valid = estimators_of(config)[0]
    asked: dict[str, dict[str, Any]] = {"valid": {"estimator": valid}}
    if config.lanes is not None:
        numbers = lanes or config.lanes
        asked = {f"{number} lanes": {"estimator": "exact", "lanes": number} for number in numbers}
        for ahead, number in itertools.product(drafts, numbers):
            how = {"estimator": "drafted", "lanes": number, "drafts": ahead, "samples": 1}
            asked[f"{number} lanes, {ahead} drafts"] = how
    elif valid != "exact":
        for commit in ("chunk", *commits):
            routing, policy = routed(commit)
            asked[commit] = {"estimator": "trajectory", "commit": policy, "routing": routing}
    if config.routes_from_noise:
        asked["surrogate"] = {"estimator": "surrogate"}
    return asked


def on_every_text(asked: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Those of the asked figures that other texts than the held-out one get, too."""
    return [name for name, options in asked.items() if options["estimator"] not in ("trajectory", "drafted")]


def routed(commit: str) -> tuple[Any, str]:
    """Routing and commit policy of an entry of `commits`."""
    routing, _, policy = commit.rpartition(" ")
    return routing or "auto", policy


# --- reading ------------------------------------------------------------------------------------------------------


def read_study(path: Path) -> Study:
    """A study from its file; every variant's settings and every claim are checked before anything starts."""
    from dcdm.training.settings import made

    try:
        content = read_yaml(path)
    except UnreadableFile as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("variants"), dict):
        raise ConfigError(f"{path} must hold a study: name, seeds, settings and variants by name")
    try:
        study = made(Study, {"name": path.stem, **content}, "")
        for name in study.variants:
            _check_variant(study, name)
        check_claims(study)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return study


def _check_variant(study: Study, name: str) -> None:
    from dcdm.decoding.config import AdaBlock, DecodingConfig, resolve_drafts, resolve_lanes

    variant = study.variants[name]
    if variant.retired:
        return
    try:
        model = study.config(name).model
        for commit in variant.commits:
            routing, policy = routed(commit)
            ends = AdaBlock((0,), 1) if routing == "adablock" else None  # the tokenizer knows them, later
            DecodingConfig(policy, routing=routing, adablock=ends).resolve(model).check_likelihood()
        for number in variant.lanes:
            resolve_lanes(model, number)
        for number in variant.drafts:
            resolve_drafts(model, number, "exact")
    except ConfigError as error:
        raise ConfigError(f"variants.{name}: {error}") from error


def check_claims(study: Study) -> None:
    """Refuse comparisons of what the study will not have, before anything runs."""
    for name, claim in study.claims.items():
        try:
            for text in claim.below:
                for variant, figure in study.sides(text):
                    _check_figure(study, text, variant, figure)
        except ConfigError as error:
            raise ConfigError(f"claims.{name}.below: {error}") from error
    for name, experiment in study.experiments.items():
        if unknown := [*({*experiment.claims} - {*study.claims}), *({*experiment.variants} - {*study.variants})]:
            raise ConfigError(f"experiments.{name}: {', '.join(unknown)}: no such claim or variant of the study")


def _check_figure(study: Study, text: str, variant: str, figure: str) -> None:
    config = study.config(variant)
    if figure.startswith(STEP):
        step = figure.removeprefix(STEP)
        if not step.isdecimal() or int(step) % config.evaluate_every or not 0 < int(step) <= config.train.steps:
            raise ConfigError(
                f"{text!r}: {variant} is not evaluated at {figure!r}; it is at multiples of evaluate_every="
                f"{config.evaluate_every} up to train.steps={config.train.steps}"
            )
        return
    asked = study.figures_asked(variant)
    names = [*asked, *(f"{text}: {name}" for text in study.corpora_of(variant) for name in on_every_text(asked))]
    names += [BALANCE] if config.model.kind == "dcdm" else []
    if figure not in names:
        raise ConfigError(f"{text!r}: {variant} has no figure {figure!r}; it has {', '.join(names)}")
