"""`dcdm eval quality`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro


def quality(
    scorer: Path,
    model: Annotated[Path | None, tyro.conf.Positional] = None,
    texts: Path | None = None,
    num: int = 64,
    length: int = 128,
    temperature: float = 1.0,
    commit: str = "auto",
    batch_size: int = 8,
    seed: int = 0,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    dtype: Literal["float32", "bfloat16", "float64"] = "float32",
    json: bool = False,
) -> None:
    """Measure generated texts: perplexity under another model, entropy, distinct n-grams, repetition.

    Args:
        scorer: A local folder with a causal model of transformers and its tokenizer.
        model: The model whose texts are measured: a run folder, a checkpoint in it, or an exported folder.
        texts: A file of texts instead of a model: .jsonl with a field text, or parted by blank lines.
        num: Texts to generate.
        length: Tokens of a generated text.
        temperature: Temperature of sampling.
        commit: How tokens are filled in, as in dcdm sample.
        batch_size: Sequences of one pass; it changes no result.
        seed: Seed of sampling; text i follows from it and i.
        device: Where to compute.
        dtype: Precision of the model's weights.
        json: Print one JSON object.
    """
    from dcdm.config import ConfigError
    from dcdm.distributed import choose_device
    from dcdm.evaluation.quality import Scorer, measure, read_texts

    if (model is None) == (texts is None):
        raise ConfigError("give either a model or --texts")
    place = choose_device(device)
    judge = Scorer.load(scorer, place)
    if texts is not None:
        wanted, settings = read_texts(texts), {}
    else:
        settings = {"max_new_tokens": length, "temperature": temperature, "commit": commit, "seed": seed}
        wanted = _generated(str(model), num, batch_size, str(place), dtype, settings)
    result = measure(wanted, judge, batch_size)
    if json:
        import json as encoder

        source = {"source": str(model or texts), "scorer": str(scorer)}
        print(encoder.dumps(source | settings | result.to_dict()))
    else:
        _print(result)


def _generated(
    path: str, num: int, batch_size: int, device: str, dtype: str, settings: dict[str, Any]
) -> list[str]:
    """Texts from nothing but BOS."""
    import torch

    import dcdm
    from dcdm.config import ConfigError
    from dcdm.io.load import load_model

    if num < 1 or settings["max_new_tokens"] < 1:
        raise ConfigError(f"--num {num} and --length {settings['max_new_tokens']} must be at least 1")
    model, tokenizer = load_model(path, device=device, dtype=getattr(torch, dtype))
    prompts = [[tokenizer.bos_id]] * num
    done = dcdm.generate(model, prompts, eos_id=tokenizer.eos_id, batch_size=batch_size, **settings)
    return [tokenizer.decode(completion) for completion in done.completions]


def _print(result: Any) -> None:
    print(f"generative perplexity  {result.perplexity:.2f} ± {result.perplexity_stderr:.2f}")
    print(f"entropy                {result.entropy:.3f} nats within a text")
    for n, share in result.distinct.items():
        print(f"distinct {n}-grams       {100 * share:.1f} %")
    print(f"repeated 4-grams       {100 * result.repetition:.1f} %")
    print(f"{result.texts} texts, {result.tokens} tokens of the scorer scored", end="")
    print(f", {result.left_out} texts without a token left out" if result.left_out else "")
