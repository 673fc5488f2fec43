"""What a run writes about its speed."""

import io
import json
import re

import pytest
import torch
from rich.console import Console

import dcdm
from dcdm.costs import BF16_PEAKS, bf16_peak, training_operations
from dcdm.distributed import World
from dcdm.training.metrics import Recorder
from dcdm.training.settings import RunConfig
from dcdm.training.trainer import StepReport, TrainConfig


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA L4", 121e12), ("NVIDIA L40", None),
])  # fmt: skip
def test_the_peak_is_that_of_the_device_by_its_name(name, peak):
    assert bf16_peak(name) == peak


def timings(folder, monkeypatch, device: str, name: str, size: int) -> list[dict]:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    train = TrainConfig(steps=2, batch_size=8)
    config = RunConfig(dcdm.preset("bdlm-debug"), train=train, tensorboard=False, log_every=1)
    world = World(size=size, device=torch.device(device))
    with Recorder(folder, config, Console(quiet=True), world) as recorder:
        recorder.on_resume(0)
        for step in range(2):
            recorder.on_step(StepReport(step, 1.0, 1.0, 1.0, 1e-3, 100))
    return [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]


def shown_on_a_terminal(folder, width: int) -> str:
    """The last state of the live line."""
    train = TrainConfig(steps=500_000, batch_size=8)
    config = RunConfig(dcdm.preset("dcdm-debug"), train=train, tensorboard=False)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    with Recorder(folder, config, console) as recorder:
        recorder.on_resume(499_980)
        recorder.on_evaluation(499_980, {"valid_nll": 2.5})
        for step in range(499_980, 499_995):
            counts = torch.full((8,), 100)
            recorder.on_step(StepReport(step, 3.21, 3.21, 1.0, 1e-3, 100_000, 0.1, None, counts))
    return screen.getvalue().split("\r")[-1]


@pytest.mark.parametrize("width", [80, 200])
def test_the_live_line_keeps_step_loss_speed_and_time_left(width, tmp_path):
    line = shown_on_a_terminal(tmp_path, width)
    for part in (r"step 499995/500000", r"loss 3\.210", r"\d+ tokens/s", r"\d+:\d\d:\d\d left"):
        assert re.search(part, line), (part, line)
    assert "…" not in line
    assert ("valid 2.500" in line) == (width == 200)


@pytest.mark.parametrize("size", [1, 16])
def test_utilisation_is_the_global_rate_over_the_peak_of_all_devices(size, tmp_path, monkeypatch):
    operations = 8 * training_operations(dcdm.preset("bdlm-debug"), 128)
    for row in timings(tmp_path, monkeypatch, "cuda", "NVIDIA A100-SXM4-80GB", size):
        rate = operations / row["seconds_per_step"]
        assert row["utilisation"] == pytest.approx(rate / (size * BF16_PEAKS["A100"]))


@pytest.mark.parametrize(("device", "name"), [("cuda", "A device of tomorrow"), ("cpu", "NVIDIA H800")])
def test_utilisation_is_absent_where_the_peak_is_not_known(device, name, tmp_path, monkeypatch):
    assert all("utilisation" not in row for row in timings(tmp_path, monkeypatch, device, name, 1))
