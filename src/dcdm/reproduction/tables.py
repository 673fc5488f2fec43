"""The tables of the report, from results alone; the same for the page and for the document."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dcdm.reproduction.benchmark_tables import adaptive, downstream
from dcdm.reproduction.causes import CAUSES
from dcdm.reproduction.experiments import experiments
from dcdm.reproduction.grid import NONE, Grid, shown, shown_bare
from dcdm.reproduction.reading import VALID, Interval, Path_, Results, curve_of, final_losses, interval, reached
from dcdm.reproduction.runs import FREQUENCIES
from dcdm.reproduction.scale import FORWARDS_PER_TOKEN, ZERO_SHOT, scale
from dcdm.reproduction.variants import RATED, RATES, variants
from dcdm.reproduction.verdicts import best_rate, claims, k_rows

SINGLE_TOKENS = "frequencies of single tokens"


def grids(results: Results) -> dict[str, Grid]:
    """Every table by name; one without a finished run is left out."""
    makers: dict[str, Callable[[Results], Grid]] = {
        "verdicts": verdict_table, "parts": part_table, "kinds": kinds, "surrogate": surrogate,
        "learning-rate": learning_rate, "rate-order": rate_order,
        "training-steps": training_steps, "scaling": scaling, "k-ablation": k_ablation, "point-vs-subspace": point,
        "zero-shot": zero_shot, "moe": mixture, "partitions": partitions, "causes": causes, "frontier": frontier,
        "policies": policies, "downstream": downstream, "adaptive": adaptive, "contents": contents, "cost": cost,
    }  # fmt: skip
    made = {name: make(results) for name, make in makers.items()}
    return {name: grid for name, grid in made.items() if grid.rows}


def verdict_table(results: Results) -> Grid:
    rows = []
    for claim in claims(results):
        figures = "; ".join(f"{part.name} {shown(part.difference, sign=True)}" for part in claim.parts[:2])
        rows.append((claim.says, f"**{claim.verdict}**", figures or NONE))
    note = "Differences in nats per token (or MaxVio), 95 % intervals over paired seeds; below 0 favours the claim."
    return Grid("Claims", ("claim", "verdict", "first figures"), rows, note)


def part_table(results: Results) -> Grid:
    rows = [
        (claim.name, part.name, shown(part.difference, sign=True), part.verdict)
        for claim in claims(results) for part in claim.parts
    ]  # fmt: skip
    return Grid("Every comparison", ("claim", "comparison", "difference", "verdict"), rows)


def _rows(results: Results, names: Sequence[str], cells: Callable[[str], Sequence[str]]) -> list[tuple[str, ...]]:
    known = variants(scale(results.scale))
    return [(known[name].says, *cells(name)) for name in names if results.seeds(name)]


def _parameters(results: Results, name: str) -> str:
    seed = results.seeds(name)[0]
    sizes = results.runs[name, seed]["parameters"]
    total, active = (f"{sizes[part] / 1e6:.2f}M" for part in ("total", "active"))
    return total if total == active else f"{total} ({active} active)"


def _speed(results: Results, name: str) -> str:
    found = [results.machines[name, seed]["training_tokens_per_second"] for seed in results.seeds(name)
             if (name, seed) in results.machines]  # fmt: skip
    return f"{sorted(found)[len(found) // 2]:,.0f}" if found else NONE


def _perplexity(value: Interval | None) -> str:
    return NONE if value is None else f"{math.exp(value.mean):.0f}"


def _violation(results: Results, name: str) -> str:
    return shown(results.mean(name, ("balance",), "violation"), 2)


def kinds(results: Results) -> Grid:
    def cells(name: str) -> tuple[str, ...]:
        valid = results.mean(name, VALID)
        return (
            _parameters(results, name), shown(valid), shown(results.mean(name, VALID, "bits_per_byte")),
            _perplexity(valid), shown(results.difference(name, FREQUENCIES), sign=True),
            shown(results.mean(name, ("heldout", "surrogate"))),
            shown(results.mean(name, ("heldout", "chunk"))), _violation(results, name), _speed(results, name),
        )  # fmt: skip

    names = [name for name, one in variants(scale(results.scale)).items() if "zeroshot" in one.measures]
    header = (
        "model", "parameters", "valid bound", "bits/byte", "perplexity", "bound − frequencies",
        "surrogate (not a bound)", "one forward per chunk", "MaxVio", "training tokens/s",
    )  # fmt: skip
    note = (
        f"Nats per token on {_windows(results, VALID)} windows of WikiText-2 test, MaxVio on the same; AR exact; "
        "the paper's routing by its sequential bound. Frequencies: every token by how often it stands in the "
        "training text, whatever is around it."
    )
    rows = _rows(results, names, cells)
    if rows and results.frequencies:
        bare = [shown_bare(results.mean(FREQUENCIES, VALID, key)) for key in ("nats_per_token", "bits_per_byte")]
        perplexity = _perplexity(results.mean(FREQUENCIES, VALID))
        rows.append((SINGLE_TOKENS, NONE, *bare, perplexity, *[NONE] * 5))
    return Grid("Kinds", header, rows, note)


def surrogate(results: Results) -> Grid:
    """The two numbers of the same weights, on the same windows."""
    rows = []
    for name, one in variants(scale(results.scale)).items():
        gap = results.difference(name, name, ("heldout", "surrogate"), VALID)
        if gap is not None:
            surrogate_value, valid = (results.mean(name, path) for path in (("heldout", "surrogate"), VALID))
            rows.append((one.says, shown(surrogate_value), shown(valid), shown(gap, sign=True)))
    header = ("model", "surrogate (not a bound)", "sequential bound", "surrogate − bound, same windows")
    return Grid("Surrogate against bound", header, rows)


def _compared(results: Results, names: Sequence[str], base: str | None, title: str) -> Grid:
    def versus(name: str) -> tuple[str, ...]:
        if base is None:
            return ()
        return (NONE if name == base else shown(results.difference(name, base), sign=True),)

    def cells(name: str) -> tuple[str, ...]:
        valid = results.mean(name, VALID)
        return (
            _parameters(results, name), shown(valid), shown(results.mean(name, VALID, "bits_per_byte")),
            shown(results.mean(name, ("heldout", "surrogate"))), *versus(name), _violation(results, name),
            _speed(results, name),
        )  # fmt: skip

    against = () if base is None else (f"bound − {base}",)
    header = (
        "model", "parameters", "valid bound", "bits/byte", "surrogate (not a bound)", *against, "MaxVio",
        "training tokens/s",
    )  # fmt: skip
    return Grid(title, header, _rows(results, names, cells))


def _windows(results: Results, path: Path_) -> str:
    """On how many windows the runs have this figure."""
    found = {len(own) for name, seed in results.runs if (own := results.figure(name, seed, (*path, "numbers")))}
    return " or ".join(map(str, sorted(found))) or NONE


def _experiment(results: Results, name: str) -> tuple[str, ...]:
    return experiments(scale(results.scale))[name].variants


def scaling(results: Results) -> Grid:
    return _compared(results, _experiment(results, "scaling"), None, "Three sizes")


def point(results: Results) -> Grid:
    return _compared(results, _experiment(results, "point-vs-subspace"), "paper", "Point against subspace")


def mixture(results: Results) -> Grid:
    return _compared(results, _experiment(results, "moe"), "paper", "Mixture of experts")


def partitions(results: Results) -> Grid:
    return _compared(
        results, _experiment(results, "partitions"), "strided-full", "Partitions and how they are trained"
    )


def causes(results: Results) -> Grid:
    """One thing changed at a time, by the bound and by what one forward per chunk costs."""
    rows = []
    for cause in CAUSES:
        bound = results.difference(cause.one, cause.other)
        if bound is not None:
            chunk = results.difference(cause.one, cause.other, ("heldout", "chunk"))
            said = (shown(value, sign=True) for value in (bound, chunk))
            rows.append((cause.changed, f"{cause.one} − {cause.other}", *said))
    header = ("what changes", "comparison", "valid bound", "one forward per chunk")
    note = "Differences in nats per token over paired seeds, 95 % intervals; below 0 the change helps."
    return Grid("One change at a time", header, rows, note)


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
    note = (
        "Share of training after which the model of a row first has the final validation loss of a column's: "
        "mean over the seeds that get there; straight lines between points of the curve, nothing before the first."
    )
    return Grid("How early", ("model", *names), rows, note)


def learning_rate(results: Results) -> Grid:
    """Every model at every rate; the one that its validation loss chooses stands out."""
    known, stuck, rows = variants(scale(results.scale)), Counter(name for name, _ in results.at_frequencies()), []
    for model in RATED:
        best = best_rate(results, model)
        for name in (f"{model}{ending}" for ending in RATES):
            if not (seeds := results.seeds(name)):
                continue
            rate = f"{known[name].rate * scale(results.scale).learning_rate:g}"
            bound, validation = results.mean(name, VALID), interval(final_losses(results, name, seeds))
            rows.append((
                known[model].says, f"**{rate}**" if name == best else rate, shown(validation), shown(bound),
                f"{stuck[name]} of {len(seeds)}",
            ))  # fmt: skip
    header = ("model", "peak learning rate", "final validation loss", "valid bound on test", "still at frequencies")
    note = (
        "In bold the rate with the lowest validation loss over the seeds that all four have; the losses shown are "
        "over all seeds of a row. Last column: seeds that are still at the frequencies of single tokens."
    )
    return Grid("Learning rates", header, rows, note)


def rate_order(results: Results) -> Grid:
    """The models against each other where all share a rate."""
    pairs = (("paper", "bdlm8"), ("bdlm8", "mdlm"), ("paper", "mdlm"), ("strided-full", "bdlm8"))
    rows = []
    for ending, factor in RATES.items():
        found = [results.difference(f"{one}{ending}", f"{other}{ending}") for one, other in pairs]
        if all(found):
            seeds = len(results.seeds(*(f"{name}{ending}" for name in RATED)))
            rate = f"{factor * scale(results.scale).learning_rate:g}"
            rows.append((rate, str(seeds), *(shown(value, sign=True) for value in found)))
    header = ("peak learning rate", "seeds", *(f"{one} − {other}" for one, other in pairs))
    return Grid("Order at each learning rate", header, rows)


def k_ablation(results: Results) -> Grid:
    names = [name for fixed in (False, True) for _, name in k_rows(results, fixed)]
    counts = [name for name in _experiment(results, "k-ablation") if name.startswith("strided")]
    return _compared(results, [*dict.fromkeys(names), *counts], "paper", "Number of chunks")


def zero_shot(results: Results) -> Grid:
    def cells(name: str) -> list[str]:
        found = []
        for corpus in ZERO_SHOT:
            value = results.mean(name, ("zeroshot", corpus, "valid"))
            found += [shown(value), _perplexity(value)]
        return found

    header = ("model", *(text for corpus in ZERO_SHOT for text in (corpus, f"{corpus} perplexity")))
    note = "Valid bounds (AR exact) in nats per token, a few windows of each."
    rows = _rows(results, _experiment(results, "zero-shot"), cells)
    if rows and results.frequencies:
        means = [results.mean(FREQUENCIES, ("zeroshot", corpus, "valid")) for corpus in ZERO_SHOT]
        rows.append((SINGLE_TOKENS, *(text for mean in means for text in (shown_bare(mean), _perplexity(mean)))))
    return Grid("Zero-shot", header, rows, note)


def frontier(results: Results) -> Grid:
    def cells(name: str) -> list[str]:
        return [_at(results, name, f"{share:g}") for share in FORWARDS_PER_TOKEN] + [_at(results, name, "chunk")]

    names = [name for name, one in variants(scale(results.scale)).items() if "frontier" in one.measures]
    titles = [f"1/{round(1 / share)}" if share < 1 else "1" for share in FORWARDS_PER_TOKEN]
    note = (
        f"Exact nats per token on {_windows(results, ('frontier', '1'))} of the test windows, at no more than so "
        "many forwards per token, most confident positions first. In brackets the "
        "forwards per token where they differ by more than a tenth; – where a kind has more blocks than forwards."
    )
    return Grid("Speed against quality", ("model", *titles, "one per chunk"), _rows(results, names, cells), note)


def _at(results: Results, name: str, point_name: str) -> str:
    path: Path_ = ("frontier", point_name)
    value = results.mean(name, path)
    if value is None:
        return NONE
    forwards, asked = results.mean(name, path, "forwards"), 1.0
    length = results.runs[name, results.seeds(name)[0]]["settings"]["model"]["context_length"]
    if forwards is None:
        return shown(value)
    real = forwards.mean / (length - 1)
    if point_name != "chunk":
        asked = float(point_name)
    bracket = "" if point_name != "chunk" and abs(real / asked - 1) < 0.1 else f" ({real:.3f})"
    return shown(value) + bracket


def policies(results: Results) -> Grid:
    rows = []
    known = variants(scale(results.scale))
    for name, one in known.items():
        seeds = results.seeds(name)
        found = results.figure(name, seeds[0], ("policies",)) if seeds else None
        for policy in found or ():
            value, forwards = (
                results.mean(name, ("policies", policy), key) for key in ("nats_per_token", "forwards")
            )
            length = results.runs[name, seeds[0]]["settings"]["model"]["context_length"]
            share = NONE if forwards is None else f"{forwards.mean / (length - 1):.2f}"
            rows.append((one.says, policy, share, shown(value)))
    few = _windows(results, ("policies", "threshold:0.9"))
    note = f"On {few} of the windows of the table above: the two are not to be compared figure by figure."
    return Grid("Other decoders", ("model", "decoder", "forwards per token", "nats per token"), rows, note)


def contents(results: Results) -> Grid:
    rows: list[tuple[str, ...]] = []
    for name, one in variants(scale(results.scale)).items():
        seeds = results.seeds(name)
        found = results.figure(name, seeds[0], ("contents",)) if seeds else None
        if found:
            told = [results.mean(name, ("contents",), key)
                    for key in ("bits_about_class", "bits_about_place", "neighbours_together")]  # fmt: skip
            chance = interval([_chance(results.figure(name, seed, ("contents", "counts"))) for seed in seeds])
            rows.append((one.says, *(shown(value) for value in told), shown_bare(chance), _marked(found)))
    header = (
        "model", "bits about the kind of token", "bits about the place", "neighbours in one chunk",
        "by chance", "tokens that mark chunks (seed 0)",
    )  # fmt: skip
    return Grid("What chunks contain", header, rows)


def _chance(counts: Sequence[Sequence[int]]) -> float:
    """How often two tokens share a chunk when each is drawn by itself, with the sizes that chunks have overall."""
    sizes = [sum(chunk) for chunk in counts]
    return sum(size**2 for size in sizes) / sum(sizes) ** 2


def _marked(found: dict[str, Any]) -> str:
    parts = []
    for chunk, marks in enumerate(found["marks"], start=1):
        if marks:
            text, share = marks[0]
            plain = " ".join(text.split())
            parts.append(f"{chunk}: {_code(plain) if plain else 'line end'} {share:.0%}")
    return ", ".join(parts[:8])


def _code(text: str) -> str:
    """As code, so that Markdown takes no mark for its own."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def cost(results: Results) -> Grid:
    rows = []
    known = variants(scale(results.scale))
    for name, one in known.items():
        seconds = [results.machines[name, seed]["seconds"] for seed in results.seeds(name)
                   if (name, seed) in results.machines]  # fmt: skip
        if seconds:
            training = sum(part["training"] for part in seconds) / len(seconds)
            rest = sum(v for part in seconds for k, v in part.items() if k not in ("training", "last start"))
            rows.append((one.says, str(len(seconds)), f"{training / 60:.1f}", f"{rest / len(seconds) / 60:.1f}",
                         _speed(results, name)))  # fmt: skip
    return Grid(
        "What it took", ("model", "seeds", "training, minutes", "measuring, minutes", "training tokens/s"), rows
    )
