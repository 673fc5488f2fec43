"""The choices that make a decoder: one `DecodingConfig` for sampling, likelihoods, benchmarks and the server.

Prompt, length and seed are a text's own; everything else that decides how it is written stands here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TypedDict, Unpack

from dcdm.config import ConfigError, ModelConfig, whole_number
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.commits import commit_policy
from dcdm.decoding.predictors import resolve_cache
from dcdm.decoding.routes import AdaBlock, check_routing, described
from dcdm.decoding.sampling import Sampling
from dcdm.model.routing import default_lanes


class DecodingOptions(TypedDict, total=False):
    """The same choices as keywords, for `dcdm.generate`."""

    routing: str
    commit: str
    temperature: float
    top_k: int | None
    top_p: float | None
    cache: str
    adablock: AdaBlock | None
    lanes: int | None
    drafts: int | None
    revise: Revise | float | None


@dataclass(frozen=True)
class Revise:
    """Which tokens of a draft are masked again: those the model is least sure of, given the others.

    A token's probability is the model's with every `groups`-th token hidden beside it.
    """

    share: float | None = None
    """This part of the tokens, the least probable first."""
    threshold: float | None = None
    """All tokens with a smaller probability."""
    rounds: int = 1
    """How often: each round looks at what the one before it has written."""
    groups: int = 4

    def __post_init__(self) -> None:
        if (self.share is None) == (self.threshold is None):
            raise ConfigError("revise: give a share or a threshold, one of them")
        for name, value in (("share", self.share), ("threshold", self.threshold)):
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"revise: {name}={value} must lie in (0, 1]")
        if self.rounds < 1 or self.groups < 1:
            raise ConfigError(f"revise: rounds={self.rounds} and groups={self.groups} must be at least 1")

    @classmethod
    def of(cls, given: Revise | float | None) -> Revise | None:
        """As it is; a number is a share."""
        return cls(share=given) if isinstance(given, int | float) else given


@dataclass(frozen=True)
class DecodingConfig:
    """How a text is written; docs/decoding.md explains each choice. Texts with equal ones can share a batch."""

    commit: str = "auto"
    """Which positions of the active chunk a forward fills: "chunk", "position", "threshold:0.9", …"""
    routing: str = "auto"
    """Which chunk comes next; "auto" is the routing of the model's kind."""
    adablock: AdaBlock | None = None
    """Block ends, for routing "adablock"."""
    sampling: Sampling = field(default_factory=Sampling)
    cache: str = "auto"
    """"exact", "none", or "frozen" (an approximation for the paper's routing)."""
    lanes: int | None = None
    """For models that write in lanes: how many, so many tokens a forward; None is the model's default."""
    revise: Revise | None = None
    """Prompts are drafts, of which the least sure tokens are written again."""
    drafts: int | None = None
    """For models with a draft head: how many tokens of each lane are guessed ahead; None is the model's number."""

    @classmethod
    def of(cls, **options: Unpack[DecodingOptions]) -> DecodingConfig:
        """From flat keywords: temperature, top_k and top_p beside the fields."""
        if unknown := sorted(options.keys() - DecodingOptions.__annotations__.keys()):
            known = (*DecodingOptions.__annotations__, "max_new_tokens", "window", "seed")
            near = get_close_matches(unknown[0], known, 1, cutoff=0.5)
            raise ConfigError(
                f"{unknown[0]} is not an option of decoding"
                + (f"; do you mean {near[0]}?" if near else f"; there are {', '.join(known)}")
            )
        sampling = Sampling(options.get("temperature", 1.0), options.get("top_k"), options.get("top_p"))
        return cls(
            options.get("commit", "auto"),
            options.get("routing", "auto"),
            options.get("adablock"),
            sampling,
            options.get("cache", "auto"),
            options.get("lanes"),
            Revise.of(options.get("revise")),
            options.get("drafts"),
        )

    def resolve(self, config: ModelConfig, tokenizer: Tokenizer | None = None) -> DecodingConfig:
        """Every "auto" replaced by what it means for a model, or a ConfigError that names what does not fit."""
        check_routing(config, self.routing)
        adablock = self.adablock
        if adablock is not None and self.routing != "adablock":
            raise ConfigError(f"adablock has no effect with routing={self.routing!r}; set routing='adablock'")
        if self.routing == "adablock" and adablock is None:
            if tokenizer is None:
                raise ConfigError("routing='adablock' needs adablock=AdaBlock(delimiters=…) or a tokenizer")
            adablock = adablock_of(config, tokenizer)
        commit = str(commit_policy(default_commit(config) if self.commit == "auto" else self.commit))
        if config.predicts_from_left and commit != "chunk":
            raise ConfigError(
                f"commit={self.commit!r} fills part of a chunk, which a model that predicts from the left cannot; "
                "use commit='chunk'" + (", and lanes to choose the speed" if config.kind == "lanes" else "")
            )
        if self.revise is not None and (config.kind == "ar" or config.predicts_from_left):
            raise ConfigError(
                f"revise does not fit {described(config)}, which sees nothing behind a token; use MDLM, BDLM, DCDM"
            )
        lanes = resolve_lanes(config, self.lanes)
        cache = resolve_cache(config, self.cache, self.routing)
        drafts = resolve_drafts(config, self.drafts, cache)
        return replace(self, commit=commit, adablock=adablock, cache=cache, lanes=lanes, drafts=drafts)

    def check_likelihood(self) -> None:
        """Refuse a decoder whose likelihood cannot be computed step by step."""
        if self.revise is not None:
            raise ConfigError(
                "revise writes tokens again, so the likelihood of its texts is a sum over all drafts; leave it out"
            )
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
        return self.commit == "chunk" and self.routing == "auto" and self.sampling == Sampling()


def resolve_lanes(config: ModelConfig, lanes: int | None) -> int | None:
    """The number of lanes that None means for a model, or a refusal of what does not fit."""
    if config.kind != "lanes":
        if lanes is not None:
            raise ConfigError(f"lanes={lanes} does not fit a model of kind {config.kind}; leave it out")
        return None
    if lanes is None:
        return default_lanes(config)
    if whole_number("lanes", lanes) < 1:
        raise ConfigError(f"lanes={lanes} must be at least 1")
    return lanes


def resolve_drafts(config: ModelConfig, drafts: int | None, cache: str) -> int:
    """The number of tokens to guess ahead that None means, or a refusal of what does not fit."""
    if drafts is None:
        return 0 if cache == "none" else config.drafts
    if whole_number("drafts", drafts) < 0:
        raise ConfigError(f"drafts={drafts} must be at least 0; 0 guesses nothing ahead")
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
