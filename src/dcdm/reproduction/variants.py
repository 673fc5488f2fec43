"""The models that are compared: each a name, what it is, and what sets it apart from the scale's base.

A `Variant` with a seed is a run (`RunSpec`): all of its settings follow from the variant and the scale, and its
identity is a hash of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dcdm.config import ModelConfig, MoEConfig, ObjectiveConfig
from dcdm.files import digest
from dcdm.reproduction.scale import TRAINING, TUNING, VALIDATION, Scale

K = 8
CURVED = ("curve", "heldout", "balance")
MAIN = (*CURVED, "zeroshot", "frontier", "policies", "contents")
FRONTIER = (*CURVED, "frontier")
DECISIVE = 6  # seeds of the models whose order the paper's claims are about: three left their intervals around zero


@dataclass(frozen=True)
class Variant:
    """A model of the comparison; `model` and `objective` are changes to the scale's base and to the defaults."""

    name: str
    label: str
    """What it is, in a few words."""
    model: Mapping[str, Any] = field(default_factory=dict)
    objective: Mapping[str, Any] = field(default_factory=dict)
    measures: tuple[str, ...] = CURVED
    parent: str | None = None
    """Fine-tuned from this variant's run of the same seed."""
    extra: bool = False
    """Nothing that the paper claims rests on it: it runs after all others."""
    seeds: int = 3
    """How many: 0, 1, 2 and so on."""
    rate: float = 1.0
    """The peak learning rate as a multiple of the scale's."""


def variants(scale: Scale) -> dict[str, Variant]:
    """Every model at this scale, the most informative first."""
    known = {one.name: one for one in (*_kinds(scale), *_causes(scale), *_ablations(scale), *_tuned())}
    return known | {one.name: one for one in _rated(known)}


def _chunked(scale: Scale, routing: str = "paper", num_chunks: int = K, share: float = 1 / 4, **more: Any) -> dict:
    """A DCDM; `share` is h as a share of the width: a quarter for K=8, as in the paper's 0.5B model."""
    width = more.get("hidden_size", scale.base.hidden_size)
    dim = max(1, round(width * share))
    return {"kind": "dcdm", "num_chunks": num_chunks, "chunk_dim": dim, "routing": routing, **more}


def _moe(scale: Scale, routing: str) -> dict[str, Any]:
    """Two of eight experts and a shared one: as many active parameters in an MLP as the dense model has."""
    size = (scale.base.intermediate_size or 0) // 3
    experts = {"num_experts": 8, "experts_per_token": 2, "expert_size": size, "shared_size": size}
    return _chunked(scale, routing, intermediate_size=None, moe=experts)


FULL = {"full_mask_share": 1.0}
STRIDED: dict[str, Any] = {"prior": "strided", "prior_weight": 1.0}


