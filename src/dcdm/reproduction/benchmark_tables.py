"""The tables of benchmarks: accuracies, likelihoods of answers, and how answers were decoded."""

from __future__ import annotations

from dcdm.reproduction.grid import NONE, Grid, shown
from dcdm.reproduction.reading import Path_, Results, interval
from dcdm.reproduction.variants import TUNED


def _tuned(results: Results) -> list[str]:
    return [f"{name}-tuned" for name in TUNED if results.seeds(f"{name}-tuned")]


def downstream(results: Results) -> Grid:
    """Accuracies over seeds, and the likelihood of answers."""
    names = _tuned(results)
    tasks: dict[tuple[str, str], dict[str, list[float]]] = {}
    chances: dict[tuple[str, str], float] = {}
    for name in names:
        for seed in results.seeds(name):
            for task, lines in (results.figure(name, seed, ("tasks", "choices")) or {}).items():
                for line in lines:
                    if line["metric"] != "acc":
                        continue
                    key = (task, line.get("task", task))
                    tasks.setdefault(key, {}).setdefault(name, []).append(100 * line["value"])
                    chances[key] = 100 * line["chance"]
    rows = [
        (task if own == task else own, *(shown(interval(values.get(name, [])), 1) for name in names),
         f"{chances[task, own]:.1f}")
        for (task, own), values in tasks.items()
    ]  # fmt: skip
    for task in ("gsm8k", "math", "humaneval"):
        path: Path_ = ("tasks", "answers", task, "valid")
        label = f"{task}, nats per token of the answer" + ("" if task == "gsm8k" else ", not adapted")
        cells = [shown(results.mean(name, path)) for name in names]
        if any(cell != NONE for cell in cells):
            rows.append((label, *cells, NONE))
    right = [_right(results, name) for name in names]
    if any(cell != NONE for cell in right):
        rows.append(("gsm8k, right answers", *right, NONE))
    note = "Accuracies in per cent with 95 % intervals over seeds; the questions are few."
    return Grid("Benchmarks", ("benchmark", *(name.removesuffix("-tuned") for name in names), "chance"), rows, note)


def _right(results: Results, name: str) -> str:
    found = [results.figure(name, seed, ("tasks", "exact_match", "gsm8k", "auto")) for seed in results.seeds(name)]
    there = [one for one in found if one]
    return f"{sum(one['right'] for one in there)} of {sum(one['of'] for one in there)}" if there else NONE


def adaptive(results: Results) -> Grid:
    rows = []
    for name in _tuned(results):
        seed = results.seeds(name)[0]
        for task in ("gsm8k", "math", "humaneval"):
            decoders = results.figure(name, seed, ("tasks", "answers", task, "decoders")) or {}
            for decoder in decoders:
                path: Path_ = ("tasks", "answers", task, "decoders", decoder)
                forwards = results.mean(name, path, "forwards_per_token")
                rows.append((name.removesuffix("-tuned"), task, decoder, NONE if forwards is None else
                             f"{forwards.mean:.2f}", shown(results.mean(name, path))))  # fmt: skip
    header = ("model", "benchmark", "decoder", "forwards per token", "nats per token of the answer")
    return Grid("Blocks chosen in decoding", header, rows)
