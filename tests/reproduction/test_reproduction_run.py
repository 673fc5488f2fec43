"""Runs end to end at tiny scale: interruptions, what is kept, what is measured, and the report of it."""

import contextlib
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dcdm.data.store import PreparedData
from dcdm.reproduction import measures, run
from dcdm.reproduction.report import filled, regions, write_report
from dcdm.reproduction.results import Places, gather, is_done, read_results
from dcdm.reproduction.run import PRESET, carry_out, measure_frequencies, prepare_data, settings_of
from dcdm.reproduction.scale import TEST, TRAINING, VALIDATION, ZERO_SHOT, cpu, tiny
from dcdm.reproduction.variants import RunSpec, variants
from dcdm.training import run as training
from dcdm.training.settings import preset_defaults, resolve

WORDS = ("the", "a", "river", "house", "of", "green", "and", "was", "1907", "in", "song", "(", ",", ".", "old")


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


FINISHED = (("paper", 0), ("bdlm8", 0), ("bdlm8", 1))


@pytest.fixture(scope="module")
def finished(places: Places) -> Places:
    """Two kinds, one of them with two seeds, carried out without interruption."""
    specs = [RunSpec(tiny(), variants(tiny())[name], seed) for name, seed in FINISHED]
    for spec in specs:
        assert carry_out(spec, places) == 0
    gather(specs, places, "tiny")
    return places


def test_nothing_of_a_comparison_rests_on_the_preset() -> None:
    """Debug presets carry recipes of their own: another optimizer, other noise, another network."""
    places = Places(Path("data"), Path("work"), Path("results"))
    for variant in variants(cpu()).values():
        spec = RunSpec(cpu(), variant, 1)
        told = settings_of(spec, places)
        config = resolve(PRESET, changes=told)
        assert (config.model, config.objective) == (spec.model, spec.objective), variant.name
        preset = {name for name in preset_defaults(PRESET) if name.startswith(("train.", "objective."))}
        assert told["train.optimizer"] == "adamw"
        assert preset - told.keys() == {"train.muon_rate"}  # which AdamW does not look at


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
        patched.setattr(training, "_signals", stopping_after(spec.evaluate_every))
        assert carry_out(spec, other) == run.INTERRUPTED
    assert not other.result(spec).exists()
    calls = []

    def once(name: str, *rest: object) -> dict:
        calls.append(name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measures.MEASURES[name](*rest)

    monkeypatch.setattr(measures, "measure_run", once)
    with pytest.raises(KeyboardInterrupt):
        carry_out(spec, other)
    assert carry_out(spec, other) == 0
    assert sorted(calls) == sorted([*spec.variant.measures, calls[2]])  # nothing finished is measured again
    assert other.result(spec).read_bytes() == finished.result(spec).read_bytes()


def test_a_finished_run_is_not_repeated(finished: Places, monkeypatch) -> None:
    spec = RunSpec(tiny(), variants(tiny())["bdlm8"], 0)
    monkeypatch.setattr(run, "_train", lambda *_: pytest.fail("trained again"))
    assert is_done(spec, read_results(finished.results, "tiny"))
    assert carry_out(spec, finished) == 0
    state = run.work_off([spec], finished, jobs=2)
    assert [one.name for one in state.done] == [spec.name]


def test_other_settings_of_a_measure_measure_again(finished: Places, tmp_path: Path, monkeypatch) -> None:
    folder = shutil.copytree(finished.work, tmp_path / "work")
    own = Places(finished.data, folder, shutil.copytree(finished.results, tmp_path / "results"))
    changed = replace(tiny(), frontier_windows=1)
    spec = RunSpec(changed, variants(changed)["bdlm8"], 1)
    assert not is_done(spec, read_results(own.results, "tiny"))
    calls = []
    monkeypatch.setattr(
        measures, "measure_run", lambda name, *rest: calls.append(name) or measures.MEASURES[name](*rest)
    )
    assert carry_out(spec, own) == 0
    assert calls == ["frontier", "policies"]
    mixed = gather([spec], own, "tiny")
    assert is_done(spec, mixed)
    assert not is_done(RunSpec(replace(changed, curve_windows=3), spec.variant, 1), mixed)
    assert mixed.runs == read_results(own.results, "tiny").runs
    difference = mixed.difference("bdlm8", "bdlm8", ("frontier", "1"), ("heldout", "chunk"))
    assert difference is not None
    assert difference.half is None  # one window is common to both seeds


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
    results = read_results(finished.results, "tiny")
    page = write_report(results, finished.results, document, tmp_path / "images")
    text = document.read_text()
    value = results.mean("bdlm8", ("heldout", "valid"))
    assert value is not None
    assert f"{value.mean:.3f} ±" in text
    assert "old" not in text
    assert (tmp_path / "images" / "loss-curves.svg").read_text().startswith("<?xml")
    assert "<script src" not in page.read_text()
    assert filled(text, regions(results)) == text


@pytest.mark.slow
def test_the_queue_stops_with_a_signal_and_resumes(places: Places, tmp_path: Path) -> None:
    import os
    import signal

    own = Places(places.data, tmp_path / "work", tmp_path / "results")
    prepare_data(tiny(), own)
    chosen = [RunSpec(tiny(), variants(tiny())["bdlm8"], 7)]
    sent = []

    def stop_at_once(state: run.QueueState) -> None:
        if not sent and (own.run(chosen[0]) / "metrics.jsonl").exists():
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    state = run.work_off(chosen, own, 1, stop_at_once)
    assert not state.failed, own.log(chosen[0]).read_text()
    state = run.work_off(chosen, own, 1)
    assert [one.name for one in state.done] == ["bdlm8-s7"], state


def test_frequencies_of_single_tokens_are_the_line_to_get_below(finished: Places) -> None:
    measure_frequencies(tiny(), finished)
    results = read_results(finished.results, "tiny")
    held, scored = (results.figure(name, 0, ("heldout", "valid")) for name in ("frequencies", "bdlm8"))
    assert held["numbers"] == scored["numbers"]
    assert held["window_tokens"] == scored["window_tokens"]
    data = PreparedData.open(finished.prepared(tiny()))
    counts = np.bincount(data.stream("train").read(0, data.tokens("train"))) + 1.0
    entropy = -(counts / counts.sum() * np.log(counts / counts.sum())).sum()
    assert held["nats_per_token"] == pytest.approx(entropy, rel=0.1)  # the texts are drawn alike
    assert "frequencies of single tokens" in regions(results)["kinds"]
    assert {("bdlm8", 0), ("bdlm8", 1)} <= set(results.at_frequencies())  # 12 steps teach nothing
    for key in (("bdlm8", 0), ("bdlm8", 1)):
        nats = results.runs[key]["measures"]["heldout"]["valid"]["window_nats"]
        nats[:] = [value / 2 for value in nats]
    assert ("bdlm8", 0) not in results.at_frequencies()
    written = (finished.results / "tiny.jsonl").stat().st_mtime_ns
    measure_frequencies(tiny(), finished)
    assert (finished.results / "tiny.jsonl").stat().st_mtime_ns == written
