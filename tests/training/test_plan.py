"""A step without values needs what a real one needs, and every preset of the paper takes one on 64 ranks."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dcdm
from dcdm.cli import main
from dcdm.distributed import World
from dcdm.model.chunking import ChunkingAttention
from dcdm.training.plan import GPUS, Simulation, Windows, counted_step, fill_optimizer, make_plan, trainer_of
from dcdm.training.settings import RunConfig, resolve
from dcdm.training.simulation import as_on_a_gpu, equal_shares
from ranks import on_ranks

SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {"preset": "bdlm-debug"},
    "paper": {"preset": "dcdm-debug"},
    "mixture": {"preset": "dcdm-moe-debug"},
    "causal": {"preset": "dcdm-debug-causal", "train.optimizer": "adamw"},
    "lanes": {"preset": "lanes-debug", "train.ema_decay": 0.9},
    "adapters": {"preset": "mdlm-debug", "train.lora": 4, "init": "lanes", "train.activation_checkpointing": True},
}


def config_of(name: str, ranks: int) -> RunConfig:
    settings = dict(SETTINGS[name])
    small = {"model.num_layers": 2, "train.batch_size": 16 * ranks, "train.micro_batch": 8, "train.dtype": "fp32"}
    return resolve(settings.pop("preset"), None, {**small, **settings})


def measured(world: World, name: str) -> tuple[dict[str, int], int]:
    """On real ranks: bytes by part as counted, and the peak that PyTorch's allocator tells of the same step."""
    ChunkingAttention.assign = lambda self, r_bsk: equal_shares(r_bsk)[..., 0] + 1  # a trained router's balance
    config = config_of(name, world.size)
    trainer = trainer_of(config, Windows(config), world)
    fill_optimizer(trainer)
    trainer.model.zero_grad()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with as_on_a_gpu(), torch.profiler.profile(activities=cpu, profile_memory=True) as seen:
        parts = counted_step(trainer).peak()
    total = most = parts["weights"] + parts["optimizer"]
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return parts, most


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("paper", 2), *(pytest.param(name, ranks, marks=SLOW) for name in SETTINGS for ranks in (1, 2))],
)
def test_a_planned_peak_is_the_measured_one_to_three_percent_and_its_parts_are_the_counted_ones(
    name, ranks, monkeypatch
):
    planned = Simulation(config_of(name, ranks), ranks).step(8)
    monkeypatch.setattr(ChunkingAttention, "assign", ChunkingAttention.assign)  # put back what `measured` changes
    parts, peak = measured(World(), name) if ranks == 1 else on_ranks(2, measured, name)[0]
    assert planned.peak == pytest.approx(peak, rel=0.03)
    assert planned.memory == {part: pytest.approx(size, rel=0.03) for part, size in parts.items()}


PAPER = [name for name in dcdm.presets() if "debug" not in name and "small" not in name and "lanes" not in name]
QUICK = [("dcdm-moe-2.8b-causal", "muon")]


@pytest.mark.parametrize(
    ("preset", "optimizer"),
    [*QUICK, *(pytest.param(name, optimizer, marks=SLOW) for name in PAPER for optimizer in ("adamw", "muon"))],
)
def test_every_preset_of_the_paper_divides_shards_steps_and_saves_on_64_ranks(preset, optimizer):
    """Two layers: all others have the same shapes."""
    config = resolve(preset, None, {"model.num_layers": 2, "train.optimizer": optimizer, "train.batch_size": 64})
    step = Simulation(config, 64).step(1)
    weights = 4 * step.parameters
    assert step.memory["weights"] == pytest.approx(weights / 64, rel=0.02)
    moments = step.checkpoint - weights
    assert step.memory["optimizer"] == pytest.approx(moments / 64, rel=0.02)
    assert step.start <= 1.2 * step.peak
    assert step.start < 3 * 4 * config.model.vocab_size * config.model.hidden_size  # a parameter at a time
    assert {message.kind for message in step.sent} == {"allgather", "reduce_scatter", "allreduce"}


