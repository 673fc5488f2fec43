"""Self-contained pages: one file, nothing from outside, to be opened from a disk or sent by mail.

A page is a body, its data as JSON, and pieces of style and script from `assets/`; `base` comes first in each.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from dcdm.viewing import palette

ASSETS = files("dcdm.viewing") / "assets"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def asset(name: str) -> str:
    """The text of a file in `assets/`."""
    return (ASSETS / name).read_text(encoding="utf-8")


def assemble(title: str, body: str, data: Any, pieces: Sequence[str] = ()) -> str:
    """The page. `body` is trusted HTML; whatever is not goes into `data`, which scripts show as text.

    `pieces` names the parts of `assets/` that are used beside `base`: NAME.css and NAME.js.
    """
    names = ("base", *pieces)
    style = "\n".join([palette_style(), *(asset(f"{name}.css") for name in names)])
    script = "\n".join(asset(f"{name}.js") for name in names)
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
