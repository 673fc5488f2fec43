"""How the authors of diffusion models decode: literal loops over the logits of `transformers`.

All greedy. A loop that is written out here has the default settings of its family but for sizes, which are small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dcdm
import pretrained

pytest.importorskip("transformers")

MASK, VOCAB = 7, 30
Asked = Callable[[list[int]], Tensor]
"""ids that hold MASK → what predicts each position (L, V); MASK has no probability."""


def family(name: str, size: int | None, backbone: str) -> tuple[Any, dcdm.Model]:
    known = pretrained.PUBLISHED[name]
    source = pretrained.network(backbone, vocab_size=VOCAB, initializer_range=0.5)
    kind = "mdlm" if known.block_size is None else "bdlm"
    return source, pretrained.copied(source, kind, MASK, block_size=size, shift=known.shift, family=name)


def asking(source: Any, size: int | None, shift: bool) -> Asked:
    @torch.no_grad()
    def logits(ids: list[int]) -> Tensor:
        found = pretrained.literal_logits(source, torch.tensor([ids]), size, shift)[0]
        return found.masked_fill(torch.arange(VOCAB) == MASK, -torch.inf)

    return logits


def sure(logits: Tensor, ids: list[int], start: int, end: int) -> tuple[Tensor, Tensor]:
    """Confidence of what is masked between two places, −1 elsewhere, and the tokens."""
    confidence, token = logits.softmax(dim=-1).max(dim=-1)
    there = torch.tensor([one == MASK and start <= at < end for at, one in enumerate(ids)])
    return confidence.masked_fill(~there, -1.0), token


def fill(ids: list[int], where: Tensor, token: Tensor) -> None:
    for at in where.nonzero().flatten().tolist():
        ids[at] = int(token[at])


def low_confidence_dynamic(ask: Asked, ids: list[int], size: int, threshold: float, least: int) -> None:
    """SDAR: block by block from position 0; all above the threshold, if these are enough, else the surest."""
    for start in range(0, len(ids), size):
        end = start + size
        while MASK in ids[start:end]:
            confidence, token = sure(ask(ids[:end]), ids[:end], start, end)
            high = confidence > threshold
            if high.sum() < least:
                high = torch.zeros_like(high)
                high[confidence.topk(min(least, int((confidence >= 0).sum()))).indices] = True
            fill(ids, high, token)


def semi_autoregressive(ask: Asked, ids: list[int], size: int, steps: int) -> None:
    """LLaDA: everything is seen; blocks behind the prompt, each in equal steps, the surest first."""
    for start in range(ids.index(MASK), len(ids), size):
        base, more = divmod(min(size, len(ids) - start), steps)
        for step in range(steps):
            confidence, token = sure(ask(ids), ids, start, start + size)
            chosen = torch.zeros_like(confidence, dtype=torch.bool)
            chosen[confidence.topk(base + (step < more)).indices] = True
            fill(ids, chosen, token)


def entropy_order(ask: Asked, ids: list[int], steps: int) -> None:
    """Dream: time from 1 to 1e-3; of what is masked the part 1 − s/t, lowest entropies first, the rest at last."""
    time = torch.linspace(1, 1e-3, steps + 1)
    for step in range(steps):
        masked = torch.tensor(ids) == MASK
        logits = ask(ids)
        left = masked.sum()
        number = int(left if step == steps - 1 else left * (1 - time[step + 1] / time[step]))
        p = logits.softmax(dim=-1)
        certainty = (p * (p + 1e-10).log()).sum(dim=-1).masked_fill(~masked, -torch.inf)
        chosen = torch.zeros_like(masked)
        chosen[certainty.topk(number).indices] = True
        fill(ids, chosen, logits.argmax(dim=-1))


def sub_blocks(ask: Asked, ids: list[int], size: int, part: int, threshold: float) -> None:
    """Fast-dLLM v2: a block's first token by the last one before it, then its parts, those above or the surest."""
    for start in range(ids.index(MASK) // size * size, len(ids), size):
        end = start + size
        if ids[start] == MASK:
            ids[start] = int(ask(ids[: start + 1])[start].argmax())
        for first in range(start, end, part):
            while MASK in ids[first : first + part]:
                confidence, token = sure(ask(ids[:end]), ids[:end], first, first + part)
                chosen = confidence > threshold
                chosen[confidence.argmax()] = True
                fill(ids, chosen, token)


@torch.no_grad()
def left_padded(source: Any, text: list[int], size: int) -> None:
    """dLLM: PAD before the prompt up to whole blocks, seen by nobody; positions count what is real."""
    padding = -text.index(MASK) % size
    ids = [0] * padding + text
    for start in range(ids.index(MASK), len(ids), size):
        end = start + size
        seen = pretrained.block_causal(end, size)
        seen[..., :padding] = -1e9
        positions = (torch.arange(end) - padding).clamp(min=0)[None]
        for _ in range(size):
            logits = source(torch.tensor([ids[:end]]), attention_mask=seen, position_ids=positions).logits[0]
            logits[:, MASK] = -torch.inf
            confidence, token = sure(logits, ids[:end], start, end)
            ids[int(confidence.argmax())] = int(token[confidence.argmax()])
    text[:] = ids[padding:]


CASES: dict[str, tuple[str, str, int | None, dict[str, str], Callable[..., None]]] = {
    "SDAR": ("sdar", "Qwen3", 4, {}, lambda s, ask, x: low_confidence_dynamic(ask, x, 4, 0.85, 1)),
    "SDAR, two at least": (
        "sdar", "Qwen3", 4, {"commit": "threshold:0.3+count:2"},
        lambda s, ask, x: low_confidence_dynamic(ask, x, 4, 0.3, 2),
    ),
    "DreamReasoner": (
        "dream-reasoner", "Qwen3", 4, {}, lambda s, ask, x: low_confidence_dynamic(ask, x, 4, 0.85, 1)
    ),
    "Stable-DiffCoder": (
        "stable-diffcoder", "Llama", 4, {}, lambda s, ask, x: low_confidence_dynamic(ask, x, 4, 0.95, 1)
    ),
    "LLaDA": ("llada", "Llama", None, {}, lambda s, ask, x: semi_autoregressive(ask, x, 99, 8)),
    "LLaDA, blocks": (
        "llada", "Llama", None, {"routing": "blocks:6", "commit": "steps:4"},
        lambda s, ask, x: semi_autoregressive(ask, x, 6, 4),
    ),
    "iLLaDA": ("illada", "Llama", None, {}, lambda s, ask, x: semi_autoregressive(ask, x, 99, 8)),
    "Tiny-A2D mdlm": (
        "tiny-a2d-mdlm", "Qwen2", None, {"routing": "blocks:4"}, lambda s, ask, x: semi_autoregressive(ask, x, 4, 4)
    ),
    "Tiny-A2D bd3lm": ("tiny-a2d-bd3lm", "Qwen3", 4, {}, lambda s, ask, x: left_padded(s, x, 4)),
    "Dream": (
        "dream", "Qwen2", None, {"commit": "entropy-steps:12"}, lambda s, ask, x: entropy_order(ask, x, 12)
    ),
    "Dream, few steps": (
        "dream", "Qwen2", None, {"commit": "entropy-steps:5"}, lambda s, ask, x: entropy_order(ask, x, 5)
    ),
    "Fast-dLLM v2": (
        "fast-dllm-v2", "Qwen2", 4, {"routing": "sub-blocks:2", "commit": "threshold:0.3"},
        lambda s, ask, x: sub_blocks(ask, x, 4, 2, 0.3),
    ),
}  # fmt: skip
PROMPTS = [[11, 12, 9, 20, 13, 10], [21, 8], [9, 15, 22, 23, 24, 26, 27, 28]]


@pytest.mark.parametrize("case", CASES)
def test_greedy_texts_equal_a_literal_loop_over_the_logits_of_transformers(case: str) -> None:
    name, backbone, size, decoder, loop = CASES[case]
    source, model = family(name, size, backbone)
    ask = asking(source, size, model.config.shift)
    # blocks from position 0: texts end with a whole one, as their authors' do
    new = [8 + (-len(prompt) % 4 if size and "tiny" not in name else 0) for prompt in PROMPTS]
    texts = [prompt + [MASK] * more for prompt, more in zip(PROMPTS, new, strict=True)]
    for ids in texts:
        loop(source, ask, ids)
        assert MASK not in ids
    prompts = [[model.config.bos_id, *prompt] for prompt in PROMPTS]
    for cache in ("auto", "none"):
        made = dcdm.generate(model, prompts, max_new_tokens=new, temperature=0, cache=cache, **decoder)  # type: ignore[arg-type]
        assert made.completions == [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]
