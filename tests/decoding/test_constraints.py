"""Texts that must match an expression match it, in whatever order they are filled; what cannot match is refused."""

from __future__ import annotations

import itertools
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
from tokenizers import AddedToken

import dcdm
import tiny
from corpora import prose
from dcdm.config import ConfigError
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer, train_bpe
from dcdm.decoding.constraints import Automaton, CompilerBusy, Constraint, Reach, blank_runs, compile_expression
from dcdm.decoding.json_schemas import check_schema
from expressions import compile_here, expression, schema

KINDS = ["lanes", "ar", "causal", "bdlm", "mdlm", "strided", "paper"]
COMMITS = ["chunk", "position", "steps:3", "threshold:0.5", "ancestral:4"]


@pytest.fixture(scope="module")
def models():
    made = {kind: tiny.model(kind, 257) for kind in KINDS[1:]}
    lanes = {"kind": "lanes", "lanes": (1, 2, 4)}
    return made | {"lanes": tiny.model("mdlm", 257, **lanes)}


def decoder(kind, rng):
    options = {"temperature": rng.choice([0.0, 1.0, 2.0]), "top_p": rng.choice([None, 0.9])}
    if kind == "lanes":
        return options | {"lanes": rng.choice([1, 2, 3, 8])}
    return options if kind == "ar" else options | {"commit": rng.choice(COMMITS)}


def written(models, rng, **wanted):
    """A text that was asked to match, or None if none of the tried lengths is possible."""
    kind, tokenizer = rng.choice(KINDS), byte_tokenizer()
    model, length = models[kind], rng.randint(1, 40)
    prompt = rng.choice(["", "say "])
    if kind != "ar" and rng.random() < 0.3:
        prompt, length = f"{prompt}[[{length}]] end", None
    try:
        result = dcdm.generate(
            model, [prompt], tokenizer=tokenizer, max_new_tokens=length, seed=rng.randrange(99), **wanted,
            **decoder(kind, rng),
        )  # fmt: skip
    except ConfigError as error:
        if "no text of" not in str(error):
            raise
        return None
    text = result.texts[0]
    return text if length is not None else text.removeprefix(prompt.partition("[[")[0]).removesuffix(" end")


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_expressions_and_schemas_are_matched_by_every_kind_and_order(models, monkeypatch, count):
    compile_here(monkeypatch)
    rng, answered = random.Random(count), 0
    for _ in range(count):
        if rng.random() < 0.5:
            regex = expression(rng)
            text = written(models, rng, regex=regex)
            assert text is None or re.fullmatch(regex, text), (regex, text)
        else:
            wanted = schema(rng)
            text = written(models, rng, schema=wanted)
            if text is not None:
                jsonschema.validate(json.loads(text), wanted)
        answered += text is not None
    assert answered > count / 3


PIECES = [b"a", b"b", b"ab", b"ba", b"", b"c"]
EOS = 4


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("regex", ["(ab)*", "a(bc)?", "a{2,3}b?", "(a|bc)*c", "abab|ba+", "[ab]*c[ab]?"])
def test_a_token_is_allowed_if_and_only_if_the_canvas_can_still_be_completed(regex, ends, monkeypatch):
    """Against all fillings, with tokens of several bytes and any positions filled before."""
    compile_here(monkeypatch)
    constraint = Constraint(compile_expression(regex=regex), PIECES, EOS)
    rng, length = random.Random(3), 4

    def matches(line):
        if EOS in line:
            if not ends:
                return False
            line = line[: line.index(EOS)]
        return re.fullmatch(regex, b"".join(PIECES[token] for token in line).decode()) is not None

    good = [line for line in itertools.product(range(len(PIECES)), repeat=length) if matches(line)]
    assert constraint.possible(length, ends) == bool(good)
    for _ in range(25 if good else 0):
        known = rng.choice(good)
        line = [token if rng.random() < 0.5 else None for token in known]
        places = [at for at in range(length) if line[at] is None]
        if not places:
            continue
        places = sorted(rng.sample(places, rng.randint(1, len(places))))
        fixed = list(line)

        def draw(number, allowed, fixed=fixed, places=places):
            at = places[number]
            fits = [each for each in good if all(t in (None, u) for t, u in zip(fixed, each, strict=True))]
            assert {each[at] for each in fits} == set(allowed.nonzero().squeeze(-1).tolist())
            fixed[at] = rng.choice(sorted({each[at] for each in fits}))
            return fixed[at]

        drawn = constraint.fill(Reach(constraint, length, ends), line, places, draw)
        assert drawn == [fixed[at] for at in places]


