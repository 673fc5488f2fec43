"""`dcdm models`: the trained models that come with the package."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dcdm.commands.options import JsonOption, print_json, print_rows
from dcdm.shipped import CHUNKS, HOME, LANES, Figure, cards

EXAMPLES = ("dcdm models", "dcdm models --json")


def models(json: JsonOption = False) -> None:
    """List the trained models that come with dcdm: what each was trained on, and how good it is.

    A name of the list stands wherever a command takes a folder; a folder of the same name wins.
    """
    there = cards()
    if json:
        print_json([{**asdict(card), "folder": str(HOME / card.name)} for card in there])
        return
    if not there:
        print("no trained model came with this installation; `dcdm train` makes one")
        return
    for card in there:
        print(f"{card.name}: {card.says}")
        text, out = card.trained_on, card.held_out
        print(
            f"  {card.kind}, {card.parameters / 1e6:.2f}M parameters, context {card.context_length}, "
            f"{card.tokenizer}, {card.weights['bytes'] / 1e6:.1f} MB"
        )
        print(
            f"  trained on {text['source']} ({text['python']}, licence {text['licence']}): "
            f"{card.steps:,} steps, {card.tokens / 1e6:.1f}M tokens, seed {card.seed}{card.started}"
        )
        print(f"  on {out['texts']} files that it never saw, {out['tokens']:,} tokens:")
        print_rows([_row(figure) for figure in card.figures])
        print(f"  {HOME / card.name}/README.md has all of it\n")
    print(
        f"`dcdm sample`, `dcdm serve` and `dcdm.load()` take {LANES} where none is named, `dcdm chunks` {CHUNKS}."
    )


def _row(figure: Figure) -> dict[str, Any]:
    forwards = figure.forwards_per_window
    return {
        "lanes": figure.lanes, "drafts": figure.drafts, "forwards": None if forwards is None else round(forwards),
        "nats/token": f"{figure.nats_per_token:.3f}", "nats/byte": f"{figure.nats_per_byte:.3f}",
        "figure": figure.estimator,
    }  # fmt: skip
