"""States in which something is missing: nothing visible, nothing masked, one position, one chunk."""

import pytest
import torch

import dcdm
import tiny
from dcdm.diffusion.objectives import Batch, loss


def without_bos(rows=2, length=8):
    return tiny.tokens(rows, length) % tiny.LETTERS


def test_with_nothing_visible_paper_routing_sends_every_position_to_one_chunk():
    model = tiny.model("paper", num_chunks=4)
    clean = without_bos()
    ids = model(clean, torch.ones_like(clean, dtype=torch.bool)).chunk_ids
    assert (ids == ids[:, :1]).all()


def test_empty_chunks_are_harmless():
    model = tiny.model("paper", num_chunks=6)
    clean = tiny.tokens(2, 5)  # 5 positions cannot fill 6 chunks
    out = model(clean, tiny.noise(model, clean))
    assert len(set(out.chunk_ids.flatten().tolist())) < 6
    loss(model, Batch(clean), 0).total.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_prompt_that_leaves_one_free_position_is_scored_exactly(kind):
    model = tiny.model(kind)
    clean = tiny.tokens(3, 7)
    prompt = torch.ones_like(clean, dtype=torch.bool)
    prompt[:, 4] = False
    for samples in (1, "all"):
        scored = dcdm.score(model, clean, samples=samples, prompt=prompt)
        assert scored.tokens.tolist() == [1, 1, 1]
        one = dcdm.score(model, clean, "trajectory", prompt=prompt)
        if kind == "ar":
            continue  # exact counts the specials' share, the decoder does not
        torch.testing.assert_close(scored.nats, one.nats)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_sequence_of_bos_alone_costs_nothing(kind):
    model = tiny.model(kind)
    bos = torch.full((2, 1), model.config.bos_id)
    out = model(bos, torch.zeros(2, 1, dtype=torch.bool))
    assert out.logits.shape == (2, 1, 23)
    assert not torch.isnan(out.logits).any()
    assert loss(model, Batch(bos), 0).nll == 0
    for estimator in ("auto", "trajectory"):
        for samples in (2, "all"):
            scored = dcdm.score(model, bos, estimator, samples=samples)
            assert scored.nats.tolist() == [0, 0]
            assert scored.per_token == 0


@pytest.mark.parametrize("kind", tiny.DIFFUSION)
def test_a_single_masked_position_with_nothing_visible_is_predicted(kind):
    model = tiny.model(kind)
    one = torch.tensor([[3]])
    log_p = model(one, torch.ones(1, 1, dtype=torch.bool)).logits.log_softmax(-1)
    assert log_p[0, 0, :20].exp().sum().item() == pytest.approx(1.0)
    scored = dcdm.score(model, one, "trajectory")
    assert scored.nats.item() == pytest.approx(-log_p[0, 0, 3].item())


@pytest.mark.parametrize("kind", ["paper", "causal", "positional", "strided", "random"])
def test_one_chunk_has_the_mask_of_mdlm(kind):
    model = tiny.model(kind, num_chunks=1)
    clean = tiny.tokens(2, 9)
    ids = model(clean, tiny.noise(model, clean)).chunk_ids
    assert (ids[:, 1:] == 1).all()
    scored = dcdm.score(model, clean, "trajectory")
    assert scored.forwards.tolist() == [1, 1]


@pytest.mark.parametrize("kind", tiny.DIFFUSION)
def test_everything_visible_predicts_nothing_and_carries_every_token_over(kind):
    model = tiny.model(kind)
    clean = tiny.tokens(2, 9, padding=(0, 2))
    out = model(clean, torch.zeros_like(clean, dtype=torch.bool))
    assert torch.equal(out.logits.argmax(-1), clean)
    assert (out.logits.exp().sum(-1) == 1).all()


@pytest.mark.parametrize("kind", ["causal", "positional", "strided", "random"])
def test_more_chunks_than_free_positions_leaves_the_last_chunks_empty(kind):
    model = tiny.model(kind, num_chunks=9)
    clean = tiny.tokens(2, 5)
    ids = model.partition(clean).ids
    assert sorted(ids[0, 1:].tolist()) == [1, 2, 3, 4]
    assert dcdm.score(model, clean, "trajectory").forwards.tolist() == [4, 4]
    assert torch.isfinite(loss(model, Batch(clean), 0).total)


def test_a_row_of_padding_beside_a_real_one_changes_nothing():
    for kind in tiny.KINDS:
        model = tiny.model(kind)
        clean = tiny.tokens(2, 6)
        clean[1] = model.config.pad_id
        alone = dcdm.score(model, clean[:1], "trajectory")
        both = dcdm.score(model, clean, "trajectory")
        torch.testing.assert_close(both.nats[:1], alone.nats)
        assert both.tokens.tolist() == [5, 0]


def test_bad_inputs_name_what_is_wrong():
    model = tiny.model("mdlm")
    clean = tiny.tokens(2, 6)
    masked = tiny.noise(model, clean)
    with pytest.raises(ValueError, match="always visible"):
        model(clean, torch.ones_like(masked))
    with pytest.raises(ValueError, match="always visible"):
        model(clean, masked | True, prompt=masked)
    with pytest.raises(ValueError, match="needs `masked`"):
        model(clean)
    with pytest.raises(ValueError, match="bool"):
        model(clean, masked.long())
    with pytest.raises(ValueError, match="shape"):
        model(clean[0], masked[0])
    with pytest.raises(ValueError, match="max_position"):
        tiny.model("mdlm", max_position=64)(tiny.tokens(1, 65), torch.zeros(1, 65).bool())
    with pytest.raises(ValueError, match="num_rows"):
        loss(model, Batch(clean, rows=torch.tensor([0, 1])), 0)
