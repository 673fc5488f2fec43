"""Studies: variants with seeds, trained alike, measured on the same held-out windows, compared with intervals.

A study is a YAML file. Each of its runs is an ordinary training run (`dcdm train --config`) in a folder of its own:
it can be stopped, resumed, looked at and repeated by hand. Figures are kept beside the weights; what is finished is
never done again.

    name: lanes-128
    about: one sentence
    seeds: [0, 1, 2]
    settings: {train.steps: 1200, train.optimizer: muon}     # of every run, by the names of `dcdm train --set`
    variants:
      ar: {preset: ar-debug}
      lanes: {preset: lanes-debug, label: lanes, settings: {}, init: ar}   # init: start weights of another variant
    windows: 256          # held-out windows that every run is scored on
    corpora: {lambada: data/lambada.jsonl}                   # other texts, without decoders
    samples: 4            # Monte-Carlo samples of a bound
    against: ar           # the variant that the others are compared with
    claims:               # comparisons of variants, by their main figures or those named behind them
      price: {says: lanes cost nothing, below: [lanes 1 lanes < ar]}
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from dcdm.config import ConfigError, DataError
from dcdm.files import UnreadableFile, digest, read_json_object, read_yaml, stops_handled_by, write_whole
from dcdm.reproduction.intervals import Interval, interval
from dcdm.reproduction.measuring import asked_figures, on_every_text, routed, same_texts

BALANCE, STEP = "MaxVio", "step "
"""Figures of claims beside those that are measured: the balance of chunks, and the valid one while training."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
QUIET: dict[str, Any] = {"tensorboard": False, "evaluate_every": 1_000_000, "keep_last": 1, "keep_best": 0}
"""What all runs of studies are started with: their figures are measured once, at the end."""


@dataclass(frozen=True)
class StudyVariant:
    """One model of a study."""

    preset: str
    label: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    init: str | None = None
    """The variant whose run of the same seed gives the start weights."""
    lanes: tuple[int, ...] = ()
    """Numbers of lanes to score with; by default those that the model is trained with."""
    commits: tuple[str, ...] = ()
    """Commit policies to score with beside one forward per chunk, for models that can fill a chunk in parts; with
    `adablock` and a space before one, under AdaBlock's routing."""
    drafts: tuple[int, ...] = ()
    """Numbers of tokens guessed ahead to score each number of lanes with too, for models with a draft head."""
    minutes: float | None = None
    """What its steps take; None: what the study says."""
    seeds: tuple[int, ...] = ()
    """Of the study's seeds those that it runs with; by default all."""
    corpora: tuple[str, ...] | None = None
    """Of the study's other texts those that it is measured on; None: all."""


@dataclass(frozen=True)
class StudyClaim:
    """What is to be decided, and the comparisons that it rests on (`reproduction.verdicts`)."""

    says: str
    below: tuple[str, ...]
    """`one < other`, each a variant, with a figure behind it where it is not the variant's main one."""


