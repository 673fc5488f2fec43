"""Prompts, blanks, windows, ends, events: what callers of `dcdm.generate` meet."""

from __future__ import annotations

import pytest
import torch

import dcdm
import tiny
from dcdm.config import ConfigError
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.decoding import routes
from dcdm.decoding.commits import Sampling, commit_policy
from dcdm.decoding.loop import Uncached, fill_canvas
from dcdm.keys import Key
from walks import model_of, whole

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def writer():
    return tiny.model("causal", symbols=TOKENIZER.vocab_size - 3, num_chunks=4)


def test_blanks_are_filled_and_the_rest_is_kept(writer):
    result = dcdm.generate(writer, "def [[4]](x):[[3]]!", tokenizer=TOKENIZER)
    ids = result.tokens[0, 1:].tolist()
    assert ids[:4] == TOKENIZER.encode("def ")
    assert ids[8:12] == TOKENIZER.encode("(x):")
    assert ids[15:] == TOKENIZER.encode("!")
    assert result.completions[0] == ids
    assert result.statistics.new_tokens.tolist() == [7]
    assert max(ids) < TOKENIZER.bos_id


def test_long_texts_are_written_window_by_window():
    model = model_of("bdlm")
    result = dcdm.generate(model, [[1, 2, 3], [4]], max_new_tokens=40, window=16, overlap=5)
    assert [len(c) for c in result.completions] == [40, 40]
    assert result.finished == ["length", "length"]
    # 12 (14) tokens in the first canvas, then 10 behind BOS and an overlap of 5
    assert result.statistics.reencoded.tolist() == [18, 18]
    # the second window is what its five tokens alone would give, under the noise of a second window
    text = result.tokens[0].tolist()
    context = torch.tensor([[model.config.bos_id, *text[11:16], *text[16:26]]])
    prompt = torch.arange(16)[None] < 6
    uniform = Key(0).fold("generate").fold("token", 0, 1).uniform(16)

    def reveal(view, fill):
        drawn = torch.zeros_like(view.position)
        drawn[fill] = Sampling().draw(whole(view)[fill], uniform[view.position[fill]])
        return drawn

    positions = model.position_masks(context, prompt)
    z = context.masked_fill(positions.free, model.config.mask_id)
    again, _ = fill_canvas(
        z, positions, routes.router_of(model, positions), Uncached(model), commit_policy("threshold:0.9"), reveal
    )
    assert torch.equal(again, context)


@pytest.mark.parametrize("window", [2, 3, 8])
def test_windows_need_no_overlap(window):
    model = model_of("bdlm")
    result = dcdm.generate(model, [[]], max_new_tokens=12, window=window, overlap=0)
    assert len(result.completions[0]) == 12
    assert len(dcdm.generate(model, [[]], max_new_tokens=12, window=window).completions[0]) == 12


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_generation_ends_at_eos_and_pays_for_nothing_behind_it(kind):
    model = model_of(kind)
    free = dcdm.generate(model, [[1], [2]], max_new_tokens=24, window=32, commit="position", seed=5)
    eos = free.completions[0][6]
    first = free.completions[0].index(eos)
    cut = dcdm.generate(model, [[1], [2]], max_new_tokens=24, window=32, commit="position", seed=5, eos_id=eos)
    assert cut.finished[0] == "eos"
    assert cut.completions[0] == free.completions[0][:first]
    assert cut.tokens[0, 2 + first] == eos
    assert cut.forwards[0] <= free.forwards[0]
    assert cut.statistics.new_tokens[0] == first + 1
    if kind in ("ar", "bdlm", "causal-contiguous", "positional"):
        assert cut.forwards[0] < free.forwards[0]


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_events_rebuild_the_text_in_the_order_of_commits(kind):
    model = model_of(kind)
    streamed = []
    result = dcdm.generate(model, [[7, 8], [9]], max_new_tokens=20, window=14, on_event=streamed.append)
    assert streamed == result.history
    rebuilt = result.tokens.clone()
    rebuilt[0, 3:] = rebuilt[1, 2:] = -1
    for event in streamed:
        assert (rebuilt[event.row, event.positions] == -1).all(), "a position is committed once"
        rebuilt[event.row, event.positions] = torch.tensor(event.tokens)
    assert [row[row >= 0].tolist() for row in rebuilt] == [
        row[row != model.config.pad_id].tolist() for row in result.tokens
    ]
    per_window = {(e.row, e.window): e.forward for e in streamed}
    assert sum(n for (row, _), n in per_window.items() if row == 0) == result.forwards[0]


def test_a_row_can_be_cancelled_between_steps():
    model = model_of("causal")
    seen = []

    def on_event(event):
        seen.append(event)

    result = dcdm.generate(
        model, [[1], [2]], max_new_tokens=12, commit="position", on_event=on_event,
        cancel=lambda row: row == 1 and sum(e.row == 1 for e in seen) >= 3,
    )  # fmt: skip
    assert result.finished == ["length", "cancelled"]
    assert result.statistics.new_tokens.tolist() == [12, 3]
    assert (result.tokens[1] == model.config.mask_id).sum() == 9
    whole = dcdm.generate(model, [[1], [2]], max_new_tokens=12, commit="position")
    assert result.completions[0] == whole.completions[0]


def test_stop_is_asked_after_each_window():
    model = model_of("ar")
    asked = []
    result = dcdm.generate(
        model, [[1]], max_new_tokens=50, window=10, overlap=3,
        stop=lambda row, ids: asked.append(len(ids)) or len(ids) > 12,
    )  # fmt: skip
    assert asked == [8, 14]
    assert result.finished == ["stop"]
    assert len(result.completions[0]) == 14