@pytest.mark.parametrize(("order", "most"), [("from the left", 2), ("any", 12)])
def test_what_has_not_changed_is_not_computed_again_and_the_same_is_allowed(order, most, monkeypatch):
    """The work for a token does not grow with the text; forgetting everything in between changes nothing."""
    compile_here(monkeypatch)
    length, rng, work = 60, random.Random(1), []
    constraint = Constraint(compile_expression(regex="([ab]{2}c?)*|b+"), PIECES, EOS)
    for name in ("before", "after"):
        step = getattr(Constraint, name)
        monkeypatch.setattr(Constraint, name, lambda *given, step=step: work.append(1) or step(*given))
    reach, line, free = Reach(constraint, length, True), [None] * length, list(range(length))
    work.clear()
    while free:
        places = free[:1] if order == "from the left" else sorted(rng.sample(free, min(3, len(free))))
        seen = []

        def draw(number, allowed, seen=seen):
            seen.append(allowed.tolist())
            return rng.choice(allowed.nonzero().squeeze(-1).tolist())

        drawn = constraint.fill(reach, line, places, draw)
        spent = len(work)
        again = iter(drawn)
        fresh = []
        constraint.fill(
            Reach(constraint, length, True), line, places,
            lambda number, allowed, fresh=fresh, again=again: fresh.append(allowed.tolist()) or next(again),
        )  # fmt: skip
        assert seen == fresh
        work[spent:] = []
        for place, token in zip(places, drawn, strict=True):
            line[place] = token
        free = [at for at in free if at not in places]
    assert len(work) <= most * length


def test_each_blank_matches_its_own_expression(models):
    result = dcdm.generate(
        models["causal"], ["a [[4]] b [[2]]"], tokenizer=byte_tokenizer(), regex=["[0-9]+", "x+"], commit="chunk"
    )
    assert re.fullmatch("a [0-9]{4} b xx", result.texts[0])
    assert blank_runs([9, 5, 9, 9, 5, 9], 9) == [(0, 1), (2, 2), (5, 1)]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"regex": "a{30}", "max_new_tokens": 20}, "no text of up to 20 tokens matches"),
        ({"regex": "a(?=b)"}, "regex: "),
        ({"regex": "("}, "regex: "),
        ({"regex": "a", "schema": {"type": "null"}}, "one of them"),
        ({"regex": "a", "max_new_tokens": 100}, "one window"),
        ({"regex": ["a", "b"]}, "one for all blanks"),
        ({"schema": {"type": "integer", "minimum": 3}}, "'minimum' cannot be enforced"),
        ({"schema": {"type": "string", "pattern": ".*"}}, "'pattern'"),
        ({"schema": {"oneOf": [{"type": "null"}]}}, "'oneOf'"),
        ({"schema": {"type": "object"}}, "needs properties"),
        ({"schema": {"type": ["object", "null"]}}, "needs properties"),
        ({"schema": {"type": "array"}}, "needs items"),
        ({"schema": {"type": "array", "items": {}}}, "schema.items: give type"),
        ({"regex": "a", "prompts": ["[[2]]"], "max_new_tokens": 4}, "not both"),
        ({"regex": "a", "tokenizer": None, "prompts": [[1]]}, "tokenizer="),
    ],
)
def test_what_cannot_be_enforced_or_matched_is_refused_by_name_before_any_forward(
    models, wanted, said, monkeypatch
):
    model = models["causal"]
    for name in ("extend", "denoise"):
        monkeypatch.setattr(model, name, lambda *_: pytest.fail("a forward"))
    asked = {"prompts": ["x"], "tokenizer": byte_tokenizer(), "max_new_tokens": 8, **wanted}
    with pytest.raises(ConfigError, match=re.escape(said)):
        dcdm.generate(model, asked.pop("prompts"), **asked)


def test_an_expression_that_needs_too_much_is_given_up(monkeypatch):
    monkeypatch.setattr("dcdm.decoding.constraints.SECONDS", 1)
    with pytest.raises(ConfigError, match="more than 1 seconds"):
        compile_expression(regex="(.*a.{18}){3}")
    table = compile_expression(regex="^ab?$").table
    with pytest.raises(ConfigError, match="too many for a vocabulary"):
        Constraint(Automaton(table, 0, []), [b"a"] * 20_000_000, 0)


def test_a_machine_without_time_is_not_reported_as_a_bad_expression(monkeypatch):
    monkeypatch.setattr("dcdm.decoding.constraints.CLOCK_SECONDS", 0.01)
    with pytest.raises(CompilerBusy, match="try again"):
        compile_expression(regex="a")


def accepts(automaton, text):
    state = automaton.first
    for byte in text.encode():
        state = automaton.table[state, byte]
        if state < 0:
            return False
    return state in automaton.final