@dataclass(frozen=True)
class Study:
    """What is compared, on what, and how."""

    name: str
    variants: Mapping[str, StudyVariant]
    about: str = ""
    seeds: tuple[int, ...] = (0, 1, 2)
    settings: Mapping[str, Any] = field(default_factory=dict)
    windows: int = 256
    samples: int = 4
    corpora: Mapping[str, str] = field(default_factory=dict)
    """Name → file of other texts: as many windows, by all figures but those of decoders."""
    against: str | None = None
    minutes: float | None = None
    """What every run's steps take, on the machine that they were counted for; None: what the variants say."""
    claims: Mapping[str, StudyClaim] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.variants or not self.seeds:
            raise ConfigError("a study needs variants and seeds")
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds={list(self.seeds)} must name each seed once")
        for counted in ("windows", "samples"):
            if getattr(self, counted) < 1:
                raise ConfigError(f"{counted}={getattr(self, counted)} must be at least 1")
        for name, variant in self.variants.items():
            if variant.init is not None and variant.init not in self.variants:
                raise ConfigError(f"variants.{name}.init={variant.init!r} is not a variant of this study")
            self.ancestors(name)
            if foreign := sorted(set(variant.seeds) - set(self.seeds)):
                raise ConfigError(f"variants.{name}.seeds: {foreign} are not among the study's {list(self.seeds)}")
            if strange := sorted(set(variant.corpora or ()) - set(self.corpora)):
                raise ConfigError(f"variants.{name}.corpora: {strange} are not among the study's corpora")
            for init in self.ancestors(name):
                if weightless := sorted(set(self.seeds_of(name)) - set(self.seeds_of(init))):
                    raise ConfigError(f"variants.{name}: its start weights, {init}, have no seeds {weightless}")
        lasting = {f"variants.{name}.minutes": variant.minutes for name, variant in self.variants.items()}
        for where, minutes in {"minutes": self.minutes, **lasting}.items():
            if minutes is not None and not minutes > 0:
                raise ConfigError(f"{where}={minutes} must be above 0")
        if self.against is not None and self.against not in self.variants:
            raise ConfigError(
                f"against={self.against!r} is not a variant; choose one of {', '.join(self.variants)}"
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
                raise ConfigError(f"variants.{name}.init={init!r}: start weights go round in a circle")
            found.append(init)
            name = init
        return found

    def seeds_of(self, name: str) -> tuple[int, ...]:
        return self.variants[name].seeds or self.seeds

    def corpora_of(self, name: str) -> dict[str, str]:
        """Name → file of the other texts that a variant is measured on."""
        own = self.variants[name].corpora
        return {text: path for text, path in self.corpora.items() if own is None or text in own}

    def minutes_of(self, name: str) -> float | None:
        own = self.variants[name].minutes
        return self.minutes if own is None else own

    @property
    def over_minutes(self) -> bool:
        """Whether all variants know their minutes: then curves share an axis of them, else one of steps."""
        return all(self.minutes_of(name) is not None for name in self.variants)

    def runs(self) -> list[StudyRun]:
        """Seed by seed, so that an unfinished study has something of every variant; parents before children."""
        names = sorted(self.variants, key=lambda name: len(self.ancestors(name)))
        return [StudyRun(self, name, seed) for seed in self.seeds for name in names if seed in self.seeds_of(name)]


@dataclass(frozen=True)
class StudyRun:
    """A variant with a seed."""

    study: Study
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}-s{self.seed}"

    @property
    def parent(self) -> StudyRun | None:
        init = self.study.variants[self.variant].init
        return None if init is None else StudyRun(self.study, init, self.seed)

    def settings(self, work: Path) -> dict[str, Any]:
        """Dotted settings of the training run."""
        from dcdm.training.settings import flat

        variant = self.study.variants[self.variant]
        changes = {**QUIET, **flat(self.study.settings), **flat(variant.settings), "train.seed": self.seed}
        if self.parent is not None:
            changes["init"] = str(work / self.parent.name)
        return changes

    def measured_with(self) -> str:
        """What its figures follow from, as the study names it: how it was trained, and how it was measured.

        What a preset means is not part of it: a study that is to last names what its comparison rests on.
        """
        variant, trained = self.study.variants[self.variant], self._trained_with()
        measured: list[Any] = [self.study.windows, self.study.samples, list(variant.lanes), list(variant.commits)]
        measured += [list(variant.drafts)] if variant.drafts else []
        measured += [corpora] if (corpora := self.study.corpora_of(self.variant)) else []
        return digest([trained, measured])[:16]

    def trained_with(self) -> str:
        """What its weights and its curve follow from."""
        return digest(self._trained_with())[:16]

    def _trained_with(self) -> list[Any]:
        preset, before = self.study.variants[self.variant].preset, self.parent
        return [preset, self.settings(Path()), [] if before is None else before.measured_with()]


