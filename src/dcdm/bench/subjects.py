"""What can be measured. Shapes are those of `dcdm-0.1b-k8` with batch 1 unless a case says otherwise.

Literal means `model/reference.py`: explicit softmax over dense masks, K softmax matrices, all logits. Its
attention alone swapped for SDPA with the dense mask is a second baseline, and the only one where the
explicit softmax no longer fits into memory.

`python -m dcdm.bench.subjects SUBJECT CASE PATH THREADS` prints the peak memory of one path in a fresh process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from dcdm.bench.harness import Case, Run, forget_peak, peak_megabytes
from dcdm.config import ConfigError, ModelConfig, ObjectiveConfig
from dcdm.decoding import predictors, routes
from dcdm.decoding.engine import generate
from dcdm.diffusion.objectives import Batch, draw, loss
from dcdm.keys import Key
from dcdm.model import blockmask, layout, masks, reference
from dcdm.model.attention import AttentionPlan, Backend, attend
from dcdm.model.blocks import Experts
from dcdm.model.chunking import subspace_mixture
from dcdm.model.head import weighted_nll
from dcdm.model.masks import Slots
from dcdm.model.transformer import Model, build
from dcdm.presets import preset

LITERAL_FITS = 2048  # beyond this length explicit softmax over z ⊕ x needs more memory than a laptop has
PLAIN = ObjectiveConfig(prompt_share=0.0)


def _config(length: int, layers: int, routing: str = "paper") -> ModelConfig:
    return replace(preset("dcdm-0.1b-k8"), num_layers=layers, context_length=length, routing=routing)  # type: ignore[arg-type]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _ids(length: int) -> Tensor:
    """Random chunks 1…8 of about equal size."""
    return torch.randint(1, 9, (1, length), generator=_generator())


def _half_masked(length: int) -> Tensor:
    masked = torch.rand(1, length, generator=_generator()) < 0.5
    masked[:, 0] = False
    return masked


def attention(length: int, target: float | None = None) -> Case:
    """Stage-2 attention, forward and backward, under the dual-stream mask."""

    def path(backend: Backend) -> Callable[[], Run]:
        def make() -> Run:
            ids = _ids(length)
            whole = masks.dual_stream_slots(ids)
            slots = (
                layout.dual_stream(ids, _half_masked(length)[:, None]).slots if backend == "sdpa-tiled" else whole
            )
            size = slots.chunk.shape[1]
            q, k, v = (torch.randn(1, size, 12, 128, generator=_generator()).requires_grad_() for _ in range(3))

            def run() -> None:
                q.grad = k.grad = v.grad = None
                plan = AttentionPlan.of(masks.dual_stream, slots, backend)  # mask building counts
                attend(q, k, v, plan.inputs(q.dtype)).sum().backward()

            return run

        return make

    paths = {"production": path("sdpa-tiled")}
    if length <= 2 * LITERAL_FITS:
        paths["dense SDPA"] = path("sdpa")
    if length <= LITERAL_FITS:
        paths["literal"] = path("reference")
    return Case(f"L={length}", paths, ("dense SDPA", "literal"), target)


def chunking(length: int, target: float | None = None) -> Case:
    """Chunking attention of both streams under the noise mask, forward and backward."""

    def path(backend: Backend) -> Callable[[], Run]:
        def make() -> Run:
            masked = _half_masked(length).repeat(2, 1)
            real = torch.ones_like(masked)
            if backend == "reference":
                slots = Slots.of(torch.zeros_like(masked, dtype=torch.long), masked)
            else:
                slots = layout.visible_first(real, masked).slots
            p = torch.randn(2, 8, length, 64, generator=_generator()).mul_(0.3).requires_grad_()
            v = torch.randn(2, length, 768, generator=_generator()).requires_grad_()

            def run() -> None:
                p.grad = v.grad = None
                subspace_mixture(p, v, AttentionPlan.of(masks.noise, slots, backend)).sum().backward()

            return run

        return make

    paths = {"production": path("sdpa-tiled")}
    if length <= 2 * LITERAL_FITS:
        paths["literal"] = path("reference")
    return Case(f"L={length}", paths, ("literal",), target)


def _tokens(config: ModelConfig, length: int) -> Tensor:
    tokens = torch.randint(0, config.vocab_size - 3, (1, length), generator=_generator())
    tokens[:, 0] = config.bos_id
    return tokens


def _dense_sdpa(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None], enable_gqa=True)


def literal_step(model: Model, tokens: Tensor, dense_sdpa: bool = False) -> None:
    """Loss and backward by the reference: every mask dense, every logit made."""
    sample = draw(model, Batch(tokens), Key(0), PLAIN)
    with mock.patch.object(reference, "attend", _dense_sdpa if dense_sdpa else reference.attend):
        logits = reference.forward(model, tokens, sample.masked, chunk_ids=sample.ids).logits
        known = tokens.clamp(max=model.config.vocab_size - 4)[..., None]
        nll = -logits[..., :-3].log_softmax(dim=-1).gather(-1, known).squeeze(-1)
        (torch.where(sample.masked, nll, 0) * sample.weight).sum().div(sample.free.sum()).backward()


def _on_model(config: ModelConfig, work: Callable[[Model, Tensor], object]) -> Callable[[], Run]:
    """A path that does `work` on a fresh model and one sequence."""

    def make() -> Run:
        model, tokens = build(config, seed=0), _tokens(config, config.context_length)

        def run() -> None:
            model.zero_grad()
            work(model, tokens)

        return run

    return make


def _production_step(model: Model, tokens: Tensor) -> None:
    loss(model, Batch(tokens), Key(0), PLAIN).total.backward()


def step(length: int, target: float | None = None, layers: int = 4, routing: str = "paper") -> Case:
    """A whole training step without the optimizer: routing, loss and backward."""
    config = _config(length, layers, routing)
    paths = {
        "production": _on_model(config, _production_step),
        "literal, dense SDPA": _on_model(config, lambda m, tokens: literal_step(m, tokens, dense_sdpa=True)),
    }
    if length <= LITERAL_FITS:
        paths["literal"] = _on_model(config, literal_step)
    return Case(f"L={length}, {layers} layers, {routing}", paths, ("literal", "literal, dense SDPA"), target)


def rounds(length: int, layers: int = 12) -> Case:
    """The K rounds of the causal routing against the training step that they belong to (ratio ≥ 12.5: ≤ 8 %)."""
    config = _config(length, layers, "causal")
    paths = {
        "rounds": _on_model(config, lambda model, tokens: model.partition(tokens)),
        "rounds that start over": _on_model(config, _literal_rounds),
        "training step": _on_model(config, _production_step),
    }
    return Case(f"rounds, L={length}, {layers} layers", paths, ("training step",), 12.5)


@torch.no_grad()
def _literal_rounds(model: Model, tokens: Tensor) -> None:
    reference.partition(model, tokens)


def draws(length: int, layers: int, target: float) -> Case:
    """Two noise draws over one clean stream against two separate passes (target 1/0.88 or 1/0.82)."""
    config = _config(length, layers, "strided")

    def together(model: Model, tokens: Tensor) -> None:
        loss(model, Batch(tokens), Key(0), replace(PLAIN, noise_draws=2)).total.backward()

    def apart(model: Model, tokens: Tensor) -> None:
        for number in range(2):
            loss(model, Batch(tokens), Key(number), PLAIN).total.backward()

    paths = {"one clean stream": _on_model(config, together), "two passes": _on_model(config, apart)}
    return Case(f"two draws, L={length}, {layers} layers", paths, ("two passes",), target)


def block_mask(length: int, target: float) -> Case:
    """FlexAttention's block mask from chunk ranges against the predicate on all pairs."""
    slots = layout.dual_stream(_ids(length), _half_masked(length)[:, None], compact=False).slots

    def from_ranges() -> Run:
        return lambda: (blockmask.from_slots(masks.dual_stream, slots, 2 * length), None)[1]

    def from_pairs() -> Run:
        rule = blockmask.mask_mod(masks.dual_stream, slots)
        return lambda: (create_block_mask(rule, 1, 1, 2 * length, 2 * length, device="cpu"), None)[1]

    paths = {"from ranges": from_ranges, "from all pairs": from_pairs}
    return Case(f"block mask, L={length}", paths, ("from all pairs",), target)


