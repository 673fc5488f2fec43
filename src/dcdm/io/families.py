"""Which published models can be imported: three backbones, the diffusion models built on them, and who is refused.

A diffusion model's folder often calls itself `llama` or `qwen2` and would load as an AR model without an error. So
the class in `architectures` decides, `model_type` comes after it, and every sign of a diffusion model in a folder
that would be read as AR is refused. What a folder says itself (ids, sizes, block size) stands in no table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dcdm.config import ConfigError
from dcdm.data.tokenizers import Tokenizer

AR = "ar"
"""As a family's name: read the folder as an AR model, whatever it looks like."""
SIGNS = ("mask_token_id", "mask_id", "block_size", "bd_size", "auto_map")
"""Settings that the config.json of an AR model of `transformers` does not have."""


@dataclass(frozen=True)
class Backbone:
    """An architecture of `transformers` that our backbone can be."""

    name: str
    blocks: dict[str, bool]
    """Settings of ours that make our blocks its own."""
    theta: float | None = None
    """RoPE's base where old folders of AR models do not name it."""

    @property
    def causal_class(self) -> str:
        """Its AR model in `transformers`."""
        return f"{self.name}ForCausalLM"


BACKBONES = {
    "llama": Backbone("Llama", {"attention_bias": False, "qk_norm": False}, theta=1e4),
    "qwen2": Backbone("Qwen2", {"attention_bias": True, "qk_norm": False}),
    "qwen3": Backbone("Qwen3", {"attention_bias": False, "qk_norm": True}),
}
"""By the `model_type` of a config.json."""
NAMES = "Llama, Qwen2 or Qwen3"


@dataclass(frozen=True)
class Family:
    """Published diffusion models of one make, as far as they differ from a backbone of `transformers`."""

    name: str
    """What `--family` takes."""
    title: str
    kind: Literal["bdlm", "mdlm"]
    """Block-causal, or everything sees everything."""
    classes: tuple[str, ...] = ()
    """What `architectures` calls it; families without one are known by their name alone (`--family`)."""
    backbone: str = ""
    """Of `BACKBONES`; "": the one that `model_type` ends with, as in a2d-qwen3."""
    shift: bool = False
    """The row before a token predicts it."""
    masks: tuple[str, ...] = ()
    """What its tokenizers call the mask token, if they do not say which it is."""
    block_key: str = "block_size"
    """The setting that holds its block size."""
    published: str = ""
    """Block sizes that were published, for a message."""
    tensors: tuple[tuple[str, str], ...] = ()
    """Names of tensors to those of the backbone, by regular expressions in this order."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Names of settings to those of the backbone."""
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Settings that must have these values, or the model computes something else."""

    def tensor_name(self, name: str) -> str:
        """The backbone's name of a tensor."""
        for pattern, new in self.tensors:
            name = re.sub(pattern, new, name)
        return name

    def block_size(self, given: Mapping[str, Any], place: str, asked: int | None) -> int | None:
        """Of a folder, whose config.json says it or the caller does."""
        if self.kind == "mdlm":
            if asked is not None:
                raise ConfigError(f"block_size={asked} has no effect on a {self.title}, which has no blocks")
            return None
        stated = given.get(self.block_key)
        if stated is None and asked is None:
            raise ConfigError(
                f"{place} does not say the block size ({self.block_key}); give the one that the model was trained "
                f"with by --block-size: {self.published} in what was published"
            )
        if None not in (stated, asked) and stated != asked:
            raise ConfigError(f"block_size={asked}, but {self.block_key}={stated!r} in {place}; leave it out")
        size = stated if asked is None else asked
        if type(size) is not int or size < 1:
            raise ConfigError(f"{self.block_key}={size!r} in {place} must be a whole number of at least 1")
        return size

    def mask_id(self, given: Mapping[str, Any], place: str, tokenizer: Tokenizer, named: int | None) -> int:
        """What config.json, else the tokenizer (`named`), else the publication calls the mask token."""
        token_id = tokenizer.backend.token_to_id
        stated = given.get("mask_token_id")
        if named is None:
            named = next((token_id(text) for text in self.masks if token_id(text) is not None), None)
        if stated is None and named is None:
            raise ConfigError(
                f"{place}: neither it nor the tokenizer says which token is the mask; say it by --mask"
            )
        if None not in (stated, named) and stated != named:
            raise ConfigError(
                f"mask_token_id={stated!r} in {place}, but the tokenizer's is {named}; say which by --mask"
            )
        found: Any = named if stated is None else stated
        return found

    def translated(self, given: Mapping[str, Any], place: str) -> dict[str, Any]:
        """A config.json's settings by the backbone's names."""
        for name, value in self.needs.items():
            if given.get(name, ...) != value:
                raise ConfigError(f"{name}={given.get(name)!r} in {place} must be {value!r} in a {self.title}")
        renamed = {self.settings[name]: value for name, value in given.items() if name in self.settings}
        backbone = self.backbone or str(given.get("model_type")).rpartition("-")[2]
        return {**given, **renamed, "model_type": backbone}


