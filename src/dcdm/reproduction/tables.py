"""Every table of the report, from results alone; the same for the page and for the document."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dcdm.reproduction.claims import best_rate, claims, k_rows
from dcdm.reproduction.experiments import experiments
from dcdm.reproduction.intervals import Interval, interval
from dcdm.reproduction.results import FREQUENCIES, VALID, FigurePath, Results, curve_of, final_losses, reached
from dcdm.reproduction.scale import FORWARDS_PER_TOKEN, ZERO_SHOT, scale
from dcdm.reproduction.variants import RATED, RATES, TUNED, Variant, variants
from dcdm.viewing.page import grid as grid_html

NONE = "–"
MINUS = str.maketrans("-", "−")
SINGLE_TOKENS = "frequencies of single tokens"
SURROGATE: FigurePath = ("heldout", "surrogate")
CHUNK: FigurePath = ("heldout", "chunk")
ANSWERED = ("gsm8k", "math", "humaneval")
TEXT_COLUMNS = (
    "model", "claim", "verdict", "experiment", "comparison", "benchmark", "decoder", "what changes",
    "tokens that mark chunks (seed 0)",
)  # fmt: skip

FULLY_MASKED = "training at random noise levels → fully masked"
ONE_CHANGE = (
    (FULLY_MASKED, "contiguous-full", "contiguous"),
    (FULLY_MASKED, "random-full", "random"),
    (FULLY_MASKED, "strided-full", "strided"),
    (FULLY_MASKED, "causal-full", "causal"),
    (FULLY_MASKED, "causal-strided-full", "causal-strided"),
    ("chunks contiguous → random, random noise levels", "random", "contiguous"),
    ("chunks contiguous → strided, random noise levels", "strided", "contiguous"),
    ("chunks contiguous → the paper's routing, random noise levels", "paper", "contiguous"),
    ("chunks contiguous → causal routing, random noise levels", "causal", "contiguous"),
    ("chunks contiguous → random, fully masked", "random-full", "contiguous-full"),
    ("chunks random → strided, fully masked", "strided-full", "random-full"),
    ("chunks contiguous → causal routing, fully masked", "causal-full", "contiguous-full"),
    ("prior of causal routing none → strided, random noise levels", "causal-strided", "causal"),
    ("prior of causal routing none → strided, fully masked", "causal-strided-full", "causal-full"),
    ("chunks causal with a strided prior → strided, fully masked", "strided-full", "causal-strided-full"),
    ("sizes of causal chunks equal → growing by 1.3", "causal-full-growing", "causal-full"),
    ("network of BDLM → with chunking attention, contiguous", "contiguous", "bdlm32"),
    ("W_O started at zero → as in the paper", "paper-wo", "paper"),
    ("W_O started at zero → as in the paper", "strided-full-wo", "strided-full"),
)
"""(what changes, the variant with the change, the variant without it)."""


@dataclass(frozen=True)
class Grid:
    """Rows under a header; the first column holds names."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        lines = [self.header, tuple("---" for _ in self.header), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

    def html(self) -> str:
        rows = [[cell.replace("**", "").replace("`", "") for cell in row] for row in self.rows]
        return grid_html(self.header, rows, TEXT_COLUMNS, verdicts=("verdict",))


def shown(value: Interval | None, digits: int = 3, sign: bool = False) -> str:
    """Mean ± half the 95 % interval."""
    if value is None:
        return NONE
    text = f"{value.mean:{'+' if sign else ''}.{digits}f}"
    single = " (one seed)" if value.seeds == 1 else " (one window)"
    return (text + (single if value.half is None else f" ± {value.half:.{digits}f}")).translate(MINUS)


def bare(value: Interval | None, digits: int = 3) -> str:
    """The mean alone."""
    return NONE if value is None else f"{value.mean:.{digits}f}"


