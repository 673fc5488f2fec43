"""The page of `dcdm demo`: figures, loss curves, chunks, and texts being filled in."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from string import Template
from typing import Any

from dcdm.viewing.chunks import ChunkView, Filling
from dcdm.viewing.page import assemble, asset
from dcdm.viewing.plots import Curve, line_plot

CAUTION = (
    "One seed each, a few minutes of training, each model with an objective of its own: errors over windows do not "
    "cover any of that."
)
MinusSign = str.maketrans("-", "−")


@dataclass(frozen=True)
class ComparedEstimate:
    """One estimate of both models, each with its standard error, in nats per byte."""

    name: str
    meaning: str
    dcdm: tuple[float, float]
    bdlm: tuple[float, float]
    difference: tuple[float, float]
    """DCDM − BDLM, window by window."""
    windows: int
    exact: bool
    """Whether the values are likelihoods, not bounds."""

    @property
    def cells(self) -> tuple[str, str, str]:
        return with_error(self.dcdm), with_error(self.bdlm), with_error(self.difference, sign=True)

    @property
    def verdict(self) -> str:
        """What the difference means, in one sentence."""
        mean, error = self.difference
        if not abs(mean) > 2 * error:
            return f"By the {self.name} figure the two models do not differ by more than chance explains."
        better, worse = ("DCDM", "BDLM") if mean < 0 else ("BDLM", "DCDM")
        if not self.exact:  # bounds may be loose, so they say nothing about how probable text is
            return f"By the {self.name} figure the {better} does better, by {abs(mean):.3f} nats per byte."
        return (
            f"By the {self.name} figure the {better} does better: a byte of held-out text is "
            f"{math.exp(abs(mean)):.2f} times as probable as under the {worse} (geometric mean)."
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class CommandExample:
    """A command to try, and what it gives."""

    text: str
    gives: str


@dataclass(frozen=True)
class DemoReport:
    summary: str
    recipes: Sequence[str]
    lines: Sequence[ComparedEstimate]
    curves: Sequence[Curve]
    chunks: Mapping[str, ChunkView]
    """The same text as each model divides it."""
    fillings: Mapping[str, Filling]
    commands: Sequence[CommandExample]


def with_error(value: tuple[float, float], sign: bool = False) -> str:
    """Mean ± standard error."""
    mean, error = value
    return f"{mean:{'+' if sign else ''}.3f} ± {error:.3f}".translate(MinusSign)


def demo_page(report: DemoReport) -> str:
    """The report as one self-contained HTML file."""
    body = Template(asset("demo.html")).substitute(
        summary=html.escape(report.summary),
        recipes="".join(f"<li>{html.escape(text)}.</li>" for text in report.recipes),
        rows="".join(_row(line) for line in report.lines),
        windows=report.lines[0].windows,
        meanings="".join(f"<li><b>{html.escape(r.name)}</b>: {html.escape(r.meaning)}.</li>" for r in report.lines),
        verdicts="".join(f"<p><strong>{html.escape(line.verdict)}</strong></p>" for line in report.lines),
        caution=html.escape(CAUTION),
        curves=line_plot(report.curves, across="step", up="nats per byte"),
        commands="".join(_command(example) for example in report.commands),
    )
    return assemble("DCDM demo", body, _data(report), "report")


def _row(line: ComparedEstimate) -> str:
    cells = "".join(f"<td>{cell}</td>" for cell in line.cells)
    return f'<tr><th scope="row">{html.escape(line.name)}</th>{cells}</tr>'


def _command(example: CommandExample) -> str:
    return f"<dt><code>{html.escape(example.text)}</code></dt><dd>{html.escape(example.gives)}</dd>"


def _data(report: DemoReport) -> dict[str, Any]:
    return {
        "chunks": [
            {"name": name, "rule": view.rule, "tokens": [token.text for token in view.tokens],
             "ids": view.frames[-1].ids}
            for name, view in report.chunks.items()
        ],
        "fillings": {name: asdict(filling) for name, filling in report.fillings.items()},
    }  # fmt: skip
