"""`--report`: one self-contained page with the figures, what explains them, and what it takes to repeat them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcdm.config import ConfigError
from dcdm.evaluation.perplexity import Evaluation, Say, Unfit
from dcdm.evaluation.provenance import Provenance
from dcdm.evaluation.studies import (
    BINS,
    COMMITS,
    DecoderFigures,
    ReportPlan,
    Studied,
    Study,
    Training,
    decoder_name,
    study_models,
)
from dcdm.files import write_whole
from dcdm.viewing import tables
from dcdm.viewing.chunks import ChunkView, view, window_from
from dcdm.viewing.page import (
    assemble,
    bullets,
    details,
    drawing,
    escape,
    many,
    paragraph,
    section,
    small_drawing,
)  # fmt: skip
from dcdm.viewing.plots import DASHES, MARKERS, Series, averaged_points, bars, chart, reliability
from dcdm.viewing.tables import Table

TEXTS = 2  # windows whose chunks are shown
Views = Mapping[str, Sequence[ChunkView]]
"""The chunks of a model's sample texts, by the model's name."""


def make_folder(folder: Path) -> None:
    """Make the report's folder, to be called before hours of measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--report {folder}: {error.strerror}; give a folder that can be written to") from error


def write(folder: Path, page: str, data: Mapping[str, Any]) -> Path:
    """Put report.html and report.json, the numbers behind its drawings, into the folder."""
    write_whole(folder / "report.json", json.dumps(data, ensure_ascii=False).encode())
    write_whole(folder / "report.html", page.encode())
    return folder / "report.html"


def study_and_view(
    models: Sequence[str], plan: ReportPlan, say: Say
) -> tuple[list[Study], dict[str, list[ChunkView]]]:
    """A study of every model, and the chunks of its first windows."""
    studies, views = [], {}
    for one in study_models(models, plan, say):
        studies.append(one.study)
        views[one.study.name] = _views(one, plan.seed) if one.source.config.kind != "ar" else []
    return studies, views


def _views(studied: Studied, seed: int) -> list[ChunkView]:
    tokenizer = studied.source.tokenizer
    rows = [[token for token in row if token != tokenizer.pad_id] for row in studied.rows[:TEXTS]]
    return [view(studied.model, window_from(row, tokenizer), name=studied.study.name, seed=seed) for row in rows]


def study_record(study: Study, views: Sequence[ChunkView] = ()) -> dict[str, Any]:
    """A study as plain values for report.json."""
    shown = [{"ids": one.frame.ids, "tokens": [token.id for token in one.tokens]} for one in views]
    return {**study.to_dict(), "views": shown}


# --- pages -------------------------------------------------------------------------------------------------------


def perplexity_page(
    result: Evaluation, studies: Sequence[Study], views: Views, plan: ReportPlan, repeat: Provenance
) -> str:
    """The page of `dcdm eval ppl --report`."""
    count = max((study.decoders[0].windows for study in studies if study.decoders), default=0)
    source = f"{count} windows of {plan.corpus.name}"
    sections = [
        section("Perplexity", _figures(result), wide=True),
        section("Loss and valid bound against tokens seen", loss_drawing(studies)),
        section("Bits per token against forwards", _decoders(studies, source)),
        section("Calibration of confidence", _calibration(studies, plan.corpus.name), wide=True),
        section("Balance of chunks", _balance(studies, plan.corpus.name), wide=True),
        section("Chunks of sample texts", _texts(studies, plan.corpus.name), wide=True),
        section("To repeat it", _repeated(repeat), wide=True),
    ]
    summary = f"{many(len(result.models), 'model')} on {many(len(result.corpora), 'corpus', 'corpora')}"
    return report_page(
        "Evaluation", f"{summary}: {', '.join(result.corpora)}.", sections, _texts_data(studies, views)
    )


def tasks_page(reports: Sequence[Mapping[str, Any]], study: Study, repeat: Provenance) -> str:
    """The page of `dcdm eval tasks --report`."""
    absent = (
        "Bits per token against forwards, calibration of confidence and chunks of sample texts need held-out text, "
        "which benchmark tasks are not: dcdm eval ppl … --report has them."
    )
    sections = [
        section("Benchmark tasks", _tasks(reports), wide=True),
        section("Loss and valid bound against tokens seen", loss_drawing([study])),
        section("Balance of chunks", violation_drawing([study]) or _missing([study], "balance")),
        section("What is not here", paragraph(absent), wide=True),
        section("To repeat it", _repeated(repeat), wide=True),
    ]
    return report_page("Benchmark tasks", f"{study.name}, {study.kind}.", sections, [])