def grids(results: Results) -> dict[str, Grid]:
    """Every table by name; one without a finished run is left out."""
    makers: dict[str, Callable[[Results], Grid]] = {
        "verdicts": verdicts, "parts": parts, "kinds": kinds, "surrogate": surrogate,
        "learning-rate": learning_rate, "rate-order": rate_order, "training-steps": training_steps,
        "scaling": lambda results: compared(results, "scaling", None, "Three sizes"), "k-ablation": k_ablation,
        "point-vs-subspace": lambda results: compared(results, "point-vs-subspace", "paper", "Point and subspace"),
        "zero-shot": zero_shot, "moe": lambda results: compared(results, "moe", "paper", "Mixture of experts"),
        "partitions": lambda results: compared(results, "partitions", "strided-full", "Partitions"),
        "causes": one_change, "frontier": frontier, "policies": policies, "downstream": downstream,
        "adaptive": adaptive, "contents": contents, "cost": cost,
    }  # fmt: skip
    every = {name: make(results) for name, make in makers.items()} if results.runs else {}
    return {name: grid for name, grid in every.items() if grid.rows}


# --- what columns share -------------------------------------------------------------------------------------------


def _variants(results: Results, measure: str | None = None) -> dict[str, Variant]:
    """Variants with a finished run, of those that have this measure."""
    known = variants(scale(results.scale))
    return {
        name: one
        for name, one in known.items()
        if results.seeds(name) and (measure is None or measure in one.measures)
    }


def _rows(results: Results, names: Sequence[str], cells: Callable[[str], Sequence[str]]) -> list[tuple[str, ...]]:
    known = _variants(results)
    return [(known[name].label, *cells(name)) for name in names if name in known]


def _parameters(results: Results, name: str) -> str:
    sizes = results.runs[name, results.seeds(name)[0]]["parameters"]
    total, active = (f"{sizes[part] / 1e6:.2f}M" for part in ("total", "active"))
    return total if total == active else f"{total} ({active} active)"


def _machines(results: Results, name: str) -> list[dict[str, Any]]:
    return [results.machines[name, seed] for seed in results.seeds(name) if (name, seed) in results.machines]


def _speed(results: Results, name: str) -> str:
    speeds = sorted(machine["training_tokens_per_second"] for machine in _machines(results, name))
    return f"{speeds[len(speeds) // 2]:,.0f}" if speeds else NONE


def _perplexity(value: Interval | None) -> str:
    return NONE if value is None else f"{math.exp(value.mean):.0f}"


def _violation(results: Results, name: str) -> str:
    return shown(results.mean(name, ("balance",), "violation"), 2)


def _experiment(results: Results, name: str) -> tuple[str, ...]:
    return experiments(scale(results.scale))[name].variants


def _forwards_per_token(results: Results, name: str, path: FigurePath) -> float | None:
    forwards = results.mean(name, path, "forwards")
    length = results.runs[name, results.seeds(name)[0]]["settings"]["model"]["context_length"]
    return None if forwards is None else forwards.mean / (length - 1)


# --- claims -------------------------------------------------------------------------------------------------------


def verdicts(results: Results) -> Grid:
    rows = [(claim.statement, f"**{claim.verdict}**", f"`{claim.experiment}`") for claim in claims(results)]
    return Grid("Claims", ("claim", "verdict", "experiment"), rows)


def parts(results: Results) -> Grid:
    rows = [
        (claim.name, part.name, shown(part.difference, sign=True), part.verdict)
        for claim in claims(results) for part in claim.parts
    ]  # fmt: skip
    return Grid("Every comparison", ("claim", "comparison", "difference", "verdict"), rows)


# --- losses -------------------------------------------------------------------------------------------------------


def kinds(results: Results) -> Grid:
    def cells(name: str) -> tuple[str, ...]:
        valid = results.mean(name, VALID)
        return (
            _parameters(results, name), shown(valid), shown(results.mean(name, VALID, "bits_per_byte")),
            _perplexity(valid), shown(results.difference(name, FREQUENCIES), sign=True),
            shown(results.mean(name, SURROGATE)), shown(results.mean(name, CHUNK)), _violation(results, name),
            _speed(results, name),
        )  # fmt: skip

    header = (
        "model", "parameters", "valid bound", "bits/byte", "perplexity", "bound − frequencies",
        "surrogate (not a bound)", "one forward per chunk", "MaxVio", "training tokens/s",
    )  # fmt: skip
    rows = _rows(results, [*_variants(results, "zeroshot")], cells)
    if rows and results.frequencies:
        nats, bits = (bare(results.mean(FREQUENCIES, VALID, key)) for key in ("nats_per_token", "bits_per_byte"))
        rows.append((SINGLE_TOKENS, NONE, nats, bits, _perplexity(results.mean(FREQUENCIES, VALID)), *[NONE] * 5))
    return Grid("Kinds", header, rows)


