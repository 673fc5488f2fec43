"""`dcdm bench`: a part of the system measured against its literal version, in the same run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from dcdm.commands.options import AdapterOption, JsonOption, at_least_one
from dcdm.config import ConfigError

if TYPE_CHECKING:
    from dcdm.bench.paths import Case

EXAMPLES = (
    "dcdm bench attention",
    "dcdm bench step --quick",
    "dcdm bench generate --models runs/first runs/second",
)
Subject = Literal["attention", "step", "generate", "peers"]


def bench(
    subject: Annotated[Subject, Positional],
    repeats: int = 3,
    json: JsonOption = False,
    models: Annotated[tuple[Path, ...], arg(metavar="MODEL...", help_behavior_hint="")] = (),
    adapter: AdapterOption = None,
    gguf: Path | None = None,
    samples: int = 4,
    windows: int = 16,
    quick: bool = False,
) -> None:
    """Measure a part of the system against its literal version, in the same run.

    A subject takes minutes on two cores, with --quick about one. OMP_NUM_THREADS sets the number of threads.

    Args:
        subject: attention (stage 2, against SDPA with a dense mask and an explicit softmax), step (a
            training step), generate (decoders of trained models, speed beside quality), or peers (one text by an
            AR or lane model in fp32 and int8, against transformers' generate and llama.cpp).
        repeats: Timed repetitions of each path, taking turns.
        models: For generate: the models to compare; for peers: one.
        gguf: For peers: the model's GGUF file, for llama.cpp, where that is installed.
        samples: For generate: texts that are sampled together.
        windows: For generate: windows of held-out text that are scored.
        quick: One repetition of a small case, and two samples and windows: shows that the
            subject runs, not how fast it is.
    """
    at_least_one(repeats=repeats, samples=samples, windows=windows)
    if adapter is not None and subject != "peers":
        raise ConfigError(f"--adapter has no effect on {subject}; name the adapter's own folder as a model")
    if quick:
        repeats, samples, windows = 1, 2, 2
    if subject == "generate":
        from dcdm.bench.generation import measure_generation

        measure_generation(models, samples, windows, json, _say)
    elif subject == "peers":
        from dcdm.bench.generation import TOKENS, beside_peers

        cases = beside_peers(models[0] if models else None, adapter, gguf, 8 if quick else TOKENS, _say, not quick)
        compare_paths(subject, cases, repeats, json)
    else:
        from dcdm.bench import paths

        cases = (paths.QUICK if quick else paths.SUBJECTS)[subject]()
        compare_paths(subject, cases, repeats, json)


def compare_paths(subject: str, cases: Sequence[Case], repeats: int, json: bool) -> None:
    """Time every path of these cases; a table, or one line of JSON."""
    from dcdm.bench.paths import measure_case, print_table, to_json

    rows = [row for case in cases for row in measure_case(subject, case, repeats, _say)]
    if json:
        print(to_json(rows))
    else:
        print_table(rows)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
