"""`dcdm bench transformers`: one text by a model, in one lane and in several, and by `generate` of `transformers`.

The network of `transformers` gets the model's own weights, so both compute the same logits for the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dcdm.bench.harness import Case, Run
from dcdm.config import ConfigError, ModelConfig, lanes_in_words
from dcdm.decoding.engine import generate
from dcdm.decoding.routes import described
from dcdm.io.load import load_model
from dcdm.model.transformer import OWN_PARTS, Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

THEIRS, AR = "generate of transformers", "AR order"
TOKENS = 128


def cases(folder: Path | None, tokens: int = TOKENS) -> list[Case]:
    """Of a model that writes in lanes, or of an AR model."""
    if folder is None:
        raise ConfigError("dcdm bench transformers needs a model: --models runs/smol")
    model, _ = load_model(folder)
    config = model.config
    if config.kind not in ("ar", "lanes") or config.has_chunking or config.moe is not None:
        raise ConfigError(
            f"{folder}: transformers has no network for {described(config)}; give a dense AR or lane model"
        )
    theirs: Any = network_of_transformers(model)
    start = config.bos_id

    def ours(lanes: int | None, drafts: int = 0) -> Callable[[], Run]:
        def run() -> None:
            generate(model, [[]], max_new_tokens=tokens, temperature=0.0, lanes=lanes, drafts=drafts)

        return lambda: run

    def generated() -> Run:
        def run() -> None:
            with torch.no_grad():
                theirs.generate(
                    torch.tensor([[start]]), attention_mask=torch.ones(1, 1, dtype=torch.long), do_sample=False,
                    max_new_tokens=tokens, min_new_tokens=tokens,
                )  # fmt: skip

        return run

    lanes = [number for number in config.lanes or () if number > 1]
    one = ours(None if config.kind == "ar" else 1)
    name = f"one text of {tokens} tokens"
    several = {f"{number} lanes": ours(number) for number in sorted(lanes, reverse=True)}
    if config.drafts:
        numbers = sorted({1, *lanes}, reverse=True)
        several |= {f"{lanes_in_words(n)}, {config.drafts} drafts": ours(n, config.drafts) for n in numbers}
    found = [Case(f"{name}, against {THEIRS}", {**several, AR: one, THEIRS: generated}, (THEIRS,))]
    if several:
        found.append(Case(f"{name}, against {AR}", {**several, AR: one}, (AR,)))
    return found


def network_of_transformers(model: Model) -> PreTrainedModel:
    """A causal language model of `transformers` with the weights of a dense AR or lane model."""
    import transformers

    config = model.config
    family = "Qwen3" if config.qk_norm else "Qwen2" if config.attention_bias else "Llama"
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_eps, "rope_parameters": _rope(config),
        "max_position_embeddings": config.max_position, "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id, "pad_token_id": config.pad_id, "eos_token_id": None,
    }  # fmt: skip
    network = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**settings))
    weights = {
        name if name.startswith("lm_head") else f"model.{name}": value
        for name, value in model.state_dict().items()
        if not name.startswith(OWN_PARTS)
    }
    missing, unexpected = network.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    network.tie_weights()
    return network.to(model.embed_tokens.weight.dtype).eval()


def _rope(config: ModelConfig) -> dict[str, Any]:
    if config.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    return {
        "rope_type": "llama3", "rope_theta": config.rope_theta, "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    }  # fmt: skip