def surrogate(results: Results) -> Grid:
    """The two numbers of the same weights, on the same windows."""
    rows = []
    for name, one in _variants(results).items():
        gap = results.difference(name, name, SURROGATE, VALID)
        if gap is not None:
            means = (shown(results.mean(name, path)) for path in (SURROGATE, VALID))
            rows.append((one.label, *means, shown(gap, sign=True)))
    header = ("model", "surrogate (not a bound)", "sequential bound", "surrogate − bound, same windows")
    return Grid("Surrogate and bound", header, rows)


def compared(
    results: Results, experiment: str, base: str | None, title: str, names: Sequence[str] | None = None
) -> Grid:
    """The variants of an experiment, each beside its difference from `base`."""

    def versus(name: str) -> tuple[str, ...]:
        if base is None:
            return ()
        return (NONE if name == base else shown(results.difference(name, base), sign=True),)

    def cells(name: str) -> tuple[str, ...]:
        return (
            _parameters(results, name), shown(results.mean(name, VALID)),
            shown(results.mean(name, VALID, "bits_per_byte")), shown(results.mean(name, SURROGATE)), *versus(name),
            _violation(results, name), _speed(results, name),
        )  # fmt: skip

    against = () if base is None else (f"bound − {base}",)
    header = (
        "model", "parameters", "valid bound", "bits/byte", "surrogate (not a bound)", *against, "MaxVio",
        "training tokens/s",
    )  # fmt: skip
    return Grid(title, header, _rows(results, names or _experiment(results, experiment), cells))


def k_ablation(results: Results) -> Grid:
    names = [name for fixed in (False, True) for _, name in k_rows(results, fixed)]
    counts = [name for name in _experiment(results, "k-ablation") if name.startswith("strided")]
    return compared(results, "k-ablation", "paper", "Number of chunks", [*dict.fromkeys(names), *counts])


def one_change(results: Results) -> Grid:
    """One thing changed at a time, by the bound and by what one forward per chunk costs."""
    rows = []
    for changed, one, other in ONE_CHANGE:
        differences = [results.difference(one, other, path) for path in (VALID, CHUNK)]
        if differences[0] is not None:
            rows.append((changed, f"{one} − {other}", *(shown(value, sign=True) for value in differences)))
    header = ("what changes", "comparison", "valid bound", "one forward per chunk")
    return Grid("One change at a time", header, rows)


def training_steps(results: Results) -> Grid:
    """The share of its training after which each kind has the final validation loss of each other."""
    names = [name for name in _experiment(results, "training-steps") if results.seeds(name)]

    def cell(one: str, other: str) -> str:
        seeds = results.seeds(one, other) if one != other else []
        pairs = [(curve_of(results, one, seed), curve_of(results, other, seed)) for seed in seeds]
        pairs = [pair for pair in pairs if all(pair)]
        shares = [at / mine[-1][0] for mine, theirs in pairs if (at := reached(mine, theirs[-1][1])) is not None]
        if not shares:
            return "never" if pairs else NONE
        text = f"{sum(shares) / len(shares):.0%}"
        return text if len(shares) == len(pairs) else f"{text} ({len(shares)} of {len(pairs)} seeds)"

    rows = _rows(results, names, lambda one: [cell(one, other) for other in names])
    return Grid("How early", ("model", *names), rows)


