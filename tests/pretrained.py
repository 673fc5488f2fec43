"""Small models of `transformers` with tokenizers, as folders and as GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from dcdm.config import NUM_SPECIALS
from dcdm.data.tokenizers import _byte_letters
from dcdm.io.importing import EMBEDDING, HEAD, Source
from dcdm.kinds import build
from dcdm.model.transformer import Model

CHAT = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENS = (*SPECIALS, *_byte_letters(), "th")
FAMILIES = ("Llama", "Qwen2", "Qwen3")
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
"""How its RoPE is scaled, as `rope_parameters`."""


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


def edit_json(path: Path, **changes: Any) -> None:
    """Change entries of a JSON file, or leave out those that are `...`."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def gguf_file(path: Path, model: Any) -> Path:
    """The model and the tokenizer as llama.cpp's converter writes them, unquantized."""
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


def twins(family: str = "Qwen3", tied: bool = True, **changes: Any) -> tuple[Model, Any]:
    """Our AR model and one of `transformers` of the same shape, vocabulary and weights."""
    if family == "Llama 3":
        family, changes = "Llama", {"rope_parameters": LLAMA_3, **changes}
    theirs = network(family, tied, **changes)
    settings, weights = theirs.config.to_dict(), theirs.state_dict()
    config = Source.in_memory(settings, weights, "here").config("ar", vocab_size=settings["vocab_size"])
    ours = build(config)
    ours.load_state_dict({n.removeprefix("model."): v for n, v in weights.items() if n != HEAD or not tied})
    return ours, theirs


