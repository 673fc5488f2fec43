"""Which chunk every token of a text goes to, and why: what `dcdm chunks` measures.

A view is a row of *frames*. With the paper's routing ids depend on noise, and a frame is a noise level; each
level's masked tokens are among the next one's. With every other partition a frame is a round: the chunks are
formed (or, where they are fixed, filled) one after the other.

`terminal` and `pages` show a view.

    L positions   K chunks   N windows of a corpus   F frames
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Literal

import torch
from torch import Tensor

from dcdm.config import ConfigError, ModelConfig, many
from dcdm.data.tokenizers import Tokenizer
from dcdm.keys import Key
from dcdm.model.transformer import Model, Partition
from dcdm.viewing.contents import Contents, contents
from dcdm.viewing.palette import colour, ink

LEVELS = tuple(number / 10 for number in range(11))
DEFAULT_LEVEL = 0.5
UNROUTED = -1


@dataclass(frozen=True)
class Token:
    """One position of the text."""

    id: int
    text: str
    """What it stands for: letters, a byte as \\xNN, or the name of a special token."""
    free: bool
    """Whether it may be masked and is counted; BOS is not."""


@dataclass(frozen=True)
class Frame:
    """The chunks at one noise level, or after one round."""

    at: float
    """The noise level, or the number of the round."""
    ids: list[int]
    """(L): 1…K, 0 always visible, −1 not in a chunk yet."""
    hidden: list[bool]
    """(L): where the router saw MASK; for fixed partitions, what is MASK when this round's chunk is filled."""
    scores: list[list[float]]
    """(L, K): r of each position, of the round that decided its chunk; [] where no router was asked."""
    sizes: list[int]
    """(K): free positions in each chunk."""


@dataclass(frozen=True)
class Held:
    """What each chunk holds over a corpus."""

    source: str
    windows: int
    tokens: int
    frames: list[list[Contents]]
    """For each noise level those of all tokens, of visible and of masked ones; one of all where noise decides
    nothing."""


@dataclass(frozen=True)
class ChunkView:
    """Everything that terminal, page and JSON show."""

    model: str
    kind: str
    routing: str
    rule: str
    """How a token's chunk is decided, in a sentence."""
    axis: Literal["noise", "round"]
    num_chunks: int
    tokens: list[Token]
    frames: list[Frame]
    shown: int
    """The frame to begin with."""
    bias: list[float]
    """b (K), which the paper's routing adds to r before it takes the largest; else []."""
    held: Held
    note: str = ""
    """What a reader must know about the text, such as that it was cut."""

    @property
    def frame(self) -> Frame:
        return self.frames[self.shown]

    @property
    def contents(self) -> list[Contents]:
        """What the chunks of the frame hold: all tokens, and visible and masked ones where ids depend on noise."""
        return self.held.frames[self.shown if len(self.held.frames) > 1 else 0]

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """For notebooks: tokens on the colours of their chunks, or outlined; a tip names the chunk."""
        pieces = []
        for token, group, hidden in zip(self.tokens, self.frame.ids, self.frame.hidden, strict=True):
            ground = colour(group)
            look = f"outline: 1px solid {ground}" if hidden else f"background: {ground}; color: {ink(ground)}"
            name = f"chunk {group}" if group > 0 else "always visible"
            tip = "in no chunk yet" if group == UNROUTED else name
            pieces.append(f'<span style="{look}" title="{tip}">{escape(token.text)}</span>')
        where = f"noise level {self.frame.at:g}" if self.axis == "noise" else f"round {self.frame.at:g}"
        chunks = many(self.num_chunks, "chunk")
        below = f"{self.model}: {chunks}, {where}; outlined: MASK here. {self.rule} {self.note}"
        style = "font-family: monospace; white-space: pre-wrap; line-height: 1.6"
        return f'<div style="{style}">{"".join(pieces)}</div><small>{escape(below)}</small>'


@dataclass(frozen=True)
class TextWindow:
    """A row of tokens (L), BOS first, with the bytes and the names of its tokens."""

    tokens: Tensor
    pieces: list[bytes]
    names: list[str | None]
    """What special tokens are called; None for ordinary ones."""

    @property
    def labels(self) -> list[str]:
        """What to show for each token: its letters, its bytes where they are not whole letters, or its name."""
        named = zip(self.pieces, self.names, strict=True)
        return [_letters(piece) if name is None else name for piece, name in named]


@dataclass(frozen=True)
class TokenWindows:
    """Windows (N, L) that the contents of chunks are measured over."""

    source: str
    tokens: Tensor
    prompt: Tensor
    index: Tensor
    pieces: list[list[bytes]]


