"""Likelihoods of sequences under a model: exact values, valid bounds, and the paper's surrogate.

B sequences   L positions   S samples   C noise groups: chunks or blocks, or the whole sequence
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from dcdm.config import ConfigError
from dcdm.decoding import routes
from dcdm.decoding.commits import View, commit_policy
from dcdm.decoding.loop import walk
from dcdm.decoding.predictors import predictor_of, resolve_cache
from dcdm.decoding.routes import AdaBlock, check_routing, router_of
from dcdm.decoding.sampling import Sampling
from dcdm.keys import Key
from dcdm.model.head import token_nll
from dcdm.model.transformer import Model, Sets

Estimator = Literal["exact", "bound", "surrogate", "sequential", "trajectory"]

LABELS: dict[str, str] = {
    "exact": "exact negative log-likelihood",
    "bound": "upper bound (NELBO)",
    "surrogate": "surrogate (not a bound)",
    "sequential": "upper bound (NELBO, sequential protocol)",
    "trajectory": "exact negative log-likelihood of the decoder",
}

MOST_SUBSETS = 4096  # enumerating more mask sets than this per sequence is refused


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
    """(B,) network passes of the decoder for `trajectory`, of the estimate otherwise."""
    estimator: str
    samples: int | str
    seed: int

    @property
    def label(self) -> str:
        return LABELS[self.estimator]

    @property
    def is_bound(self) -> bool:
        return self.estimator != "surrogate"

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
    if model.config.kind == "ar":
        return "exact"
    return "sequential" if model.config.routes_from_noise else "bound"


@torch.no_grad()
def score(
    model: Model,
    tokens: Tensor,
    estimator: Estimator | Literal["auto"] = "auto",
    samples: int | Literal["all"] = 16,
    seed: int = 0,
    *,
    prompt: Tensor | None = None,
    commit: str = "chunk",
    routing: str = "auto",
    adablock: AdaBlock | None = None,
    sampling: Sampling | None = None,
    cache: str = "auto",
    index: Tensor | None = None,
    batch_size: int = 16,
) -> Score:
    """Score `tokens` (B, L), each row starting with BOS, PAD ignored, positions in `prompt` given.

    `estimator` "auto" takes the kind's valid one. `samples` "all" sums over every mask set instead of
    drawing some (short chunks only). `commit`, `routing`, `sampling` and `cache` choose the decoder of
    `trajectory` as in `dcdm.generate`: "chunk" is one forward per chunk. `index` (B,) numbers the sequences and
    keys their randomness, so that neither the batch size nor a split over processes changes a score.
    """
    name = default_estimator(model) if estimator == "auto" else estimator
    check(model, name, samples)
    decoder = Decoder(commit, routing, adablock, sampling or Sampling(), cache)
    decoder.check(model)
    if index is None:
        index = torch.arange(len(tokens))
    run = Scorer(model, samples, Key(seed).fold(name), decoder)
    parts = []
    for at in range(0, len(tokens), batch_size):
        rows = slice(at, at + batch_size)
        given = None if prompt is None else prompt[rows]
        parts.append(getattr(run, name)(tokens[rows], model.sets(tokens[rows], given), index[rows]))
    nats, stderr, count, forwards = (torch.cat([getattr(p, f) for p in parts]) for f in _Part.__annotations__)
    return Score(nats, stderr, count, forwards, name, samples, seed)


@dataclass(frozen=True)
class Decoder:
    """The decoder whose likelihood `trajectory` is."""

    commit: str = "chunk"
    routing: str = "auto"
    adablock: AdaBlock | None = None
    sampling: Sampling = field(default_factory=Sampling)
    cache: str = "auto"

    def check(self, model: Model) -> None:
        policy = commit_policy(self.commit)
        if policy.random:
            raise ConfigError(
                f"commit={self.commit!r} fills in a random order, so its likelihood is a sum over all orders; "
                "estimator='bound' bounds it, and policies that look at probabilities have a trajectory"
            )
        if self.sampling.greedy:
            raise ConfigError("temperature=0 is greedy: such a decoder has no likelihood")
        check_routing(model.config, self.routing)
        resolve_cache(model.config, self.cache)

    @property
    def one_pass_per_chunk(self) -> bool:
        return self.commit == "chunk" and self.routing == "auto" and self.sampling == Sampling()


def check(model: Model, estimator: str, samples: int | str = 16) -> None:
    """Refuse an estimator that does not fit the model's kind, and a number of samples that none takes."""
    kind = model.config.kind
    described = "DCDM with the paper's routing" if model.config.routes_from_noise else kind.upper()
    fits = {
        "exact": kind == "ar",
        "bound": kind != "ar" and not model.config.routes_from_noise,
        "surrogate": model.config.routes_from_noise,
        "sequential": model.config.routes_from_noise,
        "trajectory": True,
    }
    if estimator not in fits:
        raise ValueError(f"unknown estimator {estimator!r}; choose one of auto, {', '.join(get_args(Estimator))}")
    if not fits[estimator]:
        good = ", ".join(name for name, ok in fits.items() if ok)
        raise ValueError(f"estimator {estimator!r} does not fit {described}; choose one of {good}")
    if samples != "all" and (not isinstance(samples, int) or samples < 1):
        raise ValueError(f"samples={samples!r} must be a whole number of at least 1, or 'all'")


