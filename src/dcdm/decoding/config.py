"""The settings of a decoder: the only list of them.

Keywords of `dcdm.generate`, flags of the command line, the server's schema, arguments of the harness and the page's
dials are made from the fields of `DecodingConfig`, their bounds and docstrings: a new setting is one field. Prompt,
length and seed are a text's own and do not belong here.

Importing this file does not load PyTorch: the command line needs the list to show its help.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_type_hints

from dcdm.config import ConfigError, ModelConfig, whole_number

if TYPE_CHECKING:
    from dcdm.data.tokenizers import Tokenizer
    from dcdm.decoding.commits import Sampling

ROUTINGS = {
    "auto": "As this kind of model was trained.",
    "paper-chunk": "Chunks are formed from the tokens filled so far, anew whenever one is full.",
    "paper-step": "Chunks are formed anew after every forward pass.",
    "paper-equal": "As many rounds as chunks, of equal size: each takes what fits its subspace best.",
    "paper-strided": "As many rounds as chunks, of every K-th token: by position alone, whatever the router says.",
    "appendix-b": "As paper-chunk; filled tokens of later chunks stay hidden until their turn.",
    "blocks": "Blocks of equal length, from left to right.",
    "sub-blocks": "The model's blocks, each in parts of equal length from left to right.",
    "from-prompt": "The model's blocks, cut so that one ends where the prompt ends.",
    "adablock": "A block ends where the model is sure that a line ends.",
}
CACHES = {
    "auto": "The exact cache where there is one.",
    "exact": "Finished chunks are computed once; the text is the same as without.",
    "frozen": "Finished chunks keep the states they had: faster, an approximation.",
    "none": "Everything that can be seen is computed with every forward pass.",
}
DECODERS = {
    "sdar": ("threshold:0.85", "auto"),
    "dream-reasoner": ("threshold:0.85", "auto"),
    "tiny-a2d-bd3lm": ("position", "from-prompt"),
    "tiny-a2d-mdlm": ("position", "blocks:32"),
    "fast-dllm-v2": ("threshold:0.9", "sub-blocks:8"),
    "stable-diffcoder": ("threshold:0.95", "auto"),
    "llada": ("position", "blocks:128"),
    "illada": ("position", "blocks:128"),
    "dream": ("entropy-steps:512", "auto"),
    "open-dcoder": ("entropy-steps:128", "auto"),
    "diffullama": ("ancestral:64", "auto"),
}
"""What commit and routing "auto" mean for models of others (`ModelConfig.family`): how their authors decode."""
ADABLOCK = ("routing", "adablock")


@dataclass(frozen=True)
class AdaBlock:
    """Block ends at predicted delimiters; training-free, for BDLM and MDLM."""

    delimiters: tuple[int, ...]
    block_size: int
    least: float = 0.3
    """τ_D: the confidence that a delimiter needs."""
    window: int | None = None
    """Positions among which a delimiter is looked for; None means a quarter of the free ones."""

    def __post_init__(self) -> None:
        if not self.delimiters:
            raise ConfigError("routing='adablock' needs delimiters: the ids of the tokens at which blocks may end")
        if self.block_size < 1 or (self.window is not None and self.window < 1):
            raise ConfigError(f"adablock: block_size={self.block_size} and window={self.window} must be at least 1")
        if not 0 <= self.least <= 1:
            raise ConfigError(f"adablock: least={self.least} is a probability and must lie in [0, 1]")


@dataclass(frozen=True)
class DecodingConfig:
    """How a text is written; docs/decoding.md explains each choice. Texts with equal ones can share a batch.

    Fields may have bounds, for forms and requests, and a setting and its value that they need (`only_with`). The
    command line takes a `rare` one by --set and gives it no flag.
    """

    commit: str = "auto"
    """Which positions of the active chunk a forward pass fills: chunk, position, count:N, steps:N, dilated:N,
    threshold:P, entropy:H, entropy-steps:N, factor:F, ancestral:N or first-hitting; A+B what either fills."""
    routing: str = "auto"
    """Which chunk comes next: auto is the routing of the model's kind; paper-chunk, paper-step, paper-equal,
    paper-strided, appendix-b, blocks:N, sub-blocks:N, from-prompt and adablock where they fit."""
    temperature: float = field(default=1.0, metadata={"least": 0, "most": 100})
    """0 takes the most probable token, 1 draws as the model says."""
    top_p: float | None = field(default=None, metadata={"least": 0, "most": 1})
    """Draw from the most probable tokens that together reach this probability."""
    top_k: int | None = field(default=None, metadata={"least": 1, "most": 2**31 - 1, "rare": True})
    """Draw from the k most probable tokens."""
    lanes: int | None = field(default=None, metadata={"least": 1, "most": 4096})
    """For models that write in lanes: how many, so many tokens a forward pass; 1 is AR's order. By default 4, or
    the nearest smaller number that the model was trained with."""
    drafts: int | None = field(default=None, metadata={"least": 0, "most": 64})
    """For models with a draft head: how many tokens of each lane are drafted ahead and verified. By default as many
    as it was trained with; 0 writes one token of each lane a forward pass."""
    cache: str = "auto"
    """What is remembered between forward passes: exact where it is exact, none, or frozen, an approximation for the
    paper's routing."""
    delimiters: tuple[str, ...] = field(default=("\n",), metadata={"rare": True, "only_with": ADABLOCK})
    """For adablock: texts of one token each at which a block may end."""
    delimiter_threshold: float = field(
        default=0.3, metadata={"least": 0, "most": 1, "rare": True, "only_with": ADABLOCK}
    )
    """For adablock: the probability at which such a token ends a block."""
    adablock: AdaBlock | None = field(default=None, metadata={"derived": True})
    """What `delimiters` and `delimiter_threshold` mean in tokens. `resolve` fills it in; callers without a
    tokenizer may give it themselves."""

    @classmethod
    def of(cls, **options: Any) -> DecodingConfig:
        """From keywords as people write them: a list of `delimiters`, a `Sampling`."""
        if (sampling := options.pop("sampling", None)) is not None:
            options = asdict(sampling) | options
        known = [one.name for one in fields(cls)]
        if unknown := sorted(options.keys() - {*known}):
            known += ["max_new_tokens", "window", "seed"]
            near = get_close_matches(unknown[0], known, 1, cutoff=0.5)
            raise ConfigError(
                f"{unknown[0]} is not an option of decoding"
                + (f"; do you mean {near[0]}?" if near else f"; there are {', '.join(known)}")
            )
        if "delimiters" in options:
            given = options["delimiters"]
            options["delimiters"] = (given,) if isinstance(given, str) else tuple(given)
        return cls(**options)

    @cached_property
    def sampling(self) -> Sampling:
        """The distribution that tokens are drawn from."""
        from dcdm.decoding.commits import Sampling

        return Sampling(self.temperature, self.top_k, self.top_p)

    def resolve(self, config: ModelConfig, tokenizer: Tokenizer | None = None) -> DecodingConfig:
        """What "auto" means for a model, or a ConfigError that names what does not fit.

        `routing` stays "auto", the model's own, unless an imported family has another.
        """
        from dcdm.decoding.commits import commit_policy

        own_commit, own_routing = DECODERS.get(config.family or "", (default_commit(config), "auto"))
        routing = own_routing if self.routing == "auto" else self.routing
        check_routing(config, routing)
        adablock = self.adablock
        for one in settings():
            other, needed = one.only_with or ("", "")
            if one.only_with and getattr(self, other) != needed and getattr(self, one.name) != one.default:
                raise ConfigError(
                    f"{one.name} has no effect with {other}={getattr(self, other)!r}; set {other}={needed!r}"
                )
        if adablock is not None and self.routing != "adablock":
            raise ConfigError(f"adablock has no effect with routing={self.routing!r}; set routing='adablock'")
        if self.routing == "adablock" and adablock is None:
            if tokenizer is None:
                raise ConfigError("routing='adablock' needs adablock=AdaBlock(delimiters=…) or a tokenizer")
            adablock = adablock_of(config, tokenizer, self.delimiters, self.delimiter_threshold)
        commit = str(commit_policy(own_commit if self.commit == "auto" else self.commit))
        if config.predicts_from_left and commit != "chunk":
            raise ConfigError(
                f"commit={self.commit!r} fills part of a chunk, which a model that predicts from the left cannot; "
                "use commit='chunk'" + (", and lanes to choose the speed" if config.kind == "lanes" else "")
            )
        _ = self.sampling  # refuses what is not a distribution
        lanes = resolve_lanes(config, self.lanes)
        cache = resolve_cache(config, self.cache, self.routing)
        drafts = resolve_drafts(config, self.drafts, cache)
        return replace(
            self, commit=commit, routing=routing, adablock=adablock, cache=cache, lanes=lanes, drafts=drafts
        )

    def check_likelihood(self) -> None:
        """Refuse a decoder whose likelihood cannot be computed step by step."""
        from dcdm.decoding.commits import commit_policy

        if commit_policy(self.commit).random:
            raise ConfigError(
                f"commit={self.commit!r} fills in a random order, so its likelihood is a sum over all orders; "
                "estimator='bound' bounds it, and policies that look at probabilities have a trajectory"
            )
        if self.sampling.greedy:
            raise ConfigError("temperature=0 is greedy: such a decoder has no likelihood")

    @property
    def one_pass_per_chunk(self) -> bool:
        """Whether one training pass predicts everything that this decoder would."""
        plain = (self.temperature, self.top_k, self.top_p) == (1, None, None)
        return self.commit == "chunk" and self.routing == "auto" and plain


