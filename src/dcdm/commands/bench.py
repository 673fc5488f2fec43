"""`dcdm bench`: a part of the system measured against its literal version, in the same run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from dcdm.commands.options import JsonOption, at_least_one, print_json, print_rows
from dcdm.config import ConfigError

if TYPE_CHECKING:
    from dcdm.bench.harness import Case

EXAMPLES = (
    "dcdm bench attention",
    "dcdm bench step --quick",
    "dcdm bench generate --models runs/first runs/second --plot plot.png",
)
Subject = Literal["attention", "chunking", "step", "generate", "transformers", "arithmetic"]


def bench(
    subject: Annotated[Subject, Positional],
    repeats: int = 3,
    json: JsonOption = False,
    plot: Path | None = None,
    models: Annotated[tuple[Path, ...], arg(metavar="MODEL...", help_behavior_hint="")] = (),
    samples: int = 4,
    windows: int = 16,
    quick: bool = False,
) -> None:
    """Measure a part of the system against its literal version, in the same run.

    A subject takes minutes on two cores, with --quick about one. OMP_NUM_THREADS sets the number of threads.

    Args:
        subject: attention (stage 2, against SDPA with a dense mask and an explicit softmax), chunking (the chunking
            attention), step (a training step), generate (decoders of trained models, speed beside quality),
            transformers (one text by an AR or lane model, against transformers' generate with the same weights),
            or arithmetic (nothing is measured: what the presets cost on GPUs).
        repeats: Timed repetitions of each path, taking turns.
        plot: For generate: draw nats per byte against forward passes per token into this PNG.
        models: For generate: the models to compare; for transformers: one.
        samples: For generate: texts that are sampled together.
        windows: For generate: windows of held-out text that are scored.
        quick: One repetition of a small case, without memory, and two samples and windows: shows that the
            subject runs, not how fast it is.
    """
    at_least_one(repeats=repeats, samples=samples, windows=windows)
    if plot and subject != "generate":
        raise ConfigError(f"--plot {plot} has no effect on {subject}; only generate is drawn")
    if quick:
        repeats, samples, windows = 1, 2, 2
    if subject == "arithmetic":
        print_arithmetic(utilisation=0.4, json=json)
    elif subject == "generate":
        from dcdm.bench.generation import measure_generation

        measure_generation(models, samples, windows, json, plot, _say)
    elif subject == "transformers":
        from dcdm.bench.generation import TOKENS, beside_transformers

        cases = beside_transformers(models[0] if models else None, 8 if quick else TOKENS)
        compare_paths(subject, cases, repeats, memory=False, json=json)
    else:
        from dcdm.bench import subjects

        cases = (subjects.QUICK if quick else subjects.SUBJECTS)[subject]()
        compare_paths(subject, cases, repeats, memory=subject in subjects.MEMORY_MATTERS and not quick, json=json)


def compare_paths(subject: str, cases: Sequence[Case], repeats: int, memory: bool, json: bool) -> None:
    """Time every path of these cases; a table, or one line of JSON."""
    from dcdm.bench.harness import measure_case, print_table, to_json

    rows = [row for case in cases for row in measure_case(subject, case, repeats, memory, _say)]
    if json:
        print(to_json(rows))
    else:
        print_table(rows)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_arithmetic(utilisation: float, json: bool) -> None:
    """What every preset costs to train at its context length L.

    Columns: L; operations of training per token; the share of attention and of the head; gigabytes of weights,
    gradients and moments; gigabytes of activations per sequence; global batch; seconds per step.
    """
    from dcdm.costs import H800_BF16, activation_bytes, cost_estimate, state_bytes
    from dcdm.presets import preset, presets

    rows = []
    for name in presets():
        if "debug" in name:
            continue
        config = preset(name)
        costs = cost_estimate(config)
        batch = 128 if "0.1b" in name else 512
        rows.append({
            "preset": name,
            "L": costs.length,
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
        print_json({"utilisation": utilisation, "peak": H800_BF16, "rows": rows})
        return
    print_rows(rows)
    print(
        f"training at length L; state and act/seq in GB; times in seconds per step at {utilisation:.0%} of "
        f"{H800_BF16 / 1e12:.0f} TFLOP/s per device"
    )
