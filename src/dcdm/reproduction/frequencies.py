"""What single tokens' frequencies alone give: the line below which a model's rank begins to mean something."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dcdm.data.store import PreparedData
from dcdm.files import write_whole
from dcdm.reproduction.measures import summed, windows
from dcdm.reproduction.runs import Places, as_json
from dcdm.reproduction.scale import TEST, ZERO_SHOT, Scale


def write_frequencies(scale: Scale, places: Places) -> None:
    """Write the figures beside the results, unless they are there already."""
    data, path = PreparedData.open(places.prepared(scale)), places.frequencies(scale)
    made_of = {"data": data.fingerprint, "windows": [scale.heldout_windows, scale.zeroshot_windows]}
    try:
        if json.loads(path.read_bytes())["made_of"] == made_of:
            return
    except (OSError, ValueError, KeyError):
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, as_json({"made_of": made_of, "measures": frequencies(scale, places, data)}))


def frequencies(scale: Scale, places: Places, data: PreparedData) -> Mapping[str, Any]:
    """Test text and texts of other kinds under the training text's counts, each token counted once more."""
    stream = data.stream("train")
    counts = np.bincount(stream.read(0, len(stream)), minlength=data.vocab_size) + 1.0
    tokenizer = data.tokenizer
    counts[[tokenizer.bos_id, tokenizer.pad_id, tokenizer.mask_id]] = 0
    nll_v = torch.from_numpy(-np.log(np.maximum(counts, 1e-300) / counts.sum()))

    def of(name: str, path: str, limit: int) -> dict[str, Any]:
        held = windows(places.data / path, name, tokenizer, scale.base.context_length, limit)
        frees = [batch.place >= 0 for batch in held.batches]
        nats = [(nll_v[batch.tokens] * free).sum(-1) for batch, free in zip(held.batches, frees, strict=True)]
        return summed(held, list(zip(nats, [free.sum(-1) for free in frees], strict=True)))

    return {
        "heldout": {"valid": of("wikitext2", TEST, scale.heldout_windows)},
        "zeroshot": {name: {"valid": of(name, path, scale.zeroshot_windows)} for name, path in ZERO_SHOT.items()},
    }
