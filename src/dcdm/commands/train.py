"""`dcdm train`: a training run from a preset, a file of settings and flags."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from dcdm.commands.options import DeviceOption, NamesOfTypes
from dcdm.config import ConfigError, Dtype

EXAMPLES = (
    "dcdm train --preset dcdm-debug-causal --run runs/first --steps 200",
    "dcdm train --preset dcdm-1.7b-k8 --run runs/big --dry-run",
    "torchrun --nproc-per-node 8 -m dcdm train --preset dcdm-0.1b-k8 --run-folder runs/dcdm",
)


def train(
    preset: str | None = None,
    run: Annotated[Path, arg(aliases=["--run-folder"])] = Path("runs/default"),
    data: tuple[str, ...] | None = None,
    tokenizer: str | None = None,
    validation: tuple[str, ...] | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    micro_batch: int | None = None,
    learning_rate: float | None = None,
    optimizer: Literal["adamw", "muon"] | None = None,
    seed: int | None = None,
    checkpoint_every: int | None = None,
    evaluate_every: int | None = None,
    init: str | None = None,
    config: Path | None = None,
    set: tuple[str, ...] = (),
    device: DeviceOption = "auto",
    dtype: Annotated[Dtype | None, NamesOfTypes] = None,
    dry_run: bool = False,
) -> None:
    """Train a model, or resume the run in a folder.

    Settings come from the preset, then the YAML file, then flags; the resolved ones are kept in the run folder
    and start the same run again. Under torchrun, the same command runs on many devices; there, write
    --run-folder for --run, which torchrun would take for an option of its own.

    Args:
        preset: A name that `dcdm presets` lists; not needed to resume a run.
        run: The run's folder; if there is a run in it, it is resumed.
        data: Text to train on: stdlib, files, patterns, a hub data set, or a folder of `dcdm data prepare`.
        tokenizer: bytes, bpe:N, a folder, or a hub name.
        validation: Sources of the validation split; without them a share is held out.
        steps: Optimizer steps.
        batch_size: Windows of one optimizer step, over all devices.
        micro_batch: Windows of one pass on one device.
        learning_rate: Peak learning rate.
        optimizer: adamw as in the paper, or muon, which moves the network's matrices by Muon.
        seed: Seed of the weights, the data order and the noise.
        checkpoint_every: Steps between checkpoints.
        evaluate_every: Steps between evaluations on the validation split.
        init: Start weights: a run, an exported folder, or a local Qwen3 folder of transformers.
        config: A YAML file of settings.
        set: Any other setting, as name=value, such as objective.full_mask_share=0.5.
        dtype: What to compute in: bf16 keeps the weights in fp32; auto is bf16 on cuda and fp32 elsewhere.
        dry_run: Print what the run would cost, without starting it.
    """
    from dcdm.io.load import load_init
    from dcdm.training.run import run_training
    from dcdm.viewing.palette import chunk_picture

    flags = {
        "data.sources": data, "data.tokenizer": tokenizer, "data.validation": validation, "train.steps": steps,
        "train.batch_size": batch_size, "train.micro_batch": micro_batch, "train.learning_rate": learning_rate,
        "train.optimizer": optimizer,
        "train.seed": seed, "checkpoint_every": checkpoint_every, "evaluate_every": evaluate_every, "init": init,
        "train.dtype": dtype,
    }  # fmt: skip
    changes = {name: value for name, value in flags.items() if value is not None} | _assignments(set)
    code = run_training(
        preset, run, file=config, changes=changes, device=device, dry_run=dry_run, load_init=load_init,
        picture=chunk_picture,
    )  # fmt: skip
    sys.exit(code)


def _assignments(texts: tuple[str, ...]) -> dict[str, Any]:
    """Values of name=value, read as YAML."""
    import yaml

    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write it as name=value")
        values[name] = yaml.safe_load(value)
    return values
