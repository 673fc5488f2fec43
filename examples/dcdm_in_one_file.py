"""The Dynamic Chunking Diffusion Model (arXiv 2605.15676) in one file: PyTorch, and nothing else.

    python examples/dcdm_in_one_file.py [TEXT_FILE] [--steps 300]

It trains a small DCDM on a text (by default the English manual that comes with Python), shows in colour which
tokens form a chunk, and fills in a text chunk by chunk, in minutes on a laptop. Sections follow the paper.

    B batch   L positions   d hidden size   K chunks   h dimension of a subspace   V vocabulary
    x clean tokens   z noisy tokens: x with MASK where ν = 1   c chunk of each position, 0…K−1   t noise level

Where the paper is silent this does what the package does (docs/method.md): BOS is always visible, the layer reads a
normed state and adds to it, ids come from the noisy stream alone. Weights have the package's names and fit it.
"""

import argparse
import math
import re
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- 4.1  Chunking attention --------------------------------------------------------------------------------------


class ChunkingAttention(nn.Module):
    """K subspaces μ_k: tokens mix softly within each, and go to the chunk whose subspace they lie in most."""

    def __init__(self, d: int, K: int, h: int) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.randn(K, d, h) * 0.02)
        self.v_proj, self.o_proj = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.register_buffer("balance_bias", torch.zeros(K))  # b of section 4.3; no gradient

    def forward(self, H: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """H (B, L, d) and who may attend to whom (B, L, L): the new H, and the scores r (B, L, K)."""
        K, _, h = self.mu.shape
        x = F.rms_norm(H, H.shape[-1:], eps=1e-6)
        p = torch.einsum("bld,kdh->bklh", x, self.mu)  # p_kℓ = μ_kᵀ x_ℓ
        A = p @ p.transpose(2, 3) / math.sqrt(h)  # A_k = p_k p_kᵀ / √h
        T = A.masked_fill(~mask[:, None], -torch.inf).softmax(dim=-1)
        Y = self.o_proj(T.sum(dim=1) / math.sqrt(K) @ self.v_proj(x))  # Y = W_O (1/√K Σ_k T_k) W_V x
        return H + Y, p.norm(dim=-1).transpose(1, 2)  # r_ℓk = ‖p_kℓ‖

    def assign(self, r: Tensor) -> Tensor:
        """c_ℓ = argmax_k (r_ℓk + b_k): hard, without gradient."""
        return (r.detach() + self.balance_bias).argmax(dim=-1)


# --- 4.2  The masks, the blocks, the model ------------------------------------------------------------------------


def noise_mask(nu: Tensor) -> Tensor:
    """M^noise: every position sees the visible ones, a masked one also itself. (B, L) → (B, L, L)"""
    itself = torch.eye(nu.shape[1], dtype=torch.bool, device=nu.device)
    return ~nu[:, None, :] | (nu[:, :, None] & itself)


def chunk_mask(c: Tensor) -> Tensor:
    """M^chunk over z ⊕ x (appendix B): (B, L) → (B, 2L, 2L)."""
    q, k = c[:, :, None], c[:, None, :]
    noisy = torch.cat([q == k, q > k], dim=2)  # z sees its own chunk in z, and earlier chunks in x
    clean = torch.cat([torch.zeros_like(q == k), q >= k], dim=2)  # x sees x up to its own chunk, and never z
    return torch.cat([noisy, clean], dim=1)


def rotate(x: Tensor, position: Tensor, theta: float = 1e6) -> Tensor:
    """Rotary positions: (B, S, heads, D)."""
    D = x.shape[-1]
    angle = position[:, None, None] / theta ** (torch.arange(0, D, 2, device=x.device, dtype=x.dtype) / D)
    cos, sin = angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class SelfAttention(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.D = d // heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(self.D, eps=1e-6), nn.RMSNorm(self.D, eps=1e-6)

    def forward(self, x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.D)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), position), rotate(self.k_norm(k), position)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, 3 * d, bias=False)
        self.down_proj = nn.Linear(3 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A pre-norm transformer block; who attends to whom is said from outside."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.self_attn, self.mlp = SelfAttention(d, heads), MLP(d)

    def forward(self, H: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        H = H + self.self_attn(self.input_layernorm(H), position, mask)
        return H + self.mlp(self.post_attention_layernorm(H))


class DCDM(nn.Module):
    """One block and the chunking attention form the chunks; the other blocks denoise under their mask."""

    def __init__(self, V: int, d: int = 128, blocks: int = 4, heads: int = 4, K: int = 8, h: int = 32) -> None:
        super().__init__()
        self.BOS, self.MASK = V - 3, V - 1  # the last three tokens are BOS, PAD and MASK, as in the package
        self.embed_tokens = nn.Embedding(V, d)
        self.layers = nn.ModuleList(Block(d, heads) for _ in range(blocks))
        self.chunking = ChunkingAttention(d, K, h)
        self.norm = nn.RMSNorm(d, eps=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.chunking.o_proj.weight)  # the paper: std 0.02; from zero it trains better

    def stage_1(self, tokens: Tensor, nu: Tensor) -> tuple[Tensor, Tensor]:
        """One stream through block 0 and the chunking attention, both under M^noise: H, r."""
        position, mask = torch.arange(tokens.shape[1], device=tokens.device), noise_mask(nu)
        H = self.layers[0](self.embed_tokens(tokens), position, mask)
        return self.chunking(H, mask)

    def stage_2(self, H: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        """The other blocks, and logits; BOS, PAD and MASK are never predicted."""
        for block in self.layers[1:]:
            H = block(H, position, mask)
        logits = self.norm(H) @ self.embed_tokens.weight.T
        logits[..., -3:] = -torch.inf
        return logits

    def forward(self, x: Tensor, nu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Training, over z ⊕ x: logits (B, L, V) of the noisy half, chunks c (B, L), scores r (B, L, K)."""
        z, L = x.masked_fill(nu, self.MASK), x.shape[1]
        H_z, r = self.stage_1(z, nu)  # the streams run apart: a masked token must not see its own clean copy
        H_x, _ = self.stage_1(x, nu)  # ν hides the same positions of x, or they would tell later ones
        c = self.chunking.assign(r)  # one c for both streams, from z, which does not know what is masked
        position = torch.arange(L, device=x.device).repeat(2)
        return self.stage_2(torch.cat([H_z, H_x], dim=1), position, chunk_mask(c))[:, :L], c, r


# --- The objective: NELBO with weights 1/t, and 4.3 load balancing ------------------------------------------------


def draw_noise(x: Tensor, BOS: int) -> tuple[Tensor, Tensor]:
    """A level t ∈ [0.001, 1] for each text, spread evenly over the batch, and its masked positions ν, never BOS."""
    B = len(x)
    t = 1e-3 + (1 - 1e-3) * (torch.randperm(B) + torch.rand(B)) / B
    return (torch.rand(x.shape) < t[:, None]) & (x != BOS), t[:, None]


def nelbo(logits: Tensor, x: Tensor, nu: Tensor, t: Tensor, BOS: int) -> Tensor:
    """Σ over masked tokens of −log p(x) / t, per token. (It is no bound of the likelihood: see docs/method.md.)"""
    nll = F.cross_entropy(logits[nu], x[nu], reduction="none") / t.expand_as(x)[nu]
    return nll.sum() / (x != BOS).sum()


def chunk_loss(r: Tensor, gumbel: Tensor, counted: Tensor) -> Tensor:
    """L_chunk: every text should use every chunk. Straight-through samples of the routing, ε = 1/L."""
    soft = (r + gumbel).softmax(dim=-1)
    hard = F.one_hot(soft.argmax(dim=-1), r.shape[-1]).to(soft)
    sample = (hard + soft - soft.detach()) * counted[..., None]
    f = sample.sum(dim=1) / counted.sum(dim=1, keepdim=True)  # f_bk: the share of chunk k in text b
    return -torch.log(f + 1 / r.shape[1]).mean()


@torch.no_grad()
def update_bias(chunking: ChunkingAttention, c: Tensor, rate: float = 1e-2) -> Tensor:
    """b_k ← b_k − η (N_k/N − 1/K), once a step; returns N_k/N."""
    share = torch.bincount(c.flatten(), minlength=len(chunking.balance_bias)) / c.numel()
    chunking.balance_bias -= rate * (share - 1 / len(share))
    return share


def train(model: DCDM, text: Tensor, tell, steps: int = 300, B: int = 16, L: int = 64) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(1, steps + 1):
        at = torch.randint(len(text) - L, (B,))
        x = torch.stack([torch.cat([torch.tensor([model.BOS]), text[a : a + L - 1]]) for a in at])
        nu, t = draw_noise(x, model.BOS)
        logits, c, r = model(x, nu)
        gumbel = -torch.log(torch.empty_like(r).exponential_())
        loss = nelbo(logits, x, nu, t, model.BOS) + 1e-2 * chunk_loss(r, gumbel, x != model.BOS)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        warm, left = min(1.0, step / 50), 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = 2e-3 * warm * left
        optimizer.step()
        share = update_bias(model.chunking, c[x != model.BOS])
        if step % 50 == 0 or step == 1:
            tell(step, loss.item(), len(share) * share.max().item() - 1)


# --- Seeing the chunks, and sampling chunk by chunk ---------------------------------------------------------------


@torch.no_grad()
def chunks_of(model: DCDM, x: Tensor) -> Tensor:
    """The chunks of a text with nothing masked: (L,) → (L,)."""
    _, r = model.stage_1(x[None], torch.zeros_like(x[None], dtype=torch.bool))
    return model.chunking.assign(r)[0]


@torch.no_grad()
def sample(model: DCDM, z: Tensor, sure: float = 0.9) -> tuple[Tensor, int]:
    """Fill the MASKs of z (L,): the lowest chunk that has any, its surest tokens at once, then route again."""
    z, passes = z[None].clone(), 0
    position = torch.arange(z.shape[1])
    while (nu := z == model.MASK).any():
        H, r = model.stage_1(z, nu)
        c = model.chunking.assign(r)
        active = nu & (c == c[nu].min())
        order = torch.where(nu, torch.where(active, 1, 2), 0)  # what is known counts as earlier than all chunks
        logits = model.stage_2(H, position, order[:, None, :] <= order[:, :, None])[active]
        drawn = torch.distributions.Categorical(logits=logits).sample()
        confidence = logits.softmax(dim=-1).max(dim=-1).values
        fill = confidence >= min(sure, confidence.max())
        z[0, active[0].nonzero()[fill, 0]] = drawn[fill]
        passes += 1
    return z[0], passes


class Words:
    """A small tokenizer: the most frequent words, and every character."""

    def __init__(self, text: str, size: int = 1500) -> None:
        words = Counter(re.findall(r" ?\w+", text))
        self.tokens = sorted(set(text)) + [w for w, n in words.most_common(size) if len(w) > 1 and n > 1]
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        self.V = len(self.tokens) + 3

    def encode(self, text: str) -> list[int]:
        pieces = re.findall(r" ?\w+|[^\w]", text)
        parts = (p for piece in pieces for p in ([piece] if piece in self.ids else piece))
        return [self.ids[part] for part in parts if part in self.ids]

    def decode(self, ids: list[int]) -> list[str]:
        return [self.tokens[i] if i < len(self.tokens) else "▁" for i in ids]


def coloured(pieces: list[str], c: Tensor) -> str:
    """Each piece on the colour of its chunk."""
    colours = (44, 42, 45, 43, 46, 41, 100, 104)
    shown = (piece.replace("\n", "⏎") for piece in pieces)
    return "".join(f"\033[{colours[k % 8]};97m{p}\033[0m" for p, k in zip(shown, c.tolist(), strict=True))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("text", nargs="?", type=Path)
    arguments.add_argument("--steps", type=int, default=300)
    given = arguments.parse_args()
    if given.text is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics.values())
    else:
        text = given.text.read_text(encoding="utf-8")
    torch.manual_seed(0)
    words = Words(text)
    ids = torch.tensor(words.encode(text))
    model = DCDM(words.V)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{len(ids):,} tokens, vocabulary {words.V:,}; a DCDM of {millions:.2f}M parameters and 8 chunks\n")

    share = (ids >= len(set(text))).float().unfold(0, 63, 1).mean(dim=1)  # of words among tokens: prose has most
    example = torch.cat([torch.tensor([model.BOS]), ids[int(share.argmax()) :][:63]])
    pieces = words.decode(example.tolist())[1:]

    def tell(step: int, loss: float, violation: float) -> None:
        print(f"step {step:4d}   loss {loss:.3f}   MaxVio {violation:.2f} (0: chunks of equal size)")
        if step in (1, given.steps // 4 // 50 * 50, given.steps):
            print("\n" + coloured(pieces, chunks_of(model, example)[1:]) + "\n")

    train(model, ids, tell, given.steps)
    held = torch.rand(len(example)) < 0.5
    held[0] = False
    filled, passes = sample(model, example.masked_fill(held, model.MASK))
    print(f"half of the text masked, and filled in {passes} forward passes ({int(held.sum())} tokens):\n")
    both = zip(words.decode(filled.tolist())[1:], held.tolist()[1:], strict=True)
    print("".join(f"\033[1m{piece}\033[0m" if hidden else piece for piece, hidden in both))


if __name__ == "__main__":
    main()
