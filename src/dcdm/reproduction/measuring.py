"""The figures of a run of a study: a process of its own measures each, once it is trained."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcdm.files import digest, write_whole

if TYPE_CHECKING:
    from dcdm.config import ModelConfig
    from dcdm.data.store import PreparedData
    from dcdm.evaluation.windows import WindowBatch
    from dcdm.likelihood.estimators import Score

CURVE, FREQUENCIES, TEXT = "curve", "frequencies", "text"


def routed(commit: str) -> tuple[Any, str]:
    """Routing and commit policy of an entry of `commits`."""
    routing, _, policy = commit.rpartition(" ")
    return routing or "auto", policy


def measure(
    folder: Path, windows: int, samples: int, lanes: Sequence[int], commits: Sequence[str], drafts: Sequence[int],
    corpora: Mapping[str, str],
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Nats per token of a finished run on held-out windows: name → estimator, mean, forwards, nats by window.

    `valid` is the kind's valid estimator; `chunk` the exact likelihood at one forward per chunk, for kinds whose
    valid figure is a bound, and others those of `commits`; `S lanes` exact likelihoods, `S lanes, D drafts` bounds
    at one pace drawn for each window; `surrogate` is not a bound; those of other texts begin with the text's name.
    The first figure also holds the valid ones while training, if there were any, what the frequencies of single
    tokens in the training text would give, and what names each text.
    """
    import torch

    from dcdm.decoding.config import adablock_of
    from dcdm.distributed import World
    from dcdm.evaluation.corpora import ReadingSettings, read_corpus, tokenise
    from dcdm.evaluation.studies import balance_of
    from dcdm.evaluation.windows import CorpusWindows, WindowBatch, WindowSettings
    from dcdm.io.load import load_model
    from dcdm.keys import Key
    from dcdm.likelihood.estimators import score
    from dcdm.training.fingerprints import SETTINGS
    from dcdm.training.metrics import read_rows
    from dcdm.training.run import open_data
    from dcdm.training.settings import read

    config, (model, tokenizer) = read(folder / SETTINGS), load_model(folder)
    data = open_data(config, World())
    texts = data.dataset("validation", config.window, config.data.overlong)
    chosen = Key(0).fold("study").permutation(len(texts))[:windows].sort().values
    items = [texts[number] for number in chosen.tolist()]
    tokens, prompt = (torch.stack([item[name] for item in items]) for name in ("tokens", "prompt"))
    asked = asked_figures(model.config, lanes, commits, drafts)
    for options in asked.values():
        if options.get("routing") == "adablock":
            options["adablock"] = adablock_of(model.config, tokenizer)

    def figure(text: WindowBatch, options: Mapping[str, Any]) -> dict[str, Any]:
        found = score(model, text.tokens, prompt=text.prompt, index=text.index, **{"samples": samples, **options})
        forwards = _forwards(found)
        if model.config.predicts_from_left and found.estimator == "exact":
            ids = model.partition(text.tokens, text.prompt, text.index, options.get("lanes")).ids
            forwards = float(ids.amax(dim=-1).double().mean())
        error = found.per_token_stderr
        return {
            "estimator": found.estimator, "nats_per_token": found.per_token,
            "monte_carlo": None if math.isnan(error) else error,
            "tokens": int(found.tokens.sum()), "forwards": forwards,
            "nats": [round(value, 4) for value in found.nats.tolist()],
        }  # fmt: skip

    held_out = WindowBatch(tokens, prompt, chosen, torch.full_like(tokens, -1))
    figures = {name: figure(held_out, options) for name, options in asked.items()}
    evaluated = [row for row in read_rows(folder / "metrics.jsonl") if "evaluation" in row]
    main = next(iter(figures.values()))
    main[FREQUENCIES] = round(frequencies(data, held_out), 4)
    if curve := [[row["step"], round(row["evaluation"]["valid_nll"], 5)] for row in evaluated]:
        main[CURVE] = curve
    if model.config.kind == "dcdm":
        figures["valid"]["max_violation"] = balance_of(model, [held_out]).violation
    texts_read = {
        "": digest([data.content_fingerprint, tokenizer.fingerprint, chosen.tolist(), config.window])[:16]
    }
    for corpus, path in corpora.items():
        read_in = read_corpus(f"{corpus}={path}", ReadingSettings())
        texts_read[corpus] = read_in.fingerprint[:16]
        cut = CorpusWindows(tokenise(read_in, tokenizer), tokenizer, config.window, WindowSettings(limit=windows))
        text = next(cut.batches(windows))  # whole windows; what is left of the text at its end comes later
        figures |= {f"{corpus}: {name}": figure(text, asked[name]) for name in on_every_text(asked)}
    main[TEXT] = texts_read
    return figures


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


def same_texts(runs: Collection[Mapping[str, Any]]) -> bool:
    """Whether runs were trained and measured on the same texts, as far as their figures tell.

    Old results tell nothing, and a text that only one was measured on does not matter.
    """
    told: dict[str, str] = {}
    for figures in runs:
        texts: Mapping[str, str] = next((figure[TEXT] for figure in figures.values() if TEXT in figure), {})
        if any(told.setdefault(name, text) != text for name, text in texts.items()):
            return False
    return True


def frequencies(data: PreparedData, text: WindowBatch) -> float:
    """Nats per token under the training text's counts of single tokens, each counted once more."""
    import numpy as np
    import torch

    stream, tokenizer = data.stream("train"), data.tokenizer
    counts = np.bincount(stream.read(0, len(stream)), minlength=data.vocab_size) + 1.0
    counts[[tokenizer.bos_id, tokenizer.pad_id, tokenizer.mask_id]] = 0
    free = ~text.prompt & (text.tokens != tokenizer.pad_id) & (text.tokens != tokenizer.bos_id)
    return float(-torch.from_numpy(np.log(counts[text.tokens[free].numpy()] / counts.sum())).mean())


def curve_of(figures: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Step → valid figure of held-out text while a run was trained, from its figures."""
    return [(step, nll) for figure in figures.values() for step, nll in figure.get(CURVE, ())]


def _forwards(found: Score) -> float | None:
    """Forwards of the decoder per window, where the figure is the exact likelihood of one; of AR a token each."""
    if found.estimator in ("trajectory", "drafted"):
        return float(found.forwards.double().mean())
    return float(found.tokens.double().mean()) if found.estimator == "exact" else None


def measure_into(text: str) -> None:
    """Entry of the process that measures one run: its folder and settings as JSON."""
    folder, *how, measured_with = json.loads(text)
    figures = measure(Path(folder), *how)
    write_whole(
        Path(folder) / "figures.json",
        json.dumps({"measured_with": measured_with, "figures": figures}).encode() + b"\n",
    )


if __name__ == "__main__":
    measure_into(sys.argv[1])
