"""Texts being filled in, side by side in a terminal, and what is blanked out."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from dcdm.data.tokenizers import byte_tokenizer, train_bpe
from dcdm.decoding.engine import with_blanks
from dcdm.viewing import terminal
from dcdm.viewing.filling import EXERCISES, Filling, Written, exercises_for
from dcdm.viewing.terminal import filling_text, show_written

TWO = Filling(
    tokens=["<|bos|>", "a<b", ":\n", "  x", " =", " &\n"],
    chunks=[0, 0, 0, 1, 2, 1],
    steps=[[3, 5], [4]],
    lanes=[0, 0, 0, 1, 1, 2],
)
ONE = Filling(TWO.tokens, [0, 0, 0, 1, 2, 3], [[3], [4], [5]], [0, 0, 0, 1, 1, 1])
TEXTS = [Written("2 lanes", TWO, 0.1), Written("AR’s order", ONE, 0.2)]


# --- in a terminal -----------------------------------------------------------------------------------------------


def printed(width, **how):
    out = io.StringIO()
    show_written(TEXTS, Console(file=out, width=width, **how))
    return out.getvalue()


@pytest.mark.parametrize(("width", "beside"), [(120, True), (60, False)])
def test_two_texts_stand_side_by_side_where_there_is_room(width, beside):
    shown = printed(width)
    heads = [line for line in shown.splitlines() if "forward" in line and "─" in line]
    assert len(heads) == (1 if beside else 2)
    assert "2 lanes: forward 2 of 2" in shown
    assert "AR’s order: forward 3 of 3" in shown
    assert "in 3 forward passes, 0.20 s" in " ".join(shown.replace("│", " ").split())


def test_in_a_terminal_all_move_together_and_wait_for_the_longest(monkeypatch):
    waits = []
    monkeypatch.setattr(terminal.time, "sleep", waits.append)
    # rich remembers how it wrote a style, whatever the colours of a later console
    shown = printed(120, force_terminal=True, color_system="truecolor")
    assert len(waits) == 3
    assert sum(waits) == pytest.approx(4)
    for at in range(4):
        assert f"2 lanes: forward {min(at, 2)} of 2" in shown
        assert f"AR’s order: forward {at} of 3" in shown


def test_blanks_disappear_with_the_forward_that_fills_them():
    assert [filling_text(TWO, at, False).plain for at in range(3)] == [
        "a<b:\n░░░", "a<b:\n  x░ &\n", "a<b:\n  x = &\n",
    ]  # fmt: skip


# --- what is blanked out -----------------------------------------------------------------------------------------


ALL = [exercise for both in EXERCISES.values() for forms in both for exercise in forms]


def tokenizer_of(spec):
    return byte_tokenizer() if spec == "bytes" else train_bpe([one.text for one in ALL] * 9, 320)


@pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: f"{exercise.name} {len(exercise.text)}")
@pytest.mark.parametrize("spec", ["bytes", "bpe"])
def test_blanks_are_whole_tokens_of_the_text_as_the_model_reads_it(exercise, spec):
    tokenizer = tokenizer_of(spec)
    ids, blank = exercise.original(tokenizer)
    assert ids == tokenizer.encode(exercise.text)
    assert "".join(text for text, _ in exercise.segments(tokenizer)) == exercise.text
    masked = [tokenizer.mask_id if hole else token for token, hole in zip(ids, blank, strict=True)]
    assert with_blanks(tokenizer, exercise.prompt(tokenizer)) == masked
    for marked in re.findall("⟦(.*?)⟧", exercise.marked, re.DOTALL):
        assert any(marked in text for text, count in exercise.segments(tokenizer) if count)


def test_the_longest_form_that_fits_is_chosen():
    tokenizer = byte_tokenizer()
    for language, both in EXERCISES.items():
        assert exercises_for(tokenizer, 1024, language) == [forms[0] for forms in both]
        assert exercises_for(tokenizer, 128, language) == [forms[1] for forms in both]
        assert exercises_for(tokenizer, 48, language) == []
    for one in (*exercises_for(tokenizer, 1024), *exercises_for(tokenizer, 128)):
        compile(one.text + "        pass\n" * one.text.endswith("(self):\n"), one.name, "exec")
