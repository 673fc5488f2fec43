import gzip
import json
import lzma
import os
import socket
import time
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpora import Heard, documents, prose, write_jsonl
from dcdm.config import ConfigError, DataConfig, DataError
from dcdm.data.chats import ExampleMaker
from dcdm.data.loader import pack
from dcdm.data.prepare import prepare
from dcdm.data.sources import (
    PART_BYTES,
    STDLIB_SHARE,
    cut_into_parts,
    examine,
    hub_answers,
    read_texts,
    resolve,
    split_by_hash,
    stdlib_documents,
    stdlib_files,
)
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from dcdm.evaluation.corpora import read_corpus
from dcdm.files import canonical
from dcdm.training import settings as run_settings

BYTES = byte_tokenizer()
ALL = DataConfig(validation_share=0)


def texts_of(spec, settings=ALL, part_bytes=PART_BYTES):
    """The documents of a source as workers read them, in order, whole."""
    files = examine(resolve(str(spec), settings))
    whole, open_text = [], ""
    for part in cut_into_parts(files, settings, part_bytes, cut_documents=True):
        for text, ends in read_texts(part, settings):
            open_text += text
            if ends:
                whole.append(open_text)
                open_text = ""
    assert not open_text
    return whole


def stored(prepared, split="train"):
    """The documents of a prepared split, from its tokens."""
    stream = prepared.stream(split)
    tokens = stream.read(0, len(stream)).tolist()
    parts, start = [], 0
    for at, token in enumerate(tokens):
        if token == prepared.tokenizer.eos_id:
            parts.append(prepared.tokenizer.decode(tokens[start:at]))
            start = at + 1
    assert start == len(tokens)
    return parts


def test_every_kind_of_file_gives_the_same_documents(tmp_path):
    texts = documents(60)
    rows = [{"text": text, "n": n} for n, text in enumerate(texts)]
    jsonl = write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl.read_bytes(), mtime=0))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet", "file.arrow", "stream.arrow"):
        for part_bytes in (PART_BYTES, 300):
            assert texts_of(tmp_path / name, part_bytes=part_bytes) == texts, name


def test_a_text_file_is_one_document_or_its_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\n\n \n\nthree\nfour\n\n".encode())
    for kind, expected in (
        ("file", ["one\r\ntwo\n\n \n\nthree\nfour\n\n"]),
        ("lines", ["one", "two", "three", "four"]),
    ):
        assert texts_of(tmp_path / "a.txt", DataConfig(documents=kind, validation_share=0)) == expected


@given(
    st.lists(st.sampled_from(["one", " two", "\n", ".", " ", "\r\n", "東", "\n\n"]), max_size=60),
    st.integers(1, 30),
)
def test_how_a_file_is_cut_into_parts_never_changes_its_documents(tmp_path_factory, parts, part_bytes):
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes("".join(parts).encode())
    for kind in ("file", "lines"):
        settings = DataConfig(documents=kind, validation_share=0)
        assert texts_of(path, settings, part_bytes) == texts_of(path, settings)


def test_the_standard_library_splits_by_file_in_a_fixed_order_with_or_without_tests_and_tables():
    tests, tables = {"test", "tests", "idle_test"}, {"encodings", "pydoc_data"}
    train, held = stdlib_files("train"), stdlib_files("validation")
    assert len(train) > 5 * len(held) > 0
    assert not set(train) & set(held)
    assert train == sorted(train)
    assert len(next(stdlib_documents("train"))) > 0
    for split, whole in (("train", train), ("validation", held)):
        code = stdlib_files(split, "stdlib-code")
        assert {path for path in whole if not tables & {*path.parts}} <= {*code}
        assert all(tests & {*path.parts} for path in {*code} - {*whole})
        shared = DataConfig(validation_share=STDLIB_SHARE)
        assert [file.path for file in resolve("stdlib-code", shared) if file.split == split] == code


