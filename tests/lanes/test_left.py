"""Predicting from the left, and lanes: equal to AR, equal to the literal network, exact, without leaks."""

from dataclasses import replace

import pytest
import torch

import dcdm
import tiny
from dcdm.config import ConfigError
from dcdm.diffusion.objectives import Batch, loss
from dcdm.keys import Key
from dcdm.lanes import masks as lane_masks
from dcdm.lanes.objective import draw_lanes
from dcdm.model import masks, reference

LEFT = {name: {**tiny.KINDS[name], "predict": "left"} for name in tiny.VALID if name != "mdlm"}
LANES = {
    "lanes": {"kind": "lanes", "lanes": (1, 2, 3)},
    "lanes-moe": {"kind": "lanes", "lanes": (1, 2, 3), "moe": tiny.MOE, "intermediate_size": None},
    "lanes-chunking": {"kind": "lanes", "lanes": (1, 2, 3), "num_chunks": 2, "chunk_dim": 4},
}
KINDS = {**LEFT, **LANES}


def model(name: str, symbols: int = tiny.LETTERS, seed: int = 0):
    return tiny.model("mdlm", symbols, seed, **KINDS[name])


def spans(rows: int, length: int) -> torch.Tensor:
    """A prefix in the first row, two blanks' surroundings in the second, nothing in the others."""
    prompt = torch.zeros(rows, length, dtype=torch.bool)
    prompt[0, :4] = True
    if rows > 1:
        prompt[1, 3:6] = prompt[1, 9:11] = True
    return prompt


# --- lanes --------------------------------------------------------------------------------------------------------


def test_lanes_are_runs_of_equal_length_and_chunk_k_holds_the_kth_position_of_each():
    free = torch.ones(1, 11, dtype=torch.bool)
    free[0, 0] = False
    ids = lane_masks.lane_ids(
        free, torch.ones_like(free), lane_masks.even_starts(free.sum(-1), torch.tensor([3]), 3)
    )
    assert ids.tolist() == [[0, 1, 2, 3, 4, 1, 2, 3, 1, 2, 3]]  # longer lanes first


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 7, 20])
def test_chunks_of_lanes_never_grow_and_cover_every_free_position_once(lanes):
    config = tiny.config("mdlm", **LANES["lanes"])
    tokens = tiny.tokens(3, 14, padding=(3, 1))
    positions = dcdm.build(config).position_masks(tokens, spans(3, 14))
    ids = lane_masks.lane_partition(config, positions.free, positions.real, lanes)[0]
    assert torch.equal(ids >= 1, positions.free)
    assert torch.equal(ids < 0, ~positions.real)
    for row in ids:
        sizes = torch.bincount(row[row >= 1])[1:].tolist()
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] == min(lanes, int((row >= 1).sum()))


def test_the_number_of_lanes_is_drawn_per_row_and_leaves_them_long_enough():
    config = tiny.config("mdlm", kind="lanes", lanes=(1, 2, 4))
    rows = torch.arange(300)
    drawn = draw_lanes(config, Key(0), rows, torch.full((300,), 100))
    assert {1, 2, 4} == set(drawn.tolist())
    assert set(draw_lanes(config, Key(0), rows, torch.full((300,), 9)).tolist()) == {1, 2}
    assert set(draw_lanes(config, Key(0), rows, torch.full((300,), 2)).tolist()) == {1}
    assert torch.equal(draw_lanes(config, Key(0), rows[7:], torch.full((293,), 100)), drawn[7:])


def test_numbers_of_lanes_are_drawn_by_their_weights():
    config = tiny.config("mdlm", kind="lanes", lanes=(4, 1, 2), lane_weights=(1.0, 6.0, 3.0))
    rows = torch.arange(2_000)
    drawn = draw_lanes(config, Key(0), rows, torch.full((2_000,), 100))
    shares = [(drawn == number).float().mean().item() for number in (1, 2, 4)]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.03)
    short = draw_lanes(config, Key(0), rows, torch.full((2_000,), 9))
    assert [(short == number).float().mean().item() for number in (1, 2, 4)] == pytest.approx(
        [2 / 3, 1 / 3, 0], abs=0.03
    )
    none = replace(config, lane_weights=(0.0, 1.0, 0.0))
    assert set(draw_lanes(none, Key(0), rows, torch.full((2_000,), 100)).tolist()) == {1}


