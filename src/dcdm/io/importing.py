"""Start a model of any kind from a dense Qwen3 that `transformers` saved: its config.json and safetensors.

Everything is checked before the first weight changes, so a failed import leaves the model as it was.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dcdm.config import NUM_SPECIALS, ConfigError, Kind, ModelConfig
from dcdm.files import UnreadableFile, read_json_object
from dcdm.model.transformer import Model

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

_SIZES = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
}  # our name: theirs
_FIXED = (*_SIZES, "rope_theta", "norm_eps")  # the weights mean something else under any other value
_TYPES = {"a whole number": (int,), "a number": (int, float), "true or false": (bool,)}
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class ImportReport:
    """What an import changed; names are those of the model's state dict."""

    copied: tuple[str, ...]
    """Taken from the source; of the embedding and the head, the first `rows` rows."""
    fresh: tuple[str, ...]
    """Left at their initial values."""
    rows: int
    """Vocabulary rows taken from the source."""
    fresh_rows: int
    """Vocabulary rows left at their initial values; BOS, PAD and MASK are always among them."""


@dataclass(frozen=True)
class _Source:
    path: Path
    """The config.json."""
    fields: dict[str, Any]
    """Its settings under our names, `vocab_size` aside."""
    vocab_size: int


def config_from_qwen3(
    folder: str | Path, kind: Kind, *, vocab_size: int | None = None, **fields: Any
) -> ModelConfig:
    """The config of a `kind` model that the Qwen3 in `folder` fits into.

    `vocab_size` counts BOS, PAD and MASK, and defaults to the source's vocabulary with these three appended.
    `fields` are further settings of `ModelConfig`, such as `block_size`, `num_chunks` or `context_length`.
    """
    source = _read_source(Path(folder))
    derived = {
        **source.fields,
        "kind": kind,
        "vocab_size": source.vocab_size + NUM_SPECIALS if vocab_size is None else vocab_size,
        "context_length": min(ModelConfig.context_length, source.fields["max_position"]),
    }
    config = ModelConfig.from_dict(derived | fields)
    _check_fits(config, source)
    return config


def load_qwen3(model: Model, folder: str | Path) -> ImportReport:
    """Copy the weights of the Qwen3 in `folder` into `model`, whose config `config_from_qwen3` gives.

    Token ids keep their meaning: row i of the source becomes row i, as far as both vocabularies go without
    the model's specials. The other rows and the chunking attention keep the values they have.
    """
    source = _read_source(Path(folder))
    _check_fits(model.config, source)
    parameters = dict(model.named_parameters())
    if any(parameter.is_meta for parameter in parameters.values()):
        raise ValueError("the model has no storage yet (meta device); make it with dcdm.build(config)")
    targets = {name: p for name, p in parameters.items() if not name.startswith("chunking.")}
    origins = {name: f"model.{name}" for name in targets}
    if HEAD in targets:
        origins[HEAD] = f"model.{EMBEDDING}" if source.fields["tie_embeddings"] else HEAD
    shapes = {origins[name]: list(p.shape) for name, p in targets.items()}
    for name in {EMBEDDING, HEAD} & set(targets):
        shapes[origins[name]][0] = source.vocab_size
    rows = min(source.vocab_size, model.config.vocab_size - NUM_SPECIALS)

    with ExitStack() as stack:  # the files stay open from the checks to the last copy
        tensors = _open_tensors(source.path.parent, stack)
        _check_tensors(tensors, shapes, source)
        with torch.no_grad():
            for name, target in targets.items():
                if name in (EMBEDDING, HEAD):
                    target[:rows].copy_(tensors[origins[name]][:rows])
                else:
                    target.copy_(tensors[origins[name]][:])
    fresh = tuple(name for name in model.state_dict() if name not in targets)
    return ImportReport(tuple(targets), fresh, rows, model.config.vocab_size - rows)


def _read_json(path: Path, fix: str) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except UnreadableFile as error:
        raise ConfigError(f"{path} cannot be read: {error}; {fix}") from error


