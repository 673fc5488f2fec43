"""What a forward predicts: a distribution at every asked position, made a slice at a time where they are many.

With a vocabulary of 50,000, the distributions of a whole canvas take gigabytes. Policies need a few numbers of
each, draws need those of the filled positions alone; so the states are kept, and distributions made from them.

    B batch   A asked positions   N asked positions of all rows   V the tokens that can be predicted
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from dcdm.model.head import SLICE_BYTES

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
            log_p = self._log_p_of(self._states[part]) if self._held is None else self._held[part]
            parts.append(what(log_p, self._row[part], self._at[part]))
        found = torch.cat(parts)
        whole = torch.full(where.shape, otherwise, dtype=dtype or found.dtype, device=where.device)
        whole[self._row[chosen], self._at[chosen]] = found.to(whole.dtype)
        return whole

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
