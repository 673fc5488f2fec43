"""Models in the form of `transformers`: the loss that a training loop of others gets from them."""

import pytest
import torch
import torch.nn.functional as F

import tiny
from dcdm.hub import DCDMConfig, DCDMForMaskedLM
from dcdm.model.transformer import Model

KINDS = {"mdlm": {}, "bdlm": {}, "paper": {}, "causal": {}, "lanes": {"kind": "lanes", "lanes": (1, 2)}}


def wrapped(kind: str) -> DCDMForMaskedLM:
    name = "mdlm" if kind == "lanes" else kind
    torch.manual_seed(0)
    return DCDMForMaskedLM(DCDMConfig(tiny.config(name, **KINDS[kind]).to_dict()))


def test_a_new_model_begins_with_the_weights_that_training_begins_with():
    config = tiny.config("paper-moe", chunk_out_init_std=0.01)
    torch.manual_seed(0)
    made = DCDMForMaskedLM(DCDMConfig(config.to_dict())).model.state_dict()
    torch.manual_seed(0)
    model = Model(config)
    model.init_weights()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(made[name].std(), value.std(), msg=name, rtol=0.3, atol=0.02)
        torch.testing.assert_close(made[name].mean(), value.mean(), msg=name, rtol=0.3, atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_masks_has_a_loss_of_zero_that_can_be_trained_with(kind):
    model, tokens = wrapped(kind), tiny.tokens(2, 9)
    loss = model(input_ids=tokens, labels=torch.full_like(tokens, -100)).loss
    assert loss.item() == 0
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)


def test_the_loss_is_the_mean_over_masked_positions():
    model, tokens = wrapped("bdlm"), tiny.tokens(2, 9)
    masked = torch.zeros_like(tokens, dtype=torch.bool)
    masked[:, 4:7] = True
    told = model(
        input_ids=tokens.masked_fill(masked, model.model.config.mask_id), labels=tokens.masked_fill(~masked, -100)
    )
    torch.testing.assert_close(told.loss, F.cross_entropy(told.logits[masked], tokens[masked]))


@pytest.mark.parametrize("name", ["bos_id", "pad_id", "mask_id"])
def test_labels_that_are_never_predicted_are_refused_where_they_count(name):
    model, tokens = wrapped("mdlm"), tiny.tokens(1, 9)
    special = getattr(model.model.config, name)
    labels = tokens.clone()
    labels[0, 3] = special
    assert model(input_ids=tokens, labels=labels).loss == 0, "nothing is masked there"
    z = tokens.clone()
    z[0, 3] = model.model.config.mask_id
    with pytest.raises(ValueError, match=f"labels hold {special} at a MASK"):
        model(input_ids=z, labels=labels)


@pytest.mark.parametrize("kind", KINDS)
def test_the_chunks_come_with_the_logits(kind):
    model, tokens = wrapped(kind), tiny.tokens(2, 9)
    masked = torch.zeros_like(tokens, dtype=torch.bool)
    masked[:, 4:7] = True
    z, labels = tokens.masked_fill(masked, model.model.config.mask_id), tokens.masked_fill(~masked, -100)
    for out in (model(input_ids=z), model(input_ids=z, labels=labels)):
        assert out.chunk_ids.shape == tokens.shape
        assert (out.router_scores is not None) == (kind == "paper" or (kind == "causal" and out.loss is not None))
    if kind == "paper":
        torch.testing.assert_close(model(input_ids=z).router_scores, out.router_scores)
        assert torch.equal(model(input_ids=z).chunk_ids, out.chunk_ids)
