"""`dcdm sample` and `dcdm bench generate` on a small trained run."""

from __future__ import annotations

import io
import json

import pytest

from dcdm.cli import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A tiny run of each kind, one step of training."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n\n" * 120)
    made = {}
    sizes = ("model.hidden_size=32", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=1")
    more = ("model.head_dim=16", "model.intermediate_size=48", "model.context_length=32", "tensorboard=false")
    for name, preset in {
        "ar": "ar-debug", "mdlm": "mdlm-debug", "bdlm": "bdlm-debug", "paper": "dcdm-debug",
        "causal": "dcdm-debug-causal",
    }.items():  # fmt: skip
        made[name] = folder / name
        with pytest.raises(SystemExit) as left:
            main([
                "train", "--preset", preset, "--run", str(made[name]), "--data", str(text), "--steps", "1",
                "--batch-size", "2", "--device", "cpu", "--set", *sizes, *more,
            ])  # fmt: skip
        assert left.value.code in (0, None)
    return made


def pipe(content):
    return io.TextIOWrapper(io.BytesIO(content))


def records(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


FITS = {
    "ar": ["auto"], "mdlm": ["auto", "blocks:4", "adablock"], "bdlm": ["auto", "blocks:4", "adablock"],
    "paper": ["auto", "paper-chunk", "paper-step", "appendix-b"], "causal": ["auto"],
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
def test_the_others_are_refused_by_name(runs, kind, capsys):
    every = {name for names in FITS.values() for name in names}
    wrong = [["--routing", name] for name in every - set(FITS[kind])]
    wrong.append(["--cache", "exact" if kind == "paper" else "frozen"])
    for arguments in wrong:
        with pytest.raises(SystemExit) as left:
            main(["sample", str(runs[kind]), "--prompt", "x", "--length", "4", *arguments])
        assert left.value.code == 2
        assert arguments[1].partition(":")[0] in capsys.readouterr().err


def test_prompts_come_from_a_pipe_or_json_lines(runs, tmp_path, capsys, monkeypatch):
    base = ["sample", str(runs["causal"]), "--length", "5", "--json"]
    monkeypatch.setattr("sys.stdin", pipe(b"a = "))
    main(base)
    (piped,) = records(capsys)
    assert piped["prompt"] == "a = "
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a = "}\n\n{"prompt": "b[[2]] = "}\n')
    main([*base, "--jsonl", str(lines), "--num", "2"])
    found = records(capsys)
    assert [r["prompt"] for r in found] == ["a = ", "a = ", "b[[2]] = ", "b[[2]] = "]
    assert found[0]["tokens"] == piped["tokens"] != found[1]["tokens"]


@pytest.mark.parametrize(
    ("content", "message"), [("nonsense\n", "JSON"), ('{"text": "a"}\n', "prompt"), ("", "holds no prompt")]
)
def test_bad_prompt_files_are_named(runs, tmp_path, capsys, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(SystemExit) as left:
        main(["sample", str(runs["ar"]), "--jsonl", str(path)])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_prompt_behind_an_equals_sign_may_begin_like_an_option(runs, capsys):
    for given in ("-x", "--num", "- item"):
        main(["sample", str(runs["ar"]), "--length", "3", "--json", f"--prompt={given}"])
        assert [record["prompt"] for record in records(capsys)] == [given]


def test_the_line_end_behind_a_piped_prompt_is_left_out(runs, capsys, monkeypatch):
    for piped in (b"a = \n", b"a = \r\n", b"a = "):
        monkeypatch.setattr("sys.stdin", pipe(piped))
        main(["sample", str(runs["ar"]), "--length", "2", "--json"])
        assert records(capsys)[0]["prompt"] == "a = "
    monkeypatch.setattr("sys.stdin", pipe(b"a\n\n"))
    main(["sample", str(runs["ar"]), "--length", "2", "--json"])
    assert records(capsys)[0]["prompt"] == "a\n"


def test_bytes_that_are_not_text_are_replaced_wherever_they_come_from(runs, tmp_path, capsys, monkeypatch):
    base = ["sample", str(runs["ar"]), "--length", "2", "--json"]
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "x\xe9"}')
    for arguments in (["--prompt", "x\udce9"], ["--jsonl", str(tmp_path / "a.jsonl")], []):
        monkeypatch.setattr("sys.stdin", pipe(b"x\xe9"))
        main([*base, *arguments])
        assert records(capsys)[0]["prompt"] == "x\ufffd"
    monkeypatch.setattr("sys.stdin", None)  # closed by whoever started the command
    main(base)
    assert records(capsys)[0]["prompt"] == ""


def test_what_could_not_be_written_or_would_have_no_effect_is_refused_before_anything_is_computed(
    runs, capsys, monkeypatch
):
    monkeypatch.setattr("dcdm.commands.options.load_for", lambda *_: pytest.fail("loaded"))
    for arguments in (["--picture", "out.xyz"], ["--picture", "."], ["--set", "top-k=5"], ["--set", "top_k"]):
        with pytest.raises(SystemExit) as left:
            main(["sample", str(runs["ar"]), "--prompt", "x", *arguments])
        assert left.value.code == 2
        assert arguments[1].partition("=")[0] in capsys.readouterr().err


def test_a_blank_of_no_tokens_is_refused(runs, capsys):
    with pytest.raises(SystemExit) as left:
        main(["sample", str(runs["causal"]), "--prompt", "a[[0]]b"])
    assert left.value.code == 2
    assert "[[0]]" in capsys.readouterr().err
    main(["sample", str(runs["causal"]), "--prompt", "a[[0]]b", "--set", "blanks=false", "--length", "2"])


def test_messages_name_the_setting(runs, capsys):
    wrong = {
        ("--length", "0"): "--length 0", ("--set", "window=1"): "window=1", ("--temperature", "-1"): "temperature",
        ("--set", "top_k=0"): "top_k=0", ("--set", "delimiters=;"): "delimiters has no effect",
    }  # fmt: skip
    for given, said in wrong.items():
        with pytest.raises(SystemExit) as left:
            main(["sample", str(runs["ar"]), "--prompt", "x", *given])
        assert left.value.code == 2
        assert said in capsys.readouterr().err


def test_a_window_beyond_the_trained_context_is_warned_of(runs, capsys):
    for window, warned in (("32", False), ("48", True)):
        main(["sample", str(runs["ar"]), "--prompt", "x", "--length", "2", "--set", f"window={window}"])
        assert ("window=48 is beyond the 32 positions" in capsys.readouterr().err) == warned


def test_costs_for_developers_stand_behind_debug(runs, capsys):
    base = ["sample", str(runs["causal"]), "--prompt", "x", "--length", "2"]
    main(base)
    assert "routing rounds" not in capsys.readouterr().err
    main([*base, "--debug"])
    assert "routing rounds" in capsys.readouterr().err


def test_without_blanks_a_prompt_is_taken_literally(runs, capsys):
    main(
        [
            "sample",
            str(runs["ar"]),
            "--prompt",
            "a[[2]]",
            "--length",
            "3",
            "--set",
            "blanks=false",
            "stop_at_eos=false",
        ]
    )
    assert capsys.readouterr().out.startswith("a[[2]]")


def test_a_draft_is_revised_and_printed_once(runs, capsys):
    main(["sample", str(runs["bdlm"]), "--prompt", "abcdefgh", "--set", "revise=0.25", "--json"])
    (record,) = records(capsys)
    assert record["new_tokens"] == 2
    assert len(record["tokens"]) == 8
    main(["sample", str(runs["bdlm"]), "--prompt", "abcdefgh", "--set", "revise={threshold: 1.0e-30}"])
    assert capsys.readouterr().out == "abcdefgh\n"


def test_streamed_events_rebuild_the_text(runs, capsys):
    main(["sample", str(runs["causal"]), "--prompt", "ab[[3]]c[[2]]", "--stream", "--json"])
    *events, record = records(capsys)
    text = {p: t for e in events for p, t in zip(e["positions"], e["tokens"], strict=True)}
    assert sorted(text) == [3, 4, 5, 7, 8]
    assert [record["tokens"][p - 1] for p in sorted(text)] == [text[p] for p in sorted(text)]


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
    scored = [r for r in rows if r["sample_bits"] is not None]  # where a cache may change the samples
    assert scored == [r for r in rows if r["kind"] == "dcdm-paper" and r["measure"] == "trajectory"]
    assert {r["cache"] for r in scored} == {"none", "frozen"}
    assert all(r["sample_bits"] > 0 for r in scored)


def test_control_characters_of_a_sample_do_not_reach_a_terminal():
    from dcdm.commands.options import harmless

    assert harmless("a\x1b[31mb\x07\tc\n\x7f\x9b") == "a␛[31mb␇\tc\n␡\ufffd"


def test_a_prompt_and_its_completion_are_shown_as_one_text():
    from dcdm.decoding.prompts import whole_text

    assert whole_text("ab", "cd", blanks=True) == "abcd"
    assert whole_text("a[[2]]b", "axyb", blanks=True) == "axyb"
    assert whole_text("a[[2]]b", "cd", blanks=False) == "a[[2]]bcd"