def read_study(path: Path) -> Study:
    """A study from its file; every run's settings are checked before anything starts."""
    from dcdm.decoding.config import DecodingConfig, resolve_drafts, resolve_lanes
    from dcdm.decoding.routes import AdaBlock
    from dcdm.training.settings import made, resolve

    try:
        content = read_yaml(path)
    except UnreadableFile as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("variants"), dict):
        raise ConfigError(f"{path} must hold a study: name, seeds, settings and variants by name")
    try:
        study = made(Study, {"name": path.stem, **content}, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    for run in {run.variant: run for run in study.runs()}.values():
        variant = study.variants[run.variant]
        try:
            config = resolve(variant.preset, None, run.settings(Path()))
            for commit in variant.commits:
                routing, policy = routed(commit)
                ends = AdaBlock((0,), 1) if routing == "adablock" else None  # the tokenizer knows them, later
                decoder = DecodingConfig(policy, routing=routing, adablock=ends).resolve(config.model)
                decoder.check_likelihood()
            for number in variant.lanes:
                resolve_lanes(config.model, number)
            for number in variant.drafts:
                resolve_drafts(config.model, number, "exact")
        except ConfigError as error:
            raise ConfigError(f"{path}: variants.{run.variant}: {error}") from error
    try:
        check_claims(study)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return study


def sides(study: Study, text: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Variant and figure on both sides of a comparison such as `paper surrogate < bdlm`."""
    left, less, right = text.partition(" < ")
    if not less:
        raise ConfigError(f"{text!r} is not a comparison such as 'one < other'")
    found = []
    for side in (left, right):
        variant, _, figure = side.strip().partition(" ")
        if variant not in study.variants:
            raise ConfigError(f"{text!r}: {variant!r} is not a variant; choose from {', '.join(study.variants)}")
        found.append((variant, figure.strip() or main_figure(study, variant)))
    return found[0], found[1]


def check_claims(study: Study) -> None:
    """Refuse comparisons of what the study will not have, before anything runs."""
    for name, claim in study.claims.items():
        try:
            for text in claim.below:
                for variant, figure in sides(study, text):
                    _check_figure(study, text, variant, figure)
        except ConfigError as error:
            raise ConfigError(f"claims.{name}.below: {error}") from error


def _check_figure(study: Study, text: str, variant: str, figure: str) -> None:
    from dcdm.training.settings import resolve

    run, about = next(run for run in study.runs() if run.variant == variant), study.variants[variant]
    config = resolve(about.preset, None, run.settings(Path()))
    if figure.startswith(STEP):
        step = figure.removeprefix(STEP)
        if not step.isdecimal() or int(step) % config.evaluate_every or not 0 < int(step) <= config.train.steps:
            raise ConfigError(
                f"{text!r}: {variant} is not evaluated at {figure!r}; it is at multiples of evaluate_every="
                f"{config.evaluate_every} up to train.steps={config.train.steps}"
            )
        return
    asked = asked_figures(config.model, about.lanes, about.commits, about.drafts)
    names = [
        *asked,
        *(f"{corpus}: {name}" for corpus in study.corpora_of(variant) for name in on_every_text(asked)),
    ]
    names += [BALANCE] if config.model.kind == "dcdm" else []
    if figure not in names:
        raise ConfigError(f"{text!r}: {variant} has no figure {figure!r}; it has {', '.join(names)}")


# --- carrying out -------------------------------------------------------------------------------------------------


def figures_of(run: StudyRun, work: Path) -> dict[str, Any] | None:
    """The measured figures of a finished run; None where there are none yet, or of other settings."""
    path = work / run.name / "figures.json"
    if not path.is_file():
        return None
    stored = read_json_object(path)
    return stored["figures"] if stored.get("measured_with") == run.measured_with() else None


def stored_figures(study: Study, results: Path) -> dict[str, dict[str, Any]]:
    """Run → figures that a file of results has of this study; refused if it has others, which would be lost."""
    if not results.is_file():
        return {}
    try:
        stored = read_json_object(results)
        runs, made_with, name = dict(stored["runs"]), dict(stored["measured_with"]), stored["study"]
    except (UnreadableFile, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{results} does not hold the results of a study ({error}); name another file") from error
    if name != study.name:
        raise ConfigError(f"{results} holds the results of {name!r}, not of {study.name!r}; name another file")
    ours = {run.name: run.measured_with() for run in study.runs()}
    if others := [run for run in runs if run not in ours or made_with.get(run) != ours[run]]:
        raise ConfigError(
            f"{results} holds runs that the study does not have, or has with other settings, and that would be "
            f"lost ({len(others)}: {', '.join(others[:3])}, …); name another file"
        )
    return runs


def collected(study: Study, work: Path, results: Path | None = None) -> dict[str, dict[str, Any]]:
    """Run → figures of all that is finished, in `work` or in a file of results."""
    found = {} if results is None else stored_figures(study, results)
    found |= {run.name: part for run in study.runs() if (part := figures_of(run, work)) is not None}
    for name in study.variants:
        if not same_texts([found[run.name] for run in study.runs() if run.variant == name and run.name in found]):
            raise ConfigError(
                f"{study.name}: the seeds of {name} were trained or measured on different texts (another file of "
                "the same name, or another version of Python for stdlib); make them anew from one"
            )
    return found


def carry_out(
    study: Study,
    work: Path,
    jobs: int,
    say: Callable[[str], None] = lambda line: None,
    only: Collection[str] = (),
    seeds: Collection[int] = (),
    known: Collection[str] = (),
) -> bool:
    """Train and measure what is not done yet, `jobs` at a time, one thread each; False if stopped or failed.

    `only` and `seeds` choose the variants and the seeds to carry out, by default all; start weights that they need
    are made with them. Runs that are `known` need not be made, unless another starts from their weights. A stop is
    passed on to the runs, which save; the same call resumes them.
    """
    if unknown := sorted(set(only) - set(study.variants)):
        raise ConfigError(f"{', '.join(unknown)}: no such variant; choose from {', '.join(study.variants)}")
    if foreign := sorted(set(seeds) - set(study.seeds)):
        raise ConfigError(
            f"--seeds {' '.join(map(str, foreign))}: the study has {', '.join(map(str, study.seeds))}"
        )
    chosen = [
        run
        for run in study.runs()
        if run.variant in (only or study.variants) and run.seed in (seeds or study.seeds) and run.name not in known
    ]
    wanted = {(name, run.seed) for run in chosen for name in (run.variant, *study.ancestors(run.variant))}
    waiting = [run for run in study.runs() if (run.variant, run.seed) in wanted and figures_of(run, work) is None]
    if waiting:
        _check_corpora(study)
    done = {run.name: threading.Event() for run in study.runs()}
    for run in study.runs():
        if run not in waiting:
            done[run.name].set()
    running: set[subprocess.Popen[bytes]] = set()
    stopped = threading.Event()

    def one(run: StudyRun) -> bool:
        try:
            if run.parent is not None:
                done[run.parent.name].wait()
                if figures_of(run.parent, work) is None and not stopped.is_set():
                    say(f"{run.name}: left out, since {run.parent.name} gives it no weights")
                    return False
            ok = not stopped.is_set() and _train_and_measure(run, work, running, stopped)
            why = "stopped" if stopped.is_set() else f"failed, see {log_of(run, work)}"
            say(f"{run.name}: {'done' if ok else why}")
            return ok
        finally:
            done[run.name].set()

    def stop(number: int, frame: object) -> None:
        stopped.set()
        for process in list(running):
            process.send_signal(signal.SIGINT)

    with stops_handled_by(stop), ThreadPoolExecutor(jobs) as pool:
        results = [pool.submit(one, run) for run in waiting]
        while not all(result.done() for result in results):  # in small portions, so that signals are heard
            time.sleep(0.2)
    outcomes = [result.result() for result in results]  # all of them: a defect must not hide behind a failed run
    return all(outcomes)


def _check_corpora(study: Study) -> None:
    """Read the other texts once, before hours are spent on models to measure on them."""
    from dcdm.evaluation.corpora import ReadingSettings, read_corpus

    if missing := [path for path in study.corpora.values() if not Path(path).is_file()]:
        raise ConfigError(f"corpora: {', '.join(missing)}: there is no such file; put it there, or leave it out")
    for name, path in study.corpora.items():
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"corpora.{name}: a name has letters, digits, '-', '_' and '.' only")
        try:
            read_corpus(f"{name}={path}", ReadingSettings())
        except (ConfigError, DataError) as error:
            raise ConfigError(f"corpora.{name}: {error}") from error


def log_of(run: StudyRun, work: Path) -> Path:
    return work / "logs" / f"{run.name}.txt"


def _train_and_measure(
    run: StudyRun, work: Path, running: set[subprocess.Popen[bytes]], stopped: threading.Event
) -> bool:
    from dcdm.training import settings

    config = settings.resolve(run.study.variants[run.variant].preset, None, run.settings(work))
    file = work / "settings" / f"{run.name}.yaml"
    for folder in (file.parent, log_of(run, work).parent):
        folder.mkdir(parents=True, exist_ok=True)
    settings.write(config, file)
    place = str(work / run.name)
    made_with = file.with_suffix(".digest")
    if Path(place).exists() and made_with.is_file() and made_with.read_text() != run.trained_with():
        with open(log_of(run, work), "a") as log:
            print(f"{place} was trained with other settings, or from other start weights; delete it", file=log)
        return False
    write_whole(made_with, run.trained_with().encode())
    variant = run.study.variants[run.variant]
    how = [variant.lanes, variant.commits, variant.drafts, run.study.corpora_of(run.variant)]
    measuring = json.dumps([place, run.study.windows, run.study.samples, *how, run.measured_with()])
    commands = (
        ["-m", "dcdm", "train", "--config", str(file), "--run", place, "--device", "cpu"],
        ["-m", "dcdm.reproduction.measuring", measuring],
    )
    for arguments in commands:
        with open(log_of(run, work), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments], env={**os.environ, **dict.fromkeys(THREADS, "1")},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            running.add(process)
            if stopped.is_set():  # while it started, when the signal could not be passed on to it
                process.send_signal(signal.SIGINT)
            code = process.wait()
            running.discard(process)
        if code or stopped.is_set():
            return False
    return True


# --- comparing ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A figure of a variant over its finished seeds."""

    variant: str
    figure: str
    estimator: str
    forwards: float | None
    mean: Interval
    difference: Interval | None
    """Minus the main figure of `against` on the same text, over the seeds that both have. None of a surrogate."""


def main_figure(study: Study, variant: str) -> str:
    """The figure that stands for a variant: `valid`; of lanes of the model's default number, else the first."""
    from dcdm.model.routing import default_lanes
    from dcdm.training.settings import resolve

    run = next(run for run in study.runs() if run.variant == variant)
    model = resolve(study.variants[variant].preset, None, run.settings(Path())).model
    if model.lanes is None:
        return "valid"
    numbers = study.variants[variant].lanes or model.lanes
    return f"{default if (default := default_lanes(model)) in numbers else numbers[0]} lanes"


def same_text(found: Mapping[tuple[str, int], dict[str, Any]], seed: int, *variants: str | None) -> bool:
    """Whether the variants' runs with a seed were trained and measured on the same texts."""
    return same_texts([found[name, seed] for name in variants if name is not None])


def compare(study: Study, figures: Mapping[str, dict[str, Any]]) -> list[Row]:
    """A row per variant and figure, over the seeds that are finished, as `collected` finds them."""
    found = {(run.variant, run.seed): figures[run.name] for run in study.runs() if run.name in figures}

    def values(variant: str, figure: str) -> dict[int, float]:
        return {
            seed: part[figure]["nats_per_token"]
            for (name, seed), part in found.items()
            if name == variant and figure in part
        }

    rows = []
    main = "" if study.against is None else main_figure(study, study.against)
    for variant in study.variants:
        parts = [part for (name, _), part in found.items() if name == variant]
        for figure in dict.fromkeys(name for part in parts for name in part):
            by_seed = values(variant, figure)
            text = next((f"{name}: " for name in study.corpora if figure.startswith(f"{name}: ")), "")
            base = {} if study.against is None else values(study.against, text + main)
            shared = [seed for seed in by_seed if seed in base and same_text(found, seed, variant, study.against)]
            about = next(part[figure] for part in parts if figure in part)
            mean = interval(list(by_seed.values()))
            assert mean is not None
            alone = (variant, figure) == (study.against, text + main) or about["estimator"] == "surrogate"
            difference = None if alone else interval([by_seed[seed] - base[seed] for seed in shared])
            spent = [part[figure]["forwards"] for part in parts if figure in part]  # drafts: each seed its own
            forwards = None if about["forwards"] is None else fmean(spent)
            rows.append(Row(variant, figure, about["estimator"], forwards, mean, difference))
    return rows


def summary(study: Study, figures: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The study's results as plain values: figures per run, without those of single windows."""
    runs = {
        run: {name: {key: value for key, value in one.items() if key != "nats"} for name, one in part.items()}
        for run, part in figures.items()
    }
    return {
        "study": study.name,
        "about": study.about,
        "windows": study.windows,
        "samples": study.samples,
        "measured_with": {run.name: run.measured_with() for run in study.runs() if run.name in runs},
        "runs": runs,
    }
