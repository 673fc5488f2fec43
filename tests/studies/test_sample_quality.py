"""Figures of generated texts."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import tiny
from dcdm.config import ConfigError, DataError
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.io.export import write_export
from dcdm.likelihood.estimators import score

_SCRIPT = Path(__file__).parents[2] / "studies" / "sample_quality.py"
_SPEC = importlib.util.spec_from_file_location("sample_quality", _SCRIPT)
assert _SPEC is not None
assert _SPEC.loader is not None
quality = sys.modules["sample_quality"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(quality)
TEXTS = ["the cat sat", "a", "the dog ran and ran and ran and ran", "", "the cat sat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A scorer in transformers' own form."""
    path = tmp_path_factory.mktemp("scorer")
    tokenizer = byte_tokenizer()
    tokenizer.save(path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=32,
        initializer_range=0.5, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def test_perplexity_is_that_of_transformers_text_by_text(folder):
    scorer = quality.TextScorer.load(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    nats = tokens = 0.0
    for text in filter(None, ("the cat sat", "a", "")):
        ids = torch.tensor([[byte_tokenizer().bos_id, *byte_tokenizer().encode(text)]])
        nats += float(model(ids, labels=ids).loss.detach()) * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    result = quality.measure_quality(["the cat sat", "a", ""], scorer)
    assert result.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert (result.texts, result.tokens, result.left_out) == (2, 12, 1)


def test_an_exported_ar_model_is_a_scorer_and_one_of_another_kind_is_none(tmp_path):
    model, tokenizer = tiny.model("ar", symbols=257).float(), byte_tokenizer()
    for kind, made in (("ar", model), ("mdlm", tiny.model("mdlm", symbols=257).float())):
        write_export(made, tokenizer, tmp_path / kind, "a model")
    texts = ["abba", "babb"]
    result = quality.measure_quality(texts, quality.TextScorer.load(tmp_path / "ar"))
    rows = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(text)] for text in texts])
    exact = score(model, rows)
    assert result.perplexity == pytest.approx(math.exp(exact.per_token), rel=1e-4)
    assert result.bits_per_byte == pytest.approx(float(exact.nats.sum()) / 8 / math.log(2), rel=1e-4)
    with pytest.raises(ConfigError, match="holds no causal model"):
        quality.TextScorer.load(tmp_path / "mdlm")


def test_the_scorer_sees_no_padding_and_the_batch_size_changes_nothing(folder):
    scorer = quality.TextScorer.load(folder)
    seen = []
    scorer.model.register_forward_pre_hook(lambda *call: seen.append(call[2]["input_ids"]), with_kwargs=True)
    results = [quality.measure_quality(TEXTS, scorer, batch_size) for batch_size in (1, 2, 8)]
    assert results[0].perplexity == pytest.approx(results[1].perplexity, rel=1e-6)
    assert results[0].perplexity == pytest.approx(results[2].perplexity, rel=1e-6)
    assert all(int((rows == byte_tokenizer().pad_id).sum()) == 0 for rows in seen)


def test_every_token_of_a_long_text_is_scored_once_within_the_window(folder):
    scorer = quality.TextScorer.load(folder)
    ids = list(range(100))
    windows = scorer._windows(ids)
    assert all(len(row) <= 32 for _, row in windows)
    assert [token for skipped, row in windows for token in row[skipped:]] == ids
    assert all(skipped >= 16 for skipped, _ in windows[1:])


def test_a_scorer_without_a_first_token_starts_at_the_second(folder):
    scorer = quality.TextScorer.load(folder)
    bare = quality.TextScorer(scorer.model, scorer.tokenizer, scorer.window, None, scorer.device)
    assert [count for _, count in bare.nats([[1, 2, 3], [1], []])] == [2, 0, 0]


def test_entropy_distinct_and_repetition_by_hand():
    assert quality.entropy([[1, 1, 2, 2], [3, 3, 3, 3]]) == pytest.approx(math.log(2) / 2)
    assert quality.distinct([[1, 2, 1, 2]], 1) == 0.5
    assert quality.distinct([[1, 2, 1, 2], [1, 2]], 2) == 0.5
    assert quality.repetition([[1, 2, 3, 4, 1, 2, 3, 4]], 4) == pytest.approx(1 / 5)
    assert quality.repetition([[1, 2]], 4) == 0


def test_texts_are_read_from_rows_or_between_blank_lines_and_measured(folder, tmp_path):
    (tmp_path / "texts.txt").write_text("the cat sat\n\na\n\n\n")
    assert quality.read_texts(tmp_path / "texts.txt") == ["the cat sat", "a"]
    one = tmp_path / "one.jsonl"
    one.write_text('\ufeff{"text": "two\u2028lines\x85"}\n\n \n', encoding="utf-8")
    assert quality.read_texts(one) == ["two\u2028lines\x85"]
    assert quality.measure_quality(["alone"], quality.TextScorer.load(folder)).perplexity_stderr is None


def test_wrong_use_is_refused(folder, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"title": "x"}\n')
    with pytest.raises(ConfigError, match="cannot be read"):
        quality.read_texts(tmp_path / "none.txt")
    with pytest.raises(DataError, match=r"bad\.jsonl:1"):
        quality.read_texts(tmp_path / "bad.jsonl")
    with pytest.raises(ConfigError, match="is not a folder"):
        quality.TextScorer.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no causal model"):
        quality.TextScorer.load(tmp_path)