@dataclass(frozen=True)
class _Part:
    nats: Tensor
    stderr: Tensor
    tokens: Tensor
    forwards: Tensor


@dataclass(frozen=True)
class Scorer:
    """The estimators; each takes tokens (B, L), their sets and the sequences' numbers."""

    model: Model
    samples: int | Literal["all"]
    key: Key
    decoder: Decoder

    def exact(self, tokens: Tensor, sets: Sets, index: Tensor) -> _Part:
        states = self.model.encode(tokens).states[:, :-1]
        nll = _scattered(self.model, states, tokens[:, 1:], sets.free[:, 1:])
        return _certain(nll.sum(dim=-1), sets.free[:, 1:].sum(dim=-1), 1)

    def bound(self, tokens: Tensor, sets: Sets, index: Tensor) -> _Part:
        ids = self.model.partition(tokens, sets.visible, index).ids
        nll_of = self._dual_stream(tokens, sets, ids)
        nats, variance, passes = self._expected(nll_of, ids, self.model.config.num_groups(tokens.shape[1]), index)
        return _Part(nats, variance.sqrt(), sets.free.sum(dim=-1).cpu(), torch.full_like(index, passes))

    def surrogate(self, tokens: Tensor, sets: Sets, index: Tensor) -> _Part:
        nll_of = self._dual_stream(tokens, sets, None)
        nats, variance, passes = self._expected(nll_of, sets.free.long(), 1, index)
        return _Part(nats, variance.sqrt(), sets.free.sum(dim=-1).cpu(), torch.full_like(index, passes))

    def sequential(self, tokens: Tensor, sets: Sets, index: Tensor) -> _Part:
        """Ids from revealed tokens, frozen at each chunk's start; inside a chunk the masked diffusion bound."""
        model, mask_id = self.model, self.model.config.mask_id
        router, route = router_of(model, sets), routes.start(sets)
        revealed = sets.visible
        nats, variance = torch.zeros(2, len(tokens), dtype=torch.float64)
        forwards, chunks = torch.zeros_like(index), 0
        while bool((sets.real & ~revealed).any()):
            route = router.next(tokens.masked_fill(~revealed, mask_id), revealed, route)

            def nll_of(masked: Tensor, ids: Tensor = route.ids, shown: Tensor = revealed | route.active) -> Tensor:
                z = tokens.masked_fill(masked | ~shown, mask_id)
                return _scattered(model, model.denoise(z, ids), tokens, masked)

            chunks += 1
            key = self.key.fold("chunk", chunks)
            more, spread, passes = self._expected(nll_of, route.active.long(), 1, index, key)
            nats, variance = nats + more, variance + spread
            forwards += passes * route.active.any(dim=-1).cpu()
            revealed = revealed | route.active
        return _Part(nats, variance.sqrt(), sets.free.sum(dim=-1).cpu(), forwards)

    def trajectory(self, tokens: Tensor, sets: Sets, index: Tensor) -> _Part:
        model, decoder = self.model, self.decoder
        if decoder.one_pass_per_chunk and model.config.kind != "ar" and not model.config.routes_from_noise:
            return self._trajectory_in_one_pass(tokens, sets, index)
        total = torch.zeros(len(tokens), dtype=torch.float64)

        def reveal(view: View, fill: Tensor) -> Tensor:
            true = tokens.gather(1, view.position)
            known = true.clamp(max=view.log_p.shape[-1] - 1)[..., None]
            total.sub_(view.log_p.gather(-1, known).squeeze(-1).masked_fill(~fill, 0).double().sum(dim=-1).cpu())
            return true

        _, counts = walk(
            tokens.masked_fill(sets.free, model.config.mask_id),
            sets,
            router_of(model, sets, index, decoder.routing, decoder.adablock),
            predictor_of(model, sets, decoder.cache),
            commit_policy(decoder.commit),
            reveal,
            sampling=decoder.sampling,
        )
        return _certain(total, sets.free.sum(dim=-1), counts.forwards)

    def _trajectory_in_one_pass(self, tokens: Tensor, sets: Sets, index: Tensor) -> _Part:
        """Every chunk fully masked given the clean earlier ones: what the walk sees, chunk by chunk."""
        ids = self.model.partition(tokens, sets.visible, index).ids
        nll = self._dual_stream(tokens, sets, ids)(sets.free)
        return _certain(nll.sum(dim=-1), sets.free.sum(dim=-1), ids.amax(dim=-1).clamp(min=0).cpu())

    def _dual_stream(self, tokens: Tensor, sets: Sets, ids: Tensor | None) -> Callable[[Tensor], Tensor]:
        """masked (B, L) → −log p of the masked tokens (B, L), by the training pass."""

        def nll_of(masked: Tensor) -> Tensor:
            states = self.model.encode(tokens, masked, prompt=sets.visible, chunk_ids=ids).states
            return _scattered(self.model, states, tokens, masked)

        return nll_of

    def _expected(
        self, nll_of: Callable[[Tensor], Tensor], groups: Tensor, num_groups: int, index: Tensor,
        key: Key | None = None,
    ) -> tuple[Tensor, Tensor, int]:  # fmt: skip
        """E[(|g|/n) Σ_masked nll] summed over groups: value (B,), variance of the estimate (B,), passes."""
        if self.samples == "all":
            draws: Iterator[Draw] = all_subsets(groups, num_groups)
        else:
            draws = stratified_subsets(key or self.key, index, groups, num_groups, self.samples)
        terms = []
        for draw in draws:
            nll = nll_of(draw.masked.to(groups.device)).cpu()
            per_group = torch.zeros(len(nll), num_groups + 1, dtype=torch.float64)
            per_group.scatter_add_(1, groups.cpu().clamp(min=0), nll)
            terms.append(per_group[:, 1:] * draw.weight)
        if self.samples == "all":
            nothing = torch.zeros(len(groups), dtype=torch.float64)
            return sum((term.sum(dim=-1) for term in terms), nothing), nothing, len(terms)
        f_sbc = torch.stack(terms)
        return f_sbc.mean(dim=0).sum(dim=-1), _stratified_variance(f_sbc), len(terms)


