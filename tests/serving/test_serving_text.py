"""Text from tokens that come out of order: whole characters, no part of a stop, nothing lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcdm.data.tokenizers import byte_tokenizer, train_bpe
from dcdm.decoding.session import Ended, Event
from dcdm.serving.writing import Writer

TOKENIZERS = {"bytes": byte_tokenizer(), "bpe": train_bpe(["größer, 日本語 und 🙂 größer 日本 " * 20], 280)}
FIRST = 4
ENDED = {"length": Ended([], "length", {}), "eos": Ended([], "eos", {}), "cancelled": Ended([], "cancelled", {})}


def written(writer, tokens, order, ended="length"):
    """The pieces that a writer gives for tokens committed in this order, a few at a time."""
    pieces, places = [], list(range(len(tokens)))
    random.Random(order).shuffle(places)
    while places and not writer.satisfied:
        now, places = places[:3], places[3:]
        event = Event(0, 0, 1, 1, [FIRST + p for p in now], [tokens[p] for p in now], [-float(p) for p in now])
        if (piece := writer.event(event)) is not None:
            pieces.append(piece)
    return [*pieces, writer.end(ENDED[ended])]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_the_pieces_joined_are_the_decoded_tokens_in_any_order(name, data):
    tokenizer = TOKENIZERS[name]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 4), max_size=24))
    pieces = written(Writer(tokenizer, FIRST), tokens, data.draw(st.integers(0, 99)))
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(tokens)
    assert [token for piece in pieces for token in piece.tokens] == tokens
    assert [p for piece in pieces for p in piece.log_p] == [-float(p) for p in range(len(tokens))]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(alphabet="abgrößer日本語🙂 ", max_size=30), order=st.integers(0, 99))
def test_valid_text_comes_in_whole_characters(name, text, order):
    tokenizer = TOKENIZERS[name]
    pieces = written(Writer(tokenizer, FIRST), tokenizer.encode(text), order)
    assert "".join(piece.text for piece in pieces) == text
    assert all("\ufffd" not in piece.text for piece in pieces)


@given(
    text=st.text(alphabet="ab🙂", max_size=20),
    stops=st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=4), min_size=1, max_size=3),
    order=st.integers(0, 99),
)
def test_nothing_of_a_stop_or_behind_it_is_shown(text, stops, order):
    writer = Writer(TOKENIZERS["bytes"], FIRST, stops=stops)
    pieces = written(writer, list(text.encode()), order)
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert "".join(piece.text for piece in pieces) == text
        assert pieces[-1].finish == "length"
        return
    first = min(ends)  # whichever is complete first ends the text; of several, the one that begins first
    cut = min(text.index(stop) for stop in stops if stop in text[:first])
    assert "".join(piece.text for piece in pieces) == text[:cut]
    assert writer.satisfied
    assert pieces[-1].finish == "stop"


def test_an_eos_ends_the_text_and_what_lies_behind_it_is_void():
    tokenizer = TOKENIZERS["bytes"]
    tokens = [*b"ab", tokenizer.eos_id, *b"cd"]
    for order in range(20):
        pieces = written(Writer(tokenizer, FIRST, eos_id=tokenizer.eos_id), tokens, order, "eos")
        assert "".join(piece.text for piece in pieces) == "ab"
        assert pieces[-1].finish == "stop"


def test_a_blank_is_read_to_its_end_and_no_further():
    writer = Writer(TOKENIZERS["bytes"], FIRST, last=FIRST + 2)
    assert "".join(piece.text for piece in written(writer, list(b"abcde"), 1)) == "abc"
