"""Small corpora and folders that data tests share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from dcdm.data.tokenizers import Tokenizer, train_bpe
from dcdm.progress import Reporter

TEXT = "the a of tree house red ran quickly über 東京 and 12 7 said, “no” x=1; (yes) don't"
WORDS = TEXT.split()


class Heard(Reporter):
    """Remembers what a preparation says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def prose(sentences: int, seed: int = 0) -> str:
    """Lines of words in a fixed order, blank lines among them."""
    lines, state = [], seed + 1
    for number in range(sentences):
        picked = []
        for _ in range(3 + number % 9):
            state = (state * 1103515245 + 12345) % 2**31
            picked.append(WORDS[(state >> 8) % len(WORDS)])
        lines.append(" ".join(picked) + ("\n" if number % 7 == 6 else ""))
    return "\n".join(lines) + "\n"


def metaspace_tokenizer(more: Sequence[str] = ("a",)) -> Tokenizer:
    """As Llama's: words hold the space before them, and a text's first one is left out."""
    words = ["<unk>", *more, "\u2581", "t", "h", "e", "\u2581t", "he", "\u2581the", "the"]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("t", "he")]
    numbered = {word: at for at, word in enumerate(words)}
    base = Backend(models.BPE(numbered, merges, byte_fallback=True, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    base.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer.over(base)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def documents(count: int) -> list[str]:
    return [f"{number}: {prose(2 + number % 5, number)}" for number in range(count)]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its contents."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def gpt2_style_folder(folder: Path, size: int = 310) -> Path:
    """vocab.json and merges.txt with `<|endoftext|>` as the last token, as GPT-2's tokenizer comes."""
    model = json.loads(train_bpe([prose(400)], size).backend.to_str())["model"]
    vocab = {token: number for token, number in model["vocab"].items() if number < size - 4}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({**vocab, "<|endoftext|>": len(vocab)}), encoding="utf-8")
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    return folder