def _certain(nats: Tensor, tokens: Tensor, forwards: Tensor | int) -> _Part:
    nats = nats.double().cpu()
    passes = forwards if isinstance(forwards, Tensor) else torch.full(nats.shape, forwards)
    return _Part(nats, torch.zeros_like(nats), tokens.cpu(), passes)


def _scattered(model: Model, states: Tensor, tokens: Tensor, where: Tensor) -> Tensor:
    """−log p of `tokens` where `where`, 0 elsewhere: (B, L) float64."""
    nll = torch.zeros(where.shape, dtype=torch.float64, device=where.device)
    nll[where] = token_nll(states[where], model.head_weight(), tokens[where]).double()
    return nll


@dataclass(frozen=True)
class Draw:
    """Masked positions (B, L), and the weight (B, C) of each group's summed −log p."""

    masked: Tensor
    weight: Tensor


def group_sizes(groups: Tensor, num_groups: int) -> Tensor:
    """(B, C) members of groups 1…C."""
    counts = torch.zeros(len(groups), num_groups + 1, dtype=torch.long, device=groups.device)
    counts.scatter_add_(1, groups.clamp(min=0), torch.ones_like(groups))
    return counts[:, 1:]


def rank_in_group(groups: Tensor, priority: Tensor) -> Tensor:
    """0-based rank of each position within its group by ascending `priority`: (B, L)."""
    by_priority = priority.argsort(dim=-1)
    order = by_priority.gather(-1, groups.gather(-1, by_priority).argsort(dim=-1, stable=True))
    place = torch.arange(groups.shape[-1], device=groups.device).expand_as(groups)
    position = torch.empty_like(order).scatter_(-1, order, place)
    smaller = (groups[:, :, None] > groups[:, None, :]).sum(dim=-1)
    return position - smaller


