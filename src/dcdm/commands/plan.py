"""`dcdm plan`: what a run will need on GPUs that are not there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from dcdm.commands.options import JsonOption, at_least_one, print_json
from dcdm.config import ConfigError, Dtype, assignments

EXAMPLES = (
    "dcdm plan --preset dcdm-1.7b-k8 --gpus 64 --gpu h100",
    "dcdm plan --preset dcdm-debug --gpus 2 --set train.optimizer=adamw --json",
    "dcdm plan --preset dcdm-0.1b-k8 --gpus 8 --micro-batch 16 --set train.activation_checkpointing=true",
)


def plan(
    preset: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None,
    gpus: int = 8,
    gpu: str = "h100",
    per_node: int = 8,
    config: Path | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    micro_batch: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: what fits)")] = None,
    optimizer: Literal["adamw", "muon"] | None = None,
    dtype: Dtype | None = None,
    set: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE...", help_behavior_hint="")] = (),
    memory: Annotated[float | None, arg(metavar="GB", help_behavior_hint="(default: the device's)")] = None,
    efficiency: float = 0.6,
    fused: float = 0.4,
    network: Annotated[float, arg(metavar="GB/S")] = 50.0,
    json: JsonOption = False,
) -> None:
    """Rehearse a training run on GPUs that are not there: memory, speed, cost and the command to start it.

    Rank 0 takes a step of the real model, loss and optimizer on tensors that have shapes and no values. Memory,
    operations and bytes sent are counted on the way; seconds are arithmetic on them, from the assumptions below.

    Args:
        preset: A name that `dcdm presets` lists.
        gpus: Devices of the run, one process each.
        gpu: b200, h200, h100, h800, a100, a800, l40s or l4.
        per_node: Devices of a node.
        config: A YAML file of settings, as `dcdm train` takes it.
        steps: Optimizer steps.
        batch_size: Windows of one optimizer step, over all devices.
        micro_batch: Windows of one pass on one device.
        optimizer: adamw as in the paper, or muon.
        dtype: What to compute in; by default bf16.
        set: Any other setting of `dcdm train`, as name=value.
        memory: Memory of a device.
        efficiency: Assumed share of its peak that a device reaches in matrix products.
        fused: Assumed share of the bytes of all other operations that is left when blocks are compiled.
        network: Assumed speed from each device to other nodes.
    """
    from dataclasses import replace

    from dcdm.training.plan import GPUS, Assumptions, lines_of, make_plan
    from dcdm.training.settings import resolve

    at_least_one(gpus=gpus, per_node=per_node)
    if gpu.lower() not in GPUS:
        raise ConfigError(f"--gpu {gpu} is not known; choose one of {', '.join(GPUS)}")
    for name, value in {"efficiency": efficiency, "fused": fused, "network": network}.items():
        if not value > 0:
            raise ConfigError(f"--{name} {value}: must be above 0")
    options: dict[str, Any] = {
        "steps": steps, "batch_size": batch_size, "micro_batch": micro_batch, "optimizer": optimizer,
        "dtype": dtype,
    }  # fmt: skip
    changes = {f"train.{name}": value for name, value in options.items() if value is not None} | assignments(set)
    device = GPUS[gpu.lower()]
    if memory is not None:
        device = replace(device, memory=memory * 1e9)
    assumed = Assumptions(efficiency, fused, network * 1e9)
    made = make_plan(resolve(preset, config, changes), gpus, device, per_node, assumed)
    known: dict[str, Any] = made.figures()
    known["launch"] = _launch(preset, config, gpus, per_node, made.step.micro_batch, options, set)
    if json:
        print_json(known)
        return
    print("\n".join([*lines_of(made), f"launch       {known['launch']}"]))
    if not known["fits"]:
        print("it does not fit; see `fits`, or set train.activation_checkpointing=true", file=sys.stderr)


def _launch(
    preset: str | None, file: Path | None, gpus: int, per_node: int, micro_batch: int,
    options: dict[str, Any], more: tuple[str, ...],
) -> str:  # fmt: skip
    """The command that starts the run, on every node."""
    nodes = -(-gpus // per_node)
    meeting = "--standalone" if nodes == 1 else f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    given = {"preset": preset, "config": file, **options, "micro_batch": micro_batch}
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in given.items() if value is not None]
    if more:
        flags.append(f"--set {' '.join(more)}")
    command = f"torchrun {meeting} --nproc-per-node {min(gpus, per_node)} -m dcdm train"
    return " ".join([command, *flags, "--run-folder RUN --data DATA"])
