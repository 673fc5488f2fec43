"""Start a model of any kind from a dense Llama, Qwen2 or Qwen3 of `transformers`: its settings and weights.

Everything is checked before the first weight changes, so a failed import leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dcdm.config import NUM_SPECIALS, ConfigError, Kind, ModelConfig, RopeScaling
from dcdm.files import UnreadableFile, read_json_object
from dcdm.kinds import OWN_PARTS
from dcdm.model.transformer import Model

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


Value = TypeVar("Value")


def fitted(start: dict[str, Value], config: ModelConfig) -> dict[str, Value]:
    """Initial weights, or their shapes, for a model that may have a head of its own, or no draft head any more."""
    if not config.tie_embeddings and HEAD not in start:
        start = start | {HEAD: start[EMBEDDING]}  # its head is its embedding
    return {name: value for name, value in start.items() if config.drafts or not name.startswith("drafting.")}


@dataclass(frozen=True)
class Family:
    """An architecture of `transformers` that our backbone can be."""

    name: str
    blocks: dict[str, bool]
    """Settings of ours that make our blocks its own."""
    theta: float | None = None
    """RoPE's base where old folders do not name it."""


FAMILIES = {
    "llama": Family("Llama", {"attention_bias": False, "qk_norm": False}, theta=1e4),
    "qwen2": Family("Qwen2", {"attention_bias": True, "qk_norm": False}),
    "qwen3": Family("Qwen3", {"attention_bias": False, "qk_norm": True}),
}
"""By the `model_type` of a config.json."""
NAMES = "Llama, Qwen2 or Qwen3"

_SIZES = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
}  # our name: theirs
FIXED = (*_SIZES, "rope_theta", "rope_scaling", "norm_eps", "attention_bias", "qk_norm")
"""The weights mean something else under any other value."""
_SCALING = {
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}  # fmt: skip
_TYPES = {"a whole number": (int,), "a number": (int, float), "true or false": (bool,)}
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Source:
    """A model of `transformers`: its settings, read and checked, and a way to its tensors."""

    place: str
    """Where the settings stand, for messages."""
    family: Family
    fields: dict[str, Any]
    """Its settings under our names, `vocab_size` aside."""
    vocab_size: int
    weights: str
    """Where the tensors stand, for messages."""
    open_tensors: Callable[[ExitStack], dict[str, Any]]
    """Every tensor as a safetensors slice, or something like it, by name; open until the stack closes."""

    @classmethod
    def of(cls, settings: dict[str, Any], place: str, weights: str, opener: Callable[[ExitStack], dict[str, Any]],
           advice: str = "restore the original config.json") -> Source:  # fmt: skip
        """From the settings of a config.json, refused where our backbone cannot express them."""
        family = _family(settings, place)

        def read(name: str, what: str, values: dict[str, Any]) -> Any:
            value = values.get(name)
            if type(value) not in _TYPES[what]:
                raise ConfigError(f"{name}={value!r} in {place} must be {what}; {advice}")
            return value

        settings = dict(settings)
        if settings.get("num_key_value_heads") is None and ("num_key_value_heads" in settings or family.theta):
            settings["num_key_value_heads"] = settings.get("num_attention_heads")
        if settings.get("head_dim") is None and family.name != "Qwen3":
            settings["head_dim"] = read("hidden_size", "a whole number", settings) // max(
                1, read("num_attention_heads", "a whole number", settings)
            )
        fields: dict[str, Any] = {
            ours: read(theirs, "a whole number", settings) for ours, theirs in _SIZES.items()
        } | family.blocks
        fields["max_position"] = read("max_position_embeddings", "a whole number", settings)
        fields["norm_eps"] = float(read("rms_norm_eps", "a number", settings))
        rope = {"rope_theta": settings.get("rope_theta"), **(settings.get("rope_parameters") or {})}
        if rope["rope_theta"] is None:
            rope["rope_theta"] = family.theta
        fields["rope_theta"] = float(read("rope_theta", "a number", rope))
        scaled = _rope_type(settings.get("rope_scaling")) == "llama3"
        rope |= settings["rope_scaling"] if scaled else {}
        fields["rope_scaling"] = None
        if _rope_type(rope) == "llama3":
            values = {ours: read(theirs, "a number", rope) for ours, theirs in _SCALING.items()}
            fields["rope_scaling"] = RopeScaling(**values)
        fields["tie_embeddings"] = read("tie_word_embeddings", "true or false", settings)
        return cls(place, family, fields, read("vocab_size", "a whole number", settings), weights, opener)

    @classmethod
    def in_folder(cls, folder: Path) -> Source:
        """What `save_pretrained` wrote: config.json and safetensors."""
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not a folder; download a {NAMES} model and give the folder that holds its config.json"
            )
        path = folder / "config.json"
        settings = _read_json(path, "give the folder that `save_pretrained` wrote")
        return cls.of(settings, str(path), str(folder), lambda stack: _open_tensors(folder, stack))

    @classmethod
    def in_memory(cls, settings: dict[str, Any], tensors: dict[str, Tensor], place: str) -> Source:
        """A model that `transformers` has read from elsewhere."""
        held = {name: _Held(tensor) for name, tensor in tensors.items()}
        return cls.of(settings, place, place, lambda stack: dict(held), "choose another file")

    def config(self, kind: Kind, *, vocab_size: int | None = None, **fields: Any) -> ModelConfig:
        """The config of a `kind` model that this one fits into; see `config_from_transformers`."""
        derived = {
            **self.fields,
            "kind": kind,
            "vocab_size": self.vocab_size + NUM_SPECIALS if vocab_size is None else vocab_size,
            "context_length": min(ModelConfig.context_length, self.fields["max_position"]),
        }
        config = ModelConfig.from_dict(derived | fields)
        _check_fits(config, self)
        return config

    def load_into(self, model: Model) -> None:
        """Copy the weights into a model whose config `config` gives; see `load_transformers`."""
        _check_fits(model.config, self)
        parameters = dict(model.named_parameters())
        if any(parameter.is_meta for parameter in parameters.values()):
            raise ValueError("the model has no storage yet (meta device); make it with dcdm.build(config)")
        targets = {name: p for name, p in parameters.items() if not name.startswith(OWN_PARTS)}
        origins = {name: f"model.{name}" for name in targets}
        if HEAD in targets:
            origins[HEAD] = f"model.{EMBEDDING}" if self.fields["tie_embeddings"] else HEAD
        shapes = {origins[name]: list(p.shape) for name, p in targets.items()}
        for name in {EMBEDDING, HEAD} & set(targets):
            shapes[origins[name]][0] = self.vocab_size
        rows = min(self.vocab_size, model.config.vocab_size - NUM_SPECIALS)

        with ExitStack() as stack:  # the files stay open from the checks to the last copy
            tensors = self.open_tensors(stack)
            _check_tensors(tensors, shapes, self)
            with torch.no_grad():
                for name, target in targets.items():
                    if name in (EMBEDDING, HEAD):
                        target[:rows].copy_(tensors[origins[name]][:rows])
                    else:
                        target.copy_(tensors[origins[name]][:])


