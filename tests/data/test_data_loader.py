import itertools
import logging
import pickle
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcdm
from corpora import documents, write_jsonl
from dcdm.config import DataConfig, DataError
from dcdm.data.loader import Loader, in_order, pack, sample_range
from dcdm.data.prepare import prepare
from dcdm.data.sources import split_by_hash
from dcdm.data.store import PreparedData, TextWindows, TokenStream, write_manifest
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.keys import Key

BYTES = byte_tokenizer()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """About 7,000 tokens in several shards."""
    folder = tmp_path_factory.mktemp("loading")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcdm.data.prepare.UNIT_BYTES", (1500, 1500))
        source = write_jsonl(folder / "a.jsonl", [{"text": text} for text in documents(60)])
        return prepare(str(source), out=folder / "out", settings=DataConfig(validation_share=0.2))


@pytest.fixture(scope="module")
def windows(prepared):
    return prepared.dataset("train", 33)


def test_windows_equal_the_literal_packing_at_every_length(prepared):
    texts = [text for text in documents(60) if split_by_hash(text.encode(), 0.2) == "train"]
    assert len(prepared.manifest["splits"]["train"]["files"]) >= 3
    for length in (2, 3, 33, 500):
        dataset = prepared.dataset("train", length)
        items = [dataset[i] for i in range(len(dataset))]
        assert torch.equal(torch.stack([item["tokens"] for item in items]), pack(texts, BYTES, length))
        assert [item["index"] for item in items] == list(range(len(dataset)))
        assert not any(item["prompt"].any() for item in items)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(2, 9))
def test_windows_cross_shard_borders_and_lose_only_the_tail(tmp_path_factory, sizes, length):
    folder = tmp_path_factory.mktemp("shards")
    tokens = np.arange(sum(sizes), dtype=np.uint16)
    paths = []
    for number, piece in enumerate(np.split(tokens, np.cumsum(sizes)[:-1])):
        if len(piece):  # a preparation writes no empty shard
            paths.append(folder / str(number))
            piece.tofile(paths[-1])
    stream = TokenStream(paths, "uint16")
    assert len(stream) == len(tokens)
    dataset = TextWindows(stream, length, bos_id=999, identity="")
    assert len(dataset) == len(tokens) // (length - 1)
    seen = [dataset[i]["tokens"].tolist() for i in range(len(dataset))]
    assert all(window[0] == 999 and len(window) == length for window in seen)
    inside = [token for window in seen for token in window[1:]]
    assert inside == tokens[: len(inside)].tolist()
    assert len(tokens) - len(inside) < length - 1


