"""Samples and trajectory likelihoods against enumeration of everything the model could write."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

import dcdm
import tiny
from dcdm.decoding import routes
from dcdm.decoding.commits import Sampling
from dcdm.decoding.config import AdaBlock
from dcdm.decoding.loop import predictable
from walks import ORDERED

FREE = 3


WAYS = [(k, "auto") for k in tiny.KINDS if k not in tiny.PAPER and k != "random"]
WAYS += [(k, routing) for k in tiny.PAPER for routing in ("paper-chunk", "paper-step")]


@torch.no_grad()
def predicted(model, z, route=None):
    """Plain loop over the same weights: the next chunk's positions and log-probabilities, nothing remembered.

    `route` are the ids made at the chunk's start, if the decoder keeps them; the ids that hold are given back.
    """
    row = torch.tensor([z])
    if model.config.kind == "ar":
        at = z.index(model.config.mask_id)
        logits = predictable(model, model.denoise(row, torch.zeros_like(row)))[0, [at - 1]]
        return [at], logits.log_softmax(-1), None
    ids = routes.current_ids(model, row) if route is None else torch.tensor([route])
    masked = row[0] == model.config.mask_id
    active = (masked & (ids[0] == ids[0][masked].min())).nonzero().flatten().tolist()
    log_p = predictable(model, model.denoise(row, ids))[0, active].log_softmax(-1)
    return active, log_p, tuple(ids[0].tolist())


def filled(z, positions, values):
    z = list(z)
    for at, value in zip(positions, values, strict=True):
        z[at] = value
    return tuple(z)


def exact_distribution(model, steps, keeps_route=False):
    """p(x) of the reverse process: in `steps` intervals per chunk, or (None) in continuous time.

    `keeps_route`: positions are routed at a chunk's start only, not after every forward.
    """

    @functools.cache
    def outcomes(z, step, route=None):
        if model.config.mask_id not in z:
            return {z: 1.0}
        active, log_p, route = predicted(model, list(z), route)
        total = {}
        for chosen, chance in moments(len(active), step):
            for values in itertools.product(range(tiny.SYMBOLS), repeat=len(chosen)):
                p = chance * math.exp(sum(float(log_p[i, v]) for i, v in zip(chosen, values, strict=True)))
                after = filled(z, [active[i] for i in chosen], values)
                is_full = len(chosen) == len(active)
                kept = route if keeps_route and not is_full else None
                for x, q in outcomes(after, 0 if is_full else step + 1, kept).items():
                    total[x] = total.get(x, 0.0) + p * q
        return total

    def moments(count, step):
        if steps is None:
            return [((i,), 1 / count) for i in range(count)]
        share = 1 / (steps - step)
        return [
            (chosen, share ** len(chosen) * (1 - share) ** (count - len(chosen)))
            for size in range(count + 1)
            for chosen in itertools.combinations(range(count), size)
            if share < 1 or size == count
        ]

    return outcomes((model.config.bos_id, *[model.config.mask_id] * FREE), 0)


@pytest.mark.parametrize("commit", ["first-hitting", "ancestral:2"])
@pytest.mark.parametrize(("kind", "routing"), WAYS)
def test_samples_follow_the_models_exact_distribution(kind, routing, commit):
    model = tiny.model(kind, symbols=tiny.SYMBOLS)
    exact = exact_distribution(model, 2 if commit == "ancestral:2" else None, routing == "paper-chunk")
    assert abs(sum(exact.values()) - 1) < 1e-9
    count = 3000
    drawn = dcdm.generate(
        model, [[]] * count, max_new_tokens=FREE, commit=commit, routing=routing, batch_size=count, seed=1
    )
    observed = dict.fromkeys(exact, 0)
    for row in drawn.tokens.tolist():
        observed[tuple(row)] += 1
    chi_square = sum((observed[x] - count * p) ** 2 / (count * p) for x, p in exact.items() if p > 1e-4)
    assert chi_square < 24.3, f"7 degrees of freedom, 0.1 %: {chi_square:.1f}"


def test_a_sampler_that_fills_in_the_wrong_order_is_noticed():
    """The negative control of the test above: most confident first is not the diffusion's own process."""
    model = tiny.model("mdlm", symbols=tiny.SYMBOLS)
    exact = exact_distribution(model, None)
    drawn = dcdm.generate(model, [[]] * 3000, max_new_tokens=FREE, commit="position", batch_size=3000, seed=1)
    observed = dict.fromkeys(exact, 0)
    for row in drawn.tokens.tolist():
        observed[tuple(row)] += 1
    assert sum((observed[x] - 3000 * p) ** 2 / (3000 * p) for x, p in exact.items() if p > 1e-4) > 40


@pytest.mark.parametrize("commit", ORDERED)
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_trajectory_likelihoods_of_every_ordered_decoder_sum_to_one(kind, commit):
    model = tiny.model(kind, symbols=tiny.SYMBOLS)
    rows = tiny.every_sequence(4)
    index = torch.zeros(len(rows), dtype=torch.long)
    scored = dcdm.score(model, rows, "trajectory", commit=commit, index=index)
    assert abs(float((-scored.nats).exp().sum()) - 1) < 1e-9


