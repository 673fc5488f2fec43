"""Self-contained pages: one file, nothing from outside, to be opened from a disk or sent by mail.

First the skeleton and its pieces, last the page of a text's chunks. `dcdm demo` has its own.

Every page is `assets/page.html` around a body, NAME.html, its data as JSON, and pieces of style and script from
`assets/`. Scripts there are modules, which the server's page loads as such; here all that a page needs become
one script.
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


def asset(name: str) -> str:
    """The text of a file in `assets/`."""
    return (ASSETS / name).read_text(encoding="utf-8")


def page(name: str, title: str, data: Any) -> str:
    """The page whose body is NAME.html and whose script and style are NAME.js and NAME.css.

    What the script imports comes with it, and so do the styles of the same names. Whatever is not trusted goes into
    `data`, which scripts show as text.
    """
    names = ["base"]
    _add_with_imports(name, names)
    styles = [asset(f"{one}.css") for one in names if (ASSETS / f"{one}.css").is_file()]
    return Template(asset("page.html")).substitute(
        title=html.escape(title),
        style="\n".join([palette_style(), *styles]),
        body=asset(f"{name}.html"),
        data=inlined(data),
        script="\n".join(_as_plain_script(f"{one}.js") for one in names[1:]),
    )


_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)


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


# --- the chunks of a text ----------------------------------------------------------------------------------------


def chunks_page(view: ChunkView) -> str:
    """The page of `dcdm chunks --html`: the view as one self-contained HTML file."""
    return page("chunks", f"Chunks · {view.model}", page_data(view))


def page_data(view: ChunkView) -> dict[str, Any]:
    """The view as the page reads it: scores to five digits, null where no router was asked."""
    data = view.to_dict()
    for frame in data["frames"]:
        frame["scores"] = [_short(row) for row in frame["scores"]] if any(frame["scores"]) else None
        frame["hidden"] = [int(hidden) for hidden in frame["hidden"]]
    return {**data, "bias": _short(data["bias"])}


def _short(values: list[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
