"""The limits of a server: the only list of them. The flags of `dcdm serve` are made from it.

Importing this file does not load PyTorch: the command line needs the list to show its help.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated

from tyro.conf import arg

from dcdm.config import ConfigError


@dataclass(frozen=True)
class Settings:
    """Limits of a server. Texts are the rows of a batch: `n` times the number of prompts of a request."""

    api_key: Annotated[str | None, arg(help_behavior_hint="")] = None
    """Key that callers must send; better given in the environment as DCDM_API_KEY. Without one only those are
    answered who ask for this machine by a loopback name."""
    max_tokens: int = 1024
    """New tokens of one text."""
    max_texts: int = 16
    """Texts of one request."""
    max_queued: int = 64
    """Texts that wait; more are answered with 429."""
    max_batch: int = 16
    """Texts that are computed together; 1 computes one at a time."""
    max_batch_tokens: int = 16_384
    """Positions whose keys and values there is room for: of the texts that are computed together, each as long as
    the longest, and in what they leave of prompt prefixes."""
    prefix_tokens: int = 4096
    """Tokens of prompt prefixes that are cached for later texts, as far as running ones leave room; 0 for none."""
    timeout_seconds: float = 120.0
    """From a request's arrival to its last token."""
    drain_seconds: float = 30.0
    """How long running requests may take once the server is asked to stop."""
    max_body_bytes: int = 1 << 20
    """Size of a request."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, str | bool | None):
                continue
            may_be_zero = one.name in ("prefix_tokens", "drain_seconds")
            least = 0 if may_be_zero else 1e-3 if isinstance(value, float) else 1
            if not least <= value < float("inf"):
                raise ConfigError(f"{one.name}={value} must be at least {least:g} and finite")
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise ConfigError("api_key must be of ASCII letters, digits and signs, without blanks, and not empty")
        if self.max_queued < self.max_texts:
            raise ConfigError(
                f"max_queued={self.max_queued} has no room for a request of max_texts={self.max_texts}; raise the "
                "first or lower the second"
            )


def check_names(names: Sequence[str]) -> None:
    """Refuse models that callers could not tell apart."""
    if "" in names or len({*names}) < len(names):
        raise ConfigError(f"each of the {len(names)} models needs a name of its own (--name A,B); not {names}")
