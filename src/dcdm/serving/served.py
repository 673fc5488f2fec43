"""The model that is served: what it can do, and requests checked against it before anything is computed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from dcdm.config import ConfigError
from dcdm.data.chats import ChatTemplate
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.commits import POLICIES
from dcdm.decoding.config import (
    CACHES,
    ROUTINGS,
    DecodingConfig,
    described,
    fitting_caches,
    fitting_routings,
    fitting_settings,
)
from dcdm.decoding.engine import blank_tokens, read_prompts, with_blanks
from dcdm.model.transformer import Model
from dcdm.serving.exercises import exercises_for
from dcdm.serving.schemas import Generating, bad_request, invalid_setting
from dcdm.serving.settings import Settings

KINDS: dict[Any, str] = {
    str: "choice", float: "number", float | None: "number", int: "integer", int | None: "integer",
    tuple[str, ...]: "texts",
}  # fmt: skip
"""How a form asks for a setting of this type."""


@dataclass(frozen=True)
class ServedModel:
    model: Model
    tokenizer: Tokenizer
    name: str
    settings: Settings
    folder: str | None = None
    """Where it was loaded from, for commands that others may copy."""
    about: str | None = None
    """What it is and what it was trained on, of models that have a card."""
    language: str = "python"
    """Of its examples."""
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def template(self) -> ChatTemplate | None:
        """Of chats, if the tokenizer has one."""
        return None if self.tokenizer.chat_template is None else ChatTemplate(self.tokenizer)

    @property
    def window_length(self) -> int:
        return self.model.config.context_length

    def decoding(self, request: Generating) -> DecodingConfig:
        """The decoder that is asked for, as this model understands it."""
        try:
            return DecodingConfig.of(**request.decoding()).resolve(self.model.config, self.tokenizer)
        except ConfigError as error:
            raise invalid_setting(error) from error

    def eos_id(self, stop_at_eos: bool) -> int:
        """The token that ends a text; −1, which is not a token, where texts continue behind an EOS."""
        return self.tokenizer.eos_id if stop_at_eos else -1

    def encode(self, text: str, blanks: bool = False, param: str = "prompt") -> list[int]:
        """Token ids of a text, in which `[[8]]` is a blank only if `blanks`."""
        if blanks and blank_tokens(text) > self.window_length:
            raise bad_request(
                f"the blanks of the {param} are longer than the context of {self.window_length} tokens", param
            )
        try:
            return with_blanks(self.tokenizer, text) if blanks else self.tokenizer.encode(text)
        except ConfigError as error:
            raise bad_request(str(error), param) from error

    def check_ids(self, ids: Sequence[int], param: str = "prompt") -> list[int]:
        """Token ids of a request: nothing but what text consists of, and EOS."""
        wrong = next((t for t in ids if not 0 <= t < self.model.config.bos_id), None)
        if wrong is not None:
            last = self.model.config.bos_id - 1
            raise bad_request(f"{param} holds {wrong}, which is not a token of text; those are 0 to {last}", param)
        return list(ids)

    def check_lengths(
        self, ids: list[int], new_tokens: int | None, param: str = "prompt", length: str = "max_tokens"
    ) -> int:
        """How many tokens will be written behind a prompt, whose blanks are MASKs; refuses what does not fit.

        `param` and `length` are what the caller calls the prompt and the number of new tokens.
        """
        blanks, most = ids.count(self.model.config.mask_id), self.settings.max_tokens
        room = self.window_length - 1 - (bool(new_tokens) if blanks else 1)
        if len(ids) > room:
            raise bad_request(
                f"{len(ids)} tokens of the {param}, blanks counted, are more than {room}, for which there is room",
                param, "context_length_exceeded",
            )  # fmt: skip
        try:
            wanted = read_prompts(self.model, [ids], None, new_tokens, self.window_length, None).new_tokens[0]
        except ConfigError as error:
            raise invalid_setting(ConfigError(str(error).replace("max_new_tokens", length))) from error
        if new_tokens is None and not blanks:
            return min(wanted, most)
        if wanted + blanks > most:
            counted = f" and {blanks} in blanks" if blanks else ""
            raise bad_request(
                f"{wanted} new tokens{counted} are more than {most}, the limit here", length if wanted else param
            )
        return wanted

    @cached_property
    def examples(self) -> list[dict[str, Any]]:
        """What a newcomer may ask of this model: prompts that fit into its context, with blanks in its tokens."""
        fitting = {one.name: one for one in exercises_for(self.tokenizer, self.window_length, self.language)}
        found: list[dict[str, Any]] = []
        if "blanks" in fitting and self.model.config.kind != "ar":
            found.append({"name": "Fill blanks", "prompt": fitting["blanks"].prompt(self.tokenizer)})
        if "ending" in fitting:
            (given, _), (_, length) = fitting["ending"].segments(self.tokenizer)
            found.append({"name": "Complete", "prompt": given, "length": length})
        orders_differ = self.model.config.lanes is not None or not self.model.config.predicts_from_left
        if found and self.model.config.kind != "ar" and orders_differ:
            orders = "AR’s order and lanes" if self.model.config.lanes else "two orders"
            found.append({**found[-1], "name": f"Compare {orders}", "compare": True})
        return [{"length": None, "compare": False, **one} for one in found]

    def dials(self) -> list[dict[str, Any]]:
        """What a form needs to ask for the settings of a decoder that fit; the default "means" so much here."""
        config = self.model.config
        plain = DecodingConfig().resolve(config)
        sizes = {"blocks": config.block_size or 8, "sub-blocks": 8}
        blocks = {name: {"number": size, "least": 1, "whole": True} for name, size in sizes.items()}
        commits = {"ar": ["position"]}.get(config.kind, ["chunk"] if config.predicts_from_left else list(POLICIES))
        choices = {
            "commit": [
                _choice(
                    name, one.about, number=one.default, least=one.least, whole=one.whole,
                    most=None if one.most == float("inf") else one.most,
                )
                for name, one in ((name, POLICIES[name]) for name in commits)
            ],
            "routing": [_choice(name, ROUTINGS[name], **blocks.get(name, {})) for name in fitting_routings(config)],
            "cache": [_choice(name, CACHES[name]) for name in fitting_caches(config)],
        }  # fmt: skip
        return [
            {
                **asdict(one), "type": KINDS[one.type], "means": getattr(plain, one.name),
                "choices": choices.get(one.name),
            }
            for one in fitting_settings(config)
        ]  # fmt: skip

    def card(self) -> dict[str, Any]:
        """OpenAI's model object, and under `dcdm` what this one can do."""
        config, settings = self.model.config, self.settings
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "dcdm",
            "dcdm": {
                "kind": config.kind,
                "folder": self.folder,
                "about": self.about,
                "routing": config.routing if config.kind == "dcdm" else None,
                "described": described(config),
                "context_length": config.context_length,
                "vocab_size": config.vocab_size,
                "num_chunks": config.num_chunks,
                "lanes": config.lanes,
                "drafts": config.drafts,
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "settings": self.dials(),
                "special_tokens": {str(self.tokenizer.bos_id): "BOS", str(self.tokenizer.eos_id): "EOS"},
                "chat": self.tokenizer.chat_template is not None,
                "examples": self.examples,
                "limits": {
                    "max_tokens": settings.max_tokens,
                    "max_prompt_tokens": self.window_length - 2,
                    "max_texts": settings.max_texts,
                    "timeout_seconds": settings.timeout_seconds,
                },
            },
        }


def _choice(name: str, about: str, **number: Any) -> dict[str, Any]:
    """One of several values; it may take a number behind a colon."""
    return {"name": name, "number": None, "least": None, "most": None, "whole": False, **number, "about": about}
