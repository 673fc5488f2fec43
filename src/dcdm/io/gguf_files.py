"""GGUF files, read through `transformers`, which undoes quantization and GGUF's own order of rows.

It loads some files as something else than they are; what a header tells of that is refused here, or mended.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers

from dcdm.config import ConfigError
from dcdm.data.tokenizers import ask_transformers
from dcdm.io.importing import HEAD, Source

PLAIN_SPLITS = {"", "default", "gpt-2", "mpt", "olmo", "jais", "trillion"}
"""Names by which GGUF calls GPT-2's rule of splitting text into words."""
DIGIT_SPLITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Names of the rule that also takes digits one by one, which `transformers` does not know."""
NEEDS = ("gguf", "accelerate")


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    settings: dict[str, Any]
    """Its single values by name; those of the architecture without its name before them."""
    tensors: frozenset[str]

    @classmethod
    def read(cls, file: Path) -> Header:
        from gguf import GGUFReader, GGUFValueType

        reader = GGUFReader(file)
        single = {n: f.contents() for n, f in reader.fields.items() if f.types[:1] != [GGUFValueType.ARRAY]}
        prefix = f"{single.get('general.architecture', '')}."
        settings = {name.removeprefix(prefix): value for name, value in single.items()}
        return cls(settings, frozenset(tensor.name for tensor in reader.tensors))


def read_gguf(file: Path) -> tuple[Source, Any]:
    """The weights of a file, and its tokenizer as `transformers` has it."""
    with open(file, "rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ConfigError(f"{file} is not a GGUF file; give one, or a folder that `save_pretrained` wrote")
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"{file}: reading GGUF needs {' and '.join(missing)}; pip install -e '.[adapt]'")
    import transformers

    reader: Any = transformers.AutoModelForCausalLM  # its types know nothing of `output_loading_info`
    where, options = str(file.parent), {"gguf_file": file.name}
    try:
        header = Header.read(file)
        check_header(header, file)
        loaded, report = reader.from_pretrained(where, dtype=torch.float32, output_loading_info=True, **options)
    except ConfigError:
        raise
    except Exception as error:  # the libraries raise what they like about files they cannot read
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{file}: transformers cannot read it ({reason}); choose another file") from error
    tied = {HEAD} if loaded.config.tie_word_embeddings else set()
    if absent := sorted(set(report["missing_keys"]) - tied):
        raise ConfigError(
            f"{file} holds no {absent[0]} ({len(absent)} such tensors), so it is not a whole model; choose another"
        )
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)  # undone
    source = Source.in_memory(settings, loaded.state_dict(), str(file))
    return source, split_as_trained(ask_transformers(where, **options), header, file)


def check_header(header: Header, file: Path) -> None:
    """Refuse files that `transformers` would load as another model."""
    if (parts := header.settings.get("split.count", 0)) > 1:
        raise ConfigError(f"{file} is one of {parts} parts; join them with llama.cpp's `gguf-split --merge` first")
    if (experts := header.settings.get("expert_count", 0)) > 0:
        raise ConfigError(f"{file} is a mixture of {experts} experts; only dense models can be imported")
    scaling = header.settings.get("rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in header.tensors:
        raise ConfigError(
            f"{file} scales its RoPE ({scaling if scaling != 'none' else 'rope_freqs.weight'}), which transformers "
            "does not read from GGUF; import the folder of safetensors that it was made from"
        )


def split_as_trained(loaded: Any, header: Header, file: Path) -> Any:
    """The tokenizer with the rule by which its text was split when its vocabulary was learned."""
    name = header.settings.get("tokenizer.ggml.pre", "")
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) or name in PLAIN_SPLITS:
        return loaded
    if name not in DIGIT_SPLITS:
        raise ConfigError(
            f"{file}: its tokenizer splits text by the rule {name!r}, which transformers does not know; import the "
            "folder of safetensors that it was made from"
        )
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    return loaded
