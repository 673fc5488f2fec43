"""A published model as a source of settings and weights: a dense Llama, Qwen2 or Qwen3, in a folder or in memory.

`families.py` says which models that are. Settings and shapes are checked before the first weight is read, and
weights are read tensor by tensor, so that an import holds the model and one tensor more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dcdm.config import NUM_SPECIALS, ConfigError, Kind, ModelConfig, RopeScaling, many
from dcdm.files import UnreadableFile, read_json_object
from dcdm.io.families import BACKBONES, NAMES, Backbone, Family, family_of
from dcdm.kinds import state_shapes
from dcdm.model.transformer import Model

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
AGAIN = "download or save the model again"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

Shape = tuple[int, ...]
Value = TypeVar("Value")


def fitted(start: dict[str, Value], config: ModelConfig) -> dict[str, Value]:
    """Initial weights, or their shapes, for a model that may have a head of its own, or no draft head any more."""
    if not config.tie_embeddings and HEAD not in start:
        start = start | {HEAD: start[EMBEDDING]}  # its head is its embedding
    return {name: value for name, value in start.items() if config.drafts or not name.startswith("drafting.")}


SIZES = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
}  # our name: theirs
FIXED = (*SIZES, "rope_theta", "rope_scaling", "norm_eps", "attention_bias", "qk_norm")
"""The weights mean something else under any other value."""
_SCALING = {
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}  # fmt: skip
_TYPES = {"a whole number": (int,), "a number": (int, float), "true or false": (bool,)}
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Source:
    """A published model: its settings, read and checked, and a way to its tensors."""

    place: str
    """Where it stands, for messages."""
    backbone: Backbone
    family: Family | None
    """Of diffusion models; None for an AR model."""
    fields: dict[str, Any]
    """Its settings under our names, `vocab_size` aside."""
    vocab_size: int
    given: dict[str, Any]
    """The config.json."""
    shapes: dict[str, Shape]
    """Those of its tensors, by our names."""
    read: Callable[[str], Tensor]
    """One of its tensors, by our name."""
    spare_head: bool = False
    """Whether it stores a head though it is tied."""

    @property
    def title(self) -> str:
        """What it is, for people."""
        return self.backbone.name if self.family is None else self.family.title

    @classmethod
    def in_folder(cls, folder: Path, family: str | None = None) -> Source:
        """What `save_pretrained` wrote: config.json and safetensors. Of the latter only headers are read here."""
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not a folder; download a {NAMES} model and give the folder that holds its config.json"
            )
        path = folder / "config.json"
        settings = read_settings(path, "give the folder that `save_pretrained` wrote")
        known = family_of(settings, str(path), family)
        described = _described(settings, str(path), known)
        shapes: dict[str, Shape] = {}
        place: dict[str, tuple[Path, str]] = {}
        for file in _weight_files(folder):
            for theirs, (shape, dtype) in read_header(file, AGAIN).items():
                if dtype not in _FLOATS:
                    raise ConfigError(f"{theirs} in {file} has the type {dtype}; save it as {', '.join(_FLOATS)}")
                name = _our_name(theirs if known is None else known.tensor_name(theirs))
                if name in shapes:
                    raise ConfigError(f"{theirs} in {file} is stored twice; {AGAIN}")
                shapes[name], place[name] = shape, (file, theirs)
        return cls._of(settings, str(path), known, described, shapes, lambda name: read_tensor(*place[name]))

    @classmethod
    def in_memory(cls, settings: dict[str, Any], tensors: dict[str, Tensor], place: str) -> Source:
        """What `transformers` has read from elsewhere."""
        ours = {_our_name(name): tensor for name, tensor in tensors.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in ours.items()}
        known = family_of(settings, place)
        return cls._of(settings, place, known, _described(settings, place, known), shapes, ours.__getitem__)

    @classmethod
    def _of(
        cls, given: dict[str, Any], place: str, family: Family | None, described: tuple[Backbone, dict[str, Any]],
        shapes: dict[str, Shape], read: Callable[[str], Tensor],
    ) -> Source:  # fmt: skip
        """Without what published models carry for nothing: a head though it is tied, and tables of RoPE."""
        backbone, fields = described
        spare = fields["tie_embeddings"] and HEAD in shapes
        kept = {
            name: shape for name, shape in shapes.items()
            if not (name.endswith(".rotary_emb.inv_freq") or (spare and name == HEAD))
        }  # fmt: skip
        return cls(place, backbone, family, fields, fields.pop("vocab_size"), given, kept, read, spare)

    def config(self, kind: Kind, *, vocab_size: int | None = None, **fields: Any) -> ModelConfig:
        """The config of an AR model, a BDLM or an MDLM that this one fits into.

        `vocab_size` counts BOS, PAD and MASK, and defaults to the source's vocabulary with these three appended.
        `fields` are settings that weights say nothing about, such as `block_size` or `context_length`.
        """
        derived = {
            **self.fields,
            "kind": kind,
            "vocab_size": self.vocab_size + NUM_SPECIALS if vocab_size is None else vocab_size,
            "context_length": min(ModelConfig.context_length, self.fields["max_position"]),
        }
        config = ModelConfig.from_dict(derived | fields)
        check_shapes(config, self.shapes, self.place, self.vocab_size)
        return config

    def load_into(self, model: Model) -> None:
        """Copy the weights into a model whose config `config` gives.

        Token ids keep their meaning: row i of the source becomes row i, as far as both vocabularies go without the
        model's specials. The other rows keep the values they have.
        """
        if self.spare_head and not torch.equal(self.read(HEAD), self.read(EMBEDDING)):
            raise ConfigError(
                f"tie_word_embeddings=True in {self.place}, but {HEAD} differs from model.{EMBEDDING}; "
                f"set tie_word_embeddings to false there, or save the model without {HEAD}"
            )
        count = min(self.vocab_size, model.config.vocab_size - NUM_SPECIALS)
        with torch.no_grad():
            for name, target in model.named_parameters():
                if name in (EMBEDDING, HEAD):
                    target[:count].copy_(self.read(name)[:count])
                else:
                    target.copy_(self.read(name))


def _our_name(theirs: str) -> str:
    return theirs.removeprefix("model.")


def check_shapes(config: ModelConfig, stored: dict[str, Shape], place: str, rows: int | None = None) -> None:
    """Refuse a configuration that asks for other weights than there are, before anything is built for it.

    `rows` is given for weights of `transformers`: how many tokens they have.
    """
    depth = 1 + max((int(n.split(".")[1]) for n in stored if re.match(r"layers\.\d{1,6}\.", n)), default=-1)
    if config.num_layers != depth:  # first of all: a model of a million layers takes minutes to describe
        raise ConfigError(
            f"{place}: num_layers={config.num_layers}, but there are weights of {depth}; restore its configuration"
        )
    try:
        wanted = state_shapes(config)
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes beyond what any tensor can have
        raise ConfigError(f"{place}: its configuration describes no model ({error})") from error
    if rows is not None:
        wanted |= {name: (rows, *wanted[name][1:]) for name in (EMBEDDING, HEAD) if name in wanted}
    if wrong := sorted(n for n in stored.keys() | wanted.keys() if stored.get(n) != wanted.get(n)):
        first = wrong[0]
        asked, held = ("absent" if s is None else str(list(s)) for s in (wanted.get(first), stored.get(first)))
        raise ConfigError(
            f"{place}: its configuration asks for {first} {asked}, and it holds {held} "
            f"({many(len(wrong), 'such tensor')}); use the configuration and the weights of one model"
        )


def read_settings(path: Path, fix: str) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except UnreadableFile as error:
        raise ConfigError(f"{path} cannot be read: {error}; {fix}") from error


def _rope_type(rope: Any) -> Any:
    """The kind of RoPE that an entry of a config.json asks for; None where it is no such entry."""
    rope = rope or {}
    return rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None


def _described(settings: dict[str, Any], place: str, family: Family | None) -> tuple[Backbone, dict[str, Any]]:
    """Architecture and settings of a config.json under our names, refused where our backbone cannot be that."""
    settings = dict(settings) if family is None else family.translated(settings, place)
    backbone = _backbone(settings, place)
    theta = backbone.theta if family is None else None  # classes of diffusion models have other defaults

    def read(name: str, what: str, values: dict[str, Any]) -> Any:
        value = values.get(name)
        if type(value) not in _TYPES[what]:
            raise ConfigError(f"{name}={value!r} in {place} must be {what}; restore it, or choose another model")
        return value

    if settings.get("num_key_value_heads") is None and ("num_key_value_heads" in settings or theta):
        settings["num_key_value_heads"] = settings.get("num_attention_heads")
    if settings.get("head_dim") is None and backbone.name != "Qwen3":
        settings["head_dim"] = read("hidden_size", "a whole number", settings) // max(
            1, read("num_attention_heads", "a whole number", settings)
        )
    sizes = SIZES | {"max_position": "max_position_embeddings", "vocab_size": "vocab_size"}
    fields = {ours: read(theirs, "a whole number", settings) for ours, theirs in sizes.items()} | backbone.blocks
    fields["norm_eps"] = float(read("rms_norm_eps", "a number", settings))
    rope = {"rope_theta": settings.get("rope_theta"), **(settings.get("rope_parameters") or {})}
    if rope["rope_theta"] is None:
        rope["rope_theta"] = theta
    fields["rope_theta"] = float(read("rope_theta", "a number", rope))
    if _rope_type(settings.get("rope_scaling")) == "llama3":
        rope |= settings["rope_scaling"]
    fields["rope_scaling"] = None
    if _rope_type(rope) == "llama3":
        values = {ours: read(theirs, "a number", rope) for ours, theirs in _SCALING.items()}
        fields["rope_scaling"] = RopeScaling(**values)
    fields["tie_embeddings"] = read("tie_word_embeddings", "true or false", settings)
    return backbone, fields


def _backbone(settings: dict[str, Any], place: str) -> Backbone:
    """The architecture, refused where it would load without an error and then compute something else."""

    def refuse(name: str, value: object, fix: str) -> None:
        raise ConfigError(f"{name}={value!r} in {place} cannot be imported: {fix}")

    model_type = settings.get("model_type")
    if model_type not in BACKBONES:
        known = ", ".join(repr(name) for name in BACKBONES)
        refuse("model_type", model_type, f"choose a dense {NAMES} model (model_type {known})")
    backbone = BACKBONES[str(model_type)]
    for name in ("attention_bias", "mlp_bias"):
        if settings.get(name) and not (name == "attention_bias" and backbone.blocks["attention_bias"]):
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
    return backbone


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder: one file, or those that its index names."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise ConfigError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; "
            "save the model with `save_pretrained`, which writes safetensors"
        )
    weight_map = read_settings(index, AGAIN).get("weight_map")
    names: set[Any] = set(weight_map.values()) if isinstance(weight_map, dict) else {None}
    if not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise ConfigError(f"weight_map in {index} must name files of this folder; {AGAIN}")
    for name in sorted(names):
        if not (folder / name).is_file():  # a pipe would be waited for
            raise ConfigError(f"{folder / name}, which {index} names, is not a regular file; {AGAIN}")
    return [folder / name for name in sorted(names)]


@contextmanager
def _opened(file: Path, fix: str) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as stored:
            yield stored
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); {fix}") from error


def read_header(file: Path, fix: str) -> dict[str, tuple[Shape, str]]:
    """Shape and type of every tensor in a safetensors file; `fix` is what to do about one that is damaged."""
    with _opened(file, fix) as stored:
        views = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 (it is not a dict)
        return {name: (tuple(view.get_shape()), view.get_dtype()) for name, view in views.items()}


def read_tensor(file: Path, name: str) -> Tensor:
    with _opened(file, AGAIN) as stored:
        return stored.get_tensor(name)
