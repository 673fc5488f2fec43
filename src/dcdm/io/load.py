"""`dcdm.load`: a model and its tokenizer from a run folder, a checkpoint in it, or an exported folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dcdm.config import ConfigError, ModelConfig, WeightsType
from dcdm.data.tokenizers import Tokenizer
from dcdm.distributed import precision
from dcdm.files import UnreadableFile, file_digest, listed_file, read_json_object
from dcdm.io import adapters
from dcdm.io.importing import FIXED, Shape, check_shapes, fitted, read_header
from dcdm.kinds import OWN_PARTS, build
from dcdm.model import lora, packing
from dcdm.model.transformer import Model
from dcdm.shipped import folder_of
from dcdm.shipped.bases import BASES, MissingBase, base_folder
from dcdm.training import settings as run_settings
from dcdm.training.checkpoint_folder import (
    CHECKPOINTS,
    MANIFEST,
    SETTINGS,
    TOKENIZER,
    UnusableCheckpoint,
    check_whole,
    load_weights,
    newest_whole,
    other_tokenizer,
    read_manifest,
    read_state,
    settings_problems,
    stored_shapes,
)

log = logging.getLogger(__name__)

WEIGHTS, CONFIG, SUMS = "model.safetensors", "config.json", "checksums.json"
PARSED = (CONFIG, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files of an exported folder that are read before its weights."""
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".distcp")


