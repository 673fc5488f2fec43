"""Texts that join and leave between forwards are what each of them is alone."""

from __future__ import annotations

import random

import pytest
import torch

import dcdm
import tiny
from dcdm.decoding.batch import batch_of
from dcdm.decoding.caching import PIECE, PrefixCache, PromptPrefix, shared_prefix, sharing
from dcdm.decoding.config import DecodingConfig
from dcdm.decoding.text import BatchRow
from walks import model_of

LANES = "lanes"
COMMITS = ["chunk", "position", "threshold:0.4", "ancestral:3", "steps:2"]
EOS = 7


def network(kind, **changes):
    if kind == LANES:
        return tiny.model("mdlm", **{"kind": "lanes", "lanes": (1, 2, 4), **changes})
    return model_of(kind, **changes)


def decoders(kind, rng):
    """A decoder of the kind, drawn at random."""
    config = network(kind).config
    options = {"temperature": rng.choice([0.0, 0.7, 1.0]), "top_k": rng.choice([None, 5])}
    if kind == LANES:
        options["lanes"] = rng.choice([1, 2, 3, 4])
    elif kind != "ar":
        options["commit"] = rng.choice(COMMITS)
    caches = ["none", "frozen"] if config.routes_from_noise else ["none", "exact", "exact"]
    options["cache"] = rng.choice(caches)
    if kind in ("bdlm", "mdlm"):
        options["routing"] = rng.choice(["auto", "blocks:3", "adablock"])
        if options["routing"] == "adablock":
            options["adablock"] = dcdm.decoding.config.AdaBlock((1, 2), 2, 0.2)
    if config.routes_from_noise:
        fits = [
            "paper-chunk",
            "paper-step",
            "paper-equal",
            "paper-strided",
            *([] if options["cache"] == "frozen" else ["appendix-b"]),
        ]
        options["routing"] = rng.choice(fits)
    return options


def requests(kind, count, seed):
    """Prompts of different lengths, some with blanks, some longer than a window, each with its own decoder."""
    rng, mask = random.Random(seed), tiny.LETTERS + 2
    made = []
    for number in range(count):
        prompt = [rng.randrange(tiny.LETTERS) for _ in range(rng.randrange(12))]
        if kind != "ar" and number % 3 == 0:
            prompt = [*prompt, *[mask] * 3, 4, 5]
        made.append((prompt, rng.choice([1, 4, 9, 26]), number, decoders(kind, rng), rng.choice([18, 20, 40])))
    return made


def text_of(model, prompt, new_tokens, number, options, window=20, **more):
    decoding = DecodingConfig.of(**options).resolve(model.config)
    ids = [model.config.bos_id, *prompt]
    return BatchRow(
        ids, new_tokens, decoding, window, window // 2 - 1, seed=number + 3, index=number, row=number,
        **{"eos_id": EOS, **more},
    )  # fmt: skip


def alone(model, prompt, new_tokens, number, options, window=20):
    return dcdm.generate(
        model, [prompt], max_new_tokens=new_tokens, window=window, seed=number + 3, index=[number], eos_id=EOS,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [LANES, *tiny.KINDS])
def test_texts_that_join_at_any_forward_are_what_each_is_alone(kind):
    """With decoders, lanes, lengths, caches and windows of their own, exactly in float64."""
    model = network(kind)
    asked = requests(kind, 14, seed=len(kind))
    batch, rng = batch_of(model, PrefixCache(64)), random.Random(1)
    events = {number: [] for number in range(len(asked))}
    waiting, texts, widest = list(asked), [], 0
    while waiting or batch.running:
        for _ in range(min(len(waiting), rng.randrange(4))):
            request = waiting.pop(0)
            text = text_of(model, *request, on_event=events[request[2]].append)
            texts.append(text)
            batch.add(text)
        widest = max(widest, batch.step())
    assert widest > 3, "several at once"
    for text, request in zip(texts, asked, strict=True):
        expected = alone(model, *request)
        assert text.completion(model.config.mask_id) == expected.completions[0]
        assert text.finished == expected.finished[0]
        mine = [(e.window, e.forward, e.chunk, e.positions, e.tokens) for e in events[text.row]]
        assert mine == [(e.window, e.forward, e.chunk, e.positions, e.tokens) for e in expected.history]
        for a, b in zip(events[text.row], expected.history, strict=True):
            torch.testing.assert_close(torch.tensor(a.log_p), torch.tensor(b.log_p), rtol=0, atol=1e-9)
        if not text.costs["prefix"]:
            assert text.costs["computed"] == expected.statistics.computed[0]
            assert text.costs["forwards"] == expected.forwards[0]


def test_a_text_that_joins_changes_nothing_of_what_the_others_compute(monkeypatch):
    """Neither their forwards nor the positions they cost: a long prompt is read in a pass of its own."""
    model = network(LANES, context_length=400)
    passes = []
    extend = model.extend
    monkeypatch.setattr(model, "extend", lambda t, *more: passes.append(tuple(t.shape)) or extend(t, *more))
    batch = batch_of(model)
    for number in range(3):
        batch.add(text_of(model, [1, 2], 40, number, {"lanes": 4}, window=300, eos_id=None))
    batch.step()
    batch.step()
    batch.add(text_of(model, [1] * 200, 40, 3, {"lanes": 4}, window=300, eos_id=None))
    passes.clear()
    assert batch.step() == 4
    assert sorted(shape[0] for shape in passes) == [1, 3]
    assert max(shape[1] for shape in passes if shape[0] == 3) < 10
    passes.clear()
    batch.step()
    assert [shape[0] for shape in passes] == [4], "from then on all share a pass"


