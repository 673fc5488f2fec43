"""`dcdm data prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from dcdm.commands.options import print_json
from dcdm.config import harmless

EXAMPLES = (
    "dcdm data prepare stdlib --tokenizer bytes --out prepared",
    "dcdm data prepare 'texts/*.jsonl.gz' --tokenizer bpe:8000 --out prepared",
)


def prepare_text(
    sources: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE...")],
    out: Path,
    tokenizer: str = "bytes",
    validation: tuple[str, ...] = (),
    validation_share: float = 0.05,
    documents: Literal["file", "lines", "blank-lines"] = "file",
    field: str = "text",
    prompt_field: str | None = None,
    response_field: str | None = None,
    separator: str = "\n",
    messages_field: str | None = None,
    turns: Literal["last", "each"] = "last",
    max_bad: int = 0,
    workers: int | None = None,
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
        validation_share: Share of the documents held out by hash.
        documents: What is one document in a .txt file.
        field: Field of a row that holds its text.
        prompt_field: Fine-tuning: field of the prompt.
        response_field: Fine-tuning: field of the response.
        separator: Fine-tuning: what is between prompt and response.
        messages_field: Fine-tuning on chats: field of the messages.
        turns: Fine-tuning on chats: learn the last answer, or each (one example for each).
        max_bad: Unreadable lines or rows to leave out before giving up.
        workers: Shards written at one time; every core tokenises whatever their number (default: 2).
        overwrite: Replace a folder that was prepared differently.
        json: Print the manifest as JSON instead of a summary.
    """
    from dcdm.config import DataConfig
    from dcdm.data.prepare import prepare
    from dcdm.progress import ConsoleProgress

    settings = DataConfig(
        documents=documents, field=field, prompt_field=prompt_field, response_field=response_field,
        separator=separator, messages_field=messages_field, turns=turns, validation_share=validation_share,
        max_bad=max_bad,
    )  # fmt: skip
    with ConsoleProgress() as reporter:
        prepared = prepare(
            sources, tokenizer, out, validation=validation, settings=settings, workers=workers,
            overwrite=overwrite, reporter=reporter,
        )  # fmt: skip
    if json:
        print_json(prepared.manifest)
    else:
        print(harmless(f"{prepared.folder}: vocabulary of {prepared.vocab_size:,}\n{prepared.summary()}"))
