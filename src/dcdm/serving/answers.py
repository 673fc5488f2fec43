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

from dcdm.data.chats import ChatError
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.engine import blank_tokens, whole_text
from dcdm.decoding.text import Ended, Event
from dcdm.lanes.masks import lane_partition
from dcdm.serving.reading import Piece, TextReader, own_costs, token_text
from dcdm.serving.scheduler import Completion, Last, QueuedRequest
from dcdm.serving.schemas import (
    APIError,
    ChatRequest,
    CompletionRequest,
    DenoiseRequest,
    OpenAIRequest,
    bad_request,
    encode,
)
from dcdm.serving.served import ServedModel

DEFAULT_MAX_TOKENS = 16


def prepare_completion(served: ServedModel, request: CompletionRequest) -> Answer:
    """What a request asks for, checked."""
    if request.suffix is not None and served.model.config.kind == "ar":
        raise bad_request("suffix needs a diffusion model; this AR model sees nothing behind a blank", "suffix")
    given = request.prompt
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    prompts = [served.encode(one) if isinstance(one, str) else served.check_ids(one) for one in several]
    behind = None if request.suffix is None else served.encode(request.suffix, param="suffix")
    completions = _completions(served, request, prompts, request.max_tokens or DEFAULT_MAX_TOKENS, behind=behind)
    given_tokens = sum(len(ids) + len(behind or ()) for ids in prompts)
    return Answer(served, request, completions, CompletionChoices(), given_tokens)


def prepare_chat(served: ServedModel, request: ChatRequest) -> Answer:
    """What a request asks for, checked."""
    template = served.template
    if template is None:
        raise APIError(
            404, "the model's tokenizer has no chat template; use /v1/completions", code="no_chat_template"
        )
    try:
        text = template.render([message.plain() for message in request.messages], answering=True)
    except ChatError as error:
        raise bad_request(str(error), "messages") from error
    ids = served.check_ids(served.tokenizer.encode_chat(text), "messages")
    length = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    completions = _completions(served, request, [ids], getattr(request, length), ("messages", length))
    return Answer(served, request, completions, ChatChoices(), len(ids))


def _completions(
    served: ServedModel, request: OpenAIRequest, prompts: Sequence[list[int]], new_tokens: int | None,
    names: tuple[str, str] = ("prompt", "max_tokens"), behind: list[int] | None = None,
) -> list[Completion]:  # fmt: skip
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
    completions: list[Completion] = []
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
            completions.append(Completion(given, length, seed, len(completions), decoding, eos_id, reader))
    return completions


class CompletionChoices:
    """The choices of OpenAI's text completions."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    opening: ClassVar[dict[str, Any]] = {}
    """Of a stream: the choice that comes before there is text, if any."""

    def choice(self, piece: Piece, whole: bool = False) -> dict[str, Any]:
        """What a stream's chunk, or an answer in one piece, says of a text."""
        return {"text": piece.text, "finish_reason": piece.finish, "logprobs": None}


