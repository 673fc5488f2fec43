"""What a source holds to examples: plain texts, and rows of prompts and responses, chats among them.

A chat becomes text by the chat template of the tokenizer, in a process that limits what a template may take.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dcdm.config import DataConfig, DataError
from dcdm.data.sources import BadRow, BadRows, Part, read_rows, read_texts, text_of
from dcdm.data.tokenizers import Tokenizer
from dcdm.files import canonical

SECONDS = 5
"""How long one chat may take."""
MEMORY = 512 << 20
"""Bytes of address space of the process that renders."""
CHARACTERS = 4 << 20
"""How much text one chat may give."""
RENDERER = Path(__file__).with_name("chat_renderer.py")
KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG")
"""What the process sees of the environment: no keys."""


class ChatError(Exception):
    """The chat template refuses a chat, or takes too much; the message says which."""


class ChatBusy(ChatError):
    """Nothing is wrong with the chat: its turn did not come in time."""


class ChatTemplate:
    """The chat template of a tokenizer that has one. Its text is encoded with `templated=True`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._settings = {
            "template": tokenizer.chat_template,
            "names": {  # every window begins with BOS anyway
                "bos_token": "", "eos_token": tokenizer.eos_token, "tools": None, "documents": None
            },
            "seconds": SECONDS, "memory": MEMORY, "characters": CHARACTERS,
        }  # fmt: skip
        self._as_text = tokenizer.as_text
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, messages: list[dict[str, str]], *, answering: bool) -> str:
        """The chat as text; `answering` ends it where an answer begins. Special tokens are the template's alone."""
        guarded = [{name: self._as_text(text) for name, text in message.items()} for message in messages]
        if not self._lock.acquire(timeout=SECONDS):
            raise ChatBusy(f"the chat template is busy with other chats for {SECONDS} seconds; try again")
        try:
            answer = self._ask({"messages": guarded, "add_generation_prompt": answering})
            if answer is None or answer.get("over"):
                self._end()
        finally:
            self._lock.release()
        if answer is None:
            raise ChatError(f"the chat template took longer than {SECONDS} seconds, or its process died")
        if "error" in answer:
            raise ChatError(f"the chat template {answer['error']}")
        return str(answer["text"])

    def _ask(self, request: dict[str, Any]) -> Any:
        """The answer of the process, or None if it ends, as it does itself when its time is over."""
        process = self._running()
        assert process.stdout is not None
        with suppress(OSError):
            _send(process, request)
            if (line := process.stdout.readline()).endswith(b"\n"):
                return json.loads(line)
        return None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        process = subprocess.Popen(
            [sys.executable, "-P", "-B", str(RENDERER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env={name: os.environ[name] for name in KEPT if name in os.environ},
        )  # fmt: skip
        self._process, self._finalizer = process, weakref.finalize(self, _stop, process)
        _send(process, self._settings)
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None


def _send(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value).encode() + b"\n")
    process.stdin.flush()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


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

    def read(self, part: Part, bad: BadRows) -> Iterator[tuple[bytes, list[Example]]]:
        """The examples of every document or row of a part, and the name by which its split is chosen."""
        if self.settings.fine_tuning:
            yield from read_rows(part, self.settings.columns, self.examples_of, bad)
        else:
            for text, ends in read_texts(part, self.settings, bad):
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
