"""The backbone and its mixture against `transformers` with copied weights, and every initial value."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pretrained
from dcdm.config import ModelConfig, MoEConfig
from dcdm.kinds import build
from dcdm.likelihood.estimators import score
from dcdm.model import reference
from dcdm.model.blocks import Experts, Gates, SparseMoE, load_balancing_loss
from dcdm.model.transformer import Model

transformers = pytest.importorskip("transformers")
qwen2_moe = pytest.importorskip("transformers.models.qwen2_moe.modeling_qwen2_moe")

TOLERANCE = 1e-5


def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Values at which every part matters: weights that keep the activations' size, norm weights around 1."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))


FAMILIES = (*pretrained.FAMILIES, "Llama 3")
KINDS: dict[str, dict[str, Any]] = {
    "lanes": {"kind": "lanes", "lanes": (1, 2, 4)},
    "causal": {"kind": "dcdm", "num_chunks": 3, "chunk_dim": 8, "routing": "causal"},
    "paper": {"kind": "dcdm", "num_chunks": 3, "chunk_dim": 8},
}


def padded_batch(config: ModelConfig, lengths: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """Random tokens (B, L) with PAD on the right, and which positions are real."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size - 3, (len(lengths), max(lengths)), generator=generator)
    tokens[:, 0] = config.bos_id
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return tokens.masked_fill(~real, config.pad_id), real


def next_token_loss(logits: Tensor, tokens: Tensor, real: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1][real[:, 1:]], tokens[:, 1:][real[:, 1:]])


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        difference = (ours[name] - gradient).abs().max()
        assert difference <= TOLERANCE * max(1.0, gradient.abs().max()), name


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        found[name.removeprefix("model.")] = parameter.grad
    return found


@pytest.mark.parametrize("heads", [(4, 4, 8), (4, 2, 8), (4, 1, 8), (4, 2, 6), (6, 3, 16)], ids=str)
def test_ar_logits_equal_transformers_for_every_gqa_shape(heads: tuple[int, int, int]) -> None:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    assert_same_logits(*pretrained.twins(**dict(zip(names, heads, strict=True))), length=13)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_ar_logits_equal_transformers_to_the_end_of_a_long_context(theta: float) -> None:
    rope = {"rope_type": "default", "rope_theta": theta}
    assert_same_logits(*pretrained.twins(rope_parameters=rope, max_position_embeddings=2048), length=2048)


