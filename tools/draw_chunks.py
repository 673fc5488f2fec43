"""Draw a text on the colours of its chunks, and the masks: `python tools/draw_chunks.py RUN docs/images/dcdm.svg`.

RUN is a DCDM with the paper's routing, such as english-dcdm; the text is that of `dcdm demo`.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from dcdm.commands.demo import TEXT
from dcdm.io.load import load_model
from dcdm.model.masks import dual_stream_mask, noise_mask
from dcdm.viewing.chunks import ChunkView, view, window_of
from dcdm.viewing.palette import colour, ink
from draw_filling import HIGH, MARGIN, STYLE, UNSEEN, WIDE, cells

FIRST, SHOWN = " In", 13
"""Token at which the masks begin, and their positions."""
CELL, LEFT, GAP, NOISE = 11.0, 90.0, 170.0, 0.3
MORE = """
.small { font-size: 12px; } .hidden { fill: #e8e8e2; } .axis { stroke: #62625e; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) { .hidden { fill: #2a2c2d; } .axis { stroke: #a3a39d; } }
"""


def coloured_text(shown: ChunkView, top: float) -> tuple[list[str], float]:
    """The tokens behind BOS on the colours of their chunks, and where they end."""
    parts, low = [], top
    for cell in cells([token.text for token in shown.tokens], [1] * len(shown.tokens)):
        x, y = MARGIN + cell.column * WIDE, top + cell.line * HIGH
        long, ground, low = len(cell.text) * WIDE, colour(shown.frame.ids[cell.position]), y
        parts.append(
            f'<rect x="{x + 0.5:.1f}" y="{y - 14:g}" width="{long - 1:.1f}" height="{HIGH - 2:g}" rx="2" '
            f'fill="{ground}"/><text x="{x:.1f}" y="{y:g}" fill="{ink(ground)}" textLength="{long:.1f}" '
            f'lengthAdjust="spacingAndGlyphs">{escape(cell.text.translate(UNSEEN))}</text>'
        )
    return parts, low


def mask(allowed: Tensor, chunks: list[int], labels: list[str], left: float, top: float, title: str) -> list[str]:
    """A mask as cells in the colours of its keys' chunks, rows being queries."""
    parts = [f'<text class="small" x="{left:g}" y="{top - 10:g}">{escape(title)}</text>']
    for q, row in enumerate(allowed.tolist()):
        y = top + q * CELL
        ground = colour(chunks[q])
        parts.append(
            f'<text class="small" x="{left - 8:g}" y="{y + 9:g}" text-anchor="end">{escape(labels[q])}</text>'
            f'<rect x="{left - 6:g}" y="{y:g}" width="3" height="{CELL - 1:g}" fill="{ground}"/>'
        )
        for k, sees in enumerate(row):
            look = f'fill="{colour(chunks[k])}"' if sees else 'class="hidden"'
            parts.append(
                f'<rect x="{left + k * CELL:g}" y="{y:g}" width="{CELL - 1:g}" height="{CELL - 1:g}" {look}/>'
            )
    if len(chunks) > SHOWN:
        half, whole = SHOWN * CELL - 0.5, len(chunks) * CELL
        parts.append(
            f'<path class="axis" d="M{left + half:g} {top:g}v{whole:g}M{left:g} {top + half:g}h{whole:g}"/>'
        )
    return parts


def draw_chunks(run: str, place: str) -> None:
    """One SVG: the text with nothing masked; below it M^noise and M^chunk of a part, a third of it masked."""
    model, tokenizer = load_model(run)
    window, _ = window_of(TEXT, tokenizer, model.config.context_length)
    known, noisy = (view(model, window, noise=level) for level in (0.0, NOISE))
    text, low = coloured_text(known, 2 * MARGIN)
    start = next((at for at, token in enumerate(noisy.tokens) if token.text == FIRST), 1)
    part = slice(start, start + SHOWN)
    ids, masked = noisy.frame.ids[part], torch.tensor(noisy.frame.hidden[part])
    words = [token.text.strip() for token in noisy.tokens[part]]
    z = ["MASK" if hidden else word for word, hidden in zip(words, masked.tolist(), strict=True)]
    top, right = low + 56, LEFT + SHOWN * CELL + GAP
    both = [f"z {word}" for word in z] + [f"x {word}" for word in words]
    parts = text + mask(noise_mask(masked[None])[0], ids, z, LEFT, top, "block 0: who sees whom")
    pair = dual_stream_mask(torch.tensor([ids]))[0]
    parts += mask(pair, ids * 2, both, right, top, "then: noisy z and clean x, by chunk")
    wide, high = right + 2 * SHOWN * CELL + MARGIN, top + 2 * SHOWN * CELL + MARGIN
    title = "A text on the colours of its chunks, and the two masks of DCDM"
    Path(place).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" width="{wide:g}" '
        f'height="{high:g}" role="img" aria-label="{title}">\n<title>{title}</title>\n'
        f"<style>{STYLE}{MORE}</style>\n"
        f'<rect class="ground" x="0.5" y="0.5" width="{wide - 1:g}" height="{high - 1:g}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    draw_chunks(sys.argv[1], sys.argv[2])