class ChatChoices:
    """The choices of OpenAI's chat completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    opening: ClassVar[dict[str, Any]] = {
        "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None
    }  # fmt: skip

    def choice(self, piece: Piece, whole: bool = False) -> dict[str, Any]:
        if whole:
            said: dict[str, Any] = {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
        else:
            said = {"delta": {"content": piece.text} if piece.text else {}}
        return {**said, "finish_reason": piece.finish, "logprobs": None}


@dataclass
class Answer:
    """The texts of a request, and OpenAI's objects from what is said of them; `notes` are what the log will say."""

    served: ServedModel
    request: OpenAIRequest
    completions: list[Completion]
    form: CompletionChoices | ChatChoices
    prompt_tokens: int

    def __post_init__(self) -> None:
        self.costs: dict[str, int] = {}
        self.head = {
            "id": f"{self.form.prefix}-{uuid4().hex}", "created": int(time.time()), "model": self.served.name
        }  # fmt: skip

    async def whole(self, queued: QueuedRequest, notes: dict[str, Any]) -> dict[str, Any]:
        with queued:
            pieces = {one.index: piece async for one, piece in self._pieces(queued, notes)}
        choices = [{"index": at, **self.form.choice(pieces[at], whole=True)} for at in sorted(pieces)]
        return {**self.head, "object": self.form.object, "choices": choices, **self._sums()}

    async def stream(self, queued: QueuedRequest, notes: dict[str, Any]) -> AsyncIterator[str]:
        options = self.request.stream_options
        include_usage = bool(options and options.include_usage)
        head = {**self.head, "object": self.form.chunk_object, **({"usage": None} if include_usage else {})}

        def sse(data: dict[str, Any]) -> str:
            return f"data: {encode(data)}\n\n"

        for one in self.completions if self.form.opening else ():
            yield sse({**head, "choices": [{"index": one.index, **self.form.opening}]})
        try:
            async for one, piece in self._pieces(queued, notes):
                yield sse({**head, "choices": [{"index": one.index, **self.form.choice(piece)}]})
            if include_usage:
                yield sse({**head, "choices": [], **self._sums()})
        except APIError as error:
            notes["code"] = error.code
            yield sse(error.body())
        yield "data: [DONE]\n\n"

    async def _pieces(
        self, queued: QueuedRequest, notes: dict[str, Any]
    ) -> AsyncIterator[tuple[Completion, Piece]]:
        notes |= {"texts": len(self.completions), "prompt_tokens": self.prompt_tokens}
        async for one, message in queued.messages():
            if isinstance(message, Last):
                _note_costs(notes, message)
                for name, value in own_costs(message.ended.costs).items():
                    self.costs[name] = self.costs.get(name, 0) + value
            yield one, message.message if isinstance(message, Last) else message

    def _sums(self) -> dict[str, Any]:
        prompt, new = self.prompt_tokens, self.costs["new_tokens"]
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {"usage": usage, "dcdm": {"seed": self.completions[0].seed, **self.costs}}


def _note_costs(notes: dict[str, Any], last: Last) -> None:
    """Add a text's costs to what the log will say, which also tells what it took over from earlier prompts."""
    for note, name in (("completion_tokens", "new_tokens"), ("forwards", "forwards"), ("prefix_tokens", "prefix")):
        notes[note] = notes.get(note, 0) + last.ended.costs[name]


# --- a canvas being filled ---------------------------------------------------------------------------------------


def prepare_denoising(served: ServedModel, request: DenoiseRequest) -> Completion:
    """The text that a request asks for, checked."""
    decoding = served.decoding(request)
    ids = served.encode(request.prompt, request.blanks)
    eos_id = served.eos_id(request.stop_at_eos)
    new_tokens = served.check_lengths(ids, request.max_tokens)
    reader = CommitReader(served.tokenizer, request.prompt, request.blanks, begins=not ids)
    return Completion(ids, new_tokens, request.seed, 0, decoding, eos_id, reader)


class CommitReader:
    """Makes the stream's objects of a text's events."""

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


def _start(served: ServedModel, asked: Completion) -> dict[str, Any]:
    """The canvas: the whole text as far as it is known."""
    tokenizer, decoding = served.tokenizer, asked.decoding
    tokens = [tokenizer.bos_id, *asked.prompt, *[tokenizer.mask_id] * asked.new_tokens]
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
        "routing": decoding.routing, "commit": decoding.commit, "cache": decoding.cache, "seed": asked.seed, **more,
        "canvas": canvas,
    }  # fmt: skip


def _first_lanes(served: ServedModel, tokens: list[int], lanes: int) -> list[int | None]:
    """The lane of every blank of the first window; later windows are cut when they begin."""
    config, window = served.model.config, torch.tensor([tokens[: served.window_length]])
    real = torch.ones_like(window, dtype=torch.bool)
    numbers = lane_partition(config, window == config.mask_id, real, lanes)[1][0].tolist()
    return [number or None for number in numbers] + [None] * (len(tokens) - len(numbers))


async def stream_denoising(served: ServedModel, queued: QueuedRequest, notes: dict[str, Any]) -> AsyncIterator[str]:
    """The events of a text; the notes are what the log will say."""

    def sse(name: str, data: Any) -> str:
        return f"event: {name}\ndata: {encode(data)}\n\n"

    (asked,) = queued.completions
    notes |= {"texts": 1, "prompt_tokens": len(asked.prompt)}
    yield sse("start", _start(served, asked))
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