@dataclass(frozen=True)
class ModelSource:
    """What a folder holds, before any weight is read."""

    config: ModelConfig
    tokenizer: Tokenizer
    weights: Callable[[], dict[str, Tensor]]
    shapes: Callable[[], dict[str, Shape]]
    """Those of `weights`, without reading it."""
    place: Path
    """The checkpoint, or the exported folder."""
    run: Path | None = None
    """The run folder that the checkpoint is in."""
    base: ModelSource | None = None
    """What `place` is an adapter of."""
    packed: bool = False
    """Whether the folder holds its weights in bytes; `weights` are those that the bytes stand for."""

    @property
    def tokenizer_folder(self) -> Path:
        """Where its tokenizer is; that of an adapter is its base's."""
        if self.base is not None:
            return self.base.tokenizer_folder
        return self.place if self.run is None else self.run / TOKENIZER

    def identity(self) -> dict[str, Any]:
        """Which weights these are: where they are, their step, and a SHA-256 that covers all of them."""
        if self.base is not None:
            sha256 = file_digest(self.place / adapters.WEIGHTS)
            return {"weights": str(self.place), "step": None, "sha256": sha256, "base": self.base.identity()}
        if self.run is None:
            return {"weights": str(self.place), "step": None, "sha256": file_digest(self.place / WEIGHTS)}
        manifest = self.place / MANIFEST  # it holds the SHA-256 of every file
        return {
            "weights": str(self.place), "step": read_manifest(self.place).step, "sha256": file_digest(manifest)
        }  # fmt: skip

    def load(self, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Model:
        """The model with its weights, ready for evaluation: in bytes if `dtype` is int8, or where the folder holds
        bytes and fp32 is asked for."""
        device = torch.device(device)
        in_bytes = dtype == torch.int8 or (self.packed and dtype == torch.float32 and packing.can_pack(device))
        if in_bytes and not packing.can_pack(device):
            raise ConfigError(
                "weights=int8 needs a CPU with VNNI, and here is none, or ONEDNN_MAX_CPU_ISA hides it; choose fp32"
            )
        check_shapes(self.config, self.shapes(), str(self.place))
        model = build(self.config, device=device, dtype=torch.float32 if in_bytes else dtype)
        model.load_state_dict(self.weights())
        if in_bytes:
            packing.pack(model, tied=self.config.tie_embeddings)
        return model.eval()


def weights_type(name: WeightsType, device: torch.device) -> torch.dtype:
    """The type in which a model that is not trained holds its weights; int8 stands for `packing`."""
    if name == "int8":
        return torch.int8
    types = precision(name, device)
    return types.compute or types.weights


def load_model(
    path: str | Path | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    adapter: str | Path | None = None,
) -> tuple[Model, Tokenizer]:
    """The model, ready for evaluation, and its tokenizer; without a path, of the one that comes with the package.

    `path` may be a name that `dcdm models` lists; a folder of that name wins. Of a run folder the newest whole
    checkpoint is taken, of it averaged weights where it has any.
    `adapter` is a folder of LoRA adapters, which are merged into the model; such a folder can also stand for the
    model, if its base is where it was in training.
    """
    found = find_model(path, adapter=adapter)
    return found.load(device, dtype), found.tokenizer


def find_model(path: str | Path | None = None, *, adapter: str | Path | None = None) -> ModelSource:
    """Configuration and tokenizer of what `load_model` would load."""
    path = folder_of(path)
    if adapter is not None:
        return _adapted(find_model(path), Path(adapter))
    if not path.is_dir() and (name := next((name for name in BASES if path == base_folder(name)), None)):
        raise MissingBase(name)
    if not path.is_dir():
        what = "a pickle, which can run code and is never opened" if path.suffix in PICKLES else "not a folder"
        raise ConfigError(
            f"{path} is {what}; give a run folder, a checkpoint in it, an exported folder, or a name that "
            "`dcdm models` lists"
        )
    if (path / adapters.SETTINGS).is_file():
        base = adapters.read_adapter(path).base
        if not folder_of(base).is_dir() and base not in BASES:
            raise ConfigError(f"{path} is an adapter of {base}, which is not here; give MODEL and --adapter {path}")
        return _adapted(find_model(base), path)
    if (path / "config.json").exists():
        return _exported(path)
    run = path if (path / SETTINGS).exists() else path.absolute().parent.parent
    if not (run / SETTINGS).exists():
        raise ConfigError(f"{path} is neither a run folder, nor a checkpoint in one, nor an exported folder")
    checkpoint = _newest(run) if path == run else path
    if path != run:
        check_whole(path)
    config, record = run_settings.read(run / SETTINGS), read_state(checkpoint)[0]
    tokenizer = Tokenizer.load(run / TOKENIZER)
    if problems := settings_problems(record, config, run) + other_tokenizer(record, tokenizer, run):
        raise ConfigError(f"{run} is damaged: {'; '.join(problems)}")
    averaged = config.train.ema_decay
    rank, alpha = config.train.lora, config.train.lora_alpha

    def weights() -> dict[str, Tensor]:
        state = load_weights(checkpoint) | (load_weights(checkpoint, "ema") if averaged else {})
        return lora.merged(state, lora.scale_of(rank, alpha)) if rank else state

    def shapes() -> dict[str, Shape]:
        stored = stored_shapes(checkpoint) | (stored_shapes(checkpoint, "ema") if averaged else {})
        return {name: shape for name, shape in stored.items() if not (rank and lora.is_adapter(name))}

    _check_vocabulary(config.model, tokenizer, run)
    return ModelSource(config.model, tokenizer, weights, shapes, checkpoint, run)


def _adapted(base: ModelSource, folder: Path) -> ModelSource:
    """A base model with an adapter merged into it."""
    if base.base is not None:
        raise ConfigError(f"{base.place} is an adapter itself; give the base model of {folder}")
    check_sums(folder, adapters.FILES)
    adapter = adapters.read_adapter(folder)
    if (found := base.identity()["sha256"]) != adapter.base_sha256:
        raise ConfigError(
            f"{folder} is an adapter of {adapter.base}, and {base.place} holds other weights (SHA-256 "
            f"{found[:12]}…, not {adapter.base_sha256[:12]}…); give the model that it was trained on"
        )
    _check_vocabulary(adapter.config, base.tokenizer, folder)
    adapter.check_fits(base.config, base.shapes(), folder)
    return ModelSource(
        adapter.config, base.tokenizer, lambda: adapter.onto(base.weights()),
        lambda: adapter.shapes(base.shapes()), folder, base=base,
    )  # fmt: skip


def _newest(run: Path) -> Path:
    """The newest whole checkpoint of a run; newer ones that are damaged are named in the log."""
    newest, skipped = newest_whole(run / CHECKPOINTS)
    if newest is None and skipped:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped)
        raise UnusableCheckpoint(f"no checkpoint in {run / CHECKPOINTS} is whole: {reasons}; restore one of them")
    if newest is None:
        raise ConfigError(f"{run} has no checkpoint yet; train further with dcdm train --run {run}")
    for path, reason in skipped:
        log.warning("%s: skipped: %s", path, reason)
    return newest