_A2D = ("A2DQwen3LMHeadModel", "A2DQwen2LMHeadModel", "A2DLlamaLMHeadModel")
_SDAR_MASKS = ("<|MASK|>", "<MASK>")

_FAMILIES = (
    Family(
        "sdar", "SDAR or TraDo", "bdlm", ("SDARForCausalLM",), "qwen3", masks=_SDAR_MASKS,
        published="4 (or 8, 16, 32, 64)",
    ),
    Family(
        "dream-reasoner", "DreamReasoner", "bdlm", ("DreamForCausalLM",), "qwen3", masks=_SDAR_MASKS, published="32"
    ),
    Family("tiny-a2d-bd3lm", "Tiny-A2D (bd3lm)", "bdlm", _A2D, masks=("<|mask|>",), published="32"),
    Family("tiny-a2d-mdlm", "Tiny-A2D (mdlm)", "mdlm", _A2D, masks=("<|mask|>",)),
    Family(
        "fast-dllm-v2", "Fast-dLLM v2", "bdlm", ("Fast_dLLM_QwenForCausalLM",), "qwen2", shift=True,
        masks=("|<MASK>|",), block_key="bd_size", published="32",
    ),
    Family(
        "stable-diffcoder", "Stable-DiffCoder", "bdlm", ("StableDiffcoderForCausalLM",), "llama",
        masks=("<[MASK_TOKEN]>",), published="4",
    ),
    Family(
        "llada", "LLaDA", "mdlm", ("LLaDAModelLM",), "llama", masks=("<|mdm_mask|>",),
        tensors=(
            (r"^model\.transformer\.wte\.", "model.embed_tokens."), (r"^model\.transformer\.ln_f\.", "model.norm."),
            (r"^model\.transformer\.ff_out\.", "lm_head."), (r"^model\.transformer\.blocks\.", "model.layers."),
            (r"\.attn_norm\.", ".input_layernorm."), (r"\.ff_norm\.", ".post_attention_layernorm."),
            (r"\.([qkv]_proj)\.", r".self_attn.\1."), (r"\.attn_out\.", ".self_attn.o_proj."),
            (r"\.ff_proj\.", ".mlp.gate_proj."), (r"\.up_proj\.", ".mlp.up_proj."),
            (r"\.ff_out\.", ".mlp.down_proj."),
        ),
        settings={
            "d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
            "n_kv_heads": "num_key_value_heads", "mlp_hidden_size": "intermediate_size",
            "embedding_size": "vocab_size", "max_sequence_length": "max_position_embeddings",
            "weight_tying": "tie_word_embeddings",
        },
        needs={
            "block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "rope": True,
            "alibi": False, "attention_layer_norm": False, "scale_logits": False, "input_emb_norm": False,
            "block_group_size": 1, "include_bias": False, "include_qkv_bias": False,
        },
    ),
    Family(
        "illada", "iLLaDA", "mdlm", ("ILLaDAForCausalLM",), "llama", masks=("<[MASK]>",),
        needs={"layer_norm_eps": None},
    ),
    Family(
        "dream", "Dream, Dream-Coder or DiffuCoder", "mdlm", ("DreamModel",), "qwen2", shift=True,
        masks=("<|mask|>",),
    ),
    Family("open-dcoder", "Open-dCoder", "mdlm", (), "qwen2", shift=True, masks=("<M>",)),
    Family("diffullama", "DiffuLLaMA", "mdlm", (), "llama", shift=True),
)  # fmt: skip
FAMILIES = {family.name: family for family in _FAMILIES}
"""By the name that `--family` takes."""
HOW = f"say what it is: --family {AR}" + "".join(f", --family {f.name}" for f in _FAMILIES if not f.classes)

