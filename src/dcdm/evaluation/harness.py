"""A model as the lm-evaluation-harness calls it. Importing this file makes it known there as `dcdm`.

A context is visible, a continuation is what is scored. Diffusion kinds give the bound of their kind, which is
exact where a continuation is so short that all its mask sets can be summed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal, cast, get_args

import lm_eval.models  # noqa: F401 (an empty registry would be taken for one that is still to be filled)
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from dcdm.config import ConfigError, WeightsType
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.caching import predictor_of
from dcdm.decoding.commits import View, commit_policy
from dcdm.decoding.config import DecodingConfig
from dcdm.decoding.engine import generate
from dcdm.decoding.loop import fill_canvas
from dcdm.decoding.routes import router_of
from dcdm.distributed import World, choose_device, gather_objects
from dcdm.io.load import find_model, load_model, weights_type
from dcdm.likelihood import estimators as likelihood
from dcdm.model.transformer import Model, PositionMasks

log = logging.getLogger(__name__)

BATCH_SIZE = 16
DEFAULT_DEVICE = "cuda:0"  # what the harness's command line passes without --device
SAMPLING = ("temperature", "top_k", "top_p")  # what the harness may ask for and `dcdm.generate` knows


@dataclass(frozen=True)
class Continuation:
    """One sequence to score: the first `given` tokens are visible; `index` keys the noise of the rest."""

    tokens: list[int]
    given: int
    index: int


def is_greedy(model: Model, tokens: Tensor, prompt: Tensor, index: Tensor, lanes: int | None = None) -> Tensor:
    """(B,) whether the most probable tokens are the true ones wherever `prompt` does not give them.

    AR is asked position by position, a diffusion model chunk by chunk: every chunk is filled in one
    forward pass, given the earlier ones.
    """
    positions = model.position_masks(tokens, prompt)
    if model.config.routes_from_noise:
        return _greedy_walk(model, tokens, positions, index)
    with torch.no_grad():
        if model.config.kind == "ar":
            states, truth, where = model.encode(tokens).states[:, :-1], tokens[:, 1:], positions.free[:, 1:]
        else:
            ids = model.partition(tokens, positions.visible, index, lanes).ids
            states = model.encode(tokens, positions.free, prompt=positions.visible, chunk_ids=ids).states
            truth, where = tokens, positions.free
        right = torch.ones_like(where)
        right[where] = model.token_logits(states[where]).argmax(dim=-1) == truth[where]
    return right.all(dim=-1)


def _greedy_walk(model: Model, tokens: Tensor, positions: PositionMasks, index: Tensor) -> Tensor:
    right = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)

    def reveal(view: View, fill: Tensor) -> Tensor:
        true = tokens.gather(1, view.position)
        right.logical_and_(((view.predicted.best[1] == true) | ~fill).all(dim=-1))
        return true

    z = tokens.masked_fill(positions.free, model.config.mask_id)
    router, predictor = router_of(model, positions, index), predictor_of(model, positions, "auto")
    fill_canvas(z, positions, router, predictor, commit_policy("chunk"), reveal)
    return right


class Estimate(float):
    """A log-likelihood that carries its Monte-Carlo standard error through the harness."""

    stderr: float

    def __new__(cls, value: float, stderr: float = 0.0) -> Estimate:
        estimate = super().__new__(cls, value)
        estimate.stderr = stderr
        return estimate


@dataclass
class RequestCounts:
    """What did not fit into the window, and what the Monte-Carlo errors come to."""

    requests: int = 0
    cut_contexts: int = 0
    cut_tokens: int = 0
    split_continuations: int = 0
    windowed_generations: int = 0
    stderr_sum: float = 0.0
    stderr_max: float = 0.0


@register_model("dcdm")
class HarnessModel(TemplateLM):
    """Answers the harness's requests.

    `pretrained` is a run folder, a checkpoint in it, an exported folder, or a model with its tokenizer.
    `samples` mask draws per continuation give a bound; a continuation with no more mask sets than that is summed
    exactly. Seeds: noise follows from `seed` and the question, so that the choices of a question share it and
    neither the batch size nor the order of the requests matters. `max_length` defaults to the window of training.
    Further arguments are fields of `DecodingConfig` and choose the decoder of generated text; `lanes` holds for
    likelihoods, too, and is one, the model's best, by default. The processes of a `world` share the batches; all of
    them have all answers, the same to the last digit as one process would give.
    """

    def __init__(
        self,
        pretrained: str | Path | tuple[Model, Tokenizer],
        device: str = "auto",
        dtype: str = "fp32",
        batch_size: int | str = BATCH_SIZE,
        max_batch_size: int | None = None,
        samples: int = 16,
        seed: int = 0,
        estimator: likelihood.Estimator | Literal["auto"] = "auto",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool = True,
        world: World | None = None,
        **decoding: Any,
    ) -> None:
        super().__init__()
        self.world = world or World()
        if isinstance(pretrained, tuple):
            config, tokenizer = pretrained[0].config, pretrained[1]
        else:
            source = find_model(str(pretrained))
            config, tokenizer = source.config, source.tokenizer
        self.estimator = likelihood.estimators_of(config)[0] if estimator == "auto" else estimator
        if samples == 1:
            raise ConfigError("samples=1 gives no Monte-Carlo error; take at least 2")
        likelihood.check(config, self.estimator, samples)
        if config.kind == "lanes" and decoding.get("lanes") is None:
            decoding["lanes"] = 1
        self.decoder = DecodingConfig.of(**decoding).resolve(config, tokenizer)
        self.is_ar = config.kind == "ar"
        if not add_bos_token and not self.is_ar:
            raise ConfigError("add_bos_token=False needs an AR model: the others are trained with BOS in front")
        self.batch_size = _batch_size(batch_size)
        self.samples, self.seed, self.add_bos_token = samples, seed, add_bos_token
        self.max_length = config.context_length if max_length is None else int(max_length)
        if not 4 <= self.max_length <= config.max_position:
            raise ConfigError(f"max_length={self.max_length} must lie between 4 and {config.max_position}")
        self.model, self.text = pretrained if isinstance(pretrained, tuple) else load(pretrained, device, dtype)
        self.max_gen_toks = max_gen_toks
        self.counts = RequestCounts()
        self._device = next(self.model.parameters()).device

    # --- what the harness asks for ---

    @property
    def eot_token_id(self) -> int:
        return self.text.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.text.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self.text.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text; BOS stands in front unless `add_special_tokens` is False."""
        with_bos = self.add_bos_token if add_special_tokens is None else add_special_tokens
        return [self.text.bos_id] * with_bos + self.text.encode(string)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness adds to its results: how the figures were made, and what did not fit."""
        parameters = sum(p.numel() for p in self.model.parameters())
        return {"model_num_parameters": parameters, **self.settings(), **asdict(self.counts)}

    def settings(self) -> dict[str, Any]:
        """What decides an answer, beside weights and tokenizer."""
        return {
            "model_kind": self.model.config.kind, "estimator": self.estimator,
            "estimator_label": likelihood.LABELS[self.estimator], "samples": self.samples, "noise_seed": self.seed,
            "max_length": self.max_length, "max_new_tokens": self.max_gen_toks,
            "add_bos_token": self.add_bos_token, **asdict(self.decoder),
        }  # fmt: skip

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pieces = [self._pieces(r.args[0], r.args[1], _question(r)) for r in requests]
        return [*self._sums(pieces, disable_tqdm)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        pieces = [self._windows(*request.args) for request in requests]
        return [estimate for estimate, _ in self._sums(pieces, disable_tqdm)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """The harness's entry for requests that are tokens already."""
        rows = [[self._row(context, answer, _number("tokens", *context))] for _, context, answer in requests]
        return [*self._sums(rows, True)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        seen: dict[str, int] = {}
        jobs = []
        for place, request in enumerate(requests):
            context, settings = request.args
            seen[context] = seen.get(context, -1) + 1  # repeated requests are to be answered differently
            jobs.append(self._job(place, context, settings, _number(context, seen[context])))
        jobs.sort(key=lambda job: (job.settings_key, -len(job.prompt)))
        alike = (list(same) for _, same in groupby(jobs, key=lambda job: job.settings_key))
        batches = [batch for same in alike for batch in _batches(same, self.batch_size)]
        answers = [""] * len(jobs)
        for batch, texts in zip(batches, self._shared(batches, self._generate, disable_tqdm), strict=True):
            for job, text in zip(batch, texts, strict=True):
                answers[job.place] = text
        return answers

    def _shared(self, batches: list[Any], answer: Callable[[Any], list[Any]], quiet: bool) -> list[list[Any]]:
        """The answers to all batches, of which this process works out its share."""
        rank, size = self.world.rank, self.world.size
        mine, found = batches[rank::size], []
        with _bar(sum(map(len, mine)), quiet or not self.world.is_main) as bar:
            for batch in mine:
                found.append(answer(batch))
                bar.update(len(batch))
        every = gather_objects(found, self.world)
        return [every[number % size][number // size] for number in range(len(batches))]

    # --- rows ---

    def _pieces(self, context: str, continuation: str, question: tuple[object, ...]) -> list[Continuation]:
        """The rows whose scores add up to that of a continuation: one, unless it is longer than the window."""
        if context:
            shown, answer = self._encode_pair(context, continuation)
        else:
            shown, answer = [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)
        if not answer:
            raise ValueError(f"the continuation {continuation!r} has no tokens of its own after its context")
        if len(answer) < self.row_length:
            return [self._row(shown, answer, _number(*question))]
        self.counts.split_continuations += 1
        step, tokens, rows = self.row_length // 2, shown + answer, []
        for number, start in enumerate(range(len(shown), len(tokens), step)):
            piece = tokens[start : start + step]
            rows.append(self._row(tokens[:start], piece, _number(*question, number), counts=start == len(shown)))
        return rows

    def _windows(self, string: str) -> list[Continuation]:
        """The harness's rolling windows: each token is predicted once, with one token of context carried over."""
        room = self.max_length if self.is_ar else self.max_length - 2  # BOS and the token carried over
        windows = get_rolling_token_windows(self.text.encode(string), self.prefix_token_id, room, context_len=1)
        pairs = map(make_disjoint_window, windows)
        return [self._row(a, b, _number("rolling", string, number)) for number, (a, b) in enumerate(pairs)]

    @property
    def row_length(self) -> int:
        """Tokens of a row; the last token of an AR row is predicted and never an input."""
        return self.max_length + self.is_ar

    def _row(self, context: list[int], answer: list[int], index: int, counts: bool = True) -> Continuation:
        """Context and answer, the context cut on the left where both do not fit.

        BOS stays in front for diffusion kinds, which are never without it; AR rows are cut as by the harness's
        own Hugging Face model.
        """
        room = self.row_length - len(answer)
        kept = context[-room:]
        if not self.is_ar:
            body = context[1:] if context[0] == self.text.bos_id else context
            kept = [self.text.bos_id, *(body[-(room - 1) :] if room > 1 else [])]
        if counts and len(kept) < len(context):
            self.counts.cut_contexts += 1
            self.counts.cut_tokens += len(context) - len(kept)
        return Continuation(kept + answer, len(kept), index)

    # --- scores ---

    def _sums(self, pieces: list[list[Continuation]], quiet: bool) -> list[tuple[Estimate, bool]]:
        """For each list of rows the sum of their log-likelihoods, and whether all of them are greedy."""

        def lengths(owner: int) -> tuple[int, int]:  # answers of like length need like numbers of passes
            first = pieces[owner][0]
            return len(first.tokens) - first.given, -len(first.tokens)

        order = sorted((owner for owner, rows in enumerate(pieces) if rows), key=lengths)
        owners = [owner for owner in order for _ in pieces[owner]]
        batches = _batches([row for owner in order for row in pieces[owner]], self.batch_size)
        scored = chain.from_iterable(self._shared(batches, self._score, quiet))
        parts: list[list[tuple[float, float, bool]]] = [[] for _ in pieces]
        for owner, part in zip(owners, scored, strict=True):
            parts[owner].append(part)
        return [self._answer(part) for part in parts]

    def _answer(self, parts: list[tuple[float, float, bool]]) -> tuple[Estimate, bool]:
        estimate = Estimate(sum(nats for nats, _, _ in parts), sum(error**2 for _, error, _ in parts) ** 0.5)
        if parts:  # none: a text without tokens
            self.counts.requests += 1
            self.counts.stderr_sum += estimate.stderr
            self.counts.stderr_max = max(self.counts.stderr_max, estimate.stderr)
        return estimate, all(greedy for *_, greedy in parts)

    def _score(self, rows: list[Continuation]) -> list[tuple[float, float, bool]]:
        width = max(len(row.tokens) for row in rows)
        tokens = torch.full((len(rows), width), self.model.config.pad_id)
        for number, row in enumerate(rows):
            tokens[number, : len(row.tokens)] = torch.tensor(row.tokens)
        prompt = torch.arange(width) < torch.tensor([row.given for row in rows])[:, None]
        tokens, prompt = tokens.to(self._device), prompt.to(self._device)
        index = torch.tensor([row.index for row in rows])
        score = likelihood.score(
            self.model, tokens, self.estimator, self.samples, self.seed,
            prompt=prompt, index=index, batch_size=len(rows), lanes=self.decoder.lanes,
        )  # fmt: skip
        greedy = is_greedy(self.model, tokens, prompt, index, self.decoder.lanes)
        return list(zip((-score.nats).tolist(), score.stderr.tolist(), greedy.tolist(), strict=True))

    # --- text ---

    def _job(self, place: int, context: str, settings: dict[str, Any], index: int) -> _Job:
        asked = dict(normalize_gen_kwargs(settings, self.max_gen_toks))
        room = min(asked["max_gen_toks"], self.max_length // 2)  # what does not fit comes in further windows
        self.counts.windowed_generations += room < asked["max_gen_toks"]
        return _Job(place, asked, self._row(self.tok_encode(context), [0] * room, 0).tokens[:-room], index)

    def _generate(self, jobs: list[_Job]) -> list[str]:
        asked = dict(jobs[0].settings)
        until = [term for term in asked.pop("until", []) if term]
        sampling = {name: asked.pop(name) for name in SAMPLING if asked.get(name) is not None}
        if not asked.pop("do_sample", False):
            sampling = {"temperature": 0.0}
        wanted = asked.pop("max_gen_toks")
        if asked:
            log.warning("generation settings that have no meaning here: %s", ", ".join(sorted(asked)))

        def stop(row: int, ids: list[int]) -> bool:
            return any(term in self.text.decode(ids) for term in until)

        prompts = [job.prompt for job in jobs]
        done = generate(
            self.model, prompts, max_new_tokens=wanted, seed=self.seed, eos_id=self.text.eos_id,
            index=[job.index for job in jobs], stop=stop if until else None, batch_size=len(jobs),
            window=self.max_length, decoding=replace(self.decoder, **sampling),
        )  # fmt: skip
        texts = [self.text.decode(completion) for completion in done.completions]
        return [postprocess_generated_text(text, until, None) for text in texts]


@dataclass(frozen=True)
class _Job:
    place: int
    settings: dict[str, Any]
    prompt: list[int]
    index: int

    @property
    def settings_key(self) -> str:
        return json.dumps(self.settings, sort_keys=True)


def load(path: str | Path, device: str, dtype: str) -> tuple[Model, Tokenizer]:
    """A model for evaluation; `device` may be auto."""
    if dtype not in get_args(WeightsType):
        raise ConfigError(f"dtype={dtype!r} is not known; choose one of {', '.join(get_args(WeightsType))}")
    chosen = choose_device("auto" if device == DEFAULT_DEVICE else device)
    return load_model(path, device=chosen, dtype=weights_type(cast(WeightsType, dtype), chosen))


def _batch_size(value: int | str) -> int:
    """The harness passes text, and `auto`, which here is a fixed number."""
    if isinstance(value, str) and value.startswith("auto"):
        return BATCH_SIZE
    if not str(value).isdecimal() or int(value) < 1:
        raise ConfigError(f"batch_size={value!r} must be a whole number of at least 1, or auto")
    return int(value)


def _question(request: Instance) -> tuple[object, ...]:
    """What the choices of one question have in common: their document, or, without one, their context."""
    return ("context", request.args[0]) if not request.doc else (json.dumps(request.doc, default=str),)


def _number(*parts: object) -> int:
    """A number for a key, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def _batches(items: list[Any], size: int) -> list[list[Any]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def _bar(total: int, quiet: bool) -> Any:
    """A progress bar on a terminal, also where the harness's own bars are sent away."""
    return tqdm(total=total, disable=True if quiet else None, file=sys.__stderr__)
