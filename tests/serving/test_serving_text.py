"""Text from tokens that come out of order: whole characters, no part of a stop, nothing lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dcdm
import tiny
from corpora import metaspace_tokenizer
from dcdm.data.tokenizers import byte_tokenizer, train_bpe
from dcdm.decoding.text import Ended, Event
from dcdm.serving.reading import TextReader
from live import events, live

TOKENIZERS = {"bytes": byte_tokenizer(), "bpe": train_bpe(["größer, 日本語 und 🙂 größer 日本 " * 20], 280)}
FIRST = 4
ENDED = {"length": Ended([], "length", {}), "eos": Ended([], "eos", {}), "cancelled": Ended([], "cancelled", {})}


def shuffled(tokens, order):
    """Events that commit tokens in this order, a few at a time."""
    places = list(range(len(tokens)))
    random.Random(order).shuffle(places)
    for at in range(0, len(places), 3):
        yield event_of(tokens, places[at : at + 3])


def event_of(tokens, now):
    places, log_p = [FIRST + p for p in now], [-float(p) for p in now]
    return Event(0, 0, 1, 1, places, [tokens[p] for p in now], log_p)


def written(reader, tokens, order, ended="length"):
    """The pieces that a reader gives for tokens committed in this order."""
    pieces = []
    for event in shuffled(tokens, order):
        if reader.satisfied:
            break
        if (piece := reader.event(event)) is not None:
            pieces.append(piece)
    return [*pieces, reader.end(ENDED[ended])]


def any_tokens(tokenizer):
    """Those of a text, or any, which may be parts of characters."""
    texts = st.text(alphabet="abgrößer日本語🙂 ", max_size=20).map(tokenizer.encode)
    return texts | st.lists(st.integers(0, tokenizer.vocab_size - 4), max_size=24)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_the_pieces_joined_are_the_decoded_tokens_in_any_order(name, data):
    tokenizer = TOKENIZERS[name]
    tokens = data.draw(any_tokens(tokenizer))
    pieces = written(TextReader(tokenizer, FIRST), tokens, data.draw(st.integers(0, 99)))
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(tokens)


@given(tokens=st.lists(st.integers(0, 9), max_size=12), order=st.integers(0, 99))
def test_a_text_without_a_prompt_begins_without_the_space_of_its_first_word(tokens, order):
    """Of tokenizers whose words hold the space before them."""
    tokenizer = metaspace_tokenizer()
    for begins, expected in ((True, tokenizer.decode(tokens)), (False, tokenizer.continuation(tokens))):
        pieces = written(TextReader(tokenizer, FIRST, begins=begins), tokens, order)
        assert "".join(piece.text for piece in pieces) == expected


def test_the_server_writes_what_generate_writes_where_words_hold_their_space():
    tokenizer = metaspace_tokenizer()
    network = tiny.model("mdlm", tokenizer.vocab_size - 3)
    spaces = 0
    with live(model=(network, tokenizer)) as server:
        for seed in range(6):
            for prompt in ("", "the"):
                settings = {"max_new_tokens": 5, "seed": seed, "tokenizer": tokenizer, "eos_id": -1}
                result = dcdm.generate(network, [prompt], **settings)
                body = {"prompt": prompt, "max_tokens": 5, "seed": seed, "stop_at_eos": False}
                assert server.post("/v1/completions", body).json()["choices"][0]["text"] == result.texts[0]
                done = events(server.post("/v1/denoise", body).text)[-1][1]
                assert done["text"] == prompt + result.texts[0]
                spaces += not prompt and tokenizer.continuation(result.completions[0]) != result.texts[0]
    assert spaces, "some texts begin with a word that holds a space"


@given(
    text=st.text(alphabet="ab🙂", max_size=20),
    stops=st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=4), min_size=1, max_size=3),
    order=st.integers(0, 99),
)
def test_nothing_of_a_stop_or_behind_it_is_shown(text, stops, order):
    reader = TextReader(TOKENIZERS["bytes"], FIRST, stops=stops)
    pieces = written(reader, list(text.encode()), order)
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert "".join(piece.text for piece in pieces) == text
        assert pieces[-1].finish == "length"
        return
    first = min(ends)  # whichever is complete first ends the text; of several, the one that begins first
    cut = min(text.index(stop) for stop in stops if stop in text[:first])
    assert "".join(piece.text for piece in pieces) == text[:cut]
    assert reader.satisfied
    assert pieces[-1].finish == "stop"


def test_an_eos_ends_the_text_and_a_blank_ends_where_its_positions_do():
    tokenizer = TOKENIZERS["bytes"]
    tokens = [*b"ab", tokenizer.eos_id, *b"cd"]
    for order in range(20):
        pieces = written(TextReader(tokenizer, FIRST, eos_id=tokenizer.eos_id), tokens, order, "eos")
        assert "".join(piece.text for piece in pieces) == "ab"
        assert pieces[-1].finish == "stop"
    reader = TextReader(tokenizer, FIRST, last=FIRST + 2)
    assert "".join(piece.text for piece in written(reader, list(b"abcde"), 1)) == "abc"
