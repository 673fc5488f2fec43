"""Small pieces of HTML that reports are put together from; every text is escaped here."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcdm.viewing.plot import legend

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


def grid(header: Sequence[str], rows: Sequence[Sequence[Any]], text: Sequence[str]) -> str:
    looks = [' class="text"' if name in text else "" for name in header]
    head = "".join(f'<th scope="col"{look}>{escape(name)}</th>' for name, look in zip(header, looks, strict=True))
    lines = [
        "".join(f"<td{look}>{escape(str(cell))}</td>" for cell, look in zip(row, looks, strict=True))
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def drawing(drawn: str, keys: Sequence[tuple[str, str]], caption: str) -> str:
    return f"<figure>{drawn}{legend(keys)}<figcaption>{paragraph(caption)}</figcaption></figure>" if drawn else ""


def small_drawing(title: str, drawn: str, said: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>{drawn}<figcaption>{paragraph(said)}</figcaption></figure>"


def many(count: int, one: str, more: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else more or one + 's'}"
