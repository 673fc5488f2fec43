"""Chats to text, by the template that a tokenizer brings."""

from __future__ import annotations

from typing import Any

from dcdm.data.tokenizers import Tokenizer


class ChatError(Exception):
    """The template refuses a chat; the message says why."""


class ChatTemplate:
    """Of a tokenizer that has one. Its text is encoded with `templated=True`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from transformers import PreTrainedTokenizerFast

        self._renderer: Any = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend, eos_token=tokenizer.eos_token, chat_template=tokenizer.chat_template
        )

    def render(self, messages: list[dict[str, str]], *, answering: bool) -> str:
        """The chat as text; `answering` ends it where an answer begins."""
        try:
            return self._renderer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=answering,
                bos_token="",  # every window begins with BOS anyway
            )
        except Exception as error:  # templates raise what they like about roles they do not know
            raise ChatError(f"the chat template refuses it: {str(error).partition(chr(10))[0]}") from error
