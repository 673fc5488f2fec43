"""What a source holds to examples: plain texts, and rows of prompts and responses, chats among them.

A chat becomes text by the chat template of the tokenizer, which is a program: trust it as you trust the folder that
it came in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dcdm.config import DataConfig, DataError
from dcdm.data.sources import BadRow, Part, read_rows, read_texts, text_of
from dcdm.data.tokenizers import Tokenizer
from dcdm.files import canonical


class ChatError(Exception):
    """The chat template refuses a chat; the message says why."""


class ChatTemplate:
    """The chat template of a tokenizer that has one. Its text is encoded with `templated=True`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def render(self, messages: list[dict[str, str]], *, answering: bool) -> str:
        """The chat as text; `answering` ends it where an answer begins. Special tokens are the template's alone."""
        from transformers.utils.chat_template_utils import render_jinja_template

        as_text = self._tokenizer.as_text
        guarded = [{name: as_text(text) for name, text in message.items()} for message in messages]
        try:
            made: Any = render_jinja_template(  # texts and more, whatever its annotation says
                [guarded], chat_template=self._tokenizer.chat_template, add_generation_prompt=answering,
                bos_token="", eos_token=self._tokenizer.eos_token,  # every window begins with BOS anyway
            )  # fmt: skip
            text = str(made[0][0])
            text.encode()  # before the tokenizer does: half a surrogate pair cannot be
        except Exception as error:  # templates raise what they like about roles they do not know
            raise ChatError(f"the chat template refuses it: {str(error).partition(chr(10))[0]}") from error
        return text


# --- documents and rows to examples ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """What stays visible and what is learned, as text."""

    prompt: str | None
    """None: a plain text, all of which is learned."""
    response: str
    templated: bool = False
    """Whether a chat template wrote it, so that the tokenizer's own special tokens are meant."""
    ends: bool = True
    """Whether the document ends here: a long one comes in pieces."""

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.prompt or "") + len(self.response)


class ExampleMaker:
    """Turns documents and rows into examples as the settings say."""

    def __init__(self, settings: DataConfig, tokenizer: Tokenizer) -> None:
        self.settings, self.tokenizer = settings, tokenizer

    def read(self, part: Part) -> Iterator[tuple[bytes, list[Example]]]:
        """The examples of every document or row of a part, and the name by which its split is chosen."""
        if self.settings.fine_tuning:
            yield from read_rows(part, self.settings.columns, self.examples_of)
        else:
            for text, ends in read_texts(part, self.settings):
                yield text.encode(), [Example(None, text, ends=ends)]

    def examples_of(self, row: dict[str, Any]) -> tuple[bytes, list[Example]]:
        """The examples of a row, and the name by which its split is chosen (one prompt, one split).

        Of a chat the prompt is what comes before the first answer: other answers to it, and chats that continue
        differently from there, are in the same split.
        """
        settings = self.settings
        if settings.messages_field is not None:
            messages = _messages(row[settings.messages_field], settings.messages_field)
            answers = _answers(messages)
            turns = answers[-1:] if settings.turns == "last" else answers
            return canonical(messages[: answers[0]]), [self._answer(messages[:at], messages[at]) for at in turns]
        prompt, response = (text_of(row, column) for column in settings.columns)
        if not response:
            raise BadRow(f"{settings.response_field} is empty")
        return prompt.encode(), [Example(prompt + settings.separator, response)]

    def encode(self, examples: list[Example]) -> list[tuple[np.ndarray | None, np.ndarray]]:
        """Ids of prompt and response; what ends here does so with EOS, once."""
        templated = examples[0].templated
        texts = [text for e in examples for text in (e.prompt, e.response) if text is not None]
        ids = iter(self.tokenizer.encode_arrays(texts, templated))
        encoded: list[tuple[np.ndarray | None, np.ndarray]] = []
        for example in examples:
            prompt = None if example.prompt is None else next(ids)
            if prompt is not None and templated:
                prompt = self.tokenizer.behind_bos(prompt)
            response = next(ids)
            encoded.append((prompt, self._ended(response, templated) if example.ends else response))
        return encoded

    def text_bytes(self, example: Example, response: np.ndarray) -> int:
        """UTF-8 bytes of text in a response with these ids: special tokens that a template spells out are none."""
        text = self.tokenizer.continuation(response) if example.templated else example.response
        return len(text.encode())

    def _ended(self, response: np.ndarray, templated: bool) -> np.ndarray:
        """A template may have closed the response with EOS and a line break already."""
        eos = self.tokenizer.eos_id
        last = np.flatnonzero(response == eos)[-1:] if templated else np.empty(0, dtype=int)
        if len(last) and not self.tokenizer.decode(response[last[0] :]).strip():
            return response[: last[0] + 1]
        return np.append(response, np.uint32(eos))

    def _answer(self, before: list[dict[str, str]], answer: dict[str, str]) -> Example:
        if self.tokenizer.chat_template is None:
            return Example("".join(map(_plain, before)) + "Assistant:\n", answer["content"])
        prompt = self._render(before, answering=True)
        whole = self._render([*before, answer], answering=False)
        if not whole.startswith(prompt):
            raise DataError(
                "the tokenizer's chat template writes a chat that does not begin with its own prompt, so that "
                "prompt and response cannot be told apart; use prompt_field and response_field"
            )
        return Example(prompt, whole[len(prompt) :], templated=True)

    def _render(self, messages: list[dict[str, str]], answering: bool) -> str:
        try:
            return self._template.render(messages, answering=answering)
        except ChatError as error:
            raise BadRow(str(error)) from error

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)


def _plain(message: dict[str, str]) -> str:
    """The format of a chat where the tokenizer brings none."""
    return f"{message['role'].capitalize()}:\n{message['content']}\n\n"


def _answers(messages: list[dict[str, str]]) -> list[int]:
    """Where the assistant answers another message."""
    answers = [i for i, message in enumerate(messages) if i > 0 and message["role"] == "assistant"]
    if not answers:
        raise BadRow("the chat has no message of role assistant that answers another")
    return answers


def _messages(value: Any, name: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise BadRow(f'{name} is not a list of messages {{"role": …, "content": …}}')
    return [{key: text_of(message, key) for key in ("role", "content")} for message in value]
