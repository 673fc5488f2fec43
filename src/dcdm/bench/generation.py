"""`dcdm bench generate`: speed and quality of every decoder of trained models, side by side.

Speed is that of unconditional samples; quality the exact trajectory likelihood of held-out text under the same
decoder (or, where it fills in random order, a bound of it). A saving in forward passes is never shown without its
cost.

`dcdm bench peers`: one text by a model in AR order, in lanes and with drafts, in fp32 and in bytes, and by
`generate` of `transformers`, whose network gets the model's own weights: both compute the same logits for the same
tokens. With a GGUF file of the model also by llama.cpp, where `llama_cpp` is installed.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dcdm.bench.paths import Case, Run, environment
from dcdm.config import ConfigError, ModelConfig, many
from dcdm.data.loader import pack
from dcdm.data.sources import stdlib_documents
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.commits import commit_policy
from dcdm.decoding.config import DecodingConfig, adablock_of, described, lane_decoders
from dcdm.decoding.engine import generate
from dcdm.io.load import load_model
from dcdm.keys import Key
from dcdm.kinds import OWN_PARTS
from dcdm.likelihood.estimators import scorer_of
from dcdm.likelihood.statistics import mean_and_stderr, with_stderr
from dcdm.model.kernels import prepare, unsupported
from dcdm.model.masks import CLEAN, Slots
from dcdm.model.packing import can_pack
from dcdm.model.transformer import Model
from dcdm.viewing.tables import Table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMMITS = (
    "chunk", "steps:4", "position", "threshold:0.9", "threshold:0.7", "entropy:0.5", "factor:1", "ancestral:8",
    "first-hitting",
)  # fmt: skip


@dataclass(frozen=True)
class DecoderTiming:
    model: str
    kind: str
    routing: str
    commit: str
    cache: str
    tokens_per_second: float
    forwards: float
    """Per sample."""
    tokens_per_forward: float
    computed: float
    """Positions through all blocks, per token."""
    bits: float
    """Per token of held-out text."""
    bits_stderr: float
    """Over windows."""
    nats_per_byte: float
    """Of the same text."""
    nats_per_byte_stderr: float
    measure: str
    """What `bits` is: trajectory (exact) or bound."""


def decoders_of(model: Model, tokenizer: Tokenizer) -> list[DecodingConfig]:
    """Every decoder that makes sense for the model."""
    config = model.config
    if config.kind == "ar":
        return [DecodingConfig("position", cache=cache) for cache in ("exact", "none")]
    if config.predicts_from_left:
        return lane_decoders(config, cache="exact") or [DecodingConfig("chunk", cache="exact")]
    caches = ("none", "frozen") if config.routes_from_noise else ("exact", "none")
    decoders = [DecodingConfig(commit, cache=cache) for cache in caches for commit in COMMITS]
    if config.routes_from_noise:
        routings = ("paper-step", "appendix-b")
        decoders += [DecodingConfig("threshold:0.9", routing, cache="none") for routing in routings]
    if config.kind in ("bdlm", "mdlm"):
        adablock = adablock_of(config, tokenizer)
        decoders.append(DecodingConfig("threshold:0.9", "adablock", adablock=adablock, cache="exact"))
    if config.kind == "mdlm":
        decoders.append(DecodingConfig("threshold:0.9", "blocks:16", cache="exact"))
    return decoders


def measure_decoders(
    path: str, samples: int, windows: int, seed: int, say: Callable[[str], None]
) -> list[DecoderTiming]:
    """All decoders of one model: `samples` texts of a window each, `windows` of held-out text."""
    model, tokenizer = load_model(path)
    held_out = _held_out(model, tokenizer, windows)
    sizes = [sum(map(len, tokenizer.pieces(window))) for window in held_out.tolist()]
    rows = []
    generate(model, [[]] * samples, window=model.config.context_length, seed=seed)  # warm-up
    for decoder in decoders_of(model, tokenizer):
        say(f"{path}: {decoder.routing} {_commit(decoder)} cache={decoder.cache}")
        costs = generate(model, [[]] * samples, decoding=decoder, seed=seed, batch_size=samples).statistics
        nats, tokens = _score(model, held_out, decoder, seed)
        bits, error = mean_and_stderr(zip(nats, tokens, strict=True))
        drafted = bool(decoder.drafts) and decoder.lanes != 1
        what = "bound" if commit_policy(decoder.commit).random or drafted else "trajectory"
        rows.append(
            DecoderTiming(
                Path(path).name, kind_of(model.config), decoder.routing, _commit(decoder), decoder.cache,
                costs.tokens_per_second, float(costs.forwards.double().mean()), costs.tokens_per_forward,
                float(costs.computed.sum() / costs.new_tokens.sum()), bits / math.log(2), error / math.log(2),
                *mean_and_stderr(zip(nats, sizes, strict=True)), what,
            )
        )  # fmt: skip
    return rows


def kind_of(config: ModelConfig) -> str:
    """What the table calls a model: its kind, and the partition that its chunks follow in fact."""
    kind = str(config.kind)
    if config.kind == "dcdm":
        kind = f"dcdm-{config.prior if config.prior_decides else config.routing}"
    return f"{kind}, from the left" if config.predicts_from_left and config.kind != "lanes" else kind


def _commit(decoder: DecodingConfig) -> str:
    """The policy as the table calls it."""
    if decoder.lanes is None:
        return decoder.commit
    return many(decoder.lanes, "lane") + (f", {many(decoder.drafts, 'draft')}" if decoder.drafts else "")


def _held_out(model: Model, tokenizer: Tokenizer, windows: int) -> Tensor:
    """Windows of the standard library's validation files, spread over all of them."""
    packed = pack(stdlib_documents("validation"), tokenizer, model.config.context_length)
    return packed[Key(0).permutation(len(packed))[:windows]]


