"""What is measured: classes of tokens, information between counts, and commits for a number of forwards."""

from collections import Counter

import pytest

from dcdm.reproduction import measures
from dcdm.reproduction.scale import cpu
from dcdm.reproduction.variants import RunSpec, variants


def test_classes_of_tokens() -> None:
    pieces = [b" the", b" house", b"hold", b" 1,907", b",", b"\n"]
    assert measures.token_classes(pieces) == [
        "function word", "word", "inside a word", "number", "punctuation", "line end",
    ]  # fmt: skip


def test_what_two_things_tell_of_each_other_is_measured_in_bits() -> None:
    assert measures.information(Counter({(1, "a"): 5, (2, "b"): 5})) == pytest.approx(1.0)
    assert measures.information(Counter({(1, "a"): 5, (1, "b"): 5, (2, "a"): 5, (2, "b"): 5})) == pytest.approx(0.0)


def test_commits_have_the_forwards_that_are_asked_for() -> None:
    base = variants(cpu())
    config = RunSpec(cpu(), base["strided-full"], 0).model
    assert measures.commit_for(config, 1 / 16) == "steps:2"
    assert measures.commit_for(config, 1.0) == "position"
    assert measures.commit_for(config, 1 / 16, chunks=1.9) == "steps:8"
    assert measures.commit_for(config, 1 / 16, chunks=5.9) == "steps:2"
    assert measures.commit_for(RunSpec(cpu(), base["bdlm8"], 0).model, 1 / 8) == "chunk"
    assert measures.commit_for(RunSpec(cpu(), base["bdlm8"], 0).model, 1 / 16) is None
    assert measures.commit_for(RunSpec(cpu(), base["ar"], 0).model, 1 / 2) is None
