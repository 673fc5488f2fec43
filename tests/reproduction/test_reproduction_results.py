"""Stored results: files that lose nothing, intervals over seeds, curves."""

import gzip
import json
import statistics
from pathlib import Path

import pytest

from dcdm.config import ConfigError
from dcdm.reproduction import results as stored
from dcdm.reproduction.intervals import Interval, interval, student
from dcdm.reproduction.results import Results, changing_results, curve_points, reached, read_results, write_results
from made_up_results import results_of, with_curves


def two_runs() -> Results:
    results = results_of({("paper", 0): 5.0, ("bdlm8", 3): 6.0})
    for (name, seed), run in results.runs.items():
        run |= {"run": f"{name}-s{seed}", "identity": name, "measured_with": {"heldout": "a"}, "says": "é\u2028"}
        run["measures"]["curve"] = {"validation": [[1, 2.5, 0.0]]}
        results.machines[name, seed] = {"seconds": {"training": 1.5}}
    results.reference = {"run": "frequencies", "made_of": [1], "measures": {"heldout": {"valid": {"numbers": [4]}}}}
    return results


def test_what_is_written_is_read_again_and_written_the_same(tmp_path: Path) -> None:
    write_results(tmp_path, two_runs())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == ["cpu-machines.jsonl", "cpu-windows.jsonl.gz", "cpu.jsonl"]
    again = read_results(tmp_path, "cpu")
    assert again == two_runs()
    write_results(tmp_path, again)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_figures_by_window_stand_in_the_compressed_file_alone(tmp_path: Path) -> None:
    write_results(tmp_path, two_runs())
    assert "window_nats" not in (tmp_path / "cpu.jsonl").read_text()
    packed = gzip.decompress((tmp_path / "cpu-windows.jsonl.gz").read_bytes())
    lines = [json.loads(line) for line in packed.splitlines()]
    assert [line["run"] for line in lines] == ["bdlm8-s3", "frequencies", "paper-s0"]
    assert lines[0]["measures"]["heldout"]["valid"]["window_tokens"] == [10] * 4


@pytest.mark.parametrize("interrupted_at", [1, 2, 3])
def test_an_interrupted_writing_loses_no_finished_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted_at: int
) -> None:
    write_results(tmp_path, two_runs())
    written = []

    def dies(path: Path, data: bytes) -> None:
        written.append(path)
        if len(written) == interrupted_at:
            raise KeyboardInterrupt
        path.write_bytes(data)

    with monkeypatch.context() as patched:
        patched.setattr(stored, "write_whole", dies)
        with pytest.raises(KeyboardInterrupt), changing_results(tmp_path, "cpu") as results:
            results.runs["mdlm", 0] = {**results.runs["paper", 0], "run": "mdlm-s0", "variant": "mdlm"}
    assert read_results(tmp_path, "cpu").runs == two_runs().runs


def test_figures_are_not_read_with_the_windows_of_other_settings(tmp_path: Path) -> None:
    write_results(tmp_path, two_runs())
    figures = (tmp_path / "cpu.jsonl").read_bytes()
    changed = two_runs()
    changed.runs["paper", 0]["measured_with"] = {"heldout": "b"}
    write_results(tmp_path, changed)
    (tmp_path / "cpu.jsonl").write_bytes(figures)  # as if the writing had ended before the figures
    assert set(read_results(tmp_path, "cpu").runs) == {("bdlm8", 3)}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_results(tmp_path, two_runs())
    (tmp_path / "cpu-windows.jsonl.gz").write_bytes(b"not compressed")
    with pytest.raises(ConfigError, match="cpu-windows"):
        read_results(tmp_path, "cpu")


def test_an_interval_over_three_seeds_is_students() -> None:
    values = [1.0, 1.2, 1.1]
    difference = interval(values)
    assert difference is not None
    assert difference.half == pytest.approx(4.303 * statistics.stdev(values) / 3**0.5)
    assert interval([1.0]) == Interval(1.0, None, 1)
    assert interval([]) is None


def test_differences_are_taken_on_common_windows() -> None:
    results = results_of({("paper", 0): 5.0, ("bdlm8", 0): 6.0})
    valid = results.runs["paper", 0]["measures"]["heldout"]["valid"]
    valid["numbers"], valid["window_nats"], valid["window_tokens"] = [2, 9], [40.0, 1000.0], [10, 10]
    difference = results.difference("paper", "bdlm8")
    assert difference is not None
    assert difference.mean == pytest.approx(-2.0)
    assert difference.half is None


def test_students_factor_is_that_of_the_number_of_windows() -> None:
    assert [round(student(freedom), 3) for freedom in (2, 10, 30, 63)] == [4.303, 2.228, 2.042, 1.998]
    values = {("paper", seed): 5.0 for seed in range(2)} | {("bdlm8", seed): 6.0 for seed in range(2)}
    results = results_of(values)
    for seed in range(2):
        results.runs["paper", seed]["measures"]["heldout"]["valid"]["window_nats"] = [40.0, 50.0, 60.0, 50.0]
    difference = results.difference("paper", "bdlm8")
    assert difference is not None
    assert difference.half == pytest.approx(3.182 * statistics.stdev([4, 5, 6, 5]) / 2)


def test_windows_count_by_their_tokens_in_the_error_of_a_difference_as_in_its_mean() -> None:
    """A window of one token that says something else changes neither much."""
    values = {("paper", seed): 5.0 for seed in range(2)} | {("bdlm8", seed): 6.0 for seed in range(2)}
    results, tokens = results_of(values), [100, 100, 100, 1]
    for (name, _), run in results.runs.items():
        valid = run["measures"]["heldout"]["valid"]
        valid["window_tokens"] = tokens
        valid["window_nats"] = [500.0, 500.0, 500.0, 5.0] if name == "paper" else [600.0, 600.0, 600.0, 46.0]
    difference = results.difference("paper", "bdlm8")
    assert difference is not None
    mean = -341 / 301
    assert difference.mean == pytest.approx(mean)
    spread = sum((nats - mean * count) ** 2 for nats, count in zip([-100, -100, -100, -41], tokens, strict=True))
    assert difference.half == pytest.approx(3.182 * (spread * 4 / 3) ** 0.5 / 301)


def test_whole_curves_are_paired_by_step() -> None:
    """Seeds draw other prompts: at one step they have been trained on other numbers of tokens."""
    curves = {
        ("paper", seed): [[(100.0 + 3 * seed) * at, 6.0 + seed, 0.0] for at in range(1, 7)] for seed in (0, 1)
    }
    points = curve_points(with_curves(curves), "paper")
    assert [x for x, *_ in points] == pytest.approx([101.5 * at for at in range(1, 7)])
    assert {y for _, y, _ in points} == {6.5}
    assert curve_points(with_curves({("paper", 0): []}), "paper") == []
    gaps = {("paper", gap): [[100.0 * at, 6.0, 0.0] for at in range(1, 7) if at != gap] for gap in (3, 4)}
    assert [x for x, *_ in curve_points(with_curves(gaps), "paper")] == [100, 200, 500, 600]


def test_a_loss_is_reached_between_two_points() -> None:
    curve = [(100.0, 6.0), (200.0, 5.0), (300.0, 4.5)]
    assert [reached(curve, value) for value in (7.0, 5.5, 4.5, 4.0)] == [100, 150, 300, None]
