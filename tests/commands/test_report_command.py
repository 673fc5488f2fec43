"""`dcdm report` on two short runs."""

import json
import shutil

import pytest

from dcdm.cli import main
from dcdm.training.run import run_training

TEXT = "".join(f"def f{n}(x):\n    return x + {n * n}\n\n" for n in range(200))
SMALL = {
    "model.num_layers": 2, "model.hidden_size": 32, "model.context_length": 32, "train.batch_size": 4,
    "evaluate_sequences": 4, "evaluate_samples": 2, "tensorboard": False, "log_every": 2, "evaluate_every": 3,
    "train.steps": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "text.txt").write_text(TEXT)
    changes = {**SMALL, "data.sources": (str(folder / "text.txt"),)}
    for name, preset in {"paper": "dcdm-debug", "blocks": "bdlm-debug"}.items():
        run_training(preset, folder / name, changes=changes)
    return folder


def test_runs_stand_side_by_side_with_the_settings_in_which_they_differ(runs, tmp_path, capsys, refused):
    both = [str(runs / "paper"), str(runs / "blocks")]
    main(["report", *both, "--json"])
    found = json.loads(capsys.readouterr().out)
    first, second = found["runs"]
    assert (first["run"], first["step"], second["kind"]) == ("paper", 6, "BDLM")
    assert first["best_nll"] <= first["valid_nll"]
    assert found["differing"]["model.kind"] == ["dcdm", "bdlm"]
    assert "train.clip" not in found["differing"]
    main(["report", *both])
    shown = capsys.readouterr()
    assert "6 of 6" in shown.out
    assert "model.kind" in shown.out
    assert "tensorboard --logdir_spec" in shown.err
    main(["report", both[0], str(shutil.copytree(both[0], tmp_path / "again"))])
    assert "the same settings" in capsys.readouterr().out
    assert "settings.yaml" in refused("report", str(tmp_path))


def test_torn_lines_of_metrics_are_skipped_and_a_file_without_others_is_named(runs, tmp_path, capsys):
    folder = tmp_path / "torn"
    folder.mkdir()
    for name in ("settings.yaml", "timing.jsonl", "metrics.jsonl"):
        (folder / name).write_bytes((runs / "blocks" / name).read_bytes())
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": 7, "nll": "x"}\n{"step": 7, "evaluation": 7}\n')
        file.write('{"step": 7, "nll": 1' + "0" * 400 + '}\n{"step": 7, "evaluation": {"valid_nll": []}}\n{"st')
    main(["report", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["runs"][0]["step"] == 6
    (folder / "metrics.jsonl").write_text('{"step": 7, "nl')
    with pytest.raises(SystemExit):
        main(["report", str(folder)])
    assert f"{folder / 'metrics.jsonl'} is missing, empty or damaged" in capsys.readouterr().err
