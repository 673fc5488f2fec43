"""What requests hold, answers as JSON, and errors in the form that OpenAI's clients read.

Requests are checked strictly: no number for a text, no text for a number, nothing unknown. The settings of decoders
are those of `DecodingConfig`.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self

from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from starlette.responses import Response

from dcdm.config import ConfigError
from dcdm.decoding.config import settings

MAX_INTEGER = 2**63 - 1


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds half a surrogate pair, which no encoding can hold") from None
    return text


Utf8Text = Annotated[str, AfterValidator(_whole)]
Short = Annotated[Utf8Text, Field(max_length=256)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
MaxTokens = Annotated[int, Field(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
Stop = Annotated[Utf8Text, Field(min_length=1, max_length=1024)]
Zero = Annotated[float, Field(ge=0, le=0)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


def _of_any_form(asked: Any) -> Any:
    if asked not in (None, {"type": "text"}):
        raise ValueError('only {"type": "text"} is supported: texts cannot be made to match a format')
    return asked


def _decoder_fields() -> dict[str, Any]:
    """A field for every setting of a decoder; null, or nothing, is its default."""
    kinds: dict[Any, Any] = {
        str: Short,
        tuple[str, ...]: Annotated[list[Short], Field(min_length=1, max_length=16, fail_fast=True)],
    }
    return {
        one.name: (
            kinds.get(one.type, one.type) | None,
            Field(None, ge=one.least, le=one.most, description=one.about),
        )
        for one in settings()
    }


DecoderSettings = create_model("DecoderSettings", __base__=Body, **_decoder_fields())


class Generating(DecoderSettings):  # type: ignore[misc, valid-type]
    """What all requests for texts share: the settings of the decoder, and these."""

    model: Short | None = Field(None, description="The served model's name; another is an error.")
    response_format: Annotated[dict[Literal["type"], Literal["text"]] | None, BeforeValidator(_of_any_form)] = None

    def decoding(self) -> dict[str, Any]:
        """The settings that were given, for `DecodingConfig.of`."""
        return self.model_dump(include={one.name for one in settings()}, exclude_none=True)


class OpenAIRequest(Generating):
    """What completions and chats share."""

    n: int | None = Field(None, ge=1, le=128, description="Texts for each prompt.")
    stop: Stop | Annotated[list[Stop], Field(max_length=4, fail_fast=True)] | None = Field(
        None, description="Up to 4 texts at which the completion ends; they are not part of it."
    )
    seed: Seed | None = Field(None, description="Equal requests with equal seeds give equal texts.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop_at_eos: bool | None = Field(None, description="False continues after an EOS. Default true.")
    user: Utf8Text | None = Field(None, description="Accepted; it changes nothing.")
    presence_penalty: Zero | None = Field(None, description="Only 0, which does nothing.")
    frequency_penalty: Zero | None = Field(None, description="Only 0, which does nothing.")
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = Field(
        None, description="Only empty, which does nothing."
    )

    @model_validator(mode="after")
    def fits_together(self) -> Self:
        if self.stream_options and not self.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        return self

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(OpenAIRequest):
    prompt: (
        Utf8Text
        | Annotated[list[Utf8Text], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Token], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    ) = Field(description="A text, several, token ids, or several lists of them. `[[8]]` is taken literally.")
    max_tokens: MaxTokens | None = Field(None, description="New tokens of each text. Default 16.")
    suffix: Utf8Text | None = Field(
        None, description="What follows: exactly max_tokens tokens are filled in between. Not for AR models."
    )
    echo: Literal[False] | None = Field(None, description="Only false: the caller has the prompt.")


class TextPart(Body):
    type: Literal["text"]
    text: Utf8Text


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Utf8Text | Annotated[list[TextPart], Field(fail_fast=True)]
    name: Short | None = None

    def plain(self) -> dict[str, str]:
        """What a chat template sees of it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text, **({} if self.name is None else {"name": self.name})}


class ChatRequest(OpenAIRequest):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: MaxTokens | None = Field(None, description="Default: what the context has room for.")
    max_completion_tokens: MaxTokens | None = Field(None, description="Another name of max_tokens.")
    logprobs: Literal[False] | None = Field(None, description="Only false.")

    @model_validator(mode="after")
    def says_each_thing_once(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise bad_request(
                "max_tokens and max_completion_tokens are two names of one number; give one", "max_tokens"
            )
        return self


class DenoiseRequest(Generating):
    prompt: Utf8Text = Field(description="A text in which `[[8]]` is a blank of 8 tokens.")
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        None,
        description="New tokens behind the prompt. Default: none if it has blanks, else what there is room for.",
    )
    seed: Seed = 0
    blanks: bool = Field(True, description="False takes `[[8]]` literally.")
    stop_at_eos: bool = True


# --- answers and errors ------------------------------------------------------------------------------------------


def encode(value: Any) -> str:
    """JSON in ASCII, which holds whatever a caller may have sent."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content).encode()


class APIError(Exception):
    """An answer that is not a success: its status, and what the error object holds."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, headers or {}

    def body(self) -> dict[str, Any]:
        named = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = named.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self, **headers: str) -> Json:
        return Json(self.body(), self.status, {**self.headers, **headers})


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> APIError:
    return APIError(400, message, code=code, param=param)


def invalid_setting(error: ConfigError) -> APIError:
    """A wrong setting; the package's messages begin with its name."""
    named = re.match(r"([a-z_]+)[=:]", str(error))
    return bad_request(str(error), named[1] if named else None)


def invalid_body(error: RequestValidationError) -> APIError:
    """What is wrong and where; never what was sent."""
    faults = error.errors()
    if any(each["type"] == "json_invalid" for each in faults):
        return APIError(400, "the body is not JSON", code="invalid_json")
    places: dict[str, list[str]] = {}
    for each in faults:
        place = [str(part) for part in each["loc"] if part != "body"]
        places.setdefault(place[0][:100] if place else "body", []).append(each["msg"])
    name, problems = next(iter(places.items()))
    if any(each["type"] == "extra_forbidden" for each in faults):
        unknown = [str(each["loc"][-1])[:100] for each in faults if each["type"] == "extra_forbidden"]
        return APIError(400, f"unknown field {', '.join(unknown[:5])}", code="unknown_field", param=unknown[0])
    sentence = "; or ".join(dict.fromkeys(problem.removeprefix("Value error, ") for problem in problems[:4]))
    return APIError(400, f"{name}: {sentence}", code="invalid_value", param=None if name == "body" else name)


def queue_full() -> APIError:
    return APIError(
        429, "too many requests are waiting; try again later", code="queue_full", headers={"Retry-After": "1"}
    )


def closing() -> APIError:
    return APIError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})


def too_long(seconds: float) -> APIError:
    """Asking for the same again would take as long: clients are told not to."""
    return APIError(
        408,
        f"the request took longer than {seconds:g} seconds; ask for fewer tokens, or retry when the server is less "
        "busy",
        code="timeout",
        headers={"x-should-retry": "false"},
    )
