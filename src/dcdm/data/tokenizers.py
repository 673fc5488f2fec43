"""Text to ids and back. Every vocabulary ends with BOS, PAD and MASK."""

from __future__ import annotations

from collections.abc import Iterable


class ByteTokenizer:
    """UTF-8 bytes 0…255, EOS 256, then BOS 257, PAD 258 and MASK 259."""

    eos_id, bos_id, pad_id, mask_id = 256, 257, 258, 259
    vocab_size = 260

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; specials and EOS are left out, broken UTF-8 shows as �."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")
