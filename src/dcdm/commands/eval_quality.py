"""`dcdm eval quality`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro

from dcdm.commands.options import (
    NO_FLAGS,
    DecoderOptions,
    DeviceOption,
    DtypeOption,
    JsonOption,
    SetOption,
    at_least_one,
    decoder_settings,
    load_for,
    print_json,
)
from dcdm.config import ConfigError, Device, Dtype

EXAMPLES = ("dcdm eval quality runs/first --scorer gpt2-folder --num 64",)


def quality(
    scorer: Path,
    model: Annotated[
        Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]", help_behavior_hint="")
    ] = None,
    texts: Path | None = None,
    num: int = 64,
    length: int = 128,
    decoder: DecoderOptions = NO_FLAGS,
    set: SetOption = (),
    batch_size: int = 8,
    seed: int = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "fp32",
    json: JsonOption = False,
) -> None:
    """Measure generated texts: perplexity under another model, entropy, distinct n-grams, repetition.

    Args:
        scorer: A local folder with a causal model of transformers and its tokenizer, or with an AR model that dcdm
            import or dcdm export wrote.
        model: The model whose texts are measured: a run folder, a checkpoint in it, an exported folder, or a
            name that `dcdm models` lists.
        texts: A file of texts instead of a model: .jsonl with a field text, or parted by blank lines.
        num: Texts to generate.
        length: Tokens of a generated text.
        batch_size: Sequences of one pass; it changes no result.
        seed: Seed of sampling; text i follows from it and i.
    """
    from dcdm.distributed import choose_device
    from dcdm.evaluation.quality import TextScorer, measure_quality, read_texts

    if (model is None) == (texts is None):
        raise ConfigError("give either a model or --texts")
    judge = TextScorer.load(scorer, choose_device(device))
    if texts is not None:
        wanted, settings, forwards = read_texts(texts), {}, None
    else:
        settings = {"max_new_tokens": length, "seed": seed} | decoder_settings(decoder, set)
        wanted, forwards = _generated(str(model), num, batch_size, device, dtype, settings)
    result = measure_quality(wanted, judge, batch_size)
    if json:
        source = {"source": str(model or texts), "scorer": str(scorer)}
        print_json(source | settings | result.to_dict() | ({} if forwards is None else {"forwards": forwards}))
    else:
        _print(result)
        print("" if forwards is None else f"{forwards:.1f} forward passes per text\n", end="")


def _generated(
    path: str, num: int, batch_size: int, device: Device, dtype: Dtype, settings: dict[str, Any]
) -> tuple[list[str], float]:
    """Texts from nothing but BOS, and the forward passes that one took on average."""
    from dcdm.decoding.engine import generate

    at_least_one(num=num, length=settings["max_new_tokens"])
    model, tokenizer = load_for(path, device, dtype)
    prompts = [[tokenizer.bos_id]] * num
    done = generate(model, prompts, eos_id=tokenizer.eos_id, batch_size=batch_size, **settings)
    texts = [tokenizer.decode(completion) for completion in done.completions]
    return texts, float(done.forwards.double().mean())


def _print(result: Any) -> None:
    spread = "" if result.perplexity_stderr is None else f" ± {result.perplexity_stderr:.2f}"
    print(f"generative perplexity  {result.perplexity:.2f}{spread}")
    print(f"by bytes               {result.bits_per_byte:.3f} bits per byte")
    print(f"entropy                {result.entropy:.3f} nats within a text")
    for n, share in result.distinct.items():
        print(f"distinct {n}-grams       {100 * share:.1f} %")
    print(f"repeated 4-grams       {100 * result.repetition:.1f} %")
    print(f"{result.texts} texts, {result.tokens} tokens of the scorer scored", end="")
    print(f", {result.left_out} texts without a token left out" if result.left_out else "")
