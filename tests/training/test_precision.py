"""`--dtype`: which types a run computes in, and that every kind trains in each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import dcdm
import tiny
from corpora import prose
from dcdm.config import ConfigError
from dcdm.distributed import ParallelError, Precision, choose_device, precision
from dcdm.training.checkpoint_folder import load_weights, newest_whole
from dcdm.training.run import run_training
from dcdm.training.settings import TrainConfig, resolve
from dcdm.training.trainer import StepReport
from toy import train_windows

KINDS = ["ar", "bdlm", "paper-moe", "causal"]
TOLERANCE = {"causal": 0.2}  # other chunks, and so another draw of the noise
SETTINGS = TrainConfig(steps=2, batch_size=4, warmup_steps=1, learning_rate=1e-3, dtype="bf16")
WINDOWS = tiny.tokens(8, 24)


def model(kind: str, dtype: torch.dtype = torch.float32) -> dcdm.Model:
    return dcdm.build(tiny.config(kind), seed=0, dtype=dtype)


def trained(kind: str, settings: TrainConfig, dtype: torch.dtype = torch.float32) -> list[StepReport]:
    return train_windows(model(kind, dtype), WINDOWS, settings)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_in_bf16_with_the_first_loss_of_fp32(kind):
    narrow, wide = trained(kind, SETTINGS), trained(kind, replace(SETTINGS, dtype="fp32"))
    assert narrow[0].nll != wide[0].nll
    assert narrow[0].nll == pytest.approx(wide[0].nll, rel=TOLERANCE.get(kind, 2e-3))
    assert len(narrow) == SETTINGS.steps


def test_a_run_in_fp64_keeps_and_saves_everything_in_64_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "corpus.txt").write_text(prose(400), encoding="utf-8")
    changes = {"model.num_layers": 2, "model.context_length": 32, "train.steps": 1, "train.batch_size": 2,
               "evaluate_sequences": 1, "evaluate_samples": 1, "tensorboard": False, "train.dtype": "fp64",
               "data.sources": (str(tmp_path / "corpus.txt"),)}  # fmt: skip
    assert run_training("dcdm-moe-debug", tmp_path / "run", changes=changes, device="cpu") == 0
    checkpoint, _ = newest_whole(tmp_path / "run" / "checkpoints")
    assert {value.dtype for value in load_weights(checkpoint).values()} == {torch.float64}


def test_the_device_decides_what_auto_means_and_what_is_refused(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    fp32, bf16 = Precision(torch.float32), Precision(torch.float32, torch.bfloat16)
    assert precision("auto", cpu) == fp32
    assert precision("bf16", cpu) == bf16
    assert precision("fp64", cuda) == Precision(torch.float64)
    with pytest.raises(ParallelError, match=r"device=mps.*set device=cpu"):
        choose_device("mps")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert precision("auto", cuda) == bf16
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert precision("auto", cuda) == fp32
    with pytest.raises(ConfigError, match=r"bf16.*dtype=fp32"):
        precision("bf16", cuda)


def test_fp16_and_unknown_types_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"train\.dtype='fp16'.*choose one of auto, fp32, bf16, fp64.*scaled"):
        resolve("mdlm-debug", changes={"train.dtype": "fp16"})
    with pytest.raises(ConfigError, match="dtype='half' is not known"):
        TrainConfig(dtype="half")  # type: ignore[arg-type]
