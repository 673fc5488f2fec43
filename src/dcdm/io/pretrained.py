"""`dcdm import`: a pretrained Llama, Qwen2 or Qwen3, AR or diffusion model, as an exported folder, wherever it is.

The tokens BOS, PAD and MASK are appended to its vocabulary. Our texts begin with BOS, so its embedding is a copy
of the one that the model is used to see there: logits equal those of `transformers` for that token and the text. A
chat whose template begins with that very token gets BOS in its place. Specials have no logits.
Diffusion models have no BOS, and know their MASK: they stay as they are.
"""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers

from dcdm.config import NUM_SPECIALS, ConfigError, Kind, ModelConfig
from dcdm.data.sources import hub_answers
from dcdm.data.tokenizers import Tokenizer, adopted, ask_transformers
from dcdm.files import file_digest
from dcdm.io import export
from dcdm.io.families import HOW, Family
from dcdm.io.importing import EMBEDDING, HEAD, Source, read_settings
from dcdm.kinds import build
from dcdm.model.transformer import Model
from dcdm.shipped.bases import BASES, base_folder, fetched

MEAN = "mean"
"""Name of the initial value that is the mean of all rows."""
SEPARATOR = "<|endoftext|>"
"""What separates the documents that GPT-2's heirs are trained on, and hence before a text."""
CONTEXT = 2048
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class Pretrained:
    """Weights and tokenizer of a source, before anything is written."""

    source: Source
    tokenizer: Tokenizer
    bos: str | None
    """The token that the model is used to see before a text, if its tokenizer tells."""
    mask: int | None = None
    """The token that its tokenizer calls its mask."""


@dataclass(frozen=True)
class Imported:
    """What an import made, for a message."""

    parameters: int
    family: str
    vocab_size: int
    specials: str
    """What BOS or MASK stands for."""
    chat: bool
    """Whether there is a chat template."""


def import_model(
    spec: str, folder: Path, *, bos: str | None = None, mask: str | None = None, context_length: int | None = None,
    family: str | None = None, block_size: int | None = None,
) -> Imported:  # fmt: skip
    """Write the model called `spec` as an exported folder: of kind `ar`, a diffusion model of its own kind.

    `spec` is a folder of `transformers`, the GGUF file of a shipped adapter's base, or a name on the hub. `bos` is
    the token of the model that BOS stands for, by default what `before_text` finds; `mask` the one whose embedding
    MASK starts from, by default their mean. `family` says what the model is where its folder does not
    tell (`families.py`); of diffusion models `mask` is the one that MASK stands for, `block_size` what they were
    trained with: both only where the folder does not tell.
    """
    export.check_free(folder)
    found = opened(spec, family)
    tokenizer, diffusion = found.tokenizer, found.source.family
    if diffusion is not None:
        if bos is not None:
            raise ConfigError(f"bos={bos!r} has no effect on {spec}, a {diffusion.title}, which has no BOS")
        model, specials = diffusion_model(found, diffusion, context_length, mask, block_size)
    else:
        if block_size is not None:
            raise ConfigError(f"block_size={block_size} has no effect on {spec}, an AR model; leave it out")
        if (bos := bos or found.bos) is None:
            raise ConfigError(f"{spec}: its tokenizer names neither BOS nor EOS; say with --bos what begins a text")
        tokenizer, specials = tokenizer.with_bos_for(_own(tokenizer, bos, "bos")), f"BOS stands for {bos}"
        start = None if mask in (None, MEAN) else _own(tokenizer, str(mask), "mask")
        model = found_model(found, context_length)
        start_specials(model, found, tokenizer.bos_for, start)
    export.write_export(model, tokenizer, folder, _card(spec, found, model.config.kind))
    parameters = sum(p.numel() for p in model.parameters())
    family = found.source.title
    return Imported(parameters, family, tokenizer.vocab_size, specials, tokenizer.chat_template is not None)


def diffusion_model(
    found: Pretrained, family: Family, context_length: int | None, mask: str | None, block_size: int | None
) -> tuple[Model, str]:
    """A diffusion model as its authors have it, and what it is in a few words."""
    source, tokenizer = found.source, found.tokenizer
    size = family.block_size(source.given, source.place, block_size)
    if mask is None:
        token = family.mask_id(source.given, source.place, tokenizer, found.mask)
    else:
        token = int(mask) if mask.isdecimal() else _own(tokenizer, mask, "mask")
    if type(token) is not int or not 0 <= token < source.vocab_size:
        raise ConfigError(f"{source.place}: the mask {token!r} is none of the model's {source.vocab_size} rows")
    if token < tokenizer.bos_id and (tokenizer.name(token) is None or token == tokenizer.eos_id):
        what = tokenizer.backend.id_to_token(token)
        raise ConfigError(
            f"{source.place}: the mask {token} is {what!r}, which texts hold; say the right one by --mask"
        )
    model = found_model(
        found, context_length, family.kind, block_size=size, prompts="ordinary", shift=family.shift,
        family=family.name, hidden_token=token if token < tokenizer.bos_id else None,
    )  # fmt: skip
    start_specials(model, found, mask=token)
    habits = "everything sees everything" if size is None else f"blocks of {size}"
    return model, f"{habits}{', logits shifted' if family.shift else ''}; MASK stands for {token}"


