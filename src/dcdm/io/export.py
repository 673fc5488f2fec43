"""`dcdm export` and `dcdm verify`: a folder that Hugging Face tools load, and checks of what a folder holds."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dcdm.config import ConfigError
from dcdm.data.tokenizers import Tokenizer
from dcdm.files import file_digest, write_whole
from dcdm.io.load import load_model
from dcdm.keys import Key
from dcdm.likelihood.estimators import LABELS, default_estimator, score
from dcdm.model.transformer import Model
from dcdm.training.checkpoint import newest_whole
from dcdm.training.checkpoint import verify as verify_checkpoint

REMOTE_CODE = '''"""Lets `trust_remote_code=True` find the classes; the package dcdm must be installed."""

from dcdm.hub import DCDMConfig, DCDMForCausalLM, DCDMForMaskedLM

__all__ = ["DCDMConfig", "DCDMForCausalLM", "DCDMForMaskedLM"]
'''
SUMS = "checksums.json"


def export(source: Path, folder: Path, *, average: bool = True) -> None:
    """Write the model in `source` to `folder`: safetensors, config.json, tokenizer, model card and checksums.

    The folder appears whole or not at all.
    """
    _check_free(folder)
    model, tokenizer = load_model(source, average=average)
    write(model, tokenizer, folder, _card(model, source))


def write(model: Model, tokenizer: Tokenizer, folder: Path, card: str) -> None:
    """A model in memory as an exported folder with this model card."""
    _check_free(folder)
    aside = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    aside.mkdir(parents=True)
    try:
        weights = {f"model.{name}": value.contiguous() for name, value in model.state_dict().items()}
        save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(aside)
        (aside / "config.json").write_text(json.dumps(_config(model), indent=2) + "\n", encoding="utf-8")
        (aside / "modeling_dcdm.py").write_text(REMOTE_CODE, encoding="utf-8")
        (aside / "README.md").write_text(card, encoding="utf-8")
        sums = {path.name: file_digest(path) for path in sorted(aside.iterdir())}
        write_whole(aside / SUMS, json.dumps(sums, indent=1).encode())
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _check_free(folder: Path) -> None:
    if folder.exists():
        raise ConfigError(f"{folder} exists; choose another folder or remove it")


def _config(model: Model) -> dict[str, object]:
    from dcdm.io.hub import DCDMConfig

    kind = "DCDMForCausalLM" if model.config.kind == "ar" else "DCDMForMaskedLM"
    auto = "AutoModelForCausalLM" if model.config.kind == "ar" else "AutoModelForMaskedLM"
    config = DCDMConfig(dcdm=model.config.to_dict(), architectures=[kind])
    config.auto_map = {"AutoConfig": "modeling_dcdm.DCDMConfig", auto: f"modeling_dcdm.{kind}"}
    return json.loads(config.to_json_string(use_diff=False))


def _card(model: Model, source: Path) -> str:
    """A model card with the last evaluation of the run, named by its estimator."""
    config = model.config
    run = source if (source / "settings.yaml").exists() else source.parent.parent
    figures = _last_evaluation(run / "metrics.jsonl")
    label = LABELS[default_estimator(model)]
    lines = ["---", "library_name: dcdm", "---", "", f"# {run.name}", ""]
    routing = f", routing `{config.routing}`" if config.kind == "dcdm" else ""
    size = sum(p.numel() for p in model.parameters()) / 1e6
    lines.append(f"A {config.kind.upper()} model{routing}, {size:.2f}M parameters, trained with dcdm.")
    if figures is not None:
        step, values = figures
        lines += ["", "| validation figure | nats per token | kind of figure |", "|---|---|---|"]
        lines.append(f"| step {step} | {values['valid_nll']:.4f} ± {values['valid_nll_stderr']:.4f} | {label} |")
        if "surrogate_nll" in values:
            error = values["surrogate_nll_stderr"]
            lines.append(f"| step {step} | {values['surrogate_nll']:.4f} ± {error:.4f} | {LABELS['surrogate']} |")
    auto = "AutoModelForCausalLM" if config.kind == "ar" else "AutoModelForMaskedLM"
    lines += ["", "```python", "import dcdm.hub  # makes the Auto classes know the model", f"from transformers import {auto}", ""]
    lines.append(f'model = {auto}.from_pretrained(".")')
    return "\n".join([*lines, "```", ""])


def _last_evaluation(path: Path) -> tuple[int, dict[str, float]] | None:
    if not path.exists():
        return None
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if '"evaluation"' in line]
    return (rows[-1]["step"], rows[-1]["evaluation"]) if rows else None


@dataclass(frozen=True)
class Check:
    name: str
    problems: list[str]


def verify(path: Path) -> Iterator[Check]:
    """Checks of a run, a checkpoint or an exported folder, one after the other."""
    if (path / "config.json").exists():
        yield Check("checksums", wrong_sums(path))
        stored = load_file(path / "model.safetensors")
    else:
        checkpoint = path
        if (path / "settings.yaml").exists():
            newest, skipped = newest_whole(path / "checkpoints")
            yield Check("newest checkpoint", [f"{place.name}: {why}" for place, why in skipped])
            if newest is None:
                raise ConfigError(f"{path} has no whole checkpoint")
            checkpoint = newest
        yield Check("manifest", verify_checkpoint(checkpoint))
        stored = {}
    model, _ = load_model(path)
    bad = [name for name, value in model.state_dict().items() if not bool(torch.isfinite(value).all())]
    yield Check("finite weights", bad)
    yield Check("no token sees itself", leaks(model))
    again, _ = load_model(path)
    differing = [n for n, v in model.state_dict().items() if not torch.equal(v, again.state_dict()[n])]
    differing += [n for n, v in stored.items() if not torch.equal(v, model.state_dict()[n.removeprefix("model.")])]
    yield Check("reload equality", differing)
    if not model.config.routes_from_noise:  # its cache is an approximation, and says so
        yield Check("cached decoding equals uncached", cache_errors(model))


def wrong_sums(folder: Path) -> list[str]:
    if not (folder / SUMS).exists():
        return [f"{SUMS} is missing: nothing can be compared"]
    sums = json.loads((folder / SUMS).read_text(encoding="utf-8"))
    missing = [f"{name} is missing" for name in sums if not (folder / name).exists()]
    return missing + [f"{name} has changed" for name, value in sums.items()
                      if (folder / name).exists() and file_digest(folder / name) != value]  # fmt: skip


@torch.no_grad()
def cache_errors(model: Model, length: int = 24) -> list[str]:
    """Score random sequences by the decoder of one position per forward, with the cache and without."""
    tokens = (Key(0).fold("cache").uniform(2, length) * (model.config.vocab_size - 3)).long()
    tokens[:, 0] = model.config.bos_id
    given = torch.zeros_like(tokens, dtype=torch.bool)
    given[0, : length // 3] = True
    cached, afresh = (
        score(model, tokens, "trajectory", commit="position", prompt=given, cache=cache).nats
        for cache in ("exact", "none")
    )
    apart = ((cached - afresh).abs() / afresh.abs()).max()
    return [] if apart < 1e-4 else [f"log-likelihoods differ by {float(apart):.1e} of their size"]


@torch.no_grad()
def leaks(model: Model, length: int = 24) -> list[str]:
    """Perturb masked tokens (AR: later tokens) of a random sequence: predictions of theirs that change."""
    symbols, config = model.config.vocab_size - 3, model.config
    draws = Key(0).fold("leak").uniform(3, length)
    tokens = (draws[0] * symbols).long()[None]
    tokens[0, 0] = config.bos_id
    masked = (draws[1] < 0.5)[None]
    masked[0, 0] = False
    before = model(tokens, masked).logits
    found = []
    for position in range(1, length):
        other = tokens.clone()
        other[0, position] = (tokens[0, position] + 1 + int(draws[2, position] * (symbols - 1))) % symbols
        after = model(other, masked).logits
        seen = slice(0, position) if config.kind == "ar" else slice(position, position + 1)
        asked = config.kind == "ar" or bool(masked[0, position])
        if asked and not torch.allclose(after[0, seen], before[0, seen], atol=1e-5):
            found.append(f"position {position} changes what it should not")
    return found
