"""The figures of a run of a study: a process of its own measures each, once it is trained.

python -m dcdm.studies.measuring RUN MEASURED_WITH SETTINGS: a run folder, the name under which its figures are
kept, and the arguments of `measure` as JSON.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcdm.files import digest, write_whole
from dcdm.studies.study import asked_figures, on_every_text

if TYPE_CHECKING:
    from dcdm.data.store import PreparedData
    from dcdm.evaluation.corpora import WindowBatch
    from dcdm.model.transformer import Model

UNIGRAM = "frequencies"
"""The name of the unigram baseline in files of results."""


def measure(
    folder: Path, *, windows: int, samples: int, lanes: Sequence[int] = (), commits: Sequence[str] = (),
    drafts: Sequence[int] = (), corpora: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Nats per token of a finished run on held-out windows: name → estimator, mean, forward passes, nats by window.

    `valid` is the kind's valid estimator; `chunk` the exact likelihood at one forward pass per chunk, for kinds
    whose valid figure is a bound, and others those of `commits`; `S lanes` exact likelihoods, `S lanes, D drafts`
    bounds at one acceptance pattern drawn for each window; `surrogate` is not a bound; those of other texts begin
    with the text's name. The first figure also holds the valid ones while training, if there were any, the unigram
    baseline of the training text, and what names each text.
    """
    import torch

    from dcdm.decoding.config import adablock_of
    from dcdm.distributed import World
    from dcdm.evaluation.corpora import CorpusWindows, WindowBatch, WindowSettings, read_corpus, tokenise
    from dcdm.io.load import load_model
    from dcdm.keys import Key
    from dcdm.training.checkpoint_folder import SETTINGS
    from dcdm.training.metrics import read_rows
    from dcdm.training.run import open_data
    from dcdm.training.settings import read

    config, (model, tokenizer) = read(folder / SETTINGS), load_model(folder)
    data = open_data(config, World())
    texts = data.dataset("validation", config.window, config.data.overlong)
    chosen = Key(0).fold("study").permutation(len(texts))[:windows].sort().values
    items = [texts[number] for number in chosen.tolist()]
    tokens, prompt = (torch.stack([item[name] for item in items]) for name in ("tokens", "prompt"))
    held_out = WindowBatch(tokens, prompt, chosen, torch.full_like(tokens, -1))
    asked = asked_figures(model.config, lanes, commits, drafts)
    for options in asked.values():
        if options.get("routing") == "adablock":
            options["adablock"] = adablock_of(model.config, tokenizer)
    figures = {name: _figure(model, held_out, {"samples": samples, **options}) for name, options in asked.items()}
    main = next(iter(figures.values()))
    main[UNIGRAM] = round(unigram_baseline(data, held_out), 4)
    evaluated = [row for row in read_rows(folder / "metrics.jsonl") if "evaluation" in row]
    if curve := [[row["step"], round(row["evaluation"]["valid_nll"], 5)] for row in evaluated]:
        main["curve"] = curve
        main["balance"] = _balance(read_rows(folder / "metrics.jsonl"), [step for step, _ in curve])
    if model.config.kind == "dcdm":
        figures["valid"]["max_violation"] = _max_violation(model, held_out)
    main["text"] = {
        "": digest([data.content_fingerprint, tokenizer.fingerprint, chosen.tolist(), config.window])[:16]
    }
    for corpus, path in (corpora or {}).items():
        read_in = read_corpus(f"{corpus}={path}")
        main["text"][corpus] = read_in.fingerprint[:16]
        cut = CorpusWindows(tokenise(read_in, tokenizer), tokenizer, config.window, WindowSettings(limit=windows))
        text = next(cut.batches(windows))  # whole windows; what is left of the text at its end comes later
        for name in on_every_text(asked):
            figures[f"{corpus}: {name}"] = _figure(model, text, {"samples": samples, **asked[name]})
    return figures


def _figure(model: Model, text: WindowBatch, options: Mapping[str, Any]) -> dict[str, Any]:
    """Nats per token of the windows, and the forward passes of a decoder where the figure is its likelihood."""
    from dcdm.likelihood.estimators import score

    found = score(model, text.tokens, prompt=text.prompt, index=text.index, **options)
    forwards = None
    if found.estimator in ("trajectory", "drafted"):
        forwards = found.forwards
    elif found.estimator == "exact" and model.config.predicts_from_left:
        forwards = model.partition(text.tokens, text.prompt, text.index, options.get("lanes")).ids.amax(dim=-1)
    elif found.estimator == "exact":
        forwards = found.tokens  # of AR, one each
    error = found.per_token_stderr
    return {
        "estimator": found.estimator, "nats_per_token": found.per_token,
        "monte_carlo": None if math.isnan(error) else error, "tokens": int(found.tokens.sum()),
        "forwards": None if forwards is None else float(forwards.double().mean()),
        "nats": [round(value, 4) for value in found.nats.tolist()],
    }  # fmt: skip


def unigram_baseline(data: PreparedData, text: WindowBatch) -> float:
    """Nats per token under the training text's counts of single tokens, each counted once more."""
    import numpy as np
    import torch

    stream, tokenizer = data.stream("train"), data.tokenizer
    counts = np.bincount(stream.read(0, len(stream)), minlength=data.vocab_size) + 1.0
    counts[[tokenizer.bos_id, tokenizer.pad_id, tokenizer.mask_id]] = 0
    free = ~text.prompt & (text.tokens != tokenizer.pad_id) & (text.tokens != tokenizer.bos_id)
    return float(-torch.from_numpy(np.log(counts[text.tokens[free].numpy()] / counts.sum())).mean())


def _balance(rows: Iterable[Mapping[str, Any]], steps: Sequence[int]) -> list[list[float]]:
    """MaxVio of training batches, mean over the steps up to each of `steps`; [] where there are no chunks."""
    values: dict[int, list[float]] = {}
    for row in rows:
        if "max_violation" in row and (end := next((step for step in steps if step >= row["step"]), None)):
            values.setdefault(end, []).append(row["max_violation"])
    return [[step, round(math.fsum(found) / len(found), 4)] for step, found in values.items()]


def _max_violation(model: Model, text: WindowBatch) -> float:
    """MaxVio of a DCDM's chunks over all windows; with the paper's routing, at half of the tokens masked."""
    import torch

    from dcdm.keys import Key
    from dcdm.model.chunking import chunk_counts, max_violation

    assert model.config.num_chunks is not None
    free = model.position_masks(text.tokens, text.prompt).free
    with torch.no_grad():
        if model.config.routes_from_noise:
            masked = (Key(0).uniform(*text.tokens.shape) < 0.5) & free
            ids = model.encode(text.tokens, masked, prompt=text.prompt).chunk_ids
            assert ids is not None
        else:
            ids = model.partition(text.tokens, text.prompt, text.index).ids
    return float(max_violation(chunk_counts(ids, free, model.config.num_chunks).sum(dim=0)))


def write_figures(folder: Path, measured_with: str, figures: Mapping[str, Any]) -> None:
    """Keep a run's figures beside its weights, with a checksum."""
    plain = json.loads(json.dumps(figures))
    content = {"measured_with": measured_with, "sha256": digest(plain), "figures": plain}
    write_whole(folder / "figures.json", json.dumps(content).encode() + b"\n")


if __name__ == "__main__":
    run, measured_with, settings = sys.argv[1:]
    write_figures(Path(run), measured_with, measure(Path(run), **json.loads(settings)))
