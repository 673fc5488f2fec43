"""Tables: one builder for terminal and pages, and the tables of evaluations.

Valid figures, those of a decoder and the paper's surrogate have columns of their own: they are not to be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dcdm.config import harmless, many
from dcdm.evaluation.perplexity import Evaluation, Figures

CLASSES = {
    "exact or ≤ bound": ("exact", "bound", "sequential"),
    "decoder": ("trajectory", "drafted"),
    "surrogate (no bound)": ("surrogate",),
}
TASK_COLUMNS = {"task": 10, "metric": 22, "value": 12, "chance": 6, "asked": 5, "noise": 12}
TASK_COUNTS = {
    "cut_contexts": "contexts cut on the left",
    "split_continuations": "answers longer than the window, scored in pieces",
    "windowed_generations": "generations written over several windows",
}
UNBOUNDED, BETWEEN = 10_000, 2  # columns: what is piped is not cut; and those between two cells
LEGEND = (
    "perplexity per token; ≤: upper bound; ±: standard error over documents; in brackets: that of Monte-Carlo "
    "alone; cut: documents that do not lie whole in one window"
)


@dataclass(frozen=True)
class Table:
    """Cells under names of columns; those of `text` are set left, all others right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    text: Collection[str] = ()

    def print(self, caption: str | None = None) -> None:
        """To the terminal, in its width; as wide as it needs to be where there is none."""
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text  # names of files and models are no markup

        console = Console(width=None if sys.stdout.isatty() else UNBOUNDED)
        for number, part in enumerate(self.parts(console.width)):
            table = RichTable(box=None, pad_edge=False)
            for at, width in part.items():
                justify: Literal["left", "right"] = "left" if self.columns[at] in self.text else "right"
                table.add_column(Text(self.columns[at]), justify=justify, width=width, overflow="fold")
            for row in self.rows:
                table.add_row(*(Text(harmless(_cell(row[at]))) for at in part))
            if number:
                console.print()
            console.print(table)
        if caption is not None:
            console.print(Text(caption, style="table.caption"))

    def parts(self, width: int) -> list[dict[int, int]]:
        """The columns that stand side by side, and their widths. Texts may take several lines; what is too wide
        even so follows below, beside the names of the rows, which are the first two columns of text."""
        from rich.cells import cell_len

        whole, least = [], []
        for at, name in enumerate(self.columns):
            cells = [name, *(harmless(_cell(row[at])) for row in self.rows)]
            pieces = [word for cell in cells for word in cell.split()] if name in self.text else cells
            whole.append(max(map(cell_len, cells)))
            least.append(max(map(cell_len, pieces), default=0))
        names = [at for at, name in enumerate(self.columns[:2]) if name in self.text]
        parts = [[*names]]
        for at in range(len(names), len(self.columns)):
            if parts[-1] != names and sum(least[one] + BETWEEN for one in [*parts[-1], at]) - BETWEEN > width:
                parts.append([*names])
            parts[-1].append(at)
        return [self._widths(part, whole, least, width) for part in parts]

    @staticmethod
    def _widths(part: list[int], whole: list[int], least: list[int], width: int) -> dict[int, int]:
        """What a text can do without is given to the columns that could use it, from the left."""
        room = width + BETWEEN - sum(least[at] + BETWEEN for at in part)
        widths = {}
        for at in part:
            widths[at] = least[at] + max(0, min(whole[at] - least[at], room))
            room -= widths[at] - least[at]
        return widths


def _cell(value: Any) -> str:
    return "–" if value is None else str(value)


# --- perplexity --------------------------------------------------------------------------------------------------


def perplexity_table(evaluation: Evaluation) -> Table:
    """A row per corpus and model, a pair of columns per class of figures that was asked for."""
    used = [name for name, members in CLASSES.items() if any(row.estimator in members for row in evaluation.rows)]
    header = ["corpus", "model"]
    for name in used:
        header += [name, "bits/byte"]
    header += ["tokens", "documents", "cut", "left out"]
    lines = []
    for corpus in evaluation.corpora:
        lines += [_line(evaluation, corpus, model, used) for model in evaluation.models]
    return Table(header, lines, ("corpus", "model", "left out"))


