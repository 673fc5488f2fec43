"""Prompt prefixes that were encoded before: their keys and values serve every later text that begins the same.

Where given tokens see only what stands before them (AR, and models that predict from the left), a text takes over
whatever its prompt has in common with an earlier one, piece by piece. Elsewhere given tokens see each other, even
behind a blank: there a text takes over all of them or none. Both are exact: what is remembered is what the text
would compute itself.

The cache is bounded by a number of tokens; what has not been used for longest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from dcdm.config import ConfigError, ModelConfig
from dcdm.model.cache import KVCache, Prefix

PIECE = 16
"""Tokens that are remembered or forgotten together, where prefixes can be shared in part."""


@dataclass(frozen=True)
class PromptPrefix:
    """The given tokens of a canvas, as far as others may share their keys and values."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    whole: bool
    """Take over all of them or none."""

    def __len__(self) -> int:
        return len(self.tokens)


def shared_prefix(config: ModelConfig, canvas: list[int]) -> PromptPrefix | None:
    """What of a canvas (BOS first, MASK where something is free) others may share; None if nothing."""
    if config.routes_from_noise:
        return None
    if config.kind == "ar" or config.predicts_from_left:
        end = canvas.index(config.mask_id) if config.mask_id in canvas else len(canvas)
        end = (end - 1) // PIECE * PIECE  # the last of them predicts what follows, so it is computed
        return PromptPrefix(tuple(canvas[:end]), tuple(range(end)), whole=False) if end else None
    given = [(at, token) for at, token in enumerate(canvas) if token != config.mask_id]
    if len(given) < PIECE:
        return None
    return PromptPrefix(tuple(token for _, token in given), tuple(at for at, _ in given), whole=True)


class PrefixCache:
    """Keys and values of prompt prefixes, up to `limit` tokens."""

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ConfigError(f"prefix_tokens={limit} must be at least 0; 0 remembers nothing")
        self.limit = limit
        self.tokens = self.looked_up = self.found = 0
        self._pieces: OrderedDict[tuple[int, object], tuple[int, Prefix]] = OrderedDict()
        self._number = 0

    def find(self, prefix: PromptPrefix) -> Prefix | None:
        """What is remembered of a prefix, if anything."""
        self.looked_up += len(prefix)
        pieces, keys = [], []
        parent = 0
        for key, _ in self._keys(prefix):
            held = self._pieces.get((parent, key))
            if held is None:
                break
            keys.append((parent, key))
            parent = held[0]
            pieces.append(held[1])
        for used in reversed(keys):  # a piece is never forgotten before those that build on it
            self._pieces.move_to_end(used)
        if not pieces:
            return None
        self.found += sum(map(len, pieces))
        return pieces[0] if len(pieces) == 1 else Prefix.joined(pieces)

    def add(self, prefix: PromptPrefix, cache: KVCache, row: int) -> None:
        """Remember a prefix that a row of a cache has written."""
        if len(prefix) > self.limit:
            return
        whole: Prefix | None = None
        parent, keys = 0, []
        for key, (start, end) in self._keys(prefix):
            held = self._pieces.get((parent, key))
            if held is None:
                if whole is None:
                    whole = cache.prefix(row, torch.tensor(prefix.positions))
                self._number += 1
                held = (self._number, whole.cut(start, end))
                self._pieces[parent, key] = held
                self.tokens += end - start
            keys.append((parent, key))
            parent = held[0]
        for used in reversed(keys):
            self._pieces.move_to_end(used)
        self.shrink(self.limit)

    def shrink(self, limit: int) -> None:
        """Forget until no more than `limit` tokens are remembered."""
        while self.tokens > limit:
            _, (_, prefix) = self._pieces.popitem(last=False)
            self.tokens -= len(prefix)

    @staticmethod
    def _keys(prefix: PromptPrefix) -> list[tuple[object, tuple[int, int]]]:
        """What names each piece, given the piece before it, and where it lies among the tokens."""
        if prefix.whole:
            return [((prefix.tokens, prefix.positions), (0, len(prefix)))]
        starts = range(0, len(prefix), PIECE)
        return [(prefix.tokens[start : start + PIECE], (start, start + PIECE)) for start in starts]
