"""Which chunk every token of a text goes to, and why: the data behind `dcdm chunks`.

A view is a row of *frames*. With the paper's routing ids depend on noise, and a frame is a noise level; each
level's masked tokens are among the next one's. With every other partition a frame is a round: the chunks are
formed (or, where they are fixed, filled) one after the other. Lanes are written one token of each with every
round: there, colours, sizes and kinds of tokens are those of the lanes, and a chunk is what one forward writes.

    L positions   K chunks   N windows of a corpus   F frames
"""

from __future__ import annotations

import keyword
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from dcdm.config import ConfigError, ModelConfig
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.config import resolve_drafts, resolve_lanes
from dcdm.decoding.engine import Generation
from dcdm.keys import Key
from dcdm.likelihood.estimators import forwards_along
from dcdm.model.routing import lane_partition
from dcdm.model.transformer import Model, Partition
from dcdm.viewing.page import escape, page
from dcdm.viewing.palette import colour, ink

LEVELS = tuple(number / 10 for number in range(11))
DEFAULT_LEVEL = 0.5
UNROUTED = -1
MOST_RUNS = 20
DIGITS = 5  # significant ones of a score on the page
KINDS = ("keyword", "name", "digits", "punctuation", "whitespace", "other")

_RUN = re.compile(r"(?P<name>[^\W\d]\w*)|(?P<digits>\d\w*(?:\.\d\w*)*)|(?P<whitespace>\s+)")


