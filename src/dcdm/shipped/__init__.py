"""Trained models that come with the package: what there is, where it lies, and what its card says.

Each is an exported folder beside this file, with two files more: `card.json`, which says what it was trained on and
how good it is, and `training.yaml`, the settings that train it again; `start.yaml` has those of its initial
weights, where it did not begin from nothing. Adapters ship, too; their base is fetched (`bases.py`). Reading cards
needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcdm.config import ConfigError, many
from dcdm.files import UnreadableFile, read_json_object
from dcdm.shipped.bases import BASES, base_folder

HOME = Path(__file__).parent
CARD, TRAINING, START = "card.json", "training.yaml", "start.yaml"
ADAPTER = "dcdm.json"
"""A folder with this file is an adapter."""
CHATS = "smollm2-drafts"
"""What `dcdm chat` takes where none is named."""
LANES = "python-lanes"
ORDER = ("english-dcdm", "english-bdlm", "english-mdlm", LANES, "python-chunks")
"""How they are listed: the paper's DCDM and its baselines first."""
WRITES, SHOWS_CHUNKS = (LANES,), ("english-dcdm", "python-chunks")
"""The models that commands take when none is named, and where chunks are shown: the first that is there."""
LIKELIHOODS = ("exact", "trajectory")


@dataclass(frozen=True)
class Figure:
    """A likelihood of held-out text."""

    estimator: str
    """How it was measured: exact and trajectory are likelihoods; bound, sequential and, of several lanes, drafted
    are upper bounds; the paper's surrogate is none of these."""
    lanes: int | None
    """How many lanes wrote; None for models without lanes."""
    nats_per_token: float
    stderr: float | None
    """Of `nats_per_token`, over documents."""
    nats_per_byte: float
    forwards_per_window: float | None
    """Of the decoder; None for a bound, which holds for every decoder that is faithful to the chunks."""
    drafts: int | None = None
    """How many tokens of a lane were drafted; None where none were."""


@dataclass(frozen=True)
class Card:
    """What the card of a shipped model says."""

    name: str
    says: str
    """What it is, in a sentence."""
    kind: str
    parameters: int
    context_length: int
    tokenizer: str
    """As it was asked for in training, such as `bpe:2048`."""
    vocab_size: int
    preset: str | None
    """The preset that it has the shape of, if any."""
    command: str
    """Trains it again."""
    seed: int
    steps: int
    tokens: int
    """Tokens that were predicted in training, all steps together."""
    trained_on: Mapping[str, Any]
    """source, licence, files, bytes; data, as `--data` names it, or python, the version whose library it was."""
    held_out: Mapping[str, Any]
    """files (name → SHA-256; of addresses, documents), bytes, windows and their length: what the figures were made
    with."""
    figures: tuple[Figure, ...]
    check: Mapping[str, Any]
    """A figure of a few windows, quick to make again: windows, and the rest as in `figures`."""
    weights: Mapping[str, Any]
    """dtype, bytes and SHA-256 of the file of weights."""
    start: Mapping[str, Any] | None = None
    """steps, tokens and seed of the model whose weights it started from, if it did not begin from nothing."""
    twins: Sequence[str] = ()
    """Shipped models of another kind with the same text, size and training."""
    chunks: Sequence[Mapping[str, Any]] = ()
    """What decides the chunks of held-out windows, of DCDM: for each noise level and what the router saw, bits of
    the chunk, those that position, token and window alone explain, and what is left."""
    words: Sequence[Sequence[str]] = ()
    """The most typical tokens of each chunk, with nothing masked."""

    @classmethod
    def read(cls, folder: Path) -> Card:
        try:
            values = read_json_object(folder / CARD)
            return cls(**{**values, "figures": tuple(Figure(**one) for one in values["figures"])})
        except (UnreadableFile, OSError, TypeError, KeyError) as error:
            raise ConfigError(f"{folder / CARD} cannot be read: {error}; install the package again") from error

    @property
    def all_steps(self) -> int:
        """Of its training, that of its initial weights included."""
        return self.steps + (0 if self.start is None else self.start["steps"])

    @property
    def best(self) -> Figure:
        """The lowest of the valid figures without drafts, which change forwards and not what is written."""
        valid = [one for one in self.figures if one.drafts is None and one.estimator != "surrogate"]
        return min(valid, key=lambda one: one.nats_per_token)

    @property
    def sentence(self) -> str:
        """What it is, what it was trained on and how good it is, for a page or a terminal."""
        best, text = self.best, self.trained_on
        order = "" if best.lanes is None else f" in {many(best.lanes, 'lane')}"
        kind = "exact" if best.estimator in LIKELIHOODS else "upper bound"
        return (
            f"{self.says} {self.parameters / 1e6:.1f}M parameters, {self.all_steps:,} steps on {text['source']}; "
            f"{best.nats_per_byte:.2f} nats per byte of held-out text ({kind}{order})."
        )


@dataclass(frozen=True)
class AdapterCard:
    """What the card of a shipped adapter says."""

    name: str
    says: str
    base: str
    licence: str
    command: str
    """Trains it again."""
    seed: int
    steps: int
    texts: int
    """How many texts of its base it was trained on."""
    seconds: int
    """Of one core, for these texts and the training."""
    figures: tuple[Mapping[str, Any], ...]
    weights: Mapping[str, Any]
    """dtype, bytes and SHA-256 of the file of weights, and `base_sha256`, that of its base's."""

    @classmethod
    def read(cls, folder: Path) -> AdapterCard:
        try:
            return cls(**read_json_object(folder / CARD))
        except (UnreadableFile, OSError, TypeError) as error:
            raise ConfigError(f"{folder / CARD} cannot be read: {error}; install the package again") from error


def adapters() -> list[AdapterCard]:
    """The card of every shipped adapter."""
    return [AdapterCard.read(path.parent) for path in sorted(HOME.glob(f"*/{ADAPTER}"))]


def names() -> list[str]:
    """The shipped models, the paper's DCDM first; adapters are not among them."""
    there = {path.parent.name for path in HOME.glob(f"*/{CARD}") if not (path.parent / ADAPTER).exists()}
    return sorted(there, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def cards() -> list[Card]:
    """The card of every shipped model."""
    return [Card.read(HOME / name) for name in names()]


def default(*, chunks: bool = False) -> str:
    """The model to take when none is named; with `chunks` the one whose chunks are worth a look."""
    there = names()
    if not there:
        raise ConfigError("no trained model came with this installation; name a run or an exported folder")
    return next((name for name in (SHOWS_CHUNKS if chunks else WRITES) if name in there), there[0])


def folder_of(model: str | Path | None) -> Path:
    """The folder that a user means: nothing is the default, a name that `dcdm models` lists is a shipped model, and
    the name of a base where that lies.

    A folder of that name wins over both.
    """
    if model is None:
        return HOME / default()
    path, name = Path(model), str(model)
    if path.exists():
        return path
    if name in BASES:
        return base_folder(name)
    return HOME / path if (HOME / name / CARD).is_file() and path.name == name else path


def card_of(model: str | Path | None) -> Card | None:
    """The card of what a user means, if it is a shipped model."""
    folder = folder_of(model)
    return Card.read(folder) if (folder / CARD).is_file() and not (folder / ADAPTER).exists() else None
