"""What commands share: options of one name and meaning, loading a model, and what they print.

Importing this file costs little: PyTorch and rich load when a function needs them, so that help stays fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from dcdm.config import ConfigError, Device, WeightsType, assignments
from dcdm.decoding.config import settings

if TYPE_CHECKING:
    import torch

    from dcdm.data.tokenizers import Tokenizer
    from dcdm.model.transformer import Model

# --- options -----------------------------------------------------------------------------------------------------

MODEL_HELP = "A run folder, a checkpoint in it, an exported folder, or a name that `dcdm models` lists."
ModelArgument = Annotated[Path, Positional, arg(metavar="MODEL", help=MODEL_HELP)]
ModelIfAny = Annotated[
    Path | None,
    Positional,
    arg(metavar="[MODEL]", help=f"{MODEL_HELP} By default a model that comes with dcdm.", help_behavior_hint=""),
]
"""For commands that take a shipped model where none is named."""
DeviceOption = Annotated[Device, arg(help="Where to compute; auto is cuda where there is a GPU, else cpu.")]
DtypeOption = Annotated[
    WeightsType,
    arg(
        name="weights", aliases=("--dtype",),
        help="Type of the weights; int8 is faster on a CPU (docs/performance.md), auto is bf16 on cuda and fp32 "
        "elsewhere.",
    ),
]  # fmt: skip
AdapterOption = Annotated[
    Path | None,
    arg(
        metavar="FOLDER", help="LoRA adapters or a draft head for the model, from `dcdm export --adapter-only`.",
        help_behavior_hint="",
    ),
]  # fmt: skip
CompileOption = Annotated[
    bool,
    arg(help="Compile the blocks for decoding on a CPU: about a minute, once for models of a shape; kept on disk."),
]
JsonOption = Annotated[bool, arg(help="Print one JSON object instead of a table.")]

DecoderFlags = make_dataclass(
    "DecoderFlags",
    [
        (one.name, Annotated[one.type | None, arg(help=one.about, help_behavior_hint="")], None)
        for one in settings()
        if not one.rare
    ],
    frozen=True,
)
"""A flag for every setting of `DecodingConfig` that is not rare; None where it is not given."""
NO_FLAGS: Any = DecoderFlags()
if TYPE_CHECKING:
    DecoderOptions = Any
else:
    DecoderOptions = Annotated[DecoderFlags, arg(name="")]
SetOption = Annotated[
    tuple[str, ...],
    arg(
        metavar="NAME=VALUE...", help_behavior_hint="",
        help=f"Further settings of the decoder: {', '.join(one.name for one in settings() if one.rare)}.",
    ),
]  # fmt: skip


def decoder_settings(flags: DecoderOptions, rare: tuple[str, ...]) -> dict[str, Any]:
    """The settings that were given, by flags and by --set."""
    return {name: value for name, value in vars(flags).items() if value is not None} | assignments(rare)


# --- loading -----------------------------------------------------------------------------------------------------


def compute_on(device: Device, dtype: WeightsType) -> tuple[torch.device, torch.dtype]:
    """What --device and --weights say, in PyTorch's terms."""
    from dcdm.distributed import choose_device
    from dcdm.io.load import weights_type

    chosen = choose_device(device)
    return chosen, weights_type(dtype, chosen)


def load_for(
    model: str | Path | None, device: Device, dtype: WeightsType, adapter: Path | None = None
) -> tuple[Model, Tokenizer]:
    """The model that a command was given, ready for evaluation, and its tokenizer."""
    from dcdm.io.load import load_model

    torch_device, torch_dtype = compute_on(device, dtype)
    return load_model(model, device=torch_device, dtype=torch_dtype, adapter=adapter)


def load_writer(
    model: str | Path | None, device: Device, dtype: WeightsType, adapter: Path | None, compile: bool
) -> tuple[Model, Tokenizer]:
    """As `load_for`, for a command that writes texts."""
    from dcdm.model.kernels import prepare
    from dcdm.model.products import bf16_slowdown

    if dtype == "bf16" and compute_on(device, dtype)[0].type == "cpu" and (times := bf16_slowdown()) > 1.25:
        raise ConfigError(
            f"--weights bf16: on this CPU a product with one token takes {times:.1f} times as long as in fp32; "
            "choose int8, which is faster, or fp32"
        )
    loaded, tokenizer = load_for(model, device, dtype, adapter)
    if compile:
        prepare(loaded, compile=True)
    return loaded, tokenizer


def at_least_one(**counts: int | None) -> None:
    """Refuse counts below 1, by the names of their options; None is not a count."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {count}: must be at least 1")


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """The numbers of an option such as 1,2,4; an empty text is none."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(f"--{name} {text}: write whole numbers with commas between them, as in 1,2,4") from None


def folders_exist(**files: Path | None) -> None:
    """Refuse files that could not be written in the end, by the names of their options."""
    for name, path in files.items():
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            why = "is a folder" if path.is_dir() else f"{path.parent} is not a folder"
            raise ConfigError(f"--{name.replace('_', '-')} {path}: {why}; name a file in a folder that exists")


# --- texts -------------------------------------------------------------------------------------------------------


def argument_text(text: str) -> str:
    """What a user typed; bytes that are not UTF-8 become replacement characters."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def piped_text() -> str:
    """What was piped, without the line end that `echo` and editors put behind it; nothing of a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    return sys.stdin.buffer.read().decode(errors="replace").removesuffix("\n").removesuffix("\r")


def can_ask() -> bool:
    """Whether a person sits at the terminal that standard input is."""
    return sys.stdin is not None and sys.stdin.isatty()


# --- printing ----------------------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    import json

    print(json.dumps(value), flush=True)


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """A plain table of rows that have the same columns; None is shown as a dash."""
    from dcdm.viewing.tables import Table

    text = [name for name, value in rows[0].items() if not isinstance(value, int | float)]
    Table(list(rows[0]), [list(row.values()) for row in rows], text).print()