def stratified_subsets(key: Key, index: Tensor, groups: Tensor, num_groups: int, samples: int) -> Iterator[Draw]:
    """Per sample and group a size n, uniform on 1…|g|, and a uniform subset of that size, weight |g|/n.

    Over the samples each group visits every stratum of the sizes once; within a sample the groups lie in
    different strata. Sequence i's draws follow from (key, i) alone, and a position's from its rank among those
    that may be masked, so that sequences of one number share their noise whatever stands before it.
    """
    groups = groups.cpu()
    sizes = group_sizes(groups, num_groups)
    place = (groups >= 1).cumsum(dim=-1).sub(1).clamp(min=0)
    within = torch.zeros(len(groups), samples, num_groups, dtype=torch.float64)
    for row, number in enumerate(index.tolist()):
        used = max(1, int(groups[row].max()))
        order = [key.fold("spread", number, s).permutation(used) for s in range(samples)]
        within[row, :, :used] = (torch.stack(order) + key.fold("size", number).uniform(samples, used)) / used
    for s in range(samples):
        stratum = (s + torch.arange(num_groups)) % samples
        within_s = within.gather(1, stratum.expand(len(groups), 1, -1)).squeeze(1)
        n = ((stratum + within_s) / samples * sizes).long() + 1
        n = torch.minimum(n, sizes)
        rank = rank_in_group(groups, key.fold("subset", s).rows(index, groups.shape[1]).gather(1, place))
        quota = torch.cat([torch.zeros_like(n[:, :1]), n], dim=1).gather(1, groups.clamp(min=0))
        yield Draw((rank < quota) & (groups >= 1), sizes / n.clamp(min=1))


def _stratified_variance(f_sbc: Tensor) -> Tensor:
    """Variance (B,) of the mean over samples, from differences of neighbouring strata within each group.

    Plain sample variance would count the differences between strata, which stratification removes.
    """
    samples = len(f_sbc)
    if samples == 1:
        return torch.full(f_sbc.shape[1:2], math.nan, dtype=f_sbc.dtype)
    group = torch.arange(f_sbc.shape[-1])
    stratum = torch.arange(samples)[:, None]
    ordered = f_sbc[(stratum - group) % samples, :, group].movedim(-1, 1)  # (S, B, C) by stratum
    steps = ordered.diff(dim=0).square().sum(dim=0)
    return (steps / (2 * samples * (samples - 1))).sum(dim=-1)


def all_subsets(groups: Tensor, num_groups: int) -> Iterator[Draw]:
    """Every non-empty subset of every group, weighted by its probability times |g|/n: (n−1)!(|g|−n)!/|g|!."""
    groups = groups.cpu()
    sizes = group_sizes(groups, num_groups)
    total = 2 ** int(sizes.max())
    if total > MOST_SUBSETS:
        raise ValueError(
            f"samples='all' would enumerate {total:,} mask sets per sequence (at most {MOST_SUBSETS:,}); "
            "give a number of samples instead"
        )
    rank = rank_in_group(groups, torch.arange(groups.shape[1]).expand_as(groups).double())
    for subset in range(1, total):
        n = subset.bit_count()
        applies = subset < 2**sizes
        weight = torch.exp(
            torch.lgamma(torch.tensor(float(n)).double())
            + torch.lgamma((sizes - n + 1).clamp(min=1).double())
            - torch.lgamma(sizes.double() + 1)
        )
        inside = torch.cat([torch.zeros_like(applies[:, :1]), applies], dim=1).gather(1, groups.clamp(min=0))
        yield Draw((((subset >> rank) & 1) == 1) & inside & (groups >= 1), torch.where(applies, weight, 0.0))
