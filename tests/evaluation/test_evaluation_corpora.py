"""Corpora for evaluation: what is read, what is left out and counted, and which tokens of a window count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpora import prose, write_jsonl
from dcdm.config import ConfigError, DataConfig, DataError
from dcdm.data.prepare import prepare
from dcdm.data.sources import stdlib_files
from dcdm.data.tokenizers import byte_tokenizer, train_bpe
from dcdm.evaluation.corpora import (
    CorpusWindows,
    TokenisedCorpus,
    WindowSettings,
    detokenise_lambada,
    detokenise_ptb,
    detokenise_wikitext,
    read_corpora,
    read_corpus,
    respaced,
    split_name,
    tokenise,
)

BYTES = byte_tokenizer()


def stream(sizes, prompt=None):
    """Documents of the given numbers of tokens; token i has the id i mod 250."""
    total = sum(sizes)
    document = np.repeat(np.arange(len(sizes)), sizes)
    return TokenisedCorpus(np.arange(total) % 250, document, np.ones(total), prompt)


def counted(windows, batch_size=3, world=1):
    places = [
        batch.place[batch.place >= 0].numpy()
        for rank in range(world)
        for batch in windows.batches(batch_size, rank, world)
    ]
    return sorted(np.concatenate(places).tolist())


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    length=st.integers(2, 20),
    stride=st.integers(1, 19),
    sliding=st.booleans(),
    per_document=st.booleans(),
    world=st.integers(1, 3),
)
def test_every_token_counts_exactly_once(sizes, length, stride, sliding, per_document, world):
    settings = WindowSettings(min(stride, length - 1) if sliding else None, per_document)
    windows = CorpusWindows(stream(sizes), BYTES, length, settings)
    assert counted(windows, world=world) == list(range(sum(sizes)))
    assert windows.left_out == 0


def test_a_sliding_window_shows_what_came_before_and_counts_only_its_stride():
    windows = CorpusWindows(stream([20]), BYTES, 9, WindowSettings(3))
    assert windows.spans.tolist() == [[0, 0, 8], [3, 8, 11], [6, 11, 14], [9, 14, 17], [12, 17, 20]]
    batch = next(windows.batches(8))
    assert (batch.tokens[:, 0] == BYTES.bos_id).all()
    assert batch.prompt[1].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.tokens[1, 1:9].tolist() == list(range(3, 11))


def test_documents_on_their_own_never_share_a_window_and_are_padded_by_their_own_size():
    windows = CorpusWindows(stream([5, 12, 3]), BYTES, 9, WindowSettings(per_document=True))
    assert windows.spans[:, [0, 2]].tolist() == [[0, 5], [5, 13], [13, 17], [17, 20]]
    for batch in windows.batches(8):
        assert ((batch.tokens == BYTES.pad_id) == ((batch.place < 0) & ~batch.prompt)).all()
    assert windows.cut_documents() == 1
    windows = CorpusWindows(stream([5, 100, 40]), BYTES, 128, WindowSettings(per_document=True))
    shapes = {int(i): b.tokens.shape[1] for size in (1, 2, 8) for b in windows.batches(size) for i in b.index}
    assert shapes == {0: 32, 1: 128, 2: 64}


def test_a_limit_spreads_over_the_corpus_and_says_what_it_leaves_out():
    whole = CorpusWindows(stream([100]), BYTES, 11, WindowSettings())
    some = CorpusWindows(stream([100]), BYTES, 11, WindowSettings(limit=4))
    assert some.chosen.tolist() == [0, 2, 5, 7]
    assert some.left_out == 60
    assert set(counted(some)) < set(counted(whole))
    assert CorpusWindows(stream([100]), BYTES, 11, WindowSettings(limit=400)).left_out == 0


def test_prompts_of_fine_tuning_examples_are_shown_and_not_counted():
    prompt = np.array([True] * 3 + [False] * 4 + [True] * 9 + [False] * 2)
    windows = CorpusWindows(stream([7, 11], prompt), BYTES, 9, WindowSettings())
    assert counted(windows) == [3, 4, 5, 6, 16, 17]
    assert len(windows.spans) == 2, "a window of nothing but a prompt is no window"
    assert windows.left_out == 0


@pytest.mark.parametrize(
    ("settings", "length", "problem"),
    [
        ({"stride": 0}, 8, "stride=0"),
        ({"stride": 8}, 8, "at most 7"),
        ({"limit": 0}, 8, "limit=0"),
        ({"length": 1}, 1, "length=1"),
        ({"length": 99}, 99, "max_position=64"),
    ],
)
def test_settings_that_make_no_windows_are_refused(settings, length, problem):
    with pytest.raises(ConfigError, match=problem):
        WindowSettings(**settings).check(length, 64)


@pytest.mark.parametrize("tokenizer", [BYTES, train_bpe([prose(200)], 300)], ids=["bytes", "bpe"])
@given(text=st.text(max_size=40))
def test_the_bytes_of_the_tokens_add_up_to_those_of_the_text(tokenizer, text):
    ids, sizes = tokenizer.encode_sized([text])[0]
    assert ids.tolist() == tokenizer.encode(text)
    assert sizes.sum() == len(text.encode())
    assert (sizes >= 0).all()


def test_detokenisers_put_tokens_back_and_leave_placeholders():
    ptb = "mr. <unk> said it was n't `` a good day '' for the firm 's N\\/N stock -LRB- $ N -RRB- , it 's ."
    assert detokenise_ptb(ptb) == "mr. <unk> said it wasn't \"a good day\" for the firm's N/N stock ($N), it's."
    wiki = ' = Title = \n \n = = Part = = \n A guest @-@ star paid 1 @,@ 000 @.@ 5 for " Art " ( 1990 ) . \n'
    assert detokenise_wikitext(wiki) == '= Title =\n\n== Part ==\nA guest-star paid 1,000.5 for "Art" (1990).\n'
    assert respaced('He said , " done . " and left : 5 % !') == 'He said, "done." and left: 5%!'
    assert detokenise_lambada("“ no ” , she ’s gone") == '"no", she\'s gone'


def test_text_that_is_not_tokenised_is_left_as_it_is(tmp_path):
    plain = "It isn't “odd” , is it? Well, no. We've seen it, and it's fine."
    corpus = read_corpus(str(write_jsonl(tmp_path / "lambada.jsonl", [{"text": plain}])))
    assert (corpus.texts, corpus.detokeniser, corpus.split) == ((plain,), "none", None)
    spaced = write_jsonl(tmp_path / "b.jsonl", [{"text": "no , it is n't ."}])
    read = read_corpus(f"lambada={spaced}")
    assert (read.texts, read.detokeniser) == (("no, it isn't.",), "lambada")
    assert read_corpus(f"other={spaced}").detokeniser == "none"


def test_wikitext_becomes_articles_whether_it_comes_whole_or_line_by_line(tmp_path):
    lines = [" \n", " = One = \n", " Some , text . \n", " = = Part = = \n", " = Two = \n", " More , here . \n"]
    (tmp_path / "test.txt").write_text("".join(lines))
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": line} for line in ["", *lines]])
    whole, by_line = (read_corpus(f"wikitext={p}") for p in (tmp_path / "test.txt", rows))
    assert whole.texts == by_line.texts == ("= One =\nSome, text.\n== Part ==\n", "= Two =\nMore, here.\n")


def test_empty_documents_are_left_out_and_bad_rows_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": ""}\n{"text": "  "}\n{"text": "b"}\n')
    assert read_corpus(str(path)).texts == ("a", "b")
    path.write_text('{"text": "a"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        read_corpus(str(path))
    (tmp_path / "ptb.txt").write_text("one line\n\nanother\n")
    assert read_corpus(str(tmp_path / "ptb.txt")).texts == ("one line", "another")


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_corpus(f"ptb={tmp_path / 'none.txt'}")
    (tmp_path / "nothing.txt").write_text("")
    with pytest.raises(DataError, match="no text was found"):
        read_corpus(str(tmp_path / "nothing.txt"))
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"body": "a"}])
    with pytest.raises(DataError, match="body"):
        read_corpus(str(rows))
    assert read_corpus(str(rows), field="body").texts == ("a",)
    with pytest.raises(ConfigError, match="two corpora"):
        read_corpora([str(rows), f"rows={rows}"], field="body")
    assert split_name("owner/name:test") == ("name:test", "owner/name:test")


def test_packed_shards_give_the_tokens_and_bytes_of_their_text(tmp_path):
    texts = [prose(3, n) for n in range(30)]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    settings = DataConfig(validation_share=0.0)
    prepare(str(rows), "bytes", tmp_path / "shards", settings=settings, workers=1)
    with pytest.raises(DataError, match="--split"):
        read_corpus(str(tmp_path / "shards"))
    packed = tokenise(read_corpus(str(tmp_path / "shards"), split="train"), BYTES)
    text = tokenise(read_corpus(str(rows)), BYTES)
    for name in ("ids", "document", "size"):
        np.testing.assert_allclose(getattr(packed, name), getattr(text, name))
    with pytest.raises(DataError, match=r"another tokenizer \(260 ids.*300 ids"):
        tokenise(read_corpus(str(tmp_path / "shards"), split="train"), train_bpe([prose(200)], 300))


def test_of_the_standard_library_the_held_out_files_are_read_unless_others_are_asked_for(tmp_path, monkeypatch):
    for number in range(60):
        (tmp_path / f"m{number}.py").write_text(f"name = {number}\n")
    monkeypatch.setattr("dcdm.data.sources.sysconfig.get_path", lambda _: str(tmp_path))
    held, seen = ({path.read_text() for path in stdlib_files(split)} for split in ("validation", "train"))
    assert held
    assert len(held | seen) == 60
    corpora = [read_corpus("stdlib"), read_corpus("stdlib", split="train")]
    assert [set(corpus.texts) for corpus in corpora] == [held, seen]
    assert [corpus.split for corpus in corpora] == ["validation", "train"]
    assert corpora[0].fingerprint != corpora[1].fingerprint


def test_shards_of_examples_show_their_prompts(tmp_path):
    rows = [{"q": f"question {n}?", "a": f"answer {n}"} for n in range(40)]
    settings = DataConfig(prompt_field="q", response_field="a", validation_share=0.0)
    prepare(str(write_jsonl(tmp_path / "r.jsonl", rows)), "bytes", tmp_path / "s", settings=settings, workers=1)
    corpus = tokenise(read_corpus(str(tmp_path / "s"), split="train"), BYTES)
    windows = CorpusWindows(corpus, BYTES, 32, WindowSettings())
    learned = "".join(row["a"] for row in rows)
    assert len(counted(windows)) == len(learned) + len(rows)
    assert corpus.size.sum() == pytest.approx(len(learned))
    assert BYTES.decode(corpus.ids[counted(windows)]) == learned