def test_a_low_temperature_does_not_make_predictions_look_certain():
    model = model_of("causal", scale=3.0)
    forwards = [
        int(dcdm.generate(model, [[1]], max_new_tokens=12, temperature=t).forwards[0]) for t in (0.0, 1e-3, 1.0)
    ]
    assert min(forwards) > 4, "one forward per chunk would be 4"
    assert dcdm.generate(model, [[1]], max_new_tokens=12, temperature=1e-39).completions == (
        dcdm.generate(model, [[1]], max_new_tokens=12, temperature=0.0).completions
    )


def test_prompts_with_and_without_blanks_share_a_batch(writer):
    result = dcdm.generate(writer, ["a[[2]]b", "a"], tokenizer=TOKENIZER, window=12)
    assert [len(c) for c in result.completions] == [4, 10]
    alone = dcdm.generate(writer, ["a"], tokenizer=TOKENIZER, window=12, index=[1])
    assert alone.completions[0] == result.completions[1]
    literal = dcdm.generate(writer, ["a[[2]]b"], tokenizer=TOKENIZER, window=12, blanks=False)
    assert len(literal.completions[0]) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1.0}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"), ({"commit": "steps:0"}, "commit"), ({"cache": "frozen"}, "exact"),
        ({"cache": "fast"}, "cache"), ({"routing": "paper-step"}, "does not fit"),
        ({"routing": "blocks:0"}, "blocks"), ({"routing": "adablock"}, "adablock"),
        ({"prompts": []}, "at least one"), ({"prompts": [[99]]}, "vocabulary"),
        ({"prompts": [[1] * 70]}, "does not fit"), ({"prompts": ["text"]}, "tokenizer"),
        ({"max_new_tokens": 0}, "nothing to do"), ({"max_new_tokens": -2}, "max_new_tokens"),
        ({"window": 1}, "window"), ({"overlap": 64}, "overlap"), ({"batch_size": 0}, "batch_size"),
        ({"index": [1, 2]}, "index"), ({"prompts": [[1, 20, 2]]}, "BOS"),
        ({"max_tokens": 4}, "do you mean max_new_tokens"), ({"temprature": 0.0}, "do you mean temperature"),
        ({"colour": 1}, "colour is not an option"), ({"top_k": 2.5}, "top_k=2.5 must be a whole number"),
        ({"max_new_tokens": 4.0}, "max_new_tokens=4.0 must be a whole number"),
        ({"seed": 0.5}, "seed=0.5 must be a whole number"), ({"adablock": object()}, "adablock has no effect"),
        ({"prompts": ["\udce9"], "tokenizer": TOKENIZER}, "half of a surrogate pair"),
        ({"prompts": [[21, 1]]}, "PAD"), ({"window": 0}, "window"), ({"commit": "steps:inf"}, "commit"),
        ({"seed": [1, 2]}, "seed has 2 entries for 1 prompts"),
        ({"max_new_tokens": [1, 2]}, "max_new_tokens has 2 entries for 1 prompts"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(change, message):
    model = tiny.model("bdlm")
    arguments = {"prompts": [[1, 2]], "max_new_tokens": 4, **change}
    with pytest.raises(ConfigError, match=message):
        dcdm.generate(model, arguments.pop("prompts"), **arguments)


def test_more_lanes_than_places_are_as_many_as_there_are_places():
    model = tiny.model("mdlm", kind="lanes", lanes=(1, 2, 4))
    most, few = (dcdm.generate(model, [[1, 2]], max_new_tokens=4, lanes=lanes) for lanes in (4096, 4))
    assert torch.equal(most.tokens, few.tokens)
    with pytest.raises(ConfigError, match="whole number"):
        dcdm.generate(model, [[1, 2]], max_new_tokens=4, lanes=2.5)


def test_an_exact_cache_for_the_papers_routing_is_refused():
    with pytest.raises(ConfigError, match="frozen"):
        dcdm.generate(tiny.model("paper"), [[1]], max_new_tokens=2, cache="exact")
    with pytest.raises(ConfigError, match="appendix-b"):
        dcdm.generate(tiny.model("paper"), [[1]], max_new_tokens=2, cache="frozen", routing="appendix-b")
    with pytest.raises(ConfigError, match="random order"):
        dcdm.score(tiny.model("mdlm"), tiny.tokens(1, 4), "trajectory", commit="first-hitting")
    with pytest.raises(ConfigError, match="greedy"):
        dcdm.score(tiny.model("mdlm"), tiny.tokens(1, 4), "trajectory", sampling=Sampling(0.0))


@pytest.mark.parametrize("kind", ["causal", "ar"])
def test_requests_with_their_own_seed_and_length_share_a_batch(kind):
    model = model_of(kind)
    ended = {}
    together = dcdm.generate(
        model, [[1, 2], [3], [1, 2]], max_new_tokens=[3, 11, 6], seed=[5, 6, 7], index=[0, 0, 0],
        on_end=lambda row, end: ended.setdefault(row, (len(ended), end)),
    )  # fmt: skip
    for row, (prompt, size, seed) in enumerate([([1, 2], 3, 5), ([3], 11, 6), ([1, 2], 6, 7)]):
        alone = dcdm.generate(model, [prompt], max_new_tokens=size, seed=seed)
        assert together.completions[row] == alone.completions[0]
        assert ended[row][1].completion == alone.completions[0]
        assert ended[row][1].costs["forwards"] == int(alone.forwards[0]) == int(together.forwards[row])
    assert [ended[row][0] for row in (0, 1, 2)] == [0, 2, 1], "the shortest ends first"
