"""Claims of the paper, each with a verdict that follows from results: an interval over paired seeds decides.

`one < other` is confirmed where the 95 % interval of the difference lies below zero, contradicted where it lies
above, and undecided where it holds zero; a claim of several parts is as good as its weakest part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from dcdm.reproduction.intervals import Interval, interval
from dcdm.reproduction.results import VALID, FigurePath, Results, aligned, curve_of, final_losses
from dcdm.reproduction.scale import ZERO_SHOT
from dcdm.reproduction.variants import RATES
from dcdm.reproduction.verdicts import UNDECIDED, WEAKEST_FIRST, verdict_of

SURROGATE: FigurePath = ("heldout", "surrogate")


@dataclass(frozen=True)
class Comparison:
    """One comparison: a name for it, the difference, and what it says."""

    name: str
    difference: Interval | None
    verdict: str
    unit: str = "nats per token"


@dataclass(frozen=True)
class Claim:
    """What the paper says, and the comparisons that it rests on."""

    name: str
    statement: str
    experiment: str
    parts: tuple[Comparison, ...]

    @property
    def verdict(self) -> str:
        reached = {part.verdict for part in self.parts}
        return next((verdict for verdict in WEAKEST_FIRST if verdict in reached), UNDECIDED)

    @property
    def deciding(self) -> Comparison | None:
        """The comparison behind the verdict: of those that reach it, the one that speaks most against the claim."""
        parts = [part for part in self.parts if part.verdict == self.verdict and part.difference is not None]
        return max(parts, key=_against, default=None)

    def counts(self) -> dict[str, int]:
        """How many comparisons reach each verdict, those that any reaches."""
        counted = Counter(part.verdict for part in self.parts)
        return {verdict: counted[verdict] for verdict in WEAKEST_FIRST if counted[verdict]}


def _against(part: Comparison) -> float:
    """How far the whole interval lies on the other side of zero."""
    assert part.difference is not None
    return part.difference.mean - (part.difference.half or 0.0)


def _compare(name: str, difference: Interval | None, unit: str = "nats per token") -> Comparison:
    return Comparison(name, difference, verdict_of(difference), unit)


def claims(results: Results) -> list[Claim]:
    """Every claim, in the order of the paper."""
    makers: tuple[Callable[[Results], Claim], ...] = (
        loss_order, surrogate_order, own_rates, earlier, every_size, subspace_loss, subspace_balance,
        interior_optimum, mixture, zero_shot, adablock,
    )  # fmt: skip
    return [make(results) for make in makers]


def loss_order(results: Results) -> Claim:
    """DCDM below BDLM below MDLM, by valid bounds."""
    return Claim(
        "loss", "DCDM has a lower loss than BDLM, and BDLM than MDLM", "loss-curves",
        _order(results, "paper", "bdlm8", "mdlm"),
    )  # fmt: skip


def _order(results: Results, paper: str, bdlm: str, mdlm: str) -> tuple[Comparison, ...]:
    """The three comparisons, between these variants."""
    return (
        _compare("DCDM (paper) − BDLM", results.difference(paper, bdlm)),
        _compare("BDLM − MDLM", results.difference(bdlm, mdlm)),
        _compare("DCDM (paper) − MDLM", results.difference(paper, mdlm)),
    )


def surrogate_order(results: Results) -> Claim:
    """The same by the number that the paper reports."""
    return Claim(
        "loss, as the paper counts it", "the same order by the surrogate, the number that the paper reports",
        "loss-curves",
        (
            _compare("surrogate of DCDM − bound of BDLM", results.difference("paper", "bdlm8", SURROGATE, VALID)),
            _compare("BDLM − MDLM", results.difference("bdlm8", "mdlm")),
        ),
    )  # fmt: skip


def best_rate(results: Results, model: str) -> str:
    """The variant of `model` whose learning rate has the lowest final validation loss; "" while any is missing."""
    names = [f"{model}{ending}" for ending in RATES]
    ends = {name: final_losses(results, name, results.seeds(*names)) for name in names}
    return min(names, key=lambda name: fmean(ends[name])) if all(ends.values()) else ""


def own_rates(results: Results) -> Claim:
    """The order with every model at the learning rate that suits it best, by validation loss."""
    return Claim(
        "loss, each at its own rate", "the order holds with each model at the best of four learning rates",
        "learning-rate", _order(results, *(best_rate(results, model) for model in ("paper", "bdlm8", "mdlm"))),
    )  # fmt: skip


def earlier(results: Results) -> Claim:
    """The order holds from early in training on: at every validation point after the first third."""
    parts = []
    for one, other, name in (("paper", "bdlm8", "DCDM − BDLM"), ("bdlm8", "mdlm", "BDLM − MDLM")):
        seeds = results.seeds(one, other)
        curves = [curve_of(results, variant, seed) for seed in seeds for variant in (one, other)]
        rows = aligned(curves)
        for tokens, values in rows:
            share = tokens / rows[-1][0]
            if share > 1 / 3:
                difference = interval([a - b for a, b in zip(values[::2], values[1::2], strict=True)])
                parts.append(_compare(f"{name} at {share:.0%} of training", difference))
    return Claim(
        "earlier in training", "the order DCDM, BDLM, MDLM emerges early in training and stays", "training-steps",
        tuple(parts),
    )  # fmt: skip


def every_size(results: Results) -> Claim:
    parts = []
    for size in ("-small", "", "-large"):
        label = size.removeprefix("-") or "main"
        parts.append(_compare(f"DCDM − BDLM, {label}", results.difference(f"paper{size}", f"bdlm8{size}")))
        parts.append(_compare(f"BDLM − MDLM, {label}", results.difference(f"bdlm8{size}", f"mdlm{size}")))
    return Claim("every scale", "the order holds at every model size", "scaling", tuple(parts))


def subspace_loss(results: Results) -> Claim:
    return Claim(
        "subspace: loss", "a subspace gives a lower loss than a point (h=1)", "point-vs-subspace",
        (
            _compare("subspace − point, valid bound", results.difference("paper", "paper-point")),
            _compare("subspace − point, surrogate", results.difference("paper", "paper-point", SURROGATE)),
        ),
    )  # fmt: skip


def subspace_balance(results: Results) -> Claim:
    """MaxVio over the last tenth of training."""
    values = []
    for seed in results.seeds("paper", "paper-point"):
        ends = [_end(results, variant, seed) for variant in ("paper", "paper-point")]
        if ends[0] is not None and ends[1] is not None:
            values.append(ends[0] - ends[1])
    return Claim(
        "subspace: balance", "a subspace keeps chunks balanced where a point does not", "point-vs-subspace",
        (_compare("MaxVio of subspace − of point, end of training", interval(values), "MaxVio"),),
    )  # fmt: skip


def _end(results: Results, variant: str, seed: int) -> float | None:
    curve = results.figure(variant, seed, ("curve", "violation"))
    if not curve:
        return None
    last = [value for _, value in curve[-max(1, len(curve) // 10) :]]
    return sum(last) / len(last)


def k_rows(results: Results, fixed: bool) -> list[tuple[int, str]]:
    """(K, variant) with h as in the paper's table, or with the same h for all."""
    names = {name for name, _ in results.runs if name == "paper" or name.startswith("paper-k")}
    rows = []
    for name in names:
        config = next(run["settings"]["model"] for (variant, _), run in results.runs.items() if variant == name)
        rows.append((config["num_chunks"], config["chunk_dim"], name))
    main = next((dim for _, dim, name in rows if name == "paper"), None)
    if fixed:
        return sorted((k, name) for k, dim, name in rows if dim == main)
    other = {k: name for k, dim, name in rows if dim != main}
    return sorted({k: other.get(k, name) for k, dim, name in rows if dim == main or k in other}.items())


