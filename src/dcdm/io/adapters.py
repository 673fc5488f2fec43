"""Adapter folders: what LoRA training added to a base model, in the file format of `peft`; or a draft head alone.

`adapter_config.json` and `adapter_model.safetensors` are those that `peft` reads and writes; `dcdm.json` holds the
settings of the adapted model and which base it belongs to. A head alone has nothing for `peft`: rank 0, and no
`adapter_config.json`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dcdm.config import NUM_SPECIALS, ConfigError, ModelConfig
from dcdm.files import UnreadableFile, listed_file, read_json_object, write_tensors
from dcdm.io.importing import EMBEDDING, FIXED, fitted
from dcdm.kinds import OWN_PARTS
from dcdm.model import lora

SETTINGS, PEFT, WEIGHTS = "dcdm.json", "adapter_config.json", "adapter_model.safetensors"
FILES = (SETTINGS, PEFT, WEIGHTS)
PREFIX = "base_model.model.model."
"""Before our names: `peft`'s wrapper, its model, and the network in the class that `transformers` loads."""
ROWS = "embed_tokens.token_adapter.trainable_tokens_delta"
"""The values of the trained rows, in spite of the name."""
NOT_PLAIN = (
    "use_rslora", "use_dora", "use_qalora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "bias", "lora_bias",
    "modules_to_save", "layers_to_transform",
)  # fmt: skip
"""Settings of `peft` by which the same tensors mean something else."""
MOST_SCALE = 1e4  # of alpha over rank; 2 is usual


