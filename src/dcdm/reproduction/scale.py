"""Scales at which experiments really run: everything that all runs of one comparison share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dcdm.config import ConfigError, ModelConfig
from dcdm.files import digest

FORWARDS_PER_TOKEN = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
TRAINING = ("corpora/wikitext2/train.txt", "corpora/state_of_the_union.txt")
VALIDATION = "corpora/wikitext2/valid.txt"
TEST = "corpora/wikitext2/test.txt"
ZERO_SHOT = {name: f"zeroshot/{name}.jsonl" for name in ("lambada", "pubmed", "arxiv")}
TUNING = "tasks/gsm8k_train.jsonl"
DEPENDS_ON: dict[str, tuple[str, ...]] = {
    "curve": (),  # read from training's own record, whose settings are part of a run's identity
    "heldout": ("heldout_windows", "heldout_samples", "sequential_samples"),
    "zeroshot": ("zeroshot_windows", "heldout_samples", "sequential_samples"),
    "frontier": ("heldout_windows", "frontier_windows"),
    "policies": ("heldout_windows", "frontier_windows"),
    "balance": ("heldout_windows",),
    "contents": ("heldout_windows",),
    "tasks": ("task_items",),
}
"""Measure → the settings of a scale that its figures follow from."""


@dataclass(frozen=True)
class Scale:
    """One definition for all runs: the network around a kind's own settings, its training, and its measures."""

    name: str
    base: ModelConfig
    tokenizer: str
    steps: int
    batch_size: int
    learning_rate: float
    tuning_steps: int
    """Of fine-tuning runs."""
    evaluations: int
    """Points of a validation curve."""
    curve_windows: int
    curve_samples: int
    heldout_windows: int
    heldout_samples: int
    sequential_samples: int
    """Fewer: the sequential bound costs a pass for every sample of every chunk."""
    zeroshot_windows: int
    frontier_windows: int
    task_items: int
    """Questions of each benchmark."""
    bias_rate: float = 0.1
    """η_b of the paper's routing: hundreds of steps need longer ones of the bias than a training of its full length
    (docs/LOG.md)."""
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Model settings of the other sizes."""

    @property
    def tokens(self) -> int:
        """Positions seen in training, equal for all runs."""
        return self.steps * self.batch_size * self.base.context_length

    def measured_with(self, measure: str) -> str:
        """What the figures of a measure follow from beside the weights, as a short hash."""
        fixed = {"frontier": list(FORWARDS_PER_TOKEN), "zeroshot": ZERO_SHOT}
        return digest([measure, {n: getattr(self, n) for n in DEPENDS_ON[measure]}, fixed.get(measure)])[:16]

    def train_settings(self, seed: int, tuning: bool = False, rate: float = 1.0) -> dict[str, Any]:
        """Dotted settings of a training run; `rate` is a multiple of the scale's learning rate."""
        steps = self.tuning_steps if tuning else self.steps
        return {
            "train.steps": steps, "train.batch_size": self.batch_size, "train.warmup_steps": max(1, steps // 10),
            "train.learning_rate": rate * self.learning_rate / (3 if tuning else 1), "train.seed": seed,
            "train.dtype": "fp32",
        }  # fmt: skip


def cpu() -> Scale:
    """About a million parameters, 4k BPE, windows of 256: a run of minutes on one core.

    Wider and deeper networks see fewer tokens in that time, and the diffusion models among them do not get far
    beyond the frequencies of single tokens (docs/LOG.md).
    """
    base = ModelConfig("mdlm", 4096, 128, 2, 4, 2, 32, 384, context_length=256)
    return Scale(
        "cpu", base, "bpe:4096", steps=800, batch_size=4, learning_rate=3e-3, tuning_steps=150,
        evaluations=6, curve_windows=16, curve_samples=2, heldout_windows=64, heldout_samples=4,
        sequential_samples=2, zeroshot_windows=24, frontier_windows=6, task_items=20,
        sizes={
            "small": {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 192},
            "large": {"hidden_size": 160, "head_dim": 40, "intermediate_size": 480},
        },
    )  # fmt: skip


def tiny() -> Scale:
    """Smaller still, for tests: seconds."""
    base = ModelConfig("mdlm", 300, 16, 2, 2, 1, 8, 32, context_length=32)
    return Scale(
        "tiny", base, "bpe:300", steps=12, batch_size=4, learning_rate=3e-3, tuning_steps=4,
        evaluations=2, curve_windows=4, curve_samples=1, heldout_windows=6, heldout_samples=2,
        sequential_samples=1, zeroshot_windows=2, frontier_windows=2, task_items=2,
        sizes={
            "small": {"hidden_size": 8, "num_heads": 1, "intermediate_size": 16},
            "large": {"hidden_size": 32, "num_heads": 4, "intermediate_size": 64},
        },
    )  # fmt: skip


SCALES = {"cpu": cpu, "tiny": tiny}


def scale(name: str) -> Scale:
    """The scale called `name`."""
    if name not in SCALES:
        raise ConfigError(f"scale={name!r} cannot run here; choose one of {', '.join(SCALES)}")
    return SCALES[name]()
