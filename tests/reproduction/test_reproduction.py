"""`dcdm reproduce`: an experiment end to end at tiny scale, interruptions, verdicts, documents equal to results."""

import contextlib
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dcdm.cli import main
from dcdm.config import ConfigError
from dcdm.reproduction import measures, queue, runs
from dcdm.reproduction.causes import CAUSES
from dcdm.reproduction.experiments import experiments, specs
from dcdm.reproduction.listing import price
from dcdm.reproduction.plots import plots
from dcdm.reproduction.reading import (
    read_results,
)  # fmt: skip
from dcdm.reproduction.report import filled, regions, write_report
from dcdm.reproduction.runs import Places, RunSpec, carry_out, is_done, prepare_data
from dcdm.reproduction.scale import TEST, TRAINING, VALIDATION, ZERO_SHOT, cpu, scale, tiny
from dcdm.reproduction.variants import variants
from dcdm.training import run as command

ROOT = Path(__file__).parents[2]
WORDS = (
    "the",
    "a",
    "river",
    "house",
    "of",
    "green",
    "and",
    "was",
    "1907",
    "in",
    "song",
    "(",
    ",",
    ".",
    "old",
    "year",
)


def words(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) + ("\n" if draw.random() < 0.05 else "") for _ in range(count))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    folder = tmp_path_factory.mktemp("reproduction")
    for number, name in enumerate((*TRAINING, VALIDATION, TEST)):
        path = folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words(2000, number))
    for number, name in enumerate(ZERO_SHOT.values()):
        path = folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(json.dumps({"text": words(60, 9 + number + at)}) for at in range(3)))
    made = Places(folder / "data", folder / "work", folder / "results")
    prepare_data(tiny(), made)
    return made


@pytest.fixture(scope="module")
def finished(places: Places) -> Places:
    """Two kinds, one of them with two seeds, carried out without interruption."""
    for name, seed in (("paper", 0), ("bdlm8", 0), ("bdlm8", 1)):
        assert carry_out(RunSpec(tiny(), variants(tiny())[name], seed), places) == 0
    return places


def stopping_after(steps: int):
    """A training run's signals, as if someone pressed Ctrl-C during step `steps`."""

    @contextlib.contextmanager
    def signals():
        asked = 0

        def stop() -> bool:
            nonlocal asked
            asked += 1
            return asked >= steps

        yield stop

    return signals


