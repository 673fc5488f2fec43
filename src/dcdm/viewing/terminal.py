"""Chunks in a terminal: on coloured ground, or numbered where there is no colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcdm.viewing.chunks import KINDS, UNROUTED, ChunkView, Filling
from dcdm.viewing.palette import colour, on_colour

BAR = 10
SIGNS = {code: chr(0x2400 + code) for code in range(32)} | {0x7F: "␡", ord("\n"): "↵", ord("\t"): "→"}
MOST_ROWS = 32
BLANK = "░"


def show(view: ChunkView, console: Console) -> None:
    """Print the view's frame: tokens, sizes and kinds of tokens."""
    coloured = console.is_terminal and not console.no_color
    console.print(headline(view), markup=False, highlight=False, soft_wrap=True)
    if view.note:
        console.print(view.note, markup=False, highlight=False, soft_wrap=True)
    console.print()
    if coloured:
        console.print(coloured_text(view), soft_wrap=True)
    else:
        for line in numbered_lines(view, console.width):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(_key(view, coloured), style="dim", soft_wrap=True)
    console.print()
    console.print(_legend(view, coloured))
    source = f"sizes: this text; kinds: {view.kind_counts.source}"
    console.print(source, style="dim", markup=False, highlight=False, soft_wrap=True)
    if view.num_chunks > MOST_ROWS:
        console.print(f"… {view.num_chunks - MOST_ROWS} further chunks; --json and --html have all")


def headline(view: ChunkView) -> str:
    """What is shown, in one line."""
    where = f"noise level {view.frame.at:g}" if view.axis == "noise" else f"round {view.frame.at:g}"
    tokens = sum(token.free for token in view.tokens)
    routing = f", {view.routing} routing" if view.routing else ""
    return f"{view.model}: {view.kind}{routing}, {tokens:,} tokens and BOS, {view.num_chunks} chunks, {where}"


def coloured_text(view: ChunkView) -> Text:
    """Every token on its chunk's colour; MASK to the router: in its chunk's colour, underlined."""
    return coloured_tokens([token.text for token in view.tokens], view.frame.ids, view.frame.hidden)


def coloured_tokens(tokens: Sequence[str], ids: Sequence[int], hidden: Sequence[bool]) -> Text:
    """Tokens on their chunks' colours; hidden ones in the colour, underlined."""
    text = Text()
    for token, chunk, is_hidden in zip(tokens, ids, hidden, strict=True):
        if chunk < 0:
            style = "dim"
        elif is_hidden:
            style = f"underline {colour(chunk)}"
        else:
            style = on_colour(chunk)
        text.append(token.translate(SIGNS), style=style)
        if token.endswith("\n"):
            text.append("\n")
    return text


def numbered_lines(view: ChunkView, width: int) -> Iterator[str]:
    """Rows of tokens, the chunk's number under each, and a # under what is MASK to the router."""
    texts = [token.text for token in view.tokens]
    return numbered_tokens(texts, view.frame.ids, view.frame.hidden, width, spaced=view.num_chunks > 9)


def numbered_tokens(
    tokens: Sequence[str], ids: Sequence[int], hidden: Sequence[bool], width: int, spaced: bool = False
) -> Iterator[str]:
    """As `numbered_lines`; `spaced` sets numbers of several digits apart."""
    heads = ("text   ", "chunk  ", "mask   ")
    rows = [""] * 3
    for token, chunk, is_hidden in zip(tokens, ids, hidden, strict=True):
        cells = (token.translate(SIGNS), "." if chunk < 0 else str(chunk), "#" if is_hidden else "")
        room = max(map(cell_len, cells)) + spaced
        if rows[0] and len(heads[0]) + cell_len(rows[0]) + room > width:
            yield from _finished(heads, rows)
            rows = [""] * 3
        rows = [row + cell + " " * (room - cell_len(cell)) for row, cell in zip(rows, cells, strict=True)]
        if token.endswith("\n"):
            yield from _finished(heads, rows)
            rows = [""] * 3
    if rows[0]:
        yield from _finished(heads, rows)


def show_filling(filling: Filling, console: Console) -> None:
    """Print a filled text twice: with its blanks, and filled, each in its chunk's colour."""
    blanks = [chunk > 0 for chunk in filling.chunks]
    asked = [BLANK if blank else token for token, blank in zip(filling.tokens, blanks, strict=True)]
    shown = slice(1, None)  # without BOS
    for tokens, hidden in ((asked, blanks), (filling.tokens, [False] * len(blanks))):
        if console.is_terminal and not console.no_color:
            console.print(coloured_tokens(tokens[shown], filling.chunks[shown], hidden[shown]), soft_wrap=True)
        else:
            none = [False] * len(blanks)
            for line in numbered_tokens(tokens[shown], filling.chunks[shown], none[shown], console.width):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()


def _finished(heads: tuple[str, ...], rows: list[str]) -> Iterator[str]:
    for head, row in zip(heads, rows, strict=True):
        if row.strip() or head == heads[0]:
            yield (head + row).rstrip()
    yield ""


def _key(view: ChunkView, coloured: bool) -> str:
    who = "router" if any(view.frame.scores) else "model"
    masked, unrouted = ("underlined", "dim") if coloured else ("#", ".")
    parts = [f"{masked}: MASK to the {who} here"] if any(view.frame.hidden) else []
    parts += [f"{unrouted}: in no chunk yet"] if UNROUTED in view.frame.ids else []
    return "; ".join(parts)


def _legend(view: ChunkView, coloured: bool) -> Table:
    """Sizes of the chunks and what kinds of tokens they hold."""
    counts = view.kind_counts.table[view.shown if len(view.kind_counts.table) > 1 else 0]
    table = Table(box=None, pad_edge=False)
    table.add_column("chunk", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("", width=BAR, no_wrap=True)
    for kind in KINDS:
        table.add_column(kind, justify="right", no_wrap=True)
    most = max(1, *view.frame.sizes)
    for k, size, row in islice(
        zip(range(1, view.num_chunks + 1), view.frame.sizes, counts, strict=False), MOST_ROWS
    ):
        length = round(BAR * size / most)
        bar = Text("█" * length, style=colour(k)) if coloured else Text("#" * length)
        number = Text(f" {k} ", style=on_colour(k) if coloured else "")
        table.add_row(number, str(size), bar, *_shares(row))
    return table


def _shares(row: list[int]) -> list[str]:
    total = sum(row)
    return [f"{count / total:.0%}" if total else "–" for count in row]
