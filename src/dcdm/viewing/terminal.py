"""Chunks in a terminal: on coloured ground, or numbered where there is no colour."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dcdm.config import harmless, many
from dcdm.viewing.chunks import UNROUTED, ChunkView
from dcdm.viewing.filling import Filling, Written
from dcdm.viewing.palette import colour, on_colour

BAR = 10
LEAST_BESIDE = 96
"""Columns of a terminal from which on two texts stand side by side."""
MOST_ROWS = 32
TOLD = (0, 0.3, 0.6, 0.9, 1)
"""Noise levels of the table of bits, beside the one that is shown."""
BITS = (
    "bits of the chunk, and how many position, token and window explain alone, chance taken out; left: to context, "
    "noise, and several together; neighbour: what the token before tells; same chunk: tokens that go where most of "
    "their type go (so many by chance)"
)
BLANK = "░"


def show(view: ChunkView, console: Console) -> None:
    """Print the view's frame: tokens, sizes and kinds of tokens; over a corpus, what chunks hold and why."""
    show_text(view, console)
    console.print()
    console.print(_legend(view, _in_colour(console), console.width))
    _line(f"sizes: this text; kinds: {view.held.source}", console, "dim")
    if view.held.windows > 1:
        for table in (_typical(view, _in_colour(console)), _bits(view)):
            console.print()
            console.print(table)
        _line(BITS, console, "dim")
    if len(view.frame.sizes) > MOST_ROWS:
        console.print(f"… {len(view.frame.sizes) - MOST_ROWS} further chunks; --json and --html have all")


def show_text(view: ChunkView, console: Console) -> None:
    """Print the tokens of the view's frame, and what they are."""
    _line(headline(view), console)
    if view.note:
        _line(view.note, console)
    console.print()
    show_tokens(view, console)
    _line(_key(view, _in_colour(console)), console, "dim")


def show_tokens(view: ChunkView, console: Console) -> None:
    """Print the tokens of the view's frame and nothing else."""
    if _in_colour(console):
        console.print(coloured_text(view), soft_wrap=True)
    else:
        for line in numbered_lines(view, console.width):
            _line(line, console)


def _line(text: str, console: Console, style: str = "") -> None:
    """Text that is not ours: neither markup nor wrapped."""
    console.print(harmless(text), style=style, markup=False, highlight=False, soft_wrap=True)


def _in_colour(console: Console) -> bool:
    return console.is_terminal and not console.no_color


def headline(view: ChunkView) -> str:
    """What is shown, in one line."""
    where = f"noise level {view.frame.at:g}" if view.axis == "noise" else f"round {view.frame.at:g}"
    tokens = sum(token.free for token in view.tokens)
    routing = f", {view.routing} routing" if view.routing else ""
    chunks = many(view.num_chunks, "chunk")
    return f"{view.model}: {view.kind}{routing}, {tokens:,} tokens and BOS, {chunks}, {where}"


def coloured_text(view: ChunkView) -> Text:
    """Every token on the colour of its chunk; what is not known: in that colour, underlined."""
    text = Text()
    for token, group, hidden in zip(view.tokens, view.frame.ids, view.frame.hidden, strict=True):
        if _begins_line(token.text):
            text.append("\n")
        shown = f"underline {colour(group)}" if hidden else on_colour(group)
        text.append(_shown(token.text), style="dim" if group < 0 else shown)
        if token.text.endswith("\n"):
            text.append("\n")
    return text


def _shown(token: str) -> str:
    """A token in one line, invisible characters as signs."""
    return harmless(token.replace("\n", "↵").replace("\t", "→"))


def _begins_line(token: str) -> bool:
    """Whether a token is a line end with the indentation behind it: it is shown at the beginning of its line."""
    return token.startswith("\n") and not token.endswith("\n")


def numbered_lines(view: ChunkView, width: int) -> Iterator[str]:
    """Rows of tokens; under each the number of its chunk, and a # where it is not known."""
    heads = [f"{name:<7}" for name in ("text", "chunk", "mask")]
    rows = [""] * len(heads)

    def finished() -> Iterator[str]:
        for head, row in zip(heads, rows, strict=True):
            if row.strip() or head == heads[0]:
                yield (head + row).rstrip()
        yield ""

    spaced = view.num_chunks > 9  # sets numbers of several digits apart
    for token, hidden, chunk in zip(view.tokens, view.frame.hidden, view.frame.ids, strict=True):
        cells = (_shown(token.text), "." if chunk < 0 else str(chunk), "#" if hidden else "")
        room = max(map(cell_len, cells)) + spaced
        if rows[0] and (_begins_line(token.text) or len(heads[0]) + cell_len(rows[0]) + room > width):
            yield from finished()
            rows = [""] * len(heads)
        rows = [row + cell + " " * (room - cell_len(cell)) for row, cell in zip(rows, cells, strict=True)]
        if token.text.endswith("\n"):
            yield from finished()
            rows = [""] * len(heads)
    if rows[0]:
        yield from finished()


def show_written(texts: Sequence[Written], console: Console, seconds: float = 4.0) -> None:
    """Texts that decoders filled, side by side, with what they took; in a terminal pass by pass.

    All of them move at the same number of forward passes per second, so that the longest takes about `seconds`.
    """
    last = max(text.forwards for text in texts)
    if console.is_terminal:
        with Live(_side_by_side(texts, 0, console), console=console, auto_refresh=False) as live:
            for at in range(1, last + 1):
                time.sleep(seconds / last)
                live.update(_side_by_side(texts, at, console), refresh=True)
    else:
        console.print(_side_by_side(texts, last, console))