def test_the_addresses_are_the_lines_of_their_unpacked_file_whatever_documents_says(tmp_path, monkeypatch):
    lines = [f"{number}. {prose(3, number)}".replace("\n", " ").strip() for number in range(200)]
    (tmp_path / "addresses.txt").write_bytes("\ufeff{}\r\n\n \n".format("\n".join(lines)).encode())
    (tmp_path / "addresses.txt.xz").write_bytes(lzma.compress((tmp_path / "addresses.txt").read_bytes()))
    monkeypatch.setattr("dcdm.data.sources.HOME", tmp_path)
    by_lines = DataConfig(documents="lines")
    unpacked = prepare(str(tmp_path / "addresses.txt"), out=tmp_path / "plain", settings=by_lines)
    for number, settings in enumerate([None, by_lines]):
        packed = prepare("addresses", out=tmp_path / f"packed{number}", settings=settings)
        for split in ("train", "validation"):
            assert stored(packed, split) == stored(unpacked, split) != []
            held = read_corpus("addresses", split=split)
            assert (list(held.texts), held.split) == (stored(unpacked, split), split)


def test_of_the_233_shipped_addresses_one_in_twenty_or_so_is_held_out():
    held, seen = (read_corpus("addresses", split=split).texts for split in ("validation", "train"))
    assert (len(held), len(seen)) == (12, 221)
    assert all(len(text) > 1_000 for text in (*held, *seen))


def test_packed_text_that_is_damaged_or_not_utf8_is_named(tmp_path):
    path = tmp_path / "a.txt.xz"
    path.write_bytes(lzma.compress(b"one\n\xff\ntwo\n"))
    with pytest.raises(DataError, match=r"a\.txt\.xz:2: not UTF-8"):
        texts_of(path)
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"cannot read .*a\.txt\.xz"):
        texts_of(path)
    with pytest.raises(DataError, match="plain text"):
        resolve(str(path), DataConfig(messages_field="m"))


def test_documents_are_split_by_their_contents_so_that_duplicates_stay_together(tmp_path):
    texts = documents(400)
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in [*texts, *reversed(texts)]])
    prepared = prepare(str(tmp_path / "a.jsonl"), out=tmp_path / "out", settings=DataConfig(validation_share=0.1))
    train, held = stored(prepared), stored(prepared, "validation")
    assert not set(train) & set(held)
    assert sorted(train + held) == sorted(texts * 2)
    assert 0.05 < len(held) / 800 < 0.16
    assert held == [
        text for text in [*texts, *reversed(texts)] if split_by_hash(text.encode(), 0.1) == "validation"
    ]


def test_of_few_text_files_each_gives_its_last_lines_to_validation_and_of_many_some_are_held_out_whole(tmp_path):
    text = prose(300)
    (tmp_path / "a.txt").write_text(text)
    prepared = prepare(str(tmp_path / "a.txt"), out=tmp_path / "few")
    (train,), (held,) = stored(prepared), stored(prepared, "validation")
    assert train + held == text
    assert train.endswith("\n")
    assert 0.03 < len(held.encode()) / len(text.encode()) <= 0.05
    (tmp_path / "many").mkdir()
    for number, text in enumerate(documents(200)):
        (tmp_path / "many" / f"{number}.txt").write_text(text)
    prepared = prepare(str(tmp_path / "many"), out=tmp_path / "out")
    assert sorted(stored(prepared) + stored(prepared, "validation")) == sorted(documents(200))
    assert 2 <= prepared.documents("validation") <= 25


