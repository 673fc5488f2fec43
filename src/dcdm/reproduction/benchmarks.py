"""Benchmarks of a fine-tuned run: choices and MATH by the weights it started from, GSM8K by its own.

Models of this size answer at chance, so the likelihood of the true answers stands beside: by the valid
estimator, and exactly under decoders, AdaBlock among them.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.config import adablock_of
from dcdm.decoding.engine import generate
from dcdm.evaluation.decoders import Row, padded
from dcdm.io.load import load_model
from dcdm.likelihood.estimators import Score, default_estimator, score
from dcdm.model.transformer import Model
from dcdm.reproduction.runs import Places, RunSpec

CHOICES = {"arc_challenge": 2.0, "hellaswag": 1.0, "winogrande": 2.0, "piqa": 2.0, "truthfulqa": 0.5, "mmlu": 0.0}
"""Benchmark: its share of the scale's questions; at least one, of MMLU from each subject."""
SAMPLES = 4
COMMITS = ("position", "steps:2")
ANSWERED = {
    "gsm8k": ("gsm8k_test.jsonl", "question", "answer"),
    "math": ("math_test.jsonl", "problem", "solution"),
    "humaneval": ("HumanEval.jsonl.gz", "prompt", "canonical_solution"),
}  # name: file, prompt, answer


def benchmarks(spec: RunSpec, places: Places) -> dict[str, Any]:
    """Figures of all benchmarks whose files are there."""
    assert spec.parent is not None
    folder, items = places.data / "tasks", spec.scale.task_items
    tuned, before = load_model(places.model(spec)), load_model(places.model(spec.parent))
    found: dict[str, Any] = {"choices": choices(places.model(spec.parent), folder, items), "answers": {}}
    for name, (file, prompt, answer) in ANSWERED.items():
        if (folder / file).is_file():
            model, tokenizer = tuned if name == "gsm8k" else before
            rows = answers(folder / file, prompt, answer, tokenizer, model.config.context_length, items // 2)
            about = {"tuned": name == "gsm8k", "items": len(rows)}
            found["answers"][name] = about | likelihoods(model, tokenizer, rows)
    if (folder / "gsm8k_test.jsonl").is_file():
        found["exact_match"] = {"gsm8k": exact_match(*tuned, folder / "gsm8k_test.jsonl", items // 2)}
    return found


def choices(model: Path, folder: Path, items: int) -> dict[str, Any]:
    """Accuracy on multiple choice, by the harness's definitions; {} where it is not installed."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    try:
        from dcdm.evaluation.harness import HarnessModel
    except ImportError:
        return {}
    from dcdm.evaluation.tasks import Loader, choose, evaluate
    from dcdm.evaluation.tasks_report import figures

    lm, found = HarnessModel(model, device="cpu", samples=SAMPLES), {}
    there = [name for name in CHOICES if list(folder.glob(f"{name}_*.jsonl"))]
    for chosen in choose(there, folder, {}) if there else ():
        limit = max(1, round(items * CHOICES[chosen.name]))
        with contextlib.redirect_stdout(io.StringIO()):
            results = evaluate(lm, Loader(chosen, False).load(), limit)
        lines = [line for name in chosen.benchmark.tasks for line in figures(name, results)]
        found[chosen.name] = [{key: line[key] for key in sorted(line)} for line in lines]
    return found


def answers(path: Path, prompt: str, answer: str, tokenizer: Tokenizer, length: int, count: int) -> list[Row]:
    """The first `count` examples that fit into a window, the prompt given."""
    rows: list[Row] = []
    for number, row in enumerate(_lines(path)):
        asked = [tokenizer.bos_id, *tokenizer.encode(row[prompt] + "\n")]
        whole = [*asked, *tokenizer.encode(row[answer]), tokenizer.eos_id]
        if len(whole) <= length:
            rows.append(Row(whole, len(asked), number))
        if len(rows) == count:
            break
    return rows


def likelihoods(model: Model, tokenizer: Tokenizer, rows: list[Row]) -> dict[str, Any]:
    """Nats per token of the true answers: the valid figure, and exactly for each decoder with its forwards."""
    if not rows:
        return {}
    tokens, prompt, index = padded(rows, tokenizer.pad_id, None)
    kinds: list[tuple[str, str, dict[str, Any]]] = [("", commit, {}) for commit in COMMITS]
    if model.config.kind in ("mdlm", "bdlm"):
        ada = {"routing": "adablock", "adablock": adablock_of(model.config, tokenizer)}
        kinds += [("adablock ", commit, ada) for commit in COMMITS]
    valid = score(model, tokens, default_estimator(model), SAMPLES, prompt=prompt, index=index)
    found: dict[str, Any] = {"valid": _per_token(valid, rows), "decoders": {}}
    for prefix, commit, how in kinds:
        one = score(model, tokens, "trajectory", prompt=prompt, index=index, commit=commit, **how)
        forwards = float(one.forwards.sum() / one.tokens.sum())
        found["decoders"][prefix + commit] = {"forwards_per_token": round(forwards, 4), **_per_token(one, rows)}
    return found


def _per_token(one: Score, rows: list[Row]) -> dict[str, Any]:
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
    found = {}
    for name in ("auto", "adablock") if model.config.kind in ("mdlm", "bdlm") else ("auto",):
        done = generate(
            model, prompts, tokenizer=tokenizer, max_new_tokens=room, routing=name, commit="threshold:0.9",
            temperature=0.0,
        )  # fmt: skip
        right = [number(text) == number(row["answer"]) for text, row in zip(done.texts, rows, strict=True)]
        found[name] = {"right": sum(right), "of": len(rows)}
    return found


def number(text: str) -> str | None:
    """What stands behind ####, without commas."""
    match = re.search(r"####\s*(-?[\d.,]+)", text)
    return match[1].replace(",", "").rstrip(".") if match else None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for line in text.splitlines():
        yield json.loads(line)
