"""Small models of `transformers` with tokenizers, as folders and as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from dcdm.data.tokenizers import _byte_letters

CHAT = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENS = (*SPECIALS, *_byte_letters(), "th")
FAMILIES = ("Llama", "Qwen2", "Qwen3")


def tokenizer(adds_bos: bool = False, **options: Any) -> Any:
    """Bytes and one merge behind three special tokens; `adds_bos` puts the second of those before every text."""
    backend = Tokenizer(models.BPE({name: number for number, name in enumerate(TOKENS)}, [("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    if adds_bos:
        bos = SPECIALS[1]
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, 1)])
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT, **options}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def network(family: str = "Llama", tied: bool = True, rows: int = len(TOKENS), **changes: Any) -> Any:
    """A random model over the tokenizer's vocabulary."""
    settings = {
        "vocab_size": rows, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": tied, "initializer_range": 0.2, "attn_implementation": "eager",
    }  # fmt: skip
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**settings, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def saved(folder: Path, family: str = "Llama", *, adds_bos: bool = False, **changes: Any) -> Path:
    """A folder of `transformers` with model and tokenizer."""
    network(family, **changes).save_pretrained(folder)
    tokenizer(adds_bos).save_pretrained(folder)
    return folder


def gguf_file(
    path: Path, model: Any, settings: Mapping[str, str | int] | None = None, without: str | None = None,
    more: Mapping[str, Tensor] | None = None,
) -> Path:  # fmt: skip
    """The model and the tokenizer as llama.cpp's converter writes them, unquantized.

    `settings` are further entries of the header, `more` further tensors; `without` is the name of one left out.
    """
    import gguf

    config, name = model.config, type(model).__name__.removesuffix("ForCausalLM").lower()
    writer = gguf.GGUFWriter(str(path), name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT)
    for key, value in (settings or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)  # type: ignore[arg-type]
    for key, tensor in (more or {}).items():
        writer.add_tensor(key, tensor.numpy())
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    parts = {
        "embed_tokens": "token_embd", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "lm_head": "output",
        "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "o_proj": "attn_output", "norm": "output_norm",
        **{f"{part}_proj": f"attn_{part}" for part in "qkv"},
    }  # fmt: skip
    for full, value in model.state_dict().items():
        if full == "lm_head.weight" and config.tie_word_embeddings:
            continue
        *before, part, kind = full.removeprefix("model.").split(".")
        if name == "llama" and part in ("q_proj", "k_proj"):
            value = _interleaved(value, heads[part[0]])
        prefix = f"blk.{before[1]}." if before[:1] == ["layers"] else ""
        if f"{prefix}{parts[part]}.{kind}" == without:
            continue
        writer.add_tensor(f"{prefix}{parts[part]}.{kind}", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head in pairs, which is GGUF's order for Llama's RoPE."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).transpose(1, 2).reshape(weight.shape).contiguous()
