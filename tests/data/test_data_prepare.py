import errno
import fcntl
import json
import os
import re
import subprocess
import sys
import time
import tracemalloc
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest

from corpora import Heard, documents, gpt2_style_folder, prose, tree, write_jsonl
from dcdm.cli import main
from dcdm.config import DataConfig, DataError
from dcdm.data import prepare as preparing
from dcdm.data.chats import ExampleMaker
from dcdm.data.loader import pack
from dcdm.data.prepare import prepare, token_type
from dcdm.data.store import PreparedData
from dcdm.data.tokenizers import byte_tokenizer, train_bpe
from dcdm.files import digest, file_digest, replace_folder
from dcdm.progress import Reporter


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr("dcdm.data.prepare.UNIT_BYTES", (2000, 2000))


@pytest.fixture
def corpus(tmp_path):
    """Texts, rows and their mixture, about 30 kB."""
    write_jsonl(tmp_path / "in" / "rows.jsonl", [{"text": text} for text in documents(60)])
    (tmp_path / "in" / "prose.txt").write_text(prose(200))
    return tmp_path / "in"


def test_the_number_of_workers_does_not_change_a_byte(corpus, tmp_path, small_units):
    for workers in (1, 3):
        prepare(str(corpus), "bpe:300", tmp_path / str(workers), workers=workers)
    one = tree(tmp_path / "1")
    assert one == tree(tmp_path / "3")
    assert sum(name.startswith("train-") for name in one) > 2


def test_memory_does_not_grow_with_the_corpus_and_documents_per_second_are_shown(tmp_path, monkeypatch):
    class Watching(Reporter):
        def progress(self, task, done, total, unit, note=""):
            notes.append(note)

    monkeypatch.setattr("dcdm.data.prepare.UNIT_BYTES", (100_000, 100_000))
    monkeypatch.setattr("dcdm.data.prepare.BATCH_CHARACTERS", 50_000)
    tokenizer, notes, peaks = train_bpe([prose(400)], 310), [], []
    for size in (500, 4000):
        source = write_jsonl(tmp_path / f"{size}.jsonl", [{"text": prose(40, number)} for number in range(size)])
        tracemalloc.start()
        prepare(str(source), tokenizer, tmp_path / str(size), reporter=Watching())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0] < source.stat().st_size / 4
    assert re.fullmatch(r"[0-9,]+ documents/s, [0-9,]+ tokens/s", notes[-1])


def test_shards_hold_every_token_of_every_document_in_order(corpus, tmp_path, small_units):
    settings = DataConfig(validation_share=0)
    for tokenizer in (byte_tokenizer(), train_bpe([prose(300)], 300)):
        out = tmp_path / str(tokenizer.vocab_size)
        prepared = prepare(str(corpus), tokenizer, out, settings=settings)
        expected = pack([prose(200), *documents(60)], tokenizer, 2)[:, 1]
        stream = prepared.stream("train")
        assert np.array_equal(stream.read(0, len(stream)), expected.numpy())
        assert prepared.tokens("train") == len(stream)
        assert prepared.text_bytes("train") == len((prose(200) + "".join(documents(60))).encode())
        assert prepared.documents("train") == 61
        assert prepared.tokenizer.fingerprint == tokenizer.fingerprint == prepared.manifest["tokenizer_fingerprint"]


def test_names_counts_and_bytes_of_prepared_folders_are_those_of_format_1(corpus, tmp_path):
    """Folders prepared by earlier versions stay up to date. If this must change, so must `FORMAT`."""
    rows = [{"q": f"What is {n} and 0?", "a": f"It is {n}."} for n in range(50)]
    sums = write_jsonl(tmp_path / "sums.jsonl", rows)
    tuning = DataConfig(prompt_field="q", response_field="a")
    for prepared, fingerprint, splits in (
        (prepare(str(corpus), "bytes", tmp_path / "plain"), "0d4ff08fbcb4f997", "9a235a8d80d95d57"),
        (prepare(str(sums), "bytes", tmp_path / "tuning", settings=tuning), "d7387bbae02f6ab3", "02a14729cb747f15"),
    ):
        assert prepared.fingerprint.startswith(fingerprint)
        assert digest(prepared.manifest["splits"]).startswith(splits)


