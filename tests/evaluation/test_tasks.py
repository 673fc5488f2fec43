"""The paper's benchmarks from local files, by the harness's definitions."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import tiny

pytest.importorskip("lm_eval", reason="needs the extra [eval]")

from dcdm.cli import main
from dcdm.config import ConfigError, DataError
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.decoding.engine import generate
from dcdm.evaluation.harness import Estimate, HarnessModel
from dcdm.evaluation.tasks import BENCHMARKS, Loader, _leads_by_chance, choose, rows_of, run_tasks
from ranks import command_on_ranks

TEST = "def check(f):\n    assert f() == 1\n"
PROGRAM = {"task_id": "t/0", "prompt": "def one():\n", "test": TEST, "entry_point": "one"}
TWO = {"text": ["a", "b b"], "label": ["A", "B"]}
HELLA = {"activity_label": "Roof", "ctx_a": "A man sits.", "ctx_b": "he", "endings": [*"abcd"], "label": "3"}
WINO = {"sentence": "Ann met Eva and _ left.", "option1": "Ann", "option2": "Eva", "answer": "2"}
EXECUTE = ("--allow-code-execution",)
MC = {"choices": ["Yes.", "No, not at all.", "Never."], "labels": [1, 0, 0]}


def mmlu(subject: str, question: str, answer: int = 1) -> dict:
    return {"question": question, "subject": subject, "choices": ["w", "x", "y", "z"], "answer": answer}


def solved(kind: str, problem: str, answer: int) -> dict:
    return {"problem": problem, "level": "Level 1", "type": kind, "solution": f"It is $\\boxed{{{answer}}}$."}


ROWS: dict[str, list[dict]] = {
    "arc_challenge_validation": [
        {"id": str(n), "question": "Which?", "choices": TWO, "answerKey": "B"} for n in range(3)
    ],
    "mmlu_test": [mmlu("anatomy", "Is it?"), mmlu("anatomy", "Was it?", 0), mmlu("virology", "Will it?")],
    "mmlu_dev": [mmlu(subject, f"Example {n}?") for subject in ("anatomy", "virology") for n in range(2)],
    "hellaswag_validation": [HELLA],
    "truthfulqa_mc": [{"question": "Is it so?", "mc1_targets": MC, "mc2_targets": {**MC, "labels": [1, 1, 0]}}],
    "winogrande_validation": [WINO],
    "piqa_validation": [{"goal": "Cook?", "sol1": "Heat it.", "sol2": "Throw it.", "label": 0}],
    "math_test": [solved("Algebra", "1+1?", 2), solved("Counting & Probability", "2+2?", 4)],
    "gsm8k_train": [{"question": f"{n} and {n}?", "answer": f"Twice.\n#### {2 * n}"} for n in range(6)],
    "gsm8k_test": [{"question": "2 and 3?", "answer": "So.\n#### 5"}],
    "HumanEval": [PROGRAM],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for name, rows in ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if name == "HumanEval":
            (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        else:
            (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def answering(monkeypatch, text: str) -> None:
    def generate(model, prompts, **_):
        return type("Generation", (), {"completions": [byte_tokenizer().encode(text) for _ in prompts]})

    monkeypatch.setattr("dcdm.evaluation.harness.generate", generate)


def model() -> HarnessModel:
    return HarnessModel((tiny.model("mdlm", symbols=257, scale=3), byte_tokenizer()), samples=4)


def report(monkeypatch, capsys, folder: Path, *arguments: str) -> dict[str, dict]:
    made = model()
    monkeypatch.setattr("dcdm.evaluation.harness.HarnessModel", lambda **_: made)
    main(["eval", "tasks", "run", "--data-dir", str(folder), "--json", *arguments])
    return {one["task"]: one for one in json.loads(capsys.readouterr().out)["tasks"]}


def requests(folder: Path, name: str) -> list:
    (chosen,) = choose([name], folder)
    built = Loader(chosen, execute=False).load()
    tasks = [t for one in built for t in (one.get_all_tasks() if hasattr(one, "get_all_tasks") else [one])]
    for task in tasks:
        task.set_fewshot_seed(1234)
        task.build_all_requests()
    return [instance for task in tasks for instance in task.instances]


def test_all_nine_run_end_to_end_from_local_files(monkeypatch, capsys, folder):
    def generate_little(model, prompts, *, max_new_tokens, **settings):
        return generate(model, prompts, max_new_tokens=min(8, max_new_tokens), **settings)

    monkeypatch.setattr("dcdm.evaluation.harness.generate", generate_little)
    done = report(monkeypatch, capsys, folder, "--tasks", "all", "--allow-code-execution")
    assert list(done) == list(BENCHMARKS)
    assert {name: one["shots"] for name, one in done.items() if one["shots"]} == {"math": 2, "gsm8k": 4}
    figures = {(line["task"], line["metric"]): line for one in done.values() for line in one["figures"]}
    assert figures["humaneval", "pass@1"]["questions"] == 1
    assert figures["mmlu", "acc"]["questions"] == 3
    assert figures["minerva_math", "exact_match"]["value"] == 0
    assert figures["gsm8k", "exact_match (flexible-extract)"]["value"] == 0
    chances = {
        name: figures[name, "acc"]["chance"] for name in ("arc_challenge", "mmlu", "winogrande", "truthfulqa_mc1")
    }
    assert chances == pytest.approx(
        {"arc_challenge": 0.5, "mmlu": 0.25, "winogrande": 0.5, "truthfulqa_mc1": 1 / 3}
    )
    assert figures["truthfulqa_mc2", "acc"]["chance"] == pytest.approx(2 / 3)
    assert done["arc_challenge"]["split"] == "validation"
    assert "official one is test" in done["arc_challenge"]["notes"][0]


def test_two_processes_print_the_figures_of_one_to_the_last_digit(capsys, folder):
    place = tiny.exported("causal", folder / "model", context_length=64)
    words = ["eval", "tasks", str(place), "--data-dir", str(folder), "--tasks", "mmlu,gsm8k,humaneval", "--json",
             "--set", "batch_size=2", "max_gen_toks=8", "--allow-code-execution", "--device", "cpu"]  # fmt: skip
    main(words)
    alone, (shared, silent) = capsys.readouterr().out, command_on_ranks(2, words)
    one, two = (json.loads(printed) for printed in (alone, shared))
    for report in (*one["tasks"], *two["tasks"]):
        del report["seconds"]
    assert two == one
    assert silent == ""


@pytest.mark.parametrize(("right", "flags"), [(1, EXECUTE), (0, EXECUTE), (1, ())])
def test_right_programs_pass_wrong_ones_fail_and_none_runs_unasked(monkeypatch, capsys, folder, right, flags):
    answering(monkeypatch, f"    return {2 - right}\n")
    if not flags:
        monkeypatch.setattr("dcdm.evaluation.execution.passes", None)
    done = report(monkeypatch, capsys, folder, "--tasks", "humaneval", *flags)["humaneval"]
    wanted = ("pass@1", right) if flags else ("not executed", 1)
    assert [(line["metric"], line["value"]) for line in done["figures"]] == [wanted]
    assert flags or done["notes"] == ["not executed"]


def test_right_answers_in_free_text_count(monkeypatch, capsys, folder):
    answering(monkeypatch, " Final Answer: The final answer is $2$. I hope it is correct.\n#### 5")
    done = report(monkeypatch, capsys, folder, "--tasks", "math,gsm8k")
    values = {line["metric"]: line["value"] for one in done.values() for line in one["figures"]}
    assert values["exact_match"] == 0.5  # of the two problems of MATH
    assert values["exact_match (strict-match)"] == 1


def test_group_accuracy_weighs_questions_not_subjects(monkeypatch, folder):
    lm = model()

    def scored(asked, **_):  # B always: right in 2 of 3 questions, in 1/2 and 1/1 of the two subjects
        return [(Estimate(one.args[1] == " B"), False) for one in asked]

    (chosen,) = choose(["mmlu"], folder)
    monkeypatch.setattr(lm, "loglikelihood", scored)
    results = run_tasks(lm, Loader(chosen, False).load(), None)
    assert results["results"]["mmlu"]["acc,none"] == pytest.approx(2 / 3)


def test_examples_come_from_the_files_that_the_definitions_name(folder):
    (asked,) = requests(folder, "gsm8k")
    assert asked.args[0].count("Question:") == 5
    assert asked.args[0].count("Twice.") == 4
    assert "domain of the expression" in requests(folder, "math")[0].args[0]


@pytest.mark.parametrize(("name", "count"), [("gsm8k", 1), ("mmlu", 3 * 4), ("math", 2)])
def test_a_validation_file_alone_is_evaluated(folder, name, count):
    (folder / f"{name}_test.jsonl").rename(folder / f"{name}_validation.jsonl")
    (chosen,) = choose([name], folder)
    assert (chosen.split, "official one is test" in chosen.notes[0]) == ("validation", True)
    asked = requests(folder, name)
    assert len(asked) == count
    assert ROWS[f"{name}_test"][0].get("question", "1+1?") in asked[0].args[0]


def test_local_files_without_a_subject_of_the_task_are_refused(folder):
    (folder / "mmlu_test.jsonl").write_text(json.dumps(mmlu("cooking", "Is it?")) + "\n")
    with pytest.raises(ConfigError, match=r"mmlu_test\.jsonl: no row has a subject that mmlu asks for"):
        requests(folder, "mmlu")


def test_the_table_shows_chance_and_what_did_not_fit(monkeypatch, capsys, folder):
    lm = model()
    monkeypatch.setattr("dcdm.evaluation.harness.HarnessModel", lambda **_: lm)
    main(["eval", "tasks", "run", "--data-dir", str(folder), "--tasks", "truthfulqa", "winogrande"])
    said = capsys.readouterr().out
    assert "mc1 acc" in said
    assert "33.3" in said
    assert "contexts cut on the left" in said
    assert max(map(len, said.splitlines())) <= 80

    main(["eval", "tasks", "run", "other/run", "--data-dir", str(folder), "--tasks", "winogrande", "--limit", "2"])
    said = capsys.readouterr().out
    rows = said[said.index("model  ") :].splitlines()[1:3]
    assert [row.split()[0] for row in rows] == ["run", "other/run"]
    assert rows[0].split()[-1] == rows[0].split()[1]  # of one task the mean is its figure


def test_bad_input_is_refused_before_the_model_is_loaded(refused, folder):
    (folder / "piqa_validation.jsonl").write_text('{"goal": "x"}\n')
    (folder / "gsm8k_train.jsonl").unlink()
    (folder / "winogrande_validation.jsonl").unlink()
    for arguments, message in (
        (["--tasks", "chess"], "unknown task 'chess'"),
        (["--tasks", "winogrande"], "winogrande_validation.jsonl"),
        (["--tasks", "gsm8k"], "gsm8k_train.jsonl"),
        (["--tasks", "mmlu", "--limit", "0"], "--limit 0"),
        (["--tasks", "piqa"], "piqa_validation.jsonl:1"),
    ):
        assert message in refused("eval", "tasks", "nowhere", "--data-dir", str(folder), *arguments)
    with pytest.raises(ConfigError, match="is not a folder"):
        choose(["piqa"], folder / "none")


def test_damaged_and_empty_files_are_named(tmp_path):
    for name, content, message in (
        ("a.jsonl", b'{"goal": 1}\n{"goal"', r"a\.jsonl:2: not JSON"),
        ("b.jsonl", b"\n", "no rows"),
        ("c.jsonl.gz", gzip.compress(b'{"goal": 1}\n' * 9, mtime=0)[:-9], r"cannot read .*c\.jsonl\.gz"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises((ConfigError, DataError), match=message):
            rows_of(tmp_path / name, ("goal",))


def test_a_lead_smaller_than_its_error_counts_as_noise():
    assert _leads_by_chance([Estimate(-1.0, 1.0), Estimate(-1.5, 1.0)])
    assert not _leads_by_chance([Estimate(-1.0, 0.1), Estimate(-1.5, 0.1)])
    assert not _leads_by_chance([Estimate(-1.0), Estimate(-1.0 - 1e-9)])
