"""Models in the form of `transformers`."""

import pytest
import torch

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
def test_the_logits_are_those_of_the_training_pass_and_chunks_come_with_them(kind):
    model, tokens = wrapped(kind), tiny.tokens(2, 9)
    network = model.model
    masked = torch.zeros_like(tokens, dtype=torch.bool)
    masked[:, 8:] = True  # one position, which is the chunk that comes next
    with torch.no_grad():
        out = model(input_ids=tokens.masked_fill(masked, network.config.mask_id))
        if kind not in ("lanes", "paper"):  # with the paper's routing, revealed tokens count as earlier
            expected = network(tokens, masked).logits[masked]
            torch.testing.assert_close(out.logits[masked], expected, atol=1e-5, rtol=0)
    assert out.chunk_ids.shape == tokens.shape
    assert (out.router_scores is not None) == (kind == "paper")