def test_a_validation_source_is_taken_whole_and_its_files_and_copies_are_left_out_of_training(tmp_path):
    folder, heard = tmp_path / "corpus", Heard()
    (folder / "sub").mkdir(parents=True)
    for name, text in (("a.txt", "text of a"), ("valid.txt", "held out"), ("sub/copy.txt", "held out")):
        (folder / name).write_text(text)
    for name in ("empty.txt", "sub/empty.txt"):
        (folder / name).touch()
    (folder / "link.txt").symlink_to(folder / "valid.txt")
    held = [str(folder / "valid.txt"), str(folder / "empty.txt")]
    prepared = prepare(str(folder), out=tmp_path / "out", validation=held, reporter=heard)
    assert (stored(prepared), stored(prepared, "validation")) == (["text of a"], ["held out"])
    assert any("holds too: 3 (link.txt; sub/copy.txt; valid.txt)" in said for said in heard.said)
    apart = prepare(str(folder / "a.txt"), out=tmp_path / "apart", validation=held[0])
    assert [entry["split"] for entry in apart.manifest["plan"]["source"]] == ["train", "validation"]
    with pytest.raises(DataError, match=r"none is left to train on; name other files for validation"):
        prepare(held[0], out=tmp_path / "none", validation=str(folder))


def test_data_sets_saved_by_datasets_are_read_split_by_split(tmp_path):
    splits = {name: [f"{name} {i}" for i in range(5)] for name in ("train", "test")}
    both = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": t}) for name, t in splits.items()})
    both.save_to_disk(tmp_path / "both")
    datasets.load_from_disk(tmp_path / "both")["test"].map(lambda row: {"text": row["text"] * 2})  # leaves a cache
    for name, texts in splits.items():
        assert texts_of(tmp_path / "both" / name) == texts
    with pytest.raises(DataError, match=r"several splits; name one: .*both/test, .*both/train"):
        texts_of(tmp_path / "both")


def test_a_hub_name_is_loaded_through_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_jsonl(tmp_path / "set" / "train.jsonl", [{"text": f"row {i}"} for i in range(5)])
    write_jsonl(tmp_path / "set" / "test.jsonl", [{"text": "other"}])
    assert texts_of(f"hf:{tmp_path}/set") == [f"row {i}" for i in range(5)]
    assert texts_of(f"hf:{tmp_path}/set:test") == ["other"]

    local = datasets.load_dataset
    asked = []

    def load(*names, split, revision):
        asked.append((*names, split, *([revision] if revision else [])))
        return local(str(tmp_path / "set"), split=split)

    monkeypatch.setattr(datasets, "load_dataset", load)
    for name in ("name", "org/name:test", "org/name/config", "openwebtext"):
        assert texts_of(name)
    copy = ("Skylion007/openwebtext", "train", "79d93d786212f7344586290adb811d4ae6a1762c")
    assert asked == [("name", "train"), ("org/name", "test"), ("org/name", "config", "train"), copy]


def test_without_a_network_a_misspelt_name_fails_at_once_with_what_may_be_meant(tmp_path, monkeypatch):
    from huggingface_hub import constants

    def unknown(*_args, **_named):
        raise socket.gaierror(-2, "Name or service not known")

    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    waited: list[float] = []
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(time, "sleep", waited.append)
    for place in (constants, datasets.config):
        monkeypatch.setattr(place, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpora").mkdir()
    hub_answers.cache_clear()
    try:
        for spec, meant in (("stdlb", "stdlib"), ("corpra", "corpora")):
            with pytest.raises(DataError, match=f"cannot be reached; did you mean {meant}"):
                resolve(spec, ALL)
        with pytest.raises(DataError, match="the hub cannot be reached"):
            load_tokenizer("byts")
    finally:
        hub_answers.cache_clear()
    assert waited == [], "a library tried again"


CHAT = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"}, {"role": "user", "content": "+1?"},
    {"role": "assistant", "content": "3"}, {"role": "user", "content": "thanks"},
]  # fmt: skip
OPENING = "System:\nBe brief.\n\nUser:\n1+1?\n\nAssistant:\n"


