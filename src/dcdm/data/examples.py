"""Rows of fine-tuning data to prompts and responses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dcdm.config import DataConfig, DataError
from dcdm.data.chats import ChatError, ChatTemplate
from dcdm.data.reading import BadRows, Part, is_unicode, read_rows
from dcdm.data.tokenizers import Tokenizer
from dcdm.files import canonical


class BadRow(Exception):
    """A row that gives no example; the message says why."""


@dataclass(frozen=True)
class Example:
    """What stays visible and what is learned, as text."""

    prompt: str
    response: str
    templated: bool = False
    """Whether a chat template wrote it, so that the tokenizer's own special tokens are meant."""


class ExampleMaker:
    """Turns rows into examples as the settings say."""

    def __init__(self, settings: DataConfig, tokenizer: Tokenizer) -> None:
        self.settings, self.tokenizer = settings, tokenizer

    def read(self, part: Part, bad: BadRows) -> Iterator[tuple[bytes, list[Example]]]:
        """The examples of every row of a part, and the name by which the row's split is chosen."""
        for line, row in read_rows(part, self.settings.columns, bad):
            try:
                yield self.examples_of(row)
            except BadRow as error:
                bad.add(part, line, str(error))

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
        prompt, response = (_text(row[column], column) for column in settings.columns)
        if not response:
            raise BadRow(f"{settings.response_field} is empty")
        return prompt.encode(), [Example(prompt + settings.separator, response)]

    def encode(self, examples: list[Example]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids of prompt and response; the response ends with EOS, once."""
        if not examples:
            return []
        templated = examples[0].templated
        texts = [text for example in examples for text in (example.prompt, example.response)]
        ids = self.tokenizer.encode_arrays(texts, templated)
        prompts = map(self.tokenizer.behind_bos, ids[::2]) if templated else ids[::2]
        return [(prompt, self._ended(response)) for prompt, response in zip(prompts, ids[1::2], strict=True)]

    def text_bytes(self, example: Example, response: np.ndarray) -> int:
        """UTF-8 bytes of text in a response with these ids: special tokens that a template spells out are none."""
        text = self.tokenizer.continuation(response) if example.templated else example.response
        return len(text.encode())

    def _ended(self, response: np.ndarray) -> np.ndarray:
        """A template may have closed the response with EOS and a line break already."""
        ends = np.flatnonzero(response == self.tokenizer.eos_id)
        if len(ends) and not self.tokenizer.decode(response[ends[-1] :]).strip():
            return response[: ends[-1] + 1]
        return np.append(response, np.array(self.tokenizer.eos_id, dtype=np.uint32))

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
    return [{key: _text(message.get(key), f"{name}.{key}") for key in ("role", "content")} for message in value]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name} is missing or not text")
    if not is_unicode(value):
        raise BadRow(f"{name} holds half a surrogate pair, which no encoding can hold")
    return value
