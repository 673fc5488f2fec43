"""Canvases that are filled with known tokens, and what the model said at each forward."""

from __future__ import annotations

import torch

import tiny
from dcdm.decoding import routes
from dcdm.decoding.caching import Cached
from dcdm.decoding.commits import commit_policy
from dcdm.decoding.loop import Uncached, fill_canvas

EXACT = ["ar", *tiny.VALID]
ORDERED = ["chunk", "position", "steps:2", "dilated:2", "threshold:0.5", "entropy:0.9", "factor:0.8"]
RANDOM = ["ancestral:3", "first-hitting"]


def model_of(kind, **changes):
    chunks = {"num_chunks": 4} if tiny.KINDS.get(kind, {}).get("kind") == "dcdm" else {}
    return tiny.model(kind, **{**chunks, **changes})


def canvases(model, seed=0):
    """Three rows of different lengths, with given tokens at the front, in the middle and at the end."""
    clean = tiny.tokens(3, 14, seed=seed, padding=(0, 3, 6))
    prompt = torch.zeros_like(clean, dtype=torch.bool)
    prompt[0, 1:4] = True
    if model.config.kind != "ar":
        prompt[1, [5, 9]] = True
    return clean, model.position_masks(clean, prompt)


def whole(view):
    """(B, A, V): all log-probabilities of a view; 0 at fillers."""
    found = []
    view.predicted.measure(lambda log_p, row, at: found.append(log_p) or at, view.predicted.valid, 0)
    log_p = torch.cat(found)
    out = torch.zeros(*view.candidates.shape, log_p.shape[-1], dtype=log_p.dtype)
    out[view.predicted.valid] = log_p
    return out


def walked(model, clean, positions, predict, commit, routing="auto", adablock=None, order=None):
    """Log-probabilities of each forward at its positions, and the counts."""
    seen = []

    def reveal(view, fill):
        seen.append((whole(view), view.candidates, view.position))
        return clean.gather(1, view.position)

    router = routes.router_of(model, positions, torch.arange(len(clean)), routing, adablock)
    z = clean.masked_fill(positions.free, model.config.mask_id)
    filled, counts = fill_canvas(z, positions, router, predict, commit_policy(commit), reveal, order=order)
    assert torch.equal(filled, clean)
    return seen, counts


def same_predictions(slow, fast):
    for (a, where, at), (b, also, there) in zip(slow, fast, strict=True):
        assert torch.equal(where, also)
        assert torch.equal(at[where], there[where])
        torch.testing.assert_close(b[where], a[where], rtol=0, atol=1e-9)


def both_ways(model, clean, positions, *settings, predict=None, **named):
    """What is seen without a cache and, the same, with one (or by `predict`); the counts of both."""
    slow, slow_counts = walked(model, clean, positions, Uncached(model), *settings, **named)
    fast, fast_counts = walked(model, clean, positions, predict or Cached(model, positions), *settings, **named)
    same_predictions(slow, fast)
    return slow, slow_counts, fast_counts
