"""`/v1/completions` and `/v1/chat/completions`: requests to rows, and the rows' texts to OpenAI's objects.

Chats need a tokenizer with a chat template.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any
from uuid import uuid4

from dcdm.data.chats import ChatBusy, ChatError
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.config import DecodingConfig
from dcdm.serving.scheduler import Last, QueuedRequest, TextRow
from dcdm.serving.schemas import APIError, ChatRequest, CompletionRequest, OpenAIRequest, bad_request, queue_full
from dcdm.serving.served import Served
from dcdm.serving.streaming import encode
from dcdm.serving.writing import UNFINISHED, Piece, Writer, own_costs, token_text

DEFAULT_MAX_TOKENS = 16


@dataclass
class PreparedRequest:
    """A request, ready to be computed."""

    rows: list[TextRow]
    form: Texts | Messages
    """How the route writes texts down."""
    prompt_tokens: int
    seed: int
    stream: bool
    include_usage: bool
    prompts: list[str] = field(default_factory=list)
    """For the log, if the operator wants them there."""


def prepare_completion(served: Served, request: CompletionRequest) -> PreparedRequest:
    """The rows that a request asks for, checked."""
    _refuse_what_is_not_there(served, request)
    check_stops(request)
    given = _prompts(served, request)
    new_tokens = request.max_tokens or DEFAULT_MAX_TOKENS
    behind = None if request.suffix is None else served.encode(request.suffix, param="suffix")
    decoding, seed = decoder_of(served, request), seed_of(request)
    eos_id = served.eos_id(request.stop_at_eos is not False)

    def row(index: int, ids: list[int]) -> TextRow:
        if behind is None:
            length = served.check_lengths(ids, new_tokens)
            spans = served.spans(request.response_format, ids, length, eos_id)
            begins = not ids and not spans
            writer = Writer(served.tokenizer, 1 + len(ids), eos_id=eos_id, begins=begins, **reading_of(request))
            return TextRow(ids, length, seed, index, decoding, eos_id, writer, spans=spans)
        if new_tokens > served.settings.max_tokens:
            served.check_lengths([], new_tokens)
        canvas = ids + [served.model.config.mask_id] * new_tokens + behind
        served.check_lengths(canvas, 0, "suffix" if len(behind) > len(ids) else "prompt")
        spans = served.spans(request.response_format, canvas, 0, eos_id)
        first, begins = 1 + len(ids), not ids and not spans
        writer = Writer(served.tokenizer, first, last=first + new_tokens - 1, begins=begins, **reading_of(request))
        return TextRow(canvas, 0, seed, index, decoding, eos_id, writer, spans=spans)

    n = texts_of(served, request, len(given))
    rows = [row(number, ids) for number, ids in enumerate(ids for ids, _ in given for _ in range(n))]
    for each in rows:
        each.alternatives = request.logprobs or 0
    echoes = [text for _, text in given for _ in range(n)] if request.echo else [""] * len(rows)
    form = Texts(served.tokenizer, echoes, request.logprobs is not None)
    tokens = sum(len(ids) + len(behind or ()) for ids, _ in given)
    return PreparedRequest(rows, form, tokens, seed, *streaming_of(request), [text for _, text in given])


def _refuse_what_is_not_there(served: Served, request: CompletionRequest) -> None:
    if request.logprobs is not None and request.echo:
        raise bad_request(
            "log-probabilities of prompts are not defined here; leave out echo or logprobs", "logprobs"
        )
    if request.suffix is not None and served.model.config.kind == "ar":
        raise bad_request("suffix needs a diffusion model; this AR model sees nothing behind a blank", "suffix")


def _prompts(served: Served, request: CompletionRequest) -> list[tuple[list[int], str]]:
    """Token ids of every prompt, and its text."""
    prompt = request.prompt
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    ids_and_texts = []
    for each in several:
        ids = served.encode(each) if isinstance(each, str) else served.check_ids(each)
        ids_and_texts.append((ids, each if isinstance(each, str) else served.tokenizer.decode(ids)))
    return ids_and_texts


def prepare_chat(served: Served, request: ChatRequest) -> PreparedRequest:
    """The rows that a request asks for, checked."""
    template = served.template
    if template is None:
        raise APIError(
            404, "the model's tokenizer has no chat template; use /v1/completions", code="no_chat_template"
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
    if None not in (request.max_tokens, request.max_completion_tokens):
        raise bad_request(
            "max_tokens and max_completion_tokens are two names of one number; give one", "max_tokens"
        )
    try:
        text = template.render([message.plain() for message in request.messages], answering=True)
    except ChatBusy:
        raise queue_full() from None
    except ChatError as error:
        raise bad_request(str(error), "messages") from error
    ids = served.check_ids(served.tokenizer.encode_chat(text), "messages")
    length = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    new_tokens = served.check_lengths(ids, getattr(request, length), "messages", length)
    decoding, seed = decoder_of(served, request), seed_of(request)
    eos_id = served.eos_id(request.stop_at_eos is not False)

    check_stops(request)
    spans = served.spans(request.response_format, ids, new_tokens, eos_id)

    def row(index: int) -> TextRow:
        writer = Writer(served.tokenizer, 1 + len(ids), eos_id=eos_id, **reading_of(request))
        return TextRow(ids, new_tokens, seed, index, decoding, eos_id, writer, spans=spans)

    rows = [row(index) for index in range(texts_of(served, request, 1))]
    for each in rows:
        each.alternatives = request.top_logprobs or 0
    form = Messages(served.tokenizer, bool(request.logprobs))
    return PreparedRequest(rows, form, len(ids), seed, *streaming_of(request), [text])


def decoder_of(served: Served, request: OpenAIRequest) -> DecodingConfig:
    decoding = served.decoding(request)
    if decoding.revise is not None:
        raise bad_request(
            "revise replaces tokens of a whole draft, which is not a completion; use /v1/denoise", "revise"
        )
    return decoding


def check_stops(request: OpenAIRequest) -> None:
    if request.stops() and request.response_format is not None and request.response_format.type != "text":
        raise bad_request("stop would cut what response_format completes; give one of them", "stop")


def seed_of(request: OpenAIRequest) -> int:
    return secrets.randbits(62) if request.seed is None else request.seed


def reading_of(request: OpenAIRequest) -> dict[str, Any]:
    """How the request wants its texts read, for `Writer`."""
    if request.provisional and not request.stream:
        raise bad_request("provisional needs stream=true", "provisional")
    return {"stops": request.stops(), "provisional": bool(request.provisional)}


def texts_of(served: Served, request: OpenAIRequest, prompts: int) -> int:
    """Texts of each prompt, if all of them together are not too many."""
    n, most = request.n or 1, served.settings.max_texts
    if n * prompts > most:
        raise bad_request(
            f"{n * prompts} texts in one request are more than {most}, the limit here", "n" if n > 1 else "prompt"
        )
    return n


def streaming_of(request: OpenAIRequest) -> tuple[bool, bool]:
    """Whether to stream, and whether to end with the usage."""
    options = request.stream_options
    if options is not None and not request.stream:
        raise bad_request("stream_options needs stream=true", "stream_options")
    return bool(request.stream), bool(options and options.include_usage)


class Texts:
    """OpenAI's text completions."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer, echoes: list[str], with_log_p: bool) -> None:
        self.tokenizer, self.echoes, self.with_log_p = tokenizer, echoes, with_log_p

    def opening(self, number: int) -> dict[str, Any] | None:
        """The choice of a stream's first chunk, if it needs one of its own."""
        return self.part(number, Piece(self.echoes[number])) if self.echoes[number] else None

    def part(self, number: int, piece: Piece) -> dict[str, Any]:
        """The choice of a stream's chunk."""
        return {
            "index": number, "text": piece.text, "finish_reason": piece.finish,
            "logprobs": self._log_p(piece) if self.with_log_p else None, **provisional_of(piece),
        }  # fmt: skip

    def whole(self, number: int, piece: Piece) -> dict[str, Any]:
        """The choice of an answer in one piece."""
        choice = self.part(number, piece)
        return {**choice, "text": self.echoes[number] + piece.text}

    def _log_p(self, piece: Piece) -> dict[str, Any]:
        top = [
            {self._name(token): log_p for token, log_p in [*others, (own, own_log_p)]}
            for own, own_log_p, others in zip(piece.tokens, piece.log_p, piece.alternatives, strict=True)
        ]
        return {
            "tokens": [token_text(self.tokenizer, token) for token in piece.tokens],
            "token_logprobs": piece.log_p, "top_logprobs": top if any(piece.alternatives) else None,
            "text_offset": piece.offsets,
        }  # fmt: skip

    def _name(self, token: int) -> str:
        """A token's text; what is no whole character is named by its bytes, so that no two share a name."""
        text = token_text(self.tokenizer, token)
        if text and UNFINISHED not in text:
            return text
        held = self.tokenizer.pieces([token])[0]
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in held) if held else f"token:{token}"