def _read_source(folder: Path) -> _Source:
    """The source's settings, refused where our backbone cannot express them."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; download a Qwen3 model and give the folder that holds its config.json"
        )
    path = folder / "config.json"
    settings = _read_json(path, "give the folder that `save_pretrained` wrote")
    _check_architecture(settings, path)

    def read(name: str, what: str, values: dict[str, Any] = settings) -> Any:
        value = values.get(name)
        if type(value) not in _TYPES[what]:
            raise ConfigError(f"{name}={value!r} in {path} must be {what}; restore the original config.json")
        return value

    if "num_key_value_heads" in settings and settings["num_key_value_heads"] is None:
        settings["num_key_value_heads"] = settings.get("num_attention_heads")
    fields: dict[str, Any] = {ours: read(theirs, "a whole number") for ours, theirs in _SIZES.items()}
    fields["max_position"] = read("max_position_embeddings", "a whole number")
    fields["norm_eps"] = float(read("rms_norm_eps", "a number"))
    rope = {"rope_theta": settings.get("rope_theta"), **(settings.get("rope_parameters") or {})}
    fields["rope_theta"] = float(read("rope_theta", "a number", rope))
    fields["tie_embeddings"] = read("tie_word_embeddings", "true or false")
    return _Source(path, fields, read("vocab_size", "a whole number"))


def _check_architecture(settings: dict[str, Any], path: Path) -> None:
    """Refuse what would load without an error, and then compute something else."""

    def refuse(name: str, value: object, fix: str) -> None:
        raise ConfigError(f"{name}={value!r} in {path} cannot be imported: {fix}")

    if (model_type := settings.get("model_type")) != "qwen3":
        refuse("model_type", model_type, "choose a dense Qwen3 model (model_type 'qwen3')")
    if settings.get("attention_bias"):
        refuse("attention_bias", True, "our projections have no bias; choose a model without")
    if (activation := settings.get("hidden_act", "silu")) != "silu":
        refuse("hidden_act", activation, "our MLP is SwiGLU; choose a model with 'silu'")
    layer_types = settings.get("layer_types") or []
    if settings.get("use_sliding_window") or any(kind != "full_attention" for kind in layer_types):
        name = "use_sliding_window" if settings.get("use_sliding_window") else "layer_types"
        refuse(name, settings[name], "our layers attend without a window; choose a model with full attention")
    if settings.get("quantization_config"):
        refuse("quantization_config", settings["quantization_config"], "choose the unquantized weights")
    for name in ("rope_parameters", "rope_scaling"):  # since and before transformers 5
        rope = settings.get(name) or {}
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            refuse(name, rope, "our RoPE is not scaled; choose a model with rope_type 'default'")


def _check_fits(config: ModelConfig, source: _Source) -> None:
    if config.moe is not None:
        raise ConfigError(
            f"moe={config.moe} has no counterpart in {source.path}, a dense model; leave moe out, "
            f"with intermediate_size={source.fields['intermediate_size']}"
        )
    for name in _FIXED:
        if getattr(config, name) != source.fields[name]:
            raise ConfigError(
                f"{name}={getattr(config, name)} does not fit {source.path}, where it is "
                f"{source.fields[name]}; take the config from config_from_qwen3 and leave this field out"
            )
    if config.tie_embeddings and not source.fields["tie_embeddings"]:
        raise ConfigError(
            f"tie_embeddings=True does not fit {source.path}, whose head has weights of its own; "
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


def _check_tensors(tensors: dict[str, Any], shapes: dict[str, list[int]], source: _Source) -> None:
    folder, tied = source.path.parent, source.fields["tie_embeddings"]
    if missing := shapes.keys() - tensors.keys():
        raise ConfigError(f"{folder} lacks the tensors {_some(missing)}; save a complete Qwen3ForCausalLM")
    spare = {HEAD} if tied else set()  # published tied models often carry the head all the same
    if extra := tensors.keys() - shapes.keys() - spare:
        raise ConfigError(
            f"{folder} holds tensors that a dense Qwen3 does not have: {_some(extra)}; "
            "save a plain Qwen3ForCausalLM, with adapters merged"
        )
    for name, shape in shapes.items():
        if tensors[name].get_shape() != shape:
            raise ConfigError(
                f"{name} in {folder} has the shape {tensors[name].get_shape()}, but {source.path} asks for "
                f"{shape}; use the config.json and the weights of one model"
            )
    for name, tensor in tensors.items():
        if tensor.get_dtype() not in _FLOATS:
            raise ConfigError(
                f"{name} in {folder} has the type {tensor.get_dtype()}; save it as one of {', '.join(_FLOATS)}"
            )
    if tied and HEAD in tensors and not torch.equal(tensors[HEAD][:], tensors[f"model.{EMBEDDING}"][:]):
        raise ConfigError(
            f"tie_word_embeddings=True in {source.path}, but {HEAD} differs from model.{EMBEDDING}; "
            f"set tie_word_embeddings to false there, or save the model without {HEAD}"
        )


def _some(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
