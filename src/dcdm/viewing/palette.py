"""The colours of chunks, the same wherever chunks are shown.

Okabe and Ito's colours are told apart with any common colour vision. The last of theirs, black, is a dark grey
here, to be seen on dark ground too.
"""

from __future__ import annotations

CHUNKS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#4d4d4d")
VISIBLE = "#bbbbbb"
"""Chunk 0, what is always visible."""
PADDING = "#ffffff"


def colour(chunk: int) -> str:
    """The colour of a chunk id; more than eight chunks share colours in turn."""
    if chunk < 1:
        return VISIBLE if chunk == 0 else PADDING
    return CHUNKS[(chunk - 1) % len(CHUNKS)]


def ink(ground: str) -> str:
    """Black or white, whichever reads better on `ground`."""
    return "#000000" if luminance(ground) > 0.179 else "#ffffff"


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it, 0 black to 1 white."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def on_colour(chunk: int) -> str:
    """The chunk's colour as the ground of text, as `rich` names styles."""
    ground = colour(chunk)
    return f"{ink(ground)} on {ground}"
