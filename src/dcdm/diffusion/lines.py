"""Text laid out for lanes that hold whole lines, and blanks with room to spare.

A lane of a plain cut begins in the middle of a line, and ends where the next one happens to begin. Here each lane
takes as many whole lines as fit, and EOS fills what is left of it; so does it behind the text of a blank. The
model learns where to end, and a reader drops every EOS.

B batch   L positions   S lanes   n free positions
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcdm.config import LANE_LENGTH, WholeLines
from dcdm.keys import Key
from dcdm.model.routing import even_starts

ROOM, EXACT = 12, 0.4
"""Blanks get fewer than `ROOM` positions more than their text needs, little room more often; a share of `EXACT`
gets none."""
LINE_LENGTH = 16
"""Lanes of whole lines are not trained shorter than this: they would hold parts of lines only."""


def lay_out_rows(
    tokens: Tensor, free: Tensor, real: Tensor, lanes: Tensor, whole: WholeLines, key: Key, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Training rows (B, L) in `lanes` (B,) of whole lines, or with room in their blanks: tokens and free positions.

    Rows stay as long as they are, so what no longer fits is cut off at their end. Rows of one lane that are free up
    to their end, as in AR, do not change.
    """
    tokens, free = tokens.clone(), free.clone()
    draws = key.fold("room").rows(rows, tokens.shape[1]).tolist()
    for row, number in enumerate(lanes.tolist()):
        length = int(real[row].sum())
        text, gaps = tokens[row, :length].tolist(), free[row, :length].tolist()
        if (first := open_end(gaps)) is None:
            text, gaps = with_room(text, gaps, draws[row], whole.end)
        elif number > 1:
            laid = packed(text[first:], lane_sizes(length - first, number), whole)
            text[first:] = [token for lane, _ in laid for token in lane]
        tokens[row, :length] = torch.tensor(text, device=tokens.device)
        free[row, :length] = torch.tensor(gaps, device=free.device)
    return tokens, free


def shortest_lanes(free: Tensor, real: Tensor) -> Tensor:
    """(B,): how short lanes may be in training; in rows with blanks, whose lanes hold no lines, as ever."""
    lengths = real.sum(dim=-1).tolist()
    rows = [open_end(gaps[:length]) for gaps, length in zip(free.tolist(), lengths, strict=True)]
    return torch.tensor([LANE_LENGTH if first is None else LINE_LENGTH for first in rows])


def open_end(free: Sequence[bool]) -> int | None:
    """The first free position of a row that is free from there to its end; None for rows with blanks, or full."""
    if True not in free:
        return None
    first = free.index(True)
    return first if all(free[first:]) else None


def lane_sizes(num_free: int, lanes: int) -> list[int]:
    """Positions of each lane, as `even_starts` cuts them."""
    starts = even_starts(torch.tensor([num_free]), torch.tensor([lanes]), lanes)[0].tolist()
    return [end - start for start, end in zip(starts, [*starts[1:], num_free], strict=True)]


def packed(text: Sequence[int], sizes: Sequence[int], whole: WholeLines) -> list[tuple[list[int], int]]:
    """The lanes of these sizes, filled up, and how many tokens of `text` each holds; what does not fit is left out.

    A lane ends before the first line that does not fit; one without a break is cut where it is full. An EOS in the
    text ends a lane, and is not repeated in the next.
    """
    breaks, at = set(whole.breaks), 0
    lanes: list[tuple[list[int], int]] = []
    for size in sizes:
        while at < len(text) and text[at] == whole.end:
            at += 1
        ahead = [*text[at : at + size + 1]]
        if whole.end in ahead:
            taken = ahead.index(whole.end)
        elif len(ahead) <= size:
            taken = len(ahead)
        else:
            taken = max((place for place in range(1, size + 1) if ahead[place] in breaks), default=size)
        lanes.append((ahead[:taken] + [whole.end] * (size - taken), taken))
        at += taken
    return lanes