def _line(evaluation: Evaluation, corpus: str, model: str, used: list[str]) -> list[str]:
    here = [row for row in evaluation.rows if (row.corpus, row.model) == (corpus, model)]
    split = evaluation.corpora[corpus]["split"]
    cells = [corpus if split is None else f"{corpus} ({split})", model]
    counted = next((row for row in here if isinstance(row, Figures)), None)
    for name in used:
        members = [row for row in here if row.estimator in CLASSES[name]]
        figures = next((row for row in members if isinstance(row, Figures)), None)
        if figures is not None:
            bits = figures.bits_per_byte
            cells += [_perplexity(figures), "–" if bits is None else f"{bits:.3f}"]
        else:
            cells += ["does not apply" if members else "", ""]
    return cells + (_counts(counted) if counted is not None else [""] * 4)


def _perplexity(row: Figures) -> str:
    text = f"{'≤ ' if 'bound' in row.label and row.estimator != 'surrogate' else ''}{_number(row.perplexity)}"
    if row.document_stderr is not None:
        text += f" ±{_number(row.perplexity * row.document_stderr)}"
    if row.samples is not None:
        drawn = row.monte_carlo_stderr
        text += f" ({'?' if drawn is None else _number(row.perplexity * drawn)})"
    return text


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1e4 else f"{value:.3g}"


def _counts(row: Figures) -> list[str]:
    left = ", ".join(f"{count:,} {what}" for what, count in row.left_out.items() if count)
    return [f"{row.tokens:,}", f"{row.documents:,}", f"{row.documents_cut:,}", left or "nothing"]


# --- benchmark tasks ---------------------------------------------------------------------------------------------


def print_task(report: Mapping[str, Any], first: bool) -> None:
    """Print a benchmark's lines of the table, under a head for the first, and what a reader must know of them."""
    lines = [list(TASK_COLUMNS)] if first else []
    for number, line in enumerate(report["figures"]):
        spread = "" if line["stderr"] is None else f" ± {100 * line['stderr']:.1f}"
        noise, part = line["monte_carlo_stderr"], line["task"].partition("_mc")[2]
        metric = f"mc{part} {line['metric']}" if part else line["metric"]
        lines.append([
            report["title"] if number == 0 else "", metric.replace("-extract)", ")").replace("-match)", ")"),
            f"{100 * line['value']:.1f}{spread}",
            f"{100 * line['chance']:.1f}", str(line["questions"]),
            "–" if noise is None else f"{noise:.2f} ({100 * line['within_noise']:.0f} %)",
        ])  # fmt: skip
    for cells in lines:
        padded = (f"{cell:<{width}}" for cell, width in zip(cells, TASK_COLUMNS.values(), strict=True))
        print("  ".join(padded).rstrip())
    counts = report["counts"]
    remarks = [f"{counts[name]} {text}" for name, text in TASK_COUNTS.items() if counts[name]]
    shots = [many(report["shots"], "example") + " before each question"] if report["shots"] else []
    for note in (*shots, *report["notes"], *remarks, f"{report['seconds']:.0f} s"):
        print(f"    {note}", flush=True)


def tasks_table(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """A row for each model, a column for each benchmark, as in the paper, and their mean."""
    titles = list(dict.fromkeys(report["title"] for tasks in reports.values() for report in tasks))
    rows = []
    for model, tasks in reports.items():
        firsts = [next(iter(report["figures"])) for report in tasks]
        cells = [f"{100 * one['value']:.1f}" + ("" if one["stderr"] is None else f" ± {100 * one['stderr']:.1f}")
                 for one in firsts]  # fmt: skip
        rows.append([model, *cells, f"{100 * sum(one['value'] for one in firsts) / len(firsts):.1f}"])
    return Table(("model", *titles, "mean"), rows, ("model",))
