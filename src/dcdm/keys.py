"""Randomness keyed by what it is for, so that batch size and number of processes never change it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Key:
    """A seed and a path of integers or names under it; equal keys give equal draws on every machine."""

    seed: int
    path: tuple[int | str, ...] = ()

    @classmethod
    def of(cls, source: Key | torch.Generator | int) -> Key:
        """A key as it is, from a seed, or from one draw of a generator (which thereby moves on)."""
        if isinstance(source, Key):
            return source
        if isinstance(source, torch.Generator):
            return cls(int(torch.randint(2**62, (), generator=source, device=source.device)))
        return cls(source)

    def fold(self, *more: int | str) -> Key:
        return Key(self.seed, self.path + more)

    def generator(self) -> torch.Generator:
        text = "/".join(str(part) for part in (self.seed, *self.path))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform draws in the open interval (0, 1), float64."""
        return torch.rand(*shape, generator=self.generator(), dtype=torch.float64).clamp(min=1e-12)

    def rows(self, numbers: Tensor, *shape: int) -> Tensor:
        """Uniform draws (len(numbers), *shape), row i keyed by numbers[i] alone."""
        return torch.stack([self.fold(n).uniform(*shape) for n in numbers.tolist()])

    def gumbel_rows(self, numbers: Tensor, *shape: int) -> Tensor:
        """Standard Gumbel noise keyed like `rows`; float64, since float32 uniforms round to 1 and give inf."""
        return -torch.log(-torch.log(self.rows(numbers, *shape)))

    def permutation(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self.generator())
