"""The plots of the report: what each shows, and one function that draws them with matplotlib as SVG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcdm.files import digest
from dcdm.reproduction.claims import k_rows
from dcdm.reproduction.results import VALID, Results, curve_points
from dcdm.reproduction.scale import FORWARDS_PER_TOKEN, scale
from dcdm.reproduction.variants import RATED, RATES, variants
from dcdm.viewing import palette

MAIN = ("ar", "mdlm", "bdlm8", "bdlm32", "paper", "causal", "causal-full", "strided-full")
PARTITIONS = ("contiguous", "random", "strided", "causal", "contiguous-full", "random-full", "strided-full",
              "causal-full", "causal-strided-full")  # fmt: skip
SIZES = ("mdlm", "bdlm8", "paper", "strided-full")
MARKERS, DASHES = "os^D", ("-", "--", ":")
BOUND = "nats per token, valid bound"

Lines = dict[str, list[tuple[float, float, float]]]
"""Name of a line → its points: x, y, ± of y."""


@dataclass(frozen=True)
class Plot:
    """Lines over an axis of numbers, or, with `log`, of their powers of two."""

    across: str
    up: str
    lines: Lines
    log: bool = False

    def digest(self) -> str:
        """What is drawn, as a short hash that a drawing carries: it says whether the drawing is up to date."""
        lines = [
            [name, *(f"{value:.5g}" for point in points for value in point)] for name, points in self.lines.items()
        ]
        return digest([self.across, self.up, self.log, lines])[:16]


def plots(results: Results) -> dict[str, Plot]:
    """Every plot by name; one without a point is left out."""
    seeds, rate = "(95 % interval over seeds)", scale(results.scale).learning_rate
    tokens = "million tokens (± one standard deviation over seeds)"
    forwards, exact = f"forwards for a window {seeds}", "nats per token, exact"
    pair = ("paper", "paper-point")
    every = {
        "loss-curves": Plot(tokens, "nats per token", _curves(results, MAIN, "validation")),
        "frontier": Plot(forwards, exact, _frontier(results, MAIN), log=True),
        "frontier-partitions": Plot(forwards, exact, _frontier(results, PARTITIONS), log=True),
        "learning-rate": Plot(f"times the peak rate {rate:g} {seeds}", BOUND, _rates(results), log=True),
        "scaling": Plot(f"million parameters {seeds}", BOUND, _sizes(results)),
        "k-ablation": Plot(f"K {seeds}", BOUND, _chunk_numbers(results), log=True),
        "violation": Plot(tokens, "MaxVio", _curves(results, pair, "violation")),
        "point-vs-subspace": Plot(tokens, "training loss, nats per token", _curves(results, pair, "training")),
    }
    return {name: plot for name, plot in every.items() if plot.lines}


def draw(plot: Plot) -> str:
    """The plot as SVG, its legend below it, on white ground."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    out = io.StringIO()
    # text stays text, and names of parts do not change from one drawing to the next
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dcdm", "font.size": 9}):
        figure, axis = plt.subplots(figsize=(6.4, 4.2 + 0.2 * len(plot.lines)), layout="constrained")
        for number, (name, points) in enumerate(plot.lines.items()):
            x, y, errors = zip(*points, strict=True)
            axis.errorbar(
                x, y, errors, label=name, color=palette.colour(number + 1), marker=MARKERS[number % len(MARKERS)],
                markersize=4, elinewidth=1, linestyle=DASHES[number // len(palette.CHUNKS) % len(DASHES)],
            )  # fmt: skip
        if plot.log:
            ticks = sorted({x for points in plot.lines.values() for x, *_ in points})
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.2)
        axis.set(xlabel=plot.across, ylabel=plot.up)
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower left", frameon=False)
        figure.savefig(out, format="svg", metadata={"Date": None, "Description": f"points {plot.digest()}"})
        plt.close(figure)
    return out.getvalue()


def _named(results: Results, lines: Mapping[str, Sequence[tuple[float, float, float]]]) -> Lines:
    """Lines with points, under the variants' labels."""
    known = variants(scale(results.scale))
    return {known[name].label: list(points) for name, points in lines.items() if points}


def _bounds(results: Results, points: Sequence[tuple[float, str]]) -> list[tuple[float, float, float]]:
    """(x, bound, interval) of (x, variant) where there is one."""
    means = [(x, results.mean(name, VALID)) for x, name in points]
    return [(x, mean.mean, mean.half or 0.0) for x, mean in means if mean is not None]


def _curves(results: Results, names: Sequence[str], curve: str) -> Lines:
    points = {name: curve_points(results, name, curve) for name in names}
    return _named(results, {name: [(x / 1e6, y, error) for x, y, error in points[name]] for name in names})


def _frontier(results: Results, names: Sequence[str]) -> Lines:
    lines: Lines = {}
    for name in names:
        points = set()
        for point in ("chunk", *(f"{share:g}" for share in FORWARDS_PER_TOKEN)):
            value, forwards = (
                results.mean(name, ("frontier", point), key) for key in ("nats_per_token", "forwards")
            )
            if value is not None and forwards is not None:
                points.add((forwards.mean, value.mean, value.half or 0.0))
        lines[name] = sorted(points)
    return _named(results, lines)


def _rates(results: Results) -> Lines:
    return _named(results, {
        model: _bounds(results, [(rate, f"{model}{ending}") for ending, rate in RATES.items()]) for model in RATED
    })  # fmt: skip


def _sizes(results: Results) -> Lines:
    lines = {}
    for model in SIZES:
        names = [name for name in (f"{model}-small", model, f"{model}-large") if results.seeds(name)]
        sizes = [results.runs[name, results.seeds(name)[0]]["parameters"]["total"] / 1e6 for name in names]
        lines[model] = _bounds(results, [*zip(sizes, names, strict=True)])
    return _named(results, lines)


def _chunk_numbers(results: Results) -> Lines:
    strided = sorted(
        (run["settings"]["model"]["num_chunks"], name)
        for (name, seed), run in results.runs.items()
        if seed == results.seeds(name)[0] and (name == "strided-full" or name.startswith("strided-full-k"))
    )
    lines = {
        "h as in the paper's table": _bounds(results, k_rows(results, fixed=False)),
        "h fixed": _bounds(results, k_rows(results, fixed=True)),
        "strided chunks, fully masked": _bounds(results, strided),
    }
    return {name: points for name, points in lines.items() if points}
