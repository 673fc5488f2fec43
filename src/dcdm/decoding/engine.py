"""`dcdm.generate`: prompts in, completed text out, for every kind.

A canvas is BOS, the prompt and MASKs. Text that does not fit into one canvas is written window by window: the
end of what is there is the prompt of the next canvas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Unpack

import torch
from torch import Tensor

from dcdm.config import ConfigError
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.commits import View, commit_policy
from dcdm.decoding.config import DecodingConfig, DecodingOptions
from dcdm.decoding.loop import Committed, Counts, fill_canvas
from dcdm.decoding.predictors import predictor_of
from dcdm.decoding.prompts import Prompts, read_prompts
from dcdm.decoding.routes import router_of
from dcdm.keys import Key
from dcdm.model.transformer import Model

_COUNTED = ("new_tokens", "forwards", "rounds", "computed", "reused", "reencoded")


@dataclass(frozen=True)
class Event:
    """Tokens that one forward committed in one row; those behind an EOS turn out void."""

    row: int
    window: int
    forward: int
    """Number of the row's forward within its window, from 1."""
    chunk: int
    """Number of the chunk within its window, from 1 in the order of filling."""
    positions: list[int]
    """In the row's whole text, BOS at 0."""
    tokens: list[int]
    log_p: list[float]
    """What the model itself gave each token, before temperature and truncation."""
    lanes: list[int] = field(default_factory=list)
    """The lane of each position, from 1; [] where the model does not write in lanes."""


@dataclass(frozen=True)
class Ended:
    """How one row ended, for those who do not wait for the whole batch."""

    completion: list[int]
    finished: str
    costs: dict[str, int]


@dataclass
class Statistics:
    """What a generation cost. Tensors are (B,)."""

    forwards: Tensor
    """Passes through all blocks, cache writes included."""
    rounds: Tensor
    """Routing passes through block 0."""
    computed: Tensor
    """Positions that went through all blocks, summed over the forwards."""
    reused: Tensor
    """Positions read from the cache instead, summed over the forwards."""
    reencoded: Tensor
    """Positions of earlier text that later windows had to encode again."""
    new_tokens: Tensor
    """Tokens that the model wrote and that stayed, EOS included; neither prompts nor what lay behind an EOS."""
    seconds: float = 0.0

    @classmethod
    def zero(cls, rows: int) -> Statistics:
        return cls(*torch.zeros(6, rows, dtype=torch.long))

    def add(self, row: int, counts: Counts, at: int) -> None:
        """What row `at` of a filling cost."""
        for name in ("forwards", "rounds", "computed", "reused"):
            getattr(self, name)[row] += getattr(counts, name)[at]

    def of(self, row: int) -> dict[str, int]:
        return {name: int(getattr(self, name)[row]) for name in _COUNTED}

    @property
    def tokens_per_forward(self) -> float:
        return float(self.new_tokens.sum() / self.forwards.sum().clamp(min=1))

    @property
    def tokens_per_second(self) -> float:
        return float(self.new_tokens.sum()) / max(self.seconds, 1e-9)

    def summary(self) -> dict[str, float]:
        """Totals over the rows, for printing."""
        totals: dict[str, float] = {name: int(getattr(self, name).sum()) for name in _COUNTED}
        per_token = self.seconds / max(1, totals["new_tokens"])
        more = {
            "seconds": self.seconds,
            "seconds_per_token": per_token,
            "tokens_per_forward": self.tokens_per_forward,
        }
        return totals | more


