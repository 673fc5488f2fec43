"""`dcdm train` and `dcdm.train`: a training run from a preset, a file of settings and flags."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from dcdm.commands.options import DeviceOption
from dcdm.config import Device, Dtype, assignments

EXAMPLES = (
    "dcdm train --preset dcdm-debug-causal --run runs/first --steps 200",
    "dcdm train --preset dcdm-debug-causal --show-settings",
    "dcdm train --preset dcdm-debug-causal --run runs/tuned --init runs/first --data train.jsonl "
    "--prompt-field question --response-field answer",
    "dcdm train --preset dcdm-1.7b-k8 --run runs/big --dry-run",
    "torchrun --nproc-per-node 8 -m dcdm train --preset dcdm-0.1b-k8 --run-folder runs/dcdm",
)
SETTING_OF = {
    "data": "data.sources", "tokenizer": "data.tokenizer", "validation": "data.validation",
    "field": "data.reading.field", "prompt_field": "data.reading.prompt_field",
    "response_field": "data.reading.response_field", "steps": "train.steps", "batch_size": "train.batch_size",
    "micro_batch": "train.micro_batch", "learning_rate": "train.learning_rate",
    "optimizer": "train.optimizer", "seed": "train.seed",
    "checkpoint_every": "checkpoint_every", "init": "init",
    "dtype": "train.dtype",
}  # fmt: skip
"""The setting of each option."""


def train(
    preset: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(needed to start a run)")] = None,
    run: Annotated[Path, arg(aliases=["--run-folder"])] = Path("runs/default"),
    data: Annotated[tuple[str, ...] | None, arg(metavar="SOURCE...", help_behavior_hint="")] = None,
    tokenizer: str | None = None,
    validation: Annotated[tuple[str, ...] | None, arg(metavar="SOURCE...", help_behavior_hint="")] = None,
    field: str | None = None,
    prompt_field: str | None = None,
    response_field: str | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    micro_batch: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: all of its share)")] = None,
    learning_rate: float | None = None,
    optimizer: Literal["adamw", "muon"] | None = None,
    seed: int | None = None,
    checkpoint_every: int | None = None,
    init: str | None = None,
    config: Path | None = None,
    set: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE...", help_behavior_hint="")] = (),
    device: DeviceOption = "auto",
    dtype: Dtype | None = None,
    show_settings: bool = False,
    dry_run: bool = False,
) -> None:
    """Train a model, or resume the run in a folder.

    Settings come from the preset, then the YAML file, then flags; the resolved ones are kept in the run folder
    and start the same run again. Under torchrun, the same command runs on many devices; there, write
    --run-folder for --run, which torchrun would take for an option of its own. Defaults depend on the preset;
    --show-settings lists them.

    Ten minutes of two cores are 1,300 steps of dcdm-debug-causal, or 3,500 of ar-debug.

    Args:
        preset: A name that `dcdm presets` lists; not needed to resume a run.
        run: The run's folder; if there is a run in it, it is resumed.
        data: Text to train on: stdlib, stdlib-code, addresses (English), files, patterns, a hub data set, or a
            folder of `dcdm data prepare`.
        tokenizer: bytes, bpe:N, a folder, or a hub name.
        validation: Sources of the validation split; without them a share is held out.
        field: Field of a row that holds its text.
        prompt_field: Fine-tuning: field of the prompt, which stays visible.
        response_field: Fine-tuning: field of the response, which is learned.
        steps: Optimizer steps.
        batch_size: Windows of one optimizer step, over all devices.
        micro_batch: Windows of one pass on one device.
        learning_rate: Peak learning rate.
        optimizer: adamw as in the paper, or muon, which moves the network's matrices by Muon.
        seed: Seed of the weights, the data order and the noise.
        checkpoint_every: Steps between checkpoints.
        init: Initial weights: a run, or an exported or imported folder.
        config: A YAML file of settings.
        set: Any other setting, as name=value, such as objective.full_mask_share=0.5.
        dtype: What to compute in: bf16 keeps the weights in fp32; auto is bf16 on cuda and fp32 elsewhere.
        show_settings: List every name that --set takes, its value and where that comes from, and do nothing else.
        dry_run: Print what the run would need on so many H100 as there are processes, without starting it.
    """
    options = {option: value for option, value in locals().items() if option in SETTING_OF and value is not None}
    changes = {SETTING_OF[option]: value for option, value in options.items()} | assignments(set)
    if show_settings:
        _list_settings(preset, run, config, changes)
        return
    sys.exit(start_run(preset, run, config, changes, device, dry_run=dry_run))


def train_in_python(
    preset: str | None = None,
    run: str | Path = "runs/default",
    *,
    data: str | Path | Sequence[str | Path] | None = None,
    tokenizer: str | Path | None = None,
    steps: int | None = None,
    init: str | Path | None = None,
    config: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    device: Device = "auto",
) -> Path:
    """Train a model, or resume the run in a folder; returns the folder, which `dcdm.load` takes.

    `preset`, `run`, `data`, `tokenizer`, `steps`, `init` and `config` (a YAML file) are those of `dcdm train`;
    `settings` holds all else by the names that `dcdm train --show-settings` lists, such as
    {"train.batch_size": 8}. No signal is handled, so that it may run in a thread or a notebook: Ctrl-C ends it as
    it ends any function, and the same call resumes from the last checkpoint.
    """
    sources = [data] if isinstance(data, str | Path) else data
    given = {
        "data.sources": None if sources is None else tuple(map(str, sources)),
        "data.tokenizer": None if tokenizer is None else str(tokenizer),
        "train.steps": steps,
        "init": None if init is None else str(init),
    }
    changes = {name: value for name, value in given.items() if value is not None} | dict(settings or {})
    file = None if config is None else Path(config)
    start_run(preset, Path(run), file, changes, device, signals=False)
    return Path(run)


def start_run(
    preset: str | None, run: Path, file: Path | None, changes: Mapping[str, Any], device: Device,
    dry_run: bool = False, signals: bool = True,
) -> int:  # fmt: skip
    """Start or resume a run, given what training itself does not know: how initial weights are read."""
    from dcdm.io.load import load_init
    from dcdm.training.run import run_training, settle

    if dry_run:
        from dcdm.training.plan import GPUS, lines_of, make_plan

        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        print("\n".join(lines_of(make_plan(settle(preset, run, file, changes)[0], ranks, GPUS["h100"]))))
        print("`dcdm plan` says it for other devices and numbers of them", file=sys.stderr)
        return 0
    return run_training(
        preset, run, file=file, changes=changes, device=device, load_init=load_init, signals=signals
    )


def _list_settings(preset: str | None, run: Path, file: Path | None, changes: Mapping[str, Any]) -> None:
    from dcdm.training.settings import listed
    from dcdm.viewing.tables import Table

    if preset is None and file is None and (run / "settings.yaml").exists():
        file = run / "settings.yaml"
    rows = [[one.name, _value(one.value), one.source] for one in listed(preset, file, changes)]
    Table(["setting", "value", "from"], rows, ("setting", "value", "from")).print()


def _value(value: Any) -> str:
    """As --set takes it."""
    import json

    import yaml

    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").rstrip("\n")
