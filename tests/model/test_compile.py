"""Blocks compile without graph breaks and compute the same."""

import functools
from dataclasses import replace

import pytest
import torch

import dcdm
from dcdm.diffusion.objectives import Batch, loss
from dcdm.keys import Key
from dcdm.kinds import build

PRESETS = (
    "ar-debug", "dcdm-debug-causal", "dcdm-debug", "mdlm-debug", "bdlm-debug", "dcdm-moe-debug",
    "dcdm-moe-debug-causal",
)  # fmt: skip


@pytest.mark.parametrize(("name", "backend"), [
    *((name, "eager") for name in PRESETS[:3]),  # traced as a whole, without writing and compiling C++
    *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in PRESETS),
])  # fmt: skip
def test_compiled_blocks_give_equal_losses_and_gradients_in_training_and_equal_states_in_decoding(
    name, backend, monkeypatch
):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    model = build(replace(dcdm.preset(name), num_layers=2), seed=0)
    tokens = torch.randint(0, 256, (3, 48), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = model.config.bos_id
    ids = (torch.arange(48) // 12).expand(3, -1)
    settings = replace(model.objective, bias_rate=None if model.config.kind != "dcdm" else 0.0)

    def work(step):
        model.zero_grad()
        result = loss(model, Batch(tokens), Key(step), settings)  # the bias stays, or ids would differ
        result.total.backward()
        gradient = model.layers[1].self_attn.q_proj.weight.grad.clone()
        with torch.no_grad():
            return result.total.detach(), gradient, model.denoise(tokens, ids)

    eager = [work(step) for step in range(3)]
    model.compile_blocks()  # fullgraph: a graph break would raise
    for step, expected in enumerate(eager):  # shapes differ from step to step
        for mine, other in zip(work(step), expected, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