def test_large_vocabularies_take_four_bytes_and_small_ones_two(tmp_path, monkeypatch):
    assert [token_type(SimpleNamespace(vocab_size=size)) for size in (65_535, 65_536)] == ["uint16", "uint32"]
    monkeypatch.setattr("dcdm.data.prepare.token_type", lambda tokenizer: "uint32")
    (tmp_path / "a.txt").write_text("abc")
    prepared = prepare(str(tmp_path / "a.txt"), "bytes", tmp_path / "out", settings=DataConfig(validation_share=0))
    assert (tmp_path / "out" / "train-00000.bin").stat().st_size == 4 * 4
    assert prepared.stream("train").read(0, 4).tolist() == [*b"abc", 256]


def test_bpe_is_learned_from_training_text_alone_and_kept_with_the_data(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents(100)])
    write_jsonl(tmp_path / "b.jsonl", [{"text": "zqzqzqzq" * 50}])
    prepared = prepare(str(tmp_path / "a.jsonl"), "bpe:290", tmp_path / "out", validation=str(tmp_path / "b.jsonl"))
    assert prepared.tokenizer.fingerprint == train_bpe(documents(100), 290).fingerprint
    rows = [{"q": "house tree", "a": text} for text in documents(40)]
    write_jsonl(tmp_path / "c.jsonl", rows)
    settings = DataConfig(prompt_field="q", response_field="a")
    assert prepare(str(tmp_path / "c.jsonl"), "bpe:290", tmp_path / "c", settings=settings).fine_tuning


def test_a_second_preparation_finds_its_work_done_even_if_files_were_touched(corpus, tmp_path):
    prepare(str(corpus), out=tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    os.utime(corpus / "prose.txt")
    said = Heard()
    prepare(str(corpus), out=tmp_path / "out", reporter=said)
    assert "up to date" in " ".join(said.said)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}


def test_a_changed_source_tokenizer_or_setting_is_refused_with_the_reason(corpus, tmp_path):
    out = tmp_path / "out"
    prepare(str(corpus), "bytes", out)
    before = tree(out)

    def refused(reason, *arguments, **settings):
        with pytest.raises(DataError, match=reason):
            prepare(*arguments, settings=DataConfig(**settings))
        assert tree(out) == before

    refused("tokenizer was", str(corpus), str(gpt2_style_folder(tmp_path / "gpt2")), out)
    refused("tokenizer was .* is 'bpe:300'", str(corpus), "bpe:300", out)
    refused("documents was 'file' and is 'lines'", str(corpus), "bytes", out, documents="lines")
    refused("validation_share was 0.05", str(corpus), "bytes", out, validation_share=0.5)
    refused("changed: [0-9]+ .*prose.txt", str(corpus / "rows.jsonl"), "bytes", out)
    (corpus / "new.txt").write_text("x")
    refused("changed: [0-9]+ .*new.txt", str(corpus), "bytes", out)
    (corpus / "new.txt").unlink()
    text, times = (corpus / "prose.txt").read_text(), (corpus / "prose.txt").stat()
    (corpus / "prose.txt").write_text(text[:-2] + "!\n")  # as long as before, and as old
    os.utime(corpus / "prose.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    refused("changed: [0-9]+ .*prose.txt", str(corpus), "bytes", out)

    said = Heard()
    prepare(str(corpus), "bytes", out, overwrite=True, reporter=said)
    assert "changed: 1 (prose.txt)" in " ".join(said.said)
    assert tree(out) != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2", "in", "out"]


def test_without_a_folder_every_plan_has_its_own_place_in_the_cache(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))
    first = prepare(str(corpus))
    assert prepare(str(corpus)).folder == first.folder
    assert first.folder.parent == tmp_path / "cache" / "data"
    assert prepare(str(corpus), "bpe:300").folder != first.folder
    (corpus / "prose.txt").write_text("other text\n" * 50)
    assert prepare(str(corpus)).folder != first.folder
    assert PreparedData.open(first.folder, verify=True).fingerprint == first.fingerprint


