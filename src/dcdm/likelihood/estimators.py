"""Likelihoods of sequences under a model: exact values, valid bounds, and the paper's surrogate.

B sequences   L positions   S samples   C noise groups: chunks or blocks, or the whole sequence
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dcdm.config import ConfigError, ModelConfig
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding import routes
from dcdm.decoding.caching import predictor_of
from dcdm.decoding.commits import Sampling, View, commit_policy
from dcdm.decoding.config import DecodingConfig
from dcdm.decoding.loop import fill_canvas
from dcdm.decoding.routes import router_of
from dcdm.keys import Key
from dcdm.likelihood import subsets
from dcdm.model.products import token_nll
from dcdm.model.transformer import Model, PositionMasks

Estimator = Literal["exact", "bound", "surrogate", "sequential", "trajectory", "drafted"]

LABELS: dict[str, str] = {
    "exact": "exact negative log-likelihood",
    "bound": "upper bound (NELBO)",
    "surrogate": "surrogate (not a bound)",
    "sequential": "upper bound (NELBO, sequential protocol)",
    "trajectory": "exact negative log-likelihood of the decoder",
    "drafted": "upper bound over acceptance patterns (exact with one lane)",
}
DRAWN = ("bound", "surrogate", "sequential", "drafted")
"""Those that draw samples."""


@dataclass(frozen=True)
class Score:
    """Negative log-likelihoods in nats, one per sequence."""

    nats: Tensor
    """(B,) float64."""
    stderr: Tensor
    """(B,) Monte-Carlo standard error; 0 where nothing was sampled, NaN for a single sample."""
    tokens: Tensor
    """(B,) predicted tokens; BOS, prompt and padding do not count."""
    forwards: Tensor
    """(B,) network passes of the decoder for `trajectory` and, on average, `drafted`; of the estimate otherwise."""
    by_position: Tensor
    """(B, L) float64: what each token adds to `nats`; 0 at BOS, prompt and padding."""
    estimator: str
    samples: int | str
    seed: int

    @property
    def label(self) -> str:
        return LABELS[self.estimator]

    @property
    def per_token(self) -> float:
        """Mean nats per token over all sequences."""
        return float(self.nats.sum() / self.tokens.sum().clamp(min=1))

    @property
    def per_token_stderr(self) -> float:
        """Monte-Carlo standard error of `per_token`."""
        return float(self.stderr.square().sum().sqrt() / self.tokens.sum().clamp(min=1))

    def __str__(self) -> str:
        drawn = f", {self.samples} samples, seed {self.seed}" if self.stderr.any() else ""
        return (
            f"{self.per_token:.4f} ± {self.per_token_stderr:.4f} nats/token, {self.label} "
            f"({len(self.nats)} sequences, {int(self.tokens.sum())} tokens{drawn})"
        )


def default_estimator(model: Model) -> Estimator:
    """The valid estimator of the model's kind."""
    return estimators_of(model.config)[0]


@torch.no_grad()
def score(
    model: Model,
    tokens: Tensor | str | Sequence[str],
    estimator: Estimator | Literal["auto"] = "auto",
    samples: int | Literal["all"] = 16,
    seed: int = 0,
    *,
    tokenizer: Tokenizer | None = None,
    prompt: Tensor | None = None,
    index: Tensor | None = None,
    batch_size: int = 16,
    **options: Any,
) -> Score:
    """Score `tokens` (B, L), each row starting with BOS, PAD ignored, positions in `prompt` given.

    With a `tokenizer`, `tokens` may be a text or several, each a row of its own.

    `estimator` "auto" takes a valid one for the model's kind. `samples` "all" sums over every mask set instead of
    drawing some (short chunks only). Further keywords are fields of `DecodingConfig` and choose the decoder of
    `trajectory` as in `dcdm.generate`; `commit` is "chunk", one forward pass per chunk, unless it is given. `lanes`
    is the number of lanes, for models of that kind, and `drafts` how many tokens of each are drafted ahead for
    `drafted`, which walks `samples` acceptance patterns; all others are about lanes that wait for each other.
    `index` (B,) numbers the sequences and keys their randomness, so that neither the batch size nor a split over
    processes changes a score.
    """
    name = default_estimator(model) if estimator == "auto" else estimator
    check(model.config, name, samples)
    decoder = DecodingConfig.of(**{"commit": "chunk"} | options)
    if name == "drafted" and decoder.cache == "none":
        raise ConfigError("estimator='drafted' needs the cache; leave cache='none' out")
    if name != "drafted" and decoder.drafts:
        raise ConfigError(
            f"drafts={decoder.drafts}: estimator={name!r} is about lanes that wait for each other; take "
            "estimator='drafted', or leave drafts out"
        )
    decoder = decoder.resolve(model.config)
    decoder.check_likelihood()
    if not isinstance(tokens, Tensor):
        tokens = _rows(model.config, tokens, tokenizer)
    _check_texts(model.config, tokens, prompt, batch_size)
    if index is None:
        index = torch.arange(len(tokens))
    run = scorer_of(model, samples, Key(seed).fold(name), decoder)
    parts = []
    for at in range(0, len(tokens), batch_size):
        rows = slice(at, at + batch_size)
        given = None if prompt is None else prompt[rows]
        parts.append(
            getattr(run, name)(  # each estimator is a method of that name
                tokens[rows], model.position_masks(tokens[rows], given), index[rows]
            )
        )
    by_position, stderr, count, forwards = (torch.cat([getattr(p, f) for p in parts]) for f in _FIELDS)
    return Score(by_position.sum(dim=-1), stderr, count, forwards, by_position, name, samples, seed)


