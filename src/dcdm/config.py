"""Settings of a model, its training objective and its data, checked before anything is allocated."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

VERSION = "0.2.0"
"""Of the package; pyproject.toml and `dcdm.__version__` take it from here."""

Kind = Literal["ar", "mdlm", "bdlm", "dcdm", "lanes"]
Routing = Literal["paper", "causal", "positional", "strided", "random"]
Prior = Literal["none", "contiguous", "strided"]
Predict = Literal["mask", "left"]
Prompts = Literal["visible", "ordinary"]
Family = Literal[
    "sdar",
    "dream-reasoner",
    "tiny-a2d-bd3lm",
    "tiny-a2d-mdlm",
    "fast-dllm-v2",
    "stable-diffcoder",
    "llada",
    "illada",
    "dream",
    "open-dcoder",
    "diffullama",
]  # diffusion models of others: docs/pretrained.md
NoiseShape = Literal["uniform", "bell"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "fp32", "bf16", "fp64"]
WeightsType = Literal["auto", "fp32", "bf16", "fp64", "int8"]
Documents = Literal["file", "lines"]
Turns = Literal["last", "each"]
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)

DEFAULT_LANES = (1, 2, 4, 8, 16)
LANE_LENGTH = 4  # training draws no number of lanes that would make them shorter than this
NUM_SPECIALS = 3  # BOS, PAD, MASK: the last three ids of every vocabulary, in this order
MOST_POSITIONS = 1 << 24  # up to here single precision, in which positions are encoded, has every whole number
CHAT_FORMAT = 3  # raise it when the same chats would give other examples, splits or counts of bytes
PAPER_BALANCE = 1e-2  # weight of the chunk loss, and our step size of the balance bias


RETIRED: dict[str, dict[str, Any]] = {
    "model": {"chunk_growth": 1.0},
    "objective": {"noise_draws": 1, "complementary_draws": False, "grow_steps": 0},
    "data.reading": {"max_line_bytes": 64 << 20, "max_bad": 0},
}
"""Settings that are gone, with the value that says nothing: folders of earlier versions name them."""


class ConfigError(ValueError):
    """A setting is wrong; the message names the setting and the fix."""


class DataError(ValueError):
    """Data, a tokenizer or their settings are wrong; the message names the place and the fix."""


def without_retired(values: Mapping[str, Any], retired: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without settings that are gone, where they say nothing; others are left to be refused by name."""
    return {name: value for name, value in values.items() if name not in retired or value != retired[name]}


def require(holds: bool, message: str) -> None:
    """Refuse a wrong setting."""
    if not holds:
        raise ConfigError(message)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    require(value in allowed, f"{name}={value!r} is not known; choose one of {', '.join(allowed)}")


def _at_least(name: str, value: object, least: int) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    require(is_whole and value >= least, f"{name}={value!r} must be a whole number of at least {least}")  # type: ignore[operator]


def _within(name: str, value: object, low: float, high: float) -> None:
    held = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not (held or value == math.inf) or not low <= value <= high:  # type: ignore[operator]
        raise ConfigError(f"{name}={str(value)[:40]} must lie between {low:g} and {high:g}")


def _positive(name: str, value: object) -> None:
    _within(name, value, 0, sys.float_info.max)
    require(value != 0, f"{name}={value} must be above 0")


@dataclass(frozen=True)
class MoEConfig:
    """A dropless token-choice mixture in the style of Qwen2-MoE."""

    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int

    def __post_init__(self) -> None:
        for f in fields(self):
            _at_least(f"moe.{f.name}", getattr(self, f.name), 1)
        require(
            self.experts_per_token <= self.num_experts,
            f"moe.experts_per_token={self.experts_per_token} exceeds moe.num_experts={self.num_experts}",
        )


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's change of RoPE's frequencies, by which its models read beyond `original_length` positions.

    Channels whose wave is longer than `original_length` / `low_freq_factor` turn `factor` times slower, those
    whose wave is shorter than `original_length` / `high_freq_factor` as before, and those between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        _at_least("rope_scaling.original_length", self.original_length, 1)
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _positive(f"rope_scaling.{name}", getattr(self, name))
        require(
            self.low_freq_factor < self.high_freq_factor,
            f"rope_scaling.low_freq_factor={self.low_freq_factor} must be below "
            f"rope_scaling.high_freq_factor={self.high_freq_factor}",
        )