def _side_by_side(texts: Sequence[Written], at: int, console: Console) -> Table:
    """The texts after `at` forward passes: in columns where there is room, else one below the other."""
    coloured = _in_colour(console)
    panels = []
    for text in texts:
        done = min(at, text.forwards)
        head = f"{text.label}: forward {done} of {text.forwards}"
        below = text.sentence if done == text.forwards else ""
        inner = Text("\n").join([filling_text(text.filling, done, coloured), Text(below, "dim")])
        panels.append(Panel(inner, title=head, title_align="left"))
    widest = max(len(line) for text in texts for line in "".join(text.filling.tokens[1:]).splitlines())
    beside = console.width >= max(LEAST_BESIDE, len(texts) * (widest + 5))
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in panels if beside else panels[:1]:
        table.add_column(ratio=1)
    for row in [panels] if beside else [[panel] for panel in panels]:
        table.add_row(*row)
    return table


def filling_text(filling: Filling, at: int, coloured: bool) -> Text:
    """A text after `at` forward passes as it reads: what was written on its colour, what is missing as blanks."""
    text = Text()
    for position, came in enumerate(filling.came):
        if not position:
            continue  # BOS
        token = filling.tokens[position]
        if came > at:
            text.append(BLANK, colour(filling.groups[position]) if coloured else "")
        elif came:
            style = on_colour(filling.groups[position]) if coloured else ""
            shown = token.replace("\n", "↵\n") if coloured else token
            text.append(harmless(shown), f"bold {style}" if came == at and coloured else style)
        else:
            text.append(harmless(token))
    return text


def _key(view: ChunkView, coloured: bool) -> str:
    masked, unrouted = ("underlined", "dim") if coloured else ("#", ".")
    who = "router" if any(view.frame.scores) else "model"
    parts = [f"{masked}: MASK to the {who} here"] if any(view.frame.hidden) else []
    parts += [f"{unrouted}: in no chunk yet"] if UNROUTED in view.frame.ids else []
    return "; ".join(parts)


def _legend(view: ChunkView, coloured: bool, width: int) -> Table:
    """Sizes of the chunks and what kinds of tokens they hold; kinds that hardly occur, or have no room, are left
    out, the rarest first."""
    counts = view.contents[0].kinds
    sums = [sum(column) for column in zip(*counts, strict=True)]
    room, kinds = width - len("chunk  size  ") - BAR, []
    for number in sorted(range(len(sums)), key=lambda kind: -sums[kind]):
        room -= 2 + max(len("100%"), len(view.held.kinds[number]))
        if room >= 0 and 200 * sums[number] >= sum(sums):
            kinds.append(number)
    kinds.sort()
    table = Table(box=None, pad_edge=False)
    table.add_column("chunk", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("", width=BAR, no_wrap=True)
    for kind in kinds:
        table.add_column(view.held.kinds[kind], justify="right", no_wrap=True)
    most = max(1, *view.frame.sizes)
    for k, size, row in islice(
        zip(range(1, len(view.frame.sizes) + 1), view.frame.sizes, counts, strict=False), MOST_ROWS
    ):
        length = round(BAR * size / most)
        bar = Text("█" * length, style=colour(k)) if coloured else Text("#" * length)
        table.add_row(_number(k, coloured), str(size), bar, *(_share(row[kind], sum(row)) for kind in kinds))
    return table


def _number(chunk: int, coloured: bool) -> Text:
    return Text(f" {chunk} ", style=on_colour(chunk) if coloured else "")


def _share(count: float, total: float) -> str:
    return f"{count / total:.0%}" if total else "–"


# --- over a corpus -----------------------------------------------------------------------------------------------


def _typical(view: ChunkView, coloured: bool) -> Table:
    """The tokens that are typical of each chunk, of those that the router sees where it sees any."""
    held = view.contents[min(1, len(view.contents) - 1)]
    table = Table(box=None, pad_edge=False)
    table.add_column("chunk", justify="right", no_wrap=True)
    which = "" if held.which == "all" else f", {held.which} to the router"
    table.add_column(f"typical tokens (· is a space){which}")
    for k, words in enumerate(held.words[:MOST_ROWS], start=1):
        texts = [_shown(word.text.replace(" ", "·")) for word in words]
        table.add_row(_number(k, coloured), Text("  ".join(texts) or "–"))
    return table


def _bits(view: ChunkView) -> Table:
    """What position, token and window alone explain of the chunk, at some noise levels."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)  # to fit a terminal of 80 columns
    for name in ("noise", "tokens", "bits", "position", "token", "window", "left", "neighbour", "same chunk"):
        table.add_column(name, justify="right", no_wrap=True)
    for frame, held in zip(view.frames if view.axis == "noise" else [None], view.held.frames, strict=True):
        if frame is None or frame.at in TOLD or frame is view.frame:
            for one in held[1:] or held:
                parts = (one.bits, one.position.bits, one.token.bits, one.window.bits, one.left, one.neighbour.bits)
                same = "–" if one.constant is None else f"{one.constant:.0%} ({one.constant_by_chance:.0%})"
                level = "–" if frame is None else f"{frame.at:g}"
                table.add_row(level, f"{one.tokens:,} {one.which}", *(f"{part:.2f}" for part in parts), same)
    return table
