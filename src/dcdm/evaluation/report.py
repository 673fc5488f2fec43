"""`--report`: one self-contained page with the figures, what explains them, and what it takes to repeat them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dcdm.config import ConfigError
from dcdm.evaluation import studies, table
from dcdm.evaluation.corpora import Corpus, Tokens, tokenise
from dcdm.evaluation.perplexity import Unfit
from dcdm.evaluation.studies import COMMITS, Decoded, Study, Training
from dcdm.evaluation.suite import Evaluation, Say, names_of
from dcdm.evaluation.windows import Batch, Windows, WindowSettings
from dcdm.files import write_whole
from dcdm.io.load import ModelSource, find_model
from dcdm.model.transformer import Model
from dcdm.viewing import palette
from dcdm.viewing.chunks import ChunkView, view, window_from
from dcdm.viewing.page import assemble
from dcdm.viewing.pieces import bullets, details, drawing, escape, grid, many, paragraph, section, small_drawing
from dcdm.viewing.plot import (
    DASHES,
    SHAPES,
    Series,
    averaged_points,
    bars,
    chart,
    key,
    reliability,
)  # fmt: skip

CALIBRATED = 16  # times as many windows for calibration: a forward per chunk is cheap
TEXTS = 2  # windows whose chunks are shown
PIECES = ("tokens", "sections", "evaluation")


@dataclass(frozen=True)
class Plan:
    """What the drawings are made from."""

    corpus: Corpus
    window: WindowSettings
    windows: int
    seed: int = 0
    batch_size: int = 16
    device: str | torch.device = "cpu"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise ConfigError(f"--report-windows {self.windows} must be at least 1")


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


# --- measuring ---------------------------------------------------------------------------------------------------


def study_all(models: Sequence[str], plan: Plan, say: Say) -> list[Study]:
    """A study of every model, one after the other."""
    tokens: dict[str, Tokens] = {}
    found = []
    for name, path in names_of(models).items():
        there = find_model(path)
        mark = there.tokenizer.fingerprint
        if mark not in tokens:
            tokens[mark] = tokenise(plan.corpus, there.tokenizer)
        found.append(_study(name, there, tokens[mark], plan, say))
    return found


def _study(name: str, there: ModelSource, tokens: Tokens, plan: Plan, say: Say) -> Study:
    model = there.load(plan.device, plan.dtype)
    study = begun(name, there)
    few = _batches(there, tokens, plan, plan.windows)
    for commit in studies.commits_of(model):
        advance = say(f"{name}: report, decoding with {commit}")
        study.decoders.append(studies.decoded(model, few, commit))
        advance(plan.windows, plan.windows)
    many = _batches(there, tokens, plan, CALIBRATED * plan.windows)
    total = sum(len(batch.tokens) for batch in many)
    advance = say(f"{name}: report, calibration")
    study.calibration = studies.calibrated(model, many, lambda done: advance(done, total))
    if there.config.kind == "dcdm":
        study.balance = studies.balance_of(model, many)
    if there.config.kind != "ar":
        study.views = _views(name, model, there, few, plan.seed)
    return study


def begun(name: str, there: ModelSource) -> Study:
    """What is known of a model before anything is measured, with the reasons for what will be missing."""
    config = there.config
    described = f"DCDM, {config.routing} routing" if config.kind == "dcdm" else config.kind.upper()
    study = Study(name, described, None if there.run is None else studies.training_of(there.run))
    if study.training is None:
        why = "an exported folder keeps no curves" if there.run is None else "its run folder has no metrics.jsonl"
        study.missing["training"] = why
    if config.kind == "ar":
        study.missing |= {
            "decoders": "AR writes a token with every forward, so that it has one point",
            "balance": "AR has no chunks", "views": "AR has no chunks",
        }  # fmt: skip
    elif config.kind != "dcdm":
        fixed = "one chunk holds every token" if config.kind == "mdlm" else "blocks follow from positions"
        study.missing["balance"] = f"{config.kind.upper()} has nothing to balance: {fixed}"
    return study


def _batches(there: ModelSource, tokens: Tokens, plan: Plan, count: int) -> list[Batch]:
    """Up to `count` of the windows that were measured, spread evenly over them."""
    limit = count if plan.window.limit is None else min(count, plan.window.limit)
    length = plan.window.length or there.config.context_length
    windows = Windows(tokens, there.tokenizer, length, replace(plan.window, limit=limit))
    return list(windows.batches(plan.batch_size))


def _views(name: str, model: Model, there: ModelSource, batches: Sequence[Batch], seed: int) -> list[ChunkView]:
    rows = [row for batch in batches for row in batch.tokens.tolist()][:TEXTS]
    kept = [[token for token in row if token != there.tokenizer.pad_id] for row in rows]
    return [view(model, window_from(row, there.tokenizer), name=name, seed=seed) for row in kept]


# --- pages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repeat:
    """What is needed to get a report again."""

    command: str
    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Any]]
    corpora: Mapping[str, Mapping[str, Any]]


def perplexity_page(result: Evaluation, found: Sequence[Study], plan: Plan, repeat: Repeat) -> str:
    """The page of `dcdm eval ppl --report`."""
    count = max((study.decoders[0].windows for study in found if study.decoders), default=0)
    source = f"{count} windows of {plan.corpus.name}"
    sections = [
        section("Perplexity", _figures(result), wide=True),
        section("Loss and valid bound against tokens seen", _training(found)),
        section("Bits per token against forwards", _decoders(found, source)),
        section("Calibration of confidence", _calibration(found, plan.corpus.name), wide=True),
        section("Balance of chunks", _balance(found, plan.corpus.name), wide=True),
        section("Chunks of sample texts", _texts(found, plan.corpus.name), wide=True),
        section("To repeat it", _repeated(repeat), wide=True),
    ]
    summary = f"{many(len(result.models), 'model')} on {many(len(result.corpora), 'corpus', 'corpora')}"
    return page("Evaluation", f"{summary}: {', '.join(result.corpora)}.", sections, found)


def tasks_page(reports: Sequence[Mapping[str, Any]], study: Study, repeat: Repeat) -> str:
    """The page of `dcdm eval tasks --report`."""
    absent = (
        "Bits per token against forwards, calibration of confidence and chunks of sample texts need held-out text, "
        "which benchmark tasks are not: dcdm eval ppl … --report has them."
    )
    sections = [
        section("Benchmark tasks", _tasks(reports), wide=True),
        section("Loss and valid bound against tokens seen", _training([study])),
        section("Balance of chunks", _violations([study]) or _said([study], "balance")),
        section("What is not here", paragraph(absent), wide=True),
        section("To repeat it", _repeated(repeat), wide=True),
    ]
    return page("Benchmark tasks", f"{study.name}, {study.kind}.", sections, [])


def page(title: str, summary: str, sections: Sequence[str], found: Sequence[Study]) -> str:
    head = f'<header><h1>{escape(title)}</h1><p class="quiet">{escape(summary)}</p></header>'
    body = f'{head}\n<main class="sections">\n{"".join(sections)}</main>'
    return assemble(title, body, {"texts": _texts_data(found)}, PIECES)


def _figures(result: Evaluation) -> str:
    header, lines = table.pivot(result)
    unfit = dict.fromkeys(
        f"{row.model}: {row.estimator} does not fit ({row.reason})" for row in result.rows if isinstance(row, Unfit)
    )
    return (
        grid(header, lines, text=("corpus", "model", "left out")) + paragraph(f"{table.LEGEND}.") + bullets(unfit)
    )


def _tasks(reports: Sequence[Mapping[str, Any]]) -> str:
    from dcdm.evaluation.tasks_report import COLUMNS, cells, remarks

    lines = [line for report in reports for line in cells(report)]
    notes = [f"{report['title']}: {note}" for report in reports for note in remarks(report)]
    why = (
        "value, chance: per cent; ±: standard error over questions; noise: mean Monte-Carlo standard error of a "
        "choice in nats, and in brackets the share of questions whose best choice leads within it."
    )
    return grid(list(COLUMNS), lines, text=("task", "metric")) + paragraph(why) + bullets(notes)


# --- drawings ----------------------------------------------------------------------------------------------------


def _training(found: Sequence[Study]) -> str:
    lines: list[Series] = []
    for number, study in enumerate(found, start=1):
        if study.training is not None:
            lines += _curves(study, study.training, number)
    drawn = chart(lines, "tokens seen", "nats per token")
    keys = [
        *_names(found),
        *([(key("currentColor", mark="disc"), "valid bound, or exact for AR")] if drawn else []),
    ]
    what = (
        "Lines: loss of training, averaged over stretches. Marks: the kind's valid estimator on held-out text of "
        "the training's own data, ± its standard error over windows."
    )
    return drawing(drawn, keys, what) + _said(found, "training")


def _curves(study: Study, training: Training, number: int) -> list[Series]:
    loss = averaged_points(training.loss)
    marks = [(tokens, nats) for tokens, nats, _ in training.valid]
    errors = [error for *_, error in training.valid]
    return [
        Series(study.name, loss, number, _dash(number)),
        Series(f"{study.name}, held out", marks, number, joined=False, shapes=["disc"] * len(marks), errors=errors),
    ]


def _decoders(found: Sequence[Study], source: str) -> str:
    lines = []
    for number, study in enumerate(found, start=1):
        points = sorted(study.decoders, key=lambda one: one.forwards)
        lines.append(
            Series(
                study.name, [(one.forwards, one.bits) for one in points], number, _dash(number),
                shapes=[SHAPES[COMMITS.index(one.commit)] for one in points], errors=[one.stderr for one in points],
            )
        )  # fmt: skip
    marks = [(key("currentColor", mark=shape), name) for shape, name in zip(SHAPES, COMMITS, strict=True)]
    what = f"Exact likelihood of {source} under each decoder, ± its standard error over windows; lower is better."
    drawn = chart(lines, "forwards per window", "bits per token", log=True)
    rows = [_decoded(study, one) for study in found for one in study.decoders]
    numbers = grid(["model", "commit", "forwards", "bits/token"], rows, text=("model", "commit"))
    return (
        drawing(drawn, [*_names(found), *marks], what) + details("As a table", numbers) + _said(found, "decoders")
    )


def _decoded(study: Study, one: Decoded) -> list[str]:
    spread = "" if one.stderr is None else f" ± {one.stderr:.3f}"
    return [study.name, one.commit, f"{one.forwards:.1f}", f"{one.bits:.3f}{spread}"]


def _calibration(found: Sequence[Study], corpus: str) -> str:
    what = (
        f"Windows of {corpus}, one forward per chunk (AR: per token): every prediction of a masked token, sorted "
        "by the probability of its best token. Bars: how often that token is the true one; dots: at the mean "
        "confidence of the bar, ± the binomial standard error; broken line: confidence that tells the truth; "
        "below: how many predictions. ECE, the expected calibration error, is the mean distance of dots from the "
        "line, by counts; chance alone makes it larger than 0."
    )
    parts = []
    for study in found:
        if (one := study.calibration) is not None:
            drawn = reliability(one.bins, "confidence (below: counts)", "right")
            said = (
                f"ECE {one.error:.3f}; {one.count:,} predictions, mean confidence {one.confidence:.3f}, "
                f"{one.accuracy:.3f} right"
            )
            parts.append(small_drawing(study.name, drawn, said))
    header = ["model", *(f"{low / 10:.1f}–{(low + 1) / 10:.1f}" for low in range(studies.BINS))]
    rows = [[s.name, *(f"{b.count:,}" for b in s.calibration.bins)] for s in found if s.calibration is not None]
    counts = details("Counts of predictions by confidence", grid(header, rows, text=("model",)))
    return f'{paragraph(what)}<div class="small-ones">{"".join(parts)}</div>{counts}'


def _balance(found: Sequence[Study], corpus: str) -> str:
    parts = []
    for study in found:
        if (one := study.balance) is not None:
            level = sum(one.sizes) / len(one.sizes)
            drawn = bars(one.sizes, "chunk", "tokens", level)
            said = (
                f"{many(one.windows, 'window')}: MaxVio {one.violation:.3f} over all of them, "
                f"{one.window_violation:.3f} of a window on average"
            )
            parts.append(small_drawing(f"{study.name}: {study.kind}", drawn, said))
    what = (
        f"Tokens of {corpus} in each chunk; broken line: equal shares. MaxVio is how far the largest chunk exceeds "
        "an equal share: 0 is perfect balance. Chunks of the paper's routing depend on noise; half of the tokens "
        "are masked here."
    )
    drawn = f'{paragraph(what)}<div class="small-ones">{"".join(parts)}</div>' if parts else ""
    return drawn + _violations(found) + _said(found, "balance")


def _violations(found: Sequence[Study]) -> str:
    """MaxVio while training."""
    lines = [
        Series(study.name, averaged_points(study.training.violation), number, _dash(number))
        for number, study in enumerate(found, start=1)
        if study.training is not None and study.training.violation
    ]
    drawn = chart(lines, "tokens seen", "MaxVio")
    shown = {one.name for one in lines}
    keys = [entry for entry in _names(found) if entry[1] in shown]
    return drawing(drawn, keys, "MaxVio of the steps of training, averaged over stretches.") if drawn else ""


def _texts(found: Sequence[Study], corpus: str) -> str:
    what = (
        f"Windows of {corpus}. Tokens of one colour and number form a chunk: they are predicted together, seeing "
        "the chunks with smaller numbers. Outlined tokens are MASK to the router."
    )
    return paragraph(what) + '<div id="texts" class="texts"></div>' + _said(found, "views")


def _texts_data(found: Sequence[Study]) -> list[dict[str, Any]]:
    return [
        {
            "name": f"Text {number + 1}, {study.name}: {study.kind}", "rule": _rule(one),
            "tokens": [token.text for token in one.tokens], "ids": one.frame.ids,
            "hidden": one.frame.hidden if one.axis == "noise" else None,
        }
        for number in range(TEXTS)
        for study in found
        for one in study.views[number : number + 1]
    ]  # fmt: skip


def _rule(one: ChunkView) -> str:
    return f"{one.rule} Noise level {one.frame.at:g}." if one.axis == "noise" else one.rule


# --- to repeat it ------------------------------------------------------------------------------------------------


def _repeated(repeat: Repeat) -> str:
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


def _said(found: Sequence[Study], part: str) -> str:
    return bullets([f"{study.name}: {study.missing[part]}." for study in found if part in study.missing])


def _names(found: Sequence[Study]) -> list[tuple[str, str]]:
    """A key for each model: the same colour and dash in every drawing."""
    return [(key(palette.colour(n), _dash(n)), study.name) for n, study in enumerate(found, start=1)]


def _dash(number: int) -> str:
    return DASHES[(number - 1) % len(DASHES)]
