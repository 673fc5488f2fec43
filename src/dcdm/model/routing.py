"""How free positions become chunks, where chunk ids do not depend on noise.

The paper's routing does, and is not here: it is `ChunkingAttention.assign`, argmax(r + b) of the noisy stream.

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


def chunk_sizes(num_free: Tensor, num_chunks: int) -> Tensor:
    """Sizes of chunks 1…K for n free positions, ⌈remaining / (K−k+1)⌉: (B,) to (B, K). Empty chunks come last."""
    remaining, sizes = num_free.long(), []
    for left in range(num_chunks, 0, -1):
        sizes.append((remaining + left - 1) // left)
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
    sizes = chunk_sizes(num_free, config.num_chunks)
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


def fixed_partition(config: ModelConfig, free: Tensor, real: Tensor, index: Tensor | None = None) -> Tensor:
    """Ids of the partitions that need no router: MDLM, BDLM, the controls, and priors that decide alone.

    `index` (B,) numbers the sequences; random ids depend on it and on `routing_seed` only.
    """
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
    ends = chunk_sizes(free.sum(dim=-1), config.num_chunks).cumsum(dim=-1)
    return 1 + (rank[..., None] > ends[:, None, :]).sum(dim=-1).clamp(max=config.num_chunks - 1)


def _shuffled_rank(seed: int, rank: Tensor, free: Tensor, index: Tensor | None) -> Tensor:
    numbers = range(len(rank)) if index is None else index.tolist()
    shuffled = rank.clone()
    for row, number in enumerate(numbers):
        count = int(free[row].sum())
        order = torch.randperm(count, generator=Key(seed).fold(number).generator()) + 1
        shuffled[row, free[row]] = order.to(rank.device)
    return shuffled
