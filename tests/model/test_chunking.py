import math

import pytest
import torch
import torch.nn.functional as F

import tiny
from dcdm.keys import Key
from dcdm.model import masks, reference
from dcdm.model.attention import AttentionPlan
from dcdm.model.chunking import (
    ChunkingAttention,
    chunk_counts,
    max_violation,
    sequence_balance_loss,
    update_bias,
)


@pytest.fixture
def layer():
    return tiny.model("paper", num_chunks=5, chunk_dim=3).chunking


@pytest.fixture
def hidden():
    return torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def noise_plan(seed=0):
    masked = torch.rand(2, 7, generator=torch.Generator().manual_seed(seed)) < 0.5
    return AttentionPlan.of(masks.noise, masks.Slots.of(torch.zeros(2, 7, dtype=torch.long), masked), "reference")


def test_output_equals_a_loop_over_the_papers_formulas(layer, hidden):
    plan = noise_plan()
    out, r = layer(hidden, plan)
    for b in range(2):
        x = hidden[b] / (hidden[b].square().mean(-1, keepdim=True) + layer.eps).sqrt()
        total = torch.zeros(7, 7, dtype=torch.float64)
        for k in range(5):
            p = x @ layer.mu[k]
            a = p @ p.T / math.sqrt(3)
            total += a.masked_fill(~plan.dense[b], -torch.inf).softmax(-1)
            torch.testing.assert_close(r[b, :, k], p.norm(dim=-1))
            torch.testing.assert_close(a.diagonal(), r[b, :, k] ** 2 / math.sqrt(3))
        y = (total / math.sqrt(5)) @ (x @ layer.v_proj.weight.T) @ layer.o_proj.weight.T
        torch.testing.assert_close(out[b], hidden[b] + y)


def test_gradient_reaches_every_subspace_through_the_balance_loss(layer, hidden):
    gumbel = Key(0).gumbel_rows(torch.arange(2), 7, 5)
    counted = torch.ones(2, 7, dtype=torch.bool)
    sequence_balance_loss(layer.scores(hidden), counted, gumbel).backward()
    assert (layer.mu.grad.abs().amax(dim=(1, 2)) > 0).all()


def test_balance_loss_equals_a_literal_transcription_and_skips_what_is_not_counted():
    r = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).abs()
    gumbel = Key(2).gumbel_rows(torch.arange(2), 6, 3)
    counted = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]]).bool()
    expected = 0.0
    for b in range(2):
        rows = [(r[b, i] + gumbel[b, i]).argmax() for i in range(6) if counted[b, i]]
        for k in range(3):
            f = sum(int(c) == k for c in rows) / len(rows)
            expected -= math.log(f + 1 / 6) / (2 * 3)
    assert sequence_balance_loss(r, counted, gumbel).item() == pytest.approx(expected)
    given = sequence_balance_loss(r, counted, gumbel, eps=0.5)
    assert given.item() != pytest.approx(expected)


def test_balance_loss_is_least_at_uniform_usage():
    def value(ids):
        r = 1e4 * F.one_hot(torch.tensor([ids]), 3).double()
        return sequence_balance_loss(r, torch.ones(1, 6).bool(), torch.zeros(1, 6, 3).double()).item()

    assert value([0, 0, 1, 1, 2, 2]) < value([0, 0, 0, 1, 1, 2]) < value([0] * 6)


def test_bias_update_follows_hand_computed_counts():
    bias = torch.zeros(4)
    update_bias(bias, torch.tensor([6, 2, 0, 0]), rate=0.1)
    torch.testing.assert_close(bias, torch.tensor([-0.05, 0.0, 0.025, 0.025]))
    update_bias(bias, torch.tensor([0, 0, 0, 0]), rate=0.1)  # nothing counted: nothing moves
    torch.testing.assert_close(bias, torch.tensor([-0.05, 0.0, 0.025, 0.025]))


