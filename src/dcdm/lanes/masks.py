"""Who sees whom where the token on the left predicts, and the slots of such a pass.

A free position of chunk k is *led* where its left neighbour stands exactly one chunk earlier: that clean slot
predicts it, as in AR. Every other free position has a *seed*: a MASK slot of its own, which nobody else sees.

    B batch   L positions   T tiles   chunk −1 padding, 0 always visible, 1…K chunks
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dcdm.model import masks
from dcdm.model.blockmask import RELATIONS, Relations, SlotTiles, at_least, ranges
from dcdm.model.layout import Layout, inverse, slots_of, sorted_stream
from dcdm.model.masks import CLEAN, NOISY, Mask, Slots
from dcdm.model.tiling import ROW_BLOCK, TILES, Tile, runs_of, shared

DRAFTS = 2  # the first of the streams of draft tokens, which count on by position

# predict from the left: clean slots, and where nothing known stands left MASK slots that nobody else sees, "seeds".
# Always-visible tokens see what stands before them, as in AR; later chunks see each other whole.
clean_in_order = Mask(
    "clean in order",
    lambda q, k: (
        (q.stream == CLEAN)
        & (k.stream == CLEAN)
        & ((k.chunk < q.chunk) | ((k.chunk == q.chunk) & ((q.chunk > 0) | (k.position <= q.position))))
    ),
)
seed_itself = Mask(
    "seed itself", lambda q, k: (q.stream != CLEAN) & (k.stream == q.stream) & (k.position == q.position)
)
left = (masks.not_padding & (clean_in_order | masks.noisy_to_clean | seed_itself)).named("left")

# draft tokens of a lane see each other from left to right, each lane's in a stream of their own, and nobody else
# sees them
draft_to_own = Mask(
    "draft to own",
    lambda q, k: (q.stream >= DRAFTS) & (k.stream == q.stream) & (k.position <= q.position),
)
left_with_drafts = (left | (masks.not_padding & draft_to_own)).named("left_with_drafts")


def led_positions(ids: Tensor) -> Tensor:
    """(…, L) bool: positions whose left neighbour stands exactly one chunk earlier, and so can predict them.

    Given tokens see only what is given before them, as in AR. So the first position of a blank, with given tokens
    behind it, is not led by the one on its left, which does not know them: a seed slot sees them all.
    """
    before = torch.nn.functional.pad(ids[..., :-1], (1, 0), value=-2)
    given = ids == 0
    given_behind = given.flip(-1).cumsum(dim=-1).flip(-1) > given  # the sum counts the position itself
    return (ids >= 1) & (before == ids - 1) & ~((ids == 1) & given_behind)


def from_left(ids: Tensor, wanted: Tensor, clean: Tensor, compact: bool = True) -> Layout:
    """Slots of the `clean` positions (B, L) sorted by chunk, and behind them seed slots.

    A led position is predicted by the clean slot on its left, every other `wanted` position by a seed slot of its
    own; `home` is that slot. Of the streams, the first is the seeds' (MASK), the second the clean one.
    """
    length = ids.shape[1]
    led = led_positions(ids) & wanted
    clean_order, clean_kept = sorted_stream(clean, ids, compact)
    seed_order, seed_kept = sorted_stream(wanted & ~led, ids, compact)
    nothing = torch.zeros_like(wanted)
    slots = Slots.cat(
        slots_of(ids, clean_order, clean_kept, CLEAN, nothing),
        slots_of(ids, seed_order, seed_kept, NOISY, ~nothing),
    )
    source = torch.cat([clean_order + length, seed_order], dim=1)
    left_home = torch.nn.functional.pad(inverse(clean_order, length)[:, :-1], (1, 0))
    home = torch.where(led, left_home, inverse(seed_order, length) + clean_order.shape[1])
    place = Layout(slots, source, slots.chunk.shape[1], home, wanted)
    return place.packed() if compact else place


def _left_tiles(row: Slots) -> Iterator[Tile]:
    """Clean slots see all up to their chunk's end; seed slots the clean ones of earlier chunks, and themselves."""
    runs = runs_of(row)
    clean = [run for run in runs if run.stream == CLEAN]
    for group in shared(clean, ROW_BLOCK):
        alone = len(group) == 1 and (group[0].chunk > 0 or group[0].end - group[0].start == 1)
        yield Tile(0, 0, group[0].start, group[-1].end, clean[0].start, group[-1].end, masked=not alone)
    for group in shared([run for run in runs if run.stream != CLEAN]):
        q0, q1 = group[0].start, group[-1].end
        earlier = [run for run in clean if run.chunk < group[-1].chunk]
        a0, a1 = (earlier[0].start, earlier[-1].end) if earlier else (0, 0)
        if len(group) == 1:
            yield Tile(0, 0, q0, q1, a0, a1, own=True)
        else:
            yield Tile(0, 0, q0, q1, a0, a1, q0, q1, masked=True)


def _left_relations(tiles: SlotTiles) -> Relations:
    low, high, has = ranges(tiles.chunk, tiles.real & (tiles.stream == CLEAN))
    seed_low, seed_high, has_seed = ranges(tiles.chunk, tiles.real & (tiles.stream != CLEAN))
    some = at_least(high, low) | (seed_high[:, :, None] > low[:, None, :]) | torch.diag_embed(has_seed)
    # within chunk 0, whose tokens see what stands before them, tiles are left to the predicate
    above = (low[:, :, None] > high[:, None, :]) | (at_least(low, high) & (high >= 1)[:, None, :])
    every = tiles.both_whole & ~has_seed[:, None, :]
    every &= ~(has[:, :, None] & has[:, None, :]) | above
    every &= ~(has_seed[:, :, None] & has[:, None, :]) | (seed_low[:, :, None] > high[:, None, :])
    return some, every


TILES[left] = _left_tiles
RELATIONS[left] = _left_relations
