"""Figures of benchmark runs from the harness's results, and their table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

WITHIN_NOISE = 2.0  # a choice that leads by fewer standard errors than this may lead by chance
COLUMNS = {"task": 12, "shots": 5, "metric": 30, "value": 12, "chance": 6, "questions": 9, "noise": 13}


def figures(name: str, results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every metric of a task or group: its value, its standard error over questions, and the level of chance."""
    record = results["results"][name]
    leaves = _leaves(name, results)
    for key, value in record.items():
        metric, comma, kept = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        samples = [sample for leaf in leaves for sample in results["samples"][leaf] if sample["filter"] == kept]
        samples = samples or [sample for leaf in leaves for sample in results["samples"][leaf]]
        stderr = record.get(f"{metric}_stderr,{kept}")
        yield {
            "task": name,
            "metric": metric if kept in ("none", "create_test") else f"{metric} ({kept})",
            "value": value,
            "stderr": stderr if isinstance(stderr, float) else None,
            "chance": _chance(name, samples),
            "questions": len(samples),
            **_noise(samples),
        }


def _leaves(name: str, results: dict[str, Any]) -> list[str]:
    children = results.get("group_subtasks", {}).get(name, [])
    return [leaf for child in children for leaf in _leaves(child, results)] if children else [name]


def _is_choice(sample: dict[str, Any]) -> bool:
    return not isinstance(sample["resps"][0][0], str)


def _chance(name: str, samples: list[dict[str, Any]]) -> float:
    """What guessing gives: one in the number of choices, or, for mc2, the share of true ones; 0 for free text."""
    if not _is_choice(samples[0]):
        return 0.0
    if name == "truthfulqa_mc2":
        shares = [sum(s["doc"]["mc2_targets"]["labels"]) / len(s["resps"]) for s in samples]
    else:
        shares = [1 / len(s["resps"]) for s in samples]
    return sum(shares) / len(shares)


def _noise(samples: list[dict[str, Any]]) -> dict[str, float | None]:
    """Monte-Carlo error per choice in nats, and the share of questions whose best choice leads within it."""
    if not _is_choice(samples[0]):
        return {"monte_carlo_stderr": None, "within_noise": None}
    choices = [[answer[0][0] for answer in sample["resps"]] for sample in samples]
    errors = [choice.stderr for question in choices for choice in question]
    close = [_leads_by_chance(question) for question in choices if len(question) > 1]
    return {
        "monte_carlo_stderr": sum(errors) / len(errors),
        "within_noise": sum(close) / max(1, len(close)),
    }


def _leads_by_chance(choices: list[Any]) -> bool:
    first, second = sorted(choices, reverse=True)[:2]
    error = (first.stderr**2 + second.stderr**2) ** 0.5
    return bool(error > 0 and first - second < WITHIN_NOISE * error)


def write_items(path: Path, task: str, results: dict[str, Any]) -> None:
    """Add a JSON line for each question: its answers with their errors, and its metrics."""
    with path.open("a", encoding="utf-8") as file:
        for leaf, samples in results["samples"].items():
            for sample in samples:
                answers = [answer[0] for answer in sample["resps"]]
                shown = (
                    [{"loglikelihood": float(e), "stderr": e.stderr, "is_greedy": g} for e, g in answers]
                    if _is_choice(sample)
                    else answers
                )
                metrics = {name: sample[name] for name in sample["metrics"]}
                line = {"task": task, "name": leaf, "question": sample["doc_id"], "filter": sample["filter"]}
                file.write(json.dumps(line | {"answers": shown, **metrics}, default=str) + "\n")


def show(report: dict[str, Any], first: bool) -> None:
    """Print a benchmark's lines of the table, under a head for the first."""
    if first:
        print("  ".join(f"{name:<{width}}" for name, width in COLUMNS.items()).rstrip())
    for line in cells(report):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, COLUMNS.values(), strict=True)).rstrip())
    for note in remarks(report):
        print(f"    {note}")
    print(f"    {report['seconds']:.0f} s", flush=True)


def cells(report: Mapping[str, Any]) -> Iterator[list[str]]:
    """A benchmark's lines of the table, a cell for each of `COLUMNS`."""
    for number, line in enumerate(report["figures"]):
        spread = "" if line["stderr"] is None else f" ± {100 * line['stderr']:.1f}"
        noise = line["monte_carlo_stderr"]
        yield [
            report["title"] if number == 0 else "", str(report["shots"]), _metric(line),
            f"{100 * line['value']:.1f}{spread}", f"{100 * line['chance']:.1f}", str(line["questions"]),
            "–" if noise is None else f"{noise:.2f} ({100 * line['within_noise']:.0f} %)",
        ]  # fmt: skip


def remarks(report: Mapping[str, Any]) -> list[str]:
    """What a reader of a benchmark's figures must know."""
    return [*report["notes"], *_remarks(report["counts"])]


def _metric(line: dict[str, Any]) -> str:
    suffix = line["task"].partition("_mc")[2]
    return f"mc{suffix} {line['metric']}" if suffix else str(line["metric"])


def _remarks(counts: dict[str, Any]) -> list[str]:
    remarks = {
        "cut_contexts": "contexts cut on the left",
        "split_continuations": "answers longer than the window, scored in pieces",
        "windowed_generations": "generations written over several windows",
    }
    return [f"{counts[name]} {text}" for name, text in remarks.items() if counts[name]]
