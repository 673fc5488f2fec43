"""Documents to windows in memory: what a preparation computes, in a few literal lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcdm.config import DataError
from dcdm.data.tokenizers import Tokenizer


def pack(documents: Iterable[str], tokenizer: Tokenizer, length: int) -> Tensor:
    """Windows (N, length): BOS, then the next length−1 tokens of the documents joined by EOS.

    No token is dropped but the tail that does not fill a window.
    """
    ids = tokenizer.encode_arrays(list(documents))
    stream = np.concatenate(
        [np.empty(0, dtype=np.int64), *(np.append(i.astype(np.int64), tokenizer.eos_id) for i in ids)]
    )
    count = len(stream) // (length - 1)
    if count == 0:
        raise DataError(
            f"the corpus has {len(stream)} tokens, fewer than one window of {length - 1}; "
            "give more text or a shorter length"
        )
    windows = np.full((count, length), tokenizer.bos_id, dtype=np.int64)
    windows[:, 1:] = stream[: count * (length - 1)].reshape(count, length - 1)
    return torch.from_numpy(windows)


class InMemory:
    """Windows (N, L) as a data set for `dcdm.data.loading.loader`."""

    def __init__(self, windows: Tensor, identity: str = "in memory") -> None:
        self.windows, self.identity = windows, identity

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.windows[index]
        return {"tokens": tokens, "prompt": torch.zeros_like(tokens, dtype=torch.bool), "index": index}
