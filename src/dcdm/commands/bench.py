"""`dcdm bench`."""

from __future__ import annotations

import sys
from json import dumps as encode
from pathlib import Path

import torch

from dcdm.bench.harness import Row, measure, print_table, read_earlier, to_json
from dcdm.bench.subjects import MEMORY_MATTERS, cases_of
from dcdm.model.costs import H800_BF16, activation_bytes, bill, state_bytes
from dcdm.presets import preset, presets

TARGETS = ("attention", "chunking", "step", "routing", "draws")


def run(
    subject: str, repeats: int, threads: int, memory: bool | None, compare: str | None, json: bool,
    out: str | None, plot: Path | None, models: tuple[Path, ...] = (), samples: int = 4, windows: int = 16,
) -> None:  # fmt: skip
    """Measure a subject, or with `targets` all those that have a goal; table to the terminal, JSON on request."""
    if subject == "arithmetic":
        print_arithmetic(utilisation=0.4, json=json)
        return
    if subject == "generate":
        from dcdm.bench import generation

        torch.set_num_threads(threads)
        generation.run(models, samples, windows, json, out, plot)
        return
    if subject == "serving":
        from dcdm.bench import serving

        torch.set_num_threads(threads)
        serving.run(models[0] if models else None, repeats, json, out)
        return
    if subject == "estimator":
        from dcdm.bench.estimator import run as run_estimator

        torch.set_num_threads(threads)
        run_estimator(20 * repeats, json, out)
        return
    earlier = read_earlier(compare) if compare else {}
    torch.set_num_threads(threads)
    rows: list[Row] = []

    def say(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    for name in TARGETS if subject == "targets" else (subject,):
        for case in cases_of(name):
            with_memory = name in MEMORY_MATTERS if memory is None else memory
            rows += measure(name, case, repeats, with_memory, say)
            if not sys.stderr.isatty():
                said = ", ".join(f"{row.path} {row.median:.3g} s" for row in rows if row.case == case.name)
                print(f"{name} {case.name}: {said}", file=sys.stderr, flush=True)
    say("")
    if not json:
        print_table(rows, earlier)
    line = to_json(rows)
    if json:
        print(line)
    if plot:
        from dcdm.bench.plot import scaling

        scaling(rows, plot)
    if out:
        Path(out).write_text(line + "\n")


def print_arithmetic(utilisation: float, json: bool) -> None:
    """What every preset costs to train at L = 1024.

    Columns: operations of training per token; the share of attention and of the head; gigabytes of weights,
    gradients and moments; gigabytes of activations per sequence; global batch; seconds per step.
    """
    rows = []
    for name in presets():
        if "debug" in name:
            continue
        config = preset(name)
        costs = bill(config)
        batch = 128 if "0.1b" in name else 512
        rows.append({
            "preset": name,
            "GFLOP/tok": round(costs.training_per_token / 1e9, 2),
            "attn%": round(100 * 3 * costs.attention / costs.training, 1),
            "head%": round(100 * 3 * costs.head / costs.training, 1),
            "state": round(state_bytes(config) / 1e9, 1),
            "act/seq": round(activation_bytes(config, 1) / 1e9, 2),
            "batch": batch,
            "8×H800": round(costs.step_seconds(batch, 8, utilisation), 2),
            "64×H800": round(costs.step_seconds(batch, 64, utilisation), 3),
        })  # fmt: skip
    if json:
        print(encode({"utilisation": utilisation, "peak": H800_BF16, "rows": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "preset" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    Console().print(
        f"training at L=1024; state and act/seq in GB; times in seconds per step at {utilisation:.0%} of "
        f"{H800_BF16 / 1e12:.0f} TFLOP/s per device"
    )