def test_prompts_and_responses_become_examples_and_of_a_chat_its_last_answer_is_learned_or_each():
    maker = ExampleMaker(DataConfig(prompt_field="q", response_field="a"), BYTES)
    _, pair = maker.examples_of({"q": "1+1?", "a": "2", "extra": None})
    ((prompt, response),) = maker.encode(pair)
    assert bytes(prompt.tolist()) == b"1+1?\n"
    assert response.tolist() == [ord("2"), BYTES.eos_id]

    def examples(turns):
        return ExampleMaker(DataConfig(messages_field="m", turns=turns), BYTES).examples_of({"m": CHAT})[1]

    (last,) = examples("last")
    assert (last.prompt, last.response) == (OPENING + "2\n\nUser:\n+1?\n\nAssistant:\n", "3")
    first, second = examples("each")
    assert (first.prompt, first.response) == (OPENING, "2")
    assert second == last


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer(template=TEMPLATE):
    base = train_bpe([prose(400)], 310)
    backend = base.backend
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer.over(backend, "<|im_end|>", template)


def test_a_chat_follows_the_tokenizers_template_and_ends_with_eos_once():
    tokenizer = chat_tokenizer()
    start, mask = (tokenizer.backend.token_to_id(t) for t in ("<|im_start|>", "<|mask_1|>"))
    maker = ExampleMaker(DataConfig(messages_field="m"), tokenizer)
    chat = [{"role": "user", "content": "say <|mask_1|>"}, {"role": "assistant", "content": "the tree"}]
    _, examples = maker.examples_of({"m": chat})
    ((prompt, response),) = maker.encode(examples)
    assert prompt.tolist().count(start) == 2
    assert mask is not None
    assert max(prompt.tolist()) < tokenizer.bos_id
    assert tokenizer.decode(prompt) == "user\nsay <|mask_1|>\nassistant\n"
    assert response.tolist() == [*tokenizer.encode("the tree"), tokenizer.eos_id]
    assert tokenizer.vocab_size == tokenizer.backend.get_vocab_size()


def test_chats_with_one_prompt_are_in_one_split_and_their_bytes_are_those_of_the_answers(tmp_path):
    rows = [
        [*CHAT[:1], {"role": "user", "content": f"prompt {n}"}, {"role": "assistant", "content": answer}, *more]
        for n in range(40)
        for answer, more in (("the tree", []), ("über", []), ("the tree", CHAT[3:5]))
    ]
    path, chosen = tmp_path / "a.jsonl", DataConfig(messages_field="m", validation_share=0.3)
    write_jsonl(path, [{"m": row} for row in rows])
    prepared = prepare(str(path), chat_tokenizer(), tmp_path / "out", settings=chosen, workers=1)
    prompts = [
        {text.split("prompt ")[1].split("\n")[0] for text in stored(prepared, split) if "prompt " in text}
        for split in ("train", "validation")
    ]
    assert all(prompts)
    assert not prompts[0] & prompts[1]
    assert [prepared.documents(split) for split in ("train", "validation")] == [3 * len(names) for names in prompts]
    assert sum(map(prepared.text_bytes, ("train", "validation"))) == 40 * sum(
        len(text.encode()) for text in ("the tree", "über", CHAT[4]["content"])
    )
    assert "chat_format" in chosen.identity(True)
    assert "chat_format" not in DataConfig(prompt_field="q", response_field="a").identity(True)


def test_a_template_that_hides_where_the_response_begins_is_refused():
    maker = ExampleMaker(DataConfig(messages_field="m"), chat_tokenizer("{{ messages | length }}"))
    with pytest.raises(DataError, match="told apart"):
        maker.examples_of({"m": CHAT})