_EXPERTS = "its mixture of experts has no counterpart here"
_DIT = "it is a transformer of another make (LayerNorm, GELU, adaptive scales)"
MISSING = {
    "LLaDAMoEModelLM": _EXPERTS, "lladamoe": _EXPERTS, "SDARMoeForCausalLM": _EXPERTS, "sdar_moe": _EXPERTS,
    "rnd1": _EXPERTS,
    "LLaDA2MoeModelLM": "it needs grouped sigmoid experts, partial RoPE and fused projections",
    "llada2_moe": "it needs grouped sigmoid experts, partial RoPE and fused projections",
    "nemotron_labs_diffusion": "it needs YaRN and Llama 4's scaling of attention",
    "WeDLMForCausalLM": "it reorders known tokens before masked ones under a causal mask",
    "wedlm": "it reorders known tokens before masked ones under a causal mask",
    "bd3lm": _DIT, "mdlm": _DIT, "sedd": _DIT,
    "diffusion_gemma": "its noise replaces tokens by others, and it has no mask token",
}  # fmt: skip
"""Diffusion models that our network cannot express, by class or `model_type`, and what is missing."""


def family_of(settings: Mapping[str, Any], place: str, asked: str | None = None) -> Family | None:
    """The family of diffusion models that a config.json belongs to; None: it is an AR model.

    `asked` is a family's name, or `AR`, where the caller knows it: a folder may not tell, but not contradict it.
    """
    if asked is not None and asked not in (AR, *FAMILIES):
        raise ConfigError(f"family={asked!r} is not known; choose one of {', '.join((AR, *FAMILIES))}")
    named = settings.get("architectures") or []
    made_by = str(named[0]) if isinstance(named, list) and named else ""
    model_type = str(settings.get("model_type"))
    for name in (made_by, model_type):
        if name in MISSING:
            raise ConfigError(f"{place}: {name} cannot be imported: {MISSING[name]}")
    fitting = [name for name, family in FAMILIES.items() if made_by in family.classes]
    if fitting:
        if asked is None and len(fitting) == 1:
            return FAMILIES[fitting[0]]
        if asked not in fitting:
            which = "does not fit" if asked else "must be given for"
            raise ConfigError(f"family={asked} {which} {made_by} of {place}; choose {' or '.join(fitting)}")
        return FAMILIES[asked]
    backbone = BACKBONES.get(model_type)
    if asked not in (None, AR):
        family = FAMILIES[asked]
        if family.classes or model_type != family.backbone:
            raise ConfigError(f"family={asked} does not fit {place}, whose model is {made_by or model_type}")
        return family
    if backbone is None or asked == AR:
        return None
    if made_by not in ("", backbone.causal_class):
        raise ConfigError(
            f"architectures=[{made_by!r}] in {place} is not transformers' {backbone.causal_class}, though "
            f"model_type is {model_type!r}; {HOW}"
        )
    if signs := [name for name in SIGNS if settings.get(name) is not None]:
        raise ConfigError(
            f"{signs[0]}={settings[signs[0]]!r} in {place} is a sign of a diffusion model, and it would be read as "
            f"AR; {HOW}"
        )
    return None
