"""Chunks in a terminal: on coloured ground, or numbered where there is no colour."""

from __future__ import annotations

from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcdm.config import harmless, many
from dcdm.viewing.chunks import UNROUTED, ChunkView
from dcdm.viewing.palette import colour, on_colour

BAR = 10
MOST_ROWS = 32
TOLD = (0, 0.3, 0.6, 0.9, 1)
"""Noise levels of the table of bits, beside the one that is shown."""
BITS = (
    "bits of the chunk, and how many position, token and window explain alone, chance taken out; left: to context, "
    "noise, and several together; neighbour: what the token before tells; same chunk: tokens that go where most of "
    "their type go (so many by chance)"
)


def show(view: ChunkView, console: Console) -> None:
    """Print the view's frame: tokens and sizes; over a corpus, what chunks hold and why."""
    _line(headline(view), console)
    if view.note:
        _line(view.note, console)
    console.print()
    show_tokens(view, console)
    _line(_key(view, _in_colour(console)), console, "dim")
    console.print()
    console.print(_sizes(view, _in_colour(console)))
    if view.held.windows > 1:
        _line(f"over {view.held.source}:", console, "dim")
        for table in (_typical(view, _in_colour(console)), _bits(view)):
            console.print()
            console.print(table)
        _line(BITS, console, "dim")
    if len(view.frame.sizes) > MOST_ROWS:
        console.print(f"… {len(view.frame.sizes) - MOST_ROWS} further chunks; --json and --html have all")


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


def _key(view: ChunkView, coloured: bool) -> str:
    masked, unrouted = ("underlined", "dim") if coloured else ("#", ".")
    who = "router" if any(view.frame.scores) else "model"
    parts = [f"{masked}: MASK to the {who} here"] if any(view.frame.hidden) else []
    parts += [f"{unrouted}: in no chunk yet"] if UNROUTED in view.frame.ids else []
    return "; ".join(parts)


def _sizes(view: ChunkView, coloured: bool) -> Table:
    """Sizes of the chunks."""
    table = Table(box=None, pad_edge=False)
    table.add_column("chunk", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("", width=BAR, no_wrap=True)
    most = max(1, *view.frame.sizes)
    for k, size in enumerate(view.frame.sizes[:MOST_ROWS], start=1):
        length = round(BAR * size / most)
        bar = Text("█" * length, style=colour(k)) if coloured else Text("#" * length)
        table.add_row(_number(k, coloured), str(size), bar)
    return table


def _number(chunk: int, coloured: bool) -> Text:
    return Text(f" {chunk} ", style=on_colour(chunk) if coloured else "")


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