def _kinds(scale: Scale) -> Iterator[Variant]:
    length = scale.base.context_length
    yield Variant("bdlm8", "BDLM, blocks of 8", {"kind": "bdlm", "block_size": 8}, measures=MAIN,
                  seeds=DECISIVE)  # fmt: skip
    yield Variant("paper", f"DCDM, the paper's routing, K={K}", _chunked(scale), measures=MAIN, seeds=DECISIVE)
    yield Variant("mdlm", "MDLM", measures=MAIN, seeds=DECISIVE)
    yield Variant("strided-full", f"strided chunks, K={K}, trained fully masked", _chunked(scale, "strided"), FULL,
                  MAIN, seeds=DECISIVE)  # fmt: skip
    yield Variant("causal-full", f"DCDM, causal routing, K={K}, no prior, trained fully masked",
                  _chunked(scale, "causal"), FULL, MAIN)  # fmt: skip
    yield Variant(
        "bdlm32", f"BDLM, {K} blocks of L/{K}", {"kind": "bdlm", "block_size": length // K}, measures=MAIN
    )
    yield Variant("ar", "AR", {"kind": "ar"}, measures=MAIN)
    yield Variant("causal", f"DCDM, causal routing, K={K}, no prior", _chunked(scale, "causal"), measures=MAIN)


def _causes(scale: Scale) -> Iterator[Variant]:
    """What a difference is due to: prior, noise, sizes of chunks, partition, start of the chunking attention."""
    yield Variant("strided", "strided chunks", _chunked(scale, "strided"), measures=FRONTIER)
    yield Variant("contiguous", "contiguous chunks", _chunked(scale, "positional"), measures=FRONTIER)
    yield Variant("random", "random chunks", _chunked(scale, "random"), measures=FRONTIER)
    yield Variant("contiguous-full", "contiguous chunks, trained fully masked", _chunked(scale, "positional"), FULL,
                  FRONTIER)  # fmt: skip
    yield Variant("random-full", "random chunks, trained fully masked", _chunked(scale, "random"), FULL, FRONTIER)
    yield Variant("causal-strided-full", "DCDM, causal routing, strided prior of weight 1, trained fully masked",
                  _chunked(scale, "causal", **STRIDED), FULL, FRONTIER)  # fmt: skip
    yield Variant("causal-strided", "DCDM, causal routing, strided prior of weight 1",
                  _chunked(scale, "causal", **STRIDED), measures=FRONTIER)  # fmt: skip
    yield Variant("causal-full-growing", "DCDM, causal routing, each chunk 1.3 times the last, fully masked",
                  _chunked(scale, "causal", chunk_growth=1.3), FULL, FRONTIER)  # fmt: skip
    yield Variant("paper-wo", "DCDM, the paper's routing, W_O started as in the paper",
                  _chunked(scale, chunk_out_init_std=0.02))  # fmt: skip
    yield Variant("strided-full-wo", "strided chunks, fully masked, W_O started as in the paper",
                  _chunked(scale, "strided", chunk_out_init_std=0.02), FULL, extra=True)  # fmt: skip


def _ablations(scale: Scale) -> Iterator[Variant]:
    yield Variant("paper-point", "DCDM, the paper's routing, h=1",
                  _chunked(scale, share=1 / scale.base.hidden_size), seeds=DECISIVE)  # fmt: skip
    yield Variant("paper-moe", "DCDM-MoE, the paper's routing", _moe(scale, "paper"), seeds=DECISIVE)
    yield Variant("strided-full-moe", "strided chunks, fully masked, MoE", _moe(scale, "strided"), FULL, extra=True)
    for name, size in scale.sizes.items():
        yield Variant(f"mdlm-{name}", f"MDLM, {name}", size)
        yield Variant(f"bdlm8-{name}", f"BDLM, blocks of 8, {name}", {"kind": "bdlm", "block_size": 8, **size})
        yield Variant(f"paper-{name}", f"DCDM, the paper's routing, {name}", _chunked(scale, **size))
        yield Variant(f"strided-full-{name}", f"strided chunks, fully masked, {name}",
                      _chunked(scale, "strided", **size), FULL, extra=True)  # fmt: skip
    # h of the paper's K = 8, 16, 32, 64 falls as 256, 128, 128, 96; K = 8 with a quarter of the width is `paper`
    for chunks, share in ((4, 1 / 2), (16, 1 / 4), (32, 3 / 16), (4, 1 / 4), (32, 1 / 4)):
        dim = round(scale.base.hidden_size * share)
        yield Variant(f"paper-k{chunks}-h{dim}", f"DCDM, the paper's routing, K={chunks}, h={dim}",
                      _chunked(scale, num_chunks=chunks, share=share))  # fmt: skip
    for chunks in (4, 16):  # 32 fully masked ones take longer than a run may
        yield Variant(f"strided-full-k{chunks}", f"strided chunks, fully masked, K={chunks}",
                      _chunked(scale, "strided", num_chunks=chunks), FULL, extra=True)  # fmt: skip


TUNED = ("mdlm", "bdlm8", "paper", "strided-full", "causal-full", "paper-moe")


def _tuned() -> Iterator[Variant]:
    for parent in TUNED:
        yield Variant(f"{parent}-tuned", f"{parent}, fine-tuned on GSM8K", measures=("tasks",), parent=parent)


RATED = ("mdlm", "bdlm8", "paper", "strided-full")
RATES = {"-quarter-rate": 0.25, "-half-rate": 0.5, "": 1.0, "-double-rate": 2.0}
"""Ending of a variant's name → its learning rate as a multiple of the scale's."""
CLOSE_RATES = ("-half-rate",)  # as many seeds as at the scale's own: what the models' order is compared at


def _rated(known: Mapping[str, Variant]) -> Iterator[Variant]:
    for ending, rate in RATES.items():
        seeds = DECISIVE if ending in CLOSE_RATES else 3
        for model in (known[name] for name in RATED if ending):
            label = f"{model.label}, {rate:g} times the learning rate"
            name = f"{model.name}{ending}"
            yield replace(model, name=name, label=label, measures=CURVED, rate=rate, seeds=seeds, extra=True)


@dataclass(frozen=True)
class RunSpec:
    """A variant with a seed at a scale."""

    scale: Scale
    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant.name}-s{self.seed}"

    @property
    def parent(self) -> RunSpec | None:
        if self.variant.parent is None:
            return None
        return RunSpec(self.scale, variants(self.scale)[self.variant.parent], self.seed)

    @property
    def model(self) -> ModelConfig:
        if self.parent is not None:
            return self.parent.model
        changes = dict(self.variant.model)
        if changes.get("moe") is not None:
            changes["moe"] = MoEConfig(**changes["moe"])
        return replace(self.scale.base, **changes)

    @property
    def objective(self) -> ObjectiveConfig:
        if self.parent is not None:
            return self.parent.objective
        rate = self.scale.bias_rate if self.model.routes_from_noise else None
        return ObjectiveConfig(**{"bias_rate": rate, **self.variant.objective})

    @property
    def steps(self) -> int:
        return self.train["train.steps"]

    @property
    def train(self) -> dict[str, Any]:
        return self.scale.train_settings(self.seed, tuning=self.parent is not None, rate=self.variant.rate)

    @property
    def evaluate_every(self) -> int:
        """Steps between points of the validation curve; only at the end where a point would take too long."""
        costly = self.model.routes_from_noise and (self.model.num_chunks or 0) > 8  # sequential bound, many chunks
        return self.steps if self.parent is not None or costly else -(-self.steps // self.scale.evaluations)

    def identity(self) -> str:
        """What weights and curves follow from, as a short hash; measures of the weights do not enter."""
        parts: dict[str, Any] = {
            "model": self.model.to_dict(), "objective": self.objective.to_dict(), "train": self.train,
            "tokenizer": self.scale.tokenizer, "data": [*TRAINING, VALIDATION] if self.parent is None else [TUNING],
            "curve": [self.evaluate_every, self.scale.curve_windows, self.scale.curve_samples],
        }  # fmt: skip
        if self.parent is not None:
            parts["parent"] = self.parent.identity()
        return digest(parts)[:16]
