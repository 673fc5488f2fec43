"""Paths that do the same work, timed against each other: attention and the training step.

Timing takes a warm-up and interleaved repetitions; shown are median, spread and the ratio to the fastest baseline.
Shapes are those of `dcdm-0.1b-k8` with batch 1. Literal means `model/reference.py`: explicit softmax over dense
masks, K softmax matrices, all logits. Its attention alone swapped for SDPA with the dense mask is a second
baseline, and the only one where the explicit softmax no longer fits into memory.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from dcdm.config import ModelConfig, ObjectiveConfig
from dcdm.diffusion.objectives import Batch, draw, loss
from dcdm.keys import Key
from dcdm.kinds import build
from dcdm.model import layout, masks, reference
from dcdm.model.attention import AttentionPlan, Backend, attend
from dcdm.model.transformer import Model
from dcdm.presets import preset
from dcdm.viewing.tables import Table

Run = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """Paths that do the same work. `paths` maps a name to a maker of the run, so that memory is taken late."""

    name: str
    paths: dict[str, Callable[[], Run]]
    baselines: tuple[str, ...]
    """The ratio of a path is to the fastest of these."""


@dataclass(frozen=True)
class PathTiming:
    subject: str
    case: str
    path: str
    median: float
    low: float
    high: float
    ratio: float | None
    """Time of the fastest baseline over this path's; None for the baselines themselves."""


def measure_case(subject: str, case: Case, repeats: int, say: Callable[[str], None]) -> list[PathTiming]:
    """Time every path of a case, taking turns so that a busy moment hits all of them."""
    runs = {}
    for name, make in case.paths.items():
        say(f"{subject} {case.name}: warming up {name}")
        runs[name] = make()
        runs[name]()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats):
        say(f"{subject} {case.name}: {turn + 1} of {repeats}")
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    median = {name: sorted(times)[len(times) // 2] for name, times in seconds.items()}
    best = min((median[name] for name in case.baselines if name in median), default=None)
    rows = []
    for name, times in seconds.items():
        ratio = None if best is None or name in case.baselines else best / median[name]
        rows.append(PathTiming(subject, case.name, name, median[name], min(times), max(times), ratio))
    return rows


def environment() -> dict[str, object]:
    """What a figure depends on beside the code."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


def to_json(rows: list[PathTiming]) -> str:
    return json.dumps({"environment": environment(), "rows": [row.__dict__ for row in rows]})


def print_table(rows: list[PathTiming]) -> None:
    """A table for people."""
    columns = ["subject", "case", "path", "median s", "spread", "ratio"]
    lines = []
    for row in rows:
        cells = [row.subject, row.case, row.path, f"{row.median:.4g}", f"{row.low:.3g}–{row.high:.3g}"]
        cells.append("" if row.ratio is None else f"{row.ratio:.2f}×")
        lines.append(cells)
    Table(columns, lines, text=("subject", "case", "path")).print()


# --- what is measured ---------------------------------------------------------------------------------------------


LITERAL_FITS = 2048  # beyond this length explicit softmax over z ⊕ x needs more memory than a laptop has
PLAIN = ObjectiveConfig(prompt_share=0.0)


def _config(length: int, layers: int, routing: str = "paper") -> ModelConfig:
    return replace(preset("dcdm-0.1b-k8"), num_layers=layers, context_length=length, routing=routing)  # type: ignore[arg-type]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _ids(length: int) -> Tensor:
    """Random chunks 1…8 of about equal size."""
    return torch.randint(1, 9, (1, length), generator=_generator())


def _half_masked(length: int) -> Tensor:
    masked = torch.rand(1, length, generator=_generator()) < 0.5
    masked[:, 0] = False
    return masked


def attention(length: int) -> Case:
    """Stage-2 attention, forward and backward, under the dual-stream mask."""

    def path(backend: Backend) -> Callable[[], Run]:
        def make() -> Run:
            ids = _ids(length)
            whole = masks.dual_stream_slots(ids)
            slots = layout.dual_stream(ids, _half_masked(length)).slots if backend == "sdpa-tiled" else whole
            size = slots.chunk.shape[1]
            q, k, v = (torch.randn(1, size, 12, 128, generator=_generator()).requires_grad_() for _ in range(3))

            def run() -> None:
                q.grad = k.grad = v.grad = None
                plan = AttentionPlan.of(masks.dual_stream, slots, backend)  # mask building counts
                attend(q, k, v, plan.inputs(q.dtype)).sum().backward()

            return run

        return make

    paths = {"production": path("sdpa-tiled")}
    if length <= 2 * LITERAL_FITS:
        paths["dense SDPA"] = path("sdpa")
    if length <= LITERAL_FITS:
        paths["literal"] = path("reference")
    return Case(f"L={length}", paths, ("dense SDPA", "literal"))


def _tokens(config: ModelConfig, length: int) -> Tensor:
    tokens = torch.randint(0, config.vocab_size - 3, (1, length), generator=_generator())
    tokens[:, 0] = config.bos_id
    return tokens


def _dense_sdpa(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None], enable_gqa=True)


def literal_step(model: Model, tokens: Tensor, dense_sdpa: bool = False) -> None:
    """Loss and backward by the reference: every mask dense, every logit made."""
    sample = draw(model, Batch(tokens), Key(0), PLAIN)
    with mock.patch.object(reference, "attend", _dense_sdpa if dense_sdpa else reference.attend):
        logits = reference.forward(model, tokens, sample.masked, chunk_ids=sample.ids).logits
        known = tokens.clamp(max=model.config.vocab_size - 4)[..., None]
        nll = -logits[..., :-3].log_softmax(dim=-1).gather(-1, known).squeeze(-1)
        (torch.where(sample.masked, nll, 0) * sample.weight).sum().div(sample.free.sum()).backward()


def _on_model(config: ModelConfig, work: Callable[[Model, Tensor], object]) -> Callable[[], Run]:
    """A path that does `work` on a fresh model and one sequence."""

    def make() -> Run:
        model, tokens = build(config, seed=0), _tokens(config, config.context_length)

        def run() -> None:
            model.zero_grad()
            work(model, tokens)

        return run

    return make


def _production_step(model: Model, tokens: Tensor) -> None:
    loss(model, Batch(tokens), Key(0), PLAIN).total.backward()


def step(length: int, layers: int = 4, routing: str = "paper") -> Case:
    """A whole training step without the optimizer: routing, loss and backward."""
    config = _config(length, layers, routing)
    paths = {
        "production": _on_model(config, _production_step),
        "literal, dense SDPA": _on_model(config, lambda m, tokens: literal_step(m, tokens, dense_sdpa=True)),
    }
    if length <= LITERAL_FITS:
        paths["literal"] = _on_model(config, literal_step)
    return Case(f"L={length}, {layers} layers, {routing}", paths, ("literal", "literal, dense SDPA"))


SUBJECTS: dict[str, Callable[[], list[Case]]] = {
    "attention": lambda: [attention(2048), attention(4096)],
    "step": lambda: [step(1024), step(2048), step(4096)],
}
QUICK: dict[str, Callable[[], list[Case]]] = {
    "attention": lambda: [attention(512)],
    "step": lambda: [step(256, layers=1)],
}
"""Small cases, to see soon that a subject runs."""