@dataclass(frozen=True)
class Setting:
    """A field of `DecodingConfig` as others show it."""

    name: str
    type: Any
    default: Any
    about: str
    least: float | None = None
    most: float | None = None
    rare: bool = False
    only_with: tuple[str, str] | None = None


@cache
def settings() -> tuple[Setting, ...]:
    """Every setting of a decoder in the order of the list, without what is derived from others."""
    types = get_type_hints(DecodingConfig)
    about = docstrings_of(DecodingConfig)
    return tuple(
        Setting(one.name, types[one.name], one.default, about[one.name], **one.metadata)
        for one in fields(DecodingConfig)
        if not one.metadata.get("derived")
    )


def fitting_settings(config: ModelConfig) -> list[Setting]:
    """Those that mean something for a model."""
    fits = {"lanes": config.kind == "lanes", "drafts": bool(config.drafts)}
    adaptive = "adablock" in fitting_routings(config)
    return [one for one in settings() if fits.get(one.name, True) and (adaptive or one.only_with != ADABLOCK)]


def docstrings_of(kind: type) -> dict[str, str]:
    """The docstrings below the fields of a dataclass, each in one line."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        str(below.target.id): " ".join(str(text.value.value).split())
        for below, text in pairwise(definition.body)
        if isinstance(below, ast.AnnAssign) and isinstance(below.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }  # fmt: skip


def described(config: ModelConfig) -> str:
    """The kind of a model as people call it."""
    if config.kind == "lanes":
        return "lanes"
    return f"DCDM with {config.routing} routing" if config.kind == "dcdm" else config.kind.upper()


def fitting_routings(config: ModelConfig) -> list[str]:
    """The routings that fit a model's kind; "auto", which is its own, comes first."""
    fits = ["auto"]
    if config.routes_from_noise:
        fits += ["paper-chunk", "paper-step", "paper-equal", "paper-strided", "appendix-b"]
    if config.kind in ("bdlm", "mdlm") and not config.predicts_from_left:
        fits += ["blocks", "sub-blocks"] if config.kind == "bdlm" else ["blocks"]
        fits += ["from-prompt"] if config.kind == "bdlm" and config.prompts == "ordinary" else ["adablock"]
    return fits


