"""Which tokens to mask when a bound is estimated, and how the passes are put together with little noise.

The bound of a group g (a chunk, a block or a whole sequence) is E[(|g|/n) Σ_{i∈S} nll_i(S)], n uniform on 1…|g|
and S a uniform subset of that size. One pass carries one subset of every group. Three things keep the error low,
none of which changes the expectation:

- sizes are stratified: over the passes a group visits all of 1…|g| evenly;
- a group with no more subsets than there are passes is summed over all of them, exactly;
- tokens differ far more from each other than a token does from pass to pass, so what a token cost in the *other*
  passes is its control variate: a pass estimates only the difference, whatever part of the tokens it masks.

    B sequences   L positions   S passes   C groups
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dcdm.config import ConfigError
from dcdm.keys import Key

MOST_SUBSETS = 4096  # enumerating more mask sets than this per sequence is refused
SHRINKAGE = 0.5  # imagined passes in which a token cost as much as the others: few real ones are not overrated


@dataclass(frozen=True)
class Draw:
    """Masked positions (B, L), and the weight (B, C) of each group's summed −log p; draws are added up."""

    masked: Tensor
    weight: Tensor


def group_sizes(groups: Tensor, num_groups: int) -> Tensor:
    """(B, C) members of groups 1…C."""
    return summed(torch.ones_like(groups), groups, num_groups)