def assert_same_logits(ours: Model, theirs: nn.Module, length: int) -> None:
    tokens, _ = padded_batch(ours.config, [length], seed=4)
    with torch.no_grad():
        expected, logits = theirs(tokens).logits, ours(tokens).logits
    assert expected.std() > 0.5  # large enough for the tolerance to mean something
    torch.testing.assert_close(logits, expected, atol=2 * TOLERANCE, rtol=0)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_transformers_for_every_shape_of_block(family: str, tied: bool) -> None:
    ours, theirs = pretrained.twins(family, tied)
    tokens, real = padded_batch(ours.config, [150, 7, 10], seed=8)
    logits, expected = ours(tokens).logits, theirs(tokens, attention_mask=real.long()).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(logits[real], expected[real], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(reference.forward(ours, tokens).logits[real], expected[real], atol=TOLERANCE, rtol=0)
    next_token_loss(logits, tokens, real).backward()
    next_token_loss(expected, tokens, real).backward()
    found = gradients(ours)
    assert_same_gradients(found, gradients(theirs))
    if family == "Qwen2":
        assert all(found[f"layers.1.self_attn.{name}_proj.bias"].abs().max() > 1e-4 for name in "qkv")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_production_path_equals_the_literal_one_and_the_cache_for_every_shape_of_block(
    family: str, kind: str
) -> None:
    config = replace(pretrained.twins(family)[0].config, **KINDS[kind], chunk_out_init_std=0.1)
    model = build(config, seed=1, dtype=torch.float64)
    randomise(model, torch.Generator().manual_seed(2))
    tokens, real = padded_batch(config, [40, 23], seed=3)
    masked = None if kind == "lanes" else real & (torch.arange(40) % 3 > 0)
    with torch.no_grad():
        made = model(tokens, masked)
        literal = reference.forward(model, tokens, masked, chunk_ids=made.chunk_ids)
        torch.testing.assert_close(made.logits, literal.logits, atol=1e-9, rtol=0)
        if kind != "paper":
            assert made.chunk_ids is not None
            assert torch.equal(reference.partition(model, tokens), made.chunk_ids)
            cached, uncached = (
                score(model, tokens, "trajectory", commit="chunk", cache=cache).nats for cache in ("exact", "none")
            )
            torch.testing.assert_close(cached, uncached, atol=1e-9, rtol=0)


def test_hidden_specials_leave_the_other_logits_and_take_no_probability() -> None:
    shown = pretrained.twins()[0]
    hidden = build(replace(shown.config, hide_specials=True))
    hidden.load_state_dict(shown.state_dict())
    tokens, _ = padded_batch(shown.config, [13, 9], seed=4)
    with torch.no_grad():
        all_logits, logits = shown(tokens).logits, hidden(tokens).logits
        torch.testing.assert_close(reference.forward(hidden, tokens).logits, logits)
    assert torch.equal(logits[..., :-3], all_logits[..., :-3])
    assert (logits[..., -3:] == -torch.inf).all()
    expected = F.cross_entropy(logits[0, :-1, :-3], tokens[0, 1:], reduction="sum").double()
    torch.testing.assert_close(score(hidden, tokens[:1], "exact").nats[0], expected, atol=1e-4, rtol=0)
    assert score(shown, tokens[:1], "exact").nats[0] > expected + 0.05


def test_ar_logits_do_not_depend_on_later_tokens_or_on_the_other_sequences() -> None:
    ours, _ = pretrained.twins()
    config = ours.config
    tokens, _ = padded_batch(config, [12, 12], seed=10)
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % config.bos_id
    changed[1] = changed[1].flip(0)
    with torch.no_grad():
        before, after = ours(tokens).logits, ours(changed).logits
    torch.testing.assert_close(before[0, :7], after[0, :7], atol=1e-6, rtol=0)
    assert (before[0, 7:] - after[0, 7:]).abs().max() > 0.1


MOE = MoEConfig(num_experts=6, experts_per_token=2, expert_size=20, shared_size=28)


def moe_twins(config: MoEConfig, seed: int, idle: int = 0) -> tuple[SparseMoE, nn.Module]:
    """Our mixture and that of `transformers` with the same weights.

    The last `idle` experts are out of reach for inputs whose first channel is 1.
    """
    d = 24
    theirs = qwen2_moe.Qwen2MoeSparseMoeBlock(
        transformers.Qwen2MoeConfig(
            hidden_size=d,
            num_experts=config.num_experts,
            num_experts_per_tok=config.experts_per_token,
            moe_intermediate_size=config.expert_size,
            shared_expert_intermediate_size=config.shared_size,
            norm_topk_prob=False,
            experts_implementation="eager",
        )
    )
    randomise(theirs, torch.Generator().manual_seed(seed))
    if idle:
        with torch.no_grad():
            theirs.gate.weight[-idle:, 0] = -50.0
    ours = SparseMoE(d, config)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def moe_input(batch: int, length: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(batch, length, 24, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    x[..., 0] = 1
    return x


def chosen_experts(gate_logits: Tensor, config: MoEConfig) -> Tensor:
    """How often each expert was chosen: (E,)."""
    choices = gate_logits.topk(config.experts_per_token, dim=-1).indices
    return choices.flatten().bincount(minlength=config.num_experts)


MOE_CASES = {
    "every expert used": (MOE, 0, (3, 17)),
    "three idle experts": (MOE, 3, (3, 17)),
    "one expert per token": (replace(MOE, experts_per_token=1), 2, (2, 9)),
    "a single token": (MOE, 0, (1, 1)),
    "every expert for every token": (replace(MOE, experts_per_token=6), 0, (2, 5)),
}


@pytest.mark.parametrize("case", MOE_CASES)
def test_mixture_and_its_gradients_equal_transformers_qwen2_moe_also_with_idle_experts(case: str) -> None:
    config, idle, (batch, length) = MOE_CASES[case]
    ours, theirs = moe_twins(config, seed=11, idle=idle)
    x = moe_input(batch, length, seed=12).requires_grad_()
    x_theirs = x.detach().clone().requires_grad_()
    y, gate_logits = ours(x)
    expected = theirs(x_theirs)
    if idle:
        assert (chosen_experts(gate_logits, config)[-idle:] == 0).all()
    elif batch * length > 9:
        assert (chosen_experts(gate_logits, config) > 0).all()
    assert expected.std() > 0.1
    torch.testing.assert_close(y, expected, atol=TOLERANCE, rtol=0)
    assert gate_logits.shape == (batch, length, config.num_experts)
    torch.testing.assert_close(gate_logits, F.linear(x_theirs, theirs.gate.weight), atol=TOLERANCE, rtol=0)

    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(13))
    y.backward(direction)
    expected.backward(direction)
    assert_same_gradients(gradients(ours), gradients(theirs))
    assert x.grad is not None
    assert x_theirs.grad is not None
    torch.testing.assert_close(x.grad, x_theirs.grad, atol=TOLERANCE, rtol=TOLERANCE)
    if idle:
        stacked = ours.experts.gate_up_proj.grad
        assert stacked is not None
        assert (stacked[-idle:] == 0).all()
        assert (stacked[:-idle] != 0).any()


@pytest.mark.parametrize("padded", [False, True], ids=["no padding", "padding"])
@pytest.mark.parametrize(("layers", "top_k"), [(1, 1), (1, 2), (4, 2), (3, 6)])
def test_load_balancing_loss_and_its_gradient_equal_transformers_qwen2_moe(
    layers: int, top_k: int, padded: bool
) -> None:
    batch, length, experts = 3, 8, 6
    generator = torch.Generator().manual_seed(17)
    values = [2 * torch.randn(batch * length, experts, generator=generator) for _ in range(layers)]
    ours = [v.clone().requires_grad_() for v in values]
    theirs = tuple(v.clone().requires_grad_() for v in values)
    real = torch.arange(length) < torch.tensor([8, 5, 1])[:, None]
    counted = real if padded else torch.ones_like(real)
    loss = load_balancing_loss([Gates(logits.view(batch, length, -1), counted) for logits in ours], top_k)
    if padded:
        expected = qwen2_moe.load_balancing_loss_func(theirs, experts, top_k, real.long())
        unpadded = qwen2_moe.load_balancing_loss_func(theirs, experts, top_k)
        assert (expected - unpadded).abs() > 1e-3 or top_k == experts
    else:
        expected = qwen2_moe.load_balancing_loss_func(theirs, experts, top_k)
    torch.testing.assert_close(loss, expected, atol=TOLERANCE, rtol=0)
    loss.backward()
    expected.backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-7, rtol=1e-4)
        if padded:
            assert (mine.grad[~real.flatten()] == 0).all()


def test_mixture_output_follows_a_permutation_of_the_tokens_and_a_split_of_the_batch() -> None:
    ours, _ = moe_twins(MOE, seed=22)
    ours = ours.double()
    x = moe_input(4, 16, seed=23, dtype=torch.float64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(24))
    with torch.no_grad():
        y, _ = ours(x)
        shuffled, _ = ours(x.flatten(0, 1)[order].view_as(x))
        alone = torch.cat([ours(part)[0] for part in x.flatten(0, 1).split(1)])
    torch.testing.assert_close(shuffled.flatten(0, 1), y.flatten(0, 1)[order], atol=1e-12, rtol=0)
    torch.testing.assert_close(alone, y.flatten(0, 1), atol=1e-12, rtol=0)


DENSE = ModelConfig("dcdm", 150, 64, 2, 4, 2, 16, 96, num_chunks=4, chunk_dim=16, tie_embeddings=False)
MIXED = replace(DENSE, intermediate_size=None, moe=MOE)


@pytest.mark.parametrize("config", [DENSE, MIXED], ids=["dense", "moe"])
def test_the_seed_decides_every_weight_and_leaves_the_global_generator_alone(config: ModelConfig) -> None:
    torch.manual_seed(0)
    first = build(config, seed=25).state_dict()
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), drawn)
    again, other = build(config, seed=25).state_dict(), build(config, seed=26).state_dict()
    for name, value in first.items():
        assert torch.equal(again[name], value), name
        constant = "norm" in name or name in ("chunking.o_proj.weight", "chunking.balance_bias")
        assert torch.equal(other[name], value) == constant, name


