"""Twenty steps of every debug preset must reproduce stored losses, so that changed mathematics is noticed.

After a change that is meant to alter them: `python tests/training/test_curves.py` writes the file anew.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dcdm
from dcdm.kinds import build
from dcdm.training.settings import TrainConfig
from toy import train_windows

STORED = Path(__file__).parents[1] / "data" / "curves.json"
DEBUG = [name for name in dcdm.presets() if "debug" in name]


def arithmetic_text(rows: int, length: int) -> torch.Tensor:
    """Byte windows that are the same on every machine: sums, written out."""
    text = "".join(f"{a}+{b}={a + b};" for a in range(60) for b in range(60)).encode()
    windows = torch.tensor(list(text[: rows * (length - 1)])).view(rows, length - 1)
    return torch.cat([torch.full((rows, 1), 257), windows], dim=1)


def curve(name: str) -> list[float]:
    settings = TrainConfig(steps=20, batch_size=4, learning_rate=1e-3, warmup_steps=5)
    model = build(replace(dcdm.preset(name), rope_theta=1e6), seed=0)  # as it was when the losses were stored
    return [report.loss for report in train_windows(model, arithmetic_text(64, 64), settings)]


@pytest.mark.parametrize("name", DEBUG)
def test_twenty_steps_reproduce_the_stored_losses(name):
    expected = json.loads(STORED.read_text())[name]
    torch.testing.assert_close(torch.tensor(curve(name)), torch.tensor(expected), atol=1e-4, rtol=1e-4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    STORED.parent.mkdir(exist_ok=True)
    STORED.write_text(json.dumps({name: [round(x, 6) for x in curve(name)] for name in DEBUG}, indent=1) + "\n")
