"""The playground's files: its own in `assets/`, and the reports' base style and palette, which it shares."""

from __future__ import annotations

from importlib.resources import files

from dcdm.viewing.page import asset as report_asset
from dcdm.viewing.page import palette_style

ASSETS = files("dcdm.serving") / "assets"
INDEX = "index.html"
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def load_assets() -> dict[str, tuple[bytes, str]]:
    """Every file of the page by name: its bytes and its content type. Whatever is not in here does not exist."""
    texts = {file.name: file.read_text(encoding="utf-8") for file in ASSETS.iterdir() if file.is_file()}
    texts["base.css"] = report_asset("base.css")
    texts["palette.css"] = palette_style() + "\n"
    return {
        name: (text.encode(), TYPES[suffix])
        for name, text in texts.items()
        if (suffix := name.rpartition(".")[2]) in TYPES
    }