def window_of(text: str, tokenizer: Tokenizer, length: int) -> tuple[TextWindow, str]:
    """BOS and the first tokens of a text, as many as have room, with a note where there are more."""
    ids = tokenizer.encode(text)
    if not ids:
        raise ConfigError("the text is empty; give one as an argument or on standard input")
    room = max(1, length - 1)
    note = ""
    if len(ids) > room:
        note = f"The first {room:,} of {len(ids):,} tokens: the model's context holds no more."
    return window_from([tokenizer.bos_id, *ids[:room]], tokenizer), note


def window_from(row: list[int], tokenizer: Tokenizer) -> TextWindow:
    """The window of these token ids."""
    return TextWindow(torch.tensor(row), tokenizer.pieces(row), [tokenizer.name(token) for token in row])


def _letters(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in piece)


@torch.no_grad()
def view(
    model: Model,
    window: TextWindow,
    *,
    name: str = "model",
    noise: float | None = None,
    seed: int = 0,
    corpus: TokenWindows | None = None,
    note: str = "",
) -> ChunkView:
    """The chunks of a window, beginning at the noise level asked for, or at the last round.

    What chunks hold is measured over `corpus`, or over the window itself.
    """
    config = model.config
    if config.kind in ("ar", "lanes"):
        raise ConfigError(
            f"a model of kind {config.kind} writes from left to right and has no chunks; choose one of kind mdlm, "
            "bdlm or dcdm"
        )
    levels = _levels(config, noise)
    tokens = window.tokens[None].to(model.embed_tokens.weight.device)
    positions = model.position_masks(tokens)
    free = positions.free[0].tolist()
    num_chunks = config.num_groups(sum(free))
    if levels:
        frames = _noise_frames(model, tokens, levels, seed)
    else:
        frames = _round_frames(model, tokens, num_chunks, model.partition(tokens))
    if corpus is None:
        here = torch.zeros_like(tokens, dtype=torch.bool)
        corpus = TokenWindows("this text", tokens, here, torch.zeros(1, dtype=torch.long), [window.pieces])
    return ChunkView(
        model=name,
        kind=config.kind,
        routing=config.routing if config.kind == "dcdm" else "",
        rule=rule(config),
        axis="noise" if levels else "round",
        num_chunks=num_chunks,
        tokens=[Token(*row) for row in zip(tokens[0].tolist(), window.labels, free, strict=True)],
        frames=frames,
        shown=levels.index(DEFAULT_LEVEL if noise is None else noise) if levels else len(frames) - 1,
        bias=model.chunking.balance_bias.tolist() if levels and model.chunking else [],
        held=held_over(model, corpus, levels, num_chunks, seed),
        note=note,
    )


def rule(config: ModelConfig) -> str:
    """How the chunk of a token is decided."""
    if config.kind == "mdlm":
        return "All tokens form one chunk."
    if config.kind == "bdlm":
        return f"Every {config.block_size} tokens in a row form a chunk."
    if config.routes_from_noise:
        return "The chunk with the largest r + b takes the token."
    if config.routing == "random":
        return "Chunks are drawn at random."
    if config.routing != "causal" or config.prior_decides:
        return "A token's chunk follows from its position."
    prior = f" + {config.prior_weight:g} × the {config.prior} prior" if config.prior != "none" else ""
    return f"Round k takes the tokens whose r of chunk k − mean r{prior} is largest."


# --- frames ------------------------------------------------------------------------------------------------------


def nested_masks(index: Tensor, free: Tensor, levels: Sequence[float], seed: int) -> Tensor:
    """(F, N, L) bool: every free position is masked from some level on, window by window of `index` (N,)."""
    uniform = Key(seed).fold("chunks").rows(index, free.shape[-1]).to(free.device)
    return torch.stack([(uniform < level) & free for level in levels])


def _levels(config: ModelConfig, noise: float | None) -> list[float]:
    """The noise levels to compute, none for partitions that do not depend on noise."""
    if not config.routes_from_noise:
        if noise is not None:
            raise ConfigError(
                "--noise: the chunks of this model do not depend on noise (only those of DCDM with the paper's "
                "routing do); leave it out"
            )
        return []
    if noise is not None and not 0 <= noise <= 1:
        raise ConfigError(f"--noise {noise}: a noise level is the share of masked tokens, between 0 and 1")
    return sorted({*LEVELS, *([] if noise is None else [noise])})