def summed(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Sum of `values` (…, B, L) over the members of groups 1…C: (…, B, C)."""
    total = values.new_zeros(*values.shape[:-1], num_groups + 1)
    return total.scatter_add_(-1, groups.clamp(min=0).expand_as(values), values)[..., 1:]


def spread(per_group: Tensor, groups: Tensor) -> Tensor:
    """(…, B, L): the value of its group at each position, 0 outside of groups 1…C."""
    padded = torch.cat([torch.zeros_like(per_group[..., :1]), per_group], dim=-1)
    return padded.gather(-1, groups.clamp(min=0).expand(*per_group.shape[:-1], -1))


def rank_in_group(groups: Tensor, priority: Tensor) -> Tensor:
    """0-based rank of each position within its group by ascending `priority`: (B, L)."""
    by_priority = priority.argsort(dim=-1)
    order = by_priority.gather(-1, groups.gather(-1, by_priority).argsort(dim=-1, stable=True))
    place = torch.arange(groups.shape[-1], device=groups.device).expand_as(groups)
    position = torch.empty_like(order).scatter_(-1, order, place)
    above = groups - groups.min()
    members = above.new_zeros(len(groups), int(above.max()) + 1).scatter_add_(-1, above, torch.ones_like(above))
    first = members.cumsum(dim=-1) - members
    return position - first.gather(-1, above)


def enumerable(sizes: Tensor, samples: int) -> Tensor:
    """(B, C) bool: groups whose 2^|g| − 1 subsets need no more than `samples` passes."""
    return sizes < math.floor(math.log2(samples + 1)) + 1


def passes_needed(sizes: Tensor, samples: int) -> Tensor:
    """(B,): `samples`, or fewer where all groups of a row are enumerated."""
    needed = torch.where(enumerable(sizes, samples), 2 ** sizes.clamp(max=62) - 1, samples)
    return needed.amax(dim=-1) if needed.shape[-1] else needed.new_zeros(len(needed))


def sampled_subsets(key: Key, index: Tensor, groups: Tensor, num_groups: int, samples: int) -> Iterator[Draw]:
    """Up to `samples` draws: small groups enumerated, of the others stratified sizes and uniform subsets.

    Over the samples each group visits every stratum of the sizes once; within a sample the groups are spread
    over the strata. Sequence i's draws follow from (key, i) alone, and a position's from its rank among those that
    may be masked, so that sequences of one number share their noise whatever stands before it.
    """
    among_free = (groups >= 1).cumsum(dim=-1).sub(1).clamp(min=0)
    sizes = group_sizes(groups, num_groups)
    exact = enumerable(sizes, samples) & (sizes > 0)
    in_exact = spread(exact.long(), groups) == 1
    place = _places(groups)
    within = _places_in_strata(key, index, groups, num_groups, samples)
    for s in range(int(passes_needed(sizes, samples).max()) if len(sizes) else 0):
        stratum = (s + torch.arange(num_groups)) % samples
        within_s = within.gather(1, stratum.expand(len(groups), 1, -1)).squeeze(1)
        n = torch.minimum(((stratum + within_s) / samples * sizes).long() + 1, sizes)
        rank = rank_in_group(groups, key.fold("subset", s).rows(index, groups.shape[1]).gather(1, among_free))
        drawn = Draw((rank < spread(n, groups)) & (groups >= 1), sizes / n.clamp(min=1).double() / samples)
        every = subset_draw(s + 1, groups, sizes, place)
        yield Draw(
            torch.where(in_exact, every.masked, drawn.masked), torch.where(exact, every.weight, drawn.weight)
        )


def _places_in_strata(key: Key, index: Tensor, groups: Tensor, num_groups: int, samples: int) -> Tensor:
    """(B, S, C) uniform places in the S strata of each group; over the groups of a row they are stratified too."""
    within = torch.zeros(len(groups), samples, num_groups, dtype=torch.float64)
    for row, number in enumerate(index.tolist()):
        used = max(1, int(groups[row].max()))
        order = [key.fold("spread", number, s).permutation(used) for s in range(samples)]
        within[row, :, :used] = (torch.stack(order) + key.fold("size", number).uniform(samples, used)) / used
    return within


def all_subsets(groups: Tensor, num_groups: int) -> Iterator[Draw]:
    """Every non-empty subset of every group."""
    sizes = group_sizes(groups, num_groups)
    largest = int(sizes.max())
    total = 2 ** min(largest, 64)
    if total > MOST_SUBSETS:
        raise ConfigError(
            f"samples='all' would enumerate 2^{largest} mask sets per sequence (at most {MOST_SUBSETS:,}); "
            "give a number of samples instead"
        )
    place = _places(groups)
    for number in range(1, total):
        yield subset_draw(number, groups, sizes, place)


def _places(groups: Tensor) -> Tensor:
    """(B, L) how many members of its group stand before a position."""
    return rank_in_group(groups, torch.arange(groups.shape[1]).expand_as(groups).double())


def subset_draw(number: int, groups: Tensor, sizes: Tensor, place: Tensor) -> Draw:
    """Subset `number`, read as bits, of every group that has it; weight: its probability times |g|/n.

    That is (n−1)!(|g|−n)!/|g|!.
    """
    n = number.bit_count()
    applies = number < 2 ** sizes.clamp(max=62)
    weight = torch.exp(
        torch.lgamma(torch.tensor(float(n)).double())
        + torch.lgamma((sizes - n + 1).clamp(min=1).double())
        - torch.lgamma(sizes.double() + 1)
    )
    inside = (spread(applies.long(), groups) == 1) & (groups >= 1)
    return Draw((((number >> place.clamp(max=62)) & 1) == 1) & inside, torch.where(applies, weight, 0.0))


def combine(draws: list[Draw], nlls: list[Tensor], groups: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """The estimate by position (B, L) and the variance (B,) of its sum, from each draw's −log p (B, L)."""
    if not draws:  # nothing is free
        return torch.zeros(groups.shape, dtype=torch.float64), torch.zeros(len(groups), dtype=torch.float64)
    masked_sbl = torch.stack([draw.masked for draw in draws])
    weight_sbc = torch.stack([draw.weight for draw in draws])
    num_groups = weight_sbc.shape[-1]
    sampled_bc = ~enumerable(group_sizes(groups, num_groups), samples)
    nll_sbl = torch.stack(nlls)
    cost_sbl = _cost_in_other_passes(nll_sbl, masked_sbl, groups, num_groups)
    cost_sbl = torch.where(spread(sampled_bc.long(), groups) == 1, cost_sbl, 0.0)
    term_sbl = torch.where(masked_sbl, nll_sbl - cost_sbl, 0.0) * spread(weight_sbc, groups) + cost_sbl / samples
    f_sbc = torch.where(sampled_bc, summed(term_sbl, groups, num_groups) * samples, 0.0)
    return term_sbl.sum(dim=0), _stratified_variance(f_sbc, sampled_bc, samples)


def _cost_in_other_passes(nll_sbl: Tensor, masked_sbl: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """What each position can be expected to cost, from all passes but s: its group's mean cost, and its own excess
    over that in the passes that masked it.

    Being independent of the subset of pass s, it may stand in for the cost there without a bias. The group's mean
    cancels out of the group's total; it keeps the shares of the positions from depending on how often each of them
    was masked.
    """
    count_sbc = summed(masked_sbl.long(), groups, num_groups).clamp(min=1)
    level_sbl = spread(summed(nll_sbl, groups, num_groups) / count_sbc, groups)
    excess_sbl = torch.where(masked_sbl, nll_sbl - level_sbl, 0.0)
    others = masked_sbl.sum(dim=0) - masked_sbl.long()
    excess = (excess_sbl.sum(dim=0) - excess_sbl) / (others + SHRINKAGE)
    if len(nll_sbl) == 1:
        return level_sbl + excess
    return (level_sbl.sum(dim=0) - level_sbl) / (len(nll_sbl) - 1) + excess


def _stratified_variance(f_sbc: Tensor, sampled_bc: Tensor, samples: int) -> Tensor:
    """Variance (B,) of the mean over samples, from differences of neighbouring strata within each group.

    Plain sample variance would count the differences between strata, which stratification removes.
    """
    unknown = torch.full(sampled_bc.shape[:1], math.nan, dtype=f_sbc.dtype)
    if samples == 1:
        return torch.where(sampled_bc.any(dim=-1), unknown, 0.0)
    if len(f_sbc) < samples:  # every group was enumerated
        return torch.zeros_like(unknown)
    group = torch.arange(f_sbc.shape[-1])
    stratum = torch.arange(samples)[:, None]
    ordered = f_sbc[(stratum - group) % samples, :, group].movedim(-1, 1)  # (S, B, C) by stratum
    steps = ordered.diff(dim=0).square().sum(dim=0)
    return (steps / (2 * samples * (samples - 1))).sum(dim=-1)
