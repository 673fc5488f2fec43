"""Who may attend to whom, as small named predicates.

Every attention in this package runs over *slots*: the positions of a sequence, once (decoding) or twice
(training: the noisy stream z followed by the clean stream x), in any order. A slot knows its position, its
chunk, its stream and whether its token is masked in z. A mask is a predicate over a query slot and a key
slot; dense masks, tiles and block masks all derive from it.

    B batch   L positions   Q, S query and key slots   chunk −1 padding, 0 always visible, 1…K chunks

`python -m dcdm.model.masks` draws the paper's three for six tokens in three chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

CLEAN, NOISY = 0, 1  # stream numbers


def there(x: Tensor, device: torch.device) -> Tensor:
    """`x` on a device; what comes from main memory does not wait for the work that the device has before it."""
    if x.device.type != "cpu" or device.type == "cpu":
        return x.to(device)
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


@dataclass(frozen=True)
class Slots:
    """What a mask may know of each slot; every field has the shape (B, S)."""

    position: Tensor
    chunk: Tensor
    stream: Tensor
    masked: Tensor

    @classmethod
    def of(
        cls,
        chunk: Tensor,
        masked: Tensor | None = None,
        stream: int = NOISY,
        position: Tensor | None = None,
    ) -> Slots:
        """One stream in original order, from chunk ids (B, L)."""
        if position is None:
            position = torch.arange(chunk.shape[-1], device=chunk.device).expand_as(chunk)
        if masked is None:
            masked = torch.zeros_like(chunk, dtype=torch.bool)
        return cls(position, chunk, torch.full_like(chunk, stream), masked)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Slots:
        return Slots(*(change(getattr(self, f.name)) for f in fields(self)))

    def __getitem__(self, index: object) -> Slots:
        return self._map(lambda x: x[index])  # type: ignore[index]

    def to(self, device: torch.device) -> Slots:
        if device.type == "cpu" and self.chunk.device.type != "cpu":  # one wait for all fields
            position, chunk, stream, masked = torch.stack([*vars(self).values()]).cpu()
            return Slots(position, chunk, stream, masked.bool())
        return self._map(lambda x: there(x, device))

    def gather(self, order: Tensor) -> Slots:
        return self._map(lambda x: x.gather(-1, order))

    @staticmethod
    def cat(*parts: Slots) -> Slots:
        columns = (torch.cat([getattr(p, f.name) for p in parts], dim=-1) for f in fields(Slots))
        return Slots(*columns)


@dataclass(frozen=True)
class Mask:
    """A named predicate `rule(query, key)` on broadcastable slots; `&` and `|` compose."""

    name: str
    rule: Callable[[Slots, Slots], Tensor]

    def __call__(self, query: Slots, key: Slots) -> Tensor:
        return self.rule(query, key)

    def __and__(self, other: Mask) -> Mask:
        return Mask(f"({self.name} & {other.name})", lambda q, k: self.rule(q, k) & other.rule(q, k))

    def __or__(self, other: Mask) -> Mask:
        return Mask(f"({self.name} | {other.name})", lambda q, k: self.rule(q, k) | other.rule(q, k))

    def named(self, name: str) -> Mask:
        return Mask(name, self.rule)

    def dense(self, query: Slots, key: Slots | None = None) -> Tensor:
        """(B, Q, S) bool, True where the query may attend to the key."""
        key = query if key is None else key
        return self.rule(query[..., :, None], key[..., None, :])


not_padding = Mask("not padding", lambda q, k: (q.chunk >= 0) & (k.chunk >= 0))
same_stream = Mask("same stream", lambda q, k: q.stream == k.stream)

# M^noise[ℓ,m] = [ν_m = 0] ∨ [ν_ℓ = 1 ∧ ℓ = m]
visible_key = Mask("key visible", lambda q, k: ~k.masked)
masked_self = Mask("masked self", lambda q, k: q.masked & (q.position == k.position))
noise = (not_padding & same_stream & (visible_key | masked_self)).named("noise")

# M^chunk at inference: [c_m ≤ c_ℓ]
chunk_causal = (not_padding & Mask("chunk not later", lambda q, k: k.chunk <= q.chunk)).named("chunk_causal")

# M^chunk in training, over z ⊕ x; what is not CLEAN counts as noisy, since lanes number streams of their own
noisy_to_noisy = Mask(
    "noisy to noisy", lambda q, k: (q.stream != CLEAN) & (k.stream == q.stream) & (q.chunk == k.chunk)
)
noisy_to_clean = Mask(
    "noisy to clean", lambda q, k: (q.stream != CLEAN) & (k.stream == CLEAN) & (q.chunk > k.chunk)
)
clean_to_clean = Mask(
    "clean to clean", lambda q, k: (q.stream == CLEAN) & (k.stream == CLEAN) & (q.chunk >= k.chunk)
)
dual_stream = (not_padding & (noisy_to_noisy | noisy_to_clean | clean_to_clean)).named("dual_stream")

# next-token prediction
causal = (not_padding & Mask("not later", lambda q, k: k.position <= q.position)).named("causal")


def noise_mask(masked: Tensor) -> Tensor:
    """M^noise of a noise pattern: (…, L) bool, True = masked, to (…, L, L)."""
    return noise.dense(Slots.of(torch.zeros_like(masked, dtype=torch.long), masked))


def chunk_causal_mask(ids: Tensor) -> Tensor:
    """M^chunk of chunk ids (…, L) on one stream, as in decoding: (…, L, L)."""
    return chunk_causal.dense(Slots.of(ids))


def dual_stream_slots(ids: Tensor) -> Slots:
    """Slots of z ⊕ x in original order, (…, 2L)."""
    return Slots.cat(Slots.of(ids), Slots.of(ids, stream=CLEAN))


def read_slots(ids: Tensor) -> Tensor:
    """(…, 2L) bool: the slots of z ⊕ x that anyone reads.

    Nobody reads the noisy copy of chunk 0 (its tokens are known) or the clean copy of a row's last chunk.
    """
    clean = (ids >= 0) & (ids < ids.amax(dim=-1, keepdim=True))
    return torch.cat([ids >= 1, clean], dim=-1)


def dual_stream_mask(ids: Tensor) -> Tensor:
    """M^chunk of chunk ids (…, L) on z ⊕ x, as in training: (…, 2L, 2L), noisy half first."""
    return dual_stream.dense(dual_stream_slots(ids))


if __name__ == "__main__":
    masked, ids = torch.tensor([0, 1, 0, 1, 1, 0]).bool(), torch.tensor([0, 2, 1, 3, 2, 1])
    print(f"masked {masked.int().tolist()}, chunks {ids.tolist()}; a row is a query, # a key that it sees")
    for name, mask in (
        ("noise_mask: chunking attention", noise_mask(masked)),
        ("chunk_causal_mask: decoding", chunk_causal_mask(ids)),
        ("dual_stream_mask: training, the noisy stream before the clean one", dual_stream_mask(ids)),
    ):
        print(f"\n{name}", *("".join("#" if seen else "." for seen in row) for row in mask.tolist()), sep="\n")
