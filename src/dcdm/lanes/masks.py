"""Lanes, who sees whom where the token on the left predicts, and the slots of such a pass.

A free position of chunk k is *led* where its left neighbour stands exactly one chunk earlier: that clean slot
predicts it, as in AR. Every other free position has a *seed*: a MASK slot of its own, which nobody else sees.

    B batch   L positions   S lanes   n free positions of a row   chunk −1 padding, 0 always visible, 1…K chunks
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dcdm.config import ModelConfig
from dcdm.model import masks
from dcdm.model.blockmask import RELATIONS, Relations, SlotTiles, at_least, ranges
from dcdm.model.layout import ROW_BLOCK, TILES, Layout, Tile, inverse, runs_of, shared, slots_of, sorted_stream
from dcdm.model.masks import CLEAN, NOISY, Mask, Slots
from dcdm.model.routing import free_rank, label

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
    return place.packed() if compact else place.in_few_shapes()


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


# --- lanes ----------------------------------------------------------------------------------------------------


def even_starts(num_free: Tensor, lanes: Tensor, most: int) -> Tensor:
    """Where lanes begin, as ranks from 0 among the free positions: (B, most), n for lanes that a row does not have.

    Lanes differ by at most one position, longer ones first, so that chunks never grow.
    """
    lanes = torch.minimum(lanes, num_free.clamp(min=1))
    number = torch.arange(most, device=num_free.device)
    size, longer = (num_free // lanes)[:, None], (num_free % lanes)[:, None]
    starts = number * size + torch.minimum(number, longer)
    return torch.where(number < lanes[:, None], starts, num_free[:, None])


def lane_numbers(free: Tensor, starts: Tensor) -> Tensor:
    """The lane (B, L), from 0, of each free position, by the starts of the row's lanes; elsewhere meaningless."""
    rank = (free_rank(free) - 1).clamp(min=0)
    return (torch.searchsorted(starts, rank, right=True) - 1).clamp(min=0)


def lane_ids(free: Tensor, real: Tensor, starts: Tensor) -> Tensor:
    """Chunk k holds the k-th position of every lane: ids (B, L) from the starts (B, S) of the row's lanes."""
    rank = free_rank(free) - 1
    start = starts.gather(1, lane_numbers(free, starts))
    return label(free, real, rank - start + 1)


def lane_partition(
    config: ModelConfig, free: Tensor, real: Tensor, lanes: int | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Chunk ids (B, L), and the lane of each free position, from 1; 0 elsewhere."""
    wanted = lanes_of_rows(config, lanes, len(free), free.device)
    num_free = free.sum(dim=-1)
    starts = even_starts(num_free, wanted, max(1, min(int(wanted.max()), int(num_free.max()))))
    return lane_ids(free, real, starts), torch.where(free, lane_numbers(free, starts) + 1, 0)


def lanes_of_rows(config: ModelConfig, lanes: int | Tensor | None, rows: int, device: torch.device) -> Tensor:
    """The number of lanes of each row, (B,): given, or the model's default."""
    lanes = config.default_lanes if lanes is None else lanes
    if isinstance(lanes, int):
        return torch.full((rows,), lanes, device=device)
    return lanes.to(device)
