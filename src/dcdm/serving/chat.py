"""`/v1/chat/completions`, for tokenizers that bring a chat template."""

from __future__ import annotations

from typing import Any

from dcdm.data.tokenizers import ChatError, ChatTemplate, Tokenizer
from dcdm.serving.completions import Plan, seed_of, streaming_of, texts_of
from dcdm.serving.errors import Refusal, bad
from dcdm.serving.scheduler import Row
from dcdm.serving.schemas import ChatRequest
from dcdm.serving.served import Served
from dcdm.serving.writing import Piece, Writer


def template_of(served: Served) -> ChatTemplate | None:
    return None if served.tokenizer.chat_template is None else ChatTemplate(served.tokenizer)


def prepare(served: Served, template: ChatTemplate | None, request: ChatRequest) -> Plan:
    """The rows that a request asks for, checked."""
    served.check_name(request.model)
    if template is None:
        raise Refusal(
            404, "the model's tokenizer has no chat template; use /v1/completions", code="no_chat_template"
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise bad("top_logprobs needs logprobs=true", "top_logprobs")
    if None not in (request.max_tokens, request.max_completion_tokens):
        raise bad("max_tokens and max_completion_tokens are two names of one number; give one", "max_tokens")
    try:
        text = template.render([{"role": m.role, "content": m.text()} for m in request.messages], answering=True)
    except ChatError as error:
        raise bad(str(error), "messages") from error
    ids = served.check_ids(served.tokenizer.encode_arrays([text], templated=True)[0].tolist(), "messages")
    new_tokens = served.check_lengths(ids, request.max_completion_tokens or request.max_tokens)
    decoder, seed = served.decoder(**request.decoding()), seed_of(request)

    def row(index: int) -> Row:
        writer = Writer(served.tokenizer, 1 + len(ids), stops=request.stops(), eos_id=decoder.eos_id)
        return Row(ids, new_tokens, seed, index, decoder, writer)

    rows = [row(index) for index in range(texts_of(served, request, 1))]
    form = Messages(served.tokenizer, bool(request.logprobs))
    return Plan(rows, form, len(ids), seed, *streaming_of(request), [text])


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
        told = [
            {
                "token": self.tokenizer.decode([token]), "logprob": log_p,
                "bytes": list(self.tokenizer.pieces([token])[0]), "top_logprobs": [],
            }
            for token, log_p in zip(piece.tokens, piece.log_p, strict=True)
        ]  # fmt: skip
        log_p = {"content": told, "refusal": None} if self.with_log_p else None
        return {"finish_reason": piece.finish, "logprobs": log_p}