def test_a_plan_says_what_fits_what_is_sent_and_how_to_start(capsys):
    small = ["--set", "model.num_layers=2"]
    main(["plan", "--preset", "dcdm-debug", *small, "--gpus", "16", "--gpu", "a100", "--memory", "0.05", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["micro_batch"] == 1
    assert "--nnodes 2" in plan["launch"]
    assert "--micro-batch 1" in plan["launch"]
    assert plan["peak_bytes"] == sum(plan["memory"].values())
    assert plan["fits"]
    assert set(plan["sent_bytes"]) == {"allgather of 16", "reduce_scatter of 16", "allreduce of 16"}
    main(["plan", "--preset", "dcdm-debug", *small, "--gpus", "1", "--memory", "0.03"])
    out = capsys.readouterr().out
    for word in ("at the peak", "activations", "TFLOP", "tokens/s", "GPU hours", "launch"):
        assert word in out
    fits = int(out.split("up to ")[1].split()[0])
    config = resolve("dcdm-debug", None, {"model.num_layers": 2})
    room = 0.9 * 0.03e9
    assert Simulation(config, 1).step(fits).peak <= room < Simulation(config, 1).step(2 * fits).peak


@pytest.mark.parametrize(("options", "message"), [
    (["--gpus", "3"], "--batch-size 16 must be a multiple of --gpus 3"),
    (["--gpus", "4", "--micro-batch", "5"], "--micro-batch 5 is more than 4"),
    (["--gpu", "tpu"], "--gpu tpu is not known; choose one of b200"), (["--efficiency", "0"], "--efficiency 0.0"),
])  # fmt: skip
def test_a_plan_refuses_what_no_run_could_do(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--preset", "dcdm-debug", *options])
    assert message in capsys.readouterr().err


def test_longer_steps_count_every_micro_batch_and_messages_once():
    config = resolve("bdlm-debug", None, {"model.num_layers": 2, "train.batch_size": 16})
    simulation = Simulation(config, 2)
    two, eight = simulation.step(4), simulation.step(1)
    assert eight.operations == pytest.approx(two.operations, rel=0.1)  # other noise
    reduced = [sum(n for m, n in step.sent.items() if m.kind == "reduce_scatter") for step in (two, eight)]
    assert reduced[0] == reduced[1]


def test_seconds_follow_from_the_counts():
    config = resolve("bdlm-debug", None, {"model.num_layers": 2})
    plan = make_plan(config, 16, GPUS["h100"])
    seconds = plan.seconds()
    assert seconds["products"] == pytest.approx(plan.step.operations / (0.6 * 989e12))
    one_node = replace(plan, per_node=16)
    assert one_node.seconds()["network"] == pytest.approx(seconds["network"] * 50 / 450)


ROOT = Path(__file__).parents[2]
PLANNED = {"--preset", "--gpus", "--gpu", "--optimizer", "--micro-batch", "--batch-size", "--steps", "--set"}


def options_of(words: list[str]) -> dict[str, list[str]]:
    """The values of each option."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
        elif not word.startswith(("$", '"$')):
            found.setdefault(name, []).append(word)
    return found


def planned_commands() -> dict[str, list[str]]:
    """What docs/scaling.md plans and trains, and what the job scripts start, in the words of `dcdm plan`."""
    page = (ROOT / "docs" / "scaling.md").read_text().replace("\\\n", " ")
    lines = [line for line in page.splitlines() if re.match(r"(dcdm (plan|train)|torchrun) ", line)]
    for script in sorted((ROOT / "examples" / "slurm").glob("*.sbatch")):
        text = script.read_text().replace("\\\n", " ")
        nodes = re.findall(r"--nodes=(\d+)", text)[0]
        started = [line.split('"$here/train.sh" ')[1] for line in text.splitlines() if line.startswith("srun")]
        lines += [f"torchrun --nnodes {nodes} --nproc-per-node 8 {words}" for words in started]
    found = {}
    for line in lines:
        options = options_of(shlex.split(line))
        if "--nnodes" in options:
            options["--gpus"] = [str(int(options["--nnodes"][0]) * int(options["--nproc-per-node"][0]))]
        small = [value for value in options.get("--set", []) if "=" in value and not value.startswith("data.")]
        options["--set"] = [*small, "model.num_layers=2"]
        found[line] = [w for name, values in options.items() if name in PLANNED for w in (name, *values)]
    return found


@pytest.mark.parametrize(
    "command", [pytest.param(line, marks=SLOW if line.startswith("dcdm") else []) for line in planned_commands()]
)
def test_what_the_page_and_the_job_scripts_start_can_be_planned(command, capsys):
    """With two layers: tests/test_docs.py runs the page's plans as they stand."""
    main(["plan", *planned_commands()[command], "--json"])
    assert json.loads(capsys.readouterr().out)["fits"]
