"""Requests to rows, and what is written to answers: OpenAI's completions and chats, and `/v1/denoise`.

`/v1/denoise` is a canvas being filled: every step's commits as they come. Chats need a tokenizer with a template.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4

import torch

from dcdm.data.chats import ChatBusy, ChatError
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.engine import blank_tokens, whole_text
from dcdm.decoding.text import Ended, Event
from dcdm.lanes.masks import lane_partition
from dcdm.serving.reading import UNFINISHED, Piece, ReadToken, TextReader, own_costs, token_text
from dcdm.serving.scheduler import Last, QueuedRequest, QueuedText
from dcdm.serving.schemas import (
    APIError,
    ChatRequest,
    CompletionRequest,
    DenoiseRequest,
    OpenAIRequest,
    bad_request,
    encode,
    queue_full,
)
from dcdm.serving.served import Served

DEFAULT_MAX_TOKENS = 16


def prepare_completion(served: Served, request: CompletionRequest) -> Answer:
    """What a request asks for, checked."""
    if request.suffix is not None and served.model.config.kind == "ar":
        raise bad_request("suffix needs a diffusion model; this AR model sees nothing behind a blank", "suffix")
    given = request.prompt
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    prompts = [served.encode(one) if isinstance(one, str) else served.check_ids(one) for one in several]
    behind = None if request.suffix is None else served.encode(request.suffix, param="suffix")
    rows = _rows(served, request, prompts, request.max_tokens or DEFAULT_MAX_TOKENS, behind=behind)
    for row in rows:
        row.alternatives = request.logprobs or 0
    form = CompletionChoices(served.tokenizer, request.logprobs is not None)
    return Answer(served, request, rows, form, sum(len(ids) + len(behind or ()) for ids in prompts))


def prepare_chat(served: Served, request: ChatRequest) -> Answer:
    """What a request asks for, checked."""
    template = served.template
    if template is None:
        raise APIError(
            404, "the model's tokenizer has no chat template; use /v1/completions", code="no_chat_template"
        )
    try:
        text = template.render([message.plain() for message in request.messages], answering=True)
    except ChatBusy:
        raise queue_full() from None
    except ChatError as error:
        raise bad_request(str(error), "messages") from error
    ids = served.check_ids(served.tokenizer.encode_chat(text), "messages")
    length = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    rows = _rows(served, request, [ids], getattr(request, length), ("messages", length))
    for row in rows:
        row.alternatives = request.top_logprobs or 0
    return Answer(served, request, rows, ChatChoices(served.tokenizer, bool(request.logprobs)), len(ids))


def _rows(
    served: Served, request: OpenAIRequest, prompts: Sequence[list[int]], new_tokens: int | None,
    names: tuple[str, str] = ("prompt", "max_tokens"), behind: list[int] | None = None,
) -> list[QueuedText]:  # fmt: skip
    """The texts of every prompt; with something `behind` it the new tokens are a blank.

    `names` are what callers call the prompt and the number of new tokens.
    """
    n, most = request.n or 1, served.settings.max_texts
    if n * len(prompts) > most:
        texts = n * len(prompts)
        raise bad_request(
            f"{texts} texts in one request are more than {most}, the limit here", "n" if n > 1 else "prompt"
        )
    decoding = served.decoding(request)
    seed = secrets.randbits(62) if request.seed is None else request.seed
    eos_id = served.eos_id(request.stop_at_eos is not False)
    rows: list[QueuedText] = []
    for ids in prompts:
        given, last = ids, None
        if behind is None:
            length = served.check_lengths(ids, new_tokens, *names)
        else:
            assert new_tokens is not None
            if new_tokens > served.settings.max_tokens:
                served.check_lengths([], new_tokens)
            given = [*ids, *[served.model.config.mask_id] * new_tokens, *behind]
            last, length = len(ids) + new_tokens, 0
            served.check_lengths(given, 0, "suffix" if len(behind) > len(ids) else "prompt")
        for _ in range(n):
            reader = TextReader(
                served.tokenizer, 1 + len(ids), last=last, stops=request.stops(), eos_id=eos_id,
                begins=not ids, in_pieces=bool(request.stream),
            )  # fmt: skip
            rows.append(QueuedText(given, length, seed, len(rows), decoding, eos_id, reader))
    return rows


class CompletionChoices:
    """The choices of OpenAI's text completions."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    opening: ClassVar[dict[str, Any]] = {}
    """Of a stream: the choice that comes before there is text, if any."""

    def __init__(self, tokenizer: Tokenizer, with_log_p: bool) -> None:
        self.tokenizer, self.with_log_p = tokenizer, with_log_p

    def choice(self, piece: Piece, whole: bool = False) -> dict[str, Any]:
        """What a stream's chunk, or an answer in one piece, says of a text."""
        log_p = self._log_p(piece.tokens) if self.with_log_p else None
        return {"text": piece.text, "finish_reason": piece.finish, "logprobs": log_p}

    def _log_p(self, tokens: list[ReadToken]) -> dict[str, Any]:
        top = [
            {self._name(token): log_p for token, log_p in [*each.alternatives, (each.token, each.log_p)]}
            for each in tokens
        ]
        return {
            "tokens": [token_text(self.tokenizer, each.token) for each in tokens],
            "token_logprobs": [each.log_p for each in tokens],
            "top_logprobs": top if any(each.alternatives for each in tokens) else None,
            "text_offset": [each.offset for each in tokens],
        }

    def _name(self, token: int) -> str:
        """A token's text; what is no whole character is named by its bytes, so that no two share a name."""
        text = token_text(self.tokenizer, token)
        if text and UNFINISHED not in text:
            return text
        held = self.tokenizer.pieces([token])[0]
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in held) if held else f"token:{token}"


