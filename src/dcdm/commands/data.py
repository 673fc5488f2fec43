"""`dcdm data prepare`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import arg

from dcdm.commands.options import print_json
from dcdm.config import DataConfig, harmless

EXAMPLES = (
    "dcdm data prepare stdlib --tokenizer bytes --out prepared",
    "dcdm data prepare 'texts/*.jsonl.gz' --tokenizer bpe:8000 --out prepared",
)

Unset = Annotated[str | None, arg(help_behavior_hint="")]


@dataclass(frozen=True)
class Reading(DataConfig):
    """Flags for the settings of a preparation; the help says nothing of what is not set."""

    prompt_field: Unset = None
    """Fine-tuning: field of the prompt."""
    response_field: Unset = None
    """Fine-tuning: field of the response."""
    messages_field: Unset = None
    """Fine-tuning on chats: field that holds one, a list of {"role": …, "content": …}."""


PLAIN = Reading()


def prepare_text(
    sources: Annotated[list[str], tyro.conf.Positional, arg(metavar="SOURCE...")],
    out: Path,
    tokenizer: str = "bytes",
    validation: tuple[str, ...] = (),
    reading: Annotated[Reading, arg(name="")] = PLAIN,
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Tokenise text once into a folder of checked, memory-mapped shards.

    Run again, it finds its work done, or resumes where it was interrupted.

    Args:
        sources: stdlib, stdlib-code, stdlib-library, addresses (English), files, folders, patterns (.txt, .txt.xz,
            .jsonl, .jsonl.gz, .parquet, .arrow), or a hub data set as owner/name:split.
        out: Folder to write.
        tokenizer: bytes, bpe:N (learned from the corpus), a folder, or a hub name.
        validation: Sources of the validation split; without them a share is held out.
        overwrite: Replace a folder that was prepared differently.
        json: Print the manifest as JSON instead of a summary.
    """
    from dcdm.data.prepare import prepare
    from dcdm.progress import ConsoleProgress

    with ConsoleProgress() as reporter:
        prepared = prepare(
            sources, tokenizer, out, validation=validation, settings=reading, overwrite=overwrite,
            reporter=reporter,
        )  # fmt: skip
    if json:
        print_json(prepared.manifest)
    else:
        print(harmless(f"{prepared.folder}: vocabulary of {prepared.vocab_size:,}\n{prepared.summary()}"))
