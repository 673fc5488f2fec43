"""What a server grants and to whom, and the packages that it needs."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, fields

from dcdm.config import ConfigError

MAY_BE_ZERO = ("prefix_tokens",)


@dataclass(frozen=True)
class Settings:
    """Limits of a server. Texts are the rows of a batch: `n` times the number of prompts of a request."""

    api_key: str | None = None
    """Key that callers must send; None answers only those who ask for this machine by a loopback name."""
    max_tokens: int = 1024
    """New tokens of one text."""
    max_prompt_tokens: int | None = None
    """Tokens of one prompt, blanks counted; None means what the context has room for."""
    max_forwards: int = 4096
    """Forwards of one text."""
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
    max_connections: int = 1024
    """Open connections; beyond them those that ask for nothing are closed, the longest silent first."""
    head_seconds: float = 10.0
    """How long a connection may take until the headers of a request are complete."""
    max_body_bytes: int = 1 << 20
    body_seconds: float = 10.0
    """How long a request's body may take to arrive."""
    log_prompts: bool = False
    """Write prompts and completions into the log."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str | bool | None):
                continue
            least = 0 if field.name in MAY_BE_ZERO else 1e-3 if isinstance(value, float) else 1
            if not least <= value < float("inf"):
                raise ConfigError(f"{field.name}={value} must be at least {least:g}")
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise ConfigError("api_key must be of ASCII letters, digits and signs, without blanks, and not empty")
        if self.max_queued < self.max_texts:
            raise ConfigError(
                f"max_queued={self.max_queued} has no room for a request of max_texts={self.max_texts}; raise the "
                "first or lower the second"
            )


def require_packages() -> None:
    """Say what to install if the server's packages are missing."""
    missing = [
        name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ConfigError(
            f"dcdm serve needs {', '.join(missing)}: run pip install -e '.[serve]' in the checkout of dcdm"
        )
