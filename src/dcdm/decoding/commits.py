"""What a forward pass predicts, which of the asked positions are then filled, and with which tokens.

With a vocabulary of 50,000, the distributions of a whole canvas take gigabytes. Policies need a few numbers of
each, draws need those of the filled positions alone; so the states are kept, and distributions made from them.

A policy is a pure function of predicted distributions (and, for the random orders, of noise drawn beforehand),
never of sampled values: that is what makes the likelihood of a decoder computable.

    B batch   A asked positions   N asked positions of all rows   V the tokens that can be predicted

To add one: write a `Rule` and enter it in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dcdm.config import ConfigError, whole_number
from dcdm.model.products import SLICE_BYTES, at_least_fp32

OUTSIDE = 2**40  # behind every position
_BELOW_ONE = 1 - 1e-12
OfPositions = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log-probabilities (n, V), their rows (n,), their places among the asked (n,)) → (n,)."""


class Distributions:
    """Log-probabilities (V,) at the True places of `valid` (B, A), by the model itself: before any temperature."""

    def __init__(self, valid: Tensor, states: Tensor, log_p_of: Callable[[Tensor], Tensor], size: int) -> None:
        """`states` (N, …) in the order of `valid`, from which `log_p_of` makes (N, V); V is `size`."""
        self.valid, self._states, self._log_p_of = valid, states, log_p_of
        self._row, self._at = valid.nonzero(as_tuple=True)
        self._slice = max(1, SLICE_BYTES // (4 * size))

    @classmethod
    def of(cls, log_p: Tensor, valid: Tensor) -> Distributions:
        """Those of a tensor (B, A, V)."""
        return cls(valid, log_p[valid], lambda held: held, log_p.shape[-1])

    @cached_property
    def _held(self) -> Tensor | None:
        """All of them, if they are few."""
        return self._log_p_of(self._states) if len(self._states) <= self._slice else None

    def measure(
        self, what: OfPositions, where: Tensor, otherwise: float, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A number for each place in `where` (B, A), (B, A); `otherwise` at the others."""
        chosen = (where & self.valid)[self._row, self._at].nonzero().squeeze(-1)
        parts = []
        for part in chosen.split(self._slice):
            log_p = self._held
            if log_p is None:
                log_p = self._log_p_of(self._states[part])
            elif len(part) < len(log_p):
                log_p = log_p[part]
            parts.append(what(log_p, self._row[part], self._at[part]))
        values = torch.cat(parts)
        whole = torch.full(where.shape, otherwise, dtype=dtype or values.dtype, device=where.device)
        whole[self._row[chosen], self._at[chosen]] = values.to(whole.dtype)
        return whole

    def states_at(self, row: Tensor, at: Tensor) -> Tensor:
        """(n, …): the states that predict these places."""
        number = torch.full(self.valid.shape, -1, device=self.valid.device)
        number[self._row, self._at] = torch.arange(len(self._row), device=number.device)
        return self._states[number[row, at]]

    @cached_property
    def best(self) -> tuple[Tensor, Tensor]:
        """The log-probability and the id of the most probable token, each (B, A); −inf and 0 at fillers."""
        tokens = torch.zeros(self.valid.shape, dtype=torch.long, device=self.valid.device)

        def most(log_p: Tensor, row: Tensor, at: Tensor) -> Tensor:
            value, tokens[row, at] = log_p.max(dim=-1)
            return value

        return self.measure(most, self.valid, -torch.inf), tokens

    @cached_property
    def entropy(self) -> Tensor:
        """(B, A) in nats; inf at fillers."""

        def of(log_p: Tensor, row: Tensor, at: Tensor) -> Tensor:
            return (-log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(dim=-1)

        return self.measure(of, self.valid, torch.inf)

    def log_p(self, tokens: Tensor, where: Tensor) -> Tensor:
        """(B, A): the log-probability of `tokens` (B, A) at the places in `where`; 0 elsewhere."""

        def of(log_p: Tensor, row: Tensor, at: Tensor) -> Tensor:
            return log_p.gather(-1, tokens[row, at][:, None]).squeeze(-1)

        return self.measure(of, where, 0.0)


@dataclass(frozen=True)
class View:
    """What a commit policy may look at."""

    predicted: Distributions
    """The model's own distributions, before temperature and truncation."""
    candidates: Tensor
    """(B, A) bool: the masked positions of the active chunk; the rest are fillers."""
    position: Tensor
    """(B, A)."""
    step: Tensor
    """(B,): forward passes that the active chunk has had before this one."""
    order: Tensor
    """(B, A): uniform noise, one number per position for the whole canvas."""

    def confidence(self) -> Tensor:
        """(B, A): the probability of the best token; −1 for fillers."""
        return self.predicted.best[0].exp().masked_fill(~self.candidates, -1.0)

    def entropy(self) -> Tensor:
        """(B, A) in nats; inf for fillers."""
        return self.predicted.entropy.masked_fill(~self.candidates, torch.inf)


Rule = Callable[[View], Tensor]
"""View → (B, A) bool: at least one candidate of every row that has any, sooner or later."""


@dataclass(frozen=True)
class Commit:
    name: str
    rule: Rule
    random: bool = False
    """Its order depends on noise: such a decoder's likelihood is a sum over orders."""

    def __call__(self, view: View) -> Tensor:
        return self.rule(view) & view.candidates

    def __str__(self) -> str:
        return self.name


def whole_chunk(view: View) -> Tensor:
    """One forward pass per chunk: fill all of it."""
    return view.candidates


def best(score: Tensor) -> Tensor:
    """The largest score of each row, the first among equals: (B, A) bool."""
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, score.argmax(dim=-1, keepdim=True), True)


def most_confident(view: View) -> Tensor:
    """One position per forward pass: the one whose best token is most probable."""
    return best(view.confidence())


def most_confident_ones(count: int) -> Rule:
    """So many positions per forward pass: those whose best token is most probable."""
    return lambda view: _rank(view.confidence()) < count


def entropy_steps(steps: int) -> Rule:
    """Time runs from 1 to nearly 0 in equal steps, and a step from t to s fills the whole part of 1 − s/t of what
    is open, lowest entropies first, the last one the rest. A step may fill nothing.
    """
    time = torch.linspace(1, 1e-3, steps + 1)

    def rule(view: View) -> Tensor:
        at, left = view.step.clamp(max=steps - 1).cpu(), view.candidates.sum(dim=-1)
        share = torch.where(at == steps - 1, 1.0, 1 - time[at + 1] / time[at]).to(left.device)
        return _rank(-view.entropy()) < (left * share).long()[:, None]

    return rule


def fixed_steps(steps: int) -> Rule:
    """The chunk in `steps` forward passes, each filling an equal share of what is left, most confident first."""

    def rule(view: View) -> Tensor:
        left = view.candidates.sum(dim=-1)
        share = (steps - view.step).clamp(min=1)
        return _rank(view.confidence()) < ((left + share - 1) // share)[:, None]

    return rule


def dilated(steps: int) -> Rule:
    """The chunk in `steps` forward passes, each filling every `steps`-th of its positions: first, second, … ones.

    Positions that are filled together lie apart, and all but the first have their left neighbour before them.
    """

    def rule(view: View) -> Tensor:
        left = (steps - view.step).clamp(min=1)  # of `left` neighbours that are still open, this pass fills one
        rank = _rank(-view.position.masked_fill(~view.candidates, OUTSIDE).double())
        return rank % left[:, None] == 0

    return rule


def threshold(least: float) -> Rule:
    """Every position whose best token has at least this probability; failing that, the best one."""

    def rule(view: View) -> Tensor:
        confidence = view.confidence()
        return (confidence >= least) | best(confidence)

    return rule


def entropy(most: float) -> Rule:
    """Every position with at most this entropy in nats; failing that, the lowest."""

    def rule(view: View) -> Tensor:
        value = view.entropy()
        return (value <= most) | best(-value)

    return rule


def factor(limit: float) -> Rule:
    """The n most confident ones, n the largest with (n+1)·(1 − confidence of the n-th) < limit; at least one."""

    def rule(view: View) -> Tensor:
        confidence = view.confidence()
        rank = _rank(confidence)
        passes = ((rank + 2) * (1 - confidence) < limit) & view.candidates
        count = torch.where(passes, rank + 1, 0).amax(dim=-1).clamp(min=1)
        return rank < count[:, None]

    return rule


def ancestral(steps: int) -> Rule:
    """The diffusion's own reverse process in `steps` equal intervals of time per chunk.

    A masked token's moment is uniform over the intervals, whatever the others do; intervals in which nothing
    happens need no forward pass.
    """

    def rule(view: View) -> Tensor:
        moment = (view.order * steps).long().masked_fill(~view.candidates, steps)
        return moment == moment.amin(dim=-1, keepdim=True)

    return rule


def first_hitting(view: View) -> Tensor:
    """The reverse process in continuous time: one position per forward pass, in random order."""
    return best(-view.order.masked_fill(~view.candidates, 2.0))


def _rank(score: Tensor) -> Tensor:
    """0 for the largest of each row; the first among equals comes first."""
    order = score.argsort(dim=-1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(-1, order, torch.arange(score.shape[-1]).to(order).expand_as(order))


@dataclass(frozen=True)
class Policy:
    make: Callable[[float], Rule]
    about: str
    """Which positions of the active chunk a forward pass fills, in one sentence."""
    default: float | None = None
    """Its number, if it takes one."""
    least: float = 0.0
    most: float = float("inf")
    whole: bool = False
    random: bool = False


_MOST_STEPS = 1e6

POLICIES: dict[str, Policy] = {
    "chunk": Policy(lambda _: whole_chunk, "All positions of the chunk in one forward pass."),
    "position": Policy(lambda _: most_confident, "The most confident position, one per forward pass."),
    "count": Policy(
        lambda n: most_confident_ones(int(n)), "So many positions per forward pass, the most confident ones.", 2,
        least=1, most=_MOST_STEPS, whole=True,
    ),
    "steps": Policy(
        lambda n: fixed_steps(int(n)), "The chunk in this many forwards, most confident positions first.", 4,
        least=1, most=_MOST_STEPS, whole=True,
    ),
    "dilated": Policy(
        lambda n: dilated(int(n)), "The chunk in this many forwards, each of positions that far apart.", 16,
        least=1, most=_MOST_STEPS, whole=True,
    ),
    "threshold": Policy(
        threshold, "Positions whose best token has at least this probability; at least the best one.", 0.9, most=1.0
    ),
    "entropy": Policy(entropy, "Positions with at most this entropy in nats; at least the lowest.", 0.5),
    "entropy-steps": Policy(
        lambda n: entropy_steps(int(n)), "The chunk in this many steps of time, lowest entropies first.",
        64, least=1, most=_MOST_STEPS, whole=True,
    ),
    "factor": Policy(
        factor, "The n most confident positions, as long as (n+1)(1 − confidence) stays below this number.", 1.0
    ),
    "ancestral": Policy(
        lambda n: ancestral(int(n)), "The reverse diffusion in this many steps of time per chunk, in random order.",
        16, least=1, most=_MOST_STEPS, whole=True, random=True,
    ),
    "first-hitting": Policy(
        lambda _: first_hitting, "The reverse diffusion in continuous time: one position per forward pass.",
        random=True,
    ),
}  # fmt: skip


def commit_policy(text: str) -> Commit:
    """A policy by its name, with its number behind a colon: "chunk", "threshold:0.9", "steps:4", …; several with a
    plus between them fill what any of them would."""
    if "+" in text:
        parts = [commit_policy(part) for part in text.split("+")]

        def either(view: View) -> Tensor:
            return torch.stack([part(view) for part in parts]).any(dim=0)

        return Commit("+".join(map(str, parts)), either, any(part.random for part in parts))
    name, colon, number = text.partition(":")
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"commit={text!r} is not known; choose one of {', '.join(POLICIES)}")
    if policy.default is None:
        if colon:
            raise ConfigError(f"commit={text!r}: {name} takes no number")
        return Commit(name, policy.make(0.0), policy.random)
    try:
        value = float(number if colon else policy.default)
    except ValueError:
        raise ConfigError(f"commit={text!r}: write it as {name}:{policy.default:g}") from None
    if not policy.least <= value <= policy.most or (policy.whole and not value.is_integer()):
        kind = "a whole number" if policy.whole else "a number"
        limits = f"of at least {policy.least:g}" + (f", at most {policy.most:g}" if policy.most < 1e9 else "")
        raise ConfigError(f"commit={text!r}: {name} takes {kind} {limits}")
    return Commit(f"{name}:{value!r}".removesuffix(".0"), policy.make(value), policy.random)


def mixed_commit(policies: Sequence[Commit]) -> Commit:
    """Each row (B,) by a policy of its own."""
    distinct = {policy.name: policy for policy in policies}
    if len(distinct) == 1:
        return policies[0]

    def rule(view: View) -> Tensor:
        fill = torch.zeros_like(view.candidates)
        for name, policy in distinct.items():
            mine = torch.tensor([each.name == name for each in policies], device=fill.device)
            fill |= policy(view) & mine[:, None]
        return fill

    return Commit("|".join(distinct), rule, any(policy.random for policy in policies))


# --- tokens: temperature, top-k, top-p, and draws without bias ------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from; temperature 0 takes the most probable one."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} must be at least 0; 0 takes the most probable token")
        if self.top_k is not None and whole_number("top_k", self.top_k) < 1:
            raise ConfigError(f"top_k={self.top_k} must be at least 1; leave it out to keep every token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must lie in (0, 1]; leave it out to keep every token")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def log_p(self, logits: Tensor) -> Tensor:
        """Log-probabilities (…, V) of the tempered, truncated distribution; plain ones if greedy.

        `logits` may be log-probabilities as well.
        """
        logits = logits.to(at_least_fp32(logits))
        if self.greedy:
            return logits.log_softmax(dim=-1)
        if self.temperature != 1:
            logits = (logits - logits.amax(dim=-1, keepdim=True)).double() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            kept = logits.argsort(dim=-1, descending=True, stable=True)[..., : self.top_k]
            logits = torch.full_like(logits, -torch.inf).scatter_(-1, kept, logits.gather(-1, kept))
        if self.top_p is not None and self.top_p < 1:
            logits = logits.masked_fill(~_nucleus(logits, self.top_p), -torch.inf)
        return logits.log_softmax(dim=-1)

    def draw(self, log_p: Tensor, uniform: Tensor) -> Tensor:
        """One token of each distribution (N, V), by the uniform number (N,) that belongs to it.

        The cumulative sums are taken in float64: float32 would give rare tokens wrong odds.
        """
        if self.greedy:
            return log_p.argmax(dim=-1)
        cumulative = log_p.double().exp().cumsum(dim=-1)
        target = uniform.to(cumulative).clamp(max=_BELOW_ONE) * cumulative[:, -1]
        return (
            torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1).clamp(max=log_p.shape[-1] - 1)
        )


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """The most probable tokens up to and including the one at which their sum reaches `top_p`."""
    order = logits.argsort(dim=-1, descending=True, stable=True)
    p = logits.double().softmax(dim=-1).gather(-1, order)
    kept = p.cumsum(dim=-1) - p < top_p
    return torch.zeros_like(kept).scatter_(-1, order, kept)
