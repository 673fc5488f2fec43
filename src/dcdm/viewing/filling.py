"""A text that a model filled in, as what was filled when: for the terminal and for pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.engine import Generation
from dcdm.viewing.chunks import labels, window_from
from dcdm.viewing.palette import colour, ink


@dataclass(frozen=True)
class Filling:
    """One row of a generation that fits into one window."""

    tokens: list[str]
    """What each position shows, BOS first."""
    chunks: list[int]
    """The chunk of each position, numbered in the order of filling; 0 where the text was given."""
    steps: list[list[int]]
    """Positions that each forward filled."""


def filling_of(generation: Generation, tokenizer: Tokenizer, row: int = 0) -> Filling:
    """The row's tokens, and the chunk and the forward that each of them came with."""
    events = [event for event in generation.history if event.row == row]
    ids = [token for token in generation.tokens[row].tolist() if token != tokenizer.pad_id]
    chunks = [0] * len(ids)
    for event in events:
        for position in event.positions:
            if position < len(ids):  # what lies behind an EOS was cut off
                chunks[position] = event.chunk
    steps = [[p for p in event.positions if p < len(ids)] for event in events]
    return Filling(labels(window_from(ids, tokenizer)), chunks, steps)


MOST_TOKENS = 64  # more do not fit beside each other


def draw(filling: Filling, path: Path) -> None:
    """One line per chunk, its tokens in its colour, blanks empty: PNG or SVG after the file's name."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    length = min(MOST_TOKENS, len(filling.tokens))
    lines = sorted({0, *filling.chunks})
    figure, axis = plt.subplots(figsize=(1.8 + 0.2 * length, 0.3 + 0.32 * len(lines)), layout="constrained")
    for number, chunk in enumerate(lines):
        for position in range(1, length):
            by = filling.chunks[position]
            ground = "#ffffff" if by > chunk else colour(by) if by == chunk > 0 else "#eeeeee"
            letter = "" if by > chunk else filling.tokens[position].replace(" ", "·")
            axis.add_patch(Rectangle((position, -number), 1, 0.9, facecolor=ground, edgecolor="#999999", lw=0.4))
            axis.text(
                position + 0.5, 0.42 - number, letter, ha="center", va="center", fontsize=8, color=ink(ground),
                family="monospace", parse_math=False,
            )  # fmt: skip
        label = "given" if chunk == 0 else f"chunk {chunk}, {_forwards(filling, chunk)}"
        axis.text(0.8, 0.42 - number, label, ha="right", va="center", fontsize=7)
    axis.set(xlim=(-7, length), ylim=(1 - len(lines), 1))
    axis.axis("off")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _forwards(filling: Filling, chunk: int) -> str:
    count = sum(any(filling.chunks[p] == chunk for p in step) for step in filling.steps)
    return f"{count} forward" + ("s" if count > 1 else "")