def copied(source: Any, kind: str, mask_id: int, **fields: Any) -> Model:
    """Our model with the weights of one of `transformers`, which has been trained on `mask_id` as MASK."""
    found = Source.in_memory(source.config.to_dict(), source.state_dict(), "here")
    fields = {"prompts": "ordinary", "hidden_token": mask_id, "context_length": 64, **fields}
    model = build(found.config(kind, **fields))  # type: ignore[arg-type]
    found.load_into(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in (EMBEDDING, HEAD):
                weight[-NUM_SPECIALS:] = 0
                weight[-1] = weight[mask_id]
    return model.eval()


def taken(folder: Path, kind: str = "ar", **fields: Any) -> Model:
    """A `kind` model with the weights in a folder; the rows of BOS, PAD and MASK as they happen to be."""
    source = Source.in_folder(folder)
    model = build(source.config(kind, **fields), seed=3)  # type: ignore[arg-type]
    source.load_into(model)
    return model.eval()


def block_causal(length: int, size: int | None) -> Tensor:
    """(1, 1, L, L), what `transformers` adds to scores: blocks of `size` from position 0, or all see all."""
    block = torch.arange(length) // (size or length)
    return torch.zeros(1, 1, length, length).masked_fill_(block[:, None] < block[None], -1e9)


def literal_logits(source: Any, ids: Tensor, size: int | None, shift: bool) -> Tensor:
    """(B, L, V) of `transformers`: what predicts each position of `ids`, which hold the mask's id."""
    logits = source(ids, attention_mask=block_causal(ids.shape[1], size)).logits
    return torch.cat([logits[:, :1], logits[:, :-1]], dim=1) if shift else logits


# --- toy folders of published diffusion models, with their names and keys ----------------------------------------

SPARE = ("<|spare_0|>", "<|spare_1|>")
LLADA_KEYS = {
    "d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "mlp_hidden_size": "intermediate_size", "embedding_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings", "weight_tying": "tie_word_embeddings",
    "rms_norm_eps": "rms_norm_eps", "vocab_size": "vocab_size",
}  # fmt: skip
LLADA_NAMES = {
    "model.embed_tokens": "model.transformer.wte", "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out", "model.layers": "model.transformer.blocks",
    "post_attention_layernorm": "ff_norm", "input_layernorm": "attn_norm", "self_attn.o_proj": "attn_out",
    "self_attn.": "", "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out",
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """What the config.json and the tokenizer of a family say beside the backbone's own."""

    backbone: str
    settings: Mapping[str, Any]
    mask: str
    """What its tokenizer calls the mask."""
    block_size: int | None = None
    shift: bool = False
    tied: bool = False
    inside: bool = False
    """The mask has tokens behind it."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """What its folder does not say."""


def _code(module: str, *classes: str) -> dict[str, Any]:
    return {"architectures": [classes[-1]], "auto_map": {"AutoModel": f"modeling_{module}.{classes[-1]}"}}


PUBLISHED = {
    "sdar": Published(
        "Qwen3", {"model_type": "sdar", **_code("sdar", "SDARForCausalLM"), "fuse_cross_entropy": True,
                  "attention_bias": False, "block_size": 4, "mask_token_id": ...}, "<|MASK|>", 4,
    ),
    "sdar, config copy.json": Published(
        "Qwen3", {"model_type": "sdar", **_code("sdar", "SDARForCausalLM")}, "<MASK>", 8, flags={"block_size": 8}
    ),
    "dream-reasoner": Published(
        "Qwen3", {"model_type": "Dream", **_code("dream", "DreamForCausalLM"), "block_size": 8,
                  "mask_token_id": ...}, "<|MASK|>", 8,
    ),
    "tiny-a2d-bd3lm": Published(
        "Qwen3", {"model_type": "a2d-qwen3", **_code("qwen3", "A2DQwen3LMHeadModel")}, "<|mask|>", 8, tied=True,
        flags={"family": "tiny-a2d-bd3lm", "block_size": 8},
    ),
    "tiny-a2d-mdlm": Published(
        "Qwen2", {"model_type": "a2d-qwen2", **_code("qwen2", "A2DQwen2LMHeadModel")}, "<|mask|>", tied=True,
        flags={"family": "tiny-a2d-mdlm"},
    ),
    "fast-dllm-v2": Published(
        "Qwen2", {"model_type": "Fast_dLLM_Qwen", **_code("fast", "Fast_dLLM_QwenForCausalLM"), "bd_size": 8},
        "|<MASK>|", 8, shift=True, tied=True,
    ),
    "stable-diffcoder": Published(
        "Llama", {"model_type": "llama", **_code("diffcoder", "StableDiffcoderForCausalLM")}, "<[MASK_TOKEN]>", 4,
        inside=True, flags={"block_size": 4},
    ),
    "llada": Published(
        "Llama", {"model_type": "llada", **_code("llada", "LLaDAModelLM"), "block_type": "llama", "rope": True,
                  "activation_type": "silu", "layer_norm_type": "rms", "alibi": False, "scale_logits": False,
                  "attention_layer_norm": False, "input_emb_norm": False, "block_group_size": 1,
                  "include_bias": False, "include_qkv_bias": False, "mask_token_id": ..., "rope_theta": 5e3},
        "<|mdm_mask|>", inside=True,
    ),
    "illada": Published(
        "Llama", {"model_type": "illada", **_code("illada", "ILLaDAForCausalLM"), "resid_pdrop": 0.0,
                  "layer_norm_eps": None}, "<[MASK]>", inside=True, tied=True,
    ),
    "dream": Published(
        "Qwen2", {"model_type": "Dream", **_code("dream", "DreamModel"), "mask_token_id": ...}, "<|mask|>",
        shift=True, inside=True,
    ),
    "open-dcoder": Published("Qwen2", {}, "<M>", shift=True, tied=True, flags={"family": "open-dcoder"}),
    "diffullama": Published(
        "Llama", {}, "<mask>", shift=True, flags={"family": "diffullama", "mask": "<mask>"}
    ),
}  # fmt: skip


def published(folder: Path, name: str, **changes: Any) -> tuple[Path, Any, int]:
    """A folder as a family's authors wrote it, the network that is in it, and the mask's id."""
    family = PUBLISHED[name]
    added = (family.mask, *(SPARE if family.inside else ()))
    backend = tokenizer()
    backend.add_special_tokens({"additional_special_tokens": list(added)})
    if name == "open-dcoder":
        backend.mask_token = family.mask
    mask_id = len(TOKENS)
    source = network(family.backbone, family.tied, len(TOKENS) + len(added) + 3)
    source.save_pretrained(folder, **changes)
    backend.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if family.settings:
        config |= {key: mask_id if value is ... else value for key, value in family.settings.items()}
    if name == "llada":
        kept = ("architectures", "auto_map", "dtype", *family.settings)
        config = {key: config[key] for key in kept} | {key: config[of] for key, of in LLADA_KEYS.items()}
        config["rope_theta"] = source.config.rope_parameters["rope_theta"]
        tensors = load_file(folder / "model.safetensors")
        for old, new in LLADA_NAMES.items():
            tensors = {key.replace(old, new): value for key, value in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path.write_text(json.dumps(config))
    return folder, source, mask_id
