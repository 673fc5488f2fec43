"""Muon: what its iterations do and what it moves. test_checkpoint.py spreads runs with it over ranks."""

import pytest
import torch

import tiny
from dcdm.config import ConfigError
from dcdm.training.optimizers import Muon, make_optimizer, orthogonalised
from dcdm.training.settings import TrainConfig

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16), (5, 24, 8)])
def test_newton_schulz_in_fp32_gives_singular_values_near_one(shape):
    matrices = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalised(matrices))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_a_batch_of_matrices_is_orthogonalised_one_by_one():
    matrices = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alone = torch.stack([orthogonalised(matrix) for matrix in matrices])
    torch.testing.assert_close(orthogonalised(matrices), alone, rtol=0, atol=1e-12)


def test_muon_moves_the_matrices_of_blocks_and_chunking_attention_and_adamw_the_rest():
    model = tiny.model("paper-moe", tie_embeddings=False)
    optimizer = make_optimizer(model, TrainConfig(optimizer="muon", learning_rate=2e-3, muon_rate=1e-2))
    assert isinstance(optimizer, Muon)
    kinds = {id(p): group["orthogonal"] for group in optimizer.param_groups for p in group["params"]}
    by_muon = {name for name, parameter in model.named_parameters() if kinds[id(parameter)]}
    assert {"chunking.mu", "layers.0.self_attn.q_proj.weight", "layers.1.mlp.experts.down_proj"} <= by_muon
    rest = {name for name, _ in model.named_parameters()} - by_muon
    assert {"embed_tokens.weight", "lm_head.weight", "norm.weight"} <= rest
    assert all("norm" in name or name in ("embed_tokens.weight", "lm_head.weight") for name in rest)
    assert [round(group["rate_scale"], 9) for group in optimizer.param_groups] == [5.0, 1.0, 1.0]


def test_an_update_has_the_size_that_the_rate_says():
    model = tiny.model("ar")
    optimizer = make_optimizer(model, TrainConfig(optimizer="muon", learning_rate=1e-2, weight_decay=0.0))
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    weight = model.layers[0].mlp.gate_proj.weight
    before = weight.detach().clone()
    model(tiny.tokens(2, 9)).logits.square().sum().backward()
    optimizer.step()
    moved = torch.linalg.svdvals(weight.detach() - before) / (1e-2 * 0.2 * max(weight.shape) ** 0.5)
    assert moved.max() < 1.3
    assert moved.median() > 0.5


@pytest.mark.parametrize(("wrong", "message"), [
    ({"optimizer": "sgd"}, "optimizer='sgd' is not known; choose one of adamw, muon"),
    ({"muon_rate": 0}, "muon_rate=0"), ({"muon_momentum": 1.0}, "muon_momentum=1"),
])  # fmt: skip
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**wrong)
