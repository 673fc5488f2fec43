"""Draw the masks of docs/method.md and docs/lanes.md: `python tools/draw_masks.py docs/images/masks`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from dcdm.lanes.masks import led_positions, left
from dcdm.model.masks import CLEAN, Mask, Slots, chunk_causal, dual_stream, dual_stream_slots, noise


def draw_masks(folder: str) -> list[str]:
    """Write one PNG per mask into `folder`, on a small example; returns the paths."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    ids = torch.tensor([0, 2, 1, 1, 3, 2, 1, 3, 2, 2, 1, 3])
    masked = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0]).bool()
    order = ids.argsort(stable=True)
    both = torch.cat([order, order + len(ids)])
    one = Slots.of(ids, masked)
    streams = dual_stream_slots(ids)
    sorted_labels = streams.chunk[both].tolist(), streams.stream[both].tolist()
    examples = [
        (noise, one, [f"{p}{'·' if m else ''}" for p, m in enumerate(masked.tolist())], "dots: masked"),
        (chunk_causal, one, ids.tolist(), "labels: chunks"),
        (dual_stream, streams, [f"z{c}" for c in ids.tolist()] + [f"x{c}" for c in ids.tolist()], "z ⊕ x"),
        (
            dual_stream.named("dual_stream_sorted"),
            streams[both],
            [f"{'z' if s else 'x'}{c}" for c, s in zip(*sorted_labels, strict=True)],
            "the same mask, slots sorted by chunk",
        ),
        *_left_examples(),
    ]
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for mask, slots, labels, note in examples:
        size = 1.6 + 0.19 * len(labels)
        figure = Figure(figsize=(size, size), layout="constrained")
        axis = figure.subplots()
        axis.imshow(mask.dense(slots), cmap=ListedColormap(["#f2f2f2", "#0072b2"]), vmin=0, vmax=1)
        axis.set_xticks(range(len(labels)), [str(x) for x in labels], fontsize=6)
        axis.set_yticks(range(len(labels)), [str(x) for x in labels], fontsize=6)
        axis.set_xticks([x - 0.5 for x in range(len(labels) + 1)], minor=True)
        axis.set_yticks([x - 0.5 for x in range(len(labels) + 1)], minor=True)
        axis.grid(which="minor", color="white", linewidth=0.6)
        axis.tick_params(which="both", length=0)
        axis.set(xlabel="key", ylabel="query")
        axis.set_title(f"{mask.name.replace('_', ' ')} ({note})", fontsize=9)
        paths.append(str(Path(folder) / f"{mask.name}.png"))
        figure.savefig(paths[-1], dpi=110)
    return paths


def _left_examples() -> list[tuple[Mask, Slots, list[str], str]]:
    """BOS and twelve tokens in three lanes, whose second and third start with a seed slot."""
    ids = torch.tensor([0, *[1, 2, 3, 4] * 3])
    seeds = (ids == 1) & ~led_positions(ids)
    clean, masked = Slots.of(ids, stream=CLEAN), Slots.of(ids, torch.ones_like(seeds))[seeds]
    lane = [0, *[number for number in "abc" for _ in range(4)]]
    labels = ["BOS", *(f"{lane[at]}{ids[at]}" for at in range(1, 13)), "?b1", "?c1"]
    order = [*ids.argsort(stable=True).tolist(), 13, 14]
    slots = Slots.cat(clean, masked)
    return [
        (left, slots, labels, "three lanes in reading order; ?: seeds"),
        (left.named("left_sorted"), slots[order], [labels[at] for at in order], "the same, sorted by chunk"),
    ]


if __name__ == "__main__":
    print("\n".join(draw_masks(sys.argv[1] if len(sys.argv) > 1 else ".")))