@pytest.mark.parametrize(("line", "reason"), [
    (b'{"text": ', "JSON"), (b'{"text": "\xff"}', "utf-8"), (b"[1]", r"\[1\]"), (b'{"text": null}', "null"),
    (b'{"other": 1}', "other"), (b'{"text": "\\ud800"}', "surrogate"),
])  # fmt: skip
def test_an_unreadable_line_is_named_by_file_and_line_and_ends_the_preparation(line, reason, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    for part_bytes in (PART_BYTES, 10):
        with pytest.raises(DataError, match=rf"a\.jsonl:3: .*{reason}.*leave it out"):
            texts_of(tmp_path / "a.jsonl", ALL, part_bytes)
    with pytest.raises(DataError, match=r"a\.jsonl:3: "):
        prepare(str(tmp_path / "a.jsonl"), out=tmp_path / "out")


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntw\xffo\nthree\n")
    with pytest.raises(DataError, match=r"a\.txt:2: not UTF-8"):
        texts_of(tmp_path / "a.txt")


def test_bad_rows_of_fine_tuning_data_are_named(tmp_path):
    pairs = [{"q": "a", "a": "b"}, {"q": 1, "a": "b"}, {"q": "a", "a": ""}, {"q": "only"}]
    chats = [{"m": CHAT}, {"m": "text"}, {"m": [{"role": "user"}]}, {"m": CHAT[:2]}]
    for rows, fields in ((pairs, {"prompt_field": "q", "response_field": "a"}), (chats, {"messages_field": "m"})):
        for bad in rows[1:]:
            path = write_jsonl(tmp_path / "a.jsonl", [rows[0], bad])
            with pytest.raises(DataError, match=r"a\.jsonl:2: "):
                prepare(str(path), out=tmp_path / "out", settings=DataConfig(**fields, validation_share=0))


def test_wrong_sources_are_refused_with_the_reason(tmp_path):
    def write(name: str, data: bytes) -> str:
        (tmp_path / name).write_bytes(data)
        return str(tmp_path / name)

    (tmp_path / "nothing").mkdir()
    row = json.dumps({"question": "q", "answer": "a"}).encode()
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "t.parquet")
    cases = [
        (str(tmp_path / "missing.txt"), {}, "no such file"),
        ("missing.jsonl", {}, "no such file"),
        (str(tmp_path / "*.txt"), {}, "no file matches"),
        (str(tmp_path / "nothing"), {}, "holds no file"),
        (write("a.md", b"x"), {}, r"\.jsonl\.gz"),
        (write("empty.jsonl", b""), {}, "no text was found"),
        (write("blank.jsonl", b"\n\n"), {}, "no text was found"),
        (write("a.jsonl", row), {}, "no field 'text'; fields there: question, answer"),
        (str(tmp_path / "t.parquet"), {}, "fields there: body"),
        (write("b.jsonl", row), {"prompt_field": "question", "response_field": "x"}, "no field 'x'"),
        (write("a.csv", b"x"), {"prompt_field": "q", "response_field": "a"}, "unknown kind"),
        ("stdlib", {"messages_field": "m"}, "plain text"),
        (write("broken.parquet", b"PAR1 no"), {}, "cannot read"),
        (write("broken.arrow", b"ARROW1 no"), {}, "cannot read"),
        (write("broken.jsonl.gz", b"\x1f\x8b no"), {}, "cannot read"),
        (write("cut.jsonl.gz", gzip.compress(b'{"text": "abc"}\n' * 999, mtime=0)[:-20]), {}, "cannot read"),
        ("no-such-name-anywhere", {}, "datasets cannot load it|cannot be reached"),
    ]
    for number, (spec, settings, reason) in enumerate(cases):
        with pytest.raises(DataError, match=reason):
            prepare(spec, out=tmp_path / f"out{number}", settings=DataConfig(**settings))
        assert not (tmp_path / f"out{number}").exists()
    assert not list(tmp_path.glob("out*"))
    with pytest.raises(DataError, match="no source"):
        prepare([], out=tmp_path / "out")


def test_wrong_settings_are_refused_by_name():
    for change in (
        {"documents": "pages"}, {"turns": "first"}, {"validation_share": 1.0},
        {"prompt_field": "p"}, {"messages_field": "m", "prompt_field": "p", "response_field": "r"},
    ):  # fmt: skip
        with pytest.raises(DataError, match=next(iter(change))):
            DataConfig(**change)


