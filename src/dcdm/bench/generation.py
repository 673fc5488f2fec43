"""`dcdm bench generate`: speed and quality of every decoder of trained models, side by side.

Speed is that of unconditional samples; quality the exact trajectory likelihood of held-out text under the same
decoder (or, where it fills in random order, a bound of it). A saving in forwards never stands without its cost.
"""

from __future__ import annotations

import json as encoder
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from dcdm.config import ConfigError
from dcdm.data.loader import pack
from dcdm.data.sources import stdlib_documents
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.commits import commit_policy
from dcdm.decoding.config import DecodingConfig, adablock_of
from dcdm.decoding.engine import generate
from dcdm.evaluation.decoders import score_under_decoder
from dcdm.evaluation.windows import WindowBatch
from dcdm.io.load import load_model
from dcdm.keys import Key
from dcdm.likelihood.statistics import with_stderr
from dcdm.model.transformer import Model
from dcdm.viewing.palette import CHUNKS
from dcdm.viewing.tables import Table

COMMITS = (
    "chunk", "steps:4", "position", "threshold:0.9", "threshold:0.7", "entropy:0.5", "factor:1", "ancestral:8",
    "first-hitting",
)  # fmt: skip


@dataclass(frozen=True)
class DecoderTiming:
    model: str
    kind: str
    routing: str
    commit: str
    cache: str
    tokens_per_second: float
    forwards: float
    """Per sample."""
    tokens_per_forward: float
    computed: float
    """Positions through all blocks, per token."""
    bits: float
    """Per token of held-out text."""
    bits_stderr: float
    """Over windows."""
    measure: str
    """What `bits` is: trajectory (exact) or bound."""
    sample_bits: float | None = None
    """With the paper's routing: bits per token that the decoder without a cache gives to the samples themselves."""
    sample_bits_stderr: float | None = None


def decoders_of(model: Model, tokenizer: Tokenizer) -> list[DecodingConfig]:
    """Every decoder that makes sense for the model."""
    config = model.config
    if config.kind == "ar":
        return [DecodingConfig("position", cache=cache) for cache in ("exact", "none")]
    if config.predicts_from_left:
        return [DecodingConfig("chunk", cache="exact", lanes=lanes) for lanes in config.lanes or (None,)]
    caches = ("none", "frozen") if config.routes_from_noise else ("exact", "none")
    decoders = [DecodingConfig(commit, cache=cache) for cache in caches for commit in COMMITS]
    if config.routes_from_noise:
        routings = ("paper-step", "appendix-b")
        decoders += [DecodingConfig("threshold:0.9", routing, cache="none") for routing in routings]
    if config.kind in ("bdlm", "mdlm"):
        adablock = adablock_of(config, tokenizer)
        decoders.append(DecodingConfig("threshold:0.9", "adablock", adablock, cache="exact"))
    if config.kind == "mdlm":
        decoders.append(DecodingConfig("threshold:0.9", "blocks:16", cache="exact"))
    return decoders


def measure_decoders(
    path: str, samples: int, windows: int, seed: int, say: Callable[[str], None]
) -> list[DecoderTiming]:
    """All decoders of one model: `samples` texts of a window each, `windows` of held-out text."""
    model, tokenizer = load_model(path)
    held_out = _held_out(model, tokenizer, windows)
    rows = []
    generate(model, [[]] * samples, window=model.config.context_length, seed=seed)  # warm-up
    for decoder in decoders_of(model, tokenizer):
        say(f"{path}: {decoder.routing} {decoder.commit} cache={decoder.cache}")
        drawn = generate(model, [[]] * samples, decoding=decoder, seed=seed, batch_size=samples)
        costs = drawn.statistics
        bits, stderr, what = _quality(model, held_out, decoder, seed)
        of_samples: tuple[float | None, float | None] = (None, None)
        if model.config.routes_from_noise and what == "trajectory":  # where a cache may change the samples
            of_samples = _quality(model, drawn.tokens, replace(decoder, cache="none"), seed)[:2]
        config = model.config
        kind = f"dcdm-{config.routing}" if config.kind == "dcdm" else config.kind
        rows.append(
            DecoderTiming(
                Path(path).name, kind, decoder.routing, _commit(decoder), decoder.cache, costs.tokens_per_second,
                float(costs.forwards.double().mean()),
                costs.tokens_per_forward, float(costs.computed.sum() / costs.new_tokens.sum()), bits, stderr, what,
                *of_samples,
            )
        )  # fmt: skip
    return rows


