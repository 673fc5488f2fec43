"""Documents to windows of a fixed length."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from dcdm.data.tokenizers import ByteTokenizer


def pack(documents: Iterable[str], tokenizer: ByteTokenizer, length: int) -> Tensor:
    """Windows (N, length): BOS, then the next length−1 tokens of the documents joined by EOS.

    No token is dropped but the tail that does not fill a window.
    """
    pieces = [np.asarray([*tokenizer.encode(text), tokenizer.eos_id], dtype=np.int32) for text in documents]
    stream = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
    count = len(stream) // (length - 1)
    if count == 0:
        raise ValueError(
            f"the corpus has {len(stream)} tokens, fewer than one window of {length - 1}; "
            "give more text or a shorter length"
        )
    windows = np.full((count, length), tokenizer.bos_id, dtype=np.int64)
    windows[:, 1:] = stream[: count * (length - 1)].reshape(count, length - 1)
    return torch.from_numpy(windows)
