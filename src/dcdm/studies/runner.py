"""Carrying a study out: every run is an ordinary training run in a folder of its own, then measured there.

A run can be stopped, resumed, looked at and repeated by hand (`dcdm train --config`). Figures are kept beside the
weights; what is finished is never done again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from dcdm.config import ConfigError, DataError
from dcdm.files import UnreadableFile, digest, read_json_object, stops_handled_by, write_whole
from dcdm.progress import Reporter
from dcdm.studies.results import same_texts
from dcdm.studies.study import Run, Study

PACKAGED = ("stdlib", "addresses")
"""Other texts that are no files."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


# --- figures that are there ---------------------------------------------------------------------------------------


def figures_of(run: Run, work: Path) -> dict[str, Any] | None:
    """The measured figures of a finished run; None where there are none yet, or of other settings."""
    path = work / run.name / "figures.json"
    if not path.is_file():
        return None
    try:
        stored = read_json_object(path)
        if stored.get("measured_with") != run.measured_with():
            return None
        if stored.get("sha256") != digest(stored["figures"]):
            raise UnreadableFile("its figures are not those that were written")
    except (UnreadableFile, KeyError) as error:
        raise ConfigError(f"{path} is damaged ({error}); delete it, and the run is measured again") from error
    return stored["figures"]


def stored_figures(study: Study, results: Path) -> dict[str, dict[str, Any]]:
    """Run → figures that a file of results has of this study; refused if it has others, which would be lost."""
    if not results.is_file():
        return {}
    try:
        stored = read_json_object(results)
        runs, made_with, name = dict(stored["runs"]), dict(stored["measured_with"]), stored["study"]
    except (UnreadableFile, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{results} does not hold the results of a study ({error}); name another file") from error
    if stored.get("sha256", digest(runs)) != digest(runs):
        raise ConfigError(f"{results} is damaged: its figures do not match their checksum; restore it")
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
                "the same name, or another version of Python for stdlib); train them again on one"
            )
    return found


# --- making what is missing ---------------------------------------------------------------------------------------


def carry_out(
    study: Study, work: Path, jobs: int, only: Collection[str] = (), seeds: Collection[int] = (),
    known: Collection[str] = (), reporter: Reporter | None = None,
) -> bool:  # fmt: skip
    """Train and measure what is not done yet, `jobs` at a time, one thread each; False if stopped or failed.

    `only` and `seeds` choose the variants and the seeds to carry out, by default all; initial weights that they
    need are made with them. Runs that are `known` need not be made, unless another starts from their weights. A
    stop is passed on to the runs, which save; the same call resumes them.
    """
    reporter = reporter or Reporter()
    waiting = _waiting(study, work, only, seeds, known)
    if waiting:
        _check_corpora(study)
    made = {run.name: threading.Event() for run in waiting}
    running: set[subprocess.Popen[bytes]] = set()
    stopped = threading.Event()

    def one(run: Run) -> bool:
        try:
            if run.parent is not None:
                if run.parent.name in made:
                    made[run.parent.name].wait()
                if figures_of(run.parent, work) is None and not stopped.is_set():
                    reporter.say(f"{run.name}: left out, since {run.parent.name} gives it no weights")
                    return False
            ok = not stopped.is_set() and _train_and_measure(run, work, running, stopped)
            why = "stopped" if stopped.is_set() else f"failed, see {log_of(run, work)}"
            reporter.say(f"{run.name}: {'done' if ok else why}")
            return ok
        finally:
            made[run.name].set()

    def stop(number: int, frame: object) -> None:
        stopped.set()
        for process in list(running):
            process.send_signal(signal.SIGINT)

    with stops_handled_by(stop), ThreadPoolExecutor(jobs) as pool:
        results = [pool.submit(one, run) for run in waiting]
        pending = {*results}
        while pending:  # in small portions, so that signals are heard
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            if done:
                reporter.progress("study", len(results) - len(pending), len(results), "runs")
    outcomes = [result.result() for result in results]  # all of them: a defect must not hide behind a failed run
    return all(outcomes)


def _waiting(
    study: Study, work: Path, only: Collection[str], seeds: Collection[int], known: Collection[str]
) -> list[Run]:
    """The runs to make, parents first."""
    if unknown := sorted(set(only) - set(study.variants)):
        raise ConfigError(f"{', '.join(unknown)}: no such variant; choose from {', '.join(study.variants)}")
    if foreign := sorted(set(seeds) - set(study.seeds)):
        raise ConfigError(
            f"--seeds {' '.join(map(str, foreign))}: the study has {', '.join(map(str, study.seeds))}"
        )
    for name in only:
        if reason := study.variants[name].retired:
            raise ConfigError(f"{name} can no longer be trained: {reason}")
    names = only or [name for name, variant in study.variants.items() if not variant.retired]
    wanted = {
        (name, run.seed)
        for run in study.runs()
        if run.variant in names and run.seed in (seeds or study.seeds) and run.name not in known
        for name in (run.variant, *study.ancestors(run.variant))
    }
    return [run for run in study.runs() if (run.variant, run.seed) in wanted and figures_of(run, work) is None]


def _check_corpora(study: Study) -> None:
    """Read the other texts once, before hours are spent on models to measure on them."""
    from dcdm.evaluation.corpora import read_corpus

    if missing := [path for path in study.corpora.values() if path not in PACKAGED and not Path(path).is_file()]:
        raise ConfigError(f"corpora: {', '.join(missing)}: there is no such file; put it there, or leave it out")
    for name, path in study.corpora.items():
        try:
            read_corpus(f"{name}={path}")
        except (ConfigError, DataError) as error:
            raise ConfigError(f"corpora.{name}: {error}") from error


def log_of(run: Run, work: Path) -> Path:
    return work / "logs" / f"{run.name}.txt"


def _train_and_measure(
    run: Run, work: Path, running: set[subprocess.Popen[bytes]], stopped: threading.Event
) -> bool:
    from dcdm.training import settings

    file, place = work / "settings" / f"{run.name}.yaml", work / run.name
    for folder in (file.parent, log_of(run, work).parent):
        folder.mkdir(parents=True, exist_ok=True)
    settings.write(run.config(work), file)
    made_with = file.with_suffix(".digest")
    if place.exists() and made_with.is_file() and made_with.read_text() != run.trained_with():
        with open(log_of(run, work), "a") as log:
            print(f"{place} was trained with other settings, or from other initial weights; delete it", file=log)
        return False
    write_whole(made_with, run.trained_with().encode())
    study, variant = run.study, run.study.variants[run.variant]
    asked = {
        "windows": study.windows, "samples": study.samples, "lanes": variant.lanes, "commits": variant.commits,
        "drafts": variant.drafts, "corpora": study.corpora_of(run.variant),
    }  # fmt: skip
    commands = (
        ["-m", "dcdm", "train", "--config", str(file), "--run", str(place), "--device", "cpu"],
        ["-m", "dcdm.studies.measuring", str(place), run.measured_with(), json.dumps(asked)],
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
