"""Pages about texts: the chunks of one, one being filled in, and the demo. `report` has the page of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dcdm.config import many
from dcdm.shipped import Card
from dcdm.viewing.chunks import KINDS, ChunkView
from dcdm.viewing.filling import Filling, Written, as_filling
from dcdm.viewing.page import escape, grid, items, page, paragraph, section
from dcdm.viewing.plots import Curve, chart

# --- the chunks of a text ----------------------------------------------------------------------------------------


def chunks_page(view: ChunkView) -> str:
    """The page of `dcdm chunks --html`: the view as one self-contained HTML file."""
    return page("chunks", f"Chunks · {view.model}", page_data(view), script="chunks")


def page_data(view: ChunkView) -> dict[str, Any]:
    """The view as the page reads it: scores to five digits, null where no router was asked."""
    data = view.to_dict()
    for frame in data["frames"]:
        frame["scores"] = [_short(row) for row in frame["scores"]] if any(frame["scores"]) else None
        frame["hidden"] = [int(hidden) for hidden in frame["hidden"]]
    return {**data, "bias": _short(data["bias"]), "kinds": KINDS}


def _short(values: list[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


# --- a text being filled in --------------------------------------------------------------------------------------


def replay_page(filling: Filling, title: str, sentence: str) -> str:
    """A text being filled in, forward pass by forward pass, as one self-contained HTML file."""
    place = '<section class="panel wide"><div id="replay"></div></section>'
    data = {"fillings": {"replay": [asdict(filling)]}}
    return page("report", title, data, summary=escape(sentence), sections=place)


# --- the demo ----------------------------------------------------------------------------------------------------

CAUTION = (
    "One seed each, a few minutes of training, each model with an objective of its own: errors over windows do not "
    "cover any of that."
)
COLUMNS = ("Lanes", "BDLM", "Lanes − BDLM")


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


@dataclass(frozen=True)
class DemoReport:
    """What the page of the demo shows."""

    cards: Sequence[Card]
    """Of the shipped models that are shown."""
    views: Sequence[ChunkView]
    """The same text as each of them divides it."""
    written: Mapping[str, Sequence[Written]]
    """What was asked, and how one model wrote it in its orders."""
    summary: str
    """Of the two models that were trained here."""
    recipes: Sequence[str]
    lines: Sequence[ComparedEstimate]
    curves: Sequence[Curve]
    commands: Sequence[tuple[str, str]]
    """Commands to try, and what each gives."""


def with_error(value: tuple[float, float], sign: bool = False) -> str:
    """Mean ± standard error."""
    mean, error = value
    return f"{mean:{'+' if sign else ''}.3f} ± {error:.3f}".replace("-", "−")


def demo_page(report: DemoReport) -> str:
    """The report as one self-contained HTML file."""
    replays = {f"written-{number}": texts for number, texts in enumerate(report.written.values(), start=1)}
    data = {
        "fillings": {
            "viewer": [_viewed(view) for view in report.views],
            **{name: [{**asdict(t.filling), "label": t.label} for t in texts] for name, texts in replays.items()},
        }
    }
    return page(
        "demo", "DCDM demo", data,
        models=items([f"{card.name}: {card.sentence}" for card in report.cards]),
        written="".join(_exercise(*asked) for asked in zip(replays, report.written, replays.values(), strict=True)),
        shipped="".join(_shipped(card) for card in report.cards),
        summary=escape(report.summary),
        recipes=items(report.recipes),
        figures=grid(("", *COLUMNS), [(line.name, *line.cells) for line in report.lines], ("",)),
        windows=report.lines[0].windows,
        meanings=items([f"{line.name}: {line.meaning}." for line in report.lines]),
        verdicts="".join(f"<p><strong>{escape(line.verdict)}</strong></p>" for line in report.lines),
        caution=escape(CAUTION),
        curves=chart(report.curves, across="step", up="nats per byte"),
        commands="".join(
            f"<dt><code>{escape(command)}</code></dt><dd>{escape(gives)}</dd>" for command, gives in report.commands
        ),
    )  # fmt: skip


def _exercise(name: str, about: str, texts: Sequence[Written]) -> str:
    what = (
        "Grey text was given. One set of weights, one seed, different orders of writing; the replays move forward "
        "pass by forward pass."
    )
    told = items([f"{text.label}: {text.sentence}." for text in texts])
    inner = f'{paragraph(what)}<div id="{name}"></div><ul class="small">{told}</ul>'
    return section(f"{about}: lanes beside AR’s order", inner, wide=True)


def _shipped(card: Card) -> str:
    """The figures of a card as a table."""
    rows = [
        [one.lanes or "–", one.drafts or "–", f"{one.forwards_per_window:g}" if one.forwards_per_window else "–",
         f"{one.nats_per_token:.3f}", f"{one.nats_per_byte:.3f}", one.estimator]
        for one in card.figures
    ]  # fmt: skip
    header = ["lanes", "drafts", "forward passes", "nats/token", "nats/byte", "figure"]
    return f"<div><h3>{escape(card.name)}</h3>{grid(header, rows)}</div>"


def _viewed(view: ChunkView) -> dict[str, Any]:
    """A text that is known, as its model would fill it, with the scores by which it was divided."""
    data = page_data(view)
    return {
        **asdict(as_filling(view)), "label": f"{view.model}: {called(view)}", "rule": view.rule,
        "scores": data["frames"][view.shown]["scores"], "bias": data["bias"],
    }  # fmt: skip


def called(view: ChunkView) -> str:
    """In how many lanes or chunks a text stands, and in how many forward passes it would be written."""
    places = many(view.num_lanes, "lane") if view.lanes else many(view.num_chunks, "chunk")
    return f"{places}, {many(len(as_filling(view).steps), 'forward pass', 'forward passes')}"
