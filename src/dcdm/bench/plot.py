"""Time and memory against length, from measured rows."""

from __future__ import annotations

import re
from pathlib import Path

from dcdm.bench.harness import Row

STYLES = {"production": ("#0072b2", "o-"), "dense SDPA": ("#e69f00", "s--"), "literal": ("#d55e00", "^:")}


def scaling(rows: list[Row], path: Path) -> None:
    """One column per subject: seconds above, peak megabytes below, against L on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points: dict[str, dict[str, list[tuple[int, float, float | None]]]] = {}
    for row in rows:
        length = re.search(r"L=(\d+)", row.case)
        if length is None:
            continue
        subject = row.case.split(" L=")[0] if " L=" in row.case else row.subject
        lines = points.setdefault(subject, {})
        lines.setdefault(row.path, []).append((int(length[1]), row.median, row.megabytes))
    figure, axes = plt.subplots(2, len(points), figsize=(4 * len(points), 6.4), squeeze=False, layout="constrained")
    for column, (subject, lines) in enumerate(points.items()):
        for name, values in lines.items():
            colour, style = STYLES.get(name.removeprefix("literal, "), ("#009e73", "d-."))
            values = sorted(values)
            lengths = [v[0] for v in values]
            axes[0][column].plot(lengths, [v[1] for v in values], style, color=colour, label=name)
            known = [(v[0], v[2]) for v in values if v[2] is not None]
            if known:
                axes[1][column].plot(*zip(*known, strict=True), style, color=colour, label=name)
        for place, label in ((axes[0][column], "seconds"), (axes[1][column], "peak MB over the start")):
            place.set_xscale("log", base=2)
            place.set_yscale("log")
            place.set_xticks(sorted({v[0] for values in lines.values() for v in values}))
            place.set_xticklabels([str(int(t)) for t in place.get_xticks()])
            place.set(xlabel="L", ylabel=label)
            place.grid(alpha=0.3)
        axes[0][column].set_title(subject)
        axes[0][column].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
