"""`dcdm sample`: prompts from the command line or a pipe; text or JSON out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

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
    can_ask,
    decoder_settings,
    load_writer,
    piped_text,
    print_json,
)
from dcdm.config import ConfigError, harmless, many

if TYPE_CHECKING:
    from dcdm.decoding.engine import Generation

EXAMPLES = (
    "dcdm sample",
    'dcdm sample --prompt "def area(self):" --lanes 8',
    'dcdm sample runs/first --prompt "def main(" --length 64',
    'dcdm sample runs/first --prompt "def [[6]](self):[[24]]return self.name" --commit position',
    'dcdm sample runs/first --prompt "def main(" "class Stack:" --json --temperature 0.7 --top-p 0.9',
)
EXAMPLE = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):"
"""What the default model continues when nothing is asked."""
EXAMPLE_LENGTH = 96
CAREFUL = 0.5
"""The temperature of the default model: a small one writes better if it stays with what it is surer of."""

OTHERS = {"window": None, "blanks": True, "stop_at_eos": True}
"""What --set takes beside settings of the decoder, and what it is by default."""


def sample(
    model: ModelIfAny = None,
    adapter: AdapterOption = None,
    prompt: tuple[str, ...] = (),
    length: int | None = None,
    num: int = 1,
    decoder: DecoderOptions = NO_FLAGS,
    set: SetOption = (),
    seed: int = 0,
    json: bool = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "fp32",
    compile: CompileOption = False,
) -> None:
    """Complete prompts, or fill the blanks in them.

    In a prompt, [[8]] is a blank of 8 tokens. Without --prompt it is read from standard input, without its last
    line break. `dcdm sample` alone continues an example with the default model, at temperature
    0.5. --set also takes window=N (positions of a canvas, by default the model's context length), blanks=false
    (take [[8]] literally) and stop_at_eos=false.

    Args:
        prompt: The text to continue (--prompt=-x if it begins with a dash); several are completed in one batch.
        length: New tokens after each prompt; by default the rest of the window, or none if there are blanks.
        num: Samples of each prompt.
        seed: Seed of the draws.
        json: Print one JSON object per sample, statistics included.
    """
    from dcdm.decoding.config import DecodingConfig
    from dcdm.decoding.engine import generate

    prompts = _prompts(prompt, has_model=model is not None)
    settings = ({"temperature": CAREFUL} if model is None else {}) | decoder_settings(decoder, set)
    window, blanks, stop_at_eos = (settings.pop(name, plain) for name, plain in OTHERS.items())
    decoding = DecodingConfig.of(**settings)
    at_least_one(num=num, length=length)
    prompts = [text for text in prompts for _ in range(num)]
    loaded, tokenizer = load_writer(model, device, dtype, adapter, compile)
    if prompts[0] == EXAMPLE and length is None:
        length = min(EXAMPLE_LENGTH, loaded.config.context_length - 1 - len(tokenizer.encode(EXAMPLE)))
    result = generate(
        loaded, prompts, tokenizer=tokenizer, max_new_tokens=length, window=window, decoding=decoding, seed=seed,
        eos_id=tokenizer.eos_id if stop_at_eos else -1, blanks=blanks,
    )  # fmt: skip
    if json:
        for row in range(len(prompts)):
            print_json(_record(row, prompts[row], result))
    else:
        _print(prompts, result, blanks)
    print(_costs(result), file=sys.stderr)


def _prompts(prompt: tuple[str, ...], has_model: bool) -> list[str]:
    if prompt:
        return [argument_text(text) for text in prompt]
    if can_ask() and has_model:
        raise ConfigError("give --prompt TEXT, or pipe a text into the command")
    piped = piped_text()
    return [piped if piped or has_model else EXAMPLE]


def _record(row: int, prompt: str, result: Generation) -> dict[str, Any]:
    costs = result.statistics
    return {
        "prompt": prompt, "completion": result.texts[row], "finished": result.finished[row],
        "tokens": result.completions[row], "new_tokens": int(costs.new_tokens[row]),
        "forwards": int(costs.forwards[row]), "rounds": int(costs.rounds[row]),
        "computed": int(costs.computed[row]), "reused": int(costs.reused[row]),
        "reencoded": int(costs.reencoded[row]), "seconds_of_all": costs.seconds,
    }  # fmt: skip


def _print(prompts: list[str], result: Generation, blanks: bool) -> None:
    from dcdm.decoding.engine import whole_text

    for row, (prompt, text) in enumerate(zip(prompts, result.texts, strict=True)):
        if len(prompts) > 1:
            print(f"--- {row + 1} of {len(prompts)} ({result.finished[row]})")
        shown = whole_text(prompt, text, blanks)
        print(harmless(shown) if sys.stdout.isatty() else shown)


def _costs(result: Generation) -> str:
    costs = result.statistics
    tokens, forwards = int(costs.new_tokens.sum()), int(costs.forwards.sum())
    return (
        f"{many(tokens, 'token')} in {many(forwards, 'forward pass', 'forward passes')} "
        f"({costs.tokens_per_forward:.2f} each), "
        f"{costs.seconds:.2f} s, {costs.tokens_per_second:.0f} tokens/s"
    )