@dataclass
class Generation:
    tokens: Tensor
    """(B, L): whole rows, BOS first, PAD behind the shorter ones; MASK where a cancelled row was not filled."""
    completions: list[list[int]]
    """What follows each prompt, without EOS; for a prompt with blanks its own text with the blanks filled."""
    finished: list[str]
    """Why each row ended: "eos", "length", "stop" or "cancelled"."""
    statistics: Statistics
    history: list[Event] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """The completions as text, if there was a tokenizer."""

    tokenizer: Tokenizer | None = field(default=None, repr=False)

    @property
    def forwards(self) -> Tensor:
        """(B,)."""
        return self.statistics.forwards

    def _repr_html_(self) -> str:
        """For notebooks: every text, what the model wrote in bold; a token's tip says when it came."""
        rows = "".join(self._row_html(row) for row in range(len(self.completions)))
        costs = self.statistics
        return (
            f'<div style="font-family: monospace; white-space: pre-wrap">{rows}</div>'
            f"<small>{int(costs.new_tokens.sum())} tokens in {int(costs.forwards.sum())} forwards, "
            f"{costs.seconds:.2f} s; bold: written by the model</small>"
        )

    def _row_html(self, row: int) -> str:
        came = {at: event for event in self.history if event.row == row for at in event.positions}
        pieces = []
        for at, token in enumerate(self.tokens[row].tolist()):
            text = self._shown(token)
            if not text:
                continue
            if at in came:
                tip = f"forward {came[at].forward}, chunk {came[at].chunk}"
                pieces.append(f'<b title="{tip}">{text}</b>')
            else:
                pieces.append(f'<span style="opacity: 0.6">{text}</span>')
        return f'<div style="margin: 0.5em 0">{"".join(pieces)} <small>({escape(self.finished[row])})</small></div>'

    def _shown(self, token: int) -> str:
        """A token as HTML; specials, which stand for no text, are left out."""
        if self.tokenizer is None:
            return f"{token} "
        return escape(self.tokenizer.pieces([token])[0].decode(errors="replace"))


@torch.no_grad()
def generate(
    model: Model,
    prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor,
    *,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int | Sequence[int | None] | None = None,
    window: int | None = None,
    overlap: int | None = None,
    decoding: DecodingConfig | None = None,
    seed: int | Sequence[int] = 0,
    index: Sequence[int] | Tensor | None = None,
    eos_id: int | None = None,
    blanks: bool = True,
    stop: Callable[[int, list[int]], bool] | None = None,
    cancel: Callable[[int], bool] | None = None,
    on_event: Callable[[Event], None] | None = None,
    on_end: Callable[[int, Ended], None] | None = None,
    batch_size: int = 16,
    **options: Unpack[DecodingOptions],
) -> Generation:
    """Complete prompts, or fill their blanks.

    `prompts` are token ids, or texts if there is a `tokenizer`; MASK in them (in texts `[[n]]`, n tokens) is a
    blank to fill; `blanks` False takes texts literally. `max_new_tokens` (one number, or one for each prompt) come
    behind each prompt: by default none if it has blanks, else as many as the `window` (the model's context length)
    has room for. Longer texts are written window by window, the last `overlap` tokens (default: half a window)
    being the prompt of the next one.

    The decoder (docs/decoding.md) is chosen by keywords, `routing`, `commit`, `temperature`, `top_k`, `top_p`,
    `cache`, `adablock` and `lanes`, or by a `DecodingConfig` as `decoding`. A row's result follows from its prompt,
    its `seed` (one for all, or one for each) and its `index` (by default its place) alone: neither the batch nor
    the padding changes it.

    `on_event` receives tokens as they are committed, out of order; `on_end(row, …)` each row that has ended, while
    the others of its batch continue. `cancel(row)` is asked between forwards; `stop(row, completion)` after each
    window.
    """
    config = model.config
    if decoding is not None and options:
        raise ConfigError(f"give {', '.join(options)} in decoding=DecodingConfig(…), or leave decoding out")
    decoding = (decoding or DecodingConfig.of(**options)).resolve(config, tokenizer)
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1")
    if eos_id is None and tokenizer is not None:
        eos_id = tokenizer.eos_id
    window = config.context_length if window is None else window
    given = read_prompts(model, prompts, tokenizer, max_new_tokens, window, overlap, blanks)
    numbers = list(range(len(given.rows))) if index is None else [int(i) for i in index]
    if len(numbers) != len(given.rows):
        raise ConfigError(f"index has {len(numbers)} entries for {len(given.rows)} prompts")
    seeds = [seed] * len(given.rows) if isinstance(seed, int) else list(seed)
    if len(seeds) != len(given.rows):
        raise ConfigError(
            f"seed has {len(seeds)} entries for {len(given.rows)} prompts; give one number, or one each"
        )
    keys = [Key(each).fold("generate") for each in seeds]
    run = _Run(model, given, decoding, keys, numbers, eos_id, stop, cancel, on_event, on_end)
    started = time.perf_counter()
    for at in range(0, len(given.rows), batch_size):
        run.fill(list(range(at, min(at + batch_size, len(given.rows)))))
    result = run.result()
    result.statistics.seconds = time.perf_counter() - started
    if tokenizer is not None:
        result.texts = [tokenizer.decode(ids) for ids in result.completions]
        result.tokenizer = tokenizer
    return result


