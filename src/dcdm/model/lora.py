"""Low-rank adapters (LoRA): a frozen weight W is used as W + s·BA, and A and B alone are trained.

They sit on the matrices of the blocks, in mixtures on those of attention and of the shared expert; of the
embedding, the rows of BOS, PAD and MASK get a trainable addend, since a pretrained model does not know them. A
chunking attention and a draft head are trained whole. Adapters lie beside the weights in the state dict
(`….q_proj.weight`, `….q_proj.lora_a`, `….q_proj.lora_b`), so merging is arithmetic on it.

    r rank   o, i rows and columns of a weight   d hidden size
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcdm.config import NUM_SPECIALS
from dcdm.model.products import Linear
from dcdm.model.transformer import Model

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
A, B, ROWS = "lora_a", "lora_b", "lora_rows"


class LoraLinear(Linear):
    """A frozen linear layer and its adapter."""

    active = True

    def __init__(self, frozen: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = frozen.in_features, frozen.out_features, scale
        self.weight, self.bias = frozen.weight, frozen.bias
        self.lora_a = nn.Parameter(frozen.weight.new_empty(rank, self.in_features))
        self.lora_b = nn.Parameter(frozen.weight.new_empty(self.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b) if self.active else y


class LoraEmbedding(nn.Embedding):
    """A frozen embedding whose last three rows, the specials', have a trainable addend."""

    active = True

    def __init__(self, frozen: nn.Embedding) -> None:
        nn.Module.__init__(self)
        for name in (
            "num_embeddings",
            "embedding_dim",
            "padding_idx",
            "max_norm",
            "norm_type",
            "scale_grad_by_freq",
        ):
            setattr(self, name, getattr(frozen, name))
        self.sparse, self.weight = frozen.sparse, frozen.weight
        self.lora_rows = nn.Parameter(torch.empty_like(frozen.weight[-NUM_SPECIALS:]))

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.active:
            return super().forward(tokens)
        addend = F.pad(self.lora_rows, (0, 0, 1, 0))  # row 0 is for all other tokens
        which = (tokens - (self.num_embeddings - NUM_SPECIALS - 1)).clamp(min=0)
        return super().forward(tokens) + F.embedding(which, addend)


def scale_of(rank: int, alpha: float | None) -> float:
    """s of W + s·BA: alpha over rank, by default 2."""
    return 2.0 if alpha is None else alpha / rank


def attach(model: Model, rank: int, alpha: float | None = None, seed: int = 0) -> None:
    """Freeze the model and give it adapters, which do nothing yet; in place."""
    model.requires_grad_(False)
    scale = scale_of(rank, alpha)
    for module in model.layers.modules():
        for name, child in list(module.named_children()):
            if name in TARGETS and isinstance(child, nn.Linear):
                setattr(module, name, LoraLinear(child, rank, scale))
    if not model.config.predicts_specials:  # else a tied head has these rows, too
        model.embed_tokens = LoraEmbedding(model.embed_tokens)
    for name, part in model.named_children():
        if name in ("chunking", "drafting"):
            part.requires_grad_(True)
    init_adapters(model, seed)


@torch.no_grad()
def init_adapters(model: Model, seed: int) -> None:
    """Every initial value of the adapters."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            size = module.lora_a.shape
            module.lora_a.copy_(torch.randn(size, generator=generator) / math.sqrt(module.in_features))
            module.lora_b.zero_()
        elif isinstance(module, LoraEmbedding):
            module.lora_rows.zero_()


@contextmanager
def switched_off(model: Model) -> Iterator[None]:
    """Inside, the model computes what its frozen weights do without their adapters."""
    parts = [part for part in model.modules() if isinstance(part, LoraLinear | LoraEmbedding)]
    for part in parts:
        part.active = False
    try:
        yield
    finally:
        for part in parts:
            part.active = True


def adapters(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name of the adapted weight, A, B) of every adapter in a state dict."""
    for name, a in state.items():
        if name.endswith(f".{A}"):
            prefix = name.removesuffix(A)
            yield f"{prefix}weight", a, state[f"{prefix}{B}"]


def is_adapter(name: str) -> bool:
    """Whether an entry of a state dict belongs to an adapter."""
    return name.rpartition(".")[2] in (A, B, ROWS)


def at_least_fp32(weight: Tensor) -> Tensor:
    """The weight in a type that can hold what training adds to it."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def merged(state: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """A state dict with its adapters added to the weights: that of a plain model, sums in fp32 at least."""
    plain = {name: value for name, value in state.items() if not is_adapter(name)}
    for name, a, b in adapters(state):
        weight = at_least_fp32(plain[name])
        plain[name] = weight + (scale * (b.double() @ a.double())).to(weight.dtype)
    if (rows := state.get(f"embed_tokens.{ROWS}")) is not None:
        weight = at_least_fp32(plain["embed_tokens.weight"]).clone()
        weight[-NUM_SPECIALS:] += rows
        plain["embed_tokens.weight"] = weight
    return plain
