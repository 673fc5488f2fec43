"""JSON schemas of which an automaton can be made: whatever it would not enforce is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from dcdm.config import ConfigError

DEPTH = 32
REFERENCES = 3
"""References within references; `outlines-core` leaves out what lies behind more of them."""
ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions"}
LIMITS = ("minItems", "maxItems", "minLength", "maxLength")
ALONE = ("enum", "const", "anyOf", "$ref")
"""Keywords beside which `outlines-core` does not look at others."""
KEYWORDS = {"type", "properties", "required", "additionalProperties", "items", *LIMITS, *ALONE}
TYPES: dict[str, type | tuple[type, ...]] = {
    "null": type(None), "boolean": bool, "string": str, "array": list, "object": dict, "number": (int, float)
}  # fmt: skip


def check_schema(schema: Any) -> None:
    _Check(schema).part(schema, "schema", ("#",))


class _Check:
    def __init__(self, root: Any) -> None:
        self.root = root
        self._checked: set[tuple[str, int]] = set()

    def part(self, schema: Any, where: str, references: Sequence[str]) -> None:
        """A schema within the whole one, and those within it; `references` lead to it."""
        if where.count(".") > DEPTH:
            raise ConfigError(f"schema: it is nested more than {DEPTH} deep")
        if not isinstance(schema, dict):
            raise ConfigError(f"{where} must be an object")
        _check_keywords(schema, where)
        _check_values(schema, where)
        _check_object(schema, where)
        for name, value in schema.items():
            if name in ("properties", "$defs", "definitions") and isinstance(value, dict):
                for key, inner in value.items():
                    self.part(inner, f"{where}.{name}[{key[:40]!r}]", references)
            elif name == "anyOf" and isinstance(value, list):
                for number, inner in enumerate(value):
                    self.part(inner, f"{where}.anyOf[{number}]", references)
            elif name == "items":
                self.part(value, f"{where}.items", references)
            elif name == "$ref":
                self._reference(value, f"{where}.$ref", references)

    def _reference(self, reference: Any, where: str, references: Sequence[str]) -> None:
        if reference in references:
            raise ConfigError(f"{where}: it leads back to where it stands; what repeats itself has no bound")
        if len(references) > REFERENCES:
            raise ConfigError(f"{where}: a $ref within more than {REFERENCES} others cannot be enforced here")
        target = self.root
        parts = reference.split("/") if isinstance(reference, str) and not {*"~%"} & {*reference} else [None]
        for at, part in enumerate(parts):
            found = part == "#" if at == 0 else isinstance(target, dict) and part in target
            if not found:
                raise ConfigError(f"{where}: it must name a part of this schema, as '#/$defs/name' does")
            target = target if at == 0 else target[part]
        if (reference, len(references)) not in self._checked:
            self.part(target, where, [*references, reference])
            self._checked.add((reference, len(references)))


def _check_keywords(schema: dict[str, Any], where: str) -> None:
    """What is known, and what may stand beside what."""
    for name in schema:
        if name not in KEYWORDS | ANNOTATIONS:
            known = ", ".join(sorted(KEYWORDS))
            raise ConfigError(f"{where}: the keyword {name!r} cannot be enforced here; supported are {known}")
    if not {"type", *ALONE, "properties"} & schema.keys():
        raise ConfigError(f"{where}: give type, enum, const, anyOf or $ref; anything at all has no bound")
    for alone in ALONE:
        beside = KEYWORDS & schema.keys() - {alone, *(("type",) if alone in ("enum", "const") else ())}
        if alone in schema and beside:
            raise ConfigError(f"{where}: {min(beside)} beside {alone} cannot be enforced here; leave one out")
    for name in ("type", "enum", "anyOf"):
        if schema.get(name) == []:
            raise ConfigError(f"{where}: nothing matches an empty {name}")
    for name in LIMITS:
        value = schema.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{where}: {name} must be a whole number, at least 0")


def _check_values(schema: dict[str, Any], where: str) -> None:
    """Those of `enum` and `const`: of the type that is given beside them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    for value in values if isinstance(values, list) else []:
        if "type" in schema and not any(_is_of(value, each) for each in _types(schema)):
            raise ConfigError(f"{where}: type and the values beside it disagree")
        for name in _names(value):
            _check_name(name, where)


def _check_object(schema: dict[str, Any], where: str) -> None:
    types, properties = _types(schema), schema.get("properties")
    if not isinstance(schema.get("additionalProperties", False), bool):
        raise ConfigError(f"{where}: additionalProperties can only be true or false here")
    if not {*ALONE} & schema.keys():
        if "object" in types and properties is None:
            raise ConfigError(f"{where}: an object needs properties here; free ones have no bound")
        if "array" in types and "items" not in schema:
            raise ConfigError(f"{where}: an array needs items here; those of anything have no bound")
    if properties is not None and "type" in schema and "object" not in types:
        raise ConfigError(f"{where}: properties are those of an object, which type excludes")
    described = properties if isinstance(properties, dict) else {}
    for name in described:
        _check_name(name, where)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) and name in described for name in required):
        raise ConfigError(f"{where}: required must list names that properties describe")


def _check_name(name: str, where: str) -> None:
    if json.dumps(name, ensure_ascii=False)[1:-1] != name:
        raise ConfigError(f"{where}: the name {name[:40]!r} holds signs that JSON would escape; choose another")


def _types(schema: dict[str, Any]) -> list[Any]:
    types = schema.get("type")
    return types if isinstance(types, list) else [types]


def _is_of(value: Any, name: Any) -> bool:
    if isinstance(value, bool) or name == "boolean":
        return isinstance(value, bool) and name == "boolean"
    if name == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(name, str) and name in TYPES and isinstance(value, TYPES[name])


def _names(value: Any) -> Iterator[str]:
    """Of all objects in a value, however deep."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield from one
            left += one.values()
        elif isinstance(one, list):
            left += one
