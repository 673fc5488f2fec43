"""What training costs, roughly: for the log of a run and choosing a micro-batch. `dcdm plan` counts exactly."""

from __future__ import annotations

import re

from dcdm.config import ModelConfig
from dcdm.kinds import parameter_counts

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


def slots(config: ModelConfig, length: int) -> int:
    """Positions of a sequence that pass through the blocks: twice as many with a clean stream beside the noisy."""
    return length if config.predicts_from_left or config.kind in ("ar", "mdlm") else 2 * length


def training_operations(config: ModelConfig, length: int) -> float:
    """Of one sequence, forward and backward: six for each active weight and slot that it works on.

    As usual for a utilisation, the products of attention are left out.
    """
    head = config.vocab_size * config.hidden_size
    blocks = parameter_counts(config)[1] - head * (1 if config.tie_embeddings else 2)
    predicted = length if config.predicts_from_left or config.kind == "ar" else MASKED_SHARE * length
    return 6 * (blocks * slots(config, length) + head * predicted)


def activation_bytes(config: ModelConfig, sequences: int, length: int) -> float:
    """What backward keeps of the blocks in bf16, without activation checkpointing."""
    d, heads = config.hidden_size, config.num_heads * config.head_dim
    kv = 2 * config.num_kv_heads * config.head_dim
    if config.moe is None:
        assert config.intermediate_size is not None
        mlp = 3 * config.intermediate_size
    else:
        mlp = 3 * (config.moe.experts_per_token * config.moe.expert_size + config.moe.shared_size)
    # two residuals and two norms; queries and keys before and after norm and rotation, values, output; MLP
    kept = 4 * d + 4 * heads + 2 * kv + mlp
    return 2 * kept * config.num_layers * slots(config, length) * sequences
