"""Models of others: no BOS, prompts that are tokens like others, logits one place to the left.

`transformers` with a four-dimensional mask is the oracle: every block is asked by itself, the text before it known.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pretrained
from dcdm.model import reference
from dcdm.model.transformer import Model

pytest.importorskip("transformers")

BLOCK, LENGTH, VOCAB = 4, 11, 30
MASK = 7
"""What the source calls its mask: an id in the middle of the vocabulary."""
HABITS = {
    "block-causal": {"kind": "bdlm", "block_size": BLOCK},
    "bidirectional": {"kind": "mdlm"},
    "block-causal, shifted": {"kind": "bdlm", "block_size": BLOCK, "shift": True},
    "bidirectional, shifted": {"kind": "mdlm", "shift": True},
}


def pair(habit: str, family: str = "Qwen3", tied: bool = True) -> tuple[Any, Model]:
    source = pretrained.network(family, tied, VOCAB)
    return source, pretrained.copied(source, mask_id=MASK, **HABITS[habit])  # type: ignore[arg-type]


def text() -> tuple[Tensor, Tensor]:
    """Two texts without the mask's id, and which of their tokens are hidden: whole blocks, parts, and none."""
    tokens = (
        (torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(4)) * (VOCAB - MASK - 1)).long() + MASK + 1
    )
    masked = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.5
    masked[0, BLOCK : 2 * BLOCK] = True
    masked[1, :BLOCK] = False
    return tokens, masked


def ours(model: Model, tokens: Tensor, padding: int = 0) -> Tensor:
    """With BOS in its place, which nobody sees, and PAD."""
    config = model.config
    before, behind = (torch.full((len(tokens), n), i) for n, i in ((1, config.bos_id), (padding, config.pad_id)))
    return torch.cat([before, tokens, behind], dim=1)


def expected(source: Any, model: Model, tokens: Tensor, masked: Tensor) -> Tensor:
    """(B, L, V) block by block: the tokens before it known, its own hidden where they are."""
    size = model.config.block_size or LENGTH
    parts = []
    for start in range(0, LENGTH, size):
        end = min(start + size, LENGTH)
        hidden = masked & (torch.arange(LENGTH) >= start)
        z = tokens.masked_fill(hidden, MASK)[:, :end]
        parts.append(
            pretrained.literal_logits(source, z, model.config.block_size, model.config.shift)[:, start:end]
        )
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("family", pretrained.FAMILIES)
def test_logits_and_gradients_equal_those_of_transformers_under_its_mask(family: str, habit: str) -> None:
    source, model = pair(habit, family)
    tokens, masked = text()
    theirs = expected(source, model, tokens, masked)[masked]
    weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(6))
    weights[:, MASK] = 0
    (theirs * weights).sum().backward()
    hidden = torch.nn.functional.pad(masked, (1, 3))
    prompt = ours(model, ~masked, 3)[:, : LENGTH + 1] == 1  # what is said of given tokens changes nothing
    prompt = torch.nn.functional.pad(prompt, (0, 3)) & ~hidden
    wanted = theirs.detach().clone()
    wanted[:, MASK] = -torch.inf
    for forward in (model, lambda *given, **more: reference.forward(model, *given, **more)):
        for given in (None, prompt):
            model.zero_grad()
            logits = forward(ours(model, tokens, 3), hidden, prompt=given).logits[hidden][:, :VOCAB]
            torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=0)
            (logits.masked_fill(torch.arange(VOCAB) == MASK, 0) * weights).sum().backward()
        gradients = dict(source.model.named_parameters())
        for name, weight in model.named_parameters():
            grad, own = gradients[name].grad, weight.grad
            if name == "embed_tokens.weight":  # MASK has a row of its own; that of the source's mask stays unused
                own = own[:VOCAB] + 0
                own[MASK] += weight.grad[-1]
            torch.testing.assert_close(own, grad, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("habit", HABITS)
def test_every_backend_and_batch_gives_the_same(habit: str) -> None:
    model = pair(habit, "Qwen2")[1].double()
    tokens, masked = text()
    tokens, masked = ours(model, tokens), torch.nn.functional.pad(masked, (1, 0))
    tokens[1, -3:], masked[1, -3:] = model.config.pad_id, False
    alone = torch.cat(
        [
            model(tokens[:1], masked[:1]).logits[masked[:1]],
            model(tokens[1:, :-3], masked[1:, :-3]).logits[masked[1:, :-3]],
        ]
    )
    for backend in ("reference", "sdpa", "sdpa-tiled"):
        model.backend = backend
        torch.testing.assert_close(model(tokens, masked).logits[masked], alone)


@pytest.mark.parametrize("habit", HABITS)
def test_bos_and_what_a_block_may_not_see_change_nothing_and_prompts_see_what_is_hidden(habit: str) -> None:
    model = pair(habit)[1].double()
    tokens, masked = (x[:1] for x in text())
    tokens, masked = ours(model, tokens), torch.nn.functional.pad(masked, (1, 0))
    before = model(tokens, masked).logits[masked]
    for row in (model.config.bos_id, model.config.pad_id):  # nobody sees them
        with torch.no_grad():
            model.embed_tokens.weight[row] += 1
        assert torch.equal(model(tokens, masked).logits[masked], before)
    states = model.denoise(tokens.masked_fill(masked, model.config.mask_id), model.partition(tokens).ids)
    more = masked.clone()
    more[0, 4] = True
    again = model.denoise(tokens.masked_fill(more, model.config.mask_id), model.partition(tokens).ids)
    assert not masked[0, 1]
    assert not torch.allclose(states[0, 1 + model.config.shift], again[0, 1 + model.config.shift])
