"""Self-contained pages: one file, nothing from outside, to be opened from a disk or sent by mail.

A page is a body, its data as JSON, and pieces of style and script from `assets/`. Scripts there are modules, which
the server's page loads as such; here all that a page needs are joined to one script.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.resources import files
from typing import Any

from dcdm.viewing import palette

ASSETS = files("dcdm.viewing") / "assets"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def asset(name: str) -> str:
    """The text of a file in `assets/`."""
    return (ASSETS / name).read_text(encoding="utf-8")


def assemble(title: str, body: str, data: Any, piece: str) -> str:
    """The page. `body` is trusted HTML; whatever is not goes into `data`, which scripts show as text.

    `piece` names the page's own script and style in `assets/`, NAME.js and NAME.css; what the script imports comes
    with it, and so do the styles of the same names.
    """
    names = ["base"]
    _add_with_imports(piece, names)
    style = "\n".join([palette_style(), *(asset(f"{name}.css") for name in names if _exists(f"{name}.css"))])
    script = "\n".join(_as_plain_script(f"{name}.js") for name in names[1:])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<style>
{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{inlined(data)}</script>
<script>
"use strict";
{script}</script>
</body>
</html>
"""


_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)


def _exists(name: str) -> bool:
    return (ASSETS / name).is_file()


def _add_with_imports(name: str, names: list[str]) -> None:
    """Append a piece behind all that its script imports."""
    if name in names:
        return
    for imported in _IMPORT.findall(asset(f"{name}.js")):
        _add_with_imports(imported, names)
    names.append(name)


def _as_plain_script(name: str) -> str:
    """A module without its imports and exports, for a script that holds all modules; their names are distinct."""
    return re.sub(r"^export ", "", _IMPORT.sub("", asset(name)), flags=re.MULTILINE)


def inlined(data: Any) -> str:
    """JSON that may stand inside a script element: it holds no `<`, so nothing in it can end the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def palette_style() -> str:
    """The package's colours as classes `chunk-0`…`chunk-8` that set --chunk and --ink."""
    rules = (
        f".chunk-{k} {{ --chunk: {palette.colour(k)}; --ink: {palette.ink(palette.colour(k))}; }}"
        for k in range(len(palette.CHUNKS) + 1)
    )
    return "\n".join(rules)


# --- pieces of HTML that reports are put together from; every text is escaped here -------------------------------


escape: Callable[[str], str] = html.escape


def section(title: str, inner: str, wide: bool = False) -> str:
    return f'<section class="panel{" wide" if wide else ""}">\n<h2>{escape(title)}</h2>\n{inner}\n</section>\n'


def paragraph(text: str) -> str:
    return f'<p class="small quiet">{escape(text)}</p>'


def bullets(texts: Sequence[str] | Mapping[str, Any]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="small quiet">{items}</ul>' if items else ""


def details(title: str, inner: str) -> str:
    return f'<details class="small"><summary>{escape(title)}</summary>{inner}</details>'


def badge(verdict: str) -> str:
    """A word such as "confirmed" in its colour."""
    return f'<span class="verdict {escape(verdict)}">{escape(verdict)}</span>'


def grid(
    header: Sequence[str], rows: Sequence[Sequence[Any]], text: Sequence[str], verdicts: Collection[str] = ()
) -> str:
    """A table; columns of `text` are set left, those of `verdicts` hold words in colour."""
    looks = [' class="text"' if name in text else "" for name in header]
    head = "".join(f'<th scope="col"{look}>{escape(name)}</th>' for name, look in zip(header, looks, strict=True))
    show = [badge if name in verdicts else escape for name in header]
    lines = [
        "".join(f"<td{look}>{shown(str(cell))}</td>" for cell, look, shown in zip(row, looks, show, strict=True))
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def drawing(drawn: str, caption: str) -> str:
    """A plot with its caption; nothing where there is no plot."""
    return f"<figure>{drawn}<figcaption>{paragraph(caption)}</figcaption></figure>" if drawn else ""


def small_drawing(title: str, drawn: str, caption: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>{drawn}<figcaption>{paragraph(caption)}</figcaption></figure>"


def many(count: int, one: str, more: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else more or one + 's'}"