def found_model(found: Pretrained, context_length: int | None = None, kind: Kind = "ar", **fields: Any) -> Model:
    """The model of a source; the rows of new tokens are as they happen to be."""
    source, tokenizer = found.source, found.tokenizer
    if tokenizer.vocab_size - NUM_SPECIALS > source.vocab_size + 1:  # one more: an EOS that it did not have
        raise ConfigError(
            f"{source.place}: its tokenizer has {tokenizer.vocab_size - NUM_SPECIALS} tokens, and the model rows "
            f"for {source.vocab_size}; take the tokenizer that the model was trained with"
        )
    length = min(CONTEXT, source.fields["max_position"]) if context_length is None else context_length
    fields = fields or {"hide_specials": True}
    config: ModelConfig = source.config(kind, vocab_size=tokenizer.vocab_size, context_length=length, **fields)
    model = build(config, seed=0)
    source.load_into(model)
    return model.eval()


@torch.no_grad()
def start_specials(model: Model, found: Pretrained, bos: int | None = None, mask: int | None = None) -> None:
    """Give the rows that the source has no token for their initial values: the mean of the others, and for BOS and
    MASK copies of these rows of the source.
    """
    rows = min(found.source.vocab_size, model.config.bos_id)
    for name, weight in model.named_parameters():
        if name not in (EMBEDDING, HEAD):
            continue
        weight[rows:] = weight[:rows].double().mean(dim=0).to(weight)  # the same bits everywhere
        for special, start in ((model.config.bos_id, bos), (model.config.mask_id, mask)):
            if start is not None:
                weight[special] = found.source.read(name)[start]


def _own(tokenizer: Tokenizer, name: str, option: str) -> int:
    """The id of one of the model's own tokens."""
    token = tokenizer.backend.token_to_id(name)
    if token is None or token >= tokenizer.bos_id:
        raise ConfigError(f"{option}={name!r} is not a token of this model; name one of its own")
    return int(token)


def _card(spec: str, found: Pretrained, kind: Kind) -> str:
    name = Path(spec).name
    says = f"A {found.source.title}, imported from `{name}` as a model of kind `{kind}` of dcdm."
    return export.card(name, says, "The licence of the weights is that of their source.")


# --- where models come from ---------------------------------------------------------------------------------------


def opened(spec: str, family: str | None = None) -> Pretrained:
    """The model called `spec`."""
    path = Path(spec).expanduser()
    if path.is_dir():
        return _from_folder(path, family)
    if path.is_file():
        return _from_gguf(path)
    if spec.startswith((".", "/", "~")) or spec.endswith(".gguf"):
        raise ConfigError(f"{spec}: there is no such folder or file")
    return _from_folder(_from_hub(spec), family)


def _from_folder(folder: Path, family: str | None = None) -> Pretrained:
    source = Source.in_folder(folder, family)
    loaded = ask_transformers(str(folder), "AutoTokenizer" if source.family is None else _reader(folder, source))
    if source.family is None and family is None and loaded.mask_token is not None:
        raise ConfigError(
            f"{folder}: its tokenizer has a mask token, {loaded.mask_token!r}, as diffusion models have, and would "
            f"be read as AR; {HOW}"
        )
    mask = None if loaded.mask_token is None else loaded.mask_token_id
    return Pretrained(source, adopted(loaded, str(folder)), before_text(loaded), mask)


def _reader(folder: Path, source: Source) -> str:
    """The class of `transformers` that reads a diffusion model's tokenizer, which may name code of its own: that of
    Qwens is Qwen2's vocabulary and merges in another file. No code of a folder is run.
    """
    path = folder / "tokenizer_config.json"
    own = read_settings(path, "restore it").get("auto_map") if path.is_file() else None
    if not isinstance(own, dict) or "AutoTokenizer" not in own:
        return "AutoTokenizer"
    if (folder / "tokenizer.json").is_file():
        return "PreTrainedTokenizerFast"
    merges = source.backbone.name.startswith("Qwen") and (folder / "merges.txt").is_file()
    return "Qwen2Tokenizer" if merges else "AutoTokenizer"


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    answers = hub_answers()
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # network, cache and repository errors have no common base
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = reason if answers else "the hub cannot be reached"
        raise ConfigError(
            f"{name!r} is neither a folder nor a file here, and as a name on the hub: {why}"
        ) from error


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


# --- the bases of shipped adapters, which come as GGUF -----------------------------------------------------------


def fetch(name: str, folder: Path | None = None) -> Path:
    """Import a base into `folder`, by default the user's cache, where its name finds it."""
    folder = base_folder(name) if folder is None else folder
    with tempfile.TemporaryDirectory(prefix="dcdm-import-") as place:
        import_model(str(fetched(name, Path(place))), folder)
    return folder


def _from_gguf(file: Path) -> Pretrained:
    """Read by `transformers`, which undoes quantization and GGUF's own order of rows.

    It loads many such files as something else than they are, without a word: only those that it reads rightly are
    taken, by their SHA-256.
    """
    if file_digest(file) not in {base.sha256 for base in BASES.values()}:
        raise ConfigError(
            f"{file} is none of the GGUF files that are known to be read rightly ({', '.join(BASES)}); import the "
            "folder of safetensors that it was made from"
        )
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"{file}: reading GGUF needs {' and '.join(missing)}; pip install -e '.[adapt]'")
    import transformers

    with tempfile.TemporaryDirectory(prefix="dcdm-gguf-") as alone:  # files beside it would be read, too
        (Path(alone) / file.name).symlink_to(file.resolve())
        model = transformers.AutoModelForCausalLM.from_pretrained(
            alone, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
        )
        loaded = ask_transformers(alone, gguf_file=file.name)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)  # SmolLM's rule, which `transformers` does not know
    loaded.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)  # undone
    source = Source.in_memory(settings, model.state_dict(), str(file))
    return Pretrained(source, adopted(loaded, str(file)), before_text(loaded))
