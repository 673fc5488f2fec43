"""The drawings of the report, each an SVG that stands alone: in a page, or as a file beside a document."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from dcdm.reproduction.claims import k_rows
from dcdm.reproduction.results import VALID, Results, curve_points
from dcdm.reproduction.scale import FORWARDS_PER_TOKEN, scale
from dcdm.reproduction.variants import RATED, RATES, variants
from dcdm.viewing import palette
from dcdm.viewing.plots import DASHES, SHAPES, Series, chart, shape

STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#444}.grid{stroke:#8884}"
    "@media(prefers-color-scheme:dark){text{fill:#bbb}}</style>"
)
ROW = 18  # height of a line of the legend
MAIN = ("ar", "mdlm", "bdlm8", "bdlm32", "paper", "causal", "causal-full", "strided-full")
PARTITIONS = ("contiguous", "random", "strided", "causal", "contiguous-full", "random-full", "strided-full",
              "causal-full", "causal-strided-full")  # fmt: skip


def plots(results: Results) -> dict[str, str]:
    """Every drawing by name; one without a point is left out."""
    made = {
        "loss-curves": _curves(results, MAIN, "validation", "nats per token"),
        "frontier": _frontier(results, MAIN),
        "frontier-partitions": _frontier(results, PARTITIONS),
        "learning-rate": _rates(results),
        "scaling": _scaling(results),
        "k-ablation": _k(results),
        "violation": _curves(results, ("paper", "paper-point"), "violation", "MaxVio"),
        "point-vs-subspace": _curves(
            results, ("paper", "paper-point"), "training", "training loss, nats per token"
        ),
    }
    return {name: drawn for name, drawn in made.items() if drawn}


def standalone(series: Sequence[Series], across: str, up: str, *, log: bool = False) -> str:
    """A chart with its legend below it, in one SVG; "" where there is no point."""
    drawn = chart(series, across, up, log=log)
    if not drawn:
        return ""
    found = re.match(r'<svg viewBox="0 0 (\d+) (\d+)"', drawn)
    assert found is not None
    width, height = int(found[1]), int(found[2])
    lines = []
    for number, one in enumerate(series):
        y, colour = height + ROW * number + 10, palette.colour(one.colour)
        dash = f' stroke-dasharray="{one.dash}"' if one.dash else ""
        lines.append(f'<path d="M52 {y}H80" stroke="{colour}" stroke-width="2.5"{dash}/>')
        if one.shapes:
            lines.append(shape(one.shapes[0], 66, y, colour))
        lines.append(f'<text x="88" y="{y + 4}">{html.escape(one.name)}</text>')
    tall = height + ROW * len(series) + 4
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall}" width="{width}" height="{tall}"'
    return (
        drawn.replace(found[0], head, 1).replace(">", f">{STYLE}", 1).replace("</svg>", "".join(lines) + "</svg>")
    )


def _named(results: Results, name: str) -> str:
    return variants(scale(results.scale))[name].label


def _series(results: Results, name: str, number: int, points: list[tuple[float, float, float]]) -> Series:
    mark = SHAPES[number % len(SHAPES)]
    return Series(
        _named(results, name), [(x, y) for x, y, _ in points], colour=number + 1,
        dash=DASHES[number // len(palette.CHUNKS) % len(DASHES)], shapes=[mark] * len(points),
        errors=[error for *_, error in points],
    )  # fmt: skip


def _curves(results: Results, names: Sequence[str], curve: str, up: str) -> str:
    found = [(number, name, curve_points(results, name, curve)) for number, name in enumerate(names)]
    series = [
        _series(results, name, number, [(x / 1e6, y, error) for x, y, error in points])
        for number, name, points in found if points
    ]  # fmt: skip
    return standalone(series, "million tokens (± one standard deviation over seeds)", up)


def _frontier(results: Results, names: Sequence[str]) -> str:
    series = []
    for number, name in enumerate(names):
        points = []
        for point in ("chunk", *(f"{share:g}" for share in FORWARDS_PER_TOKEN)):
            value = results.mean(name, ("frontier", point))
            forwards = results.mean(name, ("frontier", point), "forwards")
            if value is not None and forwards is not None:
                points.append((forwards.mean, value.mean, value.half or 0.0))
        if points:
            series.append(_series(results, name, number, sorted(dict.fromkeys(points))))
    return standalone(series, "forwards for a window (95 % interval over seeds)", "nats per token, exact", log=True)


def _rates(results: Results) -> str:
    series = []
    for number, model in enumerate(RATED):
        found = [(factor, results.mean(f"{model}{ending}", VALID)) for ending, factor in RATES.items()]
        points = [(rate, value.mean, value.half or 0.0) for rate, value in found if value is not None]
        if len(points) > 1:
            series.append(_series(results, model, number, points))
    across = f"times the peak rate {scale(results.scale).learning_rate:g} (95 % interval over seeds)"
    return standalone(series, across, "nats per token, valid bound", log=True)


def _scaling(results: Results) -> str:
    series = []
    for number, kind in enumerate(("mdlm", "bdlm8", "paper", "strided-full")):
        points = []
        for name in (f"{kind}-small", kind, f"{kind}-large"):
            value = results.mean(name, VALID)
            if value is not None:
                size = results.runs[name, results.seeds(name)[0]]["parameters"]["total"]
                points.append((size / 1e6, value.mean, value.half or 0.0))
        if points:
            series.append(_series(results, kind, number, points))
    return standalone(series, "million parameters (95 % interval over seeds)", "nats per token, valid bound")


def _k(results: Results) -> str:
    series = []
    chosen = [("h as in the paper's table", k_rows(results, fixed=False)), ("h fixed", k_rows(results, fixed=True))]
    strided = sorted(
        (results.runs[name, results.seeds(name)[0]]["settings"]["model"]["num_chunks"], name)
        for name in {name for name, _ in results.runs}
        if name == "strided-full" or name.startswith("strided-full-k")
    )
    for number, (label, rows) in enumerate([*chosen, ("strided chunks, fully masked", strided)]):
        points = [(float(k), value.mean, value.half or 0.0) for k, name in rows
                  if (value := results.mean(name, VALID)) is not None]  # fmt: skip
        if points:
            series.append(Series(
                label, [(x, y) for x, y, _ in points], colour=number + 1, shapes=[SHAPES[number]] * len(points),
                errors=[error for *_, error in points],
            ))  # fmt: skip
    return standalone(series, "K (95 % interval over seeds)", "nats per token, valid bound", log=True)
