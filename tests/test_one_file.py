"""The paper in one file equals the package's literal network for copied weights, gradients included."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dcdm
from dcdm.config import ModelConfig
from dcdm.model import chunking, masks, reference

FILE = Path(__file__).parents[1] / "examples" / "dcdm_in_one_file.py"
D, HEADS, K, H, V = 32, 4, 3, 8, 23


@pytest.fixture(scope="module")
def one_file():
    spec = importlib.util.spec_from_file_location("dcdm_in_one_file", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pair(one_file):
    """Our model and the file's with the same weights, in float64, and large enough that chunks differ."""
    config = ModelConfig("dcdm", V, D, 3, HEADS, HEADS, D // HEADS, 3 * D, num_chunks=K, chunk_dim=H)
    ours = dcdm.build(config, seed=0, dtype=torch.float64)
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
        ours.chunking.balance_bias += torch.tensor([0.1, 0.0, -0.1])
    theirs = one_file.DCDM(V, D, 3, HEADS, K, H).double()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(V - 3, (4, 17), generator=generator)
    x[:, 0] = V - 3
    t = torch.tensor([[0.2], [0.5], [0.8], [1.0]], dtype=torch.float64)
    return x, (torch.rand(x.shape, generator=generator) < t) & (x != V - 3), t


def test_masks_are_the_package_s(one_file):
    _, nu, _ = batch()
    c = torch.tensor([[0, 2, 1, 1, 0], [1, 1, 0, 2, 2]])
    assert torch.equal(one_file.noise_mask(nu), masks.noise_mask(nu))
    assert torch.equal(one_file.chunk_mask(c), masks.dual_stream_mask(c + 1))


def test_logits_chunks_loss_and_gradients_are_those_of_the_reference(one_file, pair):
    ours, theirs = pair
    x, nu, t = batch()
    expected = reference.forward(ours, x, nu)
    logits, c, r = theirs(x, nu)
    assert len(c.unique()) == K
    assert torch.equal(c + 1, expected.chunk_ids)
    torch.testing.assert_close(r, expected.router_scores)
    torch.testing.assert_close(logits[nu], expected.logits[nu])
    free = x != theirs.BOS
    gumbel = torch.randn(r.shape, dtype=r.dtype, generator=torch.Generator().manual_seed(2))
    log_p = expected.logits[nu].log_softmax(-1).gather(-1, x[nu][:, None]).squeeze(-1)
    loss = -(log_p / t.expand_as(x)[nu]).sum() / free.sum()
    loss = loss + 1e-2 * chunking.sequence_balance_loss(expected.router_scores, free, gumbel)
    found = one_file.nelbo(logits, x, nu, t, theirs.BOS) + 1e-2 * one_file.chunk_loss(r, gumbel, free)
    torch.testing.assert_close(found, loss)
    loss.backward()
    found.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=name)


def test_the_bias_moves_as_the_package_s(one_file, pair):
    ours, theirs = pair
    c = torch.tensor([0, 0, 0, 1, 2, 2])
    one_file.update_bias(theirs.chunking, c)
    chunking.update_bias(ours.chunking.balance_bias, torch.tensor([3, 1, 2]), 1e-2)
    torch.testing.assert_close(theirs.chunking.balance_bias, ours.chunking.balance_bias)


def test_it_trains_shows_chunks_and_fills_in_a_text(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps. " * 200)
    done = subprocess.run(
        [sys.executable, str(FILE), str(text), "--steps", "6"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "filled in" in done.stdout
    assert "\033[" in done.stdout
    assert math.isfinite(float(done.stdout.split("loss ")[1].split()[0]))
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 300