@dataclass(frozen=True)
class Token:
    """One position of the text."""

    id: int
    text: str
    """What it stands for: letters, a byte as \\xNN, or the name of a special token."""
    kind: str
    """One of `KINDS`."""
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
class KindCounts:
    """Kinds of tokens in each chunk, or lane, over a corpus."""

    source: str
    tokens: int
    table: list[list[list[int]]]
    """(F or 1, K, kinds): for each noise level; one table where ids do not depend on noise."""


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
    kind_counts: KindCounts
    note: str = ""
    """What a reader must know about the text, such as that it was cut."""
    lanes: list[int] = field(default_factory=list)
    """(L): the lane of each position, from 1, and 0 where nothing is written; [] for models without lanes."""
    runs: list[tuple[str, int]] = field(default_factory=list)
    """With drafts: what a lane gets in one forward most often, several tokens each, and how often."""
    drafts: int = 0
    """How many tokens of each lane were guessed ahead."""

    @property
    def frame(self) -> Frame:
        return self.frames[self.shown]

    @property
    def num_lanes(self) -> int:
        return max(self.lanes, default=0)

    @property
    def groups(self) -> list[int]:
        """(L): what colours stand for: the lane of each position, or its chunk in the frame that is shown."""
        return self.lanes or self.frame.ids

    @property
    def hidden(self) -> list[bool]:
        """(L): what is shown as not known: MASK to the router; with lanes, what is not written yet."""
        return [chunk == UNROUTED for chunk in self.frame.ids] if self.lanes else self.frame.hidden

    @property
    def heads(self) -> list[bool]:
        """(L): with lanes, what the frame's forward writes: the newest token of every lane that is not full."""
        return [bool(self.lanes) and chunk == self.frame.at for chunk in self.frame.ids]

    @property
    def sizes(self) -> list[int]:
        """Free positions of each chunk in the frame; with lanes, those of each lane that are written."""
        if not self.lanes:
            return self.frame.sizes
        written = [lane for lane, hidden in zip(self.lanes, self.hidden, strict=True) if not hidden]
        return [written.count(lane) for lane in range(1, self.num_lanes + 1)]

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """For notebooks: the frame's tokens on the colours of their chunks; a token's tip names its chunk."""
        name = "lane" if self.lanes else "chunk"
        pieces = [
            _token_html(token.text, group, hidden, name)
            for token, group, hidden in zip(self.tokens, self.groups, self.hidden, strict=True)
        ]
        where = f"noise level {self.frame.at:g}" if self.axis == "noise" else f"round {self.frame.at:g}"
        outlined = "not written yet" if self.lanes else "MASK here"
        below = f"{self.model}: {self.num_chunks} chunks, {where}; outlined: {outlined}. {self.rule} {self.note}"
        return (
            f'<div style="font-family: monospace; white-space: pre-wrap; line-height: 1.6">{"".join(pieces)}</div>'
            f"<small>{escape(below)}</small>"
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ChunkView:
        built = {
            "tokens": [Token(**token) for token in values["tokens"]],
            "frames": [Frame(**frame) for frame in values["frames"]],
            "kind_counts": KindCounts(**values["kind_counts"]),
        }
        return cls(**{**values, **built})


@dataclass(frozen=True)
class TextWindow:
    """A row of tokens (L), BOS first, with the bytes and the names of its tokens."""

    tokens: Tensor
    pieces: list[bytes]
    names: list[str | None]
    """What special tokens are called; None for ordinary ones."""


@dataclass(frozen=True)
class TokenWindows:
    """Windows (N, L) that kinds of tokens are counted over."""

    source: str
    tokens: Tensor
    prompt: Tensor
    index: Tensor
    pieces: list[list[bytes]]


def window_of(text: str, tokenizer: Tokenizer, length: int, number: int = 1) -> tuple[TextWindow, str]:
    """BOS and the tokens of the window `number` (from 1), with a note where there are several windows."""
    ids = tokenizer.encode(text)
    if not ids:
        raise ConfigError("the text is empty; give one as an argument, with --file, or on standard input")
    room = max(1, length - 1)
    count = -(-len(ids) // room)
    if not 1 <= number <= count:
        raise ConfigError(f"--window {number}: this text has the windows 1 to {count}, of {room} tokens each")
    row = [tokenizer.bos_id, *ids[(number - 1) * room : number * room]]
    note = ""
    if count > 1:
        note = f"Window {number} of {count}: the text has {len(ids):,} tokens, the model's context holds {room:,}."
    return window_from(row, tokenizer), note


def window_from(row: list[int], tokenizer: Tokenizer) -> TextWindow:
    """The window of these token ids."""
    return TextWindow(torch.tensor(row), tokenizer.pieces(row), [tokenizer.name(token) for token in row])


def refuse_without_chunks(model: Model) -> None:
    if model.config.kind == "ar":
        raise ConfigError(
            "this is an AR model, which predicts tokens from left to right and has no chunks; "
            "choose a model of kind mdlm, bdlm, lanes or dcdm"
        )


@torch.no_grad()
def view(
    model: Model,
    window: TextWindow,
    *,
    name: str = "model",
    noise: float | None = None,
    round: int | None = None,
    seed: int = 0,
    corpus: TokenWindows | None = None,
    note: str = "",
    lanes: int | None = None,
    drafts: int = 0,
) -> ChunkView:
    """The chunks of a window, beginning at the noise level or round asked for.

    Kinds of tokens are counted over `corpus`, or over the window itself. `lanes` is how many, for models that
    write in them; by default the model's own number. With `drafts` they have a pace of their own, which is drawn.
    """
    refuse_without_chunks(model)
    config = model.config
    lanes = resolve_lanes(config, lanes)
    drafts = resolve_drafts(config, drafts, "exact")
    tokens = window.tokens[None].to(model.embed_tokens.weight.device)
    sets = model.sets(tokens)
    free = sets.free[0].tolist()
    num_chunks = config.num_groups(sum(free))
    lane: list[int] = []
    ids: Tensor | None = None
    if lanes is not None:
        ids = forwards_along(model, tokens, lanes=lanes, drafts=drafts, seed=seed).to(tokens) if drafts else None
        num_chunks = -(-sum(free) // lanes) if ids is None else int(ids.max())
        lane = lane_partition(config, sets.free, sets.real, lanes)[1][0].tolist()
    levels = _levels(model, noise, round)
    if levels:
        frames = _noise_frames(model, tokens, levels, seed)
    else:
        partition = model.partition(tokens, lanes=lanes) if ids is None else Partition(ids, None)
        frames = _round_frames(model, tokens, num_chunks, partition)
    kinds = kinds_of(window.pieces)
    if corpus is not None:
        kind_counts = _count_kinds(model, corpus, levels, lanes or num_chunks, seed, lanes)
    elif lane:
        kind_counts = KindCounts("this text", sum(free), [counted(lane, kinds, max(lane))])
    else:
        per_frame = frames if levels else frames[-1:]
        table = [counted(_where(frame.ids, free), kinds, num_chunks) for frame in per_frame]
        kind_counts = KindCounts("this text", sum(free), table)
    return ChunkView(
        model=name,
        kind=config.kind,
        routing=config.routing if config.kind == "dcdm" else "",
        rule=rule(config, max(lane, default=0), drafts),
        axis="noise" if levels else "round",
        num_chunks=num_chunks,
        tokens=[Token(*row) for row in zip(tokens[0].tolist(), labels(window), kinds, free, strict=True)],
        frames=frames,
        shown=_shown(frames, levels, noise, round),
        bias=_bias(model),
        kind_counts=kind_counts,
        note=note,
        lanes=lane,
        runs=[] if ids is None else _drafted_runs(model, window, corpus, ids, lanes, drafts, seed),
        drafts=drafts,
    )


def rule(config: ModelConfig, lanes: int = 0, drafts: int = 0) -> str:
    """How the chunk of a token is decided."""
    if config.kind == "mdlm":
        return "All tokens form one chunk."
    if config.kind == "lanes":
        number = "One lane is written" if lanes == 1 else f"{lanes} lanes are written at once"
        if drafts:
            return f"{number}, each as far as its guesses stand; chunk k holds what forward k brings."
        return f"{number}; chunk k holds the k-th token of each."
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


def labels(window: TextWindow) -> list[str]:
    """What to show for each token: its letters, its bytes where they are not whole letters, or its name."""
    return [
        _label(piece) if name is None else name for piece, name in zip(window.pieces, window.names, strict=True)
    ]


def _label(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in piece)


def _token_html(text: str, group: int, hidden: bool, name: str) -> str:
    """A token on the colour of its chunk or lane, or, where it is not known, within an outline of it."""
    ground = colour(group)
    look = f"outline: 1px solid {ground}" if hidden else f"background: {ground}; color: {ink(ground)}"
    tip = "in no chunk yet" if group == UNROUTED else f"{name} {group}" if group else "always visible"
    return f'<span style="{look}" title="{tip}">{escape(text)}</span>'


# --- frames ------------------------------------------------------------------------------------------------------


def nested_masks(index: Tensor, free: Tensor, levels: Sequence[float], seed: int) -> Tensor:
    """(F, N, L) bool: every free position is masked from some level on, window by window of `index` (N,)."""
    uniform = Key(seed).fold("chunks").rows(index, free.shape[-1]).to(free.device)
    return torch.stack([(uniform < level) & free for level in levels])


def _levels(model: Model, noise: float | None, round: int | None) -> list[float]:
    """The noise levels to compute, none for partitions that do not depend on noise."""
    if not model.config.routes_from_noise:
        if noise is not None:
            raise ConfigError(
                "--noise: the chunks of this model do not depend on noise (only those of DCDM with the paper's "
                "routing do); leave it out, or choose a --round"
            )
        return []
    if round is not None:
        raise ConfigError(
            "--round: the paper's routing forms all chunks at once, from a noisy text; choose a --noise level"
        )
    if noise is not None and not 0 <= noise <= 1:
        raise ConfigError(f"--noise {noise}: a noise level is the share of masked tokens, between 0 and 1")
    return sorted({*LEVELS, *([] if noise is None else [noise])})


def _shown(frames: list[Frame], levels: list[float], noise: float | None, round: int | None) -> int:
    if levels:
        return levels.index(DEFAULT_LEVEL if noise is None else noise)
    if round is not None and not 1 <= round <= len(frames):
        raise ConfigError(f"--round {round}: this text has the rounds 1 to {len(frames)}")
    return len(frames) - 1 if round is None else round - 1


def _noise_frames(model: Model, tokens: Tensor, levels: list[float], seed: int) -> list[Frame]:
    sets = model.sets(tokens)
    masked_fl = nested_masks(torch.zeros(1, dtype=torch.long), sets.free, levels, seed)[:, 0]
    ids_fl, scores_flk = _routed(model, tokens.expand(len(levels), -1), masked_fl)
    free = sets.free[0].tolist()
    return [
        _frame(level, ids.tolist(), masked.tolist(), scores.tolist(), free, scores.shape[-1])
        for level, ids, masked, scores in zip(levels, ids_fl, masked_fl, scores_flk, strict=True)
    ]


def _routed(model: Model, tokens: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """Ids (B, L) and scores (B, L, K) of the paper's routing; block 0 is all they need."""
    assert model.chunking is not None
    real = tokens != model.config.pad_id
    scores = model.router_scores(tokens.masked_fill(masked, model.config.mask_id), real)
    return torch.where(real, model.chunking.assign(scores), -1), scores


def _round_frames(model: Model, tokens: Tensor, num_chunks: int, partition: Partition) -> list[Frame]:
    ids = partition.ids[0]
    rounds_k1 = torch.arange(1, num_chunks + 1, device=ids.device)[:, None]
    hidden_kl = ids >= rounds_k1
    scores_kl: list[list[list[float]]] = [[[] for _ in ids] for _ in range(num_chunks)]
    if partition.scores is not None:
        scores_kl = _scores_by_round(model, tokens, hidden_kl)
    known_kl = torch.where(ids <= rounds_k1, ids, UNROUTED)
    free = model.sets(tokens).free[0].tolist()
    return [
        _frame(k, known.tolist(), hidden.tolist(), scores, free, num_chunks)
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


def _frame(
    at: float, ids: list[int], hidden: list[bool], scores: list[list[float]], free: list[bool], num_chunks: int
) -> Frame:
    counted_ids = _where(ids, free)
    return Frame(at, ids, hidden, scores, [counted_ids.count(k) for k in range(1, num_chunks + 1)])


def _where(ids: Iterable[int], free: Iterable[bool]) -> list[int]:
    """Ids of the positions that are counted, 0 elsewhere."""
    return [chunk if counts else 0 for chunk, counts in zip(ids, free, strict=True)]


def _bias(model: Model) -> list[float]:
    return model.chunking.balance_bias.tolist() if model.config.routes_from_noise and model.chunking else []


# --- kinds of tokens over a corpus -------------------------------------------------------------------------------


def _count_kinds(
    model: Model, corpus: TokenWindows, levels: list[float], num_groups: int, seed: int, lanes: int | None
) -> KindCounts:
    device = model.embed_tokens.weight.device
    num_frames = max(1, len(levels))
    width = num_groups if lanes else max(num_groups, model.config.num_groups(corpus.tokens.shape[1]))
    total = torch.zeros(num_frames, width, len(KINDS), dtype=torch.long)
    seen = 0
    for at in range(0, len(corpus.tokens), 8):
        rows = slice(at, at + 8)
        tokens, prompt = corpus.tokens[rows].to(device), corpus.prompt[rows].to(device)
        sets = model.sets(tokens, prompt)
        free = sets.free
        if levels:
            masks = nested_masks(corpus.index[rows], free, levels, seed)
            ids_fnl = torch.stack([_routed(model, tokens, masked)[0] for masked in masks])
        elif lanes is not None:
            ids_fnl = lane_partition(model.config, free, sets.real, lanes)[1][None]
        else:
            ids_fnl = model.partition(tokens, prompt, corpus.index[rows]).ids[None]
        ids_fnl = torch.where(free, ids_fnl, 0)
        seen += int(free.sum())
        for row, pieces in enumerate(corpus.pieces[rows]):
            kinds = kinds_of(pieces)
            for number in range(num_frames):
                total[number] += torch.tensor(counted(ids_fnl[number, row].tolist(), kinds, total.shape[1]))
    return KindCounts(corpus.source, seen, total.tolist())


def _drafted_runs(
    model: Model,
    window: TextWindow,
    corpus: TokenWindows | None,
    ids: Tensor,
    lanes: int | None,
    drafts: int,
    seed: int,
) -> list[tuple[str, int]]:
    """What comes in one forward of a lane, over the corpus or in the window, whose forwards are `ids` (1, L)."""
    found: Counter[bytes] = Counter()
    rows: list[tuple[Tensor, Tensor | None, Tensor, list[list[bytes]]]] = []
    if corpus is None:
        rows = [(window.tokens[None].to(ids), None, ids, [window.pieces])]
    else:
        for at in range(0, len(corpus.tokens), 8):
            part = slice(at, at + 8)
            tokens, prompt = corpus.tokens[part].to(ids.device), corpus.prompt[part].to(ids.device)
            came = forwards_along(
                model, tokens, prompt, lanes=lanes, drafts=drafts, index=corpus.index[part], seed=seed
            )
            rows.append((tokens, prompt, came.to(tokens), corpus.pieces[part]))
    for texts_bl, given, came, pieces in rows:
        sets = model.sets(texts_bl, given)
        lane = lane_partition(model.config, sets.free, sets.real, lanes)[1]
        for row, texts in enumerate(pieces):
            groups = zip(lane[row].tolist(), came[row].tolist(), texts, strict=True)
            for (number, _), run in groupby(groups, lambda one: one[:2]):
                together = [text for _, _, text in run]
                if number and len(together) > 1:
                    found[b"".join(together)] += 1
    return [(text.decode("utf-8", "replace"), count) for text, count in found.most_common(MOST_RUNS)]


# --- kinds of tokens: keyword, name, digits, punctuation, white space, other -------------------------------------


def kinds_of(pieces: Sequence[bytes]) -> list[str]:
    """The kind of every token of a text, given the bytes that each stands for.

    A token belongs to the word around it: each byte of `def` is part of a keyword, each of `define` of a name.
    One that spans several goes with the first that is not white space. Keywords are Python's.
    """
    kinds = _byte_kinds(b"".join(pieces))
    token_kinds, at = [], 0
    for piece in pieces:
        token_kinds.append(_first_visible(kinds[at : at + len(piece)]))
        at += len(piece)
    return token_kinds


def counted(chunks: Iterable[int], kinds: Iterable[str], num_chunks: int) -> list[list[int]]:
    """How many tokens of each kind chunks 1…K hold: K rows in the order of `KINDS`."""
    table = [[0] * len(KINDS) for _ in range(num_chunks)]
    for chunk, kind in zip(chunks, kinds, strict=True):
        if chunk >= 1:
            table[chunk - 1][KINDS.index(kind)] += 1
    return table


def _first_visible(kinds: list[str]) -> str:
    return next((kind for kind in kinds if kind != "whitespace"), "whitespace" if kinds else "other")


def _byte_kinds(text: bytes) -> list[str]:
    """The kind of every byte; those that are not UTF-8, as at the edges of a window, are other."""
    kinds: list[str] = []
    for run, kind in _runs(text.decode("utf-8", errors="surrogateescape")):
        kinds += [kind] * len(run.encode("utf-8", errors="surrogateescape"))
    return kinds


def _runs(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        match = _RUN.match(text, at)
        run, kind = (text[at], _sign(text[at])) if match is None else (match[0], str(match.lastgroup))
        yield run, "keyword" if kind == "name" and keyword.iskeyword(run) else kind
        at += len(run)


def _sign(letter: str) -> str:
    is_punctuation = letter in string.punctuation or unicodedata.category(letter).startswith("P")
    return "punctuation" if is_punctuation else "other"


# --- the page of `dcdm chunks --html` ----------------------------------------------------------------------------


def chunks_page(view: ChunkView) -> str:
    """The view as one self-contained HTML file."""
    return page("chunks", f"Chunks · {view.model}", page_data(view), script="chunks")


def page_data(view: ChunkView) -> dict[str, Any]:
    """The view as the page reads it: scores shortened, null where no router was asked."""
    data = view.to_dict()
    for frame in data["frames"]:
        frame["scores"] = [_short(row) for row in frame["scores"]] if any(frame["scores"]) else None
        frame["hidden"] = [int(hidden) for hidden in frame["hidden"]]
    return {**data, "bias": _short(data["bias"]), "kinds": KINDS}


def _short(values: list[float]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]


# --- a text that a model filled in: what was filled when ---------------------------------------------------------


@dataclass(frozen=True)
class Filling:
    """One row of a generation that fits into one window."""

    tokens: list[str]
    """What each position shows, BOS first."""
    chunks: list[int]
    """The chunk of each position, numbered in the order of filling; 0 where the text was given."""
    steps: list[list[int]]
    """Positions that each forward filled."""
    lanes: list[int] = field(default_factory=list)
    """The lane of each position, from 1, and 0 where the text was given; [] for models without lanes."""

    @property
    def came(self) -> list[int]:
        """The forward that each position came with, 0 where the text was given."""
        forwards = [0] * len(self.tokens)
        for number, positions in enumerate(self.steps, start=1):
            for position in positions:
                forwards[position] = number
        return forwards

    @property
    def groups(self) -> list[int]:
        """What colours stand for: the lane of each position, or its chunk."""
        return self.lanes or self.chunks

    @property
    def by_forward(self) -> Filling:
        """One lane that takes several tokens in a forward is told by its forwards: its lane would be one colour."""
        if max(self.lanes, default=0) != 1 or max(map(len, self.steps)) == 1:
            return self
        return replace(self, chunks=self.came, lanes=[])


@dataclass(frozen=True)
class Written:
    """A text as one decoder filled it, and what that took."""

    label: str
    """Which decoder, such as "4 lanes"."""
    filling: Filling
    seconds: float
    nats: float | None = None
    """−log p of what stood in the blanks before they were blanks, per token, under this decoder: exact."""

    @property
    def forwards(self) -> int:
        return len(self.filling.steps)

    @property
    def sentence(self) -> str:
        """What it took, in figures."""
        tokens = sum(map(len, self.filling.steps))
        exact = "" if self.nats is None else f"; exact −log p of the original: {self.nats:.2f} nats per token"
        return f"{tokens} tokens in {self.forwards} forwards, {self.seconds:.2f} s{exact}"


def filling_of(generation: Generation, tokenizer: Tokenizer, row: int = 0) -> Filling:
    """The row's tokens, and the chunk and the forward that each of them came with."""
    events = [event for event in generation.history if event.row == row]
    ids = [token for token in generation.tokens[row].tolist() if token != tokenizer.pad_id]
    chunks, lanes = [0] * len(ids), [0] * len(ids)
    for event in events:
        for position, lane in zip_longest(event.positions, event.lanes, fillvalue=0):
            if position < len(ids):  # what lies behind an EOS was cut off
                chunks[position], lanes[position] = event.chunk, lane
    steps = [[p for p in event.positions if p < len(ids)] for event in events]
    return Filling(labels(window_from(ids, tokenizer)), chunks, steps, lanes if any(lanes) else []).by_forward


def as_filling(view: ChunkView) -> Filling:
    """A text that is known, as its model would fill it: one forward for each chunk that holds free positions."""
    ids = view.frame.ids if view.axis == "noise" else view.frames[-1].ids
    ids = _where(ids, (token.free for token in view.tokens))  # the paper's routing puts BOS into a chunk, too
    steps = [[at for at, chunk in enumerate(ids) if chunk == number] for number in range(1, max(ids) + 1)]
    texts = [token.text for token in view.tokens]
    return Filling(texts, ids, [step for step in steps if step], view.lanes).by_forward


def replay_page(filling: Filling, title: str, sentence: str) -> str:
    """A text being filled in, forward by forward, as one self-contained HTML file."""
    place = '<section class="panel wide"><div id="replay"></div></section>'
    return page(
        "report", title, {"fillings": {"replay": asdict(filling)}}, summary=escape(sentence), sections=place
    )
