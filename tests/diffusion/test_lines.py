"""Lanes of whole lines, and blanks with room: nothing of the text is lost, EOS is never part of it, bounds hold."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcdm
import tiny
from dcdm.cli import main
from dcdm.config import ConfigError, ModelConfig, ObjectiveConfig, WholeLines
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.diffusion.lines import (
    EXACT,
    LINE_LENGTH,
    kept_of,
    lane_sizes,
    lay_out_rows,
    lay_out_texts,
    open_end,
    packed,
    with_room,
)
from dcdm.diffusion.objectives import Batch, counted, laid_out, loss
from dcdm.keys import Key

BREAK, END = 1, 2
WHOLE = WholeLines((BREAK,), END)
LETTERS = [0, BREAK, *range(3, tiny.LETTERS)]  # all but EOS
OBJECTIVE = ObjectiveConfig(whole_lines=True, prompt_share=0.4, blank_share=0.3)


def model(symbols: int = tiny.LETTERS, **changes):
    return tiny.model("mdlm", symbols, **{"kind": "lanes", "lanes": (1, 2, 4), "whole_lines": WHOLE, **changes})


def text(tokens) -> list[int]:
    return [token for token in tokens if token != END]


# --- laying out -------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([0, BREAK, 5]), max_size=40), st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_lanes_hold_the_text_in_order_and_end_at_a_line_or_where_they_are_full(tokens, sizes):
    at = 0
    for (lane, taken), size in zip(packed(tokens, sizes, WHOLE), sizes, strict=True):
        assert len(lane) == size
        assert lane == tokens[at : at + taken] + [END] * (size - taken)
        at += taken
        more = tokens[at:]
        assert taken == size or not more or more[0] == BREAK
        if more and taken < size:  # the next line would not have fitted
            assert taken + [*more, BREAK].index(BREAK, 1) > size or len(tokens) - at + taken > size


def test_an_eos_in_the_text_ends_a_lane_and_is_not_repeated():
    assert packed([5, END, 6, 7], [3, 3], WHOLE) == [([5, END, END], 1), ([6, 7, END], 2)]


def test_rows_stay_as_long_as_they_are_and_one_lane_is_the_plain_text():
    tokens = tiny.tokens(4, 40, padding=(5, 0, 0, 0))
    tokens[tokens == END] = 0
    tokens[:, 6::7] = BREAK
    tokens[0, 35:] = tiny.LETTERS + 1
    real = tokens != tiny.LETTERS + 1
    free = real & (torch.arange(40) > 2)
    lanes = torch.tensor([1, 2, 4, 2])
    laid, still = lay_out_rows(tokens, free, real, lanes, WHOLE, Key(0), torch.arange(4))
    assert torch.equal(laid[0], tokens[0])
    assert torch.equal(still, free)
    assert torch.equal(laid[~free], tokens[~free])
    for row in (1, 2, 3):
        kept = text(laid[row, 3:].tolist())
        assert kept == tokens[row, 3 : 3 + len(kept)].tolist()
        assert (laid[row] == END).any()


def test_blanks_get_room_behind_their_text_and_what_is_given_keeps_its_order():
    free = [False, True, True, False, False, True, False, False]
    new, gaps = with_room([3, 4, 5, 6, 7, 8, 9, 10], free, [EXACT, 0, 0.9, 0, 0, 0.2, 0, 0], END)
    assert new == [3, 4, 5, END, END, END, END, END]  # 8 more, of which five still fit
    assert gaps == [False, True, True, True, True, True, True, True]
    new, gaps = with_room([3, 4, 5, 6, 7, 8, 9, 10], free, [0] * 8, END)
    assert (new, gaps) == ([3, 4, 5, 6, 7, 8, 9, 10], free)


def test_training_rows_follow_from_their_numbers_alone_and_count_what_the_loss_predicts():
    made, clean = model(), tiny.tokens(12, 48)
    batch = Batch(clean, rows=torch.arange(12), num_rows=12)
    whole, free, visible, lanes = laid_out(made, batch, Key(3), OBJECTIVE, made.config)
    half = Batch(clean[6:], rows=torch.arange(6, 12), num_rows=12)
    again, *_ = laid_out(made, half, Key(3), OBJECTIVE, made.config)
    assert torch.equal(whole.tokens[6:], again.tokens)
    assert not (free & visible).any()
    assert int(counted(made, batch, Key(3), OBJECTIVE)) == int(loss(made, batch, Key(3), OBJECTIVE).tokens)
    open_ended = torch.tensor([open_end(row) is not None for row in free.tolist()])
    assert (open_ended & (lanes > 1)).any()
    assert ((lanes == 1) | ~open_ended | (free.sum(dim=-1) >= LINE_LENGTH * lanes)).all()


# --- likelihoods ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [2, 3])
def test_probabilities_of_all_texts_sum_to_at_most_one(lanes):
    """Every layout is a text of its own, and the one that is chosen has been paid for."""
    made = model(3, lanes=(1, lanes), context_length=11)
    rows = torch.tensor([[made.config.bos_id, *row] for row in itertools.product((0, BREAK), repeat=5)])
    found = dcdm.score(made, rows, "exact", lanes=lanes)
    laid = lay_out_texts(rows, rows < 3, rows < 9, lanes, WHOLE, 11, made.config.pad_id)
    assert (laid.tokens == END).any()
    canvases = {(size, *canvas) for size, canvas in zip(laid.forwards.tolist(), laid.tokens.tolist(), strict=True)}
    assert len(canvases) == len(rows), "no two texts share a canvas"
    assert len(set(laid.forwards.tolist())) <= torch.exp(laid.nats).min() + 1e-9, "every size has its share"
    assert 0 < float(torch.exp(-found.nats).sum()) <= 1
    assert (found.estimator, found.is_bound) == ("lines", True)
    assert torch.allclose(found.by_position.sum(dim=-1), found.nats)


def test_a_laid_out_text_is_scored_as_the_row_that_a_decoder_would_have_written():
    made = model()
    words = [5, 6, 7, BREAK, 8, 9, BREAK, 10, 11, 12, 13, BREAK, 14]
    row = torch.tensor([[made.config.bos_id, *words]])
    found = dcdm.score(made, row, lanes=2)
    laid = lay_out_texts(row, row < 20, row >= 0, 2, WHOLE, 64, made.config.pad_id)
    size = int(laid.forwards)
    assert laid.tokens[0].tolist()[1:] == [*words[:6], *[END] * (size - 6), *words[6:], *[END] * (size - 7)]
    plain = replace(made.config, whole_lines=None)
    same = dcdm.build(plain, seed=0, dtype=torch.float64)
    same.load_state_dict(made.state_dict())
    literal = dcdm.score(same.eval(), laid.tokens, lanes=2)
    assert torch.allclose(found.nats, literal.nats + laid.nats)
    assert found.tokens.tolist() == [13]
    for number in (dcdm.score(made, row, lanes=1), dcdm.score(same, row, lanes=1)):
        assert number.estimator == "exact"
        assert torch.equal(number.nats, dcdm.score(same, row, lanes=1).nats)


def test_rows_that_do_not_fit_with_an_eos_or_with_blanks_stay_as_they_are():
    made = model(context_length=12)
    full, ended = [5] * 11, [5, 6, END, 7, 8]
    for words, gap in ((full, None), (ended, None), ([5, 6, 7, 8, 9], 2)):
        row = torch.tensor([[made.config.bos_id, *words]])
        free = row < 20
        if gap is not None:
            free[0, 3:] = False
        laid = lay_out_texts(row, free, row >= 0, 2, WHOLE, 12, made.config.pad_id)
        assert torch.equal(laid.tokens, row)
        assert laid.home.tolist() == [list(range(row.shape[1]))]
        assert (laid.nats > 0).item() == (gap is None)


# --- writing ----------------------------------------------------------------------------------------------------


def test_an_eos_ends_a_lane_and_not_the_text_and_is_dropped_from_it():
    made = model(scale=1.0)
    with torch.no_grad():  # EOS is likely everywhere
        made.embed_tokens.weight[END] *= 6
    prompts = [[5, 6], [7]]
    lanes = dcdm.generate(made, prompts, max_new_tokens=24, lanes=2, eos_id=END)
    assert lanes.finished == ["length", "length"]
    assert all(END not in completion for completion in lanes.completions)
    assert (lanes.tokens == END).any(), "the canvas keeps what filled it up"
    assert lanes.statistics.new_tokens.tolist() == [len(one) for one in lanes.completions]
    alone = [dcdm.generate(made, [p], max_new_tokens=24, lanes=2, eos_id=END, index=[i]).completions[0]
             for i, p in enumerate(prompts)]  # fmt: skip
    assert alone == lanes.completions
    one = dcdm.generate(made, prompts * 8, max_new_tokens=24, lanes=1, eos_id=END)
    assert "eos" in one.finished


def test_a_line_that_had_no_room_is_dropped_unless_the_next_lane_goes_on_with_it():
    assert kept_of([5, BREAK, 6, 7], BREAK, WHOLE) == 1
    assert kept_of([5, BREAK, 6, 7], None, WHOLE) == 1
    assert kept_of([5, BREAK, 6, 7], 8, WHOLE) == 4, "a long line, cut"
    assert kept_of([BREAK, 6, 7], BREAK, WHOLE) == 3, "one line, cut"
    assert kept_of([5, END, 6], BREAK, WHOLE) == 1, "nothing behind the end is text"
    assert kept_of([5, BREAK, END], BREAK, WHOLE) == 2


def test_texts_of_several_lanes_are_whole_lines():
    made = model(scale=2.0)
    with torch.no_grad():  # lines are short
        made.embed_tokens.weight[BREAK] *= 12
    found = dcdm.generate(made, [[5, 6]] * 6, max_new_tokens=32, lanes=4, eos_id=END, index=range(6))
    dropped = 0
    for row, completion in enumerate(found.completions):
        canvas = found.tokens[row, 3:].tolist()
        lanes = [canvas[at : at + 8] for at in range(0, 32, 8)]
        assert completion == [token for lane in lanes for token in lane if token != END]
        dropped += sum(lane[-1] == END for lane in lanes)
        for lane in lanes:
            assert END not in lane or set(lane[lane.index(END) :]) == {END}
    assert dropped > 6
    assert found.statistics.new_tokens.tolist() == [len(one) for one in found.completions]


def test_later_windows_and_blanks_read_no_fillers():
    made = model(scale=1.0)
    with torch.no_grad():
        made.embed_tokens.weight[END] *= 6
    long = dcdm.generate(made, [[5, 6]], max_new_tokens=60, window=32, lanes=2, eos_id=END)
    assert END not in long.completions[0]
    mask = made.config.mask_id
    for lanes in (1, 2):
        filled = dcdm.generate(made, [[5, mask, mask, mask, mask, 6]], lanes=lanes, eos_id=END, seed=3)
        assert END not in filled.completions[0]
        assert filled.completions[0][-1] == 6


def test_a_text_that_must_match_ends_with_an_eos_all_the_same():
    tokenizer = byte_tokenizer()
    whole = WholeLines(tokenizer.line_breaks(), tokenizer.eos_id)
    made = tiny.model("mdlm", 257, kind="lanes", lanes=(1, 2), whole_lines=whole, scale=2.0)
    found = dcdm.generate(made, ["a"], tokenizer=tokenizer, max_new_tokens=12, lanes=2, regex="[ab]{3,5}")
    assert set(found.texts[0]) <= set("ab")
    assert 3 <= len(found.texts[0]) <= 5


# --- settings ---------------------------------------------------------------------------------------------------


def test_what_begins_a_line_comes_from_the_tokenizer_and_is_kept_with_the_model():
    assert byte_tokenizer().line_breaks() == (10,)
    config = model().config
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert "whole_lines" not in replace(config, whole_lines=None).to_dict()
    with pytest.raises(ConfigError, match="belongs to kind 'lanes'"):
        tiny.config("bdlm", whole_lines=WHOLE)
    with pytest.raises(ConfigError, match="belongs to kind 'lanes'"):
        OBJECTIVE.check_fits(tiny.config("bdlm"))
    with pytest.raises(ConfigError, match="must list"):
        WholeLines((), 3)
    with pytest.raises(ConfigError, match=r"needs model\.whole_lines"):
        loss(model(whole_lines=None), Batch(tiny.tokens(2, 40)), 0, OBJECTIVE)


def test_a_run_of_whole_lines_trains_resumes_and_is_measured(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("\n".join(f"line {n} of a text that repeats" for n in range(400)))
    run = str(tmp_path / "run")
    asked = ["train", "--preset", "lanes-debug", "--data", str(tmp_path / "text.txt"), "--run", run, "--set",
             "objective.whole_lines=true", "train.schedule=constant", "train.warmup_steps=1",
             "train.batch_size=2", "evaluate_sequences=2"]  # fmt: skip
    for steps in ("1", "2"):
        with pytest.raises(SystemExit, match="0"):
            main([*asked, "--steps", steps])
    made, tokenizer = dcdm.load(run)
    assert made.config.whole_lines == WholeLines((10,), tokenizer.eos_id)
    assert sum(lane_sizes(50, 4)) == 50
    capsys.readouterr()
    main(["eval", "ppl", run, "--data", str(tmp_path / "text.txt"), "--lanes", "1,4", "--limit", "2", "--json"])
    rows = json.loads(capsys.readouterr().out)["results"]
    assert ["whole lines" in row["label"] for row in rows] == [False, True]
    assert {row["window_length"] for row in rows} == {96}  # 3/4 of the context: room for what fills lanes up
