"""What a draft head is worth on a base: tokens per forward pass, and that it changes nothing.

    python tools/check_drafts.py BASE ADAPTER tools/held_out_prompts.txt --length 96

Draws a text behind every prompt, at temperature 0 and at 1; greedy texts are compared with those of the base token
for token, and the likelihood of drawn texts with drafts, in one lane, with the exact one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import tyro
from tyro.conf import Positional

import dcdm
from dcdm.io.load import load_model
from dcdm.model.packing import can_pack
from dcdm.training.own_texts import encoded_prompts

KINDS = ("chat answers", "prose")
SCORED = 8  # texts


def check(
    base: Annotated[Path, Positional], adapter: Annotated[Path, Positional], prompts: Annotated[Path, Positional],
    length: int = 96, drafts: tuple[int, ...] = (3, 5), seed: int = 0, int8: bool = False,
) -> None:  # fmt: skip
    """Print figures as JSON.

    Args:
        base: The base model.
        adapter: The draft head.
        prompts: A prompt in each line; one that ends in … is the beginning of a text, others are messages.
        length: Most tokens of a text.
        drafts: Numbers of draft tokens.
        int8: Compute with weights in bytes.
    """
    dtype = torch.int8 if int8 and can_pack(torch.device("cpu")) else torch.float32
    model, tokenizer = load_model(base, adapter=adapter, dtype=dtype)
    lines = [line for line in prompts.read_text().splitlines() if line.strip()]
    given = encoded_prompts(lines, tokenizer)
    is_prose = [line.endswith("…") for line in lines]
    options = {"max_new_tokens": length, "lanes": 1, "eos_id": tokenizer.eos_id, "seed": seed, "batch_size": 25}
    rows, texts = [], []
    for temperature in (0.0, 1.0):
        plain = (
            dcdm.generate(model, given, drafts=0, temperature=temperature, **options) if not temperature else None
        )
        for ahead in drafts:
            found = dcdm.generate(model, given, drafts=ahead, temperature=temperature, **options)
            for number, kind in enumerate(KINDS):
                mine = [row for row, prose in enumerate(is_prose) if prose == bool(number)]
                tokens = sum(len(found.completions[row]) + (found.finished[row] == "eos") for row in mine)
                forwards = sum(int(found.forwards[row]) for row in mine)
                row = {"text": kind, "temperature": temperature, "drafts": ahead,
                       "tokens per forward pass": round(tokens / forwards, 2)}  # fmt: skip
                if plain is not None:
                    same = [plain.completions[at] == found.completions[at] for at in mine]
                    row["texts equal to the base's"] = f"{sum(same)} of {len(same)}"
                rows.append(row)
                print(json.dumps(row), flush=True)
            texts = [[*prompt, *ids] for prompt, ids in zip(given, found.completions, strict=True)][-SCORED:]
    width = max(map(len, texts)) + 1
    config = model.config
    tokens = torch.tensor([[config.bos_id, *ids] + [config.pad_id] * (width - 1 - len(ids)) for ids in texts])
    exact = dcdm.score(model, tokens, "exact", lanes=1).nats
    drafted = dcdm.score(model, tokens, "drafted", samples=1, lanes=1, drafts=drafts[0])
    apart = float(((exact - drafted.nats).abs() / exact).max())
    print(json.dumps({"exact nats": round(float(exact.sum()), 3), "drafted nats differ by at most": apart}))


if __name__ == "__main__":
    tyro.cli(check, description=__doc__)
