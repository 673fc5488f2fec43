"""`dcdm demo`: train a small model on this machine's Python standard library and watch it fill in text."""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from dcdm.config import ObjectiveConfig
from dcdm.data.packing import pack
from dcdm.data.sources import stdlib_documents
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer
from dcdm.decoding.engine import generate
from dcdm.diffusion.likelihood import score
from dcdm.keys import Key
from dcdm.model.chunking import max_violation
from dcdm.model.transformer import Model, build
from dcdm.presets import preset
from dcdm.training.loop import StepReport, TrainConfig, train_windows
from dcdm.viewing.palette import on_colour

SNIPPET = "    def __init__(self, name, value=None):\n        self.name = name\n        self.value = value\n"


def run(steps: int = 250, seed: int = 0, console: Console | None = None) -> None:
    """Train, report and sample."""
    console = console or Console()
    tokenizer = byte_tokenizer()
    config = preset("dcdm-debug")
    windows = pack(stdlib_documents("train"), tokenizer, config.context_length)
    held_out = pack(stdlib_documents("validation"), tokenizer, config.context_length)
    model = build(config, seed=seed)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"dcdm-debug: {parameters / 1e6:.2f}M parameters, K={config.num_chunks} chunks, "
        f"{windows.numel() / 1e6:.1f} MB of Python source in windows of {config.context_length} bytes"
    )
    settings = TrainConfig(steps=steps, batch_size=16, learning_rate=2e-3, warmup_steps=40, seed=seed)
    reports, seconds = _train(model, windows, settings, console)
    _print_curve(reports, seconds, console)
    _print_likelihoods(model, held_out, console)
    _print_sample(model, tokenizer, seed, console)


def _train(
    model: Model, windows: Tensor, settings: TrainConfig, console: Console
) -> tuple[list[StepReport], float]:
    columns = (
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  MaxVio {task.fields[violation]:.2f}"),
    )  # fmt: skip
    reports: list[StepReport] = []
    started = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("train", total=settings.steps, loss=float("nan"), violation=float("nan"))

        def on_step(report: StepReport) -> None:
            reports.append(report)
            progress.update(task, advance=1, loss=report.nll, violation=report.max_violation)
            if not console.is_terminal and report.step % 50 == 0:
                console.print(f"step {report.step:4d}  loss {report.nll:.3f}  MaxVio {report.max_violation:.2f}")

        train_windows(model, windows, settings, ObjectiveConfig(), on_step)
    return reports, time.perf_counter() - started


def _print_curve(reports: list[StepReport], seconds: float, console: Console) -> None:
    table = Table(title=f"training: {len(reports)} steps in {seconds:.0f} s, loss in nats per byte")
    for name in ("steps", "loss", "% of tokens in chunks 1…K", "MaxVio"):
        table.add_column(name, justify="right")
    width = max(1, len(reports) // 6)
    for at in range(0, len(reports), width):
        part = reports[at : at + width]
        counts = torch.stack([r.chunk_counts for r in part if r.chunk_counts is not None]).sum(dim=0)
        shares = " ".join(f"{100 * c:.0f}" for c in (counts / counts.sum()).tolist())
        mean = sum(r.nll for r in part) / len(part)
        table.add_row(f"{at}–{at + len(part) - 1}", f"{mean:.3f}", shares, f"{max_violation(counts):.2f}")
    console.print(table)


def _print_likelihoods(model: Model, held_out: Tensor, console: Console) -> None:
    sample = held_out[Key(0).permutation(len(held_out))[:8]]
    console.print("held-out files:")
    console.print(f"  {score(model, sample, 'surrogate', samples=8)}")
    console.print(f"  {score(model, sample, 'sequential', samples=8)}")


def _print_sample(model: Model, tokenizer: Tokenizer, seed: int, console: Console) -> None:
    """Blank out stretches of a line of code and let the model fill them, chunk by chunk."""
    text = SNIPPET
    for stretch in ("name, value", "self.value"):
        text = text.replace(stretch, f"[[{len(stretch)}]]", 1)
    result = generate(
        model, text, tokenizer=tokenizer, commit="position", temperature=0.7, seed=seed, window=len(SNIPPET) + 1
    )
    order = torch.zeros_like(result.tokens)
    for step, event in enumerate(result.history, start=1):
        order[0, event.positions] = step
    console.print("\nblanks (░), and what the model put there; colours follow the order of filling:")
    asked, answered = Text(), Text()
    for token, step in zip(result.tokens[0, 1:].tolist(), order[0, 1:].tolist(), strict=True):
        letter = tokenizer.decode([token])
        asked.append("░" if step else letter)
        answered.append(letter, style=on_colour(step) if step else "")
    console.print(asked)
    console.print(answered)
    console.print("A model this small, trained this briefly, spells badly: docs/method.md says what it does.")
