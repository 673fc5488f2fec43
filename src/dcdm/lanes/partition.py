"""How the free positions become lanes: chunk k holds the k-th position of every lane.

B batch   L positions   S lanes   n free positions of a row
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcdm.config import ModelConfig
from dcdm.model.routing import free_rank, label


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
