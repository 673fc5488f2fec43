"""`dcdm adapt`: a pretrained model gets a draft head, or learns to write in lanes, in blocks or in chunks.

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
    at_least_one,
    compute_on,
    whole_numbers,
)
from dcdm.commands.train import start_run
from dcdm.config import ConfigError, Dtype, ModelConfig, assignments, whole_number

if TYPE_CHECKING:
    from dcdm.io.load import ModelSource
    from dcdm.viewing.tables import Table

Target = Literal["drafts", "lanes", "ar", "bdlm", "mdlm", "dcdm-causal", "dcdm-paper"]

EXAMPLES = (
    "dcdm adapt base --run runs/drafts --to drafts",
    "dcdm adapt base --run runs/lanes --to lanes --own-texts 1024",
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
    "ar": {}, "drafts": {"drafts": 3}, "lanes": {"lanes": (1, 2, 4, 8), "drafts": 0}, "bdlm": {"block_size": 4},
    "mdlm": {}, "dcdm": {"num_chunks": 8, "chunk_dim": 64},
}  # fmt: skip
"""Kind → what a model of another becomes by it."""
DRAFTS: dict[str, Any] = {
    "train.only_drafts": True, "objective.prompt_share": 0.0, "train.weight_decay": 0.0, "evaluate_every": 10_000,
    "checkpoint_every": 200, "evaluate_first": False,
}  # fmt: skip
"""For a head alone. Without random prompts the states of a window are the same in every epoch, and are kept."""
DRAFT_VOCAB, DRAFT_WIDTH = 16_384, 6
OWN_TEXTS = 1024
LANES: dict[str, Any] = {
    "objective.soft_targets": True, "objective.prompt_share": 0.0, "evaluate_every": 10_000,
}  # fmt: skip
"""For lanes that learn from own texts, what the model itself predicts in one lane."""
OF_OWN_TEXTS: dict[str, dict[str, Any]] = {"drafts": DRAFTS, "lanes": LANES}
RANK = 16  # of their adapters
ACTIVATIONS = 2e9  # bytes that backward may keep of one pass


def adapt(
    model: ModelArgument,
    run: Annotated[Path, arg(aliases=["--run-folder"])],
    to: Target = "lanes",
    lanes: str | None = None,
    drafts: int | None = None,
    block_size: int | None = None,
    data: Annotated[tuple[str, ...], arg(metavar="SOURCE...", help_behavior_hint="(default: stdlib)")] = (),
    validation: Annotated[tuple[str, ...], arg(metavar="SOURCE...", help_behavior_hint="(default: none)")] = (),
    own_texts: int | None = None,
    prompts: Path | None = None,
    steps: int = 300,
    batch_size: int = 2,
    lora: int | None = None,
    set: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE...", help_behavior_hint="")] = (),
    device: DeviceOption = "auto",
    dtype: Dtype | None = None,
    dry_run: bool = False,
) -> None:
    """Give a pretrained model a draft head, or train it further so that it writes in lanes, in blocks or in chunks.

    With --to drafts the model itself stays as it is, to the bit, and writes the same texts in fewer forward passes:
    only a small head is trained, on texts that the model writes (or on --data), by the model's own predictions.
    `dcdm export RUN FOLDER --adapter-only` writes the head alone, which every command takes by --adapter.

    A run as `dcdm train` makes it, with the model's weights and tokenizer; the same command resumes it. Last come
    the figures on held-out text before and after. With the defaults, a model of 135M parameters takes about half an
    hour on one core.

    Args:
        model: The model to start from: what `dcdm import` wrote, or any AR, BDLM or MDLM.
        run: The run's folder; if there is a run in it, it is resumed.
        to: What to make of it: drafts (the same model with a draft head), lanes, bdlm (blocks that are filled in
            parallel), mdlm, dcdm-causal or dcdm-paper (chunks by content), or ar (fine-tuning, to compare with).
            Diffusion models do not become lanes or ar.
        lanes: Numbers of lanes to train with; 1 among them keeps what the model can do as AR (default: 1,2,4,8, or
            as a lane model has them).
        drafts: Train a head that drafts so many tokens ahead (docs/drafts.md; default: 3 with --to drafts; with
            --to lanes as the model has it, an AR model none).
        block_size: For bdlm: tokens of a block (default: 4).
        data: Text to train on: stdlib, addresses, files, patterns, a hub data set, or a folder that
            `dcdm data prepare` wrote with the model's tokenizer.
        validation: Sources of the validation split; without them a share is held out.
        own_texts: How many texts the model writes first, to train on. Lanes learn from them what it predicts in one
            lane, by adapters (--lora, default 16); drafts need no other text (default: 1024; none with --data).
        prompts: A file with a prompt in each line for these texts; one that ends in … is the beginning of a text,
            others are messages to answer (default: 90 short ones that come with dcdm).
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

    at_least_one(steps=steps, batch_size=batch_size, lora=lora, own_texts=own_texts)
    place = folder_of(model)
    if not place.is_dir():
        raise ConfigError(f"{model} is not a folder; `dcdm import {model} FOLDER` makes one of a pretrained model")
    found = find_model(place)
    numbers = None if lanes is None else whole_numbers("lanes", lanes)
    config = adapted(found.config, to, numbers, drafts, block_size)
    own = own_texts is not None or prompts is not None or (to == "drafts" and not data)
    if own and to not in OF_OWN_TEXTS:
        raise ConfigError(f"--own-texts and --prompts have no effect on --to {to}; leave them out")
    if own and data:
        raise ConfigError(f"--to {to} trains on --data or on own texts (--own-texts, --prompts), not on both")
    if to == "drafts" and lora:
        raise ConfigError("--lora has no effect on --to drafts, which trains the head alone; leave it out")
    if own and to == "lanes":
        lora = lora or RANK
    rate = 2e-3 if to == "drafts" or lora else 3e-4
    defaults = DEFAULTS | (OF_OWN_TEXTS[to] if own or to == "drafts" else {})
    if own and not dry_run:
        room = whole_number("data.window", (defaults | assignments(set))["data.window"])
        data = (str(_own_texts(found, own_texts or OWN_TEXTS, prompts, room, device, dtype)),)
    changes: dict[str, Any] = defaults | {
        "model": config.to_dict(), "init": str(model), "data.tokenizer": str(found.tokenizer_folder),
        "data.sources": data or ("stdlib",), "data.validation": validation, "train.steps": steps,
        "train.batch_size": batch_size, "train.learning_rate": rate, "train.lora": lora or 0, **assignments(set),
    }  # fmt: skip
    if dtype is not None:
        changes["train.dtype"] = dtype
    batch, window = (whole_number(name, changes[name]) for name in ("train.batch_size", "data.window"))
    if to != "drafts":  # which needs no backward pass through the network
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
    kind, _, routing = ("lanes" if to == "drafts" else to).partition("-")
    knows_mask = base.kind in ("bdlm", "mdlm") and kind in ("bdlm", "mdlm", "dcdm")
    if base.kind not in ("ar", kind) and not knows_mask:
        others = ", a BDLM or an MDLM" if kind in ("bdlm", "mdlm", "dcdm") else ""
        raise ConfigError(f"adapting to {to} starts from an AR model{others}, and this is of kind {base.kind!r}")
    asked = {"lanes": lanes, "drafts": drafts, "block_size": block_size}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if foreign := [name for name in given if name not in DEFAULTS_OF["drafts" if to == "drafts" else kind]]:
        option = f"--{foreign[0].replace('_', '-')} {given[foreign[0]]}"
        raise ConfigError(f"{option} has no effect on --to {to}; leave it out, or choose what it belongs to")
    if kind == "dcdm":
        given["routing"] = routing
    if to == "drafts":
        shape = {} if base.drafts else {"draft_width": DRAFT_WIDTH}
        if base.vocab_size > 2 * DRAFT_VOCAB:
            shape["draft_vocab"] = DRAFT_VOCAB
        given = {**DEFAULTS_OF["drafts"], **shape, **({"lanes": (1,)} if base.kind == "ar" else {}), **given}
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


def _own_texts(
    found: ModelSource, count: int, prompts: Path | None, window: int, device: DeviceOption, dtype: Dtype | None
) -> Path:
    """Texts by the model itself, as prepared data; drawn with its weights in bytes where that is fast."""
    import torch

    from dcdm.model.packing import can_pack
    from dcdm.progress import ConsoleProgress
    from dcdm.training.own_texts import PROMPTS, own_texts

    prompts = PROMPTS if prompts is None else prompts
    if not prompts.is_file():
        raise ConfigError(f"--prompts {prompts} is not a file; give one with a prompt in each line")
    place, kind = compute_on(device, dtype or "auto")
    model, weights = found.load(place, torch.int8 if can_pack(place) else kind), found.identity()["sha256"]
    with ConsoleProgress() as reporter:
        return own_texts(model, found.tokenizer, weights, count, prompts, window, reporter)


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
