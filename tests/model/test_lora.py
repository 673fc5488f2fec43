"""Adapters: they begin as nothing, train alone, and merged give the same model."""

from __future__ import annotations

import pytest
import torch

import tiny
from dcdm.config import ModelConfig
from dcdm.diffusion.objectives import Batch, loss
from dcdm.keys import Key
from dcdm.kinds import build
from dcdm.model import lora, reference
from dcdm.model.transformer import Model

KINDS = {
    "lanes": {"kind": "lanes", "lanes": (1, 2, 3)},
    "hidden ar": {"kind": "ar", "hide_specials": True},
    "ar": {"kind": "ar"},
    "untied": {"kind": "lanes", "lanes": (1, 2), "tie_embeddings": False, "attention_bias": True, "qk_norm": False},
    "bdlm": {"kind": "bdlm", "block_size": 2},
    "causal": tiny.KINDS["causal"],
    "paper": tiny.KINDS["paper"],
    "moe": {"kind": "lanes", "lanes": (1, 2), "moe": tiny.MOE, "intermediate_size": None},
}


def plain(name: str) -> Model:
    return tiny.model("mdlm", **KINDS[name])


def adapted(name: str, moved: bool) -> Model:
    model = plain(name)
    lora.attach(model, rank=2, alpha=3.0, seed=5)
    if moved:
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def logits(model: Model) -> torch.Tensor:
    tokens = tiny.tokens(2, 12, padding=(2,))
    masked = None
    if model.config.kind != "ar" and not model.config.predicts_from_left:
        masked = tiny.noise(model, tokens)
    with torch.no_grad():
        return model(tokens, masked).logits


@pytest.mark.parametrize("name", KINDS)
def test_fresh_adapters_change_nothing_and_leave_the_weights_in_their_places(name: str) -> None:
    before, after = plain(name), adapted(name, moved=False)
    torch.testing.assert_close(logits(after), logits(before), atol=1e-12, rtol=0)
    state = after.state_dict()
    assert all(torch.equal(state[key], value) for key, value in before.state_dict().items())


@pytest.mark.parametrize("name", KINDS)
def test_a_merged_model_is_the_adapted_one(name: str) -> None:
    model = adapted(name, moved=True)
    merged = plain(name)
    merged.load_state_dict(lora.merged(model.state_dict(), lora.scale_of(2, 3.0)))
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-9, rtol=0)
    assert (logits(plain(name)) - logits(model)).nan_to_num(0.0).abs().max() > 0.1


@pytest.mark.parametrize("name", KINDS)
def test_adapters_the_new_rows_and_a_chunking_attention_get_gradients_and_nothing_else(name: str) -> None:
    model = adapted(name, moved=True)
    loss(model, Batch(tiny.tokens(4, 16)), Key(0)).total.backward()
    for key, parameter in model.named_parameters():
        trained = lora.is_adapter(key) or key.startswith("chunking.")
        assert (parameter.grad is not None) == trained, key
        if key == "embed_tokens.lora_rows":
            assert parameter.grad is not None
            assert bool((parameter.grad[0] != 0).any())  # BOS is seen by all
            assert bool((parameter.grad[2] != 0).any()) == (model.config.kind != "ar")  # MASK
    assert ("embed_tokens.lora_rows" in dict(model.named_parameters())) == (name != "ar")


def test_the_literal_network_and_the_routing_rounds_know_adapters() -> None:
    model = adapted("causal", moved=True)
    tokens = tiny.tokens(2, 12)
    masked = tiny.noise(model, tokens)
    with torch.no_grad():
        assert torch.equal(reference.partition(model, tokens), model.partition(tokens).ids)
        expected = reference.forward(model, tokens, masked).logits
        torch.testing.assert_close(model(tokens, masked).logits, expected, atol=1e-9, rtol=0)


def test_the_seed_decides_adapters_and_alpha_their_scale() -> None:
    config = ModelConfig("lanes", 23, 16, 2, 2, 1, 8, 24)
    states = []
    for seed in (1, 1, 2):
        model = build(config, seed=0)
        lora.attach(model, 4, seed=seed)
        states.append(model.state_dict())
    name = "layers.1.mlp.up_proj.lora_a"
    assert torch.equal(states[0][name], states[1][name])
    assert not torch.equal(states[0][name], states[2][name])
    assert (lora.scale_of(4, None), lora.scale_of(4, 4.0)) == (2.0, 1.0)
