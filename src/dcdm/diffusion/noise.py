"""Training noise: levels, masks and visible prompts, every draw keyed by the sample it is for.

B batch   L positions   C noise groups: chunks or blocks, or the whole sequence
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcdm.config import ObjectiveConfig
from dcdm.keys import Key


def levels(key: Key, rows: Tensor, num_rows: int, num_groups: int, settings: ObjectiveConfig) -> Tensor:
    """t (B, C) for the rows of a global batch of `num_rows`, one level per noise group.

    Stratified over all rows and groups of the global batch, then permuted, so that neither a row nor a group
    is tied to a level; a share of the groups is set to t = 1. The result for a row is the same whichever
    process computes it.
    """
    strata = key.fold("strata").permutation(num_rows * num_groups).view(num_rows, num_groups)
    within = key.fold("within").rows(rows, num_groups)
    t = (strata[rows] + within) / (num_rows * num_groups)
    if settings.t_shape == "bell":
        t = 0.5 - torch.sin(torch.asin(1 - 2 * t) / 3)  # where 3t² − 2t³, the share below t, is what was drawn
    t = settings.t_min + (settings.t_max - settings.t_min) * t
    full = key.fold("full").rows(rows, num_groups) < settings.full_mask_share
    return torch.where(full, 1.0, t)


def corrupt(key: Key, rows: Tensor, groups: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Mask each position of group g ≥ 1 with probability t_g: masked (B, L) bool and weight 1/t (B, L).

    Groups ≤ 0 (always visible, padding) are never masked.
    """
    level = t.gather(-1, (groups - 1).clamp(min=0))
    masked = (key.fold("mask").rows(rows, groups.shape[-1]) < level) & (groups >= 1)
    return masked, torch.where(masked, 1 / level, 0.0)


def visible_spans(key: Key, rows: Tensor, free: Tensor, share: float) -> Tensor:
    """Random prompts: a `share` of the rows gets a visible prefix or up to three visible spans, half each.

    At least one free position of each row stays free. (B, L) bool.
    """
    prompt = torch.zeros_like(free)
    if share == 0:
        return prompt
    draws = key.fold("prompt").rows(rows, 9)
    for row, u in enumerate(draws.tolist()):
        places = free[row].nonzero().squeeze(-1)
        n = len(places)
        if u[0] >= share or n < 2:
            continue
        if u[1] < 0.5:
            prompt[row, places[: 1 + int(u[2] * (n - 1))]] = True
            continue
        for start, length in list(zip(u[3:6], u[6:9], strict=True))[: 1 + int(3 * u[2])]:
            first = int(start * n)
            prompt[row, places[first : first + 1 + int(length * (n - 1) / 3)]] = True
        if bool(prompt[row, places].all()):
            prompt[row, places[int(u[3] * n)]] = False
    return prompt


BLANKS, LONGEST_BLANK = 6, 24
SHORTEST_ROOM, LONGEST_SHORT_BLANK = 4, 3


def visible_around_blanks(key: Key, rows: Tensor, free: Tensor, share: float) -> Tensor:
    """A `share` of the rows is visible but for blanks: (B, L) bool; all other rows show nothing.

    Half of them have one to six blanks of up to 24 tokens, short ones more often, the others many blanks of one to
    three tokens, up to one for every four tokens.
    """
    prompt = torch.zeros_like(free)
    if share == 0:
        return prompt
    most = max(BLANKS, free.shape[1] // SHORTEST_ROOM)
    draws = key.fold("blanks").rows(rows, 3 + 2 * most)
    for row, u in enumerate(draws.tolist()):
        places = free[row].nonzero().squeeze(-1)
        n = len(places)
        if u[0] >= share or n < 2:
            continue
        prompt[row, places] = True
        count, longest = (BLANKS, LONGEST_BLANK) if u[1] < 0.5 else (n // SHORTEST_ROOM, LONGEST_SHORT_BLANK)
        for start, length in list(zip(u[3::2], u[4::2], strict=True))[: 1 + int(count * u[2])]:
            first = int(start * n)
            prompt[row, places[first : first + 1 + int(longest * length**2)]] = False
    return prompt
