"""What a rank holds while it reads initial weights: its shards, and of the file only pages that all ranks share."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import dcdm
import tiny
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.distributed import World
from dcdm.io.load import load_init
from dcdm.model.transformer import Model
from dcdm.training.optimizers import full
from dcdm.training.run import trainer_of
from dcdm.training.settings import RunConfig, TrainConfig
from ranks import on_ranks
from toy import InMemory

LARGE = {"hidden_size": 768, "intermediate_size": 4096, "num_layers": 4}


def own_memory() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def start_from(world: World, folder: str, lora: int) -> tuple[int, dict[str, float]]:
    config = RunConfig(
        tiny.config("bdlm", symbols=257, **LARGE), init=folder, train=TrainConfig(batch_size=4, lora=lora)
    )
    largest, done = 0, threading.Event()

    def read(model: Model) -> None:
        before = own_memory()

        def watch() -> None:
            nonlocal largest
            while not done.wait(0.002):
                largest = max(largest, own_memory() - before)

        watcher = threading.Thread(target=watch)
        watcher.start()
        load_init(model, folder, byte_tokenizer())
        done.set()
        watcher.join()

    trainer = trainer_of(config, InMemory(tiny.tokens(8, 16)), world, read)
    weights = {name: full(value) for name, value in trainer.model.state_dict().items() if "layers.0" in name}
    return largest, {name: float(value.sum()) for name, value in weights.items() if "lora" not in name}


@pytest.mark.slow
def test_initial_weights_are_read_shard_by_shard_also_beneath_adapters(tmp_path):
    folder = tiny.exported("bdlm", tmp_path / "given", **LARGE)
    whole = dcdm.load(folder)[0].state_dict()
    size = sum(4 * value.numel() for value in whole.values())
    assert size > 100e6
    for lora in (0, 4):
        for largest, sums in on_ranks(2, start_from, str(folder), lora):
            assert largest < 0.25 * size
            for name, value in sums.items():
                assert value == pytest.approx(float(whole[name].sum()), abs=1e-2)
