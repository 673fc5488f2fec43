"""`dcdm sample` and `dcdm bench generate` with small models."""

from __future__ import annotations

import io
import json

import pytest

import tiny
from dcdm.cli import main
from dcdm.config import harmless


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A tiny model of each kind."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: tiny.exported(kind, folder / kind, scale=1, context_length=32) for kind in FITS}


def pipe(content):
    return io.TextIOWrapper(io.BytesIO(content))


def records(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


FITS = {
    "ar": ["auto"], "mdlm": ["auto", "blocks:4", "adablock"], "bdlm": ["auto", "blocks:4", "adablock"],
    "paper": ["auto", "paper-chunk", "paper-step", "paper-equal", "paper-strided", "appendix-b"],
    "causal": ["auto"],
}  # fmt: skip
COMMITS = [
    "auto",
    "chunk",
    "position",
    "steps:2",
    "threshold:0.5",
    "entropy:1",
    "factor:1",
    "ancestral:4",
    "first-hitting",
]


@pytest.mark.parametrize("commits", [
    pytest.param(["auto", "position", "threshold:0.5"], id="three"),
    pytest.param(COMMITS, id="all", marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("kind", FITS)
def test_every_policy_that_makes_sense_runs(runs, kind, commits, capsys):
    for routing in FITS[kind]:
        for commit in COMMITS if routing == FITS[kind][-1] else commits:
            main(["sample", str(runs[kind]), "--prompt", "def ", "--length", "9", "--routing", routing,
                  "--commit", commit, "--set", "stop_at_eos=false", "--json"])  # fmt: skip
            (record,) = records(capsys)
            assert record["new_tokens"] == len(record["tokens"]) == 9
            assert record["finished"] == "length"
            assert 1 <= record["forwards"] <= 9
    caches = ["none", "frozen"] if kind == "paper" else ["none", "exact"]
    for cache in caches:
        main(["sample", str(runs[kind]), "--prompt", "def ", "--length", "9", "--cache", cache])
        assert capsys.readouterr().out.startswith("def ")


@pytest.mark.parametrize("kind", FITS)
def test_the_others_are_refused_by_name(runs, kind, refused):
    every = {name for names in FITS.values() for name in names}
    wrong = [["--routing", name] for name in every - set(FITS[kind])]
    wrong.append(["--cache", "exact" if kind == "paper" else "frozen"])
    for arguments in wrong:
        said = refused("sample", str(runs[kind]), "--prompt", "x", "--length", "4", *arguments)
        assert arguments[1].partition(":")[0] in said


def test_several_prompts_are_completed_several_times_each(runs, capsys, monkeypatch):
    base = ["sample", str(runs["causal"]), "--length", "5", "--json"]
    monkeypatch.setattr("sys.stdin", pipe(b"a = "))
    main(base)
    (piped,) = records(capsys)
    assert piped["prompt"] == "a = "
    main([*base, "--prompt", "a = ", "b[[2]] = ", "--num", "2"])
    found = records(capsys)
    assert [r["prompt"] for r in found] == ["a = ", "a = ", "b[[2]] = ", "b[[2]] = "]
    assert found[0]["tokens"] == piped["tokens"] != found[1]["tokens"]


@pytest.mark.parametrize(("given", "piped", "prompt"), [
    (["--prompt=--num"], b"", "--num"), ([], b"a = \n", "a = "), ([], b"a = \r\n", "a = "), ([], b"a\n\n", "a\n"),
    (["--prompt", "x\udce9"], b"", "x\ufffd"), ([], b"x\xe9", "x\ufffd"),
    ([], None, ""),  # standard input was closed by whoever started the command
])  # fmt: skip
def test_a_prompt_is_taken_without_its_line_end_and_bytes_that_are_not_text_are_replaced(
    given, piped, prompt, runs, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", None if piped is None else pipe(piped))
    main(["sample", str(runs["ar"]), "--length", "2", "--json", *given])
    assert [record["prompt"] for record in records(capsys)] == [prompt]


@pytest.mark.parametrize(("given", "said"), [
    ("--length 0", "--length 0"), ("--set window=1", "window=1"), ("--temperature -1", "temperature"),
    ("--set top_k=0", "top_k=0"), ("--set delimiters=;", "delimiters has no effect"), ("--set top-k=5", "top-k"),
    ("--prompt a[[0]]b", "[[0]]"),
])  # fmt: skip
def test_wrong_settings_and_bad_prompts_are_refused_by_name(given, said, runs, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompt = [] if given.startswith("--prompt") else ["--prompt", "x"]
    assert said in refused("sample", str(runs["causal"]), *prompt, *given.split())


@pytest.mark.slow
def test_decoders_of_trained_models_are_compared(runs, capsys):
    folders = [str(runs[kind]) for kind in ("ar", "bdlm", "paper", "causal")]
    main(["bench", "generate", "--models", *folders, "--samples", "2", "--windows", "2", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["kind"] for row in rows} == {"ar", "bdlm", "dcdm-paper", "dcdm-causal"}
    by = {(r["kind"], r["routing"], r["commit"], r["cache"]): r for r in rows}
    cached, afresh = (by["dcdm-causal", "auto", "position", cache] for cache in ("exact", "none"))
    assert cached["forwards"] == afresh["forwards"]
    assert cached["bits"] == pytest.approx(afresh["bits"], abs=1e-4)
    assert cached["computed"] < afresh["computed"]
    assert all(r["measure"] == "bound" for r in rows if r["commit"] in ("ancestral:8", "first-hitting"))


def test_control_characters_of_a_sample_do_not_reach_a_terminal():
    assert harmless("a\x1b[31mb\x07\tc\n\x7f\x9b") == "a␛[31mb␇\tc\n␡\ufffd"


def test_a_prompt_and_its_completion_are_shown_as_one_text():
    from dcdm.decoding.engine import whole_text

    assert whole_text("ab", "cd", blanks=True) == "abcd"
    assert whole_text("a[[2]]b", "axyb", blanks=True) == "axyb"
    assert whole_text("a[[2]]b", "cd", blanks=False) == "a[[2]]bcd"
