import json
import math
import sys
from dataclasses import replace

import pytest
import torch

import dcdm
import tiny
from dcdm.bench import paths
from dcdm.bench.generation import kind_of, network_of_transformers
from dcdm.bench.paths import Case, measure_case, to_json
from dcdm.cli import main
from dcdm.costs import training_operations
from dcdm.kinds import build
from dcdm.model import packing

TINY = replace(dcdm.preset("dcdm-debug"), num_layers=2)


@pytest.fixture
def tiny_shapes(monkeypatch):
    def small(length, layers, routing="paper"):
        return replace(TINY, num_layers=layers, context_length=length, routing=routing)

    monkeypatch.setattr(paths, "_config", small)


@pytest.mark.parametrize(
    "case",
    [
        lambda: paths.attention(64),
        lambda: paths.step(64, layers=2),
        lambda: paths.step(64, layers=2, routing="causal"),
    ],
)
def test_every_subject_runs_all_its_paths_and_compares_them(case, tiny_shapes):
    rows = measure_case("test", case(), repeats=1, say=lambda text: None)
    assert len(rows) >= 2
    assert sum(row.ratio is None for row in rows) >= 1, "a baseline"
    assert all(row.median > 0 for row in rows)
    assert json.loads(to_json(rows))["rows"][0]["median"] == rows[0].median


@pytest.fixture
def measured(monkeypatch):
    """What `dcdm bench` asks to be measured, without measuring it."""
    asked = []

    def measure(subject, case, repeats, say):
        asked.append((case.name, repeats))
        return [paths.PathTiming(subject, case.name, "production", 1.0, 1.0, 1.0, None)]

    monkeypatch.setattr(paths, "measure_case", measure)
    return asked


def test_quick_takes_one_small_case_once(measured, capsys):
    main(["bench", "step", "--quick", "--json"])
    main(["bench", "step", "--json"])
    quick, *whole = measured
    assert quick[1] == 1
    assert [repeats for _, repeats in whole] == [3] * 3
    assert quick[0] not in [name for name, *_ in whole]
    assert [json.loads(line)["rows"][0]["path"] for line in capsys.readouterr().out.splitlines()] == [
        "production"
    ] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("step --repeats 0", "--repeats 0"),
        ("speed", "'speed'"),
        ("generate", "--models"),
        ("peers", "--models"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_measured(arguments, said, measured, refused):
    assert said in refused("bench", *arguments.split())
    assert not measured


def test_a_ratio_is_to_the_fastest_baseline():
    waits = {"fast": 0, "slow": 300_000, "slower": 900_000}

    def path(count):
        return lambda: lambda: sum(range(count))

    case = Case("case", {name: path(count) for name, count in waits.items()}, ("slow", "slower"))
    rows = {row.path: row for row in measure_case("test", case, repeats=3, say=lambda text: None)}
    assert rows["fast"].ratio == pytest.approx(rows["slow"].median / rows["fast"].median)
    assert rows["slow"].ratio is None


def test_both_paths_of_the_step_bench_compute_the_same_gradient(tiny_shapes):
    config = replace(TINY, context_length=64)
    tokens = paths._tokens(config, 64)
    grads = []
    for work in (paths._production_step, paths.literal_step, lambda m, t: paths.literal_step(m, t, True)):
        model = build(config, seed=0)
        work(model, tokens)
        grads.append(model.layers[1].mlp.up_proj.weight.grad)
    torch.testing.assert_close(grads[0], grads[1], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(grads[2], grads[1], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("preset", ["ar-debug", "mdlm-debug", "bdlm-debug"])
def test_rough_operations_of_training_are_those_that_pytorch_counts_but_for_attention(preset):
    from torch.utils.flop_counter import FlopCounterMode

    config = replace(dcdm.preset(preset), context_length=64)
    with FlopCounterMode(display=False) as counter:
        dcdm.loss(build(config, seed=0), paths._tokens(config, 64), 0).total.backward()
    attention = counter.get_flop_counts()["Global"].get(
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, 0
    )
    assert training_operations(config, 64) == pytest.approx(counter.get_total_flops() - attention, rel=0.35)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False}, {"qk_norm": False, "attention_bias": True}])
def test_the_network_of_transformers_computes_the_same(changes):
    model = tiny.model("mdlm", kind="lanes", **changes)
    tokens = tiny.tokens(2, 12)
    expected = network_of_transformers(model)(tokens).logits[:, :-1, :-3]
    found = model.token_logits(model.encode(tokens, lanes=1).states)[:, 1:]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # their tables of RoPE are in fp32


def test_a_model_is_measured_against_its_peers(tmp_path, capsys, monkeypatch):
    tiny.exported("mdlm", tmp_path / "model", kind="lanes", lanes=(1, 4))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # not installed
    main(["bench", "peers", "--models", str(tmp_path / "model"), "--gguf", "none.gguf", "--quick", "--json"])
    shown = capsys.readouterr()
    assert "llama.cpp is left out" in shown.err
    rows = [(row["path"], row["ratio"] is None) for row in json.loads(shown.out)["rows"]]
    packed = packing.can_pack(torch.device("cpu"))
    for ours in ("4 lanes", "AR order", "a pass", "one token"):
        assert (ours, False) in rows
        assert ((f"{ours}, int8", False) in rows) == packed
    assert ("32 texts", True) in rows
    assert [path for path, is_baseline in rows if is_baseline and "text" not in path] == [
        "generate of transformers", "a pass of transformers", "reading fp32",
    ]  # fmt: skip


def test_models_are_called_by_the_partition_they_follow():
    assert kind_of(tiny.config("strided")) == "dcdm-strided"
    assert kind_of(tiny.config("causal", prior="strided", prior_weight=math.inf)) == "dcdm-strided"
    assert kind_of(tiny.config("causal")) == "dcdm-causal"
    assert kind_of(tiny.config("bdlm", predict="left")) == "bdlm, from the left"
    assert kind_of(tiny.config("mdlm", kind="lanes", lanes=(1, 2))) == "lanes"
