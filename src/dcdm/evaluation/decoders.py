"""Text under a decoder: its exact likelihood, whether the most probable text is the true one, and its chunks.

B rows   L positions
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dcdm.decoding.commits import View, commit_policy
from dcdm.decoding.config import DecodingConfig
from dcdm.decoding.loop import fill_canvas
from dcdm.decoding.predictors import predictor_of
from dcdm.decoding.routes import router_of
from dcdm.evaluation.windows import WindowBatch
from dcdm.keys import Key
from dcdm.likelihood.estimators import Scorer
from dcdm.likelihood.statistics import mean_and_stderr
from dcdm.model.transformer import Model, Sets

# --- held-out windows --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecoderScore:
    """Windows under one decoder: −log p, counted tokens and forwards of each, in the order of the batches."""

    nats: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)

    @property
    def bits_per_token(self) -> tuple[float, float]:
        """With the standard error over windows."""
        mean, stderr = mean_and_stderr(zip(self.nats, self.tokens, strict=True))
        return mean / math.log(2), stderr / math.log(2)

    @property
    def forwards_per_window(self) -> float:
        return sum(self.forwards) / len(self.forwards)


@torch.no_grad()
def score_under_decoder(
    model: Model, batches: Iterable[WindowBatch], decoder: DecodingConfig, seed: int = 0
) -> DecoderScore:
    """Walk the decoder along the true text.

    This gives the exact likelihood of a decoder whose order follows from probabilities. One of random order is
    walked along one order drawn for each window, one with drafts along one acceptance pattern: on average a bound
    of −log of the sum over them.
    """
    device, result = model.embed_tokens.weight.device, DecoderScore()
    scorer = Scorer(model, 1, Key(seed).fold("order"), decoder)
    for batch in batches:
        tokens, prompt = batch.tokens.to(device), batch.prompt.to(device)
        walk = scorer.drafted if decoder.drafts else scorer.trajectory
        part = walk(tokens, model.sets(tokens, prompt), batch.index)
        result.nats.extend(part.by_position.sum(dim=-1).tolist())
        result.tokens.extend(part.tokens.tolist())
        result.forwards.extend(part.forwards.tolist())
    return result


# --- continuations of a given context --------------------------------------------------------------------------


@dataclass(frozen=True)
class Continuation:
    """One sequence to score: the first `given` tokens are visible; `index` keys the noise of the rest."""

    tokens: list[int]
    given: int
    index: int

    @property
    def free(self) -> int:
        return len(self.tokens) - self.given


def padded(rows: Sequence[Continuation], pad_id: int, device: torch.device | None) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (B, L), the mask of given ones (B, L), and the rows' numbers (B,)."""
    width = max(len(row.tokens) for row in rows)
    tokens = torch.full((len(rows), width), pad_id)
    for number, row in enumerate(rows):
        tokens[number, : len(row.tokens)] = torch.tensor(row.tokens)
    given = torch.tensor([row.given for row in rows])
    prompt = torch.arange(width) < given[:, None]
    return tokens.to(device), prompt.to(device), torch.tensor([row.index for row in rows])


def is_greedy(model: Model, tokens: Tensor, prompt: Tensor, index: Tensor, lanes: int | None = None) -> Tensor:
    """(B,) whether the most probable tokens are the true ones wherever `prompt` does not give them.

    AR is asked position by position, a diffusion model chunk by chunk: every chunk is filled in one forward,
    given the earlier ones.
    """
    sets = model.sets(tokens, prompt)
    if model.config.routes_from_noise:
        return _greedy_walk(model, tokens, sets, index)
    with torch.no_grad():
        if model.config.kind == "ar":
            states, truth, where = model.encode(tokens).states[:, :-1], tokens[:, 1:], sets.free[:, 1:]
        else:
            ids = model.partition(tokens, sets.visible, index, lanes).ids
            states = model.encode(tokens, sets.free, prompt=sets.visible, chunk_ids=ids).states
            truth, where = tokens, sets.free
        right = torch.ones_like(where)
        right[where] = model.token_logits(states[where]).argmax(dim=-1) == truth[where]
    return right.all(dim=-1)


def _greedy_walk(model: Model, tokens: Tensor, sets: Sets, index: Tensor) -> Tensor:
    right = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)

    def reveal(view: View, fill: Tensor) -> Tensor:
        true = tokens.gather(1, view.position)
        right.logical_and_(((view.predicted.best[1] == true) | ~fill).all(dim=-1))
        return true

    z = tokens.masked_fill(sets.free, model.config.mask_id)
    router, predictor = router_of(model, sets, index), predictor_of(model, sets, "auto")
    fill_canvas(z, sets, router, predictor, commit_policy("chunk"), reveal)
    return right


# --- chunks ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def chunk_ids(
    model: Model, tokens: Tensor, prompt: Tensor | None = None, index: Tensor | None = None
) -> Tensor | None:
    """Chunk ids (B, L) of clean tokens; the paper's routing shows a fixed half-masked draw. None for AR."""
    if model.config.kind == "ar":
        return None
    if not model.config.routes_from_noise:
        return model.partition(tokens, prompt, index).ids
    masked = (Key(0).uniform(*tokens.shape) < 0.5).to(tokens.device) & model.sets(tokens, prompt).free
    return model.encode(tokens, masked, prompt=prompt).chunk_ids