@dataclass(frozen=True)
class _Held:
    """A tensor in memory, asked as a safetensors slice is."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        named = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
        return named.get(self.tensor.dtype, str(self.tensor.dtype))

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]


def config_from_transformers(
    folder: str | Path, kind: Kind, *, vocab_size: int | None = None, **fields: Any
) -> ModelConfig:
    """The config of a `kind` model that the Llama, Qwen2 or Qwen3 in `folder` fits into.

    `vocab_size` counts BOS, PAD and MASK, and defaults to the source's vocabulary with these three appended.
    `fields` are further settings of `ModelConfig`, such as `block_size`, `num_chunks` or `context_length`.
    """
    return Source.in_folder(Path(folder)).config(kind, vocab_size=vocab_size, **fields)


def load_transformers(model: Model, folder: str | Path) -> None:
    """Copy the weights in `folder` into `model`, whose config `config_from_transformers` gives.

    Token ids keep their meaning: row i of the source becomes row i, as far as both vocabularies go without
    the model's specials. The other rows, the chunking attention and the draft head keep the values they have.
    """
    Source.in_folder(Path(folder)).load_into(model)


def is_transformers(folder: Path) -> bool:
    """Whether the folder's config.json is that of a model which can be imported."""
    if not (folder / "config.json").is_file():
        return False
    return _read_json(folder / "config.json", "restore it").get("model_type") in FAMILIES


def _read_json(path: Path, fix: str) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except UnreadableFile as error:
        raise ConfigError(f"{path} cannot be read: {error}; {fix}") from error


def _rope_type(rope: Any) -> Any:
    """The kind of RoPE that an entry of a config.json asks for; None where it is no such entry."""
    rope = rope or {}
    return rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None