def head(length: int) -> Case:
    """Head and loss at the masked half of the positions, in slices, against all logits."""

    def path(sliced: bool) -> Callable[[], Run]:
        def make() -> Run:
            states = torch.randn(length, 768, generator=_generator()).requires_grad_()
            weight = torch.randn(50_257, 768, generator=_generator()).mul_(0.02).requires_grad_()
            targets = torch.randint(50_257, (length,), generator=_generator())
            masked = _half_masked(length)[0]

            def run() -> None:
                states.grad = weight.grad = None
                if sliced:
                    ones = torch.ones(int(masked.sum()))
                    weighted_nll(states[masked], weight, targets[masked], ones).backward()
                else:
                    log_p = (states @ weight.T).log_softmax(dim=-1)
                    (-log_p.gather(-1, targets[:, None]).squeeze(-1) * masked).sum().backward()

            return run

        return make

    return Case(f"L={length}", {"production": path(True), "all logits": path(False)}, ("all logits",))


def moe(tokens: int) -> Case:
    """The mixture of dcdm-moe-0.8b, forward and backward: grouped products against the loop."""

    def path(method: str) -> Callable[[], Run]:
        def make() -> Run:
            config = preset("dcdm-moe-0.8b")
            assert config.moe is not None
            experts = Experts(config.hidden_size, config.moe)
            for parameter in experts.parameters():
                torch.nn.init.normal_(parameter, std=0.02, generator=_generator())
            x = torch.randn(tokens, config.hidden_size, generator=_generator()).requires_grad_()
            chosen = torch.rand(tokens, 8, generator=_generator()).topk(2)
            work = getattr(experts, method)
            return lambda: work(x, chosen.indices, chosen.values).sum().backward()

        return make

    return Case(f"{tokens} tokens", {"grouped": path("grouped"), "loop": path("one_by_one")}, ("loop",))