def report_page(title: str, summary: str, sections: Sequence[str], texts: Sequence[Mapping[str, Any]] = ()) -> str:
    """A page of sections under a title, and the texts whose chunks its script draws."""
    head = f'<header><h1>{escape(title)}</h1><p class="quiet">{escape(summary)}</p></header>'
    body = f'{head}\n<main class="sections">\n{"".join(sections)}</main>'
    return assemble(title, body, {"texts": texts}, "report")


def _figures(result: Evaluation) -> str:
    unfit = dict.fromkeys(
        f"{row.model}: {row.estimator} does not fit ({row.reason})" for row in result.rows if isinstance(row, Unfit)
    )
    return tables.perplexity_table(result).to_html() + paragraph(f"{tables.LEGEND}.") + bullets(unfit)


def _tasks(reports: Sequence[Mapping[str, Any]]) -> str:
    lines = [line for report in reports for line in tables.task_cells(report)]
    notes = [f"{report['title']}: {note}" for report in reports for note in tables.task_remarks(report)]
    why = (
        "value, chance: per cent; ±: standard error over questions; noise: mean Monte-Carlo standard error of a "
        "choice in nats, and in brackets the share of questions whose best choice leads within it."
    )
    return Table(list(tables.TASK_COLUMNS), lines, ("task", "metric")).to_html() + paragraph(why) + bullets(notes)


# --- drawings ----------------------------------------------------------------------------------------------------


def loss_drawing(studies: Sequence[Study]) -> str:
    """Curves of training loss and held-out figures, a colour for each model."""
    lines: list[Series] = []
    for number, study in enumerate(studies, start=1):
        if study.training is not None:
            lines += _curves(study, study.training, number)
    if lines:
        lines.append(Series("valid bound, or exact for AR", colour=0, markers=["o"]))
    what = (
        "Lines: loss of training, averaged over stretches. Marks: a valid estimator for the model's kind, on "
        "held-out text of the training's own data, ± its standard error over windows."
    )
    return drawing(chart(lines, "tokens seen", "nats per token"), what) + _missing(studies, "training")


def _curves(study: Study, training: Training, number: int) -> list[Series]:
    marks = [(tokens, nats) for tokens, nats, _ in training.valid]
    errors = [error for *_, error in training.valid]
    return [
        Series(study.name, averaged_points(training.loss), number, dash_of(number)),
        Series(f"{study.name}, held out", marks, number, "", ["o"] * len(marks), errors, in_legend=False),
    ]


def _decoders(studies: Sequence[Study], source: str) -> str:
    lines = []
    for number, study in enumerate(studies, start=1):
        points = sorted(study.decoders, key=lambda one: one.forwards)
        lines.append(
            Series(
                study.name, [(one.forwards, one.bits) for one in points], number, dash_of(number),
                [MARKERS[COMMITS.index(one.commit)] for one in points], [one.stderr for one in points],
            )
        )  # fmt: skip
    lines += [Series(name, colour=0, markers=[marker]) for marker, name in zip(MARKERS, COMMITS, strict=True)]
    what = f"Exact likelihood of {source} under each decoder, ± its standard error over windows; lower is better."
    rows = [_decoded(study, one) for study in studies for one in study.decoders]
    numbers = Table(["model", "commit", "forwards", "bits/token"], rows, text=("model", "commit")).to_html()
    drawn = chart(lines, "forwards per window", "bits per token", log=True)
    return drawing(drawn, what) + details("As a table", numbers) + _missing(studies, "decoders")


def _decoded(study: Study, one: DecoderFigures) -> list[str]:
    spread = "" if one.stderr is None else f" ± {one.stderr:.3f}"
    return [study.name, decoder_name(one.commit, one.lanes), f"{one.forwards:.1f}", f"{one.bits:.3f}{spread}"]


