"""While a step is under way nothing is read from the device: the host stays ahead of it and it never runs dry."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

import tiny
from dcdm.config import ObjectiveConfig
from dcdm.data.loader import Loader
from dcdm.distributed import World
from dcdm.kinds import build
from dcdm.model import blockmask, blocks
from dcdm.training.settings import TrainConfig
from dcdm.training.trainer import Trainer
from reads import DEVICE, Reads
from toy import InMemory

STEP = {"a number": 0, "a copy to main memory": 1}
"""Of every step, after its passes: loss and gradient's norm, before the optimizer moves."""
PASS = {
    "ar": {}, "mdlm": {}, "bdlm": {}, "paper": {}, "paper-moe": {}, "positional": {}, "random": {},
    "causal": {"a copy to main memory": 1}, "causal-moe": {"a copy to main memory": 1},  # the chunk ids
    "lanes": {}, "lanes with drafts": {},
}  # fmt: skip
MICRO = 2


def kernel(q, k, v, block_mask):
    """FlexAttention's shapes and gradients, without its compilation."""
    return q * block_mask.kv_num_blocks.sum() + (k.sum() + v.sum())


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(blockmask, "flex_attention", kernel)
    monkeypatch.setattr(blocks, "grouped_helps", lambda x_td: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # the meta device knows none


def reads_of_a_step(kind: str) -> Counter[str]:
    wide = {"moe": replace(tiny.MOE, expert_size=16)} if "moe" in kind else {}  # grouped products want 16 bytes
    base = tiny.config(kind, **wide) if kind in tiny.KINDS else tiny.config(
        "mdlm", kind="lanes", lanes=(1, 2), drafts=2 if "drafts" in kind else 0
    )  # fmt: skip
    model = build(base, device=DEVICE)
    model.backend = "flex"
    train = TrainConfig(steps=2, batch_size=4, micro_batch=2)
    loader = Loader(InMemory(tiny.tokens(8, 20)), seed=0, global_batch=4, micro_batch=2)
    objective = ObjectiveConfig() if kind == "ar" else ObjectiveConfig(prompt_share=0.5, blank_share=0.25)
    trainer = Trainer(model, loader, train, objective, World(device=DEVICE))
    with Reads() as reads:
        trainer.take_step()
    return reads.found


@pytest.mark.parametrize("kind", PASS)
def test_a_training_pass_reads_nothing_from_the_device_but_what_is_named(kind, as_on_a_gpu):
    expected = Counter(STEP)
    for name, number in PASS[kind].items():
        expected[name] += MICRO * number
    assert +reads_of_a_step(kind) == +expected


def test_readings_are_seen():
    with Reads() as reads, torch.no_grad():
        x = torch.ones(3, device=DEVICE)
        bool(x.sum() > 0)
        x[x > 0]
        x.nonzero()
        x.tolist()
        torch.bincount(x.long(), minlength=4)
        torch.ones(3).to(DEVICE)
        torch.ones(3).to(DEVICE, non_blocking=True)
    assert sum(reads.found.values()) == 6