def test_an_interrupted_run_gives_the_same_file(finished: Places, tmp_path: Path, monkeypatch) -> None:
    spec = RunSpec(tiny(), variants(tiny())["paper"], 0)
    other = Places(finished.data, tmp_path / "work", tmp_path / "results")
    prepare_data(tiny(), other)
    with monkeypatch.context() as patched:
        patched.setattr(command, "_signals", stopping_after(spec.evaluate_every))
        assert carry_out(spec, other) == queue.INTERRUPTED
    assert not other.result(spec).exists()
    calls = []

    def once(name: str, *rest: object) -> dict:
        calls.append(name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measures.MEASURES[name](*rest)

    monkeypatch.setattr(measures, "measure", once)
    with pytest.raises(KeyboardInterrupt):
        carry_out(spec, other)
    assert carry_out(spec, other) == 0
    assert sorted(calls) == sorted([*spec.variant.measures, calls[2]])  # nothing finished is measured again
    assert other.result(spec).read_bytes() == finished.result(spec).read_bytes()


def test_a_finished_run_is_not_repeated(finished: Places, monkeypatch) -> None:
    spec = RunSpec(tiny(), variants(tiny())["bdlm8"], 0)
    monkeypatch.setattr(runs, "_train", lambda *_: pytest.fail("trained again"))
    assert is_done(spec, finished)
    assert carry_out(spec, finished) == 0
    state = queue.work_off([spec], finished, jobs=2)
    assert [one.name for one in state.done] == [spec.name]


def test_other_settings_of_a_measure_measure_again(finished: Places, tmp_path: Path, monkeypatch) -> None:
    folder = shutil.copytree(finished.work, tmp_path / "work")
    own = Places(finished.data, folder, shutil.copytree(finished.results, tmp_path / "results"))
    changed = replace(tiny(), frontier_windows=1)
    spec = RunSpec(changed, variants(changed)["bdlm8"], 1)
    assert not is_done(spec, own)
    calls = []
    monkeypatch.setattr(
        measures, "measure", lambda name, *rest: calls.append(name) or measures.MEASURES[name](*rest)
    )
    assert carry_out(spec, own) == 0
    assert calls == ["frontier", "policies"]
    assert is_done(spec, own)
    assert not is_done(RunSpec(replace(changed, curve_windows=3), spec.variant, 1), own)
    mixed = read_results(own.results, "tiny")
    assert "bdlm8-s1" in regions(mixed)["summary"]
    found = mixed.difference("bdlm8", "bdlm8", ("frontier", "1"), ("heldout", "chunk"))
    assert found is not None
    assert found.half is None  # one window is common to both seeds


def test_results_hold_what_a_reader_needs(finished: Places) -> None:
    result = json.loads(finished.result(RunSpec(tiny(), variants(tiny())["paper"], 0)).read_bytes())
    assert result["seed"] == 0
    assert result["settings"]["model"]["kind"] == "dcdm"
    assert result["versions"]["torch"]
    held = result["measures"]["heldout"]
    assert {"valid", "surrogate", "chunk"} <= set(held)
    assert held["valid"]["estimator"] == "sequential"
    assert held["valid"]["nats_per_token"] == pytest.approx(
        sum(held["valid"]["window_nats"]) / sum(held["valid"]["window_tokens"]), abs=1e-2
    )
    machine = json.loads(finished.machine(RunSpec(tiny(), variants(tiny())["paper"], 0)).read_bytes())
    assert machine["training_tokens_per_second"] > 0
    assert "seconds" not in json.dumps(result)


def test_the_report_comes_from_results_alone(finished: Places, tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("Before.\n\n<!-- begin kinds -->\n<!-- end -->\n\n<!-- begin moe -->\nold\n<!-- end -->\n")
    page = write_report(finished.results, "tiny", document, tmp_path / "images")
    text = document.read_text()
    value = read_results(finished.results, "tiny").mean("bdlm8", ("heldout", "valid"))
    assert value is not None
    assert f"{value.mean:.3f} ±" in text
    assert "old" not in text
    assert (tmp_path / "images" / "loss-curves.svg").read_text().startswith("<svg xmlns")
    assert "<script src" not in page.read_text()
    results = read_results(finished.results, "tiny")
    assert filled(text, regions(results)) == text


@pytest.mark.slow
def test_the_queue_stops_with_a_signal_and_goes_on(places: Places, tmp_path: Path) -> None:
    import os
    import signal

    own = Places(places.data, tmp_path / "work", tmp_path / "results")
    prepare_data(tiny(), own)
    chosen = [RunSpec(tiny(), variants(tiny())["bdlm8"], 7)]
    sent = []

    def stop_at_once(state: queue.State) -> None:
        if not sent and (own.run(chosen[0]) / "metrics.jsonl").exists():
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    state = queue.work_off(chosen, own, 1, stop_at_once)
    assert not state.failed, queue.log_of(chosen[0], own).read_text()
    state = queue.work_off(chosen, own, 1)
    assert [one.name for one in state.done] == ["bdlm8-s7"]


def test_every_variant_is_a_model_and_has_its_own_identity() -> None:
    for chosen in (tiny(), cpu()):
        made = specs(chosen, ["all"])
        assert len({one.identity() for one in made}) == len(made)
        assert {one.model.context_length for one in made} == {chosen.base.context_length}
        used = {name for one in experiments(chosen).values() for name in one.variants}
        assert used <= set(variants(chosen))
        assert all(name in measures.MEASURES for one in made for name in one.variant.measures)


def test_main_kinds_come_first_and_every_comparison_has_three_seeds_or_more() -> None:
    made = specs(cpu(), ["all"])
    known = variants(cpu())
    assert min(one.seeds for one in known.values()) == 3
    assert len({one.name for one in made}) == len(made) == sum(one.seeds for one in known.values())
    for one in known.values():  # a fine-tuned run starts from its parent's of the same seed
        assert one.parent is None or known[one.parent].seeds >= one.seeds
    assert {(one.variant.name, one.seed) for one in specs(cpu(), ["moe"], (7,))} == {
        ("paper", 7), ("paper-moe", 7), ("strided-full", 7), ("strided-full-moe", 7),
    }  # fmt: skip
    assert {one.variant.name for one in made[:8]} == {
        "bdlm8", "paper", "mdlm", "strided-full", "causal-full", "bdlm32", "ar", "causal",
    }  # fmt: skip
    extra = [one.variant.extra for one in made]
    assert any(extra)
    assert extra == sorted(extra)


def test_causes_change_either_the_model_or_its_noise() -> None:
    shown = set(experiments(cpu())["partitions"].variants)
    for cause in CAUSES:
        one, other = (RunSpec(cpu(), variants(cpu())[name], 0) for name in (cause.one, cause.other))
        assert {cause.one, cause.other} <= shown
        same_noise = one.objective.full_mask_share == other.objective.full_mask_share
        assert (one.model == other.model) != same_noise, cause
        assert same_noise != ("noise levels →" in cause.changed)


def test_stored_results_are_those_of_the_runs_defined_here() -> None:
    by_name = {one.name: one for one in specs(cpu(), ["all"])}
    for path in (ROOT / "results" / "cpu").glob("*.json"):
        assert runs.is_current(json.loads(path.read_bytes()), by_name[path.stem]), path.name


def test_numbers_in_the_document_equal_the_results() -> None:
    results = read_results(ROOT / "results", "cpu")
    text = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert filled(text, regions(results)) == text, "run `dcdm reproduce report`"
    for name, drawn in plots(results).items():
        assert (ROOT / "docs" / "images" / "reproduction" / f"{name}.svg").read_text(encoding="utf-8") == drawn


def test_curves_have_as_many_points_as_asked_for() -> None:
    spec = RunSpec(cpu(), variants(cpu())["paper"], 0)
    steps = {*range(spec.evaluate_every, spec.steps + 1, spec.evaluate_every), spec.steps}
    assert len(steps) == cpu().evaluations


def test_runs_of_up_to_eight_chunks_are_expected_to_take_six_minutes_at_most(tmp_path: Path) -> None:
    places = Places(tmp_path, tmp_path, tmp_path)
    made = [RunSpec(cpu(), one, 0) for one in variants(cpu()).values()]
    few = [spec for spec in made if (spec.model.num_chunks or 0) <= 8]  # measured, those of 16 and 32 take longer
    assert max(price(spec, places) for spec in few) < 6


def test_a_report_without_results_says_so(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("<!-- begin summary -->\n<!-- end -->\n<!-- begin kinds -->\n| old |\n<!-- end -->\n")
    write_report(tmp_path / "results", "cpu", document, tmp_path / "images")
    assert "No results are stored yet" in document.read_text()
    assert "old" not in document.read_text()


def test_commits_have_the_forwards_that_are_asked_for() -> None:
    base = variants(cpu())
    config = RunSpec(cpu(), base["strided-full"], 0).model
    assert measures.commit_for(config, 1 / 16) == "steps:2"
    assert measures.commit_for(config, 1.0) == "position"
    assert measures.commit_for(config, 1 / 16, chunks=1.9) == "steps:8"
    assert measures.commit_for(config, 1 / 16, chunks=5.9) == "steps:2"
    assert measures.commit_for(RunSpec(cpu(), base["bdlm8"], 0).model, 1 / 8) == "chunk"
    assert measures.commit_for(RunSpec(cpu(), base["bdlm8"], 0).model, 1 / 16) is None
    assert measures.commit_for(RunSpec(cpu(), base["ar"], 0).model, 1 / 2) is None


def test_the_paper_scale_spells_out_commands_and_bill(capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce", "all", "--scale", "paper"])
    shown = capsys.readouterr().out
    assert shown.count("GPU-hours") == len(experiments(cpu()))
    assert "torchrun --standalone --nproc-per-node 8 -m dcdm train --preset dcdm-0.1b-k8 " in shown
    for rate in ("7.5e-05", "0.00015", "0.0006"):
        assert shown.count(f"train.learning_rate={rate}\n") == 3


def test_the_list_names_every_experiment_and_the_price(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["reproduce", "--list", "--results", str(tmp_path)])
    shown = capsys.readouterr().out
    assert all(name in shown for name in experiments(cpu()))
    assert "core-hours" in shown
    main(["reproduce", "--list", "--seeds", "0", "--results", str(tmp_path)])
    assert f"{len(variants(cpu()))} runs of" in capsys.readouterr().out


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no experiment is called figures"):
        specs(tiny(), ["figures"])
    with pytest.raises(SystemExit):
        main(["reproduce", "all", "--seeds", "1", "1"])
    with pytest.raises(ConfigError, match="lacks corpora"):
        Places(tmp_path, tmp_path, tmp_path).check()
    with pytest.raises(ConfigError, match="cannot run here"):
        scale("huge")


def test_a_report_of_a_mistyped_folder_leaves_all_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "docs" / "reproduction.md"
    document.parent.mkdir()
    document.write_text("<!-- begin kinds -->\n| kept |\n<!-- end -->\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["reproduce", "report", "--results", "result"])
    assert "no finished run under cpu" in capsys.readouterr().err
    assert "kept" in document.read_text()
    assert not (tmp_path / "result").exists()


def test_frequencies_of_single_tokens_are_the_line_to_get_below(finished: Places) -> None:
    import numpy as np

    from dcdm.data.store import PreparedData
    from dcdm.reproduction.frequencies import write_frequencies

    write_frequencies(tiny(), finished)
    results = read_results(finished.results, "tiny")
    held, own = (results.figure(name, 0, ("heldout", "valid")) for name in ("frequencies", "bdlm8"))
    assert held["numbers"] == own["numbers"]
    assert held["window_tokens"] == own["window_tokens"]
    data = PreparedData.open(finished.prepared(tiny()))
    counts = np.bincount(data.stream("train").read(0, data.tokens("train"))) + 1.0
    entropy = -(counts / counts.sum() * np.log(counts / counts.sum())).sum()
    assert held["nats_per_token"] == pytest.approx(entropy, rel=0.1)  # the texts are drawn alike
    found = regions(results)
    assert "frequencies of single tokens" in found["kinds"]
    assert "bdlm8 2 of 2" in found["summary"].partition("Still at the frequencies")[2]  # 12 steps teach nothing
    assert ("bdlm8", 0) in results.at_frequencies()
    for key in (("bdlm8", 0), ("bdlm8", 1)):
        nats = results.runs[key]["measures"]["heldout"]["valid"]["window_nats"]
        nats[:] = [value / 2 for value in nats]
    assert ("bdlm8", 0) not in results.at_frequencies()
    written = finished.frequencies(tiny()).stat().st_mtime_ns
    write_frequencies(tiny(), finished)
    assert finished.frequencies(tiny()).stat().st_mtime_ns == written
