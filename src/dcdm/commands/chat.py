"""`dcdm chat`: a conversation in the terminal, or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dcdm.commands.options import (
    NO_FLAGS,
    AdapterOption,
    CompileOption,
    DecoderOptions,
    DeviceOption,
    DtypeOption,
    ModelIfAny,
    SetOption,
    argument_text,
    at_least_one,
    decoder_settings,
    load_writer,
)
from dcdm.config import ConfigError, harmless, many
from dcdm.shipped import CHATS

if TYPE_CHECKING:
    from dcdm.data.chats import ChatTemplate
    from dcdm.data.tokenizers import Tokenizer
    from dcdm.decoding.config import DecodingConfig
    from dcdm.decoding.engine import Generation
    from dcdm.model.transformer import Model

EXAMPLES = (
    "dcdm chat",
    "dcdm chat runs/lanes --lanes 4 --temperature 0.3",
    'echo What is the capital of France? | dcdm chat runs/lanes --system "Answer briefly." --length 32',
)
CAREFUL = 0.2
"""The temperature where none is asked for: small models lose the thread at higher ones."""
FORGET = "/new"
"""What a user writes to begin anew."""


def chat(
    model: ModelIfAny = None,
    adapter: AdapterOption = None,
    system: str | None = None,
    length: int = 128,
    decoder: DecoderOptions = NO_FLAGS,
    set: SetOption = (),
    seed: int = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "fp32",
    compile: CompileOption = False,
) -> None:
    """Talk to a model whose tokenizer has a chat template.

    Each line is a message; /new begins a new conversation, Ctrl-D ends it. Through a pipe, every line of the input
    is answered in turn. Text appears as soon as all before it is written: of several lanes, the first streams and
    the others follow at the end. The temperature is 0.2 unless another is asked for.

    Args:
        system: The system message.
        length: Most tokens of an answer.
        seed: Seed of the draws; the answers of one conversation draw differently.
    """
    from dcdm.data.chats import ChatTemplate
    from dcdm.decoding.config import DecodingConfig

    at_least_one(length=length)
    model = Path(CHATS) if model is None else model
    loaded, tokenizer = load_writer(model, device, dtype, adapter, compile)
    if tokenizer.chat_template is None:
        raise ConfigError(f"{model}: its tokenizer has no chat template; use `dcdm sample {model} --prompt TEXT`")
    if length > loaded.config.context_length - 2:
        raise ConfigError(f"--length {length} leaves no room in a context of {loaded.config.context_length} tokens")
    system = None if system is None else argument_text(system)
    asked = decoder_settings(decoder, set)
    decoding = DecodingConfig.of(**({"temperature": CAREFUL} | asked)).resolve(loaded.config, tokenizer)
    conversation = Conversation(loaded, tokenizer, ChatTemplate(tokenizer), decoding, system, length, seed)
    for message in _messages():
        if message == FORGET:
            conversation.forget()
            continue
        try:
            result = conversation.answer(message, _show)
        except ConfigError as error:
            if not sys.stdin.isatty():
                raise
            print(f"dcdm: {harmless(str(error))}", file=sys.stderr)
            continue
        print(flush=True)
        if sys.stdin.isatty():
            costs = result.statistics
            tokens, forwards = int(costs.new_tokens.sum()), int(costs.forwards.sum())
            passes = many(forwards, "forward pass", "forward passes")
            print(f"({many(tokens, 'token')} in {passes})", file=sys.stderr)


class Conversation:
    """Messages so far, and answers to the next."""

    def __init__(
        self, model: Model, tokenizer: Tokenizer, template: ChatTemplate, decoding: DecodingConfig,
        system: str | None, length: int, seed: int = 0,
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.template, self.decoding = model, tokenizer, template, decoding
        self.length, self.seed = length, seed
        self.turns: list[dict[str, str]] = []
        self.answers = 0
        self._system = [] if system is None else [{"role": "system", "content": system}]

    def forget(self) -> None:
        """Begin anew."""
        self.turns = []

    def answer(self, message: str, show: Callable[[str], None] = lambda text: None) -> Generation:
        """The answer to a message; `show` gets its text piece by piece. Both are remembered."""
        from dcdm.decoding.engine import generate
        from dcdm.decoding.text import Ended, Event
        from dcdm.serving.reading import Piece, TextReader

        turns, ids = self._fitting([*self.turns, {"role": "user", "content": message}])
        reader = TextReader(self.tokenizer, 1 + len(ids), eos_id=self.tokenizer.eos_id)
        text: list[str] = []

        def say(piece: Piece | None) -> None:
            if piece is not None and piece.text:
                text.append(piece.text)
                show(piece.text)

        def on_event(event: Event) -> None:
            say(reader.event(event))

        def on_end(row: int, ended: Ended) -> None:
            say(reader.end(ended))

        result = generate(
            self.model, [ids], tokenizer=self.tokenizer, max_new_tokens=self.length, decoding=self.decoding,
            seed=self.seed, index=[1 + self.answers], on_event=on_event, on_end=on_end, blanks=False,
        )  # fmt: skip
        self.turns = [*turns, {"role": "assistant", "content": "".join(text)}]
        self.answers += 1
        return result

    def _fitting(self, turns: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[int]]:
        """The newest turns that leave room for an answer, and their ids."""
        from dcdm.data.chats import ChatError

        room = self.model.config.context_length - 1 - self.length
        while True:
            try:
                text = self.template.render([*self._system, *turns], answering=True)
            except ChatError as error:
                raise ConfigError(str(error)) from error
            ids = self.tokenizer.encode_chat(text)
            if len(ids) <= room:
                return turns, ids
            if len(turns) < 2:
                raise ConfigError(
                    f"the message has {len(ids)} tokens with its template, and there is room for {room}; shorten "
                    "it, or lower --length"
                )
            turns = turns[2:]


def _messages() -> Iterator[str]:
    """Lines of the terminal, or of a pipe; empty ones are skipped."""
    asking = sys.stdin.isatty()
    while True:
        if asking:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline().decode(errors="replace")
        if not line:
            return
        if line.strip():
            yield line.strip()


def _show(text: str) -> None:
    print(harmless(text) if sys.stdout.isatty() else text, end="", flush=True)
