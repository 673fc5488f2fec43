import math
from dataclasses import replace

import pytest
import torch

import dcdm
import tiny
from dcdm.cli import main
from dcdm.data.loader import pack
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.kinds import build
from dcdm.training.optimizers import adamw
from dcdm.training.settings import resolve
from dcdm.training.trainer import TrainConfig, learning_rate
from toy import train_windows


def test_learning_rate_warms_up_linearly_and_falls_along_a_cosine():
    settings = TrainConfig(steps=110, warmup_steps=10, learning_rate=1.0)
    assert learning_rate(0, settings) == pytest.approx(0.1)
    assert learning_rate(9, settings) == pytest.approx(1.0)
    assert learning_rate(60, settings) == pytest.approx(0.5)
    assert learning_rate(110, settings) == pytest.approx(0.0)


def test_weight_decay_spares_norms_and_embeddings_and_bias_is_no_parameter():
    model = tiny.model("paper")
    decayed, plain = (group["params"] for group in adamw(model, TrainConfig()).param_groups)
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(p)] for p in plain} == {n for n in names.values() if "norm" in n or "embed" in n}
    assert len(decayed) + len(plain) == len(names)
    assert not any("balance_bias" in n for n in names.values())


def test_training_lowers_the_loss_and_moves_the_bias_of_paper_routing_only():
    windows = pack(["def f(x):\n    return x + 1\n\n" * 40], byte_tokenizer(), 33)
    for name in ("dcdm-debug", "dcdm-debug-causal"):
        model = build(replace(dcdm.preset(name), num_layers=2), seed=0)
        settings = TrainConfig(steps=25, batch_size=6, learning_rate=3e-3, warmup_steps=5)
        reports = train_windows(model, windows, settings)
        assert sum(r.nll for r in reports[-5:]) < 0.75 * sum(r.nll for r in reports[:5])
        assert bool(model.chunking.balance_bias.any()) == (name == "dcdm-debug")
        assert all(math.isfinite(r.gradient_norm) for r in reports)
        if name == "dcdm-debug-causal":
            assert max(r.max_violation for r in reports) < 0.3


def test_training_repeats_bit_for_bit_from_its_seed():
    windows = pack(["abc " * 200], byte_tokenizer(), 17)
    results = []
    for _ in range(2):
        model = build(dcdm.preset("dcdm-debug-causal"), seed=3)
        train_windows(model, windows, TrainConfig(steps=3, batch_size=4, seed=9))
        results.append(model.state_dict())
    assert all(torch.equal(results[0][k], results[1][k]) for k in results[0])


@pytest.mark.parametrize("name", [name for name in dcdm.presets() if "debug" not in name and "small" not in name])
def test_presets_of_the_paper_s_sizes_name_its_text_and_tokenizer(name):
    data = resolve(name).data
    assert (data.sources, data.tokenizer) == (("openwebtext",), "gpt2")


def test_a_preset_of_the_paper_refuses_to_start_where_its_text_cannot_be_had(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--preset", "dcdm-0.5b-k8", "--run", str(tmp_path / "run")])
    assert "openwebtext" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