@pytest.mark.parametrize("std", [0.02, 0.1])
@pytest.mark.parametrize("config", [DENSE, MIXED], ids=["dense", "moe"])
def test_initial_weights_are_normal_with_the_configured_std_and_norms_are_one(
    config: ModelConfig, std: float
) -> None:
    state = build(replace(config, init_std=std), seed=28).state_dict()
    drawn = []
    for name, value in state.items():
        if "norm" in name:
            assert (value == 1).all(), name
        elif name not in ("chunking.o_proj.weight", "chunking.balance_bias"):
            drawn.append(value.flatten())
            spread = 5 / math.sqrt(value.numel())  # five standard errors
            assert abs(value.std() / std - 1) < spread, name
            assert abs(value.mean() / std) < spread, name
    everything = torch.cat(drawn)
    assert everything.std().item() == pytest.approx(std, rel=0.02)
    within_one_std = (everything.abs() < std).float().mean().item()
    assert within_one_std == pytest.approx(0.6827, abs=0.01)


def test_chunking_output_projection_starts_at_zero_or_at_the_configured_std() -> None:
    silent = build(DENSE, seed=29)
    assert silent.chunking is not None
    assert (silent.chunking.o_proj.weight == 0).all()
    assert (silent.chunking.balance_bias == 0).all()
    loud = build(replace(DENSE, chunk_out_init_std=0.02), seed=29)
    assert loud.chunking is not None
    assert loud.chunking.o_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert loud.chunking.v_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.fixture
