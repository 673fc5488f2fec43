"""Models with others' habits in everything that decodes, scores, fills, serves and shows."""

from __future__ import annotations

import pytest
import torch

import dcdm
import tiny
import walks
from dcdm.config import ConfigError
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.decoding.caching import cached_predictor, shared_prefix
from dcdm.decoding.config import DecodingConfig

ROUTINGS = {"mdlm": ("auto", "blocks:3"), "bdlm": ("auto", "blocks:3", "sub-blocks:2", "from-prompt")}


@pytest.mark.parametrize("name", tiny.OTHERS)
def test_cached_predictions_equal_uncached_ones(name: str) -> None:
    """Prompts at the front, in the middle and at the end; of rows of different lengths."""
    model = tiny.model(name, hidden_token=None)
    clean, positions = walks.canvases(model)
    for routing in ROUTINGS[model.config.kind]:
        for commit in ("dilated:2", "entropy-steps:3") if routing == "auto" else ("threshold:0.5",):
            predict = cached_predictor(model, positions)
            _, plain, cached = walks.both_ways(model, clean, positions, commit, routing, predict=predict)
            assert torch.equal(cached.forwards, plain.forwards)


@pytest.mark.parametrize("name", tiny.OTHERS)
def test_trajectories_sum_to_one_over_all_texts_and_bounds_to_at_most_one_also_given_a_prompt(name: str) -> None:
    model = tiny.model(name, symbols=3)  # of which one is the mask of the source
    every = tiny.every_sequence(5)[:, 1:] * 2
    rows = torch.cat([torch.full((len(every), 1), model.config.bos_id), every], dim=1)
    index = torch.zeros(len(rows), dtype=torch.long)
    prompt = torch.zeros_like(rows, dtype=torch.bool)
    prompt[:, [1, 4]] = True
    for given in (None, prompt):
        chosen = rows if given is None else rows[(rows[:, [1, 4]] == rows[:1, [1, 4]]).all(dim=1)]
        options = {"prompt": None if given is None else given[: len(chosen)], "index": index[: len(chosen)]}
        for routing in ROUTINGS[model.config.kind]:
            for commit in ("position", "entropy-steps:3") if routing == "auto" else ("chunk",):
                scored = dcdm.score(model, chosen, "trajectory", commit=commit, routing=routing, **options)  # type: ignore[arg-type]
                assert abs(float((-scored.nats).exp().sum()) - 1) < 1e-9, (routing, commit)
        bound = dcdm.score(model, chosen, "bound", samples="all", **options)  # type: ignore[arg-type]
        assert float((-bound.nats).exp().sum()) <= 1 + 1e-9
        in_one = dcdm.score(model, chosen, "trajectory", commit="chunk", **options)  # type: ignore[arg-type]
        step_by_step = dcdm.score(model, chosen, "trajectory", commit="chunk", temperature=1 - 1e-12, **options)  # type: ignore[arg-type]
        torch.testing.assert_close(in_one.nats, step_by_step.nats)
        assert torch.equal(in_one.forwards, step_by_step.forwards)
    with pytest.raises(ConfigError, match="the imported mask"):
        dcdm.score(model, torch.ones_like(rows))


@pytest.mark.parametrize("name", tiny.OTHERS)
def test_texts_fill_blanks_continue_in_windows_and_never_hold_the_mask(name: str) -> None:
    tokenizer = byte_tokenizer()
    hidden = ord("b")
    model = tiny.model(name, symbols=257, hidden_token=hidden)
    prompts = ["abc [[3]] def", "x", "a longer one, and more of it: "]
    together = dcdm.generate(
        model, prompts, tokenizer=tokenizer, max_new_tokens=[4, 40, 9], window=40, overlap=10, seed=3, eos_id=-1
    )
    for row, prompt in enumerate(prompts):
        alone = dcdm.generate(
            model, [prompt], tokenizer=tokenizer, max_new_tokens=[4, 40, 9][row], window=40, overlap=10, seed=3,
            eos_id=-1, index=[row], cache="none",
        )  # fmt: skip
        assert alone.completions[0] == together.completions[row]
    written = [token for event in together.history for token in event.tokens]
    assert len(written) == 3 + 4 + 40 + 9
    assert hidden not in written


def test_training_predicts_what_is_not_given_and_its_loss_reaches_every_weight() -> None:
    for name in tiny.OTHERS:
        model = tiny.model(name).train()
        clean = tiny.tokens(4, 13, padding=(0, 2))
        clean[clean == 1] = 2
        loss = dcdm.loss(model, clean, 1)
        loss.total.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        assert float(model.embed_tokens.weight.grad[-3:-1].abs().sum()) == 0  # BOS and PAD are in no sum
        assert loss.tokens <= (clean < model.config.bos_id).sum()


def test_auto_is_how_the_authors_decode_and_what_does_not_fit_is_refused() -> None:
    llada = tiny.config("mdlm-ordinary", family="llada")
    auto = DecodingConfig().resolve(llada)
    assert (auto.commit, auto.routing) == ("position", "blocks:128")
    assert DecodingConfig(commit="steps:2", routing="blocks:4").resolve(llada).routing == "blocks:4"
    fast = DecodingConfig().resolve(tiny.config("bdlm-shifted", family="fast-dllm-v2"))
    assert (fast.commit, fast.routing) == ("threshold:0.9", "sub-blocks:8")
    for wrong, kind in (
        ("sub-blocks", "bdlm"),
        ("sub-blocks:2", "mdlm"),
        ("from-prompt", "bdlm"),
        ("from-prompt:2", "bdlm-ordinary"),
        ("adablock", "bdlm-ordinary"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            DecodingConfig(routing=wrong).resolve(tiny.config(kind))
    with pytest.raises(ConfigError, match="foo"):
        DecodingConfig(commit="chunk+foo").resolve(llada)


def test_blocks_that_depend_on_the_prompts_length_are_not_shared() -> None:
    config = tiny.config("bdlm-ordinary")
    canvas = [config.bos_id, *[2] * 40, config.mask_id]
    shared = shared_prefix(config, canvas)
    assert shared is not None
    assert (len(shared), shared.positions[0], shared.piece) == (32, 1, 16)
    assert shared_prefix(config, canvas, "from-prompt") is None
    assert shared_prefix(config, canvas, "blocks") is None
    assert shared_prefix(tiny.config("bdlm-ordinary", block_size=24), canvas).piece == 24  # type: ignore[union-attr]