def chain(length):
    """Objects, each of which refers to the next one."""
    object_of = {"type": "object", "required": ["a"]}
    links = {f"{n}": {**object_of, "properties": {"a": {"$ref": f"#/$defs/{n + 1}"}}} for n in range(1, length)}
    return {"$ref": "#/$defs/1", "$defs": {**links, f"{length}": {"type": "null"}}}


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        ({"properties": {"a": {"type": "null"}, "rest": {"$ref": "#"}}}, "leads back"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "leads back"),
        (chain(4), "within more than 3 others"),
        ({"$ref": "https://elsewhere.example"}, "must name a part of this schema"),
        ({"$ref": "#/$defs/b", "$defs": {"a": {"type": "null"}}}, "must name a part of this schema"),
        ({"$ref": 1}, "must name a part of this schema"),
        ({"properties": {"a": {"const": {"minimum": 3}}, "b": {"$ref": "#/properties/a/const"}}}, "'minimum'"),
        ({"properties": {'a"b': {"type": "null"}}}, "JSON would escape"),
        ({"properties": {"a\\b": {"type": "null"}}}, "JSON would escape"),
        ({"const": [{'a"b': 1}]}, "JSON would escape"),
        ({"enum": ["a", "abc"], "minLength": 2}, "minLength beside enum"),
        ({"enum": ["a"], "properties": {"a": {"type": "null"}}}, "properties beside enum"),
        ({"enum": ["a"], "const": "b"}, "const beside enum"),
        ({"anyOf": [{"type": "null"}], "properties": {"a": {"type": "null"}}}, "properties beside anyOf"),
        ({"anyOf": [{"type": "null"}], "type": "null"}, "type beside anyOf"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}, "type": "null"}, "type beside $ref"),
        ({"enum": ["a", 1], "type": "string"}, "type and the values beside it disagree"),
        ({"const": True, "type": "integer"}, "type and the values beside it disagree"),
        ({"type": "string", "properties": {"a": {"type": "null"}}}, "which type excludes"),
        ({"properties": {"a": {"type": "null"}}, "required": ["b"]}, "names that properties describe"),
        ({"properties": {"a": {"type": "null"}}, "required": "a"}, "names that properties describe"),
        ({"properties": 1, "required": [{}]}, "names that properties describe"),
        ({"type": "integer", "const": float("inf")}, "disagree"),
        ({"enum": []}, "empty enum"),
        ({"anyOf": []}, "empty anyOf"),
        ({"type": []}, "empty type"),
        ({"type": "string", "minLength": 1.0}, "whole number"),
    ],
)
def test_a_schema_that_answers_could_violate_is_refused(refused, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_schema(refused)


@pytest.mark.parametrize(
    ("taken", "text"),
    [
        ({"type": "string", "enum": ["a", "b"]}, '"b"'),
        ({"type": ["integer", "null"], "enum": [1, 2.0, None]}, "2.0"),
        ({"type": "object", "const": {"é": []}}, '{"é":[]}'),
        ({"type": "array", "enum": [[1]]}, "[1]"),
        (chain(3), '{"a":{"a":null}}'),
        ({"title": "x", "description": "y", "type": "array", "items": {"const": 1, "default": 1}}, "[1]"),
        ({"properties": {"é.*": {"type": "null"}}, "required": ["é.*"]}, '{"é.*":null}'),
    ],
)
def test_a_schema_that_is_taken_is_matched_by_what_it_describes(taken, text, monkeypatch):
    compile_here(monkeypatch)
    assert accepts(compile_expression(schema=taken), text)
    jsonschema.validate(json.loads(text), taken)


def test_a_schema_of_many_references_is_checked_at_once():
    many = {one: {"anyOf": [{"$ref": f"#/$defs/{other}"}] * 300} for one, other in itertools.pairwise("abcd")}
    check_schema({**many["a"], "$defs": {**many, "d": {"type": "null"}}})


def test_an_anchor_is_left_out_and_an_escaped_sign_is_not():
    for regex, text in ((r"^a$", "a"), (r"a\$", "a$"), (r"a\\$", "a\\")):
        assert accepts(compile_expression(regex=regex), text), regex


def test_threads_that_ask_one_automaton_at_the_same_time_do_not_spoil_it():
    automaton = compile_expression(regex="[0-9]{400}")
    pieces = [bytes([byte]) for byte in range(256)] + [b""]
    for _ in range(5):
        constraint = Constraint(automaton, pieces, 256)
        with ThreadPoolExecutor(4) as pool:
            found = list(
                pool.map(lambda length, made=constraint: made.possible(length, False), [400, 399, 400, 401])
            )
        assert found == [True, False, True, False]


def test_special_tokens_of_a_model_are_no_text():
    base = train_bpe([prose(100)], 300).backend
    base.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_end|>", "<|other|>")])
    tokenizer = Tokenizer.over(base, "<|im_end|>")
    other = tokenizer.backend.token_to_id("<|other|>")
    assert tokenizer.pieces([other, tokenizer.eos_id]) == [b"", b""]
    assert tokenizer.decode([other]) == ""
    constraint = Constraint.of(tokenizer, regex="[a-z<>|]{9}")
    assert constraint.table[constraint.first, other] == constraint.dead
    assert not constraint.possible(1, False)
    assert constraint.possible(9, False)