def check_routing(config: ModelConfig, name: str) -> None:
    """Refuse by name what does not fit the kind."""
    base, colon, number = name.partition(":")
    fits = fitting_routings(config)
    if base not in ROUTINGS:
        raise ConfigError(f"routing={name!r} is not known; choose one of {', '.join(ROUTINGS)}")
    if base not in fits:
        raise ConfigError(f"routing={name!r} does not fit {described(config)}; choose one of {', '.join(fits)}")
    if colon and (not base.endswith("blocks") or not re.fullmatch("0*[1-9][0-9]{0,8}", number)):
        raise ConfigError(f"routing={name!r}: only blocks and sub-blocks take a number, as in blocks:8")
    if name == "sub-blocks" or (name == "blocks" and config.block_size is None):
        raise ConfigError(f"routing={name!r} needs a block size, as in {name}:8")


def fitting_caches(config: ModelConfig) -> list[str]:
    """The caches that fit a model's kind; "auto" comes first."""
    return ["auto", "none", "frozen"] if config.routes_from_noise else ["auto", "exact", "none"]


def resolve_cache(config: ModelConfig, cache: str, routing: str = "auto") -> str:
    """The cache that "auto" means, or a refusal of what does not fit the kind and its routing."""
    if cache not in CACHES:
        raise ConfigError(f"cache={cache!r} is not known; choose one of {', '.join(CACHES)}")
    if config.routes_from_noise and cache == "exact":
        raise ConfigError(
            "cache='exact' is impossible with the paper's routing: every revealed token changes all states; "
            "use cache='none', or ask for the approximation by its name, cache='frozen'"
        )
    if not config.routes_from_noise and cache == "frozen":
        raise ConfigError("cache='frozen' is an approximation for the paper's routing; here use cache='exact'")
    if cache == "frozen" and routing == "appendix-b":
        raise ConfigError("cache='frozen' needs revealed tokens that stay visible; routing='appendix-b' hides some")
    if cache == "auto":
        return "none" if config.routes_from_noise else "exact"
    return cache