class ChatChoices:
    """The choices of OpenAI's chat completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    opening: ClassVar[dict[str, Any]] = {
        "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None
    }  # fmt: skip

    def __init__(self, tokenizer: Tokenizer, with_log_p: bool) -> None:
        self.tokenizer, self.with_log_p = tokenizer, with_log_p

    def choice(self, piece: Piece, whole: bool = False) -> dict[str, Any]:
        if whole:
            said: dict[str, Any] = {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
        else:
            said = {"delta": {"content": piece.text} if piece.text else {}}
        tokens = [
            {
                **self._token(each.token, each.log_p),
                "top_logprobs": [self._token(*other) for other in each.alternatives],
            }
            for each in piece.tokens
        ]
        log_p = {"content": tokens, "refusal": None} if self.with_log_p else None
        return {**said, "finish_reason": piece.finish, "logprobs": log_p}

    def _token(self, token: int, log_p: float) -> dict[str, Any]:
        held = list(self.tokenizer.pieces([token])[0])
        return {"token": token_text(self.tokenizer, token), "logprob": log_p, "bytes": held}


@dataclass
class Answer:
    """The rows of a request, and OpenAI's objects from what is said of them; `notes` are what the log will say."""

    served: Served
    request: OpenAIRequest
    rows: list[QueuedText]
    form: CompletionChoices | ChatChoices
    prompt_tokens: int

    def __post_init__(self) -> None:
        self.costs: dict[str, int] = {}
        self.head = {
            "id": f"{self.form.prefix}-{uuid4().hex}", "created": int(time.time()), "model": self.served.name
        }  # fmt: skip

    async def whole(self, queued: QueuedRequest, notes: dict[str, Any]) -> dict[str, Any]:
        with queued:
            pieces = {row.index: piece async for row, piece in self._pieces(queued, notes)}
        choices = [{"index": at, **self.form.choice(pieces[at], whole=True)} for at in sorted(pieces)]
        return {**self.head, "object": self.form.object, "choices": choices, **self._sums()}

    async def stream(self, queued: QueuedRequest, notes: dict[str, Any]) -> AsyncIterator[str]:
        options = self.request.stream_options
        include_usage = bool(options and options.include_usage)
        head = {**self.head, "object": self.form.chunk_object, **({"usage": None} if include_usage else {})}

        def sse(data: dict[str, Any]) -> str:
            return f"data: {encode(data)}\n\n"

        for row in self.rows if self.form.opening else ():
            yield sse({**head, "choices": [{"index": row.index, **self.form.opening}]})
        try:
            async for row, piece in self._pieces(queued, notes):
                yield sse({**head, "choices": [{"index": row.index, **self.form.choice(piece)}]})
            if include_usage:
                yield sse({**head, "choices": [], **self._sums()})
        except APIError as error:
            notes["code"] = error.code
            yield sse(error.body())
        yield "data: [DONE]\n\n"

    async def _pieces(
        self, queued: QueuedRequest, notes: dict[str, Any]
    ) -> AsyncIterator[tuple[QueuedText, Piece]]:
        notes |= {"texts": len(self.rows), "prompt_tokens": self.prompt_tokens}
        async for row, message in queued.messages():
            if isinstance(message, Last):
                _note_costs(notes, message)
                for name, value in own_costs(message.ended.costs).items():
                    self.costs[name] = self.costs.get(name, 0) + value
            yield row, message.message if isinstance(message, Last) else message

    def _sums(self) -> dict[str, Any]:
        prompt, new = self.prompt_tokens, self.costs["new_tokens"]
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {"usage": usage, "dcdm": {"seed": self.rows[0].seed, **self.costs}}


