"""What trains the draft head, and that nothing else learns from it; and lanes that learn from one lane."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import dcdm
import tiny
from dcdm.config import ConfigError, ObjectiveConfig
from dcdm.diffusion.objectives import Batch, GlobalBatch, loss
from dcdm.io.load import load_init
from dcdm.io.verify import cache_errors
from dcdm.keys import Key
from dcdm.lanes.masks import led_positions
from dcdm.lanes.model import SHARE, LaneModel
from dcdm.lanes.objective import DRAFT_WEIGHT, draw_lanes
from dcdm.model import lora
from dcdm.model.transformer import Model
from dcdm.training.settings import RunConfig, TrainConfig

SETTINGS = ObjectiveConfig(prompt_share=0.5)


def lanes_model(drafts: int) -> Model:
    made = tiny.model("mdlm", kind="lanes", lanes=(1, 2, 4), drafts=drafts)
    if made.drafting is not None:
        with torch.no_grad():
            made.drafting.down.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    return made


def test_the_loss_is_that_of_a_literal_loop() -> None:
    model, clean = lanes_model(3), tiny.tokens(5, 17, padding=(0, 4))
    assert model.drafting is not None
    found = loss(model, Batch(clean), Key(3), ObjectiveConfig(prompt_share=0.0)).draft_loss
    positions = model.position_masks(clean)
    drawn = draw_lanes(model.config, Key(3), torch.arange(5), positions.free.sum(dim=-1))
    ids = model.partition(clean, None, None, drawn).ids
    states = model.encode(clean, chunk_ids=ids).states
    led, total = led_positions(ids), 0.0
    for row in range(0, 5, SHARE):
        for start in range(clean.shape[1]):
            if ids[row, start] < 1:
                continue
            state = states[row, start]
            for ahead in range(1, 4):
                at = start + ahead
                if at >= clean.shape[1] or not led[row, at]:
                    break
                state = model.drafting(state, model.embed_tokens(clean[row, at - 1]))
                total = total + F.cross_entropy(model.token_logits(state), clean[row, at])
    torch.testing.assert_close(found, total * (5 / 2) / 3 / positions.free.sum())  # two of five rows


def test_the_rest_of_the_network_learns_nothing_from_it() -> None:
    with_head, without = lanes_model(3), lanes_model(0)
    without.load_state_dict({n: v for n, v in with_head.state_dict().items() if not n.startswith("drafting.")})
    batch = Batch(tiny.tokens(6, 17))
    made = [loss(model, batch, 5, SETTINGS) for model in (with_head, without)]
    for one in made:
        one.total.backward()
    assert made[1].draft_loss is None
    assert made[0].draft_loss is not None
    torch.testing.assert_close(made[0].total, made[1].total + DRAFT_WEIGHT * made[0].draft_loss)
    assert torch.equal(made[0].nll, made[1].nll)
    for name, parameter in without.named_parameters():
        torch.testing.assert_close(with_head.get_parameter(name).grad, parameter.grad, msg=name)
    assert with_head.drafting is not None
    assert all(parameter.grad is not None for parameter in with_head.drafting.parameters())


def test_splitting_a_batch_changes_neither_loss_nor_gradient() -> None:
    model, clean = lanes_model(2), tiny.tokens(8, 17, padding=(0, 5))
    whole = loss(model, Batch(clean), Key(1), SETTINGS)
    whole.total.backward()
    assert model.drafting is not None
    expected = [parameter.grad.clone() for parameter in model.drafting.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    shared = GlobalBatch(whole.tokens, 8)
    parts = []
    for at in (0, 2, 4, 6):
        rows = slice(at, at + 2)
        part = loss(model, Batch(clean[rows], rows=torch.arange(at, at + 2), num_rows=8), Key(1), SETTINGS, shared)
        part.total.backward()
        parts.append(part)
    torch.testing.assert_close(sum(part.draft_loss for part in parts), whole.draft_loss)
    for parameter, gradient in zip(model.drafting.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_model_begins_with_the_same_weights_with_and_without_a_head() -> None:
    config = tiny.config("mdlm", kind="lanes")
    plain, drafting = (dcdm.build(replace(config, drafts=number), seed=3) for number in (0, 3))
    for name, value in plain.state_dict().items():
        assert torch.equal(value, drafting.state_dict()[name]), name
    assert drafting.drafting is not None
    assert not drafting.drafting.down.weight.any()


def test_weights_without_a_head_start_a_model_that_has_one(tmp_path: Path) -> None:
    folder = tiny.exported("mdlm", tmp_path / "start", kind="lanes")
    start, tokenizer = dcdm.load(folder)
    model = dcdm.build(replace(start.config, drafts=2), seed=0)
    load_init(model, str(folder), tokenizer)
    assert torch.equal(model.embed_tokens.weight, start.embed_tokens.weight)
    with_head = tiny.exported("mdlm", tmp_path / "head", kind="lanes", drafts=2)
    load_init(without := dcdm.build(start.config, seed=1), str(with_head), tokenizer)
    assert torch.equal(without.embed_tokens.weight, dcdm.load(with_head)[0].embed_tokens.weight)
    assert cache_errors(dcdm.load(with_head)[0]) == []


# --- a head on a frozen network ----------------------------------------------------------------------------------


def frozen_model(**fields: object) -> LaneModel:
    made = tiny.model("mdlm", kind="lanes", lanes=(1,), drafts=3, **fields)
    assert isinstance(made, LaneModel)
    assert made.drafting is not None
    with torch.no_grad():
        made.drafting.down.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name.startswith("drafting."))
    return made


@pytest.mark.parametrize("draft_vocab", [0, 7])
def test_a_head_alone_learns_the_distributions_of_the_network_as_far_as_drafts_get(draft_vocab: int) -> None:
    model, clean = frozen_model(draft_vocab=draft_vocab), tiny.tokens(3, 13, padding=(0, 4))
    prompt = torch.zeros_like(clean, dtype=torch.bool)
    prompt[1, :4] = True
    found = loss(model, Batch(clean, prompt), Key(3), ObjectiveConfig(prompt_share=0.0))
    states, kept = model.encode(clean, prompt=prompt).states.detach(), draft_vocab or tiny.LETTERS
    free = model.position_masks(clean, prompt).free
    total, accepted = torch.zeros(()), 0
    for row, start in free.nonzero().tolist():
        state = states[row, start]
        for number, at in enumerate(range(start + 1, min(start + 4, clean.shape[1])), start=1):
            if not free[row, at]:
                break
            state = model.drafting(state, model.embed_tokens(clean[row, at - 1]))
            p = model.token_logits(states[row, at]).softmax(dim=-1)
            q = model.token_logits(state)[:kept].softmax(dim=-1)
            total = total - (p[:kept] * q.log()).sum()
            true, drawn = int(clean[row, at]), Key(3).fold("reach", number).rows(torch.arange(3), 13)[row, start]
            if true >= kept or drawn >= q[true] / p[true]:
                break
            accepted += 1
    torch.testing.assert_close(found.total, total / free.sum())
    assert accepted > 4
    exact = dcdm.score(model, clean, "exact", prompt=prompt, lanes=1).nats.sum() / free.sum()
    torch.testing.assert_close(found.nll, exact)
    found.total.backward()
    learned = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learned == {name for name in model.state_dict() if name.startswith("drafting.")}


def test_windows_that_come_again_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, clean = frozen_model(), tiny.tokens(4, 13, padding=(0, 4))
    settings, whole = ObjectiveConfig(prompt_share=0.0), Batch(clean, index=torch.tensor([5, 2, 8, 3]))
    first = loss(model, whole, Key(1), settings)
    monkeypatch.setattr(model, "encode", None)
    assert torch.equal(loss(model, whole, Key(1), settings).total, first.total)
    shared = GlobalBatch(first.tokens, 4)
    rows = {(3, 1): torch.tensor([3, 2]), (0, 2): torch.tensor([5, 8])}
    halves = [Batch(clean[[*at]], rows=torch.tensor(at), num_rows=4, index=index) for at, index in rows.items()]
    parts = [loss(model, part, Key(1), settings, shared).total for part in halves]
    torch.testing.assert_close(sum(parts), first.total)


def test_a_head_that_drafts_some_tokens_only_changes_no_text() -> None:
    model = frozen_model(draft_vocab=7)
    options = {"max_new_tokens": 10, "index": [4], "temperature": 1.0}
    for temperature in (0.0, 1.0):
        options["temperature"] = temperature
        drafted = dcdm.generate(model, [[1, 2, 3]], lanes=1, drafts=3, **options)
        assert drafted.forwards[0] <= 10
        if temperature == 0:
            plain = dcdm.generate(model, [[1, 2, 3]], lanes=1, drafts=0, **options)
            assert drafted.completions == plain.completions
    assert cache_errors(model) == []


# --- lanes that learn what frozen weights predict in one lane -----------------------------------------------------


def test_lanes_by_soft_targets_learn_what_the_frozen_weights_predict_in_one_lane() -> None:
    model, clean = lanes_model(0), tiny.tokens(3, 13, padding=(0, 4))
    prompt = torch.zeros_like(clean, dtype=torch.bool)
    prompt[1, :4] = True
    free = model.position_masks(clean, prompt).free
    p = model(clean, prompt=prompt, lanes=1).logits[free].softmax(dim=-1).detach()
    lora.attach(model, rank=2)
    for name, parameter in model.named_parameters():
        if lora.is_adapter(name):
            parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    found = loss(model, Batch(clean, prompt), Key(3), ObjectiveConfig(prompt_share=0.0, soft_targets=True))
    lanes = draw_lanes(model.config, Key(3), torch.arange(3), free.sum(dim=-1))
    log_q = model(clean, prompt=prompt, lanes=lanes).logits[free].log_softmax(dim=-1)
    expected = -(p * log_q.masked_fill(p == 0, 0)).sum() / free.sum()
    torch.testing.assert_close(found.total, expected)
    found.total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    expected_gradients = torch.autograd.grad(expected, [model.get_parameter(name) for name in gradients])
    assert set(gradients) == {name for name, _ in model.named_parameters() if lora.is_adapter(name)}
    for mine, theirs in zip(gradients.values(), expected_gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_soft_targets_ask_for_adapters_of_a_lane_model() -> None:
    lanes, soft = tiny.config("mdlm", kind="lanes"), ObjectiveConfig(soft_targets=True)
    with pytest.raises(ConfigError, match=r"train\.lora"):
        RunConfig(lanes, objective=soft, init="base")
    with pytest.raises(ConfigError, match="lane model"):
        RunConfig(tiny.config("ar"), objective=soft, init="base", train=TrainConfig(lora=2))
    assert RunConfig(lanes, objective=soft, init="base", train=TrainConfig(lora=2)).objective.soft_targets
    assert "soft_targets" not in ObjectiveConfig().to_dict()