def _commit(decoder: DecodingConfig) -> str:
    """The policy as the table and the plot call it."""
    return decoder.commit if decoder.lanes is None else f"{decoder.lanes} lanes"


def _held_out(model: Model, tokenizer: Tokenizer, windows: int) -> Tensor:
    """Windows of the standard library's validation files, spread over all of them."""
    packed = pack(stdlib_documents("validation"), tokenizer, model.config.context_length)
    return packed[Key(0).permutation(len(packed))[:windows]]


def _quality(model: Model, tokens: Tensor, decoder: DecodingConfig, seed: int) -> tuple[float, float, str]:
    """Bits per token, their standard error over windows, and what they are."""
    bits, stderr = score_under_decoder(model, [WindowBatch.of(tokens)], decoder, seed).bits_per_token
    return bits, stderr, "bound" if commit_policy(decoder.commit).random else "trajectory"


def run_generation(
    models: Sequence[Path], samples: int, windows: int, json: bool, out: str | None, plot: Path | None
) -> None:
    """Table to the terminal, JSON on request, the plot into a PNG."""
    if not models:
        raise ConfigError("dcdm bench generate needs trained models: --models runs/a runs/b …")
    from rich.console import Console

    from dcdm.bench.harness import environment

    console = Console(stderr=True)
    rows = [row for path in models for row in measure_decoders(str(path), samples, windows, 0, console.print)]
    line = encoder.dumps({"environment": environment(), "rows": [asdict(row) for row in rows]})
    if json:
        print(line)
    else:
        print_decoders(rows)
    if out:
        Path(out).write_text(line + "\n")
    if plot:
        draw_decoders(rows, plot)


def print_decoders(rows: list[DecoderTiming]) -> None:
    text = ("kind", "routing", "commit", "cache", "measure")
    columns = (
        "kind", "routing", "commit", "cache", "tokens/s", "forwards", "tokens/forward", "computed/token",
        "bits/token", "measure", "bits/token of samples",
    )  # fmt: skip
    lines = [
        (
            r.kind, r.routing, r.commit, r.cache, f"{r.tokens_per_second:.0f}", f"{r.forwards:.1f}",
            f"{r.tokens_per_forward:.2f}", f"{r.computed:.1f}", with_stderr(r.bits, r.bits_stderr, 3), r.measure,
            "" if r.sample_bits is None else with_stderr(r.sample_bits, r.sample_bits_stderr, 3),
        )
        for r in rows
    ]  # fmt: skip
    Table(columns, lines, text).print()


def draw_decoders(rows: list[DecoderTiming], path: Path) -> None:
    """Bits per token against tokens per forward, one colour per kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    marks = {"ar": "s", "mdlm": "v", "bdlm": "^", "dcdm-paper": "o", "dcdm-causal": "D"}
    named: dict[tuple[str, str], DecoderTiming] = {}
    for row in rows:
        if row.cache in ("exact", "none") and row.routing == "auto" and (row.kind, row.commit) not in named:
            named[row.kind, row.commit] = row
    for number, kind in enumerate(dict.fromkeys(kind for kind, _ in named)):
        points = sorted((r for (k, _), r in named.items() if k == kind), key=lambda r: r.tokens_per_forward)
        x, y = [r.tokens_per_forward for r in points], [r.bits for r in points]
        colour = CHUNKS[number % len(CHUNKS)]
        axes.errorbar(
            x, y, [r.bits_stderr for r in points], fmt=marks.get(kind, "o"), color=colour, label=kind, capsize=2
        )
        for r in points:
            if r.tokens_per_forward < 1.15 and r.commit != "position":
                continue  # they lie on each other, and cost nearly what one position per forward costs
            axes.annotate(
                r.commit, (r.tokens_per_forward, r.bits), fontsize=6, xytext=(4, 3), textcoords="offset points"
            )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens per forward (samples)")
    axes.set_ylabel("bits per token of held-out text (lower is better)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