def test_rows_share_a_pass_unless_fillers_would_cost_more():
    assert sharing([1, 1, 1]) == [[0, 1, 2]]
    assert sharing([4, 1, 2, 4]) == [[0, 1, 2, 3]]
    assert sharing([1, 500, 1, 480]) == [[1, 3], [0, 2]]
    assert sharing([100] * 4 + [80] * 10) == [list(range(14))]
    assert sharing([]) == []


def test_memory_of_the_cache_follows_the_texts_that_run():
    model = network("ar")
    batch = batch_of(model)
    for number, new in enumerate([4, 30, 8, 12]):
        batch.add(text_of(model, [1], new, number, {}, window=40, eos_id=None))
    batch.step()
    assert batch.positions == 4 * 32
    held = []
    while batch.running:
        batch.step()
        held.append(batch.positions)
    assert held == sorted(held, reverse=True)
    assert held[-1] == 0
    assert 32 in held, "one row is left, and has memory for itself alone"


# --- prompt prefixes that were encoded before ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ar", LANES, "bdlm", "causal", "mdlm", "strided", *tiny.OTHERS])
def test_a_prompt_prefix_that_was_encoded_before_is_not_encoded_again_and_changes_nothing(kind):
    model = network(kind, context_length=128)
    store = PrefixCache(400)
    system = [(7 * i) % 6 for i in range(40)]
    shares_part = kind in ("ar", LANES, "bdlm-ordinary", "bdlm-shifted")
    batch = batch_of(model, store)
    options = {"lanes": 2} if kind == LANES else {}
    prompts = [system, [*system, 1, 2, 3], [*system[:20], 5, *system[21:]], system, [1, 2]]
    expected_reuse = [0, 32, 16, 32, 0] if shares_part else [0, 0, 0, 41, 0]
    if kind in ("mdlm-ordinary", "mdlm-shifted"):  # given tokens see what is masked
        expected_reuse = [0] * 5
    for number, prompt in enumerate(prompts):
        log_p = []
        text = text_of(
            model, prompt, 10, number, options, window=100, on_event=lambda e, held=log_p: held.extend(e.log_p)
        )
        batch.add(text)
        while batch.running:
            batch.step()
        same = alone(model, prompt, 10, number, options, window=100)
        assert text.completion(model.config.mask_id) == same.completions[0]
        expected = [value for event in same.history for value in event.log_p]
        torch.testing.assert_close(torch.tensor(log_p), torch.tensor(expected), rtol=0, atol=1e-9)
        assert text.costs["prefix"] == expected_reuse[number]
        assert text.costs["computed"] == same.statistics.computed[0] - expected_reuse[number]
    assert store.found == sum(expected_reuse)


def test_a_blank_behind_the_prefix_is_filled_the_same_with_and_without_what_is_remembered():
    model = network(LANES, context_length=128)
    mask, store = model.config.mask_id, PrefixCache(400)
    batch = batch_of(model, store)
    for number, behind in enumerate([[3, 4], [5, 6, 7]]):
        prompt = [*range(20), *range(20), *[mask] * 9, *behind]
        text = text_of(model, prompt, 5, number, {"lanes": 3}, window=100)
        batch.add(text)
        while batch.running:
            batch.step()
        same = alone(model, prompt, 5, number, {"lanes": 3}, window=100)
        assert text.completion(mask) == same.completions[0]
        assert text.costs["prefix"] == (32 if number else 0)


def test_the_store_forgets_what_was_used_longest_ago_and_no_piece_before_those_built_on_it():
    model = network("ar", context_length=128)
    store = PrefixCache(4 * PIECE)

    def write(token):
        batch = batch_of(model, store)
        text = text_of(model, [token] * 40, 1, 0, {}, window=100)
        batch.add(text)
        while batch.running:
            batch.step()
        return text.costs["prefix"]

    assert [write(1), write(2), write(1), write(3), write(1), write(2)] == [0, 0, 32, 0, 32, 0]
    assert store.tokens == 4 * PIECE
    store.shrink(PIECE)
    assert store.tokens == PIECE
    assert write(2) == PIECE, "the first piece outlives the second"
    assert not PrefixCache(0).tokens


def test_what_may_not_be_shared_has_no_prefix():
    paper, ar = network("paper").config, network("ar").config
    assert shared_prefix(paper, [20, *range(19)]) is None
    assert shared_prefix(ar, [20, 1, 2, ar.mask_id]) is None
    long = shared_prefix(ar, [20, *range(19), *range(13), ar.mask_id])
    assert isinstance(long, PromptPrefix)
    assert len(long) == 32


def test_a_text_draws_no_more_noise_than_its_canvas_has_places_and_what_it_draws_is_the_same():
    network = tiny.model("mdlm", context_length=2**24, max_position=2**24)
    asked = {"max_new_tokens": 4, "seed": 3}
    drawn = dcdm.generate(network, [[1, 2]], **asked)  # a whole window would take gigabytes
    assert drawn.tokens.tolist() == dcdm.generate(network, [[1, 2]], window=32, **asked).tokens.tolist()
    text = BatchRow([0], 8, DecodingConfig(), 4096, 8)
    assert torch.equal(text.noise("token", 9), text.noise("token", 4096)[:, :9])
