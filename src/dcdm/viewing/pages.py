"""The page of a text's chunks: one file, nothing from outside, to be opened from a disk or sent by mail.

It is `assets/page.html` around the body chunks.html, its data as JSON, and `PIECES` of style and script.
Scripts there are modules, which the server's page loads as such; here they become one script.
"""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from dcdm.viewing import palette

if TYPE_CHECKING:
    from dcdm.viewing.chunks import ChunkView

ASSETS = files("dcdm.viewing") / "assets"
PIECES = ("base", "dom", "tokens", "scores", "chunks")
"""Styles and scripts; each comes behind what it imports."""
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";\n', re.MULTILINE)


def asset(name: str) -> str:
    """The text of a file in `assets/`."""
    return (ASSETS / name).read_text(encoding="utf-8")


def page(title: str, data: Any) -> str:
    """The page around `data`, which may hold what is not trusted: scripts show it as text."""
    styles = [asset(f"{name}.css") for name in PIECES if (ASSETS / f"{name}.css").is_file()]
    return Template(asset("page.html")).substitute(
        title=html.escape(title),
        style="\n".join([palette_style(), *styles]),
        body=asset("chunks.html"),
        data=inlined(data),
        script="\n".join(_as_plain_script(f"{name}.js") for name in PIECES[1:]),
    )


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


# --- the chunks of a text ----------------------------------------------------------------------------------------


def chunks_page(view: ChunkView) -> str:
    """The page of `dcdm chunks --html`: the view as one self-contained HTML file."""
    return page(f"Chunks · {view.model}", page_data(view))


def page_data(view: ChunkView) -> dict[str, Any]:
    """The view as the page reads it: scores to five digits, null where no router was asked."""
    data = view.to_dict()
    for frame in data["frames"]:
        frame["scores"] = [_short(row) for row in frame["scores"]] if any(frame["scores"]) else None
        frame["hidden"] = [int(hidden) for hidden in frame["hidden"]]
    return {**data, "bias": _short(data["bias"])}


def _short(values: list[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
