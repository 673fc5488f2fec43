"""`dcdm eval tasks`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcdm.commands.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    assignments,
    at_least_one,
    compute_on,
    folders_exist,
    print_json,
)
from dcdm.config import ConfigError

if TYPE_CHECKING:
    from dcdm.evaluation.harness import HarnessModel
    from dcdm.evaluation.tasks import Chosen

EXAMPLES = ("dcdm eval tasks runs/first --tasks piqa --data-dir tasks --limit 20",)


def tasks(
    model: ModelArgument,
    tasks: tuple[str, ...] = ("all",),
    data_dir: Path | None = None,
    limit: int | None = None,
    num_fewshot: tuple[str, ...] = (),
    samples: int = 16,
    estimator: str = "auto",
    seed: int = 0,
    batch_size: int = 16,
    max_length: int | None = None,
    max_new_tokens: int = 256,
    commit: str = "auto",
    set: tuple[str, ...] = (),
    allow_code_execution: bool = False,
    use_cache: Path | None = None,
    items: Path | None = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "fp32",
    json: JsonOption = False,
) -> None:
    """Run the paper's nine benchmarks, by the lm-evaluation-harness's task definitions.

    Tasks: arc_challenge, mmlu, hellaswag, truthfulqa, winogrande, piqa, math, gsm8k, humaneval, or all.

    Args:
        tasks: Names, apart or joined by commas.
        data_dir: A folder with the tasks' files (gsm8k_test.jsonl …); nothing is fetched then.
        limit: Questions per task, and per subject of MMLU and MATH.
        num_fewshot: Other numbers of examples than the paper's, as in mmlu=5.
        samples: Mask draws per answer; short answers are summed exactly instead.
        estimator: auto takes the valid one of the model's kind.
        seed: Seed of the noise and of sampling.
        batch_size: Sequences of one pass; it changes no result.
        max_length: Tokens of context and answer together (default: the window of training).
        max_new_tokens: Tokens of an answer where the task sets no limit.
        commit: How generation fills in tokens, as in dcdm sample; chunk is the fastest.
        set: Other settings of the decoder, as in lanes=4 or routing=adablock.
        allow_code_execution: Run the programs that HumanEval's answers are, with limits.
        use_cache: Keep the model's answers in a data base of this name, and resume from it.
        items: Write a JSON line per question to this file, with the Monte-Carlo errors of its choices.
    """
    from dcdm.evaluation.tasks import choose
    from dcdm.files import write_whole
    from dcdm.viewing.tables import print_task

    at_least_one(limit=limit)
    folders_exist(items=items)
    names = [name for text in tasks for name in text.split(",") if name]
    chosen = choose(names, data_dir, _shots(num_fewshot))
    if data_dir is not None:  # read by the packages when they are imported
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    place, kind = compute_on(device, dtype)
    weights = str(kind).removeprefix("torch.")  # the harness takes PyTorch's names
    with _quiet():
        lm = _model(
            pretrained=model, samples=samples, seed=seed, estimator=estimator, batch_size=batch_size,
            max_length=max_length, max_gen_toks=max_new_tokens, device=str(place), dtype=weights,
            **{"commit": commit} | assignments(set),
        )  # fmt: skip
        cache = None if use_cache is None else use_cache.with_name(f"{use_cache.name}-{_fingerprint(lm)}.db")
        reports, questions = [], list[str]()
        for one in chosen:
            reports.append(_run(lm, one, limit, allow_code_execution, cache, questions))
            if items is not None:
                write_whole(items, "".join(questions).encode())
            if not json:
                print_task(reports[-1], first=len(reports) == 1)
    if json:
        asked = {"model": str(model), "limit": limit, "batch_size": batch_size, "dtype": weights}
        print_json({"settings": asked | _settings(lm), "tasks": reports})


def _shots(texts: tuple[str, ...]) -> dict[str, int]:
    shots = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not number.isdecimal():
            raise ConfigError(f"--num-fewshot {text}: write it as task=number")
        shots[name] = int(number)
    return shots


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The packages' own progress bars and warnings off: what matters stands in the report."""
    import logging

    try:
        import lm_eval.tasks  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing; pip install -e '.[eval]'") from error
    import datasets

    datasets.disable_progress_bars()
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
            yield
    finally:
        logger.setLevel(level)


def _model(**settings: Any) -> HarnessModel:
    from dcdm.evaluation.harness import HarnessModel

    return HarnessModel(**settings)


def _settings(lm: HarnessModel) -> dict[str, Any]:
    names = ("model_kind", "estimator", "estimator_label", "samples", "noise_seed", "max_length")
    info = lm.get_model_info()
    asked = {"max_new_tokens": lm.max_gen_toks, "window": lm.window, "add_bos_token": lm.add_bos_token}
    return {name: info[name] for name in names} | asked | asdict(lm.decoder)


def _fingerprint(lm: HarnessModel) -> str:
    """A name for what decides an answer; the harness's cache knows a request only."""
    import hashlib

    import torch

    from dcdm.files import digest

    weights = hashlib.sha256()
    for tensor in lm.model.state_dict().values():  # parameters, and buffers that training moves
        weights.update(tensor.reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest([lm.model.config.to_dict(), lm.text.fingerprint, weights.hexdigest(), _settings(lm)])[:16]


def _run(
    lm: HarnessModel, chosen: Chosen, limit: int | None, execute: bool, cache: Path | None, questions: list[str]
) -> dict[str, Any]:
    """One benchmark's report; its questions are added to those of the others."""
    from dcdm.evaluation.harness import RequestCounts
    from dcdm.evaluation.tasks import Loader, item_lines, run_tasks, task_figures

    started = time.perf_counter()
    lm.counts = RequestCounts()
    loader = Loader(chosen, execute)
    results = run_tasks(lm, loader.load(), limit, cache)
    notes = list(chosen.notes)
    if chosen.name == "humaneval":
        cut = {outcome.network for outcome in loader.outcomes if outcome.network is not None}
        notes.append(f"executed, network cut by {' or '.join(sorted(cut))}" if execute else "not executed")
    questions += item_lines(chosen.name, results)
    return {
        "task": chosen.name,
        "title": chosen.benchmark.title,
        "shots": chosen.shots,
        "split": chosen.split,
        "figures": [line for name in chosen.benchmark.tasks for line in task_figures(name, results)],
        "counts": asdict(lm.counts),
        "notes": notes,
        "seconds": round(time.perf_counter() - started, 1),
    }
