"""How free positions become chunks, where chunk ids do not depend on noise.

Fixed partitions (MDLM, BDLM and the controls) need positions only. The causal partition is formed in K
rounds, each a function of already revealed tokens; its rule is `choose`, one replaceable function.

    B batch   L positions   K chunks   j = 1…n the rank of a free position among the free ones
    ids: −1 padding, 0 always visible, 1…K chunks
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dcdm.config import ModelConfig
from dcdm.keys import Key


def free_rank(free: Tensor) -> Tensor:
    """j: 1…n over the free positions of each row; elsewhere the rank of the last free position before."""
    return free.long().cumsum(dim=-1)


def label(free: Tensor, real: Tensor, ids_of_free: Tensor) -> Tensor:
    """Chunk ids from those of the free positions: 0 where always visible, −1 where padding."""
    return torch.where(free, ids_of_free, torch.where(real, 0, -1))


def chunk_sizes(num_free: Tensor, num_chunks: int, growth: float = 1.0) -> Tensor:
    """Sizes of chunks 1…K for n free positions: ⌈remaining · g^k / Σ_{j≥k} g^j⌉, (B,) to (B, K).

    Empty chunks come last: each takes at least one position while any remain.
    """
    remaining, sizes = num_free.long(), []
    powers = torch.tensor(growth, dtype=torch.double) ** torch.arange(num_chunks)
    for left in range(num_chunks, 0, -1):
        if growth == 1:
            size = (remaining + left - 1) // left
        else:  # the small subtraction keeps a rounding error from making ⌈3.0000…1⌉ a 4
            size = torch.ceil(remaining.double() / powers[:left].sum().item() - 1e-9).long().clamp(min=1)
        sizes.append(torch.minimum(size, remaining))
        remaining = remaining - sizes[-1]
    return torch.stack(sizes, dim=-1)


def prior(kind: str, rank: Tensor, num_free: Tensor, k: Tensor, num_chunks: int) -> Tensor:
    """What rank j alone says for chunk k (B,): `none` 0, `contiguous` −j/n, `strided` −((j−k) mod K)/K."""
    if kind == "contiguous":
        return -rank.double() / num_free.clamp(min=1)[:, None]
    if kind == "strided":
        return -((rank - k[:, None]) % num_chunks).double() / num_chunks
    return torch.zeros_like(rank, dtype=torch.double)


def choose(
    r_blk: Tensor, candidates: Tensor, size: Tensor, k: Tensor, prior_bl: Tensor, prior_weight: float
) -> Tensor:
    """Chunk k: the `size` candidates with the largest r_k − mean_j r_j + λ·prior; ties go to lower positions.

    With λ = inf the prior decides and the router's score breaks ties. Returns (B, L) bool.
    """
    rows = torch.arange(len(k), device=k.device)
    score = (r_blk[rows, :, k - 1] - r_blk.mean(dim=-1)).double()
    if math.isinf(prior_weight):
        keys = [score, prior_bl]  # sorted by the last key, ties by the one before
    else:
        keys = [score + prior_weight * prior_bl]
    place = torch.arange(score.shape[-1], device=score.device).expand_as(score)
    order = place
    for key in [*keys, candidates.double()]:
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    return candidates & (torch.empty_like(order).scatter_(-1, order, place) < size[:, None])


@torch.no_grad()
def causal_round(r_blk: Tensor, revealed: Tensor, free: Tensor, k: Tensor, config: ModelConfig) -> Tensor:
    """The members of chunk k (B,), from the scores of that round and what is revealed: (B, L) bool."""
    assert config.num_chunks is not None
    num_free = free.sum(dim=-1)
    sizes = chunk_sizes(num_free, config.num_chunks, config.chunk_growth)
    size = sizes.gather(-1, k[:, None] - 1).squeeze(-1)
    prior_bl = prior(config.prior, free_rank(free), num_free, k, config.num_chunks)
    return choose(r_blk, free & ~revealed, size, k, prior_bl, config.prior_weight)


@torch.no_grad()
def causal_partition(
    router: Callable[[Tensor], Tensor], free: Tensor, real: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """All K rounds on known tokens. `router(new)` reveals the positions `new` and gives r (B, L, K) after that.

    Returns the ids (B, L) and the scores (B, L, K) that decided each position's chunk (0 where none did).
    """
    assert config.num_chunks is not None
    new = real & ~free
    revealed = new
    ids = label(free, real, torch.zeros_like(free, dtype=torch.long))
    deciding = torch.zeros(())
    for k in range(1, config.num_chunks + 1):
        r_blk = router(new)
        new = causal_round(r_blk, revealed, free, torch.full_like(ids[:, 0], k), config)
        ids = torch.where(new, k, ids)
        deciding = torch.where(new[..., None], r_blk, deciding.to(r_blk))
        revealed = revealed | new
    return ids, deciding


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
    lanes = default_lanes(config) if lanes is None else lanes
    if isinstance(lanes, int):
        return torch.full((rows,), lanes, device=device)
    return lanes.to(device)


def default_lanes(config: ModelConfig) -> int:
    """Four where the model was trained with four, else its largest number below, else its smallest."""
    assert config.lanes is not None
    return max((number for number in config.lanes if number <= 4), default=min(config.lanes))


def fixed_partition(
    config: ModelConfig, free: Tensor, real: Tensor, index: Tensor | None = None, lanes: int | Tensor | None = None
) -> Tensor:
    """Ids of the partitions that need no router: MDLM, BDLM, lanes, the controls, and priors that decide alone.

    `index` (B,) numbers the sequences; random ids depend on it and on `routing_seed` only. `lanes` is the number of
    lanes, of all rows or of each (B,).
    """
    if config.kind == "lanes":
        return lane_partition(config, free, real, lanes)[0]
    rank = free_rank(free)
    if config.kind == "mdlm":
        ids = torch.ones_like(rank)
    elif config.kind == "bdlm":
        assert config.block_size is not None
        ids = (rank + config.block_size - 1) // config.block_size
    else:
        assert config.num_chunks is not None
        ids = _control_ids(config, rank, free, index)
    return label(free, real, ids)


def _control_ids(config: ModelConfig, rank: Tensor, free: Tensor, index: Tensor | None) -> Tensor:
    assert config.num_chunks is not None
    if config.routing == "strided" or config.prior == "strided":
        return 1 + (rank - 1) % config.num_chunks
    if config.routing == "random":
        rank = _shuffled_rank(config.routing_seed, rank, free, index)
    ends = chunk_sizes(free.sum(dim=-1), config.num_chunks, config.chunk_growth).cumsum(dim=-1)
    return 1 + (rank[..., None] > ends[:, None, :]).sum(dim=-1).clamp(max=config.num_chunks - 1)


def _shuffled_rank(seed: int, rank: Tensor, free: Tensor, index: Tensor | None) -> Tensor:
    numbers = range(len(rank)) if index is None else index.tolist()
    shuffled = rank.clone()
    for row, number in enumerate(numbers):
        count = int(free[row].sum())
        order = torch.randperm(count, generator=Key(seed).fold(number).generator()) + 1
        shuffled[row, free[row]] = order.to(rank.device)
    return shuffled
