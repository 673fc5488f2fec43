"""Studies: runs by the ordinary command, figures on the same windows, comparison over seeds."""

import json
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import corpora
import dcdm
from dcdm.cli import main
from dcdm.config import ConfigError
from dcdm.studies import measuring, plots, results, runner
from dcdm.studies.results import compare, summary
from dcdm.studies.runner import carry_out, collected
from dcdm.studies.study import Claim, Run, Study, Variant, check_claims, read_study
from dcdm.training.settings import made

SMALL = {
    "train.steps": 2, "train.batch_size": 2, "model.hidden_size": 16, "model.num_layers": 2, "model.num_heads": 2,
    "evaluate_every": 1, "evaluate_sequences": 2, "model.num_kv_heads": 1, "model.head_dim": 8,
    "model.intermediate_size": 32, "model.context_length": 32,
}  # fmt: skip


def definition(**changes) -> dict:
    variants = {
        "ar": {"preset": "ar-debug"},
        "lanes": {"preset": "lanes-debug-drafts", "lanes": [1, 4], "drafts": [2], "init": "ar"},
        "mdlm": {"preset": "mdlm-debug", "commits": ["steps:4", "adablock steps:4"]},
    }
    plain = {"seeds": [0], "settings": SMALL, "windows": 3, "samples": 1, "against": "ar", "minutes": 2}
    return {**plain, "variants": variants, **changes}


def write(folder: Path, content: dict) -> Path:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


class InThisProcess:
    """Stands in for `subprocess.Popen`: no start of Python; `test_experiments.py` has processes of their own."""

    def __init__(self, command, **_):
        module, *arguments = command[2:]
        if module == "dcdm":
            options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
            dcdm.train(run=options["--run"], config=options["--config"], device=options["--device"])
        else:
            folder, measured_with, settings = arguments
            figures = measuring.measure(Path(folder), **json.loads(settings))
            measuring.write_figures(Path(folder), measured_with, figures)

    def wait(self):
        return 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "text.txt").write_text(corpora.prose(300))
    settings = {**SMALL, "data.sources": [str(folder / "text.txt")]}
    (folder / "other.txt").write_text(corpora.prose(200)[::-1])
    others = {"other": str(folder / "other.txt")}
    asked = read_study(write(folder, definition(settings=settings, corpora=others)))
    heard = corpora.Heard()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCDM_CACHE", str(folder / "cache"))
        patch.setattr(runner.subprocess, "Popen", InThisProcess)
        assert carry_out(asked, folder / "work", 1, reporter=heard), heard.said
    return asked, folder / "work"


def test_a_study_trains_initial_weights_first_and_measures_every_run(finished):
    asked, work = finished
    rows = {(row.variant, row.figure): row for row in compare(asked, collected(asked, work))}
    numbers = ("1 lanes", "4 lanes", "1 lanes, 2 drafts", "4 lanes, 2 drafts")
    lanes = {("lanes", name) for name in numbers}
    mdlm = {("mdlm", name) for name in ("chunk", "steps:4", "adablock steps:4")}
    other = {("ar", "other: valid"), ("mdlm", "other: valid"), *(("lanes", f"other: {n} lanes") for n in (1, 4))}
    assert set(rows) == {("ar", "valid"), ("mdlm", "valid")} | lanes | mdlm | other
    assert rows["mdlm", "steps:4"].forwards == 4 < rows["mdlm", "adablock steps:4"].forwards
    assert rows["ar", "valid"].forwards == 31
    assert rows["lanes", "4 lanes"].forwards == 8
    alone, drafted = (rows["lanes", name] for name in ("1 lanes", "1 lanes, 2 drafts"))
    assert drafted.mean.mean == pytest.approx(alone.mean.mean, rel=1e-5)
    assert drafted.forwards < alone.forwards == 31
    assert rows["lanes", "4 lanes, 2 drafts"].estimator == "drafted"
    assert rows["ar", "valid"].difference is None
    found = rows["lanes", "4 lanes"]
    assert found.difference.mean == pytest.approx(found.mean.mean - rows["ar", "valid"].mean.mean)
    there, base = rows["lanes", "other: 4 lanes"], rows["ar", "other: valid"]
    assert base.difference is None
    assert base.mean.mean != rows["ar", "valid"].mean.mean
    assert there.difference.mean == pytest.approx(there.mean.mean - base.mean.mean)
    assert f"init: {work / 'ar-s0'}" in (work / "lanes-s0" / "settings.yaml").read_text()


