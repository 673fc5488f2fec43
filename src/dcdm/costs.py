"""What a model costs: operations and activations, from its configuration alone; `dcdm plan` counts on the code.

Counted are matrix products (two operations per multiply-add), on the production path: slots that nobody reads
are not computed, the head runs at masked positions, attention at live pairs. A backward pass counts twice a
forward pass.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from dcdm.config import ModelConfig
from dcdm.kinds import parameter_counts
from dcdm.lanes.masks import led_positions
from dcdm.lanes.model import SHARE
from dcdm.model.routing import fixed_partition

BF16_PEAKS = {
    "B200": 2250e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12,
    "H800 PCIe": 756e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L4": 121e12,
}  # fmt: skip
"""Dense bf16 operations per second of one device by part of its name: vendors' figures; special ones first."""
MASKED_SHARE = 0.5  # of the free positions, on average over t ~ U[0, 1]


def bf16_peak(device_name: str) -> float | None:
    """Dense bf16 operations per second of a device, given its name as PyTorch tells it; None: not known."""
    for name, peak in BF16_PEAKS.items():
        if re.search(rf"\b{name}\b", device_name):
            return peak
    return None


@dataclass(frozen=True)
class CostEstimate:
    """Costs of training on one sequence of `length` positions."""

    length: int
    total_parameters: int
    active_parameters: int
    slots: float
    """Slots that pass through a block."""
    linear: float
    """Forward operations in the blocks' matrices."""
    attention: float
    chunking: float
    rounds: float
    """The causal routing's; forward only."""
    head: float

    @property
    def forward(self) -> float:
        return self.linear + self.attention + self.chunking + self.rounds + self.head

    @property
    def training(self) -> float:
        """Forward and backward of one sequence."""
        return 3 * (self.forward - self.rounds) + self.rounds


def cost_estimate(config: ModelConfig, length: int | None = None) -> CostEstimate:
    """Costs of one training sequence, chunks of equal size assumed."""
    length = length or config.context_length
    total, active = parameter_counts(config)
    d, heads = config.hidden_size, config.num_heads * config.head_dim
    embedding = config.vocab_size * d * (1 if config.tie_embeddings else 2)
    chunk_layer = 0 if not config.has_chunking else config.num_chunks * d * config.chunk_dim + 2 * d * d  # type: ignore[operator]
    draft_head = 6 * d * d if config.drafts else 0
    per_slot = 2 * (active - embedding - chunk_layer - draft_head) / config.num_layers  # one block, one slot
    groups = min(config.num_groups(length), length)
    size = length / groups
    if config.kind in ("ar", "lanes"):
        slots, pairs = float(length), length * (length + 1) / 2
        last_slots, last_pairs = slots, pairs
    elif config.predicts_from_left:
        slots, pairs = _from_left(config, length)
        last_slots, last_pairs = slots, pairs
    else:
        slots = 2 * length - size  # nobody reads the clean copy of the last chunk
        noisy_pairs = sum(size * (size + done * size) for done in range(groups))
        clean_pairs = sum(size * (done + 1) * size for done in range(groups - 1))
        pairs, last_slots, last_pairs = noisy_pairs + clean_pairs, float(length), noisy_pairs
    blocks = config.num_layers - 1
    attention = 4 * heads * (blocks * pairs + last_pairs)
    linear = per_slot * (blocks * slots + last_slots)
    chunking = rounds = 0.0
    if config.has_chunking:
        assert config.num_chunks is not None
        assert config.chunk_dim is not None
        width = 2 * config.num_chunks * config.chunk_dim + 2 * d
        soft_pairs = 2 * length * length * (1 - MASKED_SHARE) if config.routes_from_noise else pairs
        chunking = 2 * chunk_layer * slots + width * soft_pairs
        if config.routing == "causal" and not config.prior_decides:
            rounds = per_slot * length * (config.num_chunks + 1) / 2 + 4 * heads * length * length / 2
    predicted = length if config.kind == "ar" or config.predicts_from_left else MASKED_SHARE * length
    head = 2 * d * config.vocab_size * predicted
    head += config.drafts * 2 * (draft_head + d * config.vocab_size) * length / SHARE
    return CostEstimate(length, total, active, slots, linear, attention, chunking, rounds, head)


def _from_left(config: ModelConfig, length: int) -> tuple[float, float]:
    """Clean and seed slots of a text without a prompt, and how many pairs of them attend.

    For a routing by content a random partition is counted: which tokens are led depends on the text.
    """
    if config.routing == "causal" and not config.prior_decides:
        config = replace(config, routing="random", prior="none", prior_weight=0.0)
    free = torch.arange(length)[None] > 0
    ids = fixed_partition(config, free, torch.ones_like(free))[0]
    seeds, clean = (ids >= 1) & ~led_positions(ids), ids < ids.max()
    sizes = ids.bincount()
    earlier = sizes.cumsum(0) - sizes
    pairs = (earlier + sizes)[ids[clean]].sum() + (earlier + 1)[ids[seeds]].sum()
    return float(clean.sum() + seeds.sum()), float(pairs)


def activation_bytes(config: ModelConfig, sequences: int, length: int | None = None) -> float:
    """What backward keeps of the blocks in bf16, without activation checkpointing."""
    costs = cost_estimate(config, length)
    d, heads = config.hidden_size, config.num_heads * config.head_dim
    kv = 2 * config.num_kv_heads * config.head_dim
    if config.moe is None:
        assert config.intermediate_size is not None
        mlp = 3 * config.intermediate_size
    else:
        mlp = 3 * (config.moe.experts_per_token * config.moe.expert_size + config.moe.shared_size)
    # two residuals and two norms; queries and keys before and after norm and rotation, values, output; MLP
    kept = 4 * d + 4 * heads + 2 * kv + mlp
    return 2 * kept * config.num_layers * costs.slots * sequences
