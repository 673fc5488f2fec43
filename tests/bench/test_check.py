"""`dcdm check`: every stage passes, fails or says why it did not run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.nn.functional as F

from dcdm.bench import check
from dcdm.cli import main

QUICK = ["--steps", "10", "--batch-size", "4"]


def statuses(folder: Path) -> dict[str, str]:
    return {row["stage"]: row["status"] for row in json.loads((folder / "check.json").read_text())["stages"]}


@pytest.mark.slow
def test_on_a_cpu_every_stage_passes_but_those_that_need_a_gpu_which_say_so(tmp_path, capsys):
    main(["check", str(tmp_path), *QUICK])
    found = statuses(tmp_path)
    assert list(found) == list(check.STAGES)
    assert {name for name, status in found.items() if status != "passed"} == {"attention-flex-backward", "compiled"}
    page = (tmp_path / "check.md").read_text()
    assert "FlexAttention has no backward pass on a CPU" in page
    assert all(name in page for name in check.STAGES)
    assert "12 passed, 0 failed, 2 not run" in capsys.readouterr().out


def test_a_broken_backend_fails_its_stage_alone_and_the_report_says_what_to_do(tmp_path, monkeypatch, capsys):
    right = F.scaled_dot_product_attention
    monkeypatch.setattr(check, "LENGTHS", (37,))
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kw: right(*args, **kw) * 1.01)
    with pytest.raises(SystemExit, match="1"):
        main(["check", str(tmp_path), *QUICK, "--only", "attention-sdpa", "attention-sdpa-tiled"])
    found = statuses(tmp_path)
    assert [name for name, status in found.items() if status == "failed"] == ["attention-sdpa"]
    assert found["attention-sdpa-tiled"] == "passed"
    assert all(found[name] == "not run" for name in list(found)[2:] if name != "attention-sdpa-tiled")
    page = (tmp_path / "check.md").read_text()
    assert "differs by 0.01 of the largest value" in page
    assert "**attention-sdpa failed.**" in page
    assert page.count("Take another backend") == 1
    assert "not named by --only" in page


@pytest.mark.parametrize("part", ["step", "gradient", "weights"])
def test_what_does_not_hold_fails(part, tmp_path, monkeypatch):
    if part == "step":  # the plan forgets half
        whole = check.Simulation.step
        halved = lambda self, size: replace(whole(self, size), memory={"weights": 1 << 20})  # noqa: E731
        monkeypatch.setattr(check.Simulation, "step", halved)
        name = "plan"
    elif part == "gradient":
        literal = check.reference.encode
        monkeypatch.setattr(check, "KINDS", ("bdlm-debug",))
        monkeypatch.setattr(
            check.reference, "encode", lambda *given: replace(found := literal(*given), states=found.states * 1.01)
        )
        name = "network"
    else:
        monkeypatch.setattr(check.Checkpointer, "resume", lambda self, state, accept: None)
        name = "checkpoint"
    with pytest.raises(SystemExit, match="1"):
        main(["check", str(tmp_path), *QUICK, "--only", name])
    assert statuses(tmp_path)[name] == "failed"


def test_a_folder_in_use_and_unknown_stages_are_refused(tmp_path, capsys):
    for words, message in (
        ([str(tmp_path), "--only", "speed"], "no such stage"),
        ([str(tmp_path.parent)], "new folder"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["check", *words])
        assert message in capsys.readouterr().err


def test_what_compares_with_a_run_that_is_not_there_does_not_run(tmp_path):
    main(["check", str(tmp_path), *QUICK, "--only", "all-processes", "kill-and-resume"])
    stages = json.loads((tmp_path / "check.json").read_text())["stages"]
    reasons = {row["stage"]: row["found"] for row in stages if "run on one process" in row["found"]}
    assert list(reasons) == ["all-processes", "kill-and-resume"]
    assert set(statuses(tmp_path).values()) == {"not run"}