# --- one lane is AR -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompted", [False, True])
def test_one_lane_is_the_ar_model_in_logits_and_gradients(prompted):
    lanes, ar = model("lanes"), tiny.model("ar")
    ar.load_state_dict(lanes.state_dict())
    tokens = tiny.tokens(3, 12, padding=(2,))
    prompt = torch.zeros_like(tokens, dtype=torch.bool)
    prompt[:, :5] = prompted
    free = lanes.position_masks(tokens, prompt).free
    ours = lanes.head(lanes.encode(tokens, prompt=prompt, lanes=1).states)[free][:, :-3]
    theirs = ar(tokens).logits[:, :-1][free[:, 1:]][:, :-3]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    for network, logits in ((lanes, ours), (ar, theirs)):
        torch.nn.functional.cross_entropy(logits, tokens[free]).backward()
        assert network.embed_tokens.weight.grad is not None
    for name, parameter in lanes.named_parameters():
        torch.testing.assert_close(parameter.grad, dict(ar.named_parameters())[name].grad, rtol=0, atol=1e-9)


# --- the production path is the literal one -----------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 40])
@pytest.mark.parametrize("name", KINDS)
def test_production_equals_the_literal_network_in_outputs_and_gradients(name, length):
    network = model(name)
    tokens = tiny.tokens(4, length, padding=(length // 3,))
    prompt = spans(4, length) if length > 12 else None
    lanes = torch.tensor([1, 2, 3, 5]) if network.config.kind == "lanes" else None
    ids = network.partition(tokens, prompt, torch.arange(4), lanes).ids
    expected = reference.encode(network, tokens, prompt=prompt, chunk_ids=ids)
    free = network.position_masks(tokens, prompt).free
    for backend in ("sdpa-tiled", "sdpa", "reference"):
        network.backend = backend
        found = network.encode(tokens, prompt=prompt, chunk_ids=ids)
        torch.testing.assert_close(found.states[free], expected.states[free], rtol=0, atol=1e-9)
        for ours, theirs in zip(found.gate_logits, expected.gate_logits, strict=True):
            torch.testing.assert_close(ours.sum(0), theirs.sum(0), rtol=0, atol=1e-8)
        gradients = []
        for encoded in (found, reference.encode(network, tokens, prompt=prompt, chunk_ids=ids)):
            network.zero_grad()
            encoded.states[free].square().sum().backward()
            gradients.append({n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None})
        assert gradients[0].keys() == gradients[1].keys()
        for key, value in gradients[0].items():
            torch.testing.assert_close(value, gradients[1][key], rtol=1e-7, atol=1e-7)


# --- leaks --------------------------------------------------------------------------------------------------------


def changes(network, tokens, prompt, ids, position) -> torch.Tensor:
    """Chunks (N,) of the free positions whose prediction changes with the token at `position`."""
    free = network.position_masks(tokens, prompt).free[0]
    before = network.encode(tokens, prompt=prompt, chunk_ids=ids).states[0, free]
    other = tokens.clone()
    other[0, position] = (tokens[0, position] + 1) % tiny.LETTERS
    after = network.encode(other, prompt=prompt, chunk_ids=ids).states[0, free]
    return ids[0, free][(before - after).abs().amax(dim=-1) > 1e-9]


@pytest.mark.parametrize("name", KINDS)
def test_a_token_changes_no_prediction_of_its_own_or_an_earlier_chunk(name):
    network = model(name)
    tokens, prompt = tiny.tokens(1, 20), spans(1, 20)
    ids = network.partition(tokens, prompt, torch.arange(1), 4 if network.config.kind == "lanes" else None).ids
    reached = 0
    for position in ids[0].ge(1).nonzero().squeeze(-1).tolist():
        later = changes(network, tokens, prompt, ids, position)
        assert (later > ids[0, position]).all()
        reached += len(later)
    assert reached > 0


@pytest.mark.parametrize("control", ["seeds that others see", "led by a neighbour that knows too much"])
def test_the_leak_test_catches_what_leaks(control, monkeypatch):
    network = model("lanes")
    tokens, prompt = tiny.tokens(1, 20), spans(1, 20)
    ids = network.partition(tokens, prompt, lanes=4).ids
    if control == "seeds that others see":
        # clean slots count as seeds of their chunk: each then sees its own clean token through them
        leaky = (lane_masks.left | masks.Mask("own chunk", lambda q, k: q.chunk == k.chunk)).named("leaky")
        monkeypatch.setattr(lane_masks, "left", leaky)
        network.backend = "sdpa"
    else:
        ids = ids.clone()
        ids[0, 10] = ids[0, 11] + 1  # what stands on the left of 11 is later than it

        def led(ids):
            return torch.nn.functional.pad(ids[:, :-1], (1, 0), value=-1).ge(0) & (ids >= 1)

        monkeypatch.setattr("dcdm.lanes.masks.led_positions", led)
    free = ids[0].ge(1).nonzero().squeeze(-1).tolist()
    leaks = [p for p in free if (changes(network, tokens, prompt, ids, p) <= ids[0, p]).any()]
    assert leaks


# --- exact likelihood ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_probabilities_of_all_sequences_sum_to_one(name, trained):
    network = model(name, tiny.SYMBOLS)
    every = tiny.every_sequence(5)
    if trained:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        for step in range(5):
            optimizer.zero_grad()
            loss(network, Batch(every[step::7]), step).total.backward()
            optimizer.step()
    for lanes in (1, 2, 3, 5) if network.config.kind == "lanes" else (None,):
        index = torch.zeros(len(every), dtype=torch.long)
        total = torch.exp(-dcdm.score(network, every, "exact", lanes=lanes, index=index).nats).sum()
        assert total.item() == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_probabilities_sum_to_one_given_a_prompt_blanks_and_padding(name):
    network = model(name, tiny.SYMBOLS)
    every = tiny.every_sequence(6)
    padded = torch.cat([every, torch.full((len(every), 2), network.config.pad_id)], dim=1)
    for shown in ((1,), (2, 4), (1, 5, 6)):
        prompt = torch.zeros_like(padded, dtype=torch.bool)
        prompt[:, list(shown)] = True
        one = (padded[:, list(shown)] == padded[37, list(shown)]).all(dim=-1)
        options = {"lanes": 2} if network.config.kind == "lanes" else {}
        rows, given = padded[one], prompt[one]
        index = torch.zeros(len(rows), dtype=torch.long)
        score = dcdm.score(network, rows, "exact", prompt=given, index=index, **options)
        assert torch.exp(-score.nats).sum().item() == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("cache", ["exact", "none"])
@pytest.mark.parametrize("name", KINDS)
def test_the_exact_likelihood_is_that_of_the_decoder(name, cache):
    network = model(name)
    tokens = tiny.tokens(4, 17, padding=(4, 1))
    prompt = spans(4, 17)
    for lanes in (1, 2, 5) if network.config.kind == "lanes" else (None,):
        exact = dcdm.score(network, tokens, "exact", prompt=prompt, lanes=lanes)
        walked = dcdm.score(network, tokens, "trajectory", prompt=prompt, cache=cache, lanes=lanes)
        torch.testing.assert_close(walked.by_position, exact.by_position, rtol=0, atol=1e-9)
        if network.config.kind == "lanes":
            free = network.position_masks(tokens, prompt).free.sum(dim=-1)
            assert walked.forwards.tolist() == ((free + lanes - 1) // lanes).tolist()


def test_the_training_loss_is_the_exact_likelihood_per_token():
    network = tiny.model("mdlm", kind="lanes", lanes=(3,))
    tokens = tiny.tokens(4, 17, padding=(4, 1))
    measured = loss(network, Batch(tokens), 0, dcdm.ObjectiveConfig(prompt_share=0.0))
    score = dcdm.score(network, tokens, "exact", lanes=3)
    assert measured.nll.item() == pytest.approx(score.per_token, rel=1e-9)


# --- decoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_cached_generation_equals_uncached_generation_of_a_batch(name):
    network = model(name)
    mask = network.config.mask_id
    prompts = [[1, 2, 3], [4, mask, mask, mask, 5, mask, mask], []]
    for lanes in (1, 2, 5) if network.config.kind == "lanes" else (None,):
        settings = {"max_new_tokens": [9, 0, 14], "seed": 3, "lanes": lanes}
        cached = dcdm.generate(network, prompts, cache="exact", **settings)
        uncached = dcdm.generate(network, prompts, cache="none", **settings)
        assert cached.completions == uncached.completions
        alone = [
            dcdm.generate(network, [p], max_new_tokens=[n], seed=3, index=[i], lanes=lanes).completions[0]
            for i, (p, n) in enumerate(zip(prompts, settings["max_new_tokens"], strict=True))
        ]
        assert cached.completions == alone
        if network.config.kind == "lanes" and lanes is not None:
            assert cached.forwards.tolist() == [-(-n // lanes) for n in (9, 5, 14)]
            assert cached.statistics.computed.sum() < uncached.statistics.computed.sum()


def test_events_name_the_lane_of_every_position_in_every_window_and_row():
    network, mask = model("lanes"), model("lanes").config.mask_id
    prompts = [[4, mask, mask, mask, 5, mask, mask], [1, 2]]
    done = dcdm.generate(network, prompts, max_new_tokens=[0, 25], window=16, overlap=5, lanes=3, seed=2)
    found = {}
    for event in done.history:
        assert len(event.lanes) == len(event.positions) == len(set(event.lanes)), "one token of each lane"
        for position, lane in zip(event.positions, event.lanes, strict=True):
            found.setdefault((event.row, event.window), {})[position] = lane
    assert found[0, 0] == {2: 1, 3: 1, 4: 2, 6: 2, 7: 3}
    assert {window for row, window in found if row == 1} == {0, 1, 2}
    for (row, _), lanes in found.items():
        numbers = [lanes[position] for position in sorted(lanes)]
        sizes = [numbers.count(lane) for lane in (1, 2, 3)]
        assert numbers == sorted(numbers), row
        assert max(sizes) - min(sizes) <= 1
    assert not any(event.lanes for event in dcdm.generate(model("bdlm"), [[1]], max_new_tokens=4).history)


def test_every_slot_is_computed_once_beside_the_seeds():
    network = model("lanes")
    done = dcdm.generate(network, [[1, 2, 3]], max_new_tokens=24, lanes=4)
    # BOS and prompt, all new tokens but the last of each lane, and seeds for all lanes but that behind the prompt
    assert done.statistics.computed.tolist() == [4 + 24 - 4 + 3]


def test_what_lies_behind_an_end_of_text_is_cut_and_no_longer_written():
    network = model("lanes")
    whole = dcdm.generate(network, [[1], [2]], max_new_tokens=24, lanes=4, seed=5)
    eos = whole.completions[0][8]  # in the second of four lanes of six
    for cache in ("exact", "none"):
        cut = dcdm.generate(network, [[1], [2]], max_new_tokens=24, lanes=4, seed=5, eos_id=eos, cache=cache)
        assert cut.finished[0] == "eos"
        first = [event for event in cut.history if event.row == 0]
        ends = min(p for e in first for p, t in zip(e.positions, e.tokens, strict=True) if t == eos)
        assert len(cut.completions[0]) == ends - 2
        seen = False
        for event in first:
            assert not seen or max(event.positions) < ends
            seen = seen or ends in event.positions


def test_the_harness_scores_and_generates_with_one_lane_unless_told():
    pytest.importorskip("lm_eval")
    from dcdm.data.tokenizers import byte_tokenizer
    from dcdm.evaluation.harness import HarnessModel

    tokenizer = byte_tokenizer()
    network = tiny.model("mdlm", tokenizer.vocab_size - 3, kind="lanes", lanes=(1, 2)).float()
    one, two = (HarnessModel((network, tokenizer), lanes=lanes) for lanes in (None, 2))
    row = [tokenizer.bos_id, *tokenizer.encode("a question and its answer")]
    from dcdm.evaluation.harness import Continuation

    for harness, lanes in ((one, 1), (two, 2)):
        nats, error, _ = harness._score([Continuation(row, 12, 0)])[0]
        prompt = (torch.arange(len(row)) < 12)[None]
        exact = dcdm.score(network, torch.tensor([row]), "exact", prompt=prompt, lanes=lanes)
        assert error == 0
        assert nats == pytest.approx(-exact.nats.item(), rel=1e-5)
    with pytest.raises(ConfigError, match="lanes=2 does not fit a model of kind mdlm"):
        HarnessModel((tiny.model("mdlm", tokenizer.vocab_size - 3).float(), tokenizer), lanes=2)


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"t_max": 0.5}, {"full_mask_share": 0.5}], ids=lambda c: next(iter(c)))
def test_settings_of_the_noise_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        loss(model("lanes"), Batch(tiny.tokens(2, 9)), 0, dcdm.ObjectiveConfig(**changes))


def test_decoders_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="commit='position' fills part of a chunk"):
        dcdm.generate(model("lanes"), [[1]], max_new_tokens=4, commit="position")
    with pytest.raises(ConfigError, match="lanes=0 must be at least 1"):
        dcdm.generate(model("lanes"), [[1]], max_new_tokens=4, lanes=0)
    with pytest.raises(ConfigError, match="lanes=2 does not fit a model of kind bdlm"):
        dcdm.generate(model("bdlm"), [[1]], max_new_tokens=4, lanes=2)
    with pytest.raises(ValueError, match="estimator 'bound' does not fit"):
        dcdm.score(model("lanes"), tiny.tokens(1, 5), "bound")


def test_a_blank_s_first_token_knows_what_is_given_behind_it(monkeypatch):
    model = tiny.model("mdlm", 60, kind="lanes", lanes=(1, 2))
    tokens = tiny.tokens(1, 24, 60)
    other = tokens.clone()
    other[:, 14] = (other[:, 14] + 1) % 50

    def first(text):
        alone = (torch.arange(24) != 8)[None]
        return float(dcdm.score(model, text, "exact", prompt=alone, lanes=1).nats)

    assert first(tokens) != first(other)

    def led_by_any_neighbour(ids):
        return (ids >= 1) & (torch.nn.functional.pad(ids[..., :-1], (1, 0), value=-2) == ids - 1)

    monkeypatch.setattr("dcdm.lanes.masks.led_positions", led_by_any_neighbour)
    assert first(tokens) == first(other)  # as it was: the token on the left did not know
