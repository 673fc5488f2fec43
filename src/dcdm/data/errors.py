"""What a user can put right about data."""

from __future__ import annotations


class DataError(ValueError):
    """Data, a tokenizer or their settings are wrong; the message names the place and the fix."""
