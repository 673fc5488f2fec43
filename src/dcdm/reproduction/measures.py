"""What is measured of a finished run, from its weights and its metrics; each measure is one function.

Figures of text are kept window by window (nats, in the order of the corpus), so that two models can be compared on
the same windows. Models of this size answer benchmarks at chance, so the likelihood of the true answers stands
beside accuracies: by the valid estimator, and exactly under decoders, AdaBlock among them.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dcdm.config import ModelConfig
from dcdm.data.store import PreparedData
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.config import DecodingConfig, adablock_of
from dcdm.decoding.engine import generate
from dcdm.evaluation.corpora import ReadingSettings, Tokens, read_corpus, tokenise
from dcdm.evaluation.decoders import Continuation, padded, score_under_decoder
from dcdm.evaluation.studies import balance_of, chunk_ids, training_of
from dcdm.evaluation.windows import CorpusWindows, WindowBatch, WindowSettings
from dcdm.io.load import load_model
from dcdm.likelihood.estimators import DRAWN, Estimator, Score, default_estimator, score
from dcdm.model.transformer import Model
from dcdm.reproduction.results import Places
from dcdm.reproduction.scale import FORWARDS_PER_TOKEN, TEST, ZERO_SHOT, Scale
from dcdm.reproduction.variants import RunSpec
from dcdm.viewing.plots import averaged_points

POINTS = 40  # of a training curve
DIGITS = 5

Measure = Callable[[RunSpec, Places], dict[str, Any]]


def measure_run(name: str, spec: RunSpec, places: Places) -> dict[str, Any]:
    """The figures of the measure `name`."""
    return MEASURES[name](spec, places)


def curve(spec: RunSpec, places: Places) -> dict[str, Any]:
    """Training loss and MaxVio in averaged points, validation by the valid estimator: (tokens, value …)."""
    record = training_of(places.run(spec))
    assert record is not None
    return {
        "training": _rounded(averaged_points(record.loss, POINTS)),
        "violation": _rounded(averaged_points(record.violation, POINTS)),
        "validation": _rounded(record.valid),
        "windows": spec.scale.curve_windows,
        "samples": spec.scale.curve_samples,
    }


def heldout(spec: RunSpec, places: Places) -> dict[str, Any]:
    """WikiText-2's test text: the valid figure, one forward per chunk, and the surrogate where there is one."""
    model, _ = _model(places.model(spec))
    scale, samples = spec.scale, spec.scale.heldout_samples
    batches = _test(spec, places)
    if not model.config.routes_from_noise:
        figures = {"valid": _scored(model, batches, default_estimator(model), samples)}
    else:
        figures = {
            "valid": _scored(model, batches, "sequential", scale.sequential_samples),
            "surrogate": _scored(model, batches, "surrogate", samples),
        }
    if model.config.kind != "ar":
        figures["chunk"] = _scored(model, batches, "trajectory", 1)
    return figures


def zeroshot(spec: RunSpec, places: Places) -> dict[str, Any]:
    """The valid figure (and the surrogate where there is one) on texts of other kinds."""
    model, _ = _model(places.model(spec))
    scale, figures = spec.scale, {}
    for name, path in ZERO_SHOT.items():
        batches = text(places.data / path, name, places.model(spec), scale.zeroshot_windows)
        noisy = model.config.routes_from_noise
        samples = scale.sequential_samples if noisy else scale.heldout_samples
        figures[name] = {"valid": _scored(model, batches, default_estimator(model), samples)}
        if noisy:
            figures[name]["surrogate"] = _scored(model, batches, "surrogate", scale.heldout_samples)
    return figures


def frontier(spec: RunSpec, places: Places) -> dict[str, Any]:
    """Exact trajectory likelihood at given forwards per token, most confident positions first."""
    model, batches = _for_decoding(spec, places)
    figures: dict[str, Any] = {}
    if model.config.kind != "ar":
        figures["chunk"] = {"commit": "chunk", **_decoded(model, batches, "chunk")}
    chunks = figures["chunk"]["forwards"] if model.config.routes_from_noise else None
    for share in FORWARDS_PER_TOKEN:
        if (commit := commit_for(model.config, share, chunks)) is not None:
            figures[f"{share:g}"] = {"commit": commit, **_decoded(model, batches, commit)}
    return figures


