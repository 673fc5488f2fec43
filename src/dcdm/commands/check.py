"""`dcdm check`: the first hour on new devices, as a list of stages."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from dcdm.commands.options import DeviceOption, at_least_one
from dcdm.config import ConfigError

EXAMPLES = (
    "dcdm check /data/check",
    "dcdm check /data/check --preset dcdm-0.1b-k8 --batch-size 32",
    "dcdm check /data/check --only attention-flex attention-flex-backward",
)


def check(
    folder: Annotated[Path, Positional],
    preset: str = "dcdm-debug",
    steps: int = 50,
    batch_size: int = 8,
    processes: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: all GPUs, or 2)")] = None,
    device: DeviceOption = "auto",
    only: Annotated[tuple[str, ...], arg(metavar="STAGE...", help_behavior_hint="(default: all)")] = (),
) -> None:
    """Try everything that training needs on the devices that are there, before a long run does.

    Attention, networks and steps against their literal versions, short runs on one and on all devices, a kill, a
    checkpoint: each stage passes, fails, or does not run and says why. The report is check.md, for programs
    check.json, in the folder. Exit code 1 if a stage failed.

    Args:
        folder: A new folder, on the file system on which runs will be kept.
        preset: What the runs train.
        steps: Optimizer steps of a run.
        batch_size: Windows of one optimizer step.
        processes: Of the run on all devices.
        only: Stages to run; the others are reported as not run.
    """
    import torch

    from dcdm.bench.check import STAGES, Setting, outcome, write_report
    from dcdm.bench.paths import environment
    from dcdm.distributed import choose_device

    at_least_one(steps=steps, batch_size=batch_size)
    if unknown := set(only) - set(STAGES):
        raise ConfigError(f"--only {unknown.pop()}: no such stage; choose from {', '.join(STAGES)}")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new folder")
    there = choose_device(device)
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    together = processes or (len(gpus) if there.type == "cuda" else 2)
    setting = Setting(folder, there, preset, steps, batch_size, together)
    folder.mkdir(parents=True, exist_ok=True)
    known, rows = {"device": str(there), "gpus": gpus, "preset": preset, **environment()}, []
    for name in STAGES:
        row = outcome(name, setting, not only or name in only)
        rows.append(row)
        print(f"{row['status']:8} {name}: {row['found']}", file=sys.stderr, flush=True)
        write_report(folder, known, rows)
    count = Counter(row["status"] for row in rows)
    print(f"{count['passed']} passed, {count['failed']} failed, {count['not run']} not run: {folder / 'check.md'}")
    if count["failed"]:
        sys.exit(1)
