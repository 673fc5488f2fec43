"""Chunks in a terminal: on coloured ground, or numbered where there is no colour. Lanes: each a row."""

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
    if view.lanes:
        console.print(lane_rows(view, console.width, coloured), soft_wrap=True)
    elif coloured:
        console.print(coloured_text(view), soft_wrap=True)
    else:
        for line in numbered_lines(view, console.width):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(_key(view, coloured), style="dim", soft_wrap=True)
    console.print()
    console.print(_legend(view, coloured))
    source = f"sizes: this text; kinds: {view.kind_counts.source}"
    console.print(source, style="dim", markup=False, highlight=False, soft_wrap=True)
    if len(view.sizes) > MOST_ROWS:
        name = "lanes" if view.lanes else "chunks"
        console.print(f"… {len(view.sizes) - MOST_ROWS} further {name}; --json and --html have all")


def headline(view: ChunkView) -> str:
    """What is shown, in one line."""
    where = f"noise level {view.frame.at:g}" if view.axis == "noise" else f"round {view.frame.at:g}"
    tokens = sum(token.free for token in view.tokens)
    if view.lanes:
        lanes = f"{view.num_lanes} lane" + ("s" if view.num_lanes > 1 else "")
        return f"{view.model}: {lanes}, {tokens:,} tokens and BOS, forward {view.frame.at:g} of {view.num_chunks}"
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


def lane_rows(view: ChunkView, width: int, coloured: bool) -> Text:
    """Every lane a row, every column what one forward writes: as many columns side by side as fit."""
    columns: list[dict[int, int]] = [{} for _ in range(view.num_chunks)]  # positions by lane
    rank = [0] * (view.num_lanes + 1)
    for position, lane in enumerate(view.lanes):
        if lane:
            columns[rank[lane]][lane] = position
            rank[lane] += 1
    numbers = [str(number) for number in range(1, len(columns) + 1)]
    texts = [token.text.translate(SIGNS) for token in view.tokens]
    if not coloured:
        waiting = zip(texts, view.hidden, strict=True)
        texts = [BLANK if hidden else text.replace(" ", "·") for text, hidden in waiting]
    rooms = [
        max(cell_len(number), *(cell_len(texts[position]) for position in column.values())) + 1
        for number, column in zip(numbers, columns, strict=True)
    ]
    edge = len("forward  ")
    lines = []
    for band in _bands(rooms, width - edge):
        head = "".join(numbers[k].ljust(rooms[k]) for k in band).rstrip()
        lines.append(Text("forward".ljust(edge) + head, "dim"))
        for lane in range(1, view.num_lanes + 1):
            line = Text(f"lane {lane}".ljust(edge))
            for k in band:
                if lane in columns[k]:
                    here = columns[k][lane]
                    line.pad_right(edge + sum(rooms[band[0] : k]) - line.cell_len)
                    line.append(texts[here], _lane_style(view, here) if coloured else "")
            lines.append(line)
        lines.append(Text())
    return Text("\n").join(lines)


def _lane_style(view: ChunkView, position: int) -> str:
    if view.hidden[position]:
        return f"underline {colour(view.lanes[position])}"
    return ("bold reverse " if view.heads[position] else "") + on_colour(view.lanes[position])


def _bands(rooms: list[int], width: int) -> Iterator[range]:
    """Columns in bands that are no wider than `width`, each at least one column."""
    start = 0
    while start < len(rooms):
        end, used = start + 1, rooms[start]
        while end < len(rooms) and used + rooms[end] <= width:
            used += rooms[end]
            end += 1
        yield range(start, end)
        start = end


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
    if view.lanes:
        waiting = "underlined" if coloured else BLANK
        parts = [f"{waiting}: not written yet"] if any(view.hidden) else []
        return "; ".join([*parts, f"{'reversed' if coloured else f'column {view.frame.at:g}'}: written now"])
    who = "router" if any(view.frame.scores) else "model"
    masked, unrouted = ("underlined", "dim") if coloured else ("#", ".")
    parts = [f"{masked}: MASK to the {who} here"] if any(view.frame.hidden) else []
    parts += [f"{unrouted}: in no chunk yet"] if UNROUTED in view.frame.ids else []
    return "; ".join(parts)


def _legend(view: ChunkView, coloured: bool) -> Table:
    """Sizes of the chunks and what kinds of tokens they hold."""
    counts = view.kind_counts.table[view.shown if len(view.kind_counts.table) > 1 else 0]
    table = Table(box=None, pad_edge=False)
    table.add_column("lane" if view.lanes else "chunk", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("", width=BAR, no_wrap=True)
    for kind in KINDS:
        table.add_column(kind, justify="right", no_wrap=True)
    most = max(1, *view.sizes)
    for k, size, row in islice(zip(range(1, len(view.sizes) + 1), view.sizes, counts, strict=False), MOST_ROWS):
        length = round(BAR * size / most)
        bar = Text("█" * length, style=colour(k)) if coloured else Text("#" * length)
        number = Text(f" {k} ", style=on_colour(k) if coloured else "")
        table.add_row(number, str(size), bar, *_shares(row))
    return table


def _shares(row: list[int]) -> list[str]:
    total = sum(row)
    return [f"{count / total:.0%}" if total else "–" for count in row]
