"""A text that a model filled in, as what was filled when: for the terminal and for pages."""

from __future__ import annotations

from dataclasses import dataclass

from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.engine import Generation
from dcdm.viewing.chunks import labels, window_from


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