def test_bias_moves_the_assignment_but_neither_scores_nor_output(layer, hidden):
    before, r_before = layer(hidden, noise_plan())
    ids = layer.assign(r_before)
    layer.balance_bias += torch.tensor([0.0, 0.0, 100.0, 0.0, 0.0])
    after, r_after = layer(hidden, noise_plan())
    assert torch.equal(before, after)
    assert torch.equal(r_before, r_after)
    assert (layer.assign(r_after) == 3).all()
    assert not (ids == 3).all()


def test_no_gradient_flows_through_bias_or_ids(layer, hidden):
    assert not layer.balance_bias.requires_grad
    assert "balance_bias" in dict(layer.named_buffers())
    assert not layer.assign(layer.scores(hidden)).is_floating_point()


def test_max_violation_of_known_counts():
    assert max_violation(torch.tensor([5, 5, 5, 5])).item() == 0
    assert max_violation(torch.tensor([20, 0, 0, 0])).item() == 3
    assert max_violation(torch.tensor([[10, 10, 0, 0], [5, 5, 5, 5]])).tolist() == [1, 0]


def test_counts_leave_out_what_is_not_counted():
    ids = torch.tensor([[3, 1, 1, 2, -1], [1, 2, 2, 2, 2]])
    counted = torch.tensor([[0, 1, 1, 1, 0], [0, 1, 1, 1, 1]]).bool()
    assert chunk_counts(ids, counted, 3).tolist() == [[2, 1, 0], [0, 4, 0]]


def test_gumbel_noise_stays_finite_in_float32_over_many_draws():
    noise = Key(0).gumbel_rows(torch.arange(8), 500_000).float()
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=5e-3)


# --- the layer in somebody else's network ------------------------------------------------------------------------


def test_alone_the_layer_equals_the_literal_formula_under_any_mask_in_output_and_gradients(hidden):
    torch.manual_seed(0)
    layer = ChunkingAttention(16, num_chunks=5, chunk_dim=3, out_init_std=0.3).double()
    mask = torch.rand(2, 7, 7) < 0.5
    mask[0, 2] = False  # a query that may look at nothing
    for given, allowed in ((mask, mask), (None, torch.ones(2, 7, 7, dtype=torch.bool))):
        results = []
        for out, r in (layer(hidden, given), reference.chunking(layer, hidden, allowed)):
            layer.zero_grad()
            (out.square().sum() + r.sum()).backward()
            results.append([out, r, *(p.grad.clone() for p in layer.parameters())])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_alone_the_layer_starts_as_the_identity_and_its_methods_balance_it():
    torch.manual_seed(1)
    layer = ChunkingAttention(16, num_chunks=4, chunk_dim=3)
    h = torch.randn(8, 32, 16) + torch.linspace(0, 2, 16)
    out, r = layer(h)
    assert torch.equal(out, h)
    assert layer.balance_loss(r, generator=torch.Generator().manual_seed(0)).requires_grad
    before = max_violation(layer.counts(layer.assign(r)))
    for _ in range(300):
        layer.update_bias(layer.counts(layer.assign(r)), rate=0.01)
    assert max_violation(layer.counts(layer.assign(r))) < 0.2 < before


@pytest.mark.parametrize(("arguments", "says"), [((0, 4, 3), "d=0"), ((16, 4, 2.5), "chunk_dim=2.5")])
def test_sizes_that_make_no_layer_are_refused_by_name(arguments, says):
    with pytest.raises(ValueError, match=says):
        ChunkingAttention(*arguments)


def test_a_mask_of_another_shape_or_type_is_refused(hidden):
    layer = ChunkingAttention(16, 4, 3).double()
    for mask in (torch.ones(7, 7, dtype=torch.bool), torch.zeros(2, 7, 7)):
        with pytest.raises(ValueError, match=r"mask must be bool of the shape \(2, 7, 7\)"):
            layer(hidden, mask)
