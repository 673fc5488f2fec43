"""From logits to tokens: temperature, top-k, top-p, and draws without bias.

B batch   A asked positions   V the tokens that can be predicted
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dcdm.config import ConfigError, whole_number
from dcdm.model.products import at_least_fp32

_BELOW_ONE = 1 - 1e-12


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
