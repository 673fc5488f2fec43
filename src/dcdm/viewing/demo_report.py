"""The page of `dcdm demo`: lanes and chunks of a text, texts being filled in, figures and loss curves."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dcdm.shipped import Card
from dcdm.viewing.chunks import ChunkView, Written, as_filling, page_data
from dcdm.viewing.page import grid, many, page
from dcdm.viewing.plots import Curve, line_plot

CAUTION = (
    "One seed each, a few minutes of training, each model with an objective of its own: errors over windows do not "
    "cover any of that."
)
COLUMNS = ("Lanes", "BDLM", "Lanes − BDLM")
MinusSign = str.maketrans("-", "−")


@dataclass(frozen=True)
class ComparedEstimate:
    """A likelihood of both models, each with its standard error, in nats per byte."""

    name: str
    meaning: str
    lanes: tuple[float, float]
    bdlm: tuple[float, float]
    difference: tuple[float, float]
    """Lanes − BDLM, window by window."""
    windows: int

    @property
    def cells(self) -> tuple[str, str, str]:
        return with_error(self.lanes), with_error(self.bdlm), with_error(self.difference, sign=True)

    @property
    def verdict(self) -> str:
        """What the difference means, in one sentence."""
        mean, error = self.difference
        if not abs(mean) > 2 * error:
            return f"By the {self.name} figure the two models do not differ by more than chance explains."
        better, worse = ("lanes do", "BDLM") if mean < 0 else ("BDLM does", "lanes")
        return (
            f"By the {self.name} figure {better} better: a byte of held-out text is "
            f"{math.exp(abs(mean)):.2f} times as probable as under {worse} (geometric mean)."
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
    cards: Sequence[Card]
    """Of the shipped models that are shown."""
    views: Mapping[str, ChunkView]
    """The same text as each of them divides it."""
    written: Mapping[str, Sequence[Written]]
    """What was asked, and how one model wrote it in its orders."""
    summary: str
    """Of the two models that were trained here."""
    recipes: Sequence[str]
    lines: Sequence[ComparedEstimate]
    curves: Sequence[Curve]
    commands: Sequence[CommandExample]


def with_error(value: tuple[float, float], sign: bool = False) -> str:
    """Mean ± standard error."""
    mean, error = value
    return f"{mean:{'+' if sign else ''}.3f} ± {error:.3f}".translate(MinusSign)


def demo_page(report: DemoReport) -> str:
    """The report as one self-contained HTML file."""
    names = [f"written-{number}" for number in range(1, len(report.written) + 1)]
    return page(
        "demo",
        "DCDM demo",
        _data(report, names),
        models="".join(f"<li><b>{html.escape(c.name)}</b>: {html.escape(c.sentence)}</li>" for c in report.cards),
        written="".join(
            _exercise(name, about, texts)
            for name, (about, texts) in zip(names, report.written.items(), strict=True)
        ),
        shipped="".join(_shipped(card) for card in report.cards),
        summary=html.escape(report.summary),
        recipes="".join(f"<li>{html.escape(text)}.</li>" for text in report.recipes),
        columns="".join(f'<th scope="col">{name}</th>' for name in COLUMNS),
        rows="".join(_row(line) for line in report.lines),
        windows=report.lines[0].windows,
        meanings="".join(f"<li><b>{html.escape(r.name)}</b>: {html.escape(r.meaning)}.</li>" for r in report.lines),
        verdicts="".join(f"<p><strong>{html.escape(line.verdict)}</strong></p>" for line in report.lines),
        caution=html.escape(CAUTION),
        curves=line_plot(report.curves, across="step", up="nats per byte"),
        commands="".join(_command(example) for example in report.commands),
    )


def _exercise(name: str, about: str, texts: Sequence[Written]) -> str:
    return (
        f'<section class="panel wide">\n<h2>{html.escape(about)}: lanes beside AR’s order</h2>\n'
        '<p class="small quiet">Grey text was given. One set of weights, one seed, different orders of writing; '
        f'the replays move forward by forward.</p>\n<div id="{name}"></div>\n'
        f"{''.join(_figures(text) for text in texts)}</section>\n"
    )


def _figures(text: Written) -> str:
    return f'<p class="small"><b>{html.escape(text.label)}</b>: {html.escape(text.sentence)}.</p>'


def _shipped(card: Card) -> str:
    """The figures of a card as a table."""
    rows = [
        [one.lanes or "–", one.drafts or "–", f"{one.forwards_per_window:g}" if one.forwards_per_window else "–",
         f"{one.nats_per_token:.3f}", f"{one.nats_per_byte:.3f}", one.estimator]
        for one in card.figures
    ]  # fmt: skip
    header = ["lanes", "drafts", "forwards", "nats/token", "nats/byte", "figure"]
    return f"<div><h3>{html.escape(card.name)}</h3>{grid(header, rows, ())}</div>"


def _row(line: ComparedEstimate) -> str:
    cells = "".join(f"<td>{cell}</td>" for cell in line.cells)
    return f'<tr><th scope="row">{html.escape(line.name)}</th>{cells}</tr>'


def _command(example: CommandExample) -> str:
    return f"<dt><code>{html.escape(example.text)}</code></dt><dd>{html.escape(example.gives)}</dd>"


def _data(report: DemoReport, names: Sequence[str]) -> dict[str, Any]:
    fillings = {
        name: [{**asdict(text.filling), "label": text.label} for text in texts]
        for name, texts in zip(names, report.written.values(), strict=True)
    }
    return {"viewer": [_viewed(view) for view in report.views.values()], "fillings": fillings}


def _viewed(view: ChunkView) -> dict[str, Any]:
    """A text that is known, as its model would fill it, with the scores by which it was divided."""
    data = page_data(view)
    last = data["frames"][view.shown]
    return {
        **asdict(as_filling(view)), "label": f"{view.model}: {called(view)}", "rule": view.rule,
        "scores": last["scores"], "bias": data["bias"], "kinds": [token.kind for token in view.tokens],
    }  # fmt: skip


def called(view: ChunkView) -> str:
    """In how many lanes or chunks a text stands, and in how many forwards it would be written."""
    places = f"{view.num_lanes} lanes" if view.lanes else many(view.num_chunks, "chunk")
    return f"{places}, {many(len(as_filling(view).steps), 'forward')}"
