"""What the playground's examples blank out."""

from __future__ import annotations

import re

import pytest

from dcdm.data.tokenizers import byte_tokenizer, train_bpe
from dcdm.decoding.engine import with_blanks
from dcdm.serving.exercises import EXERCISES, exercises_for

ALL = [exercise for both in EXERCISES.values() for forms in both for exercise in forms]


def tokenizer_of(spec):
    return byte_tokenizer() if spec == "bytes" else train_bpe([one.text for one in ALL] * 9, 320)


@pytest.mark.parametrize("spec", ["bytes", "bpe"])
def test_blanks_are_as_long_as_what_stood_there(spec):
    tokenizer = tokenizer_of(spec)
    for exercise in ALL:
        segments = exercise.segments(tokenizer)
        assert "".join(text for text, _ in segments) == exercise.text
        assert [text for text, count in segments if count] == re.findall("⟦(.*?)⟧", exercise.marked, re.DOTALL)
        assert with_blanks(tokenizer, exercise.prompt(tokenizer)).count(tokenizer.mask_id) == sum(
            count for _, count in segments
        )


def test_the_longest_form_that_fits_is_chosen():
    tokenizer = byte_tokenizer()
    for language, both in EXERCISES.items():
        assert exercises_for(tokenizer, 1024, language) == [forms[0] for forms in both]
        assert exercises_for(tokenizer, 128, language) == [forms[1] for forms in both]
        assert exercises_for(tokenizer, 48, language) == []
    for one in (*exercises_for(tokenizer, 1024), *exercises_for(tokenizer, 128)):
        compile(one.text + "        pass\n" * one.text.endswith("(self):\n"), one.name, "exec")
