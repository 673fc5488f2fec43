"""`dcdm eval ppl`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from dcdm.commands.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    Progress,
    folders_exist,
    print_json,
    weights_dtype,
    whole_numbers,
)

if TYPE_CHECKING:
    from dcdm.evaluation.perplexity import Evaluation

EXAMPLES = (
    "dcdm eval ppl runs/first --data wikitext=wikitext2/test.txt",
    "dcdm eval ppl runs/first runs/second --data a.txt b.jsonl --estimator auto trajectory --markdown table.md",
)


def ppl(
    models: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL...")],
    data: Annotated[list[str], tyro.conf.arg(metavar="[NAME=]SOURCE...")],
    estimator: tuple[str, ...] = ("auto",),
    samples: int | Literal["all"] = 16,
    commit: tuple[str, ...] = ("chunk",),
    lanes: str = "",
    seed: int = 0,
    stride: int | None = None,
    length: int | None = None,
    separate: bool = False,
    limit: int | None = None,
    batch_size: int = 16,
    field: str = "text",
    split: Literal["train", "validation"] = "validation",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "fp32",
    json: JsonOption = False,
    csv: Path | None = None,
    markdown: Path | None = None,
) -> None:
    """Perplexity of models on corpora, in one table.

    Under torchrun, processes share the work: torchrun --nproc-per-node 8 -m dcdm eval ppl …

    Args:
        models: Run folders, checkpoints in them, exported folders, or names that `dcdm models` lists.
        data: Files (.txt, .jsonl, .jsonl.gz, .parquet, .arrow), folders, patterns, hub data sets, folders of
            `dcdm data prepare`, or stdlib and stdlib-code (their held-out files). The names ptb, wikitext, lm1b,
            lambada, ag_news, pubmed and arxiv choose how a corpus is detokenised.
        estimator: auto (a valid one for the model's kind), exact, bound, sequential, surrogate, trajectory or
            drafted.
        samples: Mask sets drawn per window (per chunk for sequential), or all of them; acceptance
            patterns for drafted.
        commit: For trajectory of models with masks: decoders as in dcdm sample, each a line of the table (chunk:
            one forward per chunk; steps:2, dilated:4, …).
        lanes: For models that write in lanes: numbers of lanes to score them with, as in 1,2,4,8 (default: those
            that each was trained with).
        seed: Seed of the draws.
        stride: Slide windows by so many tokens: only those count, and the earlier part of the window is visible
            (default: windows that share nothing).
        length: Positions of a window (default: the model's context length).
        separate: Put every document into windows of its own, instead of joining them by EOS as in training.
        limit: At most so many windows of each corpus, spread evenly over it.
        batch_size: Windows of one pass; it does not change the result.
        field: Field of a row that holds its text.
        split: Of packed shards, and of stdlib and stdlib-code.
        csv: Write a line per model, corpus and estimator to this file.
        markdown: Write the table to this file.
    """
    from dcdm.distributed import init_distributed, shutdown
    from dcdm.evaluation.corpora import WindowSettings, read_corpora
    from dcdm.evaluation.perplexity import EstimatorSettings, evaluate_perplexity

    folders_exist(csv=csv, markdown=markdown)
    sampling = EstimatorSettings(samples, seed, batch_size, whole_numbers("lanes", lanes), commit)
    window = WindowSettings(stride, separate, length, limit)
    corpora = read_corpora(data, field, split)
    world = init_distributed(device)
    try:
        weights = weights_dtype(dtype, world.device)
        with Progress("windows", shown=world.is_main) as progress:
            result = evaluate_perplexity(
                models, corpora, estimator, sampling, window, world=world, dtype=weights, say=progress.start
            )
        if world.is_main:
            _publish(result, json, csv, markdown)
    finally:
        shutdown(world)


def _publish(result: Evaluation, json: bool, csv: Path | None, markdown: Path | None) -> None:
    from dcdm.files import write_whole
    from dcdm.viewing import tables

    if json:
        print_json(result.to_dict())
    else:
        tables.perplexity_table(result).print(caption=tables.LEGEND)
    if csv is not None:
        write_whole(csv, tables.to_csv(result).encode())
    if markdown is not None:
        write_whole(markdown, tables.to_markdown(result).encode())
