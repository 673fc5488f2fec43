"""`/v1/denoise`: a canvas being filled, every step's commits as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import torch

from dcdm.config import ConfigError
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.engine import blank_tokens, read_prompts, whole_text
from dcdm.decoding.text import Ended, Event
from dcdm.lanes.masks import lane_partition
from dcdm.serving.scheduler import Last, QueuedRequest, TextRow
from dcdm.serving.schemas import APIError, DenoiseRequest, bad_request, encode
from dcdm.serving.served import Served
from dcdm.serving.writing import own_costs, token_text


def prepare_denoising(served: Served, request: DenoiseRequest) -> TextRow:
    """The row that a request asks for, checked."""
    decoding = served.decoding(request)
    ids = served.encode(request.prompt, request.blanks)
    eos_id = served.eos_id(request.stop_at_eos)
    if decoding.revise is not None:
        _check_revision(served, request, ids)
        reader = EventReporter(served.tokenizer, "", False, begins=True)
        return TextRow(ids, 0, request.seed, 0, decoding, eos_id, reader)
    new_tokens = served.check_lengths(ids, request.max_tokens)
    spans = served.spans(request.response_format, ids, new_tokens, eos_id)
    reader = EventReporter(served.tokenizer, request.prompt, request.blanks, begins=not ids and not spans)
    if request.provisional:
        reader.canvas = canvas_of(served, ids, new_tokens)
    return TextRow(ids, new_tokens, request.seed, 0, decoding, eos_id, reader, spans=spans)


def _check_revision(served: Served, request: DenoiseRequest, ids: list[int]) -> None:
    """Refuse a draft whose least sure tokens cannot be written again."""
    if request.provisional:
        raise bad_request("a draft is there as a whole: nothing of it is written ahead", "provisional")
    if request.response_format is not None:
        raise bad_request("revise writes single tokens again, which no format can constrain", "response_format")
    served.check_prompt(ids, served.window - 1)  # BOS comes before it
    try:
        read_prompts(served.model, [ids], None, request.max_tokens, served.window, None, drafts=True)
    except ConfigError as error:
        raise bad_request(str(error), "revise") from error
    if len(ids) > served.settings.max_tokens:
        raise bad_request(f"the draft has more than {served.settings.max_tokens} tokens, the limit here", "prompt")


def canvas_of(served: Served, prompt: list[int], new_tokens: int) -> list[int]:
    """The whole text as far as it is known: BOS, the prompt, and MASK where something will be written."""
    config = served.model.config
    return [config.bos_id, *prompt, *[config.mask_id] * new_tokens]


class EventReporter:
    """Makes the stream's objects of a row's events."""

    satisfied = False

    def __init__(self, tokenizer: Tokenizer, prompt: str, blanks: bool, *, begins: bool) -> None:
        """If the text `begins`, it has no prompt."""
        self.tokenizer, self.prompt, self.blanks, self.begins = tokenizer, prompt, blanks, begins
        self.canvas: list[int] | None = None
        """If given, events also say how far it can be read by then."""
        self.text = ""

    def event(self, event: Event, seconds: float) -> dict[str, Any]:
        return {
            "window": event.window, "forward": event.forward, "chunk": event.chunk, "positions": event.positions,
            "tokens": event.tokens, "texts": [token_text(self.tokenizer, token) for token in event.tokens],
            "logprobs": [max(value, -1e30) for value in event.log_p], "seconds": seconds,
            **({"lanes": event.lanes} if event.lanes else {}), **self._reading(event),
        }  # fmt: skip

    def _reading(self, event: Event) -> dict[str, Any]:
        """The first position that is open after this event, and which of its own lie behind it."""
        if self.canvas is None:
            return {}
        for position, token in zip(event.positions, event.tokens, strict=True):
            self.canvas[position] = token
        open_places = (at for at, token in enumerate(self.canvas) if token == self.tokenizer.mask_id)
        reading = next(open_places, len(self.canvas))
        return {"reading": reading, "provisional": [position > reading for position in event.positions]}

    def end(self, ended: Ended, seconds: float) -> dict[str, Any]:
        filled = self.blanks and bool(blank_tokens(self.prompt))
        decode = self.tokenizer.decode if filled or self.begins else self.tokenizer.continuation
        self.text = whole_text(self.prompt, decode(ended.completion), self.blanks)
        new, forwards = ended.costs["new_tokens"], ended.costs["forwards"]
        return {
            "text": self.text, "finish_reason": ended.finished,
            "costs": own_costs(ended.costs), "seconds": seconds, "tokens_per_second": new / max(seconds, 1e-9),
            "tokens_per_forward": new / max(forwards, 1),
        }  # fmt: skip


def start(served: Served, row: TextRow) -> dict[str, Any]:
    """The canvas: the whole text as far as it is known."""
    tokenizer, decoding = served.tokenizer, row.decoding
    tokens = canvas_of(served, row.prompt, row.new_tokens)
    canvas: list[dict[str, Any]] = []
    for at, token in enumerate(tokens):
        given = token != tokenizer.mask_id
        shown = {"token": token, "text": token_text(tokenizer, token)} if given else {"token": None, "text": None}
        canvas.append({"position": at, **shown, "given": given})
    more: dict[str, Any] = {}
    if decoding.lanes is not None:
        drafts = 0 if row.spans else decoding.drafts  # texts that must match are written without
        more = {"lanes": decoding.lanes, **({"drafts": drafts} if drafts else {})}
        for place, lane in zip(canvas, _first_lanes(served, tokens, decoding.lanes), strict=True):
            place["lane"] = lane
    return {
        "id": f"dn-{uuid4().hex}", "model": served.name, "kind": served.model.config.kind,
        "routing": decoding.routing, "commit": decoding.commit, "cache": decoding.cache, "seed": row.seed, **more,
        "canvas": canvas,
    }  # fmt: skip


def _first_lanes(served: Served, tokens: list[int], lanes: int) -> list[int | None]:
    """The lane of every blank of the first window; later windows are cut when they begin."""
    config, window = served.model.config, torch.tensor([tokens[: served.window]])
    real = torch.ones_like(window, dtype=torch.bool)
    numbers = lane_partition(config, window == config.mask_id, real, lanes)[1][0].tolist()
    return [number or None for number in numbers] + [None] * (len(tokens) - len(numbers))


async def stream(served: Served, queued: QueuedRequest, notes: dict[str, Any]) -> AsyncIterator[str]:
    """The events of a row; the notes are what the log will say."""

    def sse(name: str, data: Any) -> str:
        return f"event: {name}\ndata: {encode(data)}\n\n"

    (row,) = queued.rows
    notes |= {"texts": 1, "prompt_tokens": len(row.prompt)}
    yield sse("start", start(served, row))
    try:
        async for _, message in queued.messages():
            if isinstance(message, Last):
                costs = message.ended.costs
                notes |= {"completion_tokens": costs["new_tokens"], "forwards": costs["forwards"]}
                if served.settings.log_prompts:
                    notes |= {"completions": [row.reader.text]}
                yield sse("done", message.message)
            else:
                yield sse("commit", message)
    except APIError as error:
        notes["code"] = error.code
        yield sse("error", error.body())