@torch.no_grad()
def _score(model: Model, tokens: Tensor, decoder: DecodingConfig, seed: int) -> tuple[list[float], list[int]]:
    """−log p and tokens of each window, walking the decoder along it.

    This is exact for a decoder whose order follows from probabilities. One of random order is walked along one
    order drawn for each window, one with drafts along one acceptance pattern: on average a bound.
    """
    scorer = scorer_of(model, 1, Key(seed).fold("order"), decoder)
    walk = getattr(scorer, "drafted" if decoder.drafts else "trajectory")
    part = walk(tokens, model.position_masks(tokens), torch.arange(len(tokens)))
    return part.by_position.sum(dim=-1).tolist(), part.tokens.tolist()


def measure_generation(
    models: Sequence[Path], samples: int, windows: int, as_json: bool, say: Callable[[str], None]
) -> None:
    """A table or one line of JSON on the terminal."""
    if not models:
        raise ConfigError("dcdm bench generate needs trained models: --models runs/a runs/b …")
    rows = [row for path in models for row in measure_decoders(str(path), samples, windows, 0, say)]
    if as_json:
        print(json.dumps({"environment": environment(), "rows": [asdict(row) for row in rows]}))
        return
    text = ("kind", "routing", "commit", "cache", "measure")
    columns = (
        "kind", "routing", "commit", "cache", "tokens/s", "forward passes", "tokens/pass", "computed/token",
        "bits/token", "nats/byte", "measure",
    )  # fmt: skip
    lines = [
        (
            r.kind, r.routing, r.commit, r.cache, f"{r.tokens_per_second:.0f}", f"{r.forwards:.1f}",
            f"{r.tokens_per_forward:.2f}", f"{r.computed:.1f}", with_stderr(r.bits, r.bits_stderr, 3),
            with_stderr(r.nats_per_byte, r.nats_per_byte_stderr, 3), r.measure,
        )
        for r in rows
    ]  # fmt: skip
    Table(columns, lines, text).print()


# --- beside peers ------------------------------------------------------------------------------------------------


THEIRS = "generate of transformers"
TOKENS = 128
TEXTS = (1, 8, 32)