def interior_optimum(results: Results) -> Claim:
    """A K between the ends is better than both ends."""
    rows = k_rows(results, fixed=False)
    names = [name for _, name in rows]
    means = {name: mean.mean for name in names if (mean := results.mean(name, VALID, seeds=results.seeds(*names)))}
    parts: tuple[Comparison, ...] = ()
    if len(means) == len(rows) >= 3:
        inner = min((name for _, name in rows[1:-1]), key=lambda name: means[name])
        best = next(k for k, name in rows if name == inner)
        parts = tuple(
            _compare(f"K={best} − K={k}", results.difference(inner, name)) for k, name in (rows[0], rows[-1])
        )
    return Claim(
        "interior K", "the best K lies inside the range, not at an end", "k-ablation", parts,
    )  # fmt: skip


def mixture(results: Results) -> Claim:
    return Claim(
        "MoE", "chunks compose with a mixture of experts: it improves DCDM at about equal active parameters", "moe",
        (_compare("DCDM-MoE − DCDM", results.difference("paper-moe", "paper")),),
    )  # fmt: skip


def zero_shot(results: Results) -> Claim:
    parts = []
    for corpus in ZERO_SHOT:
        path = ("zeroshot", corpus, "valid")
        parts.append(_compare(f"DCDM − BDLM, {corpus}", results.difference("paper", "bdlm8", path)))
        parts.append(_compare(f"DCDM − MDLM, {corpus}", results.difference("paper", "mdlm", path)))
    return Claim(
        "zero-shot", "DCDM has the lowest perplexity of the diffusion models on texts of other kinds", "zero-shot",
        tuple(parts),
    )  # fmt: skip


def adablock(results: Results) -> Claim:
    """Likelihood of true answers: DCDM by its own decoder, BDLM by AdaBlock, at one position a forward."""
    parts = []
    for task in ("gsm8k", "math", "humaneval"):
        fixed: FigurePath = ("tasks", "answers", task, "decoders", "position")
        adaptive: FigurePath = ("tasks", "answers", task, "decoders", "adablock position")
        difference = results.difference("paper-tuned", "bdlm8-tuned", fixed, adaptive)
        parts.append(_compare(f"DCDM − AdaBlock, {task}", difference))
    return Claim(
        "AdaBlock", "DCDM beats blocks that are chosen at decoding time", "adaptive", tuple(parts),
    )  # fmt: skip