def _noise_frames(model: Model, tokens: Tensor, levels: list[float], seed: int) -> list[Frame]:
    free = model.position_masks(tokens).free
    masked_fl = nested_masks(torch.zeros(1, dtype=torch.long), free, levels, seed)[:, 0]
    ids_fl, scores_flk = _routed(model, tokens.expand(len(levels), -1), masked_fl)
    return [
        Frame(level, ids.tolist(), masked.tolist(), scores.tolist(), _sizes(ids, free[0], scores.shape[-1]))
        for level, ids, masked, scores in zip(levels, ids_fl, masked_fl, scores_flk, strict=True)
    ]


def _routed(model: Model, tokens: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """Ids (B, L) and scores (B, L, K) of the paper's routing; block 0 is all they need."""
    assert model.chunking is not None
    real = tokens != model.config.pad_id
    scores = model.router_scores(tokens.masked_fill(masked, model.config.mask_id), real)
    return torch.where(real, model.chunking.assign(scores), -1), scores


def _round_frames(model: Model, tokens: Tensor, num_chunks: int, partition: Partition) -> list[Frame]:
    ids, free = partition.ids[0], model.position_masks(tokens).free[0]
    rounds_k1 = torch.arange(1, num_chunks + 1, device=ids.device)[:, None]
    hidden_kl = ids >= rounds_k1
    scores_kl: list[list[list[float]]] = [[[] for _ in ids] for _ in range(num_chunks)]
    if partition.scores is not None:
        scores_kl = _scores_by_round(model, tokens, hidden_kl)
    known_kl = torch.where(ids <= rounds_k1, ids, UNROUTED)
    return [
        Frame(k, known.tolist(), hidden.tolist(), scores, _sizes(known, free, num_chunks))
        for k, (known, hidden, scores) in enumerate(zip(known_kl, hidden_kl, scores_kl, strict=True), start=1)
    ]


def _scores_by_round(model: Model, tokens: Tensor, hidden_kl: Tensor) -> list[list[list[float]]]:
    """Each round's scores of what was hidden in it; a position keeps those of the round that took it."""
    z_kl = tokens.expand(len(hidden_kl), -1).masked_fill(hidden_kl, model.config.mask_id)
    scores_klk = model.router_scores(z_kl, z_kl != model.config.pad_id).tolist()
    kept: list[list[float]] = [[] for _ in hidden_kl[0]]
    by_round = []
    for scores, hidden in zip(scores_klk, hidden_kl.tolist(), strict=True):
        kept = [now if asked else before for before, now, asked in zip(kept, scores, hidden, strict=True)]
        by_round.append(kept)
    return by_round


def _sizes(ids: Tensor, free: Tensor, num_chunks: int) -> list[int]:
    """Free positions of each chunk."""
    return [int(((ids == k) & free).sum()) for k in range(1, num_chunks + 1)]


# --- what chunks hold, over a corpus -----------------------------------------------------------------------------


@torch.no_grad()
def held_over(
    model: Model, corpus: TokenWindows, levels: Sequence[float] = (), num_groups: int = 0, seed: int = 0
) -> Held:
    """What chunks hold: at each noise level, if there are any, of visible and masked tokens, too."""
    device = model.embed_tokens.weight.device
    free = model.position_masks(corpus.tokens, corpus.prompt).free
    # windows of a corpus may be longer than the text, and have more chunks
    num_groups = max(num_groups, model.config.num_groups(int(free.sum(dim=1).max())))
    masks_fnl = nested_masks(corpus.index, free, levels, seed) if levels else torch.zeros_like(free)[None]
    ids_fnl = torch.zeros(masks_fnl.shape, dtype=torch.long)
    for at in range(0, len(corpus.tokens), 8):
        rows = slice(at, at + 8)
        tokens, prompt, index = corpus.tokens[rows].to(device), corpus.prompt[rows].to(device), corpus.index[rows]
        if levels:
            found = torch.stack([_routed(model, tokens, masked.to(device))[0] for masked in masks_fnl[:, rows]])
        else:
            found = model.partition(tokens, prompt, index).ids[None]
        ids_fnl[:, rows] = found.cpu()
    pairs = zip(corpus.tokens.flatten().tolist(), (one for row in corpus.pieces for one in row), strict=True)
    names = {token: _letters(piece) for token, piece in pairs}

    frames = []
    for ids, masked in zip(ids_fnl, masks_fnl, strict=True):
        seen = corpus.tokens.masked_fill(masked, model.config.mask_id)
        parts = {"all": free} | ({"visible": free & ~masked, "masked": masked} if levels else {})
        frames.append([
            contents(ids, corpus.tokens, seen, counted, num_groups, names, which, seed)
            for which, counted in parts.items() if bool(counted.any())
        ])  # fmt: skip
    return Held(corpus.source, len(free), int(free.sum()), frames)