def test_damage_to_any_file_of_the_result_is_found(corpus, tmp_path, small_units):
    out = tmp_path / "out"
    prepare(str(corpus), "bpe:300", out)
    for path in [p for p in out.rglob("*") if p.is_file()]:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match="prepare the data again"):
            PreparedData.open(out)
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(DataError, match="prepare the data again"):
            PreparedData.open(out, verify=True)
        path.unlink()
        with pytest.raises(DataError, match="prepare"):
            PreparedData.open(out)
        path.write_bytes(whole)
    PreparedData.open(out, verify=True)


KILLED_AT_EVERY_WRITE = """
import itertools, os, signal, sys
import dcdm.data.prepare
from dcdm.data.prepare import token_type, prepare
from dcdm.config import DataConfig
dcdm.data.prepare.UNIT_BYTES = (2000, 2000)
source, tokenizer, out, stride = sys.argv[1:]

def run(moment):
    # in a child: prepare, and die at the moment-th call that changes the disk for good
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = itertools.count(1)  # of all threads
    def deadly(real, after):
        def call(*arguments, **named):
            now = next(calls) == moment
            if now and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*arguments, **named)
            finally:
                if now:
                    os.kill(os.getpid(), signal.SIGKILL)
        return call
    for number, name in enumerate(("replace", "rename", "fsync", "unlink", "mkdir", "rmdir")):
        setattr(os, name, deadly(getattr(os, name), after=(moment + number) % 2))
    prepare(source, tokenizer, out, workers=1)
    os._exit(0)

kills, moment = 0, 1
while run(moment) == -signal.SIGKILL:  # a new preparation dies at every n-th moment in turn, then is finished
    kills += 1
    if run(-1) != 0:
        sys.exit(f"not resumed after moment {moment}")
    os.rename(out, f"{out}-{moment}")
    moment += int(stride)
os.rename(out, f"{out}-{moment}")
print(kills)
"""


@pytest.mark.parametrize(("tokenizer", "stride"), [("bytes", 2), ("bpe:290", 6)])
def test_a_preparation_killed_at_any_write_ends_with_the_same_bytes(tmp_path, small_units, tokenizer, stride):
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents(60)])
    source = tmp_path / "a.jsonl"
    expected = tree(prepare(str(source), tokenizer, tmp_path / "whole").folder)
    assert sum(name.startswith("train") for name in expected) >= 3
    results = tmp_path / "results"
    results.mkdir()
    arguments = [str(source), tokenizer, str(results / "out"), str(stride)]
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EVERY_WRITE, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    kills = int(done.stdout)
    assert kills >= 40 // stride
    ended = sorted(results.iterdir())
    assert len(ended) == kills + 1  # nothing else is left lying about
    for folder in ended:
        assert tree(folder) == expected, folder


@pytest.fixture
def interrupted(corpus, tmp_path, small_units, monkeypatch):
    """Prepares `out` with the settings given until three units are written; the result is the whole preparation."""

    def prepare_some(settings=None):
        real, done = preparing.write_unit, []

        def stopping(*arguments):
            done.append(arguments)
            if len(done) > 3:
                raise KeyboardInterrupt
            return real(*arguments)

        monkeypatch.setattr(preparing, "write_unit", stopping)
        with pytest.raises(KeyboardInterrupt):
            prepare(str(corpus), "bytes", tmp_path / "out", settings=settings)
        monkeypatch.setattr(preparing, "write_unit", real)
        assert (tmp_path / "out.partial").exists()
        return tree(prepare(str(corpus), "bytes", tmp_path / "whole").folder)

    return prepare_some


def test_work_that_another_plan_left_unfinished_is_not_taken_up(corpus, tmp_path, interrupted):
    whole, said = interrupted(DataConfig(validation_share=0.2)), Heard()
    prepare(str(corpus), "bytes", tmp_path / "out", reporter=said)
    assert "an unfinished preparation of other text or with other settings" in " ".join(said.said)
    assert tree(tmp_path / "out") == whole


