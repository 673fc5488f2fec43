"""The paper's chunking attention in a transformer of your own.

    python examples/chunking_attention.py [STEPS]

A small bidirectional transformer learns to restore masked letters. Behind its first block stands
`dcdm.ChunkingAttention`: it mixes the states softly over K learned subspaces, and its scores assign every position
to a chunk. The two lines marked with ← keep the chunks balanced.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from dcdm import ChunkingAttention

LETTERS = " abcdefghijklmnopqrstuvwxyz"
MASK = len(LETTERS)
TEXT = "the quick brown fox jumps over the lazy dog while a slow green turtle walks under the busy bridge "
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class MyTransformer(nn.Module):
    def __init__(self, d: int = 64, layers: int = 3, length: int = 64, num_chunks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS) + 1, d)
        self.place = nn.Parameter(torch.randn(length, d) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.chunking = ChunkingAttention(d, num_chunks, chunk_dim=16)
        self.head = nn.Linear(d, len(LETTERS))

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.embed(z) + self.place[: z.shape[1]]
        known = (z != MASK)[:, None, :].expand(-1, z.shape[1], -1)
        mask = known | torch.eye(z.shape[1], dtype=torch.bool, device=z.device)  # everybody sees what is known
        for number, block in enumerate(self.blocks):
            h = block(h)
            if number == 0:
                h, scores = self.chunking(h, mask)
        return self.head(h), scores


def main(steps: int) -> None:
    torch.manual_seed(0)
    model = MyTransformer().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor([LETTERS.index(letter) for letter in TEXT * 4], device=DEVICE)
    for step in range(1, steps + 1):
        starts = torch.randint(len(TEXT), (32,))
        tokens = torch.stack([text[start : start + 64] for start in starts.tolist()])
        masked = torch.rand(tokens.shape, device=DEVICE) < torch.rand(32, 1, device=DEVICE)
        logits, scores = model(tokens.masked_fill(masked, MASK))
        ids = model.chunking.assign(scores)
        loss = F.cross_entropy(logits[masked], tokens[masked])
        loss = loss + 0.01 * model.chunking.balance_loss(scores)  # ←
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counts = model.chunking.counts(ids)
        model.chunking.update_bias(counts)  # ←
        if step % max(1, steps // 5) == 0:
            shares = ", ".join(f"{share:.0%}" for share in (counts / counts.sum()).tolist())
            print(f"step {step}: loss {loss.item():.3f}, chunks {shares}")
    _, scores = model(text[None, :64])
    for k in range(1, len(model.chunking.mu) + 1):
        mine = (model.chunking.assign(scores)[0] == k).tolist()
        print(f"chunk {k}: " + "".join(c if own else "·" for c, own in zip(TEXT, mine, strict=False)))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