def test_windows_that_cannot_be_are_refused(prepared, windows, tmp_path):
    for split, length, reason in (
        ("train", 100_000, "fewer than one window"), ("validation", 100_000, "--validation-share"),
        ("train", 1, "length=1"), ("test", 9, "unknown split"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=reason):
            prepared.dataset(split, length)
    with pytest.raises(DataError, match="no prepared data"):
        PreparedData.open(tmp_path)
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_a_data_set_travels_to_another_process_without_its_tokens(windows):
    windows[0]
    copy = pickle.dumps(windows)
    assert len(copy) < 3000
    assert torch.equal(pickle.loads(copy)[3]["tokens"], windows[3]["tokens"])


@pytest.mark.parametrize("total", [1, 2, 3, 10, 97, 4096, 4097])
def test_each_epoch_visits_every_window_once_in_another_order(total):
    epochs = sample_range(Key(0), 0, 3 * total, total).reshape(3, total).tolist()
    assert all(sorted(epoch) == list(range(total)) for epoch in epochs)
    assert total < 10 or len({tuple(epoch) for epoch in [*epochs, range(total)]}) == 4
    assert total < 10 or sample_range(Key(1), 0, total, total).tolist() != epochs[0]


@given(st.integers(1, 12), st.integers(0, 40), st.integers(1, 30))
def test_a_stretch_of_samples_does_not_depend_on_where_it_is_cut(total, first, count):
    whole = sample_range(Key(3), 0, first + count, total)
    assert torch.equal(sample_range(Key(3), first, count, total), whole[first:])


def test_orders_that_earlier_runs_were_shuffled_by_are_still_theirs():
    assert torch.equal(sample_range(Key(3), 7, 3, 10), Key(3).fold("epoch", 0).permutation(10)[7:])


def test_training_on_ten_billion_tokens_begins_without_reading_them(tmp_path, monkeypatch):
    """1,000 shards without contents on the disk: opened, shuffled and read a window at a time."""
    shards, size = 1000, 10_000_000
    BYTES.save(tmp_path / "tokenizer")
    for number in range(shards):
        with open(tmp_path / f"train-{number:05d}.bin", "wb") as file:
            file.truncate(2 * size)
    entries = [{"file": f"train-{n:05d}.bin", "bytes": 2 * size, "sha256": "unread"} for n in range(shards)]
    split = {"documents": 1, "tokens": shards * size, "learned": 0, "bytes": 0, "files": entries}
    write_manifest(tmp_path, {
        "fingerprint": "made up", "plan": {}, "vocab_size": 260, "dtype": "uint16", "fine_tuning": False,
        "splits": {"train": split, "validation": {**split, "files": []}}, "tokenizer_files": [],
    })  # fmt: skip
    hashed = []
    monkeypatch.setattr("dcdm.data.store.file_digest", lambda path: hashed.append(path) or "unread")
    tracemalloc.start()
    prepared = PreparedData.open(tmp_path)
    prepared.check_at_start()
    dataset = prepared.dataset("train", 1024)
    batch = next(iter(Loader(dataset, seed=0, global_batch=8)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(dataset) == 10_000_000_000 // 1023
    assert batch["tokens"].shape == (8, 1024)
    assert batch["index"].max() > 1_000_000
    assert 1 <= len(hashed) <= 9  # the shards of eight windows, one of which may cross a border
    assert peak < 8 << 20


def test_a_flipped_bit_in_large_data_is_found_when_its_shard_is_read(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("dcdm.data.store.MOST_AT_START", 0)
    copy = Path(shutil.copytree(prepared.folder, tmp_path / "copy"))
    shard = copy / prepared.manifest["splits"]["train"]["files"][-1]["file"]
    flipped = bytearray(shard.read_bytes())
    flipped[5] ^= 1
    shard.write_bytes(flipped)
    data = PreparedData.open(copy)
    data.check_at_start()
    dataset = data.dataset("train", 33)
    assert torch.equal(dataset[0]["tokens"], prepared.dataset("train", 33)[0]["tokens"])
    with pytest.raises(DataError, match="does not match its checksum"):
        dataset[len(dataset) - 1]


def take(source, count):
    """The first `count` batches, in plain values."""
    return [
        {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in batch.items()}
        for batch in itertools.islice(source, count)
    ]


def joined(batches):
    """Batches of several ranks or micro-batches as one, by row."""
    rows = {}
    for batch in batches:
        for at, row in enumerate(batch["rows"]):
            rows[row] = (batch["index"][at], batch["tokens"][at], batch["prompt"][at])
    return [rows[row] for row in sorted(rows)]


@pytest.fixture(scope="module")
def reference(windows):
    """Sixty global batches of 8, more than two epochs."""
    steps = [joined([batch]) for batch in take(Loader(windows, seed=5, global_batch=8), 60)]
    assert 2 * len(windows) < 60 * 8
    return steps


def test_a_batch_is_what_training_takes(windows):
    batch = next(iter(Loader(windows, seed=5, global_batch=8, rank=1, world=2, micro_batch=3)))
    made = dcdm.Batch(**batch)
    assert made.tokens.shape == made.prompt.shape == (3, 33)
    assert made.rows.tolist() == [4, 5, 6]
    assert made.num_rows == 8
    assert torch.equal(made.tokens[1], windows[int(made.index[1])]["tokens"])
    assert made.index.tolist() == sample_range(Key(5), 0, 8, len(windows))[4:7].tolist()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [None, 1, 2])
def test_ranks_and_micro_batches_make_up_the_same_global_batches(windows, reference, world, micro_batch):
    loaders = [
        Loader(windows, seed=5, global_batch=8, rank=rank, world=world, micro_batch=micro_batch)
        for rank in range(world)
    ]
    per_step = loaders[0].micro_steps
    taken = [take(one, per_step * 20) for one in loaders]
    for step in range(20):
        parts = [batch for one in taken for batch in one[step * per_step : (step + 1) * per_step]]
        assert joined(parts) == reference[step]


def test_a_saved_position_is_restored_exactly_with_any_number_of_ranks_and_workers(windows, reference):
    state, at, before = None, 0, torch.random.get_rng_state()
    for world, workers in ((1, 0), (2, 0), (1, 2), (1, 2), (4, 0)):
        ranks = [
            Loader(windows, seed=5, global_batch=8, rank=rank, world=world, num_workers=workers)
            for rank in range(world)
        ]
        for one in ranks:
            if state is not None:
                one.load_state_dict(state)
        running = [iter(one) for one in ranks]
        for step in range(5):
            assert joined(batch for one in running for batch in take(one, 1)) == reference[at + step]
        states = [one.state_dict() for one in ranks]
        assert all(other == states[0] for other in states)
        state, at = states[0], at + 5
        next(running[0])  # what is handed out after it was saved does not count
    assert torch.equal(before, torch.random.get_rng_state())  # nothing is drawn from the global generator


def test_a_step_counts_once_all_its_micro_batches_are_handed_out(windows):
    source = Loader(windows, seed=5, global_batch=8, micro_batch=3)
    running = iter(source)
    seen = []
    for _ in range(6):
        next(running)
        seen.append(source.state_dict()["samples"])
    assert seen == [0, 0, 8, 8, 8, 16]


def test_a_position_of_other_data_or_another_seed_and_wrong_batch_sizes_are_refused(prepared, windows):
    state = Loader(windows, seed=5, global_batch=8).state_dict()
    with pytest.raises(DataError, match="seed 5, this loader has 6"):
        Loader(windows, seed=6, global_batch=8).load_state_dict(state)
    with pytest.raises(DataError, match="same data"):
        Loader(prepared.dataset("train", 17), seed=5, global_batch=8).load_state_dict(state)
    for change, name in (
        ({"global_batch": 9, "world": 2}, "global_batch"), ({"global_batch": 0}, "global_batch"),
        ({"global_batch": 8, "micro_batch": 9}, "micro_batch"), ({"global_batch": 8, "rank": 1}, "rank"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=name):
            Loader(windows, seed=0, **change)


def test_evaluation_sees_every_window_once_whatever_the_number_of_ranks(windows):
    whole = [i for batch in in_order(windows, 7) for i in batch["index"].tolist()]
    assert whole == list(range(len(windows)))
    parts = [i for rank in range(3) for b in in_order(windows, 4, rank=rank, world=3) for i in b["index"].tolist()]
    assert sorted(parts) == whole
    first = list(in_order(windows, 4, limit=6))
    assert [len(batch["tokens"]) for batch in first] == [4, 2]
    assert dcdm.Batch(**first[0]).tokens.shape == (4, 33)


@pytest.fixture(scope="module")
def tuning(tmp_path_factory):
    """Examples whose prompt, with its line break, and response, with its EOS, have the sizes below."""
    folder = tmp_path_factory.mktemp("tuning")
    rows = [{"question": "q" * (p - 1), "answer": "a" * (r - 1)} for p, r in SIZES]
    source = write_jsonl(folder / "a.jsonl", rows)
    chosen = DataConfig(prompt_field="question", response_field="answer", validation_share=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcdm.data.prepare.UNIT_BYTES", (60, 60))
        return prepare(str(source), out=folder / "out", settings=chosen)


SIZES = [(3, 4), (5, 10), (2, 13), (14, 2), (20, 3), (15, 9), (4, 2)]


def test_an_example_fills_one_window_and_only_its_response_is_learned(tuning):
    dataset = tuning.dataset("train", 32)
    item = dataset[0]
    assert item["tokens"].tolist() == [257, *b"qq\n", *b"aaa", 256] + [258] * 24
    assert item["prompt"].tolist() == [True] * 4 + [False] * 28
    assert len(dataset) == len(SIZES)
    assert tuning.documents("train") == len(SIZES)
    assert tuning.text_bytes("train") == sum(r - 1 for _, r in SIZES)
    assert tuning.manifest["splits"]["train"]["learned"] == sum(r for _, r in SIZES)
    batch = dcdm.Batch(**next(iter(Loader(dataset, seed=0, global_batch=4))))
    model = dcdm.build(dcdm.preset("mdlm-debug"), seed=0)
    result = dcdm.loss(model, batch, 0, dcdm.ObjectiveConfig(prompt_share=0.0))
    assert int(result.tokens) == sum(SIZES[i][1] for i in batch.index.tolist())


def test_examples_longer_than_the_window_are_cut_or_dropped_and_never_silently(tuning, caplog):
    with caplog.at_level(logging.WARNING):
        cut = tuning.dataset("train", 16)
    assert "of 7 examples, 1 are cut and 2 left out" in caplog.text
    assert (cut.truncated, cut.dropped, len(cut)) == (1, 2, 5)
    assert cut[3]["tokens"].tolist() == [257, *b"q" * 13, 10, *b"a"]
    assert cut[1]["tokens"].tolist()[-1] == 256
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        dropped = tuning.dataset("train", 16, overlong="drop")
    assert "0 are cut and 3 left out" in caplog.text
    assert [int(dropped[i]["prompt"].sum()) - 1 for i in range(len(dropped))] == [3, 5, 2, 4]
    with pytest.raises(DataError, match="no example for a window"):
        tuning.dataset("train", 3)
    with pytest.raises(DataError, match="overlong"):
        tuning.dataset("train", 16, overlong="wrap")
