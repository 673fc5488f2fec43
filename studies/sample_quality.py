"""How good and how varied generated texts are, without reference texts.

python studies/sample_quality.py TEXTS SCORER: texts are the field `text` of JSON lines, or parts between blank
lines; the scorer is a folder with a causal model of transformers. Prints the figures as JSON.

Generative perplexity alone rewards texts that repeat themselves; entropy, distinct n-grams and repetition stand
beside it for that reason.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcdm.config import ConfigError
from dcdm.evaluation.tasks import rows_of
from dcdm.likelihood.statistics import known, mean_and_stderr

DISTINCT = (1, 2, 3, 4)
REPEATED = 4


@dataclass(frozen=True)
class Quality:
    """Figures over all texts; tokens are the scorer's."""

    perplexity: float
    """exp of the mean negative log-likelihood per token under the scorer."""
    perplexity_stderr: float | None
    """Standard error over texts, by the delta method; None for one text."""
    bits_per_byte: float
    """The same likelihood by the bytes of the texts: it does not depend on how the scorer cuts them."""
    entropy: float
    """Nats: entropy of the token frequencies within a text, mean over texts."""
    distinct: dict[int, float]
    """Share of different n-grams among all n-grams of all texts, by n."""
    repetition: float
    """Share of 4-grams that occurred before in the same text."""
    texts: int
    tokens: int
    """Tokens that were scored."""
    left_out: int
    """Texts without a token to score."""


@dataclass(frozen=True)
class TextScorer:
    """A causal model of `transformers`, and how it is asked.

    Each text is scored alone: its tokens without special ones, after the scorer's BOS (its EOS, where it has no
    BOS), which is not itself scored. A scorer with neither starts at the second token. Texts longer than the
    scorer's window are scored in windows that carry half of the window over. Rows of one batch have equal lengths,
    so that there is no padding, and the batch size changes nothing.
    """

    model: Any
    tokenizer: Any
    window: int
    prefix: int | None
    device: torch.device

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> TextScorer:
        """A scorer from a local folder, AR models that this package exported among them; nothing is fetched."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from dcdm.hub import register

        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not a folder; give one that `save_pretrained` or `dcdm import` wrote"
            )
        register()
        try:
            local = {"local_files_only": True, "trust_remote_code": False}
            tokenizer = AutoTokenizer.from_pretrained(folder, **local)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **local)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder} holds no causal model with a tokenizer: {error}") from error
        prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        window = getattr(model.config, "max_position_embeddings", None) or 1024
        return cls(model.to(device).eval(), tokenizer, window, prefix, torch.device(device))

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @torch.no_grad()
    def nats(self, texts: Sequence[Sequence[int]], batch_size: int = 8) -> list[tuple[float, int]]:
        """Of each text its negative log-likelihood and the number of tokens that it covers."""
        rows: dict[int, list[tuple[int, int, list[int]]]] = defaultdict(list)  # by length
        for number, ids in enumerate(texts):
            for skipped, row_ids in self._windows(ids):
                rows[len(row_ids)].append((number, skipped, row_ids))
        totals = [(0.0, 0)] * len(texts)
        for same in rows.values():
            for at in range(0, len(same), batch_size):
                batch = same[at : at + batch_size]
                nll = self._token_nats(torch.tensor([piece for _, _, piece in batch], device=self.device))
                for (number, skipped, piece), row in zip(batch, nll, strict=True):
                    total, count = totals[number]
                    totals[number] = total + float(row[skipped - 1 :].sum()), count + len(piece) - skipped
        return totals

    def _windows(self, ids: Sequence[int]) -> list[tuple[int, list[int]]]:
        """(tokens not to be scored, row) for each window; every token but the first of all is scored once."""
        tokens = ([] if self.prefix is None else [self.prefix]) + list(ids)
        windows, done = [], 1
        while done < len(tokens):
            start = 0 if done == 1 else max(0, done - self.window // 2)
            row = tokens[start : start + self.window]
            windows.append((done - start, row))
            done = start + len(row)
        return windows

    def _token_nats(self, rows: Tensor) -> Tensor:
        logits = self.model(input_ids=rows).logits[:, :-1].double()
        return -logits.log_softmax(dim=-1).gather(-1, rows[:, 1:, None]).squeeze(-1)


def measure_quality(texts: Sequence[str], scorer: TextScorer, batch_size: int = 8) -> Quality:
    """Every figure of `texts`."""
    tokens = [scorer.tokens(text) for text in texts]
    scored = scorer.nats(tokens, batch_size)
    kept = [number for number, (_, count) in enumerate(scored) if count]
    if not kept:
        raise ConfigError("no text has a token that could be scored")
    pairs, tokens = [scored[number] for number in kept], [tokens[number] for number in kept]
    mean, stderr = mean_and_stderr(pairs)
    perplexity = math.exp(mean)
    size = sum(len(texts[number].encode()) for number in kept)
    bits_per_byte = math.fsum(nats for nats, _ in pairs) / math.log(2) / size
    return Quality(
        perplexity, known(perplexity * stderr), bits_per_byte, entropy(tokens),
        {n: distinct(tokens, n) for n in DISTINCT}, repetition(tokens), len(kept), sum(count for _, count in pairs),
        len(texts) - len(kept),
    )  # fmt: skip


def entropy(texts: Sequence[Sequence[int]]) -> float:
    """Nats: the entropy of the token frequencies within each text, mean over texts."""
    shares = ([count / len(ids) for count in Counter(ids).values()] for ids in texts)
    return -sum(share * math.log(share) for text in shares for share in text) / len(texts)


def distinct(texts: Sequence[Sequence[int]], n: int) -> float:
    """Different n-grams over all n-grams, over all texts; 0 where no text is long enough."""
    grams = [gram for ids in texts for gram in ngrams(ids, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(texts: Sequence[Sequence[int]], n: int = REPEATED) -> float:
    """The share of n-grams that occurred before in the same text, over all texts."""
    grams = [ngrams(ids, n) for ids in texts]
    total = sum(map(len, grams))
    return 1 - sum(len(set(one)) for one in grams) / total if total else 0.0


def ngrams(ids: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(ids[at : at + n]) for at in range(len(ids) - n + 1)]


def read_texts(path: Path) -> list[str]:
    """Texts of a file: the field `text` of a .jsonl file's rows, or what blank lines part in any other."""
    if path.suffix == ".jsonl":
        return [str(row["text"]) for row in rows_of(path, ("text",))]
    try:
        content = path.read_text(encoding="utf-8-sig")  # without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return [part for part in content.split("\n\n") if part.strip()]


if __name__ == "__main__":
    file, scorer = map(Path, sys.argv[1:])
    print(json.dumps(asdict(measure_quality(read_texts(file), TextScorer.load(scorer)))))