@dataclass(frozen=True)
class Adapter:
    """An adapter and what it belongs to."""

    config: ModelConfig
    """Of the adapted model."""
    base: str
    """The base model, as it was called in training."""
    base_sha256: str
    """That of the base's weights."""
    rank: int
    scale: float
    tensors: dict[str, Tensor]
    """By the names of the state dict; of the embedding, the values of the trained rows."""

    def check_fits(self, base: ModelConfig, shapes: dict[str, tuple[int, ...]], place: Path) -> None:
        """Refuse an adapter that was not made for such a model, given the shapes of its weights."""

        def refuse(what: str) -> None:
            raise ConfigError(f"{place} {what}; export the adapter again, or give the model that it was trained on")

        for name in FIXED:
            if getattr(base, name) != getattr(self.config, name):
                refuse(f"is for {name}={getattr(self.config, name)}, and in its base it is {getattr(base, name)}")
        for name, value in self.tensors.items():
            module, _, part = name.rpartition(".")
            wanted: tuple[int, ...] = tuple(value.shape)  # what is new is compared when the model is whole
            if part in (lora.A, lora.B):
                weight = shapes.get(f"{module}.weight", ())
                if len(weight) != 2 or module.rpartition(".")[2] not in lora.TARGETS:
                    refuse(f"adapts {module}, which its base has no matrix of")
                if f"{module}.{lora.B if part == lora.A else lora.A}" not in self.tensors:
                    refuse(f"holds half of an adapter of {module}")
                wanted = (self.rank, weight[1]) if part == lora.A else (weight[0], self.rank)
            elif name == EMBEDDING:
                wanted = (NUM_SPECIALS, base.hidden_size)
            elif not name.startswith(OWN_PARTS):
                refuse(f"holds {name}, which is no part of an adapter")
            if tuple(value.shape) != wanted:
                refuse(f"holds {_theirs(name)} {list(value.shape)}, and {list(wanted)} was expected")
            if not bool(value.isfinite().all()):
                refuse(f"holds {_theirs(name)} with a value that is no number")

    def onto(self, base: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state dict of the adapted model, given the base's."""
        own = {name: value for name, value in self.tensors.items() if name != EMBEDDING}
        state = lora.merged(fitted(base, self.config) | own, self.scale)
        if (rows := self.tensors.get(EMBEDDING)) is not None:
            state[EMBEDDING] = lora.at_least_fp32(state[EMBEDDING]).clone()
            state[EMBEDDING][-NUM_SPECIALS:] = rows
        return state

    def shapes(self, base: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Those of `onto`, given the base's."""
        own = {name: tuple(value.shape) for name, value in self.tensors.items() if name != EMBEDDING}
        whole = fitted(base, self.config) | own
        return {name: shape for name, shape in whole.items() if not lora.is_adapter(name)}


def of_state(
    state: dict[str, Tensor], config: ModelConfig, rank: int, alpha: float | None, base: str, base_sha256: str,
    dtype: torch.dtype = torch.float32,
) -> Adapter:  # fmt: skip
    """The adapter in the state dict of a model that was trained with one; rank 0: a draft head alone."""
    tensors = {
        n: v for n, v in state.items() if n.rpartition(".")[2] in (lora.A, lora.B) or n.startswith(OWN_PARTS)
    }
    if (addend := state.get(f"embed_tokens.{lora.ROWS}")) is not None:
        tensors[EMBEDDING] = state[EMBEDDING][-NUM_SPECIALS:] + addend
    tensors = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    return Adapter(config, base, base_sha256, rank, lora.scale_of(rank, alpha) if rank else 0.0, tensors)


def frozen(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a model that was trained with an adapter has from its base, unchanged: all but the special rows."""
    kept = {n: v for n, v in state.items() if not lora.is_adapter(n) and not n.startswith(OWN_PARTS)}
    if EMBEDDING in kept:
        kept[EMBEDDING] = kept[EMBEDDING][:-NUM_SPECIALS]
    return kept


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """Write the three files into a folder that exists."""
    vocab = adapter.config.vocab_size
    rows = {"embed_tokens": [*range(vocab - NUM_SPECIALS, vocab)]} if EMBEDDING in adapter.tensors else None
    peft = {
        "peft_type": "LORA", "task_type": None, "inference_mode": True, "base_model_name_or_path": adapter.base,
        "r": adapter.rank, "lora_alpha": adapter.scale * adapter.rank, "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "target_modules": list(lora.TARGETS), "trainable_token_indices": rows,
    }  # fmt: skip
    ours = {"model": adapter.config.to_dict(), "base": adapter.base, "base_sha256": adapter.base_sha256}
    for name, content in ((PEFT, peft), (SETTINGS, ours)) if adapter.rank else ((SETTINGS, ours),):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tensors = {_theirs(name): value.contiguous() for name, value in adapter.tensors.items()}
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})


def is_adapter(folder: Path) -> bool:
    """Whether this is an adapter folder that `write_adapter` made."""
    return (folder / SETTINGS).is_file() and (folder / WEIGHTS).is_file()


def read_adapter(folder: Path) -> Adapter:
    """What `write_adapter` wrote."""
    if not is_adapter(folder):
        raise ConfigError(
            f"{folder} is not an adapter folder: it lacks {SETTINGS} or {WEIGHTS}; "
            "`dcdm export RUN FOLDER --adapter-only` writes one"
        )
    try:
        ours = read_json_object(listed_file(folder, SETTINGS))
        has_lora = (folder / PEFT).exists()
        peft = read_json_object(listed_file(folder, PEFT)) if has_lora else {"r": 0, "lora_alpha": 0}
        tensors = load_file(listed_file(folder, WEIGHTS))
        config = ModelConfig.from_dict(_typed(ours, "model", dict))
        base, sha256 = (_typed(ours, name, str) for name in ("base", "base_sha256"))
        rank, alpha = _typed(peft, "r", int), float(_typed(peft, "lora_alpha", (int, float)))
    except (UnreadableFile, SafetensorError, OSError, TypeError) as error:
        raise ConfigError(f"{folder} cannot be read ({error}); export the adapter again") from error
    if not has_lora:
        return Adapter(config, base, sha256, 0, 0.0, {_ours(name): value for name, value in tensors.items()})
    others = [name for name in NOT_PLAIN if peft.get(name) not in (None, False, {}, [], "none")]
    if rank < 1 or others or peft.get("peft_type") != "LORA" or not 0 < abs(alpha) / rank <= MOST_SCALE:
        what = f"{others[0]}={peft[others[0]]!r}" if others else f"r={rank}, lora_alpha={alpha:g}"
        raise ConfigError(
            f"{folder / PEFT} asks for another kind of adapter than plain LoRA ({what}); export it again"
        )
    return Adapter(
        config, base, sha256, rank, alpha / rank, {_ours(name): value for name, value in tensors.items()}
    )


def _typed(values: dict[str, Any], name: str, kind: Any) -> Any:
    if not isinstance(values.get(name), kind):
        raise TypeError(f"its {name} is {values.get(name)!r}")
    return values[name]


def _theirs(name: str) -> str:
    if name == EMBEDDING:
        return PREFIX + ROWS
    return PREFIX + name.replace(f".{lora.A}", ".lora_A.weight").replace(f".{lora.B}", ".lora_B.weight")


def _ours(name: str) -> str:
    name = name.removeprefix(PREFIX)
    if name == ROWS:
        return EMBEDDING
    return name.replace(".lora_A.weight", f".{lora.A}").replace(".lora_B.weight", f".{lora.B}")