@dataclass
class _Run:
    """The state of one call: rows grow window by window."""

    model: Model
    given: Prompts
    decoding: DecodingConfig
    keys: list[Key]
    numbers: list[int]
    eos_id: int | None
    stop: Callable[[int, list[int]], bool] | None
    cancel: Callable[[int], bool] | None
    on_event: Callable[[Event], None] | None
    on_end: Callable[[int, Ended], None] | None
    history: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.texts = [list(row) for row in self.given.rows]
        self.left = list(self.given.new_tokens)
        self.finished = [""] * len(self.texts)
        self.statistics = Statistics.zero(len(self.texts))

    def fill(self, rows: list[int]) -> None:
        """Windows until every one of these rows has ended."""
        number = 0
        while rows:
            self._window(rows, number)
            rows = [row for row in rows if not self.finished[row]]
            number += 1

    def _window(self, rows: list[int], number: int) -> None:
        contexts = [self._context(row, number) for row in rows]
        sizes = [min(self.left[row], self.given.window - len(c)) for row, c in zip(rows, contexts, strict=True)]
        canvas = self._canvas(contexts, sizes)
        sets = self.model.sets(canvas, canvas != self.model.config.mask_id)
        offsets = [len(self.texts[row]) - len(c) for row, c in zip(rows, contexts, strict=True)]
        if number:
            self.statistics.reencoded[rows] += torch.tensor([len(c) for c in contexts])
        numbers, decoding = torch.tensor([self.numbers[row] for row in rows]), self.decoding
        router = router_of(self.model, sets, numbers, decoding.routing, decoding.adablock, decoding.lanes)
        fill_canvas(
            canvas,
            sets,
            router,
            predictor_of(self.model, sets, decoding.cache),
            commit_policy(decoding.commit),
            self._reveal(self._noise("token", rows, number, canvas.shape[1]).to(canvas.device)),
            order=self._noise("order", rows, number, canvas.shape[1]),
            settled=self._settled(rows, contexts, sizes, sets.real),
            on_commit=self._recorder(rows, offsets, number, router.lanes),
        )

    def _context(self, row: int, number: int) -> list[int]:
        if number == 0:
            return self.texts[row]
        text = self.texts[row]
        return [self.model.config.bos_id, *text[max(1, len(text) - self.given.overlap) :]]

    def _canvas(self, contexts: list[list[int]], sizes: list[int]) -> Tensor:
        config = self.model.config
        length = max(len(c) + size for c, size in zip(contexts, sizes, strict=True))
        rows = [
            c + [config.mask_id] * size + [config.pad_id] * (length - len(c) - size)
            for c, size in zip(contexts, sizes, strict=True)
        ]
        return torch.tensor(rows, device=self.model.embed_tokens.weight.device)

    def _noise(self, use: str, rows: list[int], number: int, length: int) -> Tensor:
        """(B, L) uniform: one number per position, whatever the batch and its padding."""
        drawn = torch.zeros(len(rows), length, dtype=torch.float64)
        for at, row in enumerate(rows):
            drawn[at] = self.keys[row].fold(use, self.numbers[row], number).uniform(self.given.window)[:length]
        return drawn

    def _reveal(self, uniform: Tensor) -> Callable[[View, Tensor], Tensor]:
        sampling = self.decoding.sampling

        def reveal(view: View, fill: Tensor) -> Tensor:
            chances = uniform.gather(1, view.position)

            def draw(log_p: Tensor, row: Tensor, at: Tensor) -> Tensor:
                return sampling.draw(sampling.log_p(log_p), chances[row, at])

            return view.predicted.measure(draw, fill, 0)

        return reveal

    def _settled(
        self, rows: list[int], contexts: list[list[int]], sizes: list[int], real: Tensor
    ) -> Callable[[Tensor, Tensor, Counts], Tensor]:
        """What needs no token any more: rows that are full, complete up to an EOS, or cancelled, each taken over at
        once; and what lies behind an EOS, where chunks can stay unfinished.
        """
        place = torch.arange(real.shape[1], device=real.device)
        behind = place >= torch.tensor([len(c) for c in contexts], device=real.device)[:, None]
        taken = [False] * len(rows)

        def settled(z: Tensor, revealed: Tensor, counts: Counts) -> Tensor:
            behind_end = torch.zeros_like(real)
            done = ~(real & ~revealed).any(dim=-1)
            if self.eos_id is not None:
                ends = (z == self.eos_id) & revealed & behind
                first = torch.where(ends, place, real.shape[1]).amin(dim=-1, keepdim=True)
                if self.model.config.kind == "lanes":  # their chunks do not depend on what is written
                    behind_end = place > first
                done |= ends.any(dim=-1) & ~(real & ~revealed & (place < first)).any(dim=-1)
            over = done.tolist()
            for at, row in enumerate(rows):
                if not over[at] and self.cancel is not None and not taken[at] and self.cancel(row):
                    self.finished[row], over[at] = "cancelled", True
                if over[at] and not taken[at]:
                    taken[at] = True
                    self.statistics.add(row, counts, at)
                    self._accept(row, contexts[at], sizes[at], z[at].tolist())
            return behind_end | torch.tensor(taken, device=z.device)[:, None]

        return settled

    def _recorder(
        self, rows: list[int], offsets: list[int], number: int, lanes: Tensor | None
    ) -> Callable[[Committed], None]:
        def record(committed: Committed) -> None:
            for at, row in enumerate(rows):
                fill = committed.fill[at]
                if not bool(fill.any()):
                    continue
                position = committed.position[at][fill]
                event = Event(
                    row, number, int(committed.forward[at]), int(committed.chunk[at]),
                    (position + offsets[at]).tolist(), committed.tokens[at][fill].tolist(),
                    committed.log_p[at][fill].tolist(), [] if lanes is None else lanes[at][position].tolist(),
                )  # fmt: skip
                self.history.append(event)
                if self.on_event is not None:
                    self.on_event(event)

        return record

    def _accept(self, row: int, context: list[int], size: int, line: list[int]) -> None:
        """Take over what a window wrote."""
        start, masked = len(context), self.model.config.mask_id
        new = line[start : start + size]
        blanks = sum(a == masked != b for a, b in zip(context, line, strict=False))
        if context is self.texts[row]:  # the first window, whose prompt may have had blanks
            self.texts[row] = line[:start]
        self.texts[row] = self.texts[row] + new
        self.left[row] -= size
        kept = new.index(self.eos_id) + 1 if self.eos_id in new else size
        self.statistics.new_tokens[row] += blanks + sum(token != masked for token in new[:kept])
        if not self.finished[row]:  # not cancelled
            if self.eos_id is not None and self.eos_id in new:
                self.texts[row] = self.texts[row][: len(self.texts[row]) - size + kept]
                self.finished[row] = "eos"
            elif self.stop is not None and self.stop(row, self._completion(row)):
                self.finished[row] = "stop"
            elif self.left[row] <= 0:
                self.finished[row] = "length"
        if self.finished[row] and self.on_end is not None:
            self.on_end(row, Ended(self._completion(row), self.finished[row], self.statistics.of(row)))

    def _completion(self, row: int) -> list[int]:
        start = 1 if self.given.has_blanks[row] else len(self.given.rows[row])
        ids = self.texts[row][start:]
        if self.finished[row] == "eos":
            ids = ids[:-1]
        if self.finished[row] == "cancelled" and self.model.config.mask_id in ids:
            ids = ids[: ids.index(self.model.config.mask_id)]
        return ids

    def result(self) -> Generation:
        pad, length = self.model.config.pad_id, max(len(text) for text in self.texts)
        tokens = torch.tensor([text + [pad] * (length - len(text)) for text in self.texts])
        completions = [self._completion(row) for row in range(len(self.texts))]
        return Generation(tokens, completions, self.finished, self.statistics, self.history)
