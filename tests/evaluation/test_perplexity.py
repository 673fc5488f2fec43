"""Perplexities that are known beforehand or must not depend on how the work is cut, and the table of them."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dcdm
import pretrained
import tiny
from corpora import prose, write_jsonl
from dcdm.cli import main
from dcdm.config import ConfigError, DataConfig
from dcdm.data.prepare import prepare
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.diffusion import noise
from dcdm.distributed import World
from dcdm.evaluation.corpora import Corpus, CorpusWindows, TokenisedCorpus, WindowSettings, read_corpus, tokenise
from dcdm.evaluation.perplexity import EstimatorSettings, evaluate_perplexity, measure_perplexity
from dcdm.keys import Key
from dcdm.likelihood.estimators import estimators_of
from ranks import command_on_ranks

SPECIALS = SimpleNamespace(bos_id=tiny.LETTERS, pad_id=tiny.LETTERS + 1)
CORPUS = Corpus("letters", "made here")
SOME_KINDS = ["ar", "mdlm", "bdlm", "paper", "causal", "random"]


def letters(sizes=(30, 4, 17), seed=0):
    total = sum(sizes)
    ids = np.random.default_rng(seed).integers(tiny.LETTERS, size=total)
    return TokenisedCorpus(ids, np.repeat(np.arange(len(sizes)), sizes), np.full(total, 2))


def windows_of(tokens, length=12, **settings):
    return CorpusWindows(tokens, SPECIALS, length, WindowSettings(**settings))


def figures(model, windows, estimator=None, **sampling):
    estimator = estimator or estimators_of(model.config)[0]
    settings = EstimatorSettings(**{"samples": 3, **sampling})
    tally = measure_perplexity(model, windows, estimator, settings, World())
    return tally.figures("m", CORPUS, windows, estimator, settings)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_zeroed_embeddings_give_exactly_the_size_of_the_vocabulary(kind):
    model = tiny.model(kind)
    with torch.no_grad():
        model.embed_tokens.weight.zero_()
    for estimator in estimators_of(model.config):
        size = tiny.LETTERS + 3 if (kind, estimator) == ("ar", "exact") else tiny.LETTERS
        for settings in ({}, {"stride": 5}, {"per_document": True}):
            row = figures(model, windows_of(letters(), **settings), estimator)
            assert row.perplexity == pytest.approx(size, rel=1e-12)
            assert row.tokens == 51
            assert row.bits_per_byte == pytest.approx(math.log2(size) / 2)
            assert row.monte_carlo_stderr == pytest.approx(0, abs=1e-12)
            assert row.document_stderr == pytest.approx(0, abs=1e-12)


def certain(kind):
    """A model that knows that every token is the same."""
    model = tiny.model(kind)

    def states(tokens):
        return torch.zeros(*tokens.shape, 2, dtype=torch.float64) + torch.tensor([1.0, 0.0], dtype=torch.float64)

    weight = torch.zeros(model.head_weight().shape[0], 2, dtype=torch.float64)
    weight[5, 0] = 1e4
    model.head_weight = lambda: weight
    model.denoise = lambda z, ids, *_: states(z)
    model.extend = lambda tokens, slots, keep, memory, num_out, rows=None: states(tokens)[:, :num_out]
    model.encode = lambda tokens, masked=None, **_: SimpleNamespace(states=states(tokens))
    return model


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_perfectly_predictable_corpus_gives_one(kind):
    same = TokenisedCorpus(np.full(40, 5), np.repeat([0, 1], 20), np.ones(40))
    model = certain(kind)
    for estimator in estimators_of(model.config):
        row = figures(model, windows_of(same), estimator)
        assert (row.perplexity, row.bits_per_byte, row.tokens) == (1.0, 0.0, 40)


def test_ar_perplexity_equals_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer, length = byte_tokenizer(), 48
    torch.manual_seed(0)
    theirs = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, intermediate_size=48, initializer_range=0.2, tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip
    theirs.save_pretrained(tmp_path / "qwen3")
    model = pretrained.taken(tmp_path / "qwen3", context_length=length)
    theirs.resize_token_embeddings(260, mean_resizing=False)
    with torch.no_grad():  # BOS, PAD and MASK are ours
        theirs.get_input_embeddings().weight[257:] = model.embed_tokens.weight[257:]

    (tmp_path / "text.txt").write_text(prose(60))
    tokens = tokenise(read_corpus(str(tmp_path / "text.txt")), tokenizer)
    for settings in (WindowSettings(), WindowSettings(10)):
        windows = CorpusWindows(tokens, tokenizer, length, settings)
        row = figures(model, windows)
        total = 0.0
        for batch in windows.batches(1):
            size = int((batch.tokens != tokenizer.pad_id).sum())
            labels = batch.tokens.masked_fill(batch.place < 0, -100)[:, :size]
            with torch.no_grad():
                mean = theirs(input_ids=batch.tokens[:, :size], labels=labels).loss
            total += mean.item() * int((labels != -100).sum())
        assert row.tokens == len(tokens.ids)
        assert row.perplexity == pytest.approx(math.exp(total / row.tokens), rel=1e-4)


def rows(model, windows, estimator, batch_size):
    return measure_perplexity(model, windows, estimator, EstimatorSettings(3, 0, batch_size), World()).rows


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_neither_the_batch_size_nor_the_limit_changes_what_a_window_scores(kind):
    model = tiny.model(kind)
    texts = letters((20, 4, 9))
    for estimator in estimators_of(model.config):
        for settings in ({}, {"per_document": True, "stride": 4}):
            one, many = (rows(model, windows_of(texts, **settings), estimator, size) for size in (1, 16))
            np.testing.assert_allclose([row[1] for row in one], [row[1] for row in many], atol=1e-12)
            assert [row[2] for row in one] == [row[2] for row in many]
            np.testing.assert_allclose(np.concatenate([r[3] for r in one]), np.concatenate([r[3] for r in many]))
        few = rows(model, windows_of(texts, **settings, limit=2), estimator, 16)
        whole = {row[0]: row[3] for row in many}
        assert len(few) == 2 < len(whole)
        for number, *_, shares in few:
            np.testing.assert_allclose(shares, whole[number])


def test_errors_over_documents_and_of_the_draws_are_reported_apart():
    model = tiny.model("mdlm")
    windows = windows_of(letters())
    row = figures(model, windows, samples=4)
    tally = measure_perplexity(model, windows, "bound", EstimatorSettings(4), World())
    spread = {}
    for *_, shares in tally.rows:
        for document, nats, tokens, _ in shares:
            spread[document] = spread.get(document, 0.0) + nats - row.nats_per_token * tokens
    expected = math.sqrt(sum(value**2 for value in spread.values()) * 3 / 2) / 51
    assert row.document_stderr == pytest.approx(expected)
    assert row.monte_carlo_stderr == pytest.approx(math.sqrt(sum(r[1] for r in tally.rows)) / 51)
    assert figures(model, windows, samples=1).monte_carlo_stderr is None
    assert figures(model, windows_of(letters((40,)))).document_stderr is None
    assert figures(tiny.model("ar"), windows).samples is None
    assert figures(model, windows, samples=4, seed=1).nats_per_token != row.nats_per_token


def test_small_chunks_are_summed_exactly_once_there_are_passes_enough():
    model = tiny.model("bdlm")  # blocks of 2: three subsets
    clean = tiny.tokens(3, 9, padding=(0, 2))
    exact = dcdm.score(model, clean, samples="all")
    for samples in (3, 5):
        scored = dcdm.score(model, clean, samples=samples)
        torch.testing.assert_close(scored.nats, exact.nats)
        assert not scored.stderr.any()
        assert scored.forwards.tolist() == [3, 3, 3]
    assert dcdm.score(model, clean, samples=2).stderr.all()


@pytest.mark.parametrize("kind", ["mdlm", "bdlm", "causal"])
def test_the_error_is_less_than_half_of_that_of_uniform_sampling(kind):
    model = tiny.model(kind, num_chunks=4) if kind == "causal" else tiny.model(kind, scale=4.0)
    tokens, index = tiny.tokens(4, 25).repeat(30, 1), torch.arange(120)  # each row draws by its number
    used = dcdm.score(model, tokens, "bound", 8, index=index, batch_size=120).nats.view(30, 4)
    plain = uniformly_sampled(model, tokens, 8, index).view(30, 4)
    assert used.var(dim=0).mean().sqrt() < 0.5 * plain.var(dim=0).mean().sqrt()
    assert (plain - used).mean(dim=0).sum().abs() < 4 * ((plain.var(dim=0) + used.var(dim=0)).sum() / 30).sqrt()


@torch.no_grad()
def uniformly_sampled(model, tokens, samples, index):
    """The bound as training estimates it: t uniform for every group and pass, each token weighed by 1/t."""
    ids = model.partition(tokens, index=index).ids
    total = torch.zeros(len(tokens), dtype=torch.float64)
    for number in range(samples):
        key = Key(0).fold("plain", number)
        t = 1e-3 + (1 - 1e-3) * key.rows(index, model.config.num_groups(tokens.shape[1]))
        masked, weight = noise.corrupt(key, index, ids, t)
        log_p = model(tokens, masked).logits[..., :-3].log_softmax(dim=-1)
        nll = -log_p.gather(-1, tokens.clamp(max=tiny.LETTERS - 1)[..., None]).squeeze(-1)
        total += torch.where(masked, nll * weight, 0).sum(dim=-1)
    return total / samples


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    rows = [{"text": text} for text in ("", *(prose(2, n) for n in range(6)))]
    write_jsonl(folder / "pubmed.jsonl", rows)
    (folder / "mine.txt").write_text(prose(30))
    for kind in ("ar", "paper", "bdlm"):
        tiny.exported(kind, folder / kind, context_length=32)
    return folder


COMMON = ["--samples", "2", "--limit", "3", "--device", "cpu"]


def test_one_command_gives_one_table(place, capsys):
    models = [str(place / kind) for kind in ("ar", "paper", "bdlm")]
    data = ["--data", str(place / "pubmed.jsonl"), f"ptb={place / 'mine.txt'}", str(place / "mine.txt")]
    main(["eval", "ppl", *models, *data, "--estimator", "auto", "surrogate", "trajectory", *COMMON])
    shown = capsys.readouterr()
    assert "bdlm on ptb, bound: 3 of 3 windows" in shown.err
    firsts = [line.split()[0] for line in shown.out.splitlines()[1:] if " " in line]
    assert list(dict.fromkeys(firsts))[:3] == ["pubmed", "ptb", "mine"]
    header, ar, paper, _ = (line for line in shown.out.splitlines() if line.startswith(("corpus", "pubmed")))
    assert header.index("bound") < header.index("decoder") < header.index("surrogate (no bound)")
    assert ["does not apply" in line for line in (ar, paper)] == [True, False]
    assert "≤" in paper
    assert "lm1b" not in shown.out, "a corpus that nobody asked for"
    assert shown.out.count("does not apply") == 6


def test_json_holds_every_setting_and_count_and_the_split_that_was_read(place, capsys):
    main(["eval", "ppl", str(place / "paper"), "--data", str(place / "pubmed.jsonl"), "stdlib", *COMMON, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [corpus["split"] for corpus in found["corpora"].values()] == [None, "validation"]
    assert found["settings"]["samples"] == 2
    assert found["settings"]["window_limit"] == 3
    assert found["models"]["paper"]["routing"] == "paper"
    assert len(found["corpora"]["pubmed"]["sha256"]) == 64
    row = found["results"][0]
    assert row["estimator"] == "sequential"
    assert row["label"].startswith("upper bound")
    assert row["left_out"]["tokens beyond the limit"] > 0
    assert row["perplexity"] == pytest.approx(math.exp(row["nats_per_token"]))
    assert row["bits_per_byte"] == pytest.approx(row["nats_per_token"] * row["tokens"] / math.log(2) / row["bytes"])


def test_two_processes_print_the_figures_of_one_to_the_last_digit(place, capsys):
    models = [str(place / kind) for kind in ("ar", "paper")]
    data = ["--data", str(place / "pubmed.jsonl"), str(place / "mine.txt"), "--per-document", "--samples", "2"]
    how = ["--estimator", "auto", "trajectory", "--batch-size", "2", "--limit", "5", "--device", "cpu", "--json"]
    words = ["eval", "ppl", *models, *data, *how]
    shared = command_on_ranks(2, words)
    main(words)
    assert shared == [capsys.readouterr().out, ""]


def test_several_forwards_of_a_decoder_are_counted(place):
    corpora = [read_corpus(str(place / "mine.txt"))]
    models, forwards = [str(place / "bdlm"), str(place / "ar")], []
    model, tokenizer = dcdm.load(place / "bdlm")
    cut = WindowSettings(limit=2)
    windows = CorpusWindows(tokenise(corpora[0], tokenizer), tokenizer, model.config.context_length, cut)
    (batch,) = windows.batches(16)
    for commit in ("chunk", "steps:2", "position"):
        sampling = EstimatorSettings(samples=1, commit=commit)
        result = evaluate_perplexity(models, corpora, ("auto", "trajectory"), sampling, cut)
        (row,) = (one for one in result.rows if (one.model, one.estimator) == ("bdlm", "trajectory"))
        alone = dcdm.score(model, batch.tokens, "trajectory", commit=commit, prompt=batch.prompt, index=batch.index)
        assert row.forwards == int(alone.forwards.sum())
        assert row.nats_per_token == pytest.approx(float(alone.nats.sum() / alone.tokens.sum()))
        forwards.append(row.forwards)
    assert forwards[0] < forwards[1] <= forwards[2]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--data", "none.txt"], "there is no such file"),
        (["--data", "mine.txt", "--estimator", "bound", "surrogate"], "surrogate applies to none of the models"),
        (["--data", "mine.txt", "--estimator", "elbo"], "unknown estimator"),
        (["--data", "mine.txt", "--stride", "99"], "at most 31"),
        (["--data", "mine.txt", "--commit", "steps:2"], "belongs to --estimator trajectory"),
        (["--data", "mine.txt", "--estimator", "trajectory", "--commit", "steps:0"], "steps:0"),
        (["--data", "mine.txt", "--samples", "0"], "samples=0"),
        (["--data", "mine.txt", "pubmed.jsonl", "--field", "body"], "--field"),
        (["--data", "shards", "--split", "train"], "another tokenizer"),
    ],
)
def test_wrong_use_ends_with_one_line_and_code_2(arguments, problem, place, capsys, refused, monkeypatch):
    monkeypatch.chdir(place)
    if "shards" in arguments and not (place / "shards").exists():
        prepare("mine.txt", "bpe:262", "shards", settings=DataConfig(validation_share=0.0), workers=1)
        capsys.readouterr()
    (said,) = refused("eval", "ppl", "bdlm", *arguments).splitlines()
    assert problem in said


def test_models_with_one_folder_name_are_told_apart(place, tmp_path):
    twin = str(tiny.exported("ar", tmp_path / "ar", context_length=32))
    corpora = [read_corpus(str(place / "mine.txt"))]
    result = evaluate_perplexity([str(place / "ar"), twin], corpora, window=WindowSettings(limit=2))
    assert list(result.models) == [str(place / "ar"), twin]
    with pytest.raises(ConfigError, match="twice"):
        evaluate_perplexity([twin, twin], corpora)
