"""Exported folders, which Hugging Face tools load: safetensors, config.json, tokenizer, card and checksums."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from dcdm.config import ConfigError
from dcdm.data.tokenizers import Tokenizer
from dcdm.files import file_digest, replace_folder, write_tensors, write_whole
from dcdm.io import adapters
from dcdm.io.importing import EMBEDDING, HEAD, SIZES
from dcdm.io.load import CONFIG, SUMS, WEIGHTS, ModelSource, find_model
from dcdm.model import packing
from dcdm.model.transformer import Model
from dcdm.training import settings as run_settings
from dcdm.training.checkpoint_folder import SETTINGS, load_weights

ENGINE_MASK, ENGINE_ROWS = 151_669, 151_936
"""The id of MASK that SGLang and LMDeploy have in their code for SDAR, and the rows of its embedding."""


def export(source: Path, folder: Path, *, adapter: Path | None = None, dtype: torch.dtype = torch.float32) -> None:
    """Write the model in `source` to `folder`: safetensors, config.json, tokenizer, model card and checksums.

    The folder appears whole or not at all. Adapters, those of a run or in the folder `adapter`, are merged. `dtype`
    is the type of the weights in the file; whoever loads them chooses a type of their own. Of int8 that is bytes
    or, where fp32 does not become bytes by itself, what they stand for.
    """
    check_free(folder)
    found = find_model(source, adapter=adapter)
    model = found.load(dtype=torch.int8 if dtype == torch.int8 else torch.float32)
    write_export(model, found.tokenizer, folder, _card(model, found), dtype=dtype)


def export_sdar(
    source: Path, folder: Path, *, adapter: Path | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Write a BDLM with Qwen3's blocks as a folder that engines serve as SDAR, MASK's row where they have it.

    What is never written gets the mean of the head's rows: its logit is the mean of all, and never the largest.
    """
    check_free(folder)
    found = find_model(source, adapter=adapter)
    config, tokenizer = found.config, found.tokenizer
    wrong = {
        "kind": config.kind != "bdlm", "predict": config.predicts_from_left,
        "prompts": config.prompts != "ordinary", "shift": config.shift, "qk_norm": not config.qk_norm,
        "attention_bias": config.attention_bias, "rope_scaling": config.rope_scaling is not None,
        "moe": config.moe is not None,
    }  # fmt: skip
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise ConfigError(
            f"{source}: {name}={getattr(config, name)!r}, and an engine for SDAR would compute something else; it "
            "takes a BDLM with Qwen3's blocks, trained with model.prompts=ordinary"
        )
    tokens = config.bos_id
    if tokens > ENGINE_MASK and (tokens > ENGINE_ROWS or config.hidden_token != ENGINE_MASK):
        raise ConfigError(
            f"{source}: its {tokens:,} tokens use the id {ENGINE_MASK:,}, which is MASK in engines for SDAR; train "
            "with a smaller vocabulary"
        )
    weights = {name: _as(value, dtype) for name, value in packing.dequantised(found.load().state_dict()).items()}
    head = weights.setdefault(HEAD, weights[EMBEDDING])
    for name in (EMBEDDING, HEAD):
        mean = head[:tokens].float().mean(dim=0).to(dtype)
        rows = mean.expand(ENGINE_ROWS, -1).clone()
        rows[:tokens] = weights[name][:tokens]
        if name == HEAD and config.hidden_token is not None:
            rows[config.hidden_token] = mean
        rows[ENGINE_MASK] = weights[name][config.mask_id] if name == EMBEDDING else mean
        weights[name] = rows
    settings = {
        "model_type": "sdar", "architectures": ["SDARForCausalLM"], "dtype": str(dtype).removeprefix("torch."),
        "auto_map": {"AutoConfig": "configuration_sdar.SDARConfig"}, "hidden_act": "silu",
        "vocab_size": ENGINE_ROWS, **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_position, "rope_theta": config.rope_theta, "rope_scaling": None,
        "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": None,
        "max_window_layers": config.num_layers, "initializer_range": config.init_std, "use_cache": True,
        "tie_word_embeddings": False, "block_size": config.block_size, "mask_token_id": ENGINE_MASK,
        "bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.eos_id,
    }  # fmt: skip
    with _appearing(folder) as aside:
        named = {name if name == HEAD else f"model.{name}": value for name, value in weights.items()}
        write_tensors(aside / WEIGHTS, named, {"format": "pt"})
        tokenizer.save(aside, specials=False)
        (aside / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        _write_code(aside / "configuration_sdar.py")
        says = f"A block diffusion model in blocks of {config.block_size}, for engines that serve SDAR."
        (aside / "README.md").write_text(f"# {source.name}\n\n{says}\n", encoding="utf-8")


def export_adapter(source: Path, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write what the run `source`, or the run of this checkpoint, has trained beside its base, and not the base:
    adapters, or a draft head alone."""
    check_free(folder)
    found = find_model(source)
    settings = None if found.run is None else run_settings.read(found.run / SETTINGS)
    if settings is None or not (settings.train.lora or settings.train.only_drafts) or settings.init is None:
        raise ConfigError(f"{source} has no adapter: it is no run of `dcdm adapt` with --lora RANK or --to drafts")
    base, train = find_model(settings.init), settings.train
    state = load_weights(found.place) | (load_weights(found.place, "ema") if train.ema_decay else {})
    frozen, given = adapters.frozen(state), adapters.frozen(base.weights())
    if any(name in given and not torch.equal(value, given[name].to(value)) for name, value in frozen.items()):
        raise ConfigError(
            f"{settings.init} is not the base any more that {source} was trained from: its weights have changed; "
            "put the old one back, or export the whole model without --adapter-only"
        )
    sha256 = base.identity()["sha256"]
    adapter = adapters.of_state(state, found.config, train.lora, train.lora_alpha, settings.init, sha256, dtype)
    with _appearing(folder) as aside:
        adapters.write_adapter(adapter, aside)
        (aside / "README.md").write_text(_adapter_card(adapter, found.run or source), encoding="utf-8")


def _adapter_card(adapter: adapters.Adapter, run: Path) -> str:
    kind, base = adapter.config.kind, adapter.base
    text = f"LoRA adapters of rank {adapter.rank} that make a model of kind `{kind}` of `{base}`."
    if not adapter.rank:
        text = f"A draft head for `{base}`, which writes the same texts with it in fewer forward passes."
    return card(run.name, text, base_model=base)


def card(title: str, *body: str, **entries: str) -> str:
    """A model card; the hub reads the `entries` of its head."""
    head = [f"{name}: {value}" for name, value in {"library_name": "dcdm", **entries}.items()]
    return "\n".join(["---", *head, "---", "", f"# {title}", "", *body, ""])


def write_export(
    model: Model, tokenizer: Tokenizer, folder: Path, card: str, *, dtype: torch.dtype = torch.float32,
    code: bool = True, more: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """A model in memory as an exported folder with this model card.

    `code` adds the file by which `trust_remote_code=True` finds the classes; `more` are further files by name.
    """
    with _appearing(folder) as aside:
        state, in_bytes = model.state_dict(), dtype == torch.int8
        if not in_bytes:
            state = packing.dequantised(state)
        kept = torch.float32 if in_bytes else dtype
        weights = {f"model.{name}": _as(value, kept) for name, value in state.items()}
        write_tensors(aside / WEIGHTS, weights, {"format": "pt"})
        tokenizer.save(aside)
        config = _config(model)
        if in_bytes:
            config["weights"] = "int8"
        if code:
            _write_code(aside / "modeling_dcdm.py")
        else:
            del config["auto_map"]
        texts = {CONFIG: json.dumps(config, indent=2) + "\n", "README.md": card, **(more or {})}
        for name, text in texts.items():
            (aside / name).write_text(text, encoding="utf-8")


def _write_code(path: Path) -> None:
    """The code of this name, which others run from an exported folder."""
    text = (files("dcdm.io") / "assets" / f"{path.stem}.txt").read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")


def _as(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).contiguous() if value.is_floating_point() else value.contiguous()


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A place to write to, which becomes `folder` at the end, with checksums, or vanishes if anything fails."""
    check_free(folder)
    aside = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    try:
        aside.mkdir(parents=True)
        yield aside
        sums = {path.name: file_digest(path) for path in sorted(aside.iterdir())}
        write_whole(aside / SUMS, json.dumps(sums, indent=1).encode())
        replace_folder(aside, folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}; choose another folder") from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def check_free(folder: Path) -> None:
    """Refuse a folder that exists, before anything is computed for it."""
    if folder.exists():
        raise ConfigError(f"{folder} exists; choose another folder or remove it")


def _config(model: Model) -> dict[str, object]:
    from dcdm.hub import DCDMConfig

    auto = _auto_class(model)
    kind = auto.replace("AutoModel", "DCDM")
    config = DCDMConfig(dcdm=model.config.to_dict(), architectures=[kind])
    config.auto_map = {"AutoConfig": "modeling_dcdm.DCDMConfig", auto: f"modeling_dcdm.{kind}"}
    return json.loads(config.to_json_string(use_diff=False))


def _auto_class(model: Model) -> str:
    return "AutoModelForCausalLM" if model.config.kind == "ar" else "AutoModelForMaskedLM"


def _card(model: Model, found: ModelSource) -> str:
    config, auto = model.config, _auto_class(model)
    routing = f", routing `{config.routing}`" if config.kind == "dcdm" else ""
    size = sum(math.prod(shape) for shape in found.shapes().values()) / 1e6
    return card(
        (found.run or found.place).name,
        f"A {config.kind.upper()} model{routing}, {size:.2f}M parameters, trained with dcdm.", "", "```python",
        "import dcdm.hub  # makes the Auto classes know the model", f"from transformers import {auto}", "",
        f'model = {auto}.from_pretrained(".")', "```",
    )  # fmt: skip
