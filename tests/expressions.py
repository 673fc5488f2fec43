"""Random regular expressions and JSON schemas, and automata made in the test's own process."""

from __future__ import annotations

import json

from dcdm.decoding import constraints
from dcdm.decoding.expression_compiler import compiled

WORDS = ("ab", "x", "é", "yes", "no", "1", " ", "€uro")


def compile_here(monkeypatch):
    """Without a process for each expression."""
    monkeypatch.setattr(constraints, "_compiled", lambda request: compiled(json.loads(request)))


def expression(rng, depth=3):
    """A regular expression in what Python and Rust have in common."""
    kind = rng.randrange(6 if depth else 2)
    if kind == 0:
        return rng.choice(WORDS)
    if kind == 1:
        return rng.choice(["[a-d]", "[0-9]", "[^a-z]", "[xyz]", "."])
    inner = [expression(rng, depth - 1) for _ in range(rng.randint(2, 3))]
    if kind == 2:
        return f"(?:{'|'.join(inner)})"
    if kind == 3:
        return f"(?:{inner[0]}){rng.choice(['?', '*', '+', '{1,3}', '{2}'])}"
    return "".join(inner)


def schema(rng, depth=2):
    """A JSON schema of what is supported."""
    kind = rng.randrange(8 if depth else 5)
    if kind == 0:
        return {"type": rng.choice(["integer", "number", "boolean", "null"])}
    if kind == 1:
        return {"type": "string", "maxLength": rng.randint(0, 6)}
    if kind == 2:
        return {"enum": rng.sample(["a", 'it\'s "quoted"', 1, 2.5, None, True, "é(.*)"], rng.randint(1, 4))}
    if kind == 3:
        return {"const": rng.choice([0, "x\\y", {"a": [1, None]}, []])}
    if kind == 4:
        return {"type": ["string", "null"], "maxLength": 3}
    if kind == 5:
        return {"type": "array", "items": schema(rng, depth - 1), "minItems": rng.randint(0, 1), "maxItems": 2}
    if kind == 6:
        return {"anyOf": [schema(rng, depth - 1), schema(rng, depth - 1)]}
    names = rng.sample(["a", "b", "c"], rng.randint(1, 3))
    made = {"type": "object", "properties": {name: schema(rng, depth - 1) for name in names}}
    return {**made, "required": rng.sample(names, rng.randint(0, len(names))), "additionalProperties": False}