@pytest.mark.parametrize("kind", ["bdlm", "mdlm"])
def test_trajectory_likelihoods_of_adaptive_blocks_sum_to_one(kind):
    model = tiny.model(kind, symbols=tiny.SYMBOLS)
    rows = tiny.every_sequence(6)
    for least in (0.0, 0.55, 1.0):
        scored = dcdm.score(
            model, rows, "trajectory", commit="threshold:0.7", routing="adablock",
            adablock=AdaBlock((1,), 2, least=least, window=4),
        )  # fmt: skip
        assert abs(float((-scored.nats).exp().sum()) - 1) < 1e-9


@pytest.mark.parametrize(("kind", "routing"), WAYS)
def test_the_trajectory_of_one_position_at_a_time_matches_brute_force(kind, routing):
    model = tiny.model(kind, symbols=3)
    clean = tiny.tokens(3, 6, symbols=3)
    expected = []
    for row in clean.tolist():
        z, nats, route = [row[0], *[model.config.mask_id] * 5], 0.0, None
        while model.config.mask_id in z:
            active, log_p, route = predicted(model, z, route)
            i = int(log_p.amax(dim=-1).argmax())
            nats -= float(log_p[i, row[active[i]]])
            z[active[i]] = row[active[i]]
            if routing != "paper-chunk" or len(active) == 1:
                route = None
        expected.append(nats)
    for cache in ("none",) if kind in tiny.PAPER else ("exact", "none"):
        scored = dcdm.score(model, clean, "trajectory", commit="position", routing=routing, cache=cache)
        torch.testing.assert_close(scored.nats, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("routing", ["paper-equal", "paper-strided"])
@pytest.mark.parametrize("commit", ["chunk", "dilated:2"])
@pytest.mark.parametrize("kind", tiny.PAPER)
def test_trajectory_likelihoods_of_rounds_of_equal_size_sum_to_one(kind, commit, routing):
    model = tiny.model(kind, symbols=tiny.SYMBOLS)
    rows = tiny.every_sequence(5)
    scored = dcdm.score(model, rows, "trajectory", commit=commit, routing=routing)
    assert abs(float((-scored.nats).exp().sum()) - 1) < 1e-9
    bound = dcdm.score(model, rows, "sequential", samples="all", routing=routing)
    assert float((-bound.nats).exp().sum()) <= 1 + 1e-9


@torch.no_grad()
def test_rounds_of_equal_size_match_a_literal_loop():
    """Round k asks every open position how much better subspace k fits than the others do on average."""
    model = tiny.model("paper", num_chunks=3)
    model.chunking.balance_bias.copy_(torch.tensor([0.3, -0.2, 0.0]))
    clean = tiny.tokens(4, 9)
    later, expected = 99, []
    for row in clean:
        ids, nats = torch.tensor([0] + [later] * 8), 0.0
        for k, size in ((1, 3), (2, 3), (3, 2)):
            z = row.masked_fill(ids == later, model.config.mask_id)[None]
            r = (
                model.run_block_zero(z, torch.ones_like(z, dtype=torch.bool)).scores[0]
                + model.chunking.balance_bias
            )
            fit = r[:, k - 1] - r.mean(dim=-1)
            chosen = sorted((at for at in range(9) if ids[at] == later), key=lambda at: -float(fit[at]))[:size]
            ids[chosen] = k
            log_p = predictable(model, model.denoise(z, ids[None]))[0].log_softmax(dim=-1)
            nats -= float(log_p[chosen, row[chosen]].sum())
        expected.append(nats)
    scored = dcdm.score(model, clean, "trajectory", commit="chunk", routing="paper-equal")
    torch.testing.assert_close(scored.nats, torch.tensor(expected, dtype=torch.float64))
    assert scored.forwards.tolist() == [3] * 4, "as many forward passes as chunks, from an empty page"


@torch.no_grad()
def test_strided_rounds_take_every_kth_position_whatever_the_router_says():
    model, ids = tiny.model("paper", num_chunks=3), torch.tensor([[0, 1, 2, 3, 1, 2, 3, 1, 2]])
    clean, expected = tiny.tokens(2, 9), []
    for row in clean:
        nats = 0.0
        for k in (1, 2, 3):
            z = row.masked_fill(ids >= k, model.config.mask_id)
            log_p = predictable(model, model.denoise(z, ids))[0].log_softmax(dim=-1)
            chosen = (ids[0] == k).nonzero()[:, 0]
            nats -= float(log_p[chosen, row[chosen]].sum())
        expected.append(nats)
    scored = dcdm.score(model, clean, "trajectory", commit="chunk", routing="paper-strided")
    torch.testing.assert_close(scored.nats, torch.tensor(expected, dtype=torch.float64))


def test_a_tempered_truncated_decoder_is_scored_by_what_it_samples_from():
    model = tiny.model("bdlm", symbols=3)
    rows = tiny.every_sequence(4, symbols=3)
    for sampling in (Sampling(0.5), Sampling(1.5, top_k=2), Sampling(1.0, top_p=0.8)):
        scored = dcdm.score(model, rows, "trajectory", commit="position", sampling=sampling)
        assert abs(float((-scored.nats).exp().sum()) - 1) < 1e-9