@dataclass(frozen=True)
class ModelConfig:
    """What a model is. Every field is checked on construction.

    `kind` is `ar`, `mdlm`, `bdlm` (needs `block_size`) or `dcdm` (needs `num_chunks` and `chunk_dim`).
    `routing`, `prior` and `prior_weight` say how a `dcdm` model forms its chunks. A model of kind `lanes` writes
    many runs of a text at once, each from left to right; `lanes` lists the numbers of lanes to train with,
    `num_chunks` and `chunk_dim` give it a chunking attention, `drafts` a draft head. `predict` says what predicts a
    token: a MASK slot in its own place, or, for partitions that do not depend on noise, the token on its left
    wherever that is known.
    `vocab_size` counts the three specials BOS, PAD and MASK, which are its last three ids.
    The backbone is Qwen3's; with `attention_bias` and without `qk_norm` it is Qwen2's, with neither Llama's.
    """

    kind: Kind
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int | None = None
    block_size: int | None = None
    num_chunks: int | None = None
    chunk_dim: int | None = None
    routing: Routing = "paper"
    prior: Prior = "none"
    prior_weight: float = 0.0
    moe: MoEConfig | None = None
    context_length: int = 1024
    max_position: int = 40_960
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    init_std: float = 0.02
    chunk_out_init_std: float = 0.0
    routing_seed: int = 0
    predict: Predict = "mask"
    lanes: tuple[int, ...] | None = None
    lane_weights: tuple[float, ...] | None = None
    """How often training draws each of `lanes`, relative to the others; None: uniform."""
    drafts: int = 0
    """How many tokens of each lane a head drafts ahead, for decoding that verifies them; 0: there is no head."""
    draft_vocab: int = 0
    """How many tokens the head can draft, the first by id, which in a BPE are the frequent ones; 0: all."""
    draft_width: int = 2
    """Units of the head's inner layer, in hidden sizes."""
    attention_bias: bool = False
    """Whether queries, keys and values have a bias."""
    qk_norm: bool = True
    """Whether queries and keys are normed, head by head."""
    rope_scaling: RopeScaling | None = None
    hide_specials: bool = False
    """For AR: BOS, PAD and MASK have no logits, as in every other kind. Set where the weights come from a model
    that did not have these tokens."""
    prompts: Prompts = "visible"
    """For BDLM and MDLM. "visible": BOS and given tokens come before everything, as chunk 0. "ordinary", as others
    train them: BOS is no more than a place, and given tokens are tokens like others that happen to be known; blocks
    are counted through them from the first one, and they see what is masked in their block."""
    shift: bool = False
    """For such models: a token's logits stand one place to the left, MASK or not; the first one's in its own."""
    hidden_token: int | None = None
    """A token that is never predicted: what an imported model calls its mask, which MASK stands for."""
    family: Family | None = None
    """What an imported model is: "auto" decodes as its authors do (`dcdm.decoding.config.DECODERS`)."""

    def __post_init__(self) -> None:
        for name, made in (("moe", MoEConfig), ("rope_scaling", RopeScaling)):
            if isinstance(value := getattr(self, name), dict):
                object.__setattr__(self, name, _made(name, made, value))
            elif not isinstance(value, made | None):
                raise ConfigError(f"{name}={value!r} must hold settings by name: {', '.join(_names(made))}")
        for name in ("tie_embeddings", "attention_bias", "qk_norm", "hide_specials", "shift"):
            require(isinstance(getattr(self, name), bool), f"{name}={getattr(self, name)!r} must be true or false")
        for name, choice in (
            ("kind", Kind), ("routing", Routing), ("prior", Prior), ("predict", Predict), ("prompts", Prompts),
        ):  # fmt: skip
            _one_of(name, getattr(self, name), get_args(choice))
        if self.family is not None:
            _one_of("family", self.family, get_args(Family))
        self._check_what_belongs_together()
        self._check_backbone()
        self._check_partition()
        if self.kind == "lanes":
            self._check_lanes()

    def _check_what_belongs_together(self) -> None:
        """Refuse settings that say nothing about such a model."""
        kind, causal = self.kind, self.kind == "dcdm" and self.routing == "causal"
        by_mask = kind in ("bdlm", "mdlm", "dcdm") and not self.predicts_from_left
        others = by_mask and kind != "dcdm"
        for names, fits, whom in (
            (("lanes", "lane_weights", "drafts", "draft_vocab", "draft_width"), kind == "lanes", "kind 'lanes'"),
            (("block_size",), kind == "bdlm", "kind 'bdlm'"),
            (("num_chunks", "chunk_dim"), kind in ("dcdm", "lanes"), "kinds 'dcdm' and 'lanes'"),
            (("routing",), kind == "dcdm", "kind 'dcdm'"),
            (("prior", "prior_weight"), causal, "kind 'dcdm' with routing='causal'"),
            (("hide_specials",), kind == "ar", "kind 'ar', since others never predict specials"),
            (("prompts", "shift", "family"), others, "kinds 'bdlm' and 'mdlm' that predict at MASK"),
            (("hidden_token",), by_mask, "kinds 'bdlm', 'mdlm' and 'dcdm' that predict at MASK"),
        ):
            for name in names:
                value = getattr(self, name)
                require(
                    fits or value == getattr(ModelConfig, name),
                    f"{name}={value!r} belongs to {whom}, not to this model of kind {kind!r}; leave it out",
                )
        if self.predict == "left" and (kind in ("ar", "mdlm") or self.routes_from_noise):
            what = "the paper's routing" if kind == "dcdm" else f"kind {kind!r}"
            raise ConfigError(
                f"predict='left' does not fit {what}; it is for bdlm, and for dcdm with a routing that does not "
                "depend on noise"
            )
        require(
            not self.shift or (self.prompts == "ordinary" and self.moe is None),
            "shift=True needs prompts='ordinary', and no moe",
        )

    def _check_backbone(self) -> None:
        _at_least("vocab_size", self.vocab_size, NUM_SPECIALS + 1)
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            _at_least(name, getattr(self, name), 1)
        for name in ("context_length", "max_position"):
            _at_least(name, getattr(self, name), 1)
            _within(name, getattr(self, name), 1, MOST_POSITIONS)
        require(
            self.context_length <= self.max_position,
            f"context_length={self.context_length} exceeds max_position={self.max_position}; lower the first or "
            "raise the second",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}; each key/value head "
            "serves the same number of query heads",
        )
        require(self.head_dim % 2 == 0, f"head_dim={self.head_dim} must be even: RoPE rotates pairs of channels")
        require(
            (self.moe is None) != (self.intermediate_size is None),
            "set exactly one of intermediate_size (dense MLP) and moe (mixture of experts); got "
            f"intermediate_size={self.intermediate_size}, moe={self.moe}",
        )
        if self.intermediate_size is not None:
            _at_least("intermediate_size", self.intermediate_size, 1)
        for name in ("norm_eps", "init_std", "chunk_out_init_std"):
            _within(name, getattr(self, name), 0, sys.float_info.max)
        _positive("rope_theta", self.rope_theta)
        if self.hidden_token is not None:
            _at_least("hidden_token", self.hidden_token, 0)
            require(
                self.hidden_token < self.bos_id,
                f"hidden_token={self.hidden_token} must be below BOS, {self.bos_id}",
            )

    def _check_partition(self) -> None:
        if self.kind == "bdlm":
            _at_least("block_size", self.block_size, 1)
            assert self.block_size is not None
            require(
                self.block_size <= self.context_length,
                f"block_size={self.block_size} exceeds context_length={self.context_length}; a block must fit into "
                "the context",
            )
        if self.kind == "dcdm" or self.num_chunks is not None or self.chunk_dim is not None:
            _at_least("num_chunks", self.num_chunks, 1)
            _at_least("chunk_dim", self.chunk_dim, 1)
        _within("prior_weight", self.prior_weight, 0, math.inf)
        require(
            (self.prior == "none") == (self.prior_weight == 0),
            f"prior={self.prior!r} has no effect with prior_weight={self.prior_weight}, nor the weight without a "
            "prior; choose both (inf: the prior decides), or none",
        )

    def _check_lanes(self) -> None:
        object.__setattr__(self, "predict", "left")
        _at_least("drafts", self.drafts, 0)
        _at_least("draft_width", self.draft_width, 1)
        _at_least("draft_vocab", self.draft_vocab, 0)
        _within("draft_vocab", self.draft_vocab, 0, self.bos_id)
        if not isinstance(self.lanes, list | tuple | None):
            raise ConfigError(f"lanes={self.lanes!r} must be a list of numbers of lanes, such as [1, 2, 4]")
        lanes = DEFAULT_LANES if self.lanes is None else tuple(self.lanes)
        object.__setattr__(self, "lanes", lanes)
        require(
            0 < len(lanes) == len(set(lanes)), f"lanes={lanes} must name at least one number of lanes, each once"
        )
        for number in lanes:
            _at_least("lanes", number, 1)
        if self.lane_weights is not None:
            weights = tuple(self.lane_weights)
            object.__setattr__(self, "lane_weights", weights)
            for weight in weights:
                _within("lane_weights", weight, 0, sys.float_info.max)
            require(
                len(weights) == len(lanes) and weights[lanes.index(min(lanes))] > 0,
                f"lane_weights={weights} must hold one number for each of lanes={lanes}, that of the fewest lanes "
                "above 0: short texts have no other",
            )

    @property
    def bos_id(self) -> int:
        return self.vocab_size - 3

    @property
    def pad_id(self) -> int:
        return self.vocab_size - 2

    @property
    def mask_id(self) -> int:
        return self.vocab_size - 1

    @property
    def predicts_specials(self) -> bool:
        """Whether BOS, PAD and MASK have logits: in AR, unless they are hidden."""
        return self.kind == "ar" and not self.hide_specials

    @property
    def routes_from_noise(self) -> bool:
        """True for the paper's routing: chunk ids depend on the noisy stream, so they give no valid bound."""
        return self.kind == "dcdm" and self.routing == "paper"

    @property
    def predicts_from_left(self) -> bool:
        """True where the token on the left predicts a token, wherever it is known: then likelihoods are exact."""
        return self.predict == "left"

    @property
    def default_lanes(self) -> int:
        """Four where the model was trained with four, else its largest number below, else its smallest."""
        assert self.lanes is not None
        return max((number for number in self.lanes if number <= 4), default=min(self.lanes))

    @property
    def has_chunking(self) -> bool:
        """Whether the network has a chunking attention layer."""
        return self.num_chunks is not None

    @property
    def prior_decides(self) -> bool:
        """True where an infinitely weighted prior has no ties that the router could break."""
        return math.isinf(self.prior_weight) and self.prior != "none"

    def num_groups(self, length: int) -> int:
        """How many chunks or blocks a sequence of `length` positions has at most."""
        if self.kind == "bdlm":
            assert self.block_size is not None
            return max(1, math.ceil(length / self.block_size))
        if self.kind == "dcdm":
            assert self.num_chunks is not None
            return self.num_chunks
        return length if self.kind == "lanes" else 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values; later settings only where they say something, as in folders of earlier versions."""
        values = asdict(self)
        if self.predict == "mask":
            del values["predict"], values["lanes"]
        later = ("lane_weights", "drafts", "draft_vocab", "draft_width", "attention_bias", "qk_norm",
                 "rope_scaling", "hide_specials", "prompts", "shift", "hidden_token", "family")  # fmt: skip
        for name in later:
            if getattr(self, name) == getattr(ModelConfig, name):
                del values[name]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        values = without_retired(values, RETIRED["model"])
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"unknown model setting {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return cls(**values)


@dataclass(frozen=True)
class ObjectiveConfig:
    """How training noise is drawn and what the loss is made of.

    A weight or rate of None means the kind's default: the paper's value for the paper's routing, 0 for
    partitions that are balanced by construction.
    """

    t_min: float = 1e-3
    t_max: float = 1.0
    t_shape: NoiseShape = "uniform"
    """Density of the levels t between t_min and t_max; "bell" is 6u(1 − u) of the way u from the one to the other.
    The loss is then no estimate of the bound."""
    full_mask_share: float = 0.0
    """Share of chunks trained fully masked (t = 1), as one-forward-per-chunk decoding needs."""
    prompt_share: float = 0.2
    """Share of training windows with a random visible prefix or random visible spans."""
    blank_share: float = 0.0
    """Share of training windows that are visible but for a few short blanks, as in filling code in."""
    soft_targets: bool = False
    """Lanes that are trained by adapters learn what the frozen weights predict in one lane, their distributions, in
    place of the text's tokens."""
    chunk_loss_weight: float | None = None
    chunk_loss_eps: float | None = None
    """ε inside the logarithm of the per-sequence balance loss; None means 1/L."""
    moe_loss_weight: float = 1e-2
    bias_rate: float | None = None
    """η_b of the balance bias."""

    def __post_init__(self) -> None:
        require(
            0 < self.t_min <= self.t_max <= 1,
            f"t_min={self.t_min}, t_max={self.t_max} must satisfy 0 < t_min <= t_max <= 1",
        )
        _one_of("t_shape", self.t_shape, get_args(NoiseShape))
        for name in ("full_mask_share", "prompt_share", "blank_share"):
            _within(name, getattr(self, name), 0, 1)
        for name in ("chunk_loss_weight", "bias_rate", "moe_loss_weight"):
            if getattr(self, name) is not None:
                _within(name, getattr(self, name), 0, math.inf)
        if self.chunk_loss_eps is not None:
            _positive("chunk_loss_eps", self.chunk_loss_eps)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what came later stays out while it is off, so that hashes of older settings hold."""
        values = asdict(self)
        for name in ("t_shape", "blank_share", "soft_targets"):
            if values[name] == getattr(ObjectiveConfig, name):
                del values[name]
        return values

    def check_fits(self, config: ModelConfig) -> None:
        """Refuse what has no effect on such a model, or no meaning."""
        plain, left = ObjectiveConfig(), config.kind == "ar" or config.predicts_from_left
        useless = {
            "blank_share": config.kind == "ar", "t_min": left, "t_max": left, "t_shape": left,
            "bias_rate": not config.routes_from_noise, "chunk_loss_weight": config.kind != "dcdm",
        }  # fmt: skip
        for name in (name for name, is_useless in useless.items() if is_useless):
            value = getattr(self, name)
            require(
                not value or value == getattr(plain, name),
                f"{name}={value} has no effect on a model of kind {config.kind!r} with routing="
                f"{config.routing!r} and predict={config.predict!r}; leave it out",
            )
        require(
            not left or self.full_mask_share in (0.0, 1.0),
            f"full_mask_share={self.full_mask_share}: AR, and what predicts from the left, trains on every token; "
            "leave it out, or set it to 1",
        )

    def chunk_weight_for(self, config: ModelConfig) -> float:
        return self._default_for(config, self.chunk_loss_weight)

    def bias_rate_for(self, config: ModelConfig) -> float:
        return self._default_for(config, self.bias_rate)

    def _default_for(self, config: ModelConfig, value: float | None) -> float:
        if value is not None:
            return value if config.has_chunking else 0.0
        return PAPER_BALANCE if config.routes_from_noise else 0.0


@dataclass(frozen=True)
class DataConfig:
    """Settings of a preparation, checked on construction.

    Plain text comes from `.txt` files (cut into documents as `documents` says) or from `field` of a row. With
    `prompt_field` and `response_field`, or with `messages_field`, every row is one example of supervised
    fine-tuning instead: the prompt stays visible, the response is learned.
    """

    documents: Documents = "file"
    """What is one document in a text file: the file, or each line."""
    field: str = "text"
    """Field of a row that holds its text."""
    prompt_field: str | None = None
    """Fine-tuning: field of the prompt."""
    response_field: str | None = None
    """Fine-tuning: field of the response."""
    separator: str = "\n"
    """Fine-tuning: what is between prompt and response; it belongs to the prompt."""
    messages_field: str | None = None
    """Fine-tuning on chats: field that holds one, a list of {"role": …, "content": …}."""
    turns: Turns = "last"
    """Fine-tuning on chats: which of the assistant's messages is learned, the last or each (an example each)."""
    validation_share: float = 0.05
    """Share of the documents held out by hash, when no validation source is named."""

    def __post_init__(self) -> None:
        for name, allowed in (("documents", get_args(Documents)), ("turns", get_args(Turns))):
            if getattr(self, name) not in allowed:
                raise DataError(f"{name}={getattr(self, name)!r} is not known; choose one of {', '.join(allowed)}")
        if not 0 <= self.validation_share < 1:
            raise DataError(f"validation_share={self.validation_share} must lie in [0, 1)")
        if (self.prompt_field is None) != (self.response_field is None):
            raise DataError("prompt_field and response_field go together: set both or neither")
        if self.messages_field is not None and self.prompt_field is not None:
            raise DataError("set prompt_field and response_field, or messages_field, not both")

    @property
    def fine_tuning(self) -> bool:
        """Whether rows are examples (prompt and response) rather than plain text."""
        return self.messages_field is not None or self.prompt_field is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields of a row that are read."""
        if self.messages_field is not None:
            return (self.messages_field,)
        if self.prompt_field is not None and self.response_field is not None:
            return (self.prompt_field, self.response_field)
        return (self.field,)

    def identity(self, validation_given: bool) -> dict[str, Any]:
        """The settings that shape the result; those that cannot matter here are left out."""
        chosen: dict[str, Any] = {}
        if self.messages_field is not None:
            chosen |= {"messages_field": self.messages_field, "turns": self.turns, "chat_format": CHAT_FORMAT}
        elif self.prompt_field is not None:
            chosen |= {"prompt_field": self.prompt_field, "response_field": self.response_field}
            chosen |= {"separator": self.separator}
        else:
            chosen |= {"documents": self.documents, "field": self.field}
        if not validation_given:
            chosen["validation_share"] = self.validation_share
        return chosen


def _made(name: str, cls: type[Any], values: dict[str, Any]) -> Any:
    try:
        return cls(**values)
    except TypeError:
        raise ConfigError(f"{name}={values!r} must have exactly {', '.join(_names(cls))}") from None


def _names(cls: type[Any]) -> list[str]:
    return [f.name for f in fields(cls)]


def assignments(texts: tuple[str, ...]) -> dict[str, Any]:
    """What --set says: values of name=value, read as YAML."""
    import yaml

    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write it as name=value")
        try:
            values[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"--set {text}: the value is not YAML; put it into quotes, or close its brackets"
            ) from error
    return values


def many(count: int, one: str, more: str | None = None) -> str:
    """A counted noun: 1 lane, 2 lanes, 1,000 forward passes."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def harmless(text: str) -> str:
    """Control characters as symbols: what a model or a stranger wrote must not turn a terminal's colours.

    Halves of surrogate pairs, as in names of files that are not UTF-8, cannot be printed and show as �.
    """
    symbols = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    unprintable = dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000)), 0xFFFD)
    return text.translate(symbols | {0x7F: 0x2421} | unprintable)


def whole_number(name: str, value: Any) -> int:
    """An integer of any library's, or a refusal by the setting's name."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name}={value!r} must be a whole number") from None