def test_lanes_can_be_what_others_are_compared_with(finished):
    turned, work = replace(finished[0], against="lanes"), finished[1]
    rows = [row for row in compare(turned, collected(turned, work)) if "other" not in row.figure]
    (base,) = (row for row in rows if (row.variant, row.figure) == ("lanes", "4 lanes"))
    assert base.difference is None
    for row in rows:
        assert row is base or row.difference.mean == pytest.approx(row.mean.mean - base.mean.mean)
    assert Study("few", {"few": Variant("lanes-debug", lanes=(2, 8))}).main_figure("few") == "2 lanes"


def test_a_surrogate_is_named_as_no_bound_and_has_no_difference(tmp_path, capsys):
    variants = {"ar": {"preset": "ar-debug"}, "paper": {"preset": "dcdm-debug"}}
    path = write(tmp_path, definition(variants=variants))
    figures = {"ar": ["exact"], "paper": ["sequential", "surrogate"]}
    for run in (asked := read_study(path)).runs():
        (tmp_path / run.name).mkdir()
        names = {"surrogate" if name == "surrogate" else "valid": name for name in figures[run.variant]}
        found = {"nats_per_token": 2.0, "forwards": None}
        measured = {figure: {"estimator": name, **found} for figure, name in names.items()}
        measuring.write_figures(tmp_path / run.name, run.measured_with(), measured)
    assert [row.difference is None for row in compare(asked, collected(asked, tmp_path))] == [True, False, True]
    main(["study", str(path), "--work", str(tmp_path), "--report"])
    printed = capsys.readouterr().out.splitlines()
    assert "minus ar, valid" in printed[0]
    assert "surrogate (not a bound)" in printed[3]


def test_curves_run_over_steps_or_over_minutes_where_the_study_knows_them(finished):
    asked, work = finished
    figures = summary(asked, collected(asked, work))["runs"]  # as a file of results has them
    ends = [json.loads(line) for line in (work / "ar-s0" / "metrics.jsonl").read_text().splitlines()]
    (end,) = (row["evaluation"]["valid_nll"] for row in ends if "evaluation" in row and row["step"] == 2)
    for minutes, points in ((6.0, [3, 6]), (None, [1, 2])):
        curve = plots.training_curve(replace(asked, minutes=minutes), "ar", figures)
        assert [x for x, _ in curve] == points
        assert curve[-1][1] == pytest.approx(end, abs=1e-5)


def test_pictures_are_drawn_and_verdicts_printed(finished, tmp_path, capsys, refused):
    asked, work = finished
    claims = {"price": {"says": "lanes cost nothing", "below": ["lanes 1 lanes < ar", "mdlm < ar"]}}
    path = write(tmp_path, definition(settings=dict(asked.settings), corpora=dict(asked.corpora), claims=claims))
    main(["study", str(path), "--work", str(work), "--report", "--curves", str(tmp_path / "curves.svg")])
    table = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert table[0].split() == ["claim", "holds", "if", "difference", "verdict"]
    assert [line.split()[-1] for line in table[-4:-2]] == ["seed", "seed"]  # one decides nothing
    assert table[-1] == "price (lanes cost nothing): one seed"
    assert "<!-- minutes -->" in (tmp_path / "curves.svg").read_text()
    said = refused("study", str(path), "--work", str(work), "--curves", str(tmp_path / "x.bmp"))
    assert "a picture ends in .png, .svg or .pdf" in said


def test_a_stop_that_comes_while_a_run_starts_reaches_it(tmp_path, monkeypatch):
    stopped, signals = threading.Event(), []

    class StoppedMeanwhile:
        def __init__(self, *arguments, **options):
            stopped.set()

        def send_signal(self, number):
            signals.append(number)

        def wait(self):
            return 1

    monkeypatch.setattr(runner.subprocess, "Popen", StoppedMeanwhile)
    run = read_study(write(tmp_path, definition())).runs()[0]
    assert not runner._train_and_measure(run, tmp_path, set(), stopped)
    assert signals == [signal.SIGINT]