def beside_peers(
    folder: Path | None, adapter: Path | None, gguf: Path | None, tokens: int, say: Callable[[str], None],
    compile: bool = True,
) -> list[Case]:  # fmt: skip
    """One text of `tokens`, one pass over a prompt and one over a token, of a model that writes in lanes or in AR
    order, with an adapter or a draft head."""
    if folder is None:
        raise ConfigError("dcdm bench peers needs a model: --models runs/smol")
    model, _ = load_model(folder, adapter=adapter)
    config = model.config
    if config.kind not in ("ar", "lanes") or config.has_chunking or config.moe is not None:
        raise ConfigError(
            f"{folder}: transformers has no network for {described(config)}; give a dense AR or lane model"
        )
    theirs: Any = network_of_transformers(model)
    start = torch.tensor([[config.bos_id]])
    models = {"": model}
    if can_pack(torch.device("cpu")):
        models[", int8"] = load_model(folder, dtype=torch.int8, adapter=adapter)[0]
    for one in models.values():
        if reason := unsupported(one):
            say(f"not compiled: {reason}")
        elif compile:
            prepare(one, compile=True)

    def ours(suffix: str, lanes: int | None, drafts: int = 0, texts: int = 1) -> Callable[[], Run]:
        def run() -> None:
            generate(
                models[suffix], [[]] * texts, max_new_tokens=tokens, temperature=0.0, lanes=lanes, drafts=drafts,
                batch_size=texts,
            )  # fmt: skip

        return lambda: run

    @torch.no_grad()
    def generate_of_transformers(**assisted: int) -> None:
        theirs.generate(
            start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=tokens,
            min_new_tokens=tokens, **assisted,
        )  # fmt: skip

    paths: dict[str, Callable[[], Run]] = {}
    for suffix in models:
        for lanes in sorted(config.lanes or (), reverse=True):
            name = many(lanes, "lane")
            if lanes > 1:
                paths[name + suffix] = ours(suffix, lanes)
            if config.drafts:
                paths[f"{name}, {many(config.drafts, 'draft')}{suffix}"] = ours(suffix, lanes, config.drafts)
        paths[f"AR order{suffix}"] = ours(suffix, None if config.lanes is None else 1)
    together = {
        f"{many(texts, 'text')}{suffix}": ours(suffix, None if config.lanes is None else 1, 0, texts)
        for suffix in models
        for texts in TEXTS
    }
    paths[THEIRS] = lambda: generate_of_transformers
    paths[f"{THEIRS}, prompt lookup"] = lambda: partial(generate_of_transformers, prompt_lookup_num_tokens=3)
    if gguf is not None:
        paths |= _llama_cpp(gguf, tokens, say)
    prompt = torch.randint(config.bos_id, (1, min(1000, config.max_position)))
    prompt[:, 0] = config.bos_id

    def passing(network: Callable[[Tensor], object]) -> Callable[[], Run]:
        @torch.no_grad()
        def run() -> None:
            network(prompt)

        return lambda: run

    prefill = {f"a pass{suffix}": passing(one.encode) for suffix, one in models.items()}
    prefill["a pass of transformers"] = passing(theirs.model)
    words = torch.ones(sum(p.numel() for p in model.parameters()))

    def reading() -> None:
        words.sum()

    step = {f"one token{suffix}": _one_token(one) for suffix, one in models.items()}
    return [
        Case(f"one text of {tokens} tokens", paths, (THEIRS,)),
        Case(f"texts of {tokens} tokens together, in AR order", together, ()),
        Case(f"a prompt of {prompt.shape[1]} tokens", prefill, ("a pass of transformers",)),
        Case("a pass over one token behind 64", {**step, "reading fp32": lambda: reading}, ("reading fp32",)),
    ]


def _one_token(model: Model) -> Callable[[], Run]:
    """A pass through all blocks and the head, as decoding makes it, behind 64 tokens."""

    @torch.no_grad()
    def make() -> Run:
        cache = model.new_cache(1, 80)
        place = torch.arange(65)[None]
        slots = Slots.of(place, stream=CLEAN)
        prompt = place[:, :64].clamp(max=model.config.bos_id)
        model.extend(prompt, slots[:, :64], prompt >= 0, cache, 1)

        @torch.no_grad()
        def run() -> None:
            model.token_logits(model.extend(place[:, :1], slots[:, 64:], place[:, :1] < 0, cache, 1))

        return run

    return make


def _llama_cpp(gguf: Path, tokens: int, say: Callable[[str], None]) -> dict[str, Callable[[], Run]]:
    """One text by llama.cpp on as many threads; nothing where it is not installed."""
    try:
        llama_cpp: Any = importlib.import_module("llama_cpp")
    except ImportError:
        say("llama.cpp is left out: it is not installed (pip install llama-cpp-python compiles it)")
        return {}
    threads = torch.get_num_threads()
    theirs = llama_cpp.Llama(str(gguf), n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run() -> None:
        theirs.reset()
        for _ in itertools.islice(theirs.generate([theirs.token_bos()], temp=0.0), tokens):
            pass

    return {f"llama.cpp, {gguf.name}": lambda: run}


def network_of_transformers(model: Model) -> PreTrainedModel:
    """A causal language model of `transformers` with the weights of a dense AR or lane model."""
    import transformers

    config = model.config
    family = "Qwen3" if config.qk_norm else "Qwen2" if config.attention_bias else "Llama"
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_eps, "rope_parameters": _rope(config),
        "max_position_embeddings": config.max_position, "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id, "pad_token_id": config.pad_id, "eos_token_id": None,
    }  # fmt: skip
    network = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**settings))
    weights = {
        name if name.startswith("lm_head") else f"model.{name}": value
        for name, value in model.state_dict().items()
        if not name.startswith(OWN_PARTS)
    }
    missing, unexpected = network.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    network.tie_weights()
    return network.to(model.embed_tokens.weight.dtype).eval()


def _rope(config: ModelConfig) -> dict[str, Any]:
    if config.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    return {
        "rope_type": "llama3", "rope_theta": config.rope_theta, "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    }  # fmt: skip
