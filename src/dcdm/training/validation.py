"""Evaluation during training: an estimator valid for the model's kind, on the validation split, over all ranks."""

from __future__ import annotations

import torch

from dcdm.data.loader import WindowSet, in_order
from dcdm.distributed import World, gather_objects
from dcdm.likelihood.estimators import Estimator, default_estimator, score
from dcdm.likelihood.statistics import known, mean_and_stderr
from dcdm.model.transformer import Model
from dcdm.training.fsdp import unsharded

MAIN = "valid_nll"


def evaluate(
    model: Model, dataset: WindowSet, world: World, *, sequences: int, samples: int, batch_size: int = 16
) -> dict[str, float]:
    """Nats per token on `sequences` windows spread evenly over the data: `valid_nll` by the valid estimator with
    its standard error over windows (absent for a single one), and for DCDM with the paper's routing `surrogate_nll`
    beside it, which is not a bound; for a model that writes in lanes `lanes_S_nll` for each number S of its list.

    Neither batch size nor number of ranks changes the result.
    """
    names: list[tuple[str, Estimator, int | None]] = [(MAIN, default_estimator(model), None)]
    if model.config.routes_from_noise:
        names.append(("surrogate_nll", "surrogate", None))
    if model.config.lanes is not None:  # the default is one of them
        names = [(f"lanes_{lanes}_nll", "exact", lanes) for lanes in model.config.lanes]
    figures: dict[str, float] = {}
    with unsharded(model), torch.no_grad():
        for name, estimator, lanes in names:
            mine = []
            for batch in in_order(dataset, batch_size, rank=world.rank, world=world.size, limit=sequences):
                tokens, prompt = batch["tokens"].to(world.device), batch["prompt"].to(world.device)
                result = score(model, tokens, estimator, samples, prompt=prompt, index=batch["index"], lanes=lanes)
                columns = (x.tolist() for x in (batch["index"], result.nats, result.tokens))
                mine += list(zip(*columns, strict=True))
            rows = sorted(row for part in gather_objects(mine, world) for row in part)
            figures[name], stderr = mean_and_stderr((nats, count) for _, nats, count in rows)
            if (error := known(stderr)) is not None:
                figures[f"{name}_stderr"] = error
    if model.config.lanes is not None:
        ours = f"lanes_{model.config.default_lanes}_nll"
        main = {name.replace(ours, MAIN): value for name, value in figures.items() if name.startswith(ours)}
        figures = main | figures
    return figures
