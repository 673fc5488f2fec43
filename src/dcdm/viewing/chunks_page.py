"""The page of `dcdm chunks --html`."""

from __future__ import annotations

from typing import Any

from dcdm.viewing.chunks import ChunkView
from dcdm.viewing.page import assemble, asset
from dcdm.viewing.token_kinds import KINDS

DIGITS = 5  # significant ones of a score on the page


def page(view: ChunkView) -> str:
    """The view as one self-contained HTML file."""
    return assemble(f"Chunks · {view.model}", asset("chunks.html"), page_data(view), ["tokens", "chunks"])


def page_data(view: ChunkView) -> dict[str, Any]:
    """The view as the page reads it: scores shortened, null where no router was asked."""
    data = view.to_dict()
    for frame in data["frames"]:
        frame["scores"] = [_short(row) for row in frame["scores"]] if any(frame["scores"]) else None
        frame["hidden"] = [int(hidden) for hidden in frame["hidden"]]
    return {**data, "bias": _short(data["bias"]), "kinds": KINDS}


def _short(values: list[float]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]