def test_retired_settings_of_earlier_runs_are_left_out_where_they_said_nothing_and_else_refused():
    values = run_settings.to_dict(run_settings.resolve("dcdm-debug"))
    values["data"]["reading"]["max_line_bytes"] = 64 << 20
    assert run_settings.from_dict(values) == run_settings.resolve("dcdm-debug")
    values["data"]["reading"]["max_line_bytes"] = 1000
    with pytest.raises(ConfigError, match=r"unknown setting data\.reading\.max_line_bytes"):
        run_settings.from_dict(values)


def test_a_source_that_changes_while_it_is_read_is_noticed(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}])
    files = examine(resolve(str(path), ALL))
    (part,) = cut_into_parts(files, ALL)
    path.write_text(json.dumps({"text": "abcdef"}))
    with pytest.raises(DataError, match="changed while"):
        list(read_texts(part, ALL))
    Path(path).unlink()
    with pytest.raises(DataError, match="cannot read"):
        list(read_texts(part, ALL))


def test_packing_in_memory_drops_nothing_but_the_tail_and_starts_every_window_with_bos():
    windows = pack(["abcde", "fg", "hi"], BYTES, 5)
    assert windows.tolist() == [[257, *b"abcd"], [257, *b"e", 256, *b"fg"], [257, 256, *b"hi", 256]]
    with pytest.raises(DataError, match="fewer than one window"):
        pack(["ab"], BYTES, 9)


@pytest.fixture
def folder(tmp_path):
    """Three texts, an empty one, files of other kinds and hidden ones."""
    names = "a.txt sub/b.txt private/c.txt notes.md table.csv sub/more.md README .git/d.txt sub/.e.txt"
    for name in names.split():
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "corpus" / "sub" / "empty.txt").touch()
    return tmp_path / "corpus"


def test_folders_and_patterns_give_their_files_by_name_and_what_is_skipped_is_said(folder, tmp_path):
    heard = Heard()
    prepared = prepare(str(folder), out=tmp_path / "out", settings=ALL, reporter=heard)
    assert stored(prepared) == ["a.txt", "private/c.txt", "sub/b.txt"] == texts_of(folder / "**" / "*.txt")
    assert "skipping files of other kinds: 4 (README; notes.md; sub/more.md; table.csv)" in heard.said
    assert "skipping empty files: 1 (sub/empty.txt)" in heard.said
    assert [file.name for file in resolve(str(folder / "sub" / "*.txt"), ALL)] == ["b.txt", "empty.txt"]


def test_a_folder_that_cannot_be_read_is_refused_by_preparation_and_evaluation(folder, monkeypatch):
    real = os.scandir

    def scandir(path="."):  # root may read everything
        if os.path.basename(str(path)) == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for reading in (prepare, read_corpus):
        with pytest.raises(DataError, match="corpus/private: Permission denied; make it readable"):
            reading(str(folder))


def test_files_whose_names_are_not_utf8_are_prepared_or_named(tmp_path):
    names = [os.fsdecode(name) for name in (b"caf\xe9.txt", b"\xff.jsonl")]
    (tmp_path / "in").mkdir()
    for name in names:
        (tmp_path / "in" / name).write_text('{"text": "one"}\n' * 9)
    prepared = prepare(str(tmp_path / "in"), out=tmp_path / "out", settings=ALL)
    assert {entry["name"] for entry in prepared.manifest["plan"]["source"]} == set(names)
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").rename(tmp_path / "in" / os.fsdecode(b"\xe9.parquet"))
    with pytest.raises(DataError, match=r"\udce9\.parquet: pyarrow opens paths in UTF-8 only; rename it"):
        prepare(str(tmp_path / "in"), out=tmp_path / "more")
    assert canonical({"name": "über.txt"}) == '{"name":"über.txt"}'.encode()
