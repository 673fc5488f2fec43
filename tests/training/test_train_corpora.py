"""Runs by the same command on text with a GPT-2 tokenizer and on pairs of prompt and response."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from corpora import documents, gpt2_style_folder, prose, write_jsonl
from dcdm.cli import main
from dcdm.io.load import load_model

SMALL = [
    "model.num_layers=2", "model.hidden_size=32", "model.context_length=48", "train.warmup_steps=1",
    "evaluate_sequences=2", "evaluate_samples=1", "tensorboard=false", "data.workers=1",
]  # fmt: skip


def train(preset: str, folder: Path, tokenizer: str, source: Path, *settings: str) -> list[dict[str, float]]:
    """The command on `source`; the rows of its metrics."""
    arguments = ["train", "--preset", preset, "--run", str(folder / "run"), "--data", str(source), "--steps", "3"]
    arguments += ["--tokenizer", tokenizer, "--batch-size", "4", "--device", "cpu", "--set", *SMALL, *settings]
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == 0
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def assert_trained(rows: list[dict[str, float]]) -> None:
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    assert all(math.isfinite(row["loss"]) and row["tokens"] > 0 for row in rows[:3])
    assert 0 < rows[3]["evaluation"]["valid_nll"] < 20


@pytest.fixture
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_model_trains_on_text_with_a_gpt2_tokenizer_folder(cached):
    source = cached / "text.txt"
    source.write_text(prose(800), encoding="utf-8")
    tokenizer = gpt2_style_folder(cached / "gpt2")
    assert_trained(train("dcdm-moe-debug", cached, str(tokenizer), source))
    model, kept = load_model(cached / "run")
    vocabulary = len(json.loads((tokenizer / "vocab.json").read_text()))
    assert model.config.vocab_size == kept.vocab_size == vocabulary + 3


@pytest.mark.parametrize("preset", ["ar-debug", "dcdm-debug"])
def test_every_kind_trains_on_prompts_and_responses_and_counts_responses_only(preset, cached):
    texts = documents(160)
    pairs = [{"question": f"{number}?", "answer": text[:20]} for number, text in enumerate(texts)]
    source = write_jsonl(cached / "pairs.jsonl", pairs)
    fields = ("data.reading.prompt_field=question", "data.reading.response_field=answer")
    rows = train(preset, cached, "bytes", source, *fields)
    assert_trained(rows)
    longest = max(len(pair["answer"].encode()) for pair in pairs) + 1  # and the end
    assert all(row["tokens"] <= 4 * longest < 4 * 48 for row in rows[:3])