def uninitialised_memory_is_nan():
    """PyTorch fills what `torch.empty` returns with NaN in deterministic mode."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.usefixtures("uninitialised_memory_is_nan")
@pytest.mark.parametrize(("config", "tied"), [(DENSE, True), (MIXED, False)], ids=["dense", "moe"])
@pytest.mark.parametrize("kind", ["ar", "mdlm", "bdlm", "dcdm"])
def test_building_on_the_meta_device_leaves_no_tensor_uninitialised(
    kind: str, config: ModelConfig, tied: bool
) -> None:
    only_dcdm = {} if kind == "dcdm" else {"num_chunks": None, "chunk_dim": None}
    block_size = 4 if kind == "bdlm" else None
    config = replace(config, kind=kind, block_size=block_size, tie_embeddings=tied, **only_dcdm)
    with torch.device("meta"):
        control = Model(config)
    control.to_empty(device="cpu")
    assert all(value.isnan().all() for value in control.state_dict().values())

    model = build(config, seed=30, dtype=torch.bfloat16)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert not value.is_meta, name
        assert value.isfinite().all(), name
        assert value.dtype == torch.bfloat16, name


@pytest.mark.parametrize("chosen", [(0, 1, 2, 3), (2,)])
def test_grouped_products_equal_the_loop_over_experts_in_outputs_and_gradients(chosen: tuple[int, ...]) -> None:
    torch.manual_seed(5)
    experts = Experts(16, MoEConfig(num_experts=4, experts_per_token=1, expert_size=24, shared_size=8))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(21, 16, requires_grad=True)
    expert = torch.tensor(chosen)[torch.randint(len(chosen), (21, 2))]
    weight = torch.rand(21, 2, requires_grad=True)
    inputs = (x, weight, *experts.parameters())
    results = [run(x, expert, weight) for run in (experts.grouped, experts.one_by_one)]
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
    for mine, other in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in results), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