class Messages:
    """OpenAI's chat completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, with_log_p: bool) -> None:
        self.tokenizer, self.with_log_p = tokenizer, with_log_p

    def opening(self, number: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": number, "delta": delta, "finish_reason": None, "logprobs": None}

    def part(self, number: int, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return {"index": number, "delta": delta, **self._rest(piece)}

    def whole(self, number: int, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": number, "message": message, **self._rest(piece)}

    def _rest(self, piece: Piece) -> dict[str, Any]:
        tokens = [
            {**self._token(token, log_p), "top_logprobs": [self._token(*other) for other in others]}
            for token, log_p, others in zip(piece.tokens, piece.log_p, piece.alternatives, strict=True)
        ]
        log_p = {"content": tokens, "refusal": None} if self.with_log_p else None
        return {"finish_reason": piece.finish, "logprobs": log_p, **provisional_of(piece)}

    def _token(self, token: int, log_p: float) -> dict[str, Any]:
        held = list(self.tokenizer.pieces([token])[0])
        return {"token": token_text(self.tokenizer, token), "logprob": log_p, "bytes": held}


def provisional_of(piece: Piece) -> dict[str, Any]:
    """What a choice says of the text ahead; nothing where nobody asked."""
    if piece.reading is None:
        return {}
    return {"reading": piece.reading, "provisional": [asdict(each) for each in piece.ahead]}


@dataclass
class Answer:
    """Turns a queued request's messages into an answer; the notes are what the log will say."""

    served: Served
    prepared: PreparedRequest
    queued: QueuedRequest
    notes: dict[str, Any]

    def __post_init__(self) -> None:
        self.costs: dict[str, int] = {}
        self.notes |= {"texts": len(self.prepared.rows), "prompt_tokens": self.prepared.prompt_tokens}
        self.head = {
            "id": f"{self.prepared.form.prefix}-{uuid4().hex}", "created": int(time.time()),
            "model": self.served.name,
        }  # fmt: skip

    async def whole(self) -> dict[str, Any]:
        form, texts = self.prepared.form, [Piece("") for _ in self.prepared.rows]
        with self.queued:
            async for row, piece in self._pieces():
                joined = texts[row.number]
                joined.text += piece.text
                joined.tokens += piece.tokens
                joined.log_p += piece.log_p
                joined.offsets += piece.offsets
                joined.alternatives += piece.alternatives
                joined.finish = piece.finish
        return {
            **self.head, "object": form.object,
            "choices": [form.whole(number, text) for number, text in enumerate(texts)],
            **self._sums(),
        }  # fmt: skip

    async def stream(self) -> AsyncIterator[str]:
        form, prepared = self.prepared.form, self.prepared
        usage = {"usage": None} if prepared.include_usage else {}

        def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
            data = {**self.head, "object": form.chunk_object, "choices": choices, **usage, **more}
            return f"data: {encode(data)}\n\n"

        with self.queued:
            for row in prepared.rows:
                if (opening := form.opening(row.number)) is not None:
                    yield chunk([opening])
            try:
                async for row, piece in self._pieces():
                    yield chunk([form.part(row.number, piece)])
                if prepared.include_usage:
                    yield chunk([], **self._sums())
            except APIError as error:
                self.notes["code"] = error.code
                yield f"data: {encode(error.body())}\n\n"
            yield "data: [DONE]\n\n"

    async def _pieces(self) -> AsyncIterator[tuple[TextRow, Piece]]:
        texts = [""] * len(self.prepared.rows)
        async for row, message in self.queued.messages():
            piece: Piece = message.message if isinstance(message, Last) else message
            if isinstance(message, Last):
                for name, value in own_costs(message.ended.costs).items():
                    self.costs[name] = self.costs.get(name, 0) + value
            texts[row.number] += piece.text
            yield row, piece
        self.notes |= {"completion_tokens": self.costs["new_tokens"], "forwards": self.costs["forwards"]}
        if self.served.settings.log_prompts:
            self.notes |= {"prompts": self.prepared.prompts, "completions": texts}

    def _sums(self) -> dict[str, Any]:
        prompt, new = self.prepared.prompt_tokens, self.costs["new_tokens"]
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {"usage": usage, "dcdm": {"seed": self.prepared.seed, **self.costs}}