def learning_rate(results: Results) -> Grid:
    """Every model at every rate; the one that its validation loss chooses stands out."""
    known, stuck, rows = _variants(results), Counter(name for name, _ in results.at_frequencies()), []
    for model in RATED:
        best = best_rate(results, model)
        for name in (f"{model}{ending}" for ending in RATES):
            if not (seeds := results.seeds(name)):
                continue
            rate = f"{known[name].rate * scale(results.scale).learning_rate:g}"
            bound, validation = results.mean(name, VALID), interval(final_losses(results, name, seeds))
            rows.append((
                variants(scale(results.scale))[model].label, f"**{rate}**" if name == best else rate,
                shown(validation), shown(bound), f"{stuck[name]} of {len(seeds)}",
            ))  # fmt: skip
    header = ("model", "peak learning rate", "final validation loss", "valid bound on test", "still at frequencies")
    return Grid("Learning rates", header, rows)


def rate_order(results: Results) -> Grid:
    """The models against each other where all share a rate."""
    pairs = (("paper", "bdlm8"), ("bdlm8", "mdlm"), ("paper", "mdlm"), ("strided-full", "bdlm8"))
    rows = []
    for ending, factor in RATES.items():
        differences = [results.difference(f"{one}{ending}", f"{other}{ending}") for one, other in pairs]
        if all(differences):
            seeds = len(results.seeds(*(f"{name}{ending}" for name in RATED)))
            rate = f"{factor * scale(results.scale).learning_rate:g}"
            rows.append((rate, str(seeds), *(shown(value, sign=True) for value in differences)))
    header = ("peak learning rate", "seeds", *(f"{one} − {other}" for one, other in pairs))
    return Grid("Order at each learning rate", header, rows)


def zero_shot(results: Results) -> Grid:
    def cells(name: str, show: Callable[[Interval | None], str] = shown) -> list[str]:
        means = [results.mean(name, ("zeroshot", corpus, "valid")) for corpus in ZERO_SHOT]
        return [text for mean in means for text in (show(mean), _perplexity(mean))]

    header = ("model", *(text for corpus in ZERO_SHOT for text in (corpus, f"{corpus} perplexity")))
    rows = _rows(results, _experiment(results, "zero-shot"), cells)
    if rows and results.frequencies:
        rows.append((SINGLE_TOKENS, *cells(FREQUENCIES, bare)))
    return Grid("Zero-shot", header, rows)


# --- decoding -----------------------------------------------------------------------------------------------------


def frontier(results: Results) -> Grid:
    def cell(name: str, point: str) -> str:
        path: FigurePath = ("frontier", point)
        real = _forwards_per_token(results, name, path)
        near = real is None or (point != "chunk" and abs(real / float(point) - 1) < 0.1)
        return shown(results.mean(name, path)) + ("" if near else f" ({real:.3f})")

    points = [*(f"{share:g}" for share in FORWARDS_PER_TOKEN), "chunk"]
    titles = [f"1/{round(1 / share)}" if share < 1 else "1" for share in FORWARDS_PER_TOKEN]
    rows = _rows(
        results, [*_variants(results, "frontier")], lambda name: [cell(name, point) for point in points]
    )  # fmt: skip
    return Grid("Speed and quality", ("model", *titles, "one per chunk"), rows)


def policies(results: Results) -> Grid:
    rows = []
    for name, one in _variants(results, "policies").items():
        for policy in results.figure(name, results.seeds(name)[0], ("policies",)) or ():
            path: FigurePath = ("policies", policy)
            forwards = _forwards_per_token(results, name, path)
            share = NONE if forwards is None else f"{forwards:.2f}"
            rows.append((one.label, policy, share, shown(results.mean(name, path))))
    return Grid("Other decoders", ("model", "decoder", "forwards per token", "nats per token"), rows)


# --- benchmarks ---------------------------------------------------------------------------------------------------


def _tuned(results: Results) -> list[str]:
    return [f"{name}-tuned" for name in TUNED if results.seeds(f"{name}-tuned")]