def decoding(commit: str, target: float | None = None, rows: int = 1) -> Case:
    """A canvas of 512 positions by the causal network, 12 layers of width 256, K=8: with and without cache.

    "afresh" computes what the active chunk can see, "whole canvas" everything, in every forward.
    """

    def path(cache: str, whole: bool = False) -> Callable[[], Run]:
        def make() -> Run:
            small = replace(preset("dcdm-debug-causal"), num_layers=12, hidden_size=256, intermediate_size=768)
            model = build(
                replace(small, num_heads=4, num_kv_heads=4, head_dim=64, context_length=512), seed=0
            ).eval()

            def run() -> None:
                with mock.patch.object(
                    predictors, "without_hidden", (lambda r, _: r) if whole else routes.without_hidden
                ):
                    generate(model, [[]] * rows, commit=commit, cache=cache)

            return run

        return make

    paths = {"exact cache": path("exact"), "whole canvas": path("none", whole=True), "afresh": path("none")}
    return Case(f"{commit}, batch {rows}", paths, ("whole canvas",), target)


def lanes_step(length: int, against: str, target: float, layers: int = 4, rows: int = 4) -> Case:
    """A training step of lanes, 1 to 16 of them in the rows of one batch, against AR or strided chunks of MASKs."""
    lanes = replace(preset("lanes-0.1b"), num_layers=layers, context_length=length)
    strided = replace(_config(length, layers, "strided"), num_chunks=max(1, length // 8))
    others = {"AR": replace(preset("ar-0.1b"), num_layers=layers, context_length=length), "strided": strided}

    def step_of(model: Model, tokens: Tensor) -> None:
        share = 1.0 if model.config.kind == "dcdm" else 0.0
        objective = replace(PLAIN, full_mask_share=share)
        loss(model, Batch(tokens.expand(rows, -1)), Key(0), objective).total.backward()

    paths = {"lanes": _on_model(lanes, step_of), against: _on_model(others[against], step_of)}
    return Case(f"step, {rows} × L={length}, {layers} layers, against {against}", paths, (against,), target)


def lanes_decoding(lanes: int, target: float | None, tokens: int = 128) -> Case:
    """One text of GPT-2's vocabulary by a network of width 768 with 12 layers, cached: lanes against AR."""

    def path(name: str, **options: int) -> Callable[[], Run]:
        def make() -> Run:
            model = build(preset(name), seed=0).eval()
            return lambda: (generate(model, [[]], max_new_tokens=tokens, **options), None)[1]  # type: ignore[arg-type]

        return make

    paths = {f"{lanes} lanes": path("lanes-0.1b", lanes=lanes), "AR": path("ar-0.1b")}
    return Case(f"one text of {tokens} tokens, {lanes} lanes", paths, ("AR",), target)


SUBJECTS: dict[str, Callable[[], list[Case]]] = {
    "attention": lambda: [attention(2048, 2.0), attention(4096, 2.5)],
    "chunking": lambda: [chunking(2048, 1.5)],
    "routing": lambda: [rounds(1024), block_mask(4096, 10.0)],
    "step": lambda: [step(1024, 1.3), step(2048, 1.5), step(4096, 2.0)],
    "draws": lambda: [draws(1024, 4, 1 / 0.88), draws(1024, 12, 1 / 0.82)],
    "head": lambda: [head(1024)],
    "moe": lambda: [moe(2048)],
    "decoding": lambda: [
        decoding("chunk"),
        decoding("steps:8", 3.0),
        decoding("position"),
        decoding("steps:8", rows=4),
    ],
    "lanes": lambda: [
        *(lanes_step(n, "AR", 1 / 1.15) for n in (512, 1024)),
        *(lanes_step(n, "strided", 1 / 0.6) for n in (512, 1024)),
        lanes_decoding(1, None),
        lanes_decoding(4, 2.0),
        lanes_decoding(8, 4.0),
        lanes_decoding(16, 7.0),
    ],
    "scaling": lambda: [
        *(replace(attention(n), name=f"attention L={n}") for n in (512, 1024, 2048, 4096, 8192)),
        *(replace(chunking(n), name=f"chunking L={n}") for n in (512, 1024, 2048, 4096, 8192)),
        *(replace(step(n), name=f"step L={n}") for n in (512, 1024, 2048, 4096)),
    ],
}
MEMORY_MATTERS = ("chunking", "step", "head", "scaling")


QUICK: dict[str, Callable[[], list[Case]]] = {
    "attention": lambda: [attention(512)],
    "chunking": lambda: [chunking(512)],
    "routing": lambda: [rounds(128, layers=2)],
    "step": lambda: [step(256, layers=1)],
    "draws": lambda: [draws(128, 1, 1.0)],
    "head": lambda: [head(128)],
    "moe": lambda: [moe(256)],
    "scaling": lambda: [replace(attention(n), name=f"attention L={n}") for n in (256, 512)],
}
"""Small cases, to see soon that a subject runs; of the others the first case is taken."""


def quick_cases_of(subject: str) -> list[Case]:
    return QUICK[subject]() if subject in QUICK else cases_of(subject)[:1]


def cases_of(subject: str) -> list[Case]:
    if subject not in SUBJECTS:
        raise ConfigError(
            f"unknown subject {subject!r}; choose one of {', '.join(SUBJECTS)}, estimator, serving, targets"
        )
    return SUBJECTS[subject]()


def find_case(subject: str, name: str) -> Case:
    return next(case for case in cases_of(subject) if case.name == name)


def print_peak(subject: str, case: str, path: str, threads: str) -> None:
    """Megabytes that one run of a path adds to this process, which must be fresh."""
    torch.set_num_threads(int(threads))
    run = find_case(subject, case).paths[path]()
    before = forget_peak()
    run()
    print(peak_megabytes() - before)


if __name__ == "__main__":
    print_peak(*sys.argv[1:])