def kept_of(lane: Sequence[int], follows: int | None, whole: WholeLines) -> int:
    """How many tokens of a written lane are text: those before an EOS, and of a full lane all but a last line for
    which there was no room. `follows` is the token behind the lane, None at the end of the text.

    A full lane of one line is kept, and so is one that the next lane continues in the middle of a line.
    """
    if whole.end in lane:
        return lane.index(whole.end)
    if follows is not None and follows not in whole.breaks and follows != whole.end:
        return len(lane)
    return max((place for place in range(1, len(lane)) if lane[place] in whole.breaks), default=len(lane))


def with_room(
    text: Sequence[int], free: Sequence[bool], draws: Sequence[float], end: int
) -> tuple[list[int], list[bool]]:
    """`text` with EOS behind the free runs that something follows, by uniform `draws`; as long as it was."""
    new: list[int] = []
    gaps: list[bool] = []
    for place, token in enumerate(text):
        new.append(token)
        gaps.append(free[place])
        if free[place] and place + 1 < len(text) and not free[place + 1]:
            room = int(ROOM * (max(0.0, draws[place] - EXACT) / (1 - EXACT)) ** 2)
            new += [end] * room
            gaps += [True] * room
    return new[: len(text)], gaps[: len(text)]


@dataclass(frozen=True)
class LaidOut:
    """Texts as a decoder with lanes of whole lines would write them."""

    tokens: Tensor
    """(B, L'), PAD behind the shorter ones."""
    prompt: Tensor
    """(B, L') bool: given positions."""
    home: Tensor
    """(B, L'): the position of the text that each stands for; of EOS that fills up, the one before it."""
    forwards: Tensor
    """(B,): positions of the longest lane, a forward each."""
    nats: Tensor
    """(B,): −log p of this layout, all that fit being alike."""


def lay_out_texts(
    tokens: Tensor, free: Tensor, real: Tensor, lanes: int, whole: WholeLines, longest: int, pad_id: int
) -> LaidOut:
    """Texts (B, L) in the shortest lanes of whole lines that hold them, on canvases of at most `longest` positions.

    Rows with blanks, with an EOS, or too long for it stay as they are. How long the lanes are, or that a row stays
    as it is, has to be said, too: `nats` counts it, so that what is scored stays a probability of the text.
    """
    rows, homes, gaps, sizes, nats = [], [], [], [], []
    for row in range(len(tokens)):
        length = int(real[row].sum())
        text, gap = tokens[row, :length].tolist(), free[row, :length].tolist()
        home, cost, size = list(range(length)), 0.0, -(-sum(gap) // lanes)
        if (first := open_end(gap)) is not None:
            number = length - first
            most = (longest - first) // lanes
            cost = math.log(2 + max(0, most - size))
            fitting = (packed(text[first:], [each] * lanes, whole) for each in range(size, most + 1))
            found = next((laid for laid in fitting if sum(taken for _, taken in laid) == number), None)
            if found is not None and whole.end not in text[first:]:
                text, home = text[:first], home[:first]
                for lane, taken in found:
                    begins = home[-1] + 1 if home else 0
                    text += lane
                    home += range(begins, begins + taken)
                    home += [max(first, begins + taken - 1)] * (len(lane) - taken)
                gap, size = gap[:first] + [True] * (len(text) - first), len(found[0][0])
        rows.append(text)
        homes.append(home)
        gaps.append(gap)
        sizes.append(size)
        nats.append(cost)
    width = max(tokens.shape[1], *map(len, rows))

    def table(lines: list[list[int]], filler: int) -> Tensor:
        return torch.tensor([line + [filler] * (width - len(line)) for line in lines], device=tokens.device)

    laid = table(rows, pad_id)
    given = ~table(gaps, 0).bool()
    return LaidOut(laid, given, table(homes, 0), torch.tensor(sizes), torch.tensor(nats, dtype=torch.float64))