def test_damaged_work_of_an_interrupted_preparation_is_done_again(corpus, tmp_path, interrupted):
    whole, said, work = interrupted(), Heard(), tmp_path / "out.partial"
    finished = [path.stem for path in (work / "units").glob("*.json")]
    shard = next(path for path in work.glob("train-*.bin") if path.stem.removeprefix("train-") in finished)
    shard.write_bytes(b"\0" * shard.stat().st_size)
    prepare(str(corpus), "bytes", tmp_path / "out", reporter=said)
    assert len(finished) < 2 or f"resuming: {len(finished) - 1} of" in " ".join(said.said)
    assert tree(tmp_path / "out") == whole


def test_ctrl_c_does_not_wait_for_the_units_at_work(corpus, tmp_path, monkeypatch):
    started, batches, real = Event(), [], ExampleMaker.encode

    def slow(maker, examples):
        batches.append(examples)
        started.set()
        time.sleep(0.005)
        return real(maker, examples)

    def interrupted(work):
        started.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(preparing, "BATCH_CHARACTERS", 100)
    monkeypatch.setattr(ExampleMaker, "encode", slow)
    monkeypatch.setattr(preparing, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(str(corpus), out=tmp_path / "out")
    assert 1 <= len(batches) < sum(path.stat().st_size for path in corpus.iterdir()) // 200


def test_two_processes_preparing_the_same_folder_wait_for_each_other(corpus, tmp_path):
    code = "from dcdm.data import prepare; prepare.UNIT_BYTES = (2000, 2000); from dcdm.cli import main; main()"
    command = [sys.executable, "-c", code, "data", "prepare", str(corpus), "--out", str(tmp_path / "out")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate(timeout=60)[1] * process.returncode for process in running] == [b"", b""]
    PreparedData.open(tmp_path / "out", verify=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_folder_is_locked_until_it_has_its_name(corpus, tmp_path, monkeypatch):
    def renamed(work, out):
        with open(work / "lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        asked.append(work)
        replace_folder(work, out)

    asked = []
    monkeypatch.setattr("dcdm.data.prepare.replace_folder", renamed)
    prepared = prepare(str(corpus), out=tmp_path / "out")
    assert asked == [tmp_path / "out.partial"]
    assert not (prepared.folder / "lock").exists()


def test_a_full_disk_is_said_clearly_and_what_was_done_is_kept(corpus, tmp_path, small_units, monkeypatch):
    whole = tree(prepare(str(corpus), "bytes", tmp_path / "whole").folder)
    real, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device; free some space"):
        prepare(str(corpus), "bytes", tmp_path / "out", workers=1)
    monkeypatch.setattr(os, "fsync", real)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("*.tmp"))
    said = Heard()
    prepare(str(corpus), "bytes", tmp_path / "out", reporter=said)
    assert "resuming" in " ".join(said.said)
    assert tree(tmp_path / "out") == whole


def test_folders_that_cannot_be_the_result_are_refused(corpus, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    (tmp_path / "empty").mkdir()
    for out, reason in (("file", "something else"), ("file/below", "cannot write"), ("full", "something else")):
        with pytest.raises(DataError, match=reason):
            prepare(str(corpus), out=tmp_path / out, overwrite=True)
    assert (tmp_path / "full" / "thesis.tex").exists()
    prepare(str(corpus), out=tmp_path / "empty")
    PreparedData.open(tmp_path / "empty")


def test_the_command_prints_the_manifest_and_explains_mistakes_without_a_trace(corpus, tmp_path, capsys):
    out = str(tmp_path / "out")
    main(["data", "prepare", str(corpus), "--tokenizer", "bpe:300", "--out", out, "--json"])
    said = capsys.readouterr()
    assert "learning bpe:300" in said.err
    shard = json.loads(said.out)["splits"]["train"]["files"][0]
    assert file_digest(f"{out}/{shard['file']}") == shard["sha256"]
    with pytest.raises(SystemExit) as stopped:
        main(["data", "prepare", str(tmp_path / "*.parquet"), "--out", str(tmp_path / "other")])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("dcdm: ")


def test_preparing_needs_no_torch(corpus, tmp_path):
    code = "import sys; from dcdm.cli import main; main(); assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code, "data", "prepare", str(corpus), "--out", str(tmp_path / "out")],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
