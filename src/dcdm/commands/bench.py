"""`dcdm bench`: a part of the system measured against its literal version, in the same run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional

from dcdm.commands.options import at_least_one, print_json, print_rows
from dcdm.config import ConfigError

if TYPE_CHECKING:
    from dcdm.bench.harness import Case, PathTiming

EXAMPLES = (
    "dcdm bench attention",
    "dcdm bench step --quick",
    "dcdm bench generate --models runs/first runs/second --plot plot.png",
)

TARGETS = ("attention", "chunking", "step", "routing", "draws")
OTHER_SUBJECTS = {
    "targets": "all subjects that have a goal",
    "estimator": "the Monte-Carlo error of likelihoods",
    "generate": "the decoders of trained models, speed beside quality",
    "serving": "eight callers of one server, batched and one at a time; Poisson arrivals at both schedules",
    "transformers": "a trained AR or lane model, beside transformers' generate with the same weights",
    "arithmetic": "nothing is measured: what the presets cost on GPUs",
}
"""What can be asked for beside the subjects of `dcdm.bench.subjects`."""
NO_PLOT = "--plot {} has nothing to draw: {} is not measured over lengths; scaling, attention or generate are drawn"


def details() -> str:
    """Every subject, for the help."""
    from dcdm.bench.subjects import SUBJECTS

    others = "; ".join(f"{name}: {meaning}" for name, meaning in OTHER_SUBJECTS.items())
    return f"Subjects: {', '.join(SUBJECTS)}. Others: {others}."


def bench(
    subject: Annotated[str, Positional],
    repeats: int = 3,
    threads: int = 2,
    memory: bool | None = None,
    compare: str | None = None,
    json: bool = False,
    out: str | None = None,
    plot: Path | None = None,
    models: tuple[Path, ...] = (),
    samples: int = 4,
    windows: int = 16,
    quick: bool = False,
) -> None:
    """Measure a part of the system against its literal version, in the same run.

    A subject takes minutes on two cores, with --quick about one.

    Args:
        subject: What to measure.
        repeats: Timed repetitions of each path, taking turns; for estimator, blocks of 20 scores.
        threads: PyTorch threads.
        memory: Measure peak memory too, each path in a process of its own; by default where it matters.
        compare: An earlier run's JSON file, to show its medians beside the new ones.
        json: Print one JSON line instead of the table.
        out: Write that JSON line to this file as well.
        plot: Draw time and memory against length (generate: nats per byte against forwards per token) into this
            PNG.
        models: For generate: run folders, checkpoints or exported folders; for serving: one, else random weights;
            for transformers: one.
        samples: For generate: texts that are sampled together.
        windows: For generate: windows of held-out text that are scored.
        quick: One repetition of a small case, without memory, and two samples and windows: shows that the
            subject runs, not how fast it is.
    """
    import torch

    from dcdm.bench.subjects import SUBJECTS, cases_of, quick_cases_of

    if subject not in SUBJECTS and subject not in OTHER_SUBJECTS:
        known = ", ".join((*SUBJECTS, *OTHER_SUBJECTS))
        raise ConfigError(f"unknown subject {subject!r}; choose one of {known}")
    at_least_one(repeats=repeats, threads=threads, samples=samples, windows=windows)
    if quick:
        repeats, memory, samples, windows = 1, False, 2, 2
    if memory and subject == "transformers":
        raise ConfigError("--memory does not fit transformers, whose paths share one loaded model; leave it out")
    if plot and subject in ("arithmetic", "serving", "estimator"):
        raise ConfigError(NO_PLOT.format(plot, subject))
    torch.set_num_threads(threads)
    if subject == "arithmetic":
        print_arithmetic(utilisation=0.4, json=json)
    elif subject == "generate":
        from dcdm.bench import generation

        generation.run_generation(models, samples, windows, json, out, plot)
    elif subject == "serving":
        from dcdm.bench import serving

        serving.measure_serving(models[0] if models else None, repeats, json, out, quick)
    elif subject == "estimator":
        from dcdm.bench import estimator

        estimator.measure_estimators(20 * repeats, json, out)
    elif subject == "transformers":
        from dcdm.bench import adapted

        found = adapted.cases(models[0] if models else None, 8 if quick else adapted.TOKENS)
        compare_paths({subject: found}, repeats, bool(memory), compare, json, out, plot)
    else:
        cases = quick_cases_of if quick else cases_of
        subjects = TARGETS if subject == "targets" else (subject,)
        compare_paths({name: cases(name) for name in subjects}, repeats, memory, compare, json, out, plot)


def compare_paths(
    subjects: Mapping[str, Sequence[Case]], repeats: int, memory: bool | None, compare: str | None, json: bool,
    out: str | None, plot: Path | None,
) -> None:  # fmt: skip
    """Time every path of these subjects' cases; a table on the terminal, JSON on request."""
    from dcdm.bench.harness import draw_scaling, length_of, measure_case, print_table, read_earlier, to_json
    from dcdm.bench.subjects import MEMORY_MATTERS

    if plot and not any(length_of(case.name) for cases in subjects.values() for case in cases):
        raise ConfigError(NO_PLOT.format(plot, ", ".join(subjects)))
    earlier = read_earlier(compare) if compare else {}
    rows: list[PathTiming] = []
    show = _status_line()
    for name, cases in subjects.items():
        for case in cases:
            with_memory = name in MEMORY_MATTERS if memory is None else memory
            rows += measure_case(name, case, repeats, with_memory, show)
            if not sys.stderr.isatty():
                medians = ", ".join(f"{row.path} {row.median:.3g} s" for row in rows if row.case == case.name)
                print(f"{name} {case.name}: {medians}", file=sys.stderr, flush=True)
    show("")
    line = to_json(rows)
    if out:
        Path(out).write_text(line + "\n")
    if json:
        print(line)
    else:
        print_table(rows, earlier)
    if plot:
        draw_scaling(rows, plot)


def _status_line() -> Callable[[str], None]:
    """A line of standard error that is written over; nothing where there is no terminal."""
    terminal = sys.stderr.isatty()

    def show(text: str) -> None:
        if terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    return show


def print_arithmetic(utilisation: float, json: bool) -> None:
    """What every preset costs to train at its context length L.

    Columns: L; operations of training per token; the share of attention and of the head; gigabytes of weights,
    gradients and moments; gigabytes of activations per sequence; global batch; seconds per step.
    """
    from dcdm.model.costs import H800_BF16, activation_bytes, bill, state_bytes
    from dcdm.presets import preset, presets

    rows = []
    for name in presets():
        if "debug" in name:
            continue
        config = preset(name)
        costs = bill(config)
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