def downstream(results: Results) -> Grid:
    """Accuracies over seeds, and the likelihood of answers."""
    names = _tuned(results)
    accuracies: dict[str, dict[str, list[float]]] = {}
    chances: dict[str, float] = {}
    for name in names:
        for seed in results.seeds(name):
            for task, lines in (results.figure(name, seed, ("tasks", "choices")) or {}).items():
                for line in (line for line in lines if line["metric"] == "acc"):
                    label = line.get("task", task)
                    accuracies.setdefault(label, {}).setdefault(name, []).append(100 * line["value"])
                    chances[label] = 100 * line["chance"]
    rows = [
        (label, *(shown(interval(values.get(name, [])), 1) for name in names), f"{chances[label]:.1f}")
        for label, values in accuracies.items()
    ]
    for task in ANSWERED:
        label = f"{task}, nats per token of the answer" + ("" if task == "gsm8k" else ", not adapted")
        rows.append(
            (label, *(shown(results.mean(name, ("tasks", "answers", task, "valid"))) for name in names), NONE)
        )
    rows.append(("gsm8k, right answers", *(_right(results, name) for name in names), NONE))
    header = ("benchmark", *(name.removesuffix("-tuned") for name in names), "chance")
    return Grid("Benchmarks", header, [row for row in rows if set(row[1:]) != {NONE}])


def _right(results: Results, name: str) -> str:
    path: FigurePath = ("tasks", "exact_match", "gsm8k", "auto")
    counts = [count for seed in results.seeds(name) if (count := results.figure(name, seed, path))]
    return f"{sum(c['right'] for c in counts)} of {sum(c['of'] for c in counts)}" if counts else NONE


def adaptive(results: Results) -> Grid:
    rows = []
    for name in _tuned(results):
        for task in ANSWERED:
            decoders: FigurePath = ("tasks", "answers", task, "decoders")
            for decoder in results.figure(name, results.seeds(name)[0], decoders) or {}:
                path = (*decoders, decoder)
                forwards = bare(results.mean(name, path, "forwards_per_token"), 2)
                rows.append((name.removesuffix("-tuned"), task, decoder, forwards, shown(results.mean(name, path))))
    header = ("model", "benchmark", "decoder", "forwards per token", "nats per token of the answer")
    return Grid("Blocks chosen in decoding", header, rows)


# --- chunks and costs ---------------------------------------------------------------------------------------------


def contents(results: Results) -> Grid:
    rows: list[tuple[str, ...]] = []
    for name, one in _variants(results, "contents").items():
        seeds = results.seeds(name)
        first = results.figure(name, seeds[0], ("contents",))
        if first:
            means = [results.mean(name, ("contents",), key)
                     for key in ("bits_about_class", "bits_about_place", "neighbours_together")]  # fmt: skip
            chance = interval(
                [chance_together(results.figure(name, seed, ("contents", "counts"))) for seed in seeds]
            )
            rows.append((one.label, *(shown(value) for value in means), bare(chance), marks(first)))
    header = (
        "model", "bits about the kind of token", "bits about the place", "neighbours in one chunk",
        "by chance", "tokens that mark chunks (seed 0)",
    )  # fmt: skip
    return Grid("What chunks contain", header, rows)


def chance_together(counts: Sequence[Sequence[int]]) -> float:
    """How often two tokens share a chunk when each is drawn by itself, with the sizes that chunks have overall."""
    sizes = [sum(chunk) for chunk in counts]
    return sum(size**2 for size in sizes) / sum(sizes) ** 2


def marks(contents: dict[str, Any]) -> str:
    """For each chunk the token that stands in it most faithfully, as code that Markdown leaves alone."""
    cells = []
    for chunk, tokens in enumerate(contents["marks"], start=1):
        if tokens:
            text, share = tokens[0]
            plain = " ".join(text.split())
            code = f"`` {plain} ``" if "`" in plain else f"`{plain}`"
            cells.append(f"{chunk}: {code if plain else 'line end'} {share:.0%}")
    return ", ".join(cells[:8])


def cost(results: Results) -> Grid:
    rows = []
    for name, one in _variants(results).items():
        if seconds := [machine["seconds"] for machine in _machines(results, name)]:
            training = sum(part["training"] for part in seconds) / len(seconds)
            rest = sum(v for part in seconds for k, v in part.items() if k not in ("training", "last start"))
            minutes = (f"{training / 60:.1f}", f"{rest / len(seconds) / 60:.1f}")
            rows.append((one.label, str(len(seconds)), *minutes, _speed(results, name)))
    header = ("model", "seeds", "training, minutes", "measuring, minutes", "training tokens/s")
    return Grid("What it took", header, rows)