def _calibration(studies: Sequence[Study], corpus: str) -> str:
    what = (
        f"Windows of {corpus}, one forward per chunk (AR: per token): every prediction of a masked token, sorted "
        "by the probability of its best token. Bars: how often that token is the true one; dots: at the mean "
        "confidence of the bar, ± the binomial standard error; broken line: confidence that tells the truth; "
        "below: how many predictions. ECE, the expected calibration error, is the mean distance of dots from the "
        "line, by counts; chance alone makes it larger than 0."
    )
    parts = []
    for study in studies:
        if (one := study.calibration) is not None:
            drawn = reliability(one.bins, "confidence", "right")
            summary = (
                f"ECE {one.error:.3f}; {one.count:,} predictions, mean confidence {one.confidence:.3f}, "
                f"{one.accuracy:.3f} right"
            )
            parts.append(small_drawing(study.name, drawn, summary))
    header = ["model", *(f"{low / 10:.1f}–{(low + 1) / 10:.1f}" for low in range(BINS))]
    rows = [[s.name, *(f"{b.count:,}" for b in s.calibration.bins)] for s in studies if s.calibration is not None]
    counts = details("Counts of predictions by confidence", Table(header, rows, text=("model",)).to_html())
    return f'{paragraph(what)}<div class="small-ones">{"".join(parts)}</div>{counts}'


def _balance(studies: Sequence[Study], corpus: str) -> str:
    parts = []
    for study in studies:
        if (one := study.balance) is not None:
            level = sum(one.sizes) / len(one.sizes)
            drawn = bars(one.sizes, "chunk", "tokens", level)
            summary = (
                f"{many(one.windows, 'window')}: MaxVio {one.violation:.3f} over all of them, "
                f"{one.window_violation:.3f} of a window on average"
            )
            parts.append(small_drawing(f"{study.name}: {study.kind}", drawn, summary))
    what = (
        f"Tokens of {corpus} in each chunk; broken line: equal shares. MaxVio is how far the largest chunk exceeds "
        "an equal share: 0 is perfect balance. Chunks of the paper's routing depend on noise; half of the tokens "
        "are masked here."
    )
    drawn = f'{paragraph(what)}<div class="small-ones">{"".join(parts)}</div>' if parts else ""
    return drawn + violation_drawing(studies) + _missing(studies, "balance")


def violation_drawing(studies: Sequence[Study]) -> str:
    """MaxVio while training."""
    lines = [
        Series(study.name, averaged_points(study.training.violation), number, dash_of(number))
        for number, study in enumerate(studies, start=1)
        if study.training is not None and study.training.violation
    ]
    drawn = chart(lines, "tokens seen", "MaxVio")
    return drawing(drawn, "MaxVio of the steps of training, averaged over stretches.")


def _texts(studies: Sequence[Study], corpus: str) -> str:
    what = (
        f"Windows of {corpus}. Tokens of one colour and number form a chunk: they are predicted together, seeing "
        "the chunks with smaller numbers. Outlined tokens are MASK to the router."
    )
    return paragraph(what) + '<div id="texts" class="texts"></div>' + _missing(studies, "views")


def _texts_data(studies: Sequence[Study], views: Views) -> list[dict[str, Any]]:
    return [
        {
            "name": f"Text {number + 1}, {study.name}: {study.kind}", "rule": _rule(one),
            "tokens": [token.text for token in one.tokens], "ids": one.frame.ids,
            "hidden": one.frame.hidden if one.axis == "noise" else None,
        }
        for number in range(TEXTS)
        for study in studies
        for one in views[study.name][number : number + 1]
    ]  # fmt: skip


def _rule(one: ChunkView) -> str:
    return f"{one.rule} Noise level {one.frame.at:g}." if one.axis == "noise" else one.rule


# --- to repeat it ------------------------------------------------------------------------------------------------


def _repeated(repeat: Provenance) -> str:
    groups = [("Settings", repeat.settings), ("Machine", repeat.environment)]
    groups += [*repeat.corpora.items(), *repeat.models.items()]
    listed = "".join(f"<div><h3>{escape(name)}</h3>{_listed(values)}</div>" for name, values in groups)
    why = (
        "The SHA-256 of a run's weights is that of the checkpoint's manifest.json, which holds those of all its "
        "files; that of an exported folder is of model.safetensors."
    )
    command = f'<pre class="command"><code>{escape(repeat.command)}</code></pre>'
    return f'{command}<div class="settings">{listed}</div>{paragraph(why)}'


def _listed(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(_shown(v))}</dd>" for name, v in values.items()
    )
    return f"<dl>{rows}</dl>"


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _missing(studies: Sequence[Study], part: str) -> str:
    return bullets([f"{study.name}: {study.missing[part]}." for study in studies if part in study.missing])


def dash_of(number: int) -> str:
    """Of a model: with its colour the same in every drawing."""
    return DASHES[(number - 1) % len(DASHES)]