def resolve_lanes(config: ModelConfig, lanes: int | None) -> int | None:
    """The number of lanes that None means for a model, or a ConfigError where it does not fit."""
    if config.kind != "lanes":
        if lanes is not None:
            raise ConfigError(f"lanes={lanes} does not fit a model of kind {config.kind}; leave it out")
        return None
    if lanes is None:
        return config.default_lanes
    if whole_number("lanes", lanes) < 1:
        raise ConfigError(f"lanes={lanes} must be at least 1")
    return lanes


def resolve_drafts(config: ModelConfig, drafts: int | None, cache: str) -> int:
    """The number of tokens to draft ahead that None means, or a ConfigError where it does not fit."""
    if drafts is None:
        return 0 if cache == "none" else config.drafts
    if whole_number("drafts", drafts) < 0:
        raise ConfigError(f"drafts={drafts} must be at least 0; 0 drafts nothing ahead")
    if drafts and not config.drafts:
        raise ConfigError(
            f"drafts={drafts} needs a model with a draft head; train one of kind lanes with model.drafts={drafts}, "
            "or leave drafts out"
        )
    if drafts and cache == "none":
        raise ConfigError(f"drafts={drafts} needs the cache; leave cache='none' out, or set drafts=0")
    return min(drafts, config.max_position)


def lane_decoders(config: ModelConfig, numbers: Sequence[int] = (), cache: str = "auto") -> list[DecodingConfig]:
    """One for each number of lanes (default: those of training), and the same with drafts where there is a head."""
    return [
        DecodingConfig("chunk", cache=cache, lanes=number, drafts=drafts)
        for drafts in sorted({0, config.drafts})
        for number in numbers or config.lanes or ()
    ]


def default_commit(config: ModelConfig) -> str:
    if config.predicts_from_left:
        return "chunk"
    return "position" if config.kind == "ar" else "threshold:0.9"


def adablock_of(
    config: ModelConfig, tokenizer: Tokenizer, delimiters: Sequence[str] = ("\n",), least: float = 0.3
) -> AdaBlock:
    """Blocks end at the tokens that these texts are, by default at line ends."""
    ids = []
    for text in delimiters:
        tokens = tokenizer.encode(text)
        if len(tokens) != 1:
            raise ConfigError(f"delimiters: {text!r} is {len(tokens)} tokens of this tokenizer, not one")
        ids += tokens
    return AdaBlock(tuple(ids), config.block_size or 8, least)
