"""Text to shards at several sizes: documents per second, and memory that does not grow with the corpus.

    python benchmarks/preparing.py [--gigabytes 0.1 1 4] [--tokenizer bpe:16000]

Documents are stretches of the addresses that come with dcdm, of random lengths with OpenWebText's mean; the
tokenizer is learned from the addresses. Each size is prepared in a process of its own, whose peak memory is read,
from a `.jsonl` file in a temporary folder that needs twice the room. From the largest, the time for all of
OpenWebText is extrapolated. Then a run's start on ten billion tokens, in a made-up folder of empty shards. Prints a
table, and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dcdm.config import DataConfig
from dcdm.data.prepare import prepare
from dcdm.data.sources import cut_into_parts, examine, read_texts, resolve
from dcdm.data.store import MANIFEST, PreparedData, write_manifest
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer, load_tokenizer
from dcdm.files import digest, file_digest

DOCUMENTS, BYTES = 8_013_769, 38e9
"""Of OpenWebText."""
MEAN = BYTES / DOCUMENTS
TOKENS = 10_000_000_000
SHARDS = 1000


def addresses() -> list[str]:
    settings = DataConfig(validation_share=0)
    parts = cut_into_parts(examine(resolve("addresses", settings)), settings)
    return [text for part in parts for text, _ in read_texts(part, settings)]


def make_corpus(path: Path, size: int) -> None:
    """Rows whose texts begin anywhere in the addresses and have OpenWebText's mean length."""
    text, draws, written = " ".join(addresses()), random.Random(0), 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            length = round(draws.lognormvariate(0, 1) * MEAN / math.sqrt(math.e))
            start = draws.randrange(len(text) - length)
            written += file.write(json.dumps({"text": text[start : start + length]}, ensure_ascii=False) + "\n")


def measure_one(corpus: str, tokenizer: str, out: str) -> None:
    """Prepare a corpus in this process, and print what it took."""
    started = time.perf_counter()
    prepared = prepare(corpus, Tokenizer.load(tokenizer), out, settings=DataConfig(validation_share=0.005))
    print(json.dumps({
        "seconds": time.perf_counter() - started,
        "processor_seconds": time.process_time(),
        "documents": prepared.documents("train") + prepared.documents("validation"),
        "tokens": prepared.tokens("train") + prepared.tokens("validation"),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }))  # fmt: skip


def measured(folder: Path, gigabytes: float, tokenizer: Path) -> dict[str, Any]:
    corpus = folder / "corpus.jsonl"
    make_corpus(corpus, int(gigabytes * 1e9))
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, __file__, "--one", str(corpus), str(tokenizer), str(folder / "out")]
    said = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    row = {"gigabytes": gigabytes, **json.loads(said)}
    row["documents_per_second"] = row["documents"] / row["seconds"]
    row["megabytes_per_second"] = corpus.stat().st_size / 1e6 / row["seconds"]
    corpus.unlink()
    subprocess.run(["rm", "-r", str(folder / "out")], check=True)
    return row


def made_up(folder: Path) -> Path:
    """A prepared folder of ten billion zeros that take no room on the disk."""
    tokenizer = byte_tokenizer()
    tokenizer.save(folder / "tokenizer")
    size = TOKENS // SHARDS * 2
    for number in range(SHARDS):
        with open(folder / f"train-{number:05d}.bin", "wb") as file:
            file.truncate(size)
    sha256 = file_digest(folder / "train-00000.bin")
    shards = [{"file": f"train-{n:05d}.bin", "bytes": size, "sha256": sha256} for n in range(SHARDS)]
    counts = {"documents": 1, "tokens": TOKENS, "learned": TOKENS, "bytes": TOKENS}
    kept = [
        {"file": f"tokenizer/{path.name}", "bytes": path.stat().st_size, "sha256": file_digest(path)}
        for path in (folder / "tokenizer").iterdir()
    ]
    write_manifest(folder, {
        "fingerprint": digest("made up"), "plan": {}, "vocab_size": 260, "dtype": "uint16", "fine_tuning": False,
        "splits": {"train": {**counts, "files": shards}, "validation": {**dict.fromkeys(counts, 0), "files": []}},
        "tokenizer_files": kept,
    })  # fmt: skip
    return folder / MANIFEST


def start_seconds(folder: Path, length: int = 1024, batch: int = 64) -> dict[str, float]:
    """Until the first global batch is there, and for each one after it."""
    from dcdm.data.loader import Loader

    made_up(folder)
    started = time.perf_counter()
    prepared = PreparedData.open(folder)
    prepared.check_at_start()
    batches = iter(Loader(prepared.dataset("train", length), seed=0, global_batch=batch))
    opened = time.perf_counter() - started
    next(batches)
    return {"opened": opened, "first_batch": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="*", default=[0.1, 1, 4])
    parser.add_argument("--tokenizer", default="bpe:16000")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        measure_one(*asked.one)
        return
    from dcdm.viewing.tables import Table  # not above: it needs PyTorch, and a preparation does not

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load_tokenizer(asked.tokenizer, addresses()).save(folder / "tokenizer")
        rows = [measured(folder, size, folder / "tokenizer") for size in asked.gigabytes]
        (folder / "start").mkdir()
        start = start_seconds(folder / "start")
    hours = DOCUMENTS / rows[-1]["documents_per_second"] / 3600 if rows else None
    columns = ("gigabytes", "documents", "seconds", "processor_seconds", "documents_per_second", "peak_mib")
    Table(columns, [[f"{row[name]:,.4g}" for name in columns] for row in rows]).print()
    print(json.dumps({"sizes": rows, "openwebtext_hours": hours, "cores": os.cpu_count(), "start_seconds": start}))


if __name__ == "__main__":
    main()