def _note_costs(notes: dict[str, Any], last: Last) -> None:
    """Add a text's costs to what the log will say, which also tells what it took over from earlier prompts."""
    for note, name in (("completion_tokens", "new_tokens"), ("forwards", "forwards"), ("prefix_tokens", "prefix")):
        notes[note] = notes.get(note, 0) + last.ended.costs[name]


# --- a canvas being filled ---------------------------------------------------------------------------------------


def prepare_denoising(served: Served, request: DenoiseRequest) -> QueuedText:
    """The row that a request asks for, checked."""
    decoding = served.decoding(request)
    ids = served.encode(request.prompt, request.blanks)
    eos_id = served.eos_id(request.stop_at_eos)
    new_tokens = served.check_lengths(ids, request.max_tokens)
    reader = CommitReader(served.tokenizer, request.prompt, request.blanks, begins=not ids)
    return QueuedText(ids, new_tokens, request.seed, 0, decoding, eos_id, reader)


class CommitReader:
    """Makes the stream's objects of a row's events."""

    satisfied = False

    def __init__(self, tokenizer: Tokenizer, prompt: str, blanks: bool, *, begins: bool) -> None:
        """If the text `begins`, it has no prompt."""
        self.tokenizer, self.prompt, self.blanks, self.begins = tokenizer, prompt, blanks, begins

    def event(self, event: Event, seconds: float) -> dict[str, Any]:
        return {
            "window": event.window, "forward": event.forward, "chunk": event.chunk, "positions": event.positions,
            "tokens": event.tokens, "texts": [token_text(self.tokenizer, token) for token in event.tokens],
            "logprobs": [max(value, -1e30) for value in event.log_p], "seconds": seconds,
            **({"lanes": event.lanes} if event.lanes else {}),
        }  # fmt: skip

    def end(self, ended: Ended, seconds: float) -> dict[str, Any]:
        filled = self.blanks and bool(blank_tokens(self.prompt))
        decode = self.tokenizer.decode if filled or self.begins else self.tokenizer.continuation
        new, forwards = ended.costs["new_tokens"], ended.costs["forwards"]
        return {
            "text": whole_text(self.prompt, decode(ended.completion), self.blanks), "finish_reason": ended.finished,
            "costs": own_costs(ended.costs), "seconds": seconds, "tokens_per_second": new / max(seconds, 1e-9),
            "tokens_per_forward": new / max(forwards, 1),
        }  # fmt: skip


def _start(served: Served, row: QueuedText) -> dict[str, Any]:
    """The canvas: the whole text as far as it is known."""
    tokenizer, decoding = served.tokenizer, row.decoding
    tokens = [tokenizer.bos_id, *row.prompt, *[tokenizer.mask_id] * row.new_tokens]
    canvas: list[dict[str, Any]] = []
    for at, token in enumerate(tokens):
        given = token != tokenizer.mask_id
        shown = {"token": token, "text": token_text(tokenizer, token)} if given else {"token": None, "text": None}
        canvas.append({"position": at, **shown, "given": given})
    more: dict[str, Any] = {}
    if decoding.lanes is not None:
        more = {"lanes": decoding.lanes, **({"drafts": decoding.drafts} if decoding.drafts else {})}
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


async def stream_denoising(served: Served, queued: QueuedRequest, notes: dict[str, Any]) -> AsyncIterator[str]:
    """The events of a row; the notes are what the log will say."""

    def sse(name: str, data: Any) -> str:
        return f"event: {name}\ndata: {encode(data)}\n\n"

    (row,) = queued.rows
    notes |= {"texts": 1, "prompt_tokens": len(row.prompt)}
    yield sse("start", _start(served, row))
    try:
        async for _, message in queued.messages():
            if isinstance(message, Last):
                _note_costs(notes, message)
                yield sse("done", message.message)
            else:
                yield sse("commit", message)
    except APIError as error:
        notes["code"] = error.code
        yield sse("error", error.body())
