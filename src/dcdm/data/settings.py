"""How text becomes documents, examples and splits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dcdm.config import DataError

Documents = Literal["file", "lines", "blank-lines"]
Turns = Literal["last", "each"]
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)
CHAT_FORMAT = 2  # raise it when the same chats would give other examples, splits or counts of bytes


@dataclass(frozen=True)
class DataConfig:
    """Settings of a preparation, checked on construction.

    Plain text comes from `.txt` files (cut into documents as `documents` says) or from `field` of a row. With
    `prompt_field` and `response_field`, or with `messages_field`, every row is one example of supervised
    fine-tuning instead: the prompt stays visible, the response is learned.
    """

    documents: Documents = "file"
    """What is one document in a text file: the file, each line, or what blank lines separate."""
    field: str = "text"
    """Field of a row that holds its text."""
    prompt_field: str | None = None
    """Fine-tuning: field of the prompt."""
    response_field: str | None = None
    """Fine-tuning: field of the response."""
    separator: str = "\n"
    """Fine-tuning: what is between prompt and response; it belongs to the prompt."""
    messages_field: str | None = None
    """Fine-tuning on chats: field that holds one, a list of {"role": …, "content": …}."""
    turns: Turns = "last"
    """Fine-tuning on chats: which of the assistant's messages is learned, the last or each (an example each)."""
    validation_share: float = 0.05
    """Share of the documents held out by hash, when no validation source is named."""
    max_bad: int = 0
    """Lines or rows that may be unreadable before the preparation stops; they are left out and reported."""

    def __post_init__(self) -> None:
        for name, allowed in (("documents", get_args(Documents)), ("turns", get_args(Turns))):
            if getattr(self, name) not in allowed:
                raise DataError(f"{name}={getattr(self, name)!r} is not known; choose one of {', '.join(allowed)}")
        if not 0 <= self.validation_share < 1:
            raise DataError(f"validation_share={self.validation_share} must lie in [0, 1)")
        if self.max_bad < 0:
            raise DataError(f"max_bad={self.max_bad} must be at least 0")
        if (self.prompt_field is None) != (self.response_field is None):
            raise DataError("prompt_field and response_field go together: set both or neither")
        if self.messages_field is not None and self.prompt_field is not None:
            raise DataError("set prompt_field and response_field, or messages_field, not both")

    @property
    def fine_tuning(self) -> bool:
        """Whether rows are examples (prompt and response) rather than plain text."""
        return self.messages_field is not None or self.prompt_field is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields of a row that are read."""
        if self.messages_field is not None:
            return (self.messages_field,)
        if self.prompt_field is not None and self.response_field is not None:
            return (self.prompt_field, self.response_field)
        return (self.field,)

    def identity(self, validation_given: bool) -> dict[str, Any]:
        """The settings that shape the result; those that cannot matter here are left out."""
        chosen: dict[str, Any] = {}
        if self.messages_field is not None:
            chosen |= {"messages_field": self.messages_field, "turns": self.turns, "chat_format": CHAT_FORMAT}
        elif self.prompt_field is not None:
            chosen |= {"prompt_field": self.prompt_field, "response_field": self.response_field}
            chosen |= {"separator": self.separator}
        else:
            chosen |= {"documents": self.documents, "field": self.field}
        if not validation_given:
            chosen["validation_share"] = self.validation_share
        return chosen


def held_out(name: bytes, share: float) -> bool:
    """Whether what is called `name` belongs to validation: a matter of its hash alone."""
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") < share * 2**64