def policies(spec: RunSpec, places: Places) -> dict[str, Any]:
    """The same, on half of the windows, for decoders that choose their number of forwards themselves."""
    model, _ = _model(places.model(spec))
    batches = _test(spec, places, max(1, spec.scale.frontier_windows // 2))
    if model.config.kind == "ar":
        return {}
    figures = {}
    for commit in ("threshold:0.9", "threshold:0.5"):
        figures[commit] = _decoded(model, batches, commit)
    if model.config.kind in ("mdlm", "bdlm"):
        _, tokenizer = _model(places.model(spec))
        ada = adablock_of(model.config, tokenizer)
        for commit in ("threshold:0.5", "steps:2", "steps:4"):
            figures[f"adablock {commit}"] = _decoded(model, batches, commit, routing="adablock", adablock=ada)
    return figures


def balance(spec: RunSpec, places: Places) -> dict[str, Any]:
    """How evenly chunks are filled on the test text; empty for models without chunks."""
    model, _ = _model(places.model(spec))
    if model.config.kind != "dcdm":
        return {}
    filled = balance_of(model, _test(spec, places).batches)
    return {
        "sizes": filled.sizes, "violation": round(filled.violation, DIGITS),
        "window_violation": round(filled.window_violation, DIGITS), "windows": filled.windows,
    }  # fmt: skip


def contents(spec: RunSpec, places: Places) -> dict[str, Any]:
    """What stands in the chunks of the test text; empty for models without chunks."""
    model, tokenizer = _model(places.model(spec))
    if model.config.kind != "dcdm":
        return {}
    return chunk_contents(model, tokenizer, _test(spec, places).batches)


def tasks(spec: RunSpec, places: Places) -> dict[str, Any]:
    """Of a fine-tuned run, benchmarks whose files are at hand: GSM8K by its own weights, others by those it
    began with."""
    assert spec.parent is not None
    folder, items = places.data / "tasks", spec.scale.task_items
    tuned, before = load_model(places.model(spec)), load_model(places.model(spec.parent))
    figures: dict[str, Any] = {"choices": choices(places.model(spec.parent), folder, items), "answers": {}}
    for name, (file, prompt, answer) in ANSWERED.items():
        if (folder / file).is_file():
            model, tokenizer = tuned if name == "gsm8k" else before
            rows = answers(folder / file, prompt, answer, tokenizer, model.config.context_length, items // 2)
            about = {"tuned": name == "gsm8k", "items": len(rows)}
            figures["answers"][name] = about | likelihoods(model, tokenizer, rows)
    if (folder / "gsm8k_test.jsonl").is_file():
        figures["exact_match"] = {"gsm8k": exact_match(*tuned, folder / "gsm8k_test.jsonl", items // 2)}
    return figures


MEASURES: dict[str, Measure] = {
    "curve": curve, "heldout": heldout, "zeroshot": zeroshot, "frontier": frontier, "policies": policies,
    "balance": balance, "contents": contents, "tasks": tasks,
}  # fmt: skip


# --- windows of a text -------------------------------------------------------------------------------------------


def commit_for(config: ModelConfig, share: float, chunks: float | None = None) -> str | None:
    """The commit policy with at most `share` forwards per token; None where the kind cannot be that fast.

    `chunks` says how many a window really has, where that follows from content.
    """
    if share == 1:
        return "position"
    if config.kind == "ar":
        return None
    forwards = round(share * config.context_length)
    steps = int(forwards // (config.num_groups(config.context_length) if chunks is None else chunks))
    return None if steps == 0 else "chunk" if steps == 1 else f"steps:{steps}"


@lru_cache(maxsize=2)
def _model(folder: Path) -> tuple[Model, Tokenizer]:
    return load_model(folder)


@dataclass(frozen=True)
class TextWindows:
    """Windows of a corpus in batches."""

    batches: list[WindowBatch]
    corpus: Tokens

    def bytes_of(self, batch: WindowBatch, row: int) -> float:
        place = batch.place[row]
        return float(self.corpus.size[place[place >= 0].numpy()].sum())


@lru_cache(maxsize=16)
def text(source: Path, name: str, model: Path, limit: int, few: int | None = None) -> TextWindows:
    """`limit` windows spread over a corpus, or of these only `few`, again spread."""
    network, tokenizer = _model(model)
    return windows(source, name, tokenizer, network.config.context_length, limit, few)


def windows(
    source: Path, name: str, tokenizer: Tokenizer, length: int, limit: int, few: int | None = None
) -> TextWindows:
    """The same for a tokenizer and a length."""
    corpus = tokenise(read_corpus(f"{name}={source}", ReadingSettings()), tokenizer)
    cut = CorpusWindows(corpus, tokenizer, length, WindowSettings(limit=limit))
    if few is not None:
        cut.chosen = cut.chosen[np.arange(few) * len(cut.chosen) // few]
    return TextWindows(list(cut.batches(8)), corpus)


def _test(spec: RunSpec, places: Places, few: int | None = None) -> TextWindows:
    return text(places.data / TEST, "wikitext2", places.model(spec), spec.scale.heldout_windows, few)


def _for_decoding(spec: RunSpec, places: Places) -> tuple[Model, TextWindows]:
    return _model(places.model(spec))[0], _test(spec, places, spec.scale.frontier_windows)


def _scored(model: Model, held: TextWindows, estimator: Estimator, samples: int) -> dict[str, Any]:
    scores = [
        score(model, batch.tokens, estimator, samples, prompt=batch.prompt, index=batch.index)
        for batch in held.batches
    ]
    drawn = estimator in DRAWN
    return {
        "estimator": estimator,
        "samples": samples if drawn else None,
        **summed(held, [(one.nats.tolist(), one.tokens.tolist()) for one in scores]),
    }


def _decoded(model: Model, held: TextWindows, commit: str, **how: Any) -> dict[str, Any]:
    decoder = DecodingConfig(commit, **how)
    scores = [score_under_decoder(model, [batch], decoder) for batch in held.batches]
    forwards = [count for one in scores for count in one.forwards]
    mean = sum(forwards) / len(forwards)
    return {"forwards": round(mean, 2), **summed(held, [(one.nats, one.tokens) for one in scores])}


def summed(held: TextWindows, scores: Iterable[tuple[list[float], list[int]]]) -> dict[str, Any]:
    """Nats per token, bits per byte, and every window's nats, in the order of the corpus, from a batch's nats and
    tokens."""
    rows = []
    for batch, (nats_b, tokens_b) in zip(held.batches, scores, strict=True):
        for row, number in enumerate(batch.index.tolist()):
            rows.append((number, nats_b[row], tokens_b[row], held.bytes_of(batch, row)))
    rows.sort()
    nats, tokens, size = (math.fsum(row[at] for row in rows) for at in (1, 2, 3))
    return {
        "nats_per_token": round(nats / tokens, DIGITS), "bits_per_byte": round(nats / math.log(2) / size, DIGITS),
        "tokens": int(tokens), "bytes": round(size), "numbers": [row[0] for row in rows],
        "window_nats": [round(row[1], 2) for row in rows], "window_tokens": [row[2] for row in rows],
    }  # fmt: skip


def _rounded(points: Any) -> list[list[float]]:
    return [[round(value, DIGITS) for value in point] for point in points]


# --- frequencies of single tokens --------------------------------------------------------------------------------


def frequencies(scale: Scale, places: Places, data: PreparedData) -> Mapping[str, Any]:
    """Test text and texts of other kinds under the training text's counts, each token counted once more."""
    stream = data.stream("train")
    counts = np.bincount(stream.read(0, len(stream)), minlength=data.vocab_size) + 1.0
    tokenizer = data.tokenizer
    counts[[tokenizer.bos_id, tokenizer.pad_id, tokenizer.mask_id]] = 0
    nll_v = torch.from_numpy(-np.log(np.maximum(counts, 1e-300) / counts.sum()))

    def of(name: str, path: str, limit: int) -> dict[str, Any]:
        held = windows(places.data / path, name, tokenizer, scale.base.context_length, limit)
        frees = [batch.place >= 0 for batch in held.batches]
        nats = [(nll_v[batch.tokens] * free).sum(-1) for batch, free in zip(held.batches, frees, strict=True)]
        tokens = [free.sum(-1).tolist() for free in frees]
        return summed(held, zip([one.tolist() for one in nats], tokens, strict=True))

    return {
        "heldout": {"valid": of("wikitext2", TEST, scale.heldout_windows)},
        "zeroshot": {name: {"valid": of(name, path, scale.zeroshot_windows)} for name, path in ZERO_SHOT.items()},
    }


# --- what stands in chunks ---------------------------------------------------------------------------------------

CLASSES = ("word", "inside a word", "function word", "number", "punctuation", "line end")
FUNCTION = frozenset((
    "the", "of", "and", "to", "in", "a", "is", "was", "for", "on", "as", "by", "with", "at", "from", "that", "it",
    "his", "an", "were", "are", "be", "which", "had", "he", "has", "its", "or", "this",
))  # fmt: skip
PLACES = 16  # equal stretches of a window
MARKS = 6  # tokens named for each chunk
LEAST = 12  # times that such a token occurs


def chunk_contents(model: Model, tokenizer: Tokenizer, batches: Iterable[WindowBatch]) -> dict[str, Any]:
    """Counts over windows; under the paper's routing, with half of the tokens masked."""
    chunks = model.config.num_chunks
    assert chunks is not None
    kinds, places, tokens, overall = Counter(), Counter(), Counter(), Counter()  # type: ignore[var-annotated]
    together = pairs = 0
    for batch in batches:
        ids = chunk_ids(model, batch.tokens, batch.prompt, batch.index)
        assert ids is not None
        free = (batch.place >= 0).tolist()
        for row, (chunk, text) in enumerate(zip(ids.tolist(), batch.tokens.tolist(), strict=True)):
            names = token_classes(tokenizer.pieces(text))
            for at, (c, token, name) in enumerate(zip(chunk, text, names, strict=True)):
                if not free[row][at] or c < 1:
                    continue
                kinds[c, name] += 1
                places[c, at * PLACES // len(text)] += 1
                tokens[c, token] += 1
                overall[token] += 1
                if at + 1 < len(text) and free[row][at + 1]:
                    pairs += 1
                    together += chunk[at + 1] == c
    return {
        "classes": list(CLASSES),
        "counts": [[kinds[c, name] for name in CLASSES] for c in range(1, chunks + 1)],
        "neighbours_together": round(together / max(1, pairs), 4),
        "bits_about_class": round(information(kinds), 4),
        "bits_about_place": round(information(places), 4),
        "marks": [_marks(c, tokens, overall, tokenizer) for c in range(1, chunks + 1)],
    }


def token_classes(pieces: list[bytes]) -> list[str]:
    """The class of every token, given the bytes it stands for; a leading space begins a word."""
    names = []
    for piece in pieces:
        text = piece.decode("utf-8", "replace")
        word = text.strip()
        if "\n" in text:
            names.append("line end")
        elif re.fullmatch(r"[\d.,]*\d[\d.,]*", word):
            names.append("number")
        elif not any(letter.isalnum() for letter in word):
            names.append("punctuation")
        elif word.lower() in FUNCTION and text != word:
            names.append("function word")
        else:
            names.append("word" if text[:1].isspace() else "inside a word")
    return names


def information(counts: Counter[tuple[int, Any]]) -> float:
    """Bits that the first part of a pair and the second tell of each other."""
    total = sum(counts.values())
    left, right = Counter[Any](), Counter[Any]()
    for (a, b), count in counts.items():
        left[a] += count
        right[b] += count
    parts = (n / total * math.log2(n * total / (left[a] * right[b])) for (a, b), n in sorted(counts.items()) if n)
    return math.fsum(parts)


def _marks(
    chunk: int, tokens: Counter[tuple[int, int]], overall: Counter[int], tokenizer: Tokenizer
) -> list[tuple[str, float]]:
    """Tokens that stand in this chunk most, with the share of their occurrences that do."""
    shares = [(count / overall[token], count, token) for (c, token), count in tokens.items()
              if c == chunk and overall[token] >= LEAST]  # fmt: skip
    best = sorted(shares, key=lambda one: (-one[0], -one[1], one[2]))[:MARKS]
    return [(tokenizer.decode([token]), round(share, 3)) for share, _, token in best]


# --- benchmarks --------------------------------------------------------------------------------------------------

CHOICES = {"arc_challenge": 2.0, "hellaswag": 1.0, "winogrande": 2.0, "piqa": 2.0, "truthfulqa": 0.5, "mmlu": 0.0}
"""Benchmark: its share of the scale's questions; at least one, of MMLU from each subject."""
SAMPLES = 4
COMMITS = ("position", "steps:2")
ANSWERED = {
    "gsm8k": ("gsm8k_test.jsonl", "question", "answer"),
    "math": ("math_test.jsonl", "problem", "solution"),
    "humaneval": ("HumanEval.jsonl.gz", "prompt", "canonical_solution"),
}  # name: file, prompt, answer


def choices(model: Path, folder: Path, items: int) -> dict[str, Any]:
    """Accuracy on multiple choice, by the harness's definitions; {} where it is not installed."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    try:
        from dcdm.evaluation.harness import HarnessModel
    except ImportError:
        return {}
    from dcdm.evaluation.tasks import Loader, choose, evaluate, task_figures

    lm, figures = HarnessModel(model, device="cpu", samples=SAMPLES), {}
    at_hand = [name for name in CHOICES if list(folder.glob(f"{name}_*.jsonl"))]
    for chosen in choose(at_hand, folder, {}) if at_hand else ():
        limit = max(1, round(items * CHOICES[chosen.name]))
        with contextlib.redirect_stdout(io.StringIO()):
            results = evaluate(lm, Loader(chosen, False).load(), limit)
        lines = [line for name in chosen.benchmark.tasks for line in task_figures(name, results)]
        figures[chosen.name] = [{key: line[key] for key in sorted(line)} for line in lines]
    return figures


def answers(
    path: Path, prompt: str, answer: str, tokenizer: Tokenizer, length: int, count: int
) -> list[Continuation]:
    """The first `count` examples that fit into a window, the prompt given."""
    rows: list[Continuation] = []
    for number, row in enumerate(_lines(path)):
        asked = [tokenizer.bos_id, *tokenizer.encode(row[prompt] + "\n")]
        whole = [*asked, *tokenizer.encode(row[answer]), tokenizer.eos_id]
        if len(whole) <= length:
            rows.append(Continuation(whole, len(asked), number))
        if len(rows) == count:
            break
    return rows


def likelihoods(model: Model, tokenizer: Tokenizer, rows: list[Continuation]) -> dict[str, Any]:
    """Nats per token of the true answers: the valid figure, and exactly for each decoder with its forwards."""
    if not rows:
        return {}
    tokens, prompt, index = padded(rows, tokenizer.pad_id, None)
    kinds: list[tuple[str, str, dict[str, Any]]] = [("", commit, {}) for commit in COMMITS]
    if model.config.kind in ("mdlm", "bdlm"):
        ada = {"routing": "adablock", "adablock": adablock_of(model.config, tokenizer)}
        kinds += [("adablock ", commit, ada) for commit in COMMITS]
    valid = score(model, tokens, default_estimator(model), SAMPLES, prompt=prompt, index=index)
    figures: dict[str, Any] = {"valid": _per_token(valid, rows), "decoders": {}}
    for prefix, commit, how in kinds:
        one = score(model, tokens, "trajectory", prompt=prompt, index=index, commit=commit, **how)
        forwards = float(one.forwards.sum() / one.tokens.sum())
        figures["decoders"][prefix + commit] = {"forwards_per_token": round(forwards, 4), **_per_token(one, rows)}
    return figures


def _per_token(one: Score, rows: list[Continuation]) -> dict[str, Any]:
    """Figures in the form of those of windows: an answer is a window."""
    return {
        "nats_per_token": round(one.per_token, 5), "tokens": int(one.tokens.sum()),
        "numbers": [row.index for row in rows], "window_nats": [round(float(nats), 2) for nats in one.nats],
        "window_tokens": one.tokens.tolist(),
    }  # fmt: skip


def exact_match(model: Model, tokenizer: Tokenizer, path: Path, count: int) -> dict[str, Any]:
    """How many of the first questions get the right number behind `####`, own decoder and AdaBlock."""
    rows = [row for row, _ in zip(_lines(path), range(count), strict=False)]
    prompts = [[tokenizer.bos_id, *tokenizer.encode(row["question"] + "\n")] for row in rows]
    room = model.config.context_length // 2
    prompts = [[tokenizer.bos_id, *prompt[1:][-room + 1 :]] for prompt in prompts]
    figures = {}
    for name in ("auto", "adablock") if model.config.kind in ("mdlm", "bdlm") else ("auto",):
        done = generate(
            model, prompts, tokenizer=tokenizer, max_new_tokens=room, routing=name, commit="threshold:0.9",
            temperature=0.0,
        )  # fmt: skip
        right = [number(text) == number(row["answer"]) for text, row in zip(done.texts, rows, strict=True)]
        figures[name] = {"right": sum(right), "of": len(rows)}
    return figures


def number(text: str) -> str | None:
    """What stands behind ####, without commas."""
    match = re.search(r"####\s*(-?[\d.,]+)", text)
    return match[1].replace(",", "").rstrip(".") if match else None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for line in text.splitlines():
        yield json.loads(line)