def _rows(config: ModelConfig, texts: str | Sequence[str], tokenizer: Tokenizer | None) -> Tensor:
    """Texts as rows of tokens: BOS first, PAD behind the shorter ones."""
    texts = [texts] if isinstance(texts, str) else list(texts)
    if tokenizer is None or not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigError("score takes tokens, (B, L) whole numbers, or a text or several with tokenizer=…")
    rows = [torch.tensor([config.bos_id, *tokenizer.encode(text)]) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=config.pad_id)


def _check_texts(config: ModelConfig, tokens: Tensor, prompt: Tensor | None, batch_size: int) -> None:
    """Refuse what could not be scored, before the model meets it."""
    if tokens.ndim != 2 or not len(tokens) or tokens.dtype != torch.long:
        raise ConfigError(
            f"tokens must be int64 of the shape (batch, length), at least one row; got {tokens.dtype} of "
            f"{tuple(tokens.shape)}"
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= config.vocab_size:
        raise ConfigError(f"tokens hold ids outside the vocabulary of {config.vocab_size}")
    if (tokens == config.mask_id).any():
        raise ConfigError(f"tokens hold MASK ({config.mask_id}), which has no likelihood; give whole texts")
    if config.hidden_token is not None and (tokens == config.hidden_token).any():
        raise ConfigError(f"tokens hold {config.hidden_token}, the imported mask, which is never predicted")
    if prompt is not None and (prompt.shape != tokens.shape or prompt.dtype != torch.bool):
        raise ConfigError(
            f"prompt must be bool of the shape of tokens, {tuple(tokens.shape)}; got {prompt.dtype} of "
            f"{tuple(prompt.shape)}"
        )
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1")


def estimators_of(config: ModelConfig) -> list[Estimator]:
    """The estimators that fit a model, the valid one of its kind first."""
    if config.kind == "ar" or config.predicts_from_left:
        return ["exact", "trajectory", "drafted"] if config.drafts else ["exact", "trajectory"]
    return ["sequential", "surrogate", "trajectory"] if config.routes_from_noise else ["bound", "trajectory"]


def check(config: ModelConfig, estimator: str, samples: int | str = 16) -> None:
    """Refuse an estimator that does not fit the model's kind, and a number of samples that none takes."""
    described = "DCDM with the paper's routing" if config.routes_from_noise else config.kind.upper()
    fits = estimators_of(config)
    if estimator not in get_args(Estimator):
        raise ConfigError(f"unknown estimator {estimator!r}; choose one of auto, {', '.join(get_args(Estimator))}")
    if estimator not in fits:
        raise ConfigError(f"estimator {estimator!r} does not fit {described}; choose one of {', '.join(fits)}")
    if samples == "all" and estimator == "drafted":
        raise ConfigError("samples='all' does not fit 'drafted', which draws acceptance patterns; give a number")
    if samples != "all" and (not isinstance(samples, int) or samples < 1):
        raise ConfigError(f"samples={samples!r} must be a whole number of at least 1, or 'all'")


@dataclass(frozen=True)
class Part:
    """What a batch adds to a `Score`, whose fields these are."""

    by_position: Tensor
    stderr: Tensor
    tokens: Tensor
    forwards: Tensor


_FIELDS = ("by_position", "stderr", "tokens", "forwards")


@dataclass(frozen=True)
class Scorer:
    """The estimators; each takes tokens (B, L), their position masks and the sequences' numbers."""

    model: Model
    samples: int | Literal["all"]
    key: Key
    decoder: DecodingConfig
    """The decoder whose likelihood `trajectory` is."""

    def exact(self, tokens: Tensor, positions: PositionMasks, index: Tensor) -> Part:
        """AR: position ℓ predicts ℓ+1."""
        states = self.model.encode(tokens).states[:, :-1]
        nll = scattered(self.model, states, tokens[:, 1:], positions.free[:, 1:])
        return certain(F.pad(nll, (1, 0)), positions.free[:, 1:].sum(dim=-1), 1)

    def bound(self, tokens: Tensor, positions: PositionMasks, index: Tensor) -> Part:
        """The NELBO where chunks do not depend on noise: mask sets of each chunk, given the clean earlier ones."""
        ids = self.model.partition(tokens, positions.visible, index).ids
        nll_of = self._dual_stream(tokens, positions, ids)
        groups, most = ids.masked_fill(positions.visible, 0), self.model.config.num_groups(tokens.shape[1])
        cost, variance, passes = self._expected(nll_of, groups, most, index)
        return Part(cost, variance.sqrt(), positions.free.sum(dim=-1).cpu(), passes)

    def surrogate(self, tokens: Tensor, positions: PositionMasks, index: Tensor) -> Part:
        """The paper's number. Not a bound: its chunks are formed with visible tokens of later chunks in view, and
        those are in turn predicted given the earlier ones, so information is counted twice."""
        nll_of = self._dual_stream(tokens, positions, None)
        cost, variance, passes = self._expected(nll_of, positions.free.long(), 1, index)
        return Part(cost, variance.sqrt(), positions.free.sum(dim=-1).cpu(), passes)

    def sequential(self, tokens: Tensor, positions: PositionMasks, index: Tensor) -> Part:
        """Ids from revealed tokens, frozen at each chunk's start; inside a chunk the masked diffusion bound."""
        model, mask_id = self.model, self.model.config.mask_id
        router = router_of(model, positions, index, self.decoder.routing)
        route = routes.start(positions)
        revealed = positions.visible
        cost = torch.zeros(tokens.shape, dtype=torch.float64)
        variance = torch.zeros(len(tokens), dtype=torch.float64)
        forwards, chunks = torch.zeros_like(index), 0
        while bool((positions.real & ~revealed).any()):
            asking = (positions.real & ~revealed).any(dim=-1)
            z = tokens.masked_fill(~revealed, mask_id)
            route = router.next(z, revealed, route, asking).where(asking, route)
            active = route.active & ~revealed  # none in a row that is full

            def nll_of(masked: Tensor, ids: Tensor = route.ids, shown: Tensor = revealed | active) -> Tensor:
                nll = torch.zeros(masked.shape, dtype=torch.float64, device=masked.device)
                rows = masked.any(dim=-1)  # the others are full, or had fewer sets to draw
                if bool(rows.any()):
                    z = tokens.masked_fill(masked | ~shown, mask_id)[rows]
                    nll[rows] = scattered(model, model.denoise(z, ids[rows]), tokens[rows], masked[rows])
                return nll

            chunks += 1
            key = self.key.fold("chunk", chunks)
            more, spread, passes = self._expected(nll_of, active.long(), 1, index, key)
            cost, variance = cost + more, variance + spread
            forwards += passes
            revealed = revealed | active
        return Part(cost, variance.sqrt(), positions.free.sum(dim=-1).cpu(), forwards)

    def trajectory(self, tokens: Tensor, positions: PositionMasks, index: Tensor) -> Part:
        """The decoder's own loop over the true tokens: −log p of each when it is filled."""
        model, decoder = self.model, self.decoder
        by_mask = "bound" in estimators_of(model.config)
        if decoder.one_pass_per_chunk and by_mask:
            return self._trajectory_in_one_pass(tokens, positions, index)
        along = AlongText(tokens, decoder.sampling)
        _, counts = fill_canvas(
            tokens.masked_fill(positions.free, model.config.mask_id),
            positions,
            router_of(model, positions, index, decoder.routing, decoder.adablock, decoder.lanes),
            predictor_of(model, positions, decoder.cache),
            commit_policy(decoder.commit),
            along.reveal,
            order=self.key.fold("order").rows(index, tokens.shape[1]),
        )
        return certain(along.nats, positions.free.sum(dim=-1), counts.forwards)

    def _trajectory_in_one_pass(self, tokens: Tensor, positions: PositionMasks, index: Tensor) -> Part:
        """Every chunk fully masked given the clean earlier ones: what the filling sees, chunk by chunk."""
        ids = self.model.partition(tokens, positions.visible, index).ids
        nll = self._dual_stream(tokens, positions, ids)(positions.free)
        groups, most = ids.masked_fill(positions.visible, 0), self.model.config.num_groups(tokens.shape[1])
        return certain(nll, positions.free.sum(dim=-1), (subsets.group_sizes(groups, most) > 0).sum(dim=-1).cpu())

    def _dual_stream(
        self, tokens: Tensor, positions: PositionMasks, ids: Tensor | None
    ) -> Callable[[Tensor], Tensor]:
        """masked (B, L) → −log p of the masked tokens (B, L), by the training pass."""

        def nll_of(masked: Tensor) -> Tensor:
            states = self.model.encode(tokens, masked, prompt=positions.visible, chunk_ids=ids).states
            return scattered(self.model, states, tokens, masked)

        return nll_of

    def _expected(
        self, nll_of: Callable[[Tensor], Tensor], groups: Tensor, num_groups: int, index: Tensor,
        key: Key | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """E[(|g|/n) Σ_masked nll], by position (B, L); the variance of the estimate (B,); passes (B,)."""
        device, groups = groups.device, groups.cpu()
        if self.samples == "all":
            cost = torch.zeros(groups.shape, dtype=torch.float64)
            for draw in subsets.all_subsets(groups, num_groups):
                cost += nll_of(draw.masked.to(device)).cpu() * subsets.spread(draw.weight, groups)
            passes = 2 ** subsets.group_sizes(groups, num_groups).amax(dim=-1) - 1
            return cost, torch.zeros(len(groups), dtype=torch.float64), passes
        draws = list(subsets.sampled_subsets(key or self.key, index, groups, num_groups, self.samples))
        nlls = [nll_of(draw.masked.to(device)).cpu() for draw in draws]
        sizes = subsets.group_sizes(groups, num_groups)
        cost, variance = subsets.combine(draws, nlls, groups, self.samples)
        return cost, variance, subsets.passes_needed(sizes, self.samples)


class AlongText:
    """Fills a canvas with the text itself."""

    def __init__(self, tokens: Tensor, sampling: Sampling) -> None:
        self.tokens, self.sampling = tokens, sampling
        self.nats = torch.zeros(tokens.shape, dtype=torch.float64)
        """(B, L): −log p of each token."""
        self.forward = torch.zeros(len(tokens), dtype=torch.long)
        """(B,): forward passes so far."""
        self.came = torch.zeros(tokens.shape, dtype=torch.long)
        """(B, L): the forward pass that brought each token, from 1; 0 for given ones."""

    def reveal(self, view: View, fill: Tensor) -> Tensor:
        true = self.tokens.gather(1, view.position)

        def nats(log_p: Tensor, row: Tensor, at: Tensor) -> Tensor:
            return -self.sampling.log_p(log_p).gather(-1, true[row, at][:, None]).squeeze(-1)

        nll = view.predicted.measure(nats, fill, 0.0, torch.float64)
        row, position = fill.nonzero()[:, 0].cpu(), view.position[fill].cpu()
        self.forward += fill.any(dim=-1).cpu()
        self.nats[row, position], self.came[row, position] = nll[fill].cpu(), self.forward[row]
        return true


@singledispatch
def scorer_of(model: Model, samples: int | Literal["all"], key: Key, decoder: DecodingConfig) -> Scorer:
    """The estimators of the model's class."""
    return Scorer(model, samples, key, decoder)


def certain(by_position: Tensor, tokens: Tensor, forwards: Tensor | int) -> Part:
    nats = by_position.double().cpu()
    passes = forwards if isinstance(forwards, Tensor) else torch.full(nats.shape[:1], forwards)
    return Part(nats, torch.zeros_like(nats[:, 0]), tokens.cpu(), passes)


def scattered(model: Model, states: Tensor, tokens: Tensor, where: Tensor) -> Tensor:
    """−log p of `tokens` where `where`, 0 elsewhere: (B, L) float64."""
    nll = torch.zeros(where.shape, dtype=torch.float64, device=where.device)
    nll[where] = token_nll(states[where], tokens[where], model.token_logits, model.config.vocab_size).double()
    return nll