def test_what_is_finished_is_not_done_again(finished, monkeypatch):
    asked, work = finished
    monkeypatch.setattr(runner, "_train_and_measure", lambda *_: pytest.fail("started again"))
    assert carry_out(asked, work, 1)
    assert "nats" not in summary(asked, collected(asked, work))["runs"]["ar-s0"]["valid"]


def test_a_changed_digit_of_a_figure_is_noticed(finished, tmp_path):
    study, folder = finished[0], finished[1]
    run = study.runs()[0]
    (tmp_path / run.name).mkdir()
    place, content = tmp_path / run.name / "figures.json", (folder / run.name / "figures.json").read_text()
    place.write_text(content)
    assert runner.figures_of(run, tmp_path) == runner.figures_of(run, folder)
    for changed in (
        content.replace('"nats_per_token": ', '"nats_per_token": 1', 1),
        content[: len(content) // 2],
        "[]",
    ):
        place.write_text(changed)
        with pytest.raises(ConfigError, match=r"figures\.json is damaged.*; delete it"):
            runner.figures_of(run, tmp_path)


def test_other_windows_and_other_settings_are_other_figures(finished):
    asked, work = finished
    for changes in ({"windows": 2}, {"settings": {**asked.settings, "train.steps": 3}}):
        other = replace(asked, **changes)
        assert runner.figures_of(Run(other, "ar", 0), work) is None
        assert runner.figures_of(Run(other, "lanes", 0), work) is None


def test_parents_come_first_and_no_child_starts_without_their_weights(finished, tmp_path, monkeypatch):
    asked, _ = finished
    turned = replace(asked, variants=dict(reversed(asked.variants.items())))
    assert [run.name for run in turned.runs()] == ["mdlm-s0", "ar-s0", "lanes-s0"]
    started, heard = [], corpora.Heard()

    def fails(run, *_):
        started.append(run.name)
        if run.variant == "ar":
            raise OSError("the disk is full")
        return False

    monkeypatch.setattr(runner, "_train_and_measure", fails)
    with pytest.raises(OSError, match="full"):
        carry_out(turned, tmp_path, 1, reporter=heard)
    assert started == ["mdlm-s0", "ar-s0"]
    assert "lanes-s0: left out" in heard.said[-1]


def alone(**variant) -> dict:
    return {"variants": {"a": variant}, "against": "a"}


def beside(**variants) -> dict:
    return {"variants": {**definition()["variants"], **variants}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"against": "xx"}, "against='xx'"),
        ({"settings": {"train.stepps": 3}}, "train.stepps"),
        ({"variants": {}}, "variants"),
        ({"samples": 0}, "samples=0"),
        ({"seeds": [0, 0]}, r"seeds=\[0, 0\]"),
        (alone(preset="ar-debug", seed=3), "variants.a.seed"),
        (alone(preset="nothing"), "nothing"),
        (alone(preset="mdlm-debug", commits=["stepps:4"]), "stepps"),
        (alone(preset="mdlm-debug", commits=["first-hitting"]), "random order"),
        (alone(preset="mdlm-debug", commits=["blocks steps:2"]), "blocks"),
        (alone(preset="dcdm-debug", commits=["adablock chunk"]), "adablock"),
        (beside(**{"../../evil": {"preset": "ar-debug"}}), r"variants\.'../../evil': a name has"),
        (beside(**{"/abs/path": {"preset": "ar-debug"}}), "'/abs/path': a name has"),
        (beside(**{"n" * 300: {"preset": "ar-debug"}}), "a name has at most 100"),
        (beside(**{"a\0b": {"preset": "ar-debug"}}), "a name has"),
        ({"corpora": {"../x": "text.txt"}}, r"corpora\.'../x': a name has"),
        (beside(b={"preset": "ar-debug", "init": "nobody"}), "variants.b.init"),
        (beside(ar={"preset": "ar-debug", "init": "lanes"}), "in a circle"),
        (beside(ar={"preset": "ar-debug", "seeds": [3]}), "variants.ar.seeds"),
        (
            {"seeds": [0, 1], **beside(ar={"preset": "ar-debug", "seeds": [0]})},
            "variants.lanes: its initial weights, ar, have no seeds",
        ),
        (beside(l={"preset": "lanes-debug", "lanes": [0]}), "variants.l: lanes=0"),
        (beside(b={"preset": "bdlm-debug", "lanes": [4]}), "variants.b: lanes=4"),
    ],
)
def test_wrong_studies_are_refused_before_anything_starts(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_study(write(tmp_path, definition(**changes)))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_study(tmp_path / "nothing.yaml")


def test_a_part_of_a_study_can_be_carried_out(finished, tmp_path, monkeypatch, capsys):
    asked = replace(finished[0], seeds=(0, 1))
    begun: list[str] = []
    monkeypatch.setattr(runner, "_train_and_measure", lambda run, *more: not begun.append(run.name))
    assert carry_out(asked, tmp_path, 1, only=("mdlm", "ar"), seeds=(1,))
    assert begun == ["ar-s1", "mdlm-s1"]
    few = {**asked.variants, "mdlm": replace(asked.variants["mdlm"], seeds=(0,))}
    assert [run.name for run in replace(asked, variants=few).runs() if run.seed] == ["ar-s1", "lanes-s1"]
    with pytest.raises(ConfigError, match="--seeds 7: the study has 0, 1"):
        carry_out(asked, tmp_path, 1, seeds=(7,))
    main(["study", str(write(tmp_path, definition())), "--work", str(tmp_path), "--report"])
    assert "no run of small is finished" in capsys.readouterr().err


def test_figures_made_elsewhere_count_as_finished_and_stay(finished, tmp_path, monkeypatch):
    asked, work = finished
    out = tmp_path / "results.json"
    out.write_text(json.dumps(summary(asked, collected(asked, work))))
    begun: list[str] = []
    monkeypatch.setattr(runner, "_train_and_measure", lambda run, *more: not begun.append(run.name))
    more = replace(asked, seeds=(0, 1))
    elsewhere = tmp_path / "elsewhere"
    known = runner.stored_figures(more, out)
    carry_out(more, elsewhere, 1, known=known)
    assert begun == ["ar-s1", "mdlm-s1"]  # and none of seed 0; lanes wait for weights that are not made here
    begun.clear()
    carry_out(asked, elsewhere, 1, known=[name for name in known if name != "lanes-s0"])
    assert begun == ["ar-s0"]  # known, but lanes start from its weights
    assert compare(asked, collected(asked, elsewhere, out)) == compare(asked, collected(asked, work))
    kept = out.read_text()
    with pytest.raises(ConfigError, match=r"with other settings, and that would be lost \(3: ar-s0"):
        collected(replace(asked, windows=2), elsewhere, out)
    with pytest.raises(ConfigError, match=r"would be lost \(1: mdlm-s0"):
        collected(replace(asked, variants={n: v for n, v in asked.variants.items() if n != "mdlm"}), elsewhere, out)
    with pytest.raises(ConfigError, match="holds the results of 'small', not of 'other'"):
        collected(replace(asked, name="other"), elsewhere, out)
    assert out.read_text() == kept
    out.write_text(kept.replace('"nats_per_token": ', '"nats_per_token": 1', 1))
    with pytest.raises(ConfigError, match=r"results\.json is damaged"):
        runner.stored_figures(asked, out)
    out.write_text('{"runs": 3}')
    with pytest.raises(ConfigError, match="does not hold the results of a study"):
        runner.stored_figures(asked, out)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "studies").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_study_that_is_shipped_can_be_read_and_its_results_are_its_own(path):
    stored = path.parents[1] / "results" / f"{path.stem}.json"
    assert read_study(path).about
    kept = json.loads(stored.read_text()) if stored.is_file() else {"runs": {}}
    assert set(runner.stored_figures(read_study(path), stored)) == set(kept["runs"])
    assert "sha256" in kept or not stored.is_file()


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("x", "nowhere.txt", r"corpora: .*nowhere\.txt"),
        ("x", "rows.jsonl", r"corpora\.x: "),
    ],
)
def test_texts_that_cannot_be_read_are_named_before_anything_starts(
    finished, tmp_path, monkeypatch, name, path, message
):
    monkeypatch.setattr(runner, "_train_and_measure", lambda *_: pytest.fail("started"))
    (tmp_path / "rows.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "text.txt").write_text("a text")
    with pytest.raises(ConfigError, match=message):
        carry_out(replace(finished[0], corpora={name: str(tmp_path / path)}), tmp_path / "work", 1)


def test_a_retired_variant_keeps_its_figures_and_is_not_trained(finished, tmp_path, monkeypatch):
    asked, work = finished
    begun: list[str] = []
    monkeypatch.setattr(runner, "_train_and_measure", lambda run, *more: not begun.append(run.name))
    gone = replace(asked.variants["mdlm"], settings={"model.gone": 1}, retired="model.gone was removed")
    changed = replace(asked, variants={"ar": asked.variants["ar"], "mdlm": gone})
    out = tmp_path / "out.json"
    out.write_text(json.dumps(summary(changed, {"mdlm-s0": collected(asked, work)["mdlm-s0"]})))
    assert carry_out(changed, tmp_path, 1)
    assert begun == ["ar-s0"]
    assert {row.variant for row in compare(changed, collected(changed, tmp_path, out))} == {"mdlm"}
    with pytest.raises(ConfigError, match=r"mdlm can no longer be trained: model\.gone was removed"):
        carry_out(changed, tmp_path, 1, only=["mdlm"])


def test_seeds_of_a_variant_on_different_texts_are_not_put_together(finished, tmp_path):
    asked, work = finished
    two = replace(asked, seeds=(0, 1))
    figures = json.loads((work / "ar-s0" / "figures.json").read_text())["figures"]
    figures["valid"]["text"] = {"": "another"}
    (tmp_path / "ar-s1").mkdir()
    measuring.write_figures(tmp_path / "ar-s1", Run(two, "ar", 1).measured_with(), figures)
    out = tmp_path / "results.json"
    out.write_text(json.dumps(summary(asked, collected(asked, work))))
    with pytest.raises(ConfigError, match="the seeds of ar were trained or measured on different texts"):
        collected(two, tmp_path, out)


def test_a_variant_may_be_measured_on_some_of_the_texts_only(finished):
    asked, work = finished
    few = replace(asked, variants={**asked.variants, "ar": replace(asked.variants["ar"], corpora=())})
    assert Run(few, "ar", 0).measured_with() != Run(asked, "ar", 0).measured_with()
    figures = collected(asked, work)
    figures["ar-s0"] = {name: part for name, part in figures["ar-s0"].items() if "other: " not in name}
    del figures["ar-s0"]["valid"]["text"]["other"]
    rows = {(row.variant, row.figure): row for row in compare(few, figures)}
    assert ("ar", "other: valid") not in rows
    assert rows["lanes", "1 lanes"].difference is not None  # on the text that both have
    with pytest.raises(ConfigError, match="ar has no figure 'other: valid'"):
        check_claims(replace(few, claims={"x": Claim("", ("ar other: valid < ar",))}))
    with pytest.raises(ConfigError, match=r"variants\.ar\.corpora: \['none'\]"):
        replace(asked, variants={"ar": replace(asked.variants["ar"], corpora=("none",))})


def test_a_run_whose_initial_weights_were_made_anew_is_not_taken_for_new(finished, tmp_path):
    asked, work = finished
    changed = replace(
        asked,
        variants={**asked.variants, "ar": replace(asked.variants["ar"], label="", settings={"train.clip": 2.0})},
    )
    assert not runner._train_and_measure(Run(changed, "lanes", 0), work, set(), threading.Event())
    assert "from other initial weights; delete it" in runner.log_of(Run(asked, "lanes", 0), work).read_text()
    assert runner.figures_of(Run(asked, "lanes", 0), work) is not None


def test_nested_settings_are_those_by_dotted_names():
    nested, dotted = ({"train": {"steps": 5}, "model.moe": None}, {"train.steps": 5, "model.moe": None})
    runs = [Run(Study("x", {"a": Variant("ar-debug")}, settings=s), "a", 3) for s in (nested, dotted)]
    assert runs[0].settings(Path()) == runs[1].settings(Path())
    assert runs[0].measured_with() == runs[1].measured_with()
    assert nested == {"train": {"steps": 5}, "model.moe": None}


def test_how_evenly_chunks_are_filled_stands_beside_their_figure(tmp_path, monkeypatch):
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(corpora.prose(300))
    sizes = {name: value for name, value in SMALL.items() if name.startswith("model.")}
    changes = {"model.num_chunks": 4, "model.chunk_dim": 4, "train.steps": 1, "tensorboard": False}
    run = dcdm.train("dcdm-debug", tmp_path / "run", data=str(tmp_path / "text.txt"), settings={**sizes, **changes})
    valid = measuring.measure(run, windows=3, samples=1)["valid"]
    assert 0 <= valid["max_violation"] <= 3
    assert 2 < valid[measuring.UNIGRAM] < 4 < valid["nats_per_token"]


# --- claims -------------------------------------------------------------------------------------------------------


def claimed(*comparisons: str, **values: dict[int, float]) -> list[results.Judged]:
    """Verdicts on one claim, given the nats of each variant by seed."""
    named = {name: {"preset": "dcdm-debug"} for name in values}
    content = {"variants": named, "seeds": [0, 1, 2, 3], "claims": {"order": {"says": "so", "below": comparisons}}}
    asked = made(Study, {"name": "made up", "settings": {"train.steps": 10, "evaluate_every": 5}, **content}, "")
    check_claims(asked)
    figures = {
        f"{name}-s{seed}": {
            "valid": {"nats_per_token": nats, "max_violation": -nats, "curve": [[5, nats], [10, 1.0]]},
            "surrogate": {"nats_per_token": 0.5},
        }
        for name, seeds in values.items()
        for seed, nats in seeds.items()
    }  # fmt: skip
    return results.judge(asked, figures)


LOW, HIGH = {0: 1.0, 1: 1.1, 2: 1.2}, {0: 2.0, 1: 2.1, 2: 2.3, 3: 9.0}


@pytest.mark.parametrize(
    ("comparison", "verdict"),
    [
        ("one < two", results.CONFIRMED),
        ("two < one", results.CONTRADICTED),
        ("one < one", results.UNDECIDED),
        ("one surrogate < one", results.CONFIRMED),
        ("one MaxVio < two MaxVio", results.CONTRADICTED),
        ("one step 5 < two step 5", results.CONFIRMED),
        ("one step 10 < two step 10", results.UNDECIDED),
        ("one chunk < two chunk", results.NOT_RUN),
    ],
)
def test_a_comparison_is_decided_over_the_seeds_that_both_sides_have(comparison, verdict):
    (claim,) = claimed(comparison, one=LOW, two=HIGH)
    assert claim.verdict == verdict
    if comparison == "one < two":
        assert claim.parts[0].difference.seeds == 3
        assert claim.parts[0].difference.mean == pytest.approx(-3.1 / 3)


def test_a_claim_is_as_good_as_its_weakest_comparison_and_one_seed_decides_nothing():
    assert claimed("one < two", one={0: 1.0}, two=HIGH)[0].verdict == results.ONE_SEED
    assert claimed("one < two", "one < one", one=LOW, two=HIGH)[0].verdict == results.UNDECIDED
    assert claimed("one < two", "two < one", "one < one", one=LOW, two=HIGH)[0].verdict == results.CONTRADICTED


@pytest.mark.parametrize(
    ("comparison", "message"),
    [
        ("one > two", "is not a comparison such as 'one < other'"),
        ("one < three", "'three' is not a variant; choose from one, two"),
        ("one step early < two", "one is not evaluated at 'step early'"),
        ("one step 7 < two", "one is not evaluated at 'step 7'; it is at multiples of evaluate_every=5 up to"),
        ("one surogate < two", "one has no figure 'surogate'; it has valid, chunk, surrogate, MaxVio"),
        ("one < two test: valid", "two has no figure 'test: valid'"),
    ],
)
def test_a_comparison_that_cannot_be_read_is_refused_first(comparison, message):
    with pytest.raises(ConfigError, match=rf"claims\.order\.below: .*{message}"):
        claimed(comparison, one=LOW, two=HIGH)
