"""`dcdm adapt`: a pretrained model learns to write in lanes, in blocks or in chunks.

A training run with defaults for two cores, and its figures before and after.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from dcdm.commands.options import (
    DeviceOption,
    ModelArgument,
    assignments,
    at_least_one,
    whole_numbers,
)
from dcdm.commands.train import start_run
from dcdm.config import ConfigError, Dtype, ModelConfig, whole_number

if TYPE_CHECKING:
    from dcdm.viewing.tables import Table

Target = Literal["lanes", "ar", "bdlm", "mdlm", "dcdm-causal", "dcdm-paper"]

EXAMPLES = (
    "dcdm adapt base --run runs/lanes --data train.txt",
    "dcdm adapt base --run runs/lanes --data train.txt --steps 1000 --batch-size 4 --lora 16",
    "dcdm adapt base --run runs/blocks --data train.txt --to bdlm --block-size 4",
    "dcdm adapt base --run runs/tuned --data train.txt --to ar",
    "dcdm adapt sdar --run runs/chunks --data train.txt --to dcdm-paper",
)
DEFAULTS: dict[str, Any] = {
    "data.window": 256, "train.warmup_steps": 20, "evaluate_first": True, "evaluate_sequences": 16,
    "evaluate_every": 100, "checkpoint_every": 50, "keep_last": 1, "keep_best": 0,
}  # fmt: skip
"""What suits a short run from good weights; a checkpoint of 135M parameters takes 1.6 GB."""
DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "ar": {}, "lanes": {"lanes": (1, 2, 4, 8), "drafts": 0}, "bdlm": {"block_size": 4}, "mdlm": {},
    "dcdm": {"num_chunks": 8, "chunk_dim": 64},
}  # fmt: skip
"""Kind → what a model of another becomes by it."""
ACTIVATIONS = 2e9  # bytes that backward may keep of one pass


def adapt(
    model: ModelArgument,
    run: Annotated[Path, arg(aliases=["--run-folder"])],
    to: Target = "lanes",
    lanes: str | None = None,
    drafts: int | None = None,
    block_size: int | None = None,
    data: Annotated[tuple[str, ...], arg(metavar="SOURCE...")] = ("stdlib",),
    validation: Annotated[tuple[str, ...], arg(metavar="SOURCE...", help_behavior_hint="(default: none)")] = (),
    steps: int = 300,
    batch_size: int = 2,
    lora: int | None = None,
    set: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE...", help_behavior_hint="")] = (),
    device: DeviceOption = "auto",
    dtype: Dtype | None = None,
    dry_run: bool = False,
) -> None:
    """Train a pretrained model further, so that it writes in lanes, in blocks or in chunks.

    A run as `dcdm train` makes it, with the model's weights and tokenizer; the same command resumes it. Last come
    the figures on held-out text before and after. With the defaults, a model of 135M parameters takes about half an
    hour on one core.

    Args:
        model: The model to start from: what `dcdm import` wrote, or any AR, BDLM or MDLM.
        run: The run's folder; if there is a run in it, it is resumed.
        to: What to make of it: lanes, bdlm (blocks that are filled in parallel), mdlm, dcdm-causal or dcdm-paper
            (chunks by content), or ar (fine-tuning, to compare with). Diffusion models do not become lanes or ar.
        lanes: Numbers of lanes to train with; 1 among them keeps what the model can do as AR (default: 1,2,4,8, or
            as a lane model has them).
        drafts: For lanes: train a head that drafts so many tokens ahead (docs/drafts.md; default: as the model has
            it, an AR model none).
        block_size: For bdlm: tokens of a block (default: 4).
        data: Text to train on: stdlib, addresses, files, patterns, a hub data set, or a folder that
            `dcdm data prepare` wrote with the model's tokenizer.
        validation: Sources of the validation split; without them a share is held out.
        steps: Optimizer steps.
        batch_size: Windows of one step.
        lora: Train adapters of this rank on the blocks, and the rows of BOS and MASK, instead of all weights.
        set: Any other setting, as name=value, such as data.window=512 (default: 256), train.learning_rate=1e-4
            (default: 3e-4, with --lora 2e-3) or model.num_chunks=16; `dcdm train --show-settings` lists them.
        dtype: What to compute in: bf16 keeps the weights in fp32; auto is bf16 on cuda and fp32 elsewhere.
        dry_run: Print what the run would cost, without starting it.
    """
    from dcdm.io.load import find_model
    from dcdm.shipped import folder_of

    at_least_one(steps=steps, batch_size=batch_size, lora=lora)
    place = folder_of(model)
    if not place.is_dir():
        raise ConfigError(f"{model} is not a folder; `dcdm import {model} FOLDER` makes one of a pretrained model")
    found = find_model(place)
    numbers = None if lanes is None else whole_numbers("lanes", lanes)
    config = adapted(found.config, to, numbers, drafts, block_size)
    changes: dict[str, Any] = DEFAULTS | {
        "model": config.to_dict(), "init": str(model), "data.tokenizer": str(found.tokenizer_folder),
        "data.sources": data, "data.validation": validation, "train.steps": steps, "train.batch_size": batch_size,
        "train.learning_rate": 2e-3 if lora else 3e-4, "train.lora": lora or 0, **assignments(set),
    }  # fmt: skip
    if dtype is not None:
        changes["train.dtype"] = dtype
    batch, window = (whole_number(name, changes[name]) for name in ("train.batch_size", "data.window"))
    changes = memory(config, batch, window) | changes
    code = start_run(None, run, None, changes, device, dry_run=dry_run)
    is_main = os.environ.get("RANK", "0") == "0"  # of several processes under torchrun
    if code == 0 and is_main and not dry_run and (table := before_and_after(run)) is not None:
        print("nats per token on held-out text (±: standard error over windows)")
        table.print()
    sys.exit(code)


def adapted(
    base: ModelConfig, to: Target, lanes: tuple[int, ...] | None = None, drafts: int | None = None,
    block_size: int | None = None,
) -> ModelConfig:  # fmt: skip
    """The config of what a model is to become; its backbone stays, of one of that kind all that is not given."""
    kind, _, routing = to.partition("-")
    knows_mask = base.kind in ("bdlm", "mdlm") and kind in ("bdlm", "mdlm", "dcdm")
    if base.kind not in ("ar", kind) and not knows_mask:
        others = ", a BDLM or an MDLM" if kind in ("bdlm", "mdlm", "dcdm") else ""
        raise ConfigError(f"adapting to {to} starts from an AR model{others}, and this is of kind {base.kind!r}")
    asked = {"lanes": lanes, "drafts": drafts, "block_size": block_size}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if foreign := [name for name in given if name not in DEFAULTS_OF[kind]]:
        option = f"--{foreign[0].replace('_', '-')} {given[foreign[0]]}"
        raise ConfigError(f"{option} has no effect on --to {to}; leave it out, or choose what it belongs to")
    if kind == "dcdm":
        given["routing"] = routing
    if base.kind == kind:
        if "lanes" in given:
            given["lane_weights"] = None  # they belong to the old numbers
        return replace(base, **given)
    backbone = (
        "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
        "moe", "context_length", "max_position", "rope_theta", "rope_scaling", "norm_eps", "tie_embeddings",
        "init_std", "attention_bias", "qk_norm",
    )  # fmt: skip
    kept = {name: getattr(base, name) for name in backbone}
    if knows_mask:
        kept["hidden_token"] = base.hidden_token
        if kind != "dcdm":
            kept |= {"prompts": base.prompts, "shift": base.shift}
    specials = {"hide_specials": base.hide_specials} if kind == "ar" else {}
    return ModelConfig(kind=kind, **{**kept, **specials, **DEFAULTS_OF[kind], **given})  # type: ignore[arg-type]


def memory(config: ModelConfig, batch_size: int, window: int) -> dict[str, Any]:
    """Windows of one pass such that backward keeps at most `ACTIVATIONS`; if one is too much, blocks recompute."""
    from dcdm.costs import activation_bytes

    one = 2 * activation_bytes(config, 1, max(1, window))  # fp32
    share = batch_size // int(os.environ.get("WORLD_SIZE", "1"))  # of one process under torchrun
    rows = max(1, min(share, int(ACTIVATIONS // one)))
    return {"train.micro_batch": rows, "train.activation_checkpointing": one > ACTIVATIONS}


def before_and_after(run: Path) -> Table | None:
    """The first and the last evaluation of a run, figure by figure; None if there are not two."""
    from dcdm.likelihood.statistics import with_stderr
    from dcdm.training.metrics import label, read_rows
    from dcdm.viewing.tables import Table

    rows = [row for row in read_rows(run / "metrics.jsonl") if isinstance(row.get("evaluation"), dict)]
    if len(rows) < 2:
        return None
    first, last = rows[0], rows[-1]
    lines = [
        [label(name), *(with_stderr(row["evaluation"][name], row["evaluation"].get(f"{name}_stderr"))
                        for row in (first, last))]
        for name in last["evaluation"]
        if not name.endswith("_stderr") and name in first["evaluation"]
    ]  # fmt: skip
    if any(name.startswith("lanes_") for name in last["evaluation"]):
        lines = lines[1:]  # the first is one of these
    return Table(["", f"step {first['step']}", f"step {last['step']}"], lines, ("",))
