"""`dcdm eval ppl` and `dcdm eval tasks`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from dcdm.commands.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    at_least_one,
    print_json,
    whole_numbers,
)
from dcdm.config import ConfigError, assignments

PPL_EXAMPLES = (
    "dcdm eval ppl runs/first --data wikitext=wikitext2/test.txt",
    "dcdm eval ppl runs/first runs/second --data a.txt b.jsonl --estimator auto trajectory",
)
TASKS_EXAMPLES = (
    "dcdm eval tasks runs/first --tasks piqa --data-dir tasks --limit 20",
    "dcdm eval tasks runs/mdlm runs/bdlm runs/dcdm --data-dir tasks",
)


# --- perplexity --------------------------------------------------------------------------------------------------


def ppl(
    models: Annotated[list[str], Positional, arg(metavar="MODEL...")],
    data: Annotated[list[str], arg(metavar="[NAME=]SOURCE...")],
    estimator: tuple[str, ...] = ("auto",),
    samples: int | Literal["all"] = 16,
    commit: str = "chunk",
    lanes: str = "",
    seed: int = 0,
    stride: int | None = None,
    length: int | None = None,
    per_document: bool = False,
    limit: int | None = None,
    batch_size: int = 16,
    field: str = "text",
    split: Literal["train", "validation"] = "validation",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "fp32",
    json: JsonOption = False,
) -> None:
    """Perplexity of models on corpora, in one table.

    Under torchrun, processes share the work: torchrun --nproc-per-node 8 -m dcdm eval ppl …

    Args:
        models: Run folders, checkpoints in them, exported folders, or names that `dcdm models` lists.
        data: Files (.txt, .jsonl, .jsonl.gz, .parquet, .arrow), folders, patterns, hub data sets, folders of
            `dcdm data prepare`, or stdlib, stdlib-code and addresses (what they hold out). The names ptb, wikitext,
            lm1b, lambada, ag_news, pubmed and arxiv choose how a corpus is detokenised.
        estimator: auto (a valid one for the model's kind), exact, bound, sequential, surrogate, trajectory or
            drafted.
        samples: Mask sets drawn per window (per chunk for sequential), or all of them; acceptance
            patterns for drafted.
        commit: For trajectory of models with masks: the decoder, as in dcdm sample (chunk: one forward pass per
            chunk; steps:2, dilated:4, …).
        lanes: For models that write in lanes: numbers of lanes to score them with, as in 1,2,4,8 (default: those
            that each was trained with).
        seed: Seed of the draws.
        stride: Slide windows by so many tokens: only those count, and the earlier part of the window is visible
            (default: windows that share nothing).
        length: Positions of a window (default: the model's context length).
        per_document: Put every document into windows of its own, instead of joining them by EOS as in training.
        limit: At most so many windows of each corpus, spread evenly over it.
        batch_size: Windows of one pass; it does not change the result.
        field: Field of a row that holds its text.
        split: Of packed shards, and of stdlib, stdlib-code and addresses.
    """
    from dcdm.distributed import init_distributed, shutdown
    from dcdm.evaluation.corpora import WindowSettings, read_corpora
    from dcdm.evaluation.perplexity import EstimatorSettings, evaluate_perplexity
    from dcdm.io.load import weights_type
    from dcdm.progress import ConsoleProgress
    from dcdm.viewing import tables

    drawing = EstimatorSettings(samples, seed, batch_size, whole_numbers("lanes", lanes), commit)
    window = WindowSettings(stride, per_document, length, limit)
    corpora = read_corpora(data, field, split)
    world = init_distributed(device)
    try:
        weights = weights_type(dtype, world.device)
        with ConsoleProgress(shown=world.is_main) as console:
            result = evaluate_perplexity(
                models, corpora, estimator, drawing, window, world=world, dtype=weights,
                say=lambda task: partial(console.progress, task, unit="windows"),
            )  # fmt: skip
    finally:
        shutdown(world)
    if not world.is_main:
        return
    if json:
        print_json(result.to_dict())
    else:
        tables.perplexity_table(result).print(caption=tables.LEGEND)


# --- benchmark tasks ---------------------------------------------------------------------------------------------


def tasks(
    models: Annotated[list[Path], Positional, arg(metavar="MODEL...")],
    tasks: tuple[str, ...] = ("all",),
    data_dir: Path | None = None,
    limit: int | None = None,
    samples: int = 16,
    commit: str = "auto",
    set: tuple[str, ...] = (),
    allow_code_execution: bool = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "fp32",
    json: JsonOption = False,
) -> None:
    """Run the paper's nine benchmarks by lm-evaluation-harness's task definitions; several models in one table.

    Under torchrun, processes share the work: torchrun --nproc-per-node 8 -m dcdm eval tasks …

    Tasks: arc_challenge, mmlu, hellaswag, truthfulqa, winogrande, piqa, math, gsm8k, humaneval, or all.

    Args:
        models: Run folders, checkpoints in them, exported folders, or names that `dcdm models` lists.
        tasks: Names, apart or joined by commas.
        data_dir: A folder with the tasks' files (gsm8k_test.jsonl …); nothing is fetched then.
        limit: Questions per task, and per subject of MMLU and MATH.
        samples: Mask draws per answer; short answers are summed exactly instead.
        commit: How generation fills in tokens, as in dcdm sample; chunk is the fastest.
        set: Other settings of the decoder, as in lanes=4 or routing=adablock, and estimator, seed (0), batch_size
            (16), max_length (tokens of context and answer together, by default the window of training) and
            max_gen_toks (tokens of an answer where the task sets no limit, 256).
        allow_code_execution: Run the programs that HumanEval's answers are, with limits.
    """
    from dcdm.distributed import init_distributed, shutdown
    from dcdm.evaluation.perplexity import names_of
    from dcdm.evaluation.tasks import choose
    from dcdm.viewing.tables import print_task, tasks_table

    at_least_one(limit=limit)
    names = [name for text in tasks for name in text.split(",") if name]
    chosen = choose(names, data_dir)
    if data_dir is not None:  # read by the packages when they are imported
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    world = init_distributed(device)
    loud = world.is_main and not json
    try:
        with _quiet():
            from dcdm.evaluation import harness
            from dcdm.evaluation.tasks import run_benchmark

            reports: dict[str, list[dict[str, Any]]] = {}
            made_with: list[dict[str, Any]] = []
            for name, model in names_of([str(one) for one in models]).items():
                lm = harness.HarnessModel(
                    pretrained=model, samples=samples, device=str(world.device), dtype=dtype, world=world,
                    **{"commit": commit} | assignments(set),
                )  # fmt: skip
                weights = lm.model.weights_type
                asked = {"model": model, "limit": limit, "batch_size": lm.batch_size, "dtype": weights}
                made_with.append(asked | lm.settings())
                if loud and len(models) > 1:
                    print(name)
                reports[name] = []
                for one in chosen:
                    reports[name].append(run_benchmark(lm, one, limit, allow_code_execution))
                    if loud:
                        print_task(reports[name][-1], first=len(reports[name]) == 1)
    finally:
        shutdown(world)
    if json and world.is_main:
        both = zip(made_with, reports.values(), strict=True)
        found = [{"settings": settings, "tasks": figures} for settings, figures in both]
        print_json(found[0] if len(found) == 1 else {"models": found})
    elif loud and len(models) > 1:
        print()
        tasks_table(reports).print(caption="percent; ±: standard error over questions; first metric of each task")


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
