"""Training, sampling from and scoring a DCDM with the paper's routing enters no file about anything else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import dcdm
import tiny
from dcdm.cli import main

ROOT = Path(dcdm.__file__).parent
APART = ("lanes/", "lora", "adapters")


def files_entered(action: Callable[[], object]) -> set[str]:
    """The files of the package in which a function is called, imports left out."""
    found: set[str] = set()
    importing = 0

    def profile(frame, event, _) -> None:
        nonlocal importing
        code = frame.f_code
        if code.co_name == "<module>":
            importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not importing and code.co_filename.startswith(str(ROOT)):
            found.add(str(Path(code.co_filename).relative_to(ROOT)))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def apart(files: set[str]) -> list[str]:
    return sorted(file for file in files if any(part in file for part in APART))


@pytest.mark.parametrize("cache", ["none", "frozen"])
def test_sampling_enters_no_file_of_lanes_drafts_or_adapters(cache):
    model = tiny.model("paper")
    files = files_entered(lambda: dcdm.generate(model, [[1, 2]], max_new_tokens=8, cache=cache))
    assert "decoding/loop.py" in files
    assert apart(files) == []


@pytest.mark.parametrize("estimator", ["sequential", "surrogate", "trajectory"])
def test_scoring_enters_no_file_of_lanes_drafts_or_adapters(estimator):
    model, tokens = tiny.model("paper"), tiny.tokens(2, 9)
    files = files_entered(lambda: dcdm.score(model, tokens, estimator, samples=2))
    assert "likelihood/estimators.py" in files
    assert apart(files) == []


def test_a_loss_enters_none_of_them_either_and_lanes_would_be_noticed():
    tokens = tiny.tokens(2, 9)
    assert (
        apart(files_entered(lambda: dcdm.loss(tiny.model("paper"), dcdm.Batch(tokens), 0).total.backward())) == []
    )
    lanes = tiny.model("mdlm", kind="lanes", lanes=(1, 2))
    assert "lanes/decoding.py" in apart(files_entered(lambda: dcdm.generate(lanes, [[1]], max_new_tokens=4)))
    assert "lanes/likelihood.py" in apart(files_entered(lambda: dcdm.score(lanes, tokens)))


def test_the_commands_that_train_and_sample_stay_on_the_paper_s_way_too(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text, held_out, run = tmp_path / "text.txt", tmp_path / "held-out.txt", str(tmp_path / "run")
    text.write_text("It was the best of times, it was the worst of times. " * 60)
    held_out.write_text("It was the age of wisdom, it was the age of foolishness. " * 60)

    def command(*words: str) -> None:
        with pytest.raises(SystemExit) as ended:
            sys.exit(main(list(words)))
        assert ended.value.code in (0, None)

    train = ("train", "--preset", "dcdm-debug", "--run", run, "--steps", "2", "--data", str(text),
             "--validation", str(held_out))  # fmt: skip
    files = files_entered(lambda: command(*train, "--set", "evaluate_sequences=2", "tensorboard=false"))
    assert {"training/trainer.py", "diffusion/objectives.py", "likelihood/estimators.py"} <= files
    assert apart(files) == []
    files = files_entered(lambda: command("sample", run, "--prompt", "It was", "--length", "8"))
    assert "decoding/batch.py" in files
    assert apart(files) == []