def _exported(folder: Path) -> ModelSource:
    check_sums(folder, PARSED)
    try:
        written = read_json_object(listed_file(folder, CONFIG), object_hook=_special_float)
    except UnreadableFile as error:
        raise ConfigError(f"{folder / CONFIG} cannot be read: {error}; export the model again") from error
    settings, packed = written.get("dcdm"), written.get("weights") == "int8"
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{folder}/config.json is not that of an exported model; if it is one of `transformers`, "
            f"import it first: `dcdm import {folder} FOLDER`"
        )
    try:
        config = ModelConfig.from_dict(settings)
    except TypeError as error:
        raise ConfigError(f"{folder / CONFIG}: {error}; export the model again") from error

    def weights() -> dict[str, Tensor]:
        check_sums(folder, (WEIGHTS,))
        return packing.dequantised(
            {name.removeprefix("model."): value for name, value in load_file(folder / WEIGHTS).items()}
        )

    def shapes() -> dict[str, Shape]:
        try:
            path = listed_file(folder, WEIGHTS)
        except UnreadableFile as error:
            raise ConfigError(f"{folder / WEIGHTS} cannot be read ({error}); export the model again") from error
        stored = read_header(path, "export the model again")
        return {
            name.removeprefix("model."): shape
            for name, (shape, _) in stored.items()
            if not (packed and name.endswith(packing.SCALE))
        }

    tokenizer = Tokenizer.load(folder)
    _check_vocabulary(config, tokenizer, folder)
    return ModelSource(config, tokenizer, weights, shapes, folder, packed=packed)


def check_sums(folder: Path, names: Collection[str]) -> None:
    """Refuse a folder in which any of these files has changed since it was exported."""
    if wrong := wrong_sums(folder, names):
        raise ConfigError(f"{folder} is not as it was exported: {'; '.join(wrong)}; export it again")


def wrong_sums(folder: Path, names: Collection[str] | None = None) -> list[str]:
    """Which of an exported folder's files, or of those called `names`, do not have their checksums.

    A folder without checksums is accepted if `names` are given.
    """
    if not (folder / SUMS).exists():
        return [] if names is not None else [f"{SUMS} is missing: nothing can be compared"]
    try:
        sums = read_json_object(listed_file(folder, SUMS))
    except UnreadableFile as error:
        return [f"{SUMS} cannot be read: {error}"]
    problems = []
    for name, value in sums.items():
        if names is not None and name not in names:
            continue
        try:
            path = listed_file(folder, name)
            if not path.exists():
                problems.append(f"{name} is missing")
            elif file_digest(path) != value:
                problems.append(f"{name} has changed")
        except (UnreadableFile, OSError) as error:
            problems.append(str(error))
    return problems


def _check_vocabulary(config: ModelConfig, tokenizer: Tokenizer, folder: Path) -> None:
    if tokenizer.vocab_size != config.vocab_size:
        raise ConfigError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens, and its model {config.vocab_size}; "
            "they do not belong together"
        )


def _special_float(found: dict) -> object:
    """`transformers` writes an infinite number, which JSON has no word for, as {"__float__": "Infinity"}."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def load_init(model: Model, source: str, tokenizer: Tokenizer) -> None:
    """Copy initial weights, the `init` of a run's settings, into a model that reads text by `tokenizer`.

    `source` is a run, a checkpoint, an exported folder, or a name that `dcdm models` lists. Its tokenizer must be
    the same: ids keep their meaning.
    """
    found = find_model(source)
    if found.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"init={source} was trained with another tokenizer than that of the data, so token ids would change "
            f"their meaning; take its own: --tokenizer {found.tokenizer_folder}"
        )
    for name in FIXED:
        ours, theirs = getattr(model.config, name), getattr(found.config, name)
        if ours != theirs:
            raise ConfigError(
                f"init={source}: its weights mean something else under {name}={ours}; there it is {theirs}: leave "
                f"model.{name} out, or set it so"
            )
    start, state = fitted(found.weights(), model.config), model.state_dict()
    wrong = [name for name, value in start.items() if name not in state or state[name].shape != value.shape]
    ours = [name for name in state if not name.startswith(OWN_PARTS) and not lora.is_adapter(name)]
    wrong += [name for name in ours if name not in start]
    if wrong:
        raise ConfigError(f"init={source}: its weights do not fit this model ({', '.join(wrong[:3])}, …)")
    model.load_state_dict(start, strict=False)
    if (head := getattr(model, "drafting", None)) is not None and "drafting.norm.weight" not in start:
        with torch.no_grad():  # a new head begins with states of the size that the network's have
            head.norm.weight.fill_(model.norm.weight.square().mean().sqrt())