def _family(settings: dict[str, Any], place: str) -> Family:
    """The architecture, refused where it would load without an error and then compute something else."""

    def refuse(name: str, value: object, fix: str) -> None:
        raise ConfigError(f"{name}={value!r} in {place} cannot be imported: {fix}")

    model_type = settings.get("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(repr(name) for name in FAMILIES)
        refuse("model_type", model_type, f"choose a dense {NAMES} model (model_type {known})")
    family = FAMILIES[str(model_type)]
    for name in ("attention_bias", "mlp_bias"):
        if settings.get(name) and not (name == "attention_bias" and family.blocks["attention_bias"]):
            refuse(name, True, "of biases, our blocks have those of Qwen2 alone; choose a model without")
    if (activation := settings.get("hidden_act", "silu")) != "silu":
        refuse("hidden_act", activation, "our MLP is SwiGLU; choose a model with 'silu'")
    layer_types = settings.get("layer_types") or []
    if not isinstance(layer_types, list):
        refuse("layer_types", layer_types, "it must be a list with an entry for each layer; repair config.json")
    if settings.get("use_sliding_window") or any(kind != "full_attention" for kind in layer_types):
        name = "use_sliding_window" if settings.get("use_sliding_window") else "layer_types"
        refuse(name, settings[name], "our layers attend without a window; choose a model with full attention")
    if settings.get("quantization_config"):
        refuse("quantization_config", settings["quantization_config"], "choose the unquantized weights")
    for name in ("rope_parameters", "rope_scaling"):  # since and before transformers 5
        if _rope_type(settings.get(name)) not in ("default", "llama3"):
            fix = "our RoPE is plain or Llama 3's; choose a model with rope_type 'default' or 'llama3'"
            refuse(name, settings[name], fix)
    return family


def _check_fits(config: ModelConfig, source: Source) -> None:
    if config.moe is not None:
        raise ConfigError(
            f"moe={config.moe} has no counterpart in {source.place}, a dense model; leave moe out, "
            f"with intermediate_size={source.fields['intermediate_size']}"
        )
    for name in FIXED:
        if getattr(config, name) != source.fields[name]:
            raise ConfigError(
                f"{name}={getattr(config, name)} does not fit {source.place}, where it is "
                f"{source.fields[name]}; take the config from config_from_transformers and leave this field out"
            )
    if config.tie_embeddings and not source.fields["tie_embeddings"]:
        raise ConfigError(
            f"tie_embeddings=True does not fit {source.place}, whose head has weights of its own; "
            "set tie_embeddings=False"
        )


def _open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Every tensor of the folder as a lazy safetensors slice, by name; open until `stack` closes."""
    again = "download or save the model again"
    if (folder / SINGLE_FILE).is_file():
        return dict(_open_file(folder / SINGLE_FILE, stack, again))
    index = folder / INDEX_FILE
    if not index.is_file():
        raise ConfigError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; "
            "save the model with `save_pretrained`, which writes safetensors"
        )
    weight_map = _read_json(index, again).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and file == Path(file).name for file in weight_map.values()
    ):
        raise ConfigError(f"weight_map in {index} must name files of this folder; {again}")
    tensors: dict[str, Any] = {}
    for file in sorted(set(weight_map.values())):
        held = _open_file(folder / file, stack, again)
        listed = {name for name, where in weight_map.items() if where == file}
        if listed != held.keys():
            raise ConfigError(
                f"{folder / file} and the weight_map in {index} disagree about "
                f"{_some(listed ^ held.keys())}; {again}"
            )
        tensors |= held
    return tensors


def _open_file(path: Path, stack: ExitStack, fix: str) -> dict[str, Any]:
    try:
        file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}); {fix}") from error
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged ({error}); {fix}") from error
    return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is not a dict)


def _check_tensors(tensors: dict[str, Any], shapes: dict[str, list[int]], source: Source) -> None:
    place, tied, name = source.weights, source.fields["tie_embeddings"], source.family.name
    if missing := shapes.keys() - tensors.keys():
        raise ConfigError(f"{place} lacks the tensors {_some(missing)}; save a complete {name}ForCausalLM")
    spare = {HEAD} if tied else set()  # published tied models often carry the head all the same
    spare |= {known for known in tensors if known.endswith(".rotary_emb.inv_freq")}  # and old ones RoPE's table
    if extra := tensors.keys() - shapes.keys() - spare:
        raise ConfigError(
            f"{place} holds tensors that a dense {name} does not have: {_some(extra)}; "
            f"save a plain {name}ForCausalLM, with adapters merged"
        )
    for name, shape in shapes.items():
        if tensors[name].get_shape() != shape:
            raise ConfigError(
                f"{name} in {place} has the shape {tensors[name].get_shape()}, but {source.place} asks for "
                f"{shape}; use the config.json and the weights of one model"
            )
    for name, tensor in tensors.items():
        if tensor.get_dtype() not in _FLOATS:
            raise ConfigError(
                f"{name} in {place} has the type {tensor.get_dtype()}; save it as one of {', '.join(_FLOATS)}"
            )
    if tied and HEAD in tensors and not torch.equal(tensors[HEAD][:], tensors[f"model.{EMBEDDING}"][:]):
        raise ConfigError(
            f"tie_word_embeddings=True in {source.place}, but {HEAD} differs from model.{EMBEDDING}; "
            f"set tie_word_embeddings to false there, or save the model without {HEAD}"
        )


def _some(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
