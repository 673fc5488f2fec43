"""What stands in the chunks of a text: kinds of tokens, places, neighbours, and the tokens that mark a chunk."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from dcdm.data.tokenizers import Tokenizer
from dcdm.evaluation.windows import Batch
from dcdm.model.transformer import Model
from dcdm.viewing.pictures import chunk_ids

CLASSES = ("word", "inside a word", "function word", "number", "punctuation", "line end")
FUNCTION = frozenset((
    "the", "of", "and", "to", "in", "a", "is", "was", "for", "on", "as", "by", "with", "at", "from", "that", "it",
    "his", "an", "were", "are", "be", "which", "had", "he", "has", "its", "or", "this",
))  # fmt: skip
PLACES = 16  # equal stretches of a window
MARKS = 6  # tokens named for each chunk
LEAST = 12  # times that such a token occurs


def contents_of(model: Model, tokenizer: Tokenizer, batches: Iterable[Batch]) -> dict[str, Any]:
    """Counts over windows; under the paper's routing, with half of the tokens masked."""
    chunks = model.config.num_chunks
    assert chunks is not None
    kinds, places, tokens, own = Counter(), Counter(), Counter(), Counter()  # type: ignore[var-annotated]
    together = pairs = 0
    for batch in batches:
        ids = chunk_ids(model, batch.tokens, batch.prompt, batch.index)
        assert ids is not None
        free = (batch.place >= 0).tolist()
        for row, (chunk, text) in enumerate(zip(ids.tolist(), batch.tokens.tolist(), strict=True)):
            names = classes(tokenizer.pieces(text))
            for at, (c, token, name) in enumerate(zip(chunk, text, names, strict=True)):
                if not free[row][at] or c < 1:
                    continue
                kinds[c, name] += 1
                places[c, at * PLACES // len(text)] += 1
                tokens[c, token] += 1
                own[token] += 1
                if at + 1 < len(text) and free[row][at + 1]:
                    pairs += 1
                    together += chunk[at + 1] == c
    return {
        "classes": list(CLASSES),
        "counts": [[kinds[c, name] for name in CLASSES] for c in range(1, chunks + 1)],
        "neighbours_together": round(together / max(1, pairs), 4),
        "bits_about_class": round(information(kinds), 4),
        "bits_about_place": round(information(places), 4),
        "marks": [_marks(c, tokens, own, tokenizer) for c in range(1, chunks + 1)],
    }


def classes(pieces: list[bytes]) -> list[str]:
    """The class of every token, given the bytes it stands for; a leading space begins a word."""
    found = []
    for piece in pieces:
        text = piece.decode("utf-8", "replace")
        word = text.strip()
        if "\n" in text:
            found.append("line end")
        elif re.fullmatch(r"[\d.,]*\d[\d.,]*", word):
            found.append("number")
        elif not any(letter.isalnum() for letter in word):
            found.append("punctuation")
        elif word.lower() in FUNCTION and text != word:
            found.append("function word")
        else:
            found.append("word" if text[:1].isspace() else "inside a word")
    return found


def information(counts: Counter[tuple[int, Any]]) -> float:
    """Bits that the first part of a pair and the second tell of each other."""
    total = sum(counts.values())
    left, right = Counter[Any](), Counter[Any]()
    for (a, b), count in counts.items():
        left[a] += count
        right[b] += count
    parts = (n / total * math.log2(n * total / (left[a] * right[b])) for (a, b), n in sorted(counts.items()) if n)
    return math.fsum(parts)


def _marks(
    chunk: int, tokens: Counter[tuple[int, int]], own: Counter[int], tokenizer: Tokenizer
) -> list[tuple[str, float]]:
    """Tokens that stand in this chunk most, with the share of their occurrences that do."""
    shares = [(count / own[token], count, token) for (c, token), count in tokens.items()
              if c == chunk and own[token] >= LEAST]  # fmt: skip
    best = sorted(shares, key=lambda one: (-one[0], -one[1], one[2]))[:MARKS]
    return [(tokenizer.decode([token]), round(share, 3)) for share, _, token in best]
