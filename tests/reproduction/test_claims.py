"""What results say: intervals over seeds, curves, verdicts, what chunks hold."""

import statistics

import pytest

from dcdm.reproduction import measures, tables
from dcdm.reproduction.claims import (
    CONFIRMED,
    CONTRADICTED,
    UNDECIDED,
    earlier,
    interior_optimum,
    loss_order,
    own_rates,
    verdict_of,
)
from dcdm.reproduction.results import Interval, Results, curve_points, interval, reached, student
from dcdm.reproduction.scale import cpu
from dcdm.reproduction.variants import RunSpec, variants


def fake(values: dict[tuple[str, int], float], windows: int = 4) -> Results:
    """Results whose valid figure is the given one on every window."""
    made = Results("cpu")
    for (name, seed), nats in values.items():
        valid = {
            "nats_per_token": nats, "numbers": list(range(windows)), "window_nats": [nats * 10] * windows,
            "window_tokens": [10] * windows,
        }  # fmt: skip
        made.runs[name, seed] = {"variant": name, "seed": seed, "measures": {"heldout": {"valid": valid}}}
    return made


def test_an_interval_over_three_seeds_is_students() -> None:
    values = [1.0, 1.2, 1.1]
    found = interval(values)
    assert found is not None
    assert found.half == pytest.approx(4.303 * statistics.stdev(values) / 3**0.5)
    assert interval([1.0]) == Interval(1.0, None, 1)
    assert interval([]) is None


@pytest.mark.parametrize(
    ("paper", "expected"),
    [
        ((5.0, 5.01, 4.99), CONFIRMED),
        ((7.0, 7.01, 6.99), CONTRADICTED),
        ((5.9, 6.1, 6.0), UNDECIDED),
        ((5.0,), UNDECIDED),
    ],
)
def test_a_claim_follows_from_its_interval(paper: tuple[float, ...], expected: str) -> None:
    values = {("paper", seed): value for seed, value in enumerate(paper)}
    values |= {("bdlm8", seed): 6.0 for seed in range(3)} | {("mdlm", seed): 6.5 for seed in range(3)}
    claim = loss_order(fake(values))
    assert claim.parts[0].verdict == claim.verdict == expected
    assert claim.parts[1].verdict == CONFIRMED


def test_differences_are_taken_on_common_windows() -> None:
    results = fake({("paper", 0): 5.0, ("bdlm8", 0): 6.0})
    valid = results.runs["paper", 0]["measures"]["heldout"]["valid"]
    valid["numbers"], valid["window_nats"], valid["window_tokens"] = [2, 9], [40.0, 1000.0], [10, 10]
    found = results.difference("paper", "bdlm8")
    assert found is not None
    assert found.mean == pytest.approx(-2.0)
    assert verdict_of(found) == UNDECIDED


def test_students_factor_is_that_of_the_number_of_windows() -> None:
    assert [round(student(freedom), 3) for freedom in (2, 10, 30, 63)] == [4.303, 2.228, 2.042, 1.998]
    values = {("paper", seed): 5.0 for seed in range(2)} | {("bdlm8", seed): 6.0 for seed in range(2)}
    results = fake(values)
    for seed in range(2):
        results.runs["paper", seed]["measures"]["heldout"]["valid"]["window_nats"] = [40.0, 50.0, 60.0, 50.0]
    found = results.difference("paper", "bdlm8")
    assert found is not None
    assert found.half == pytest.approx(3.182 * statistics.stdev([4, 5, 6, 5]) / 2)


def with_curves(curves: dict[tuple[str, int], list[list[float]]]) -> Results:
    made = fake(dict.fromkeys(curves, 5.0))
    for key, points in curves.items():
        made.runs[key]["measures"]["curve"] = {"validation": points}
    return made


def test_points_of_curves_are_paired_by_tokens() -> None:
    whole = [[100.0 * at, 6.0 - at / 10, 0.0] for at in range(1, 7)]
    lost = [point for point in whole if point[0] != 300]
    doubled = [*whole[:-1], [598.0, 5.4, 0.0], whole[-1]]
    curves = {("paper", seed): points for seed, points in enumerate((whole, lost, doubled))}
    curves |= {("bdlm8", seed): [[x, y + 1, e] for x, y, e in whole] for seed in range(3)}
    results = with_curves(curves)
    assert [x for x, *_ in curve_points(results, "paper")] == [100, 200, 400, 500, 600]
    claim = earlier(results)
    assert [part.name for part in claim.parts] == [f"DCDM − BDLM at {share} of training" for share in
                                                   ("67%", "83%", "100%")]  # fmt: skip
    assert all(part.difference is not None and part.difference.mean == pytest.approx(-1) for part in claim.parts)


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


def test_two_tokens_share_a_chunk_by_chance_as_sizes_say() -> None:
    assert tables.chance_together([[1, 1], [2, 0], [0, 0]]) == pytest.approx(0.5)
    assert tables.chance_together([[1]] * 8) == pytest.approx(1 / 8)


def test_the_inner_number_of_chunks_is_chosen_over_common_seeds() -> None:
    chunks = {"paper-k4-h64": 4, "paper": 8, "paper-k16-h32": 16, "paper-k32-h24": 32}
    values = {(name, seed): 6.0 for name in chunks for seed in range(3)}
    values |= {("paper", seed): 5.9 for seed in range(3)} | {("paper", seed): 9.0 for seed in range(3, 6)}
    results = fake(values)
    for (name, _), run in results.runs.items():
        run["settings"] = {"model": {"num_chunks": chunks[name], "chunk_dim": 64 if chunks[name] == 4 else 32}}
    assert [part.name for part in interior_optimum(results).parts] == ["K=8 − K=4", "K=8 − K=32"]


def test_a_model_s_learning_rate_is_chosen_by_its_validation_loss_alone() -> None:
    models, test = (
        ("paper", "bdlm8", "mdlm"),
        {"-quarter-rate": 7.0, "-half-rate": 5.0, "": 6.0, "-double-rate": 4.0},
    )
    values = [(f"{model}{end}", nats) for model in models for end, nats in test.items()]
    results = fake({(name, seed): nats for name, nats in values for seed in (0, 1)})
    assert own_rates(results).verdict == UNDECIDED, "without curves nothing is chosen"
    for (name, _), run in results.runs.items():
        chosen = {"paper": "paper", "bdlm8": "bdlm8-half-rate", "mdlm": "mdlm-double-rate"}.values()
        run["measures"]["curve"] = {"validation": [[100, 9.0], [200, 5.5 if name in chosen else 5.6]]}
    assert [part.difference.mean for part in own_rates(results).parts if part.difference] == [1.0, 1.0, 2.0]
    assert RunSpec(cpu(), variants(cpu())["mdlm-half-rate"], 0).train["train.learning_rate"] == 1.5e-3


def test_marks_of_chunks_survive_markdown() -> None:
    assert tables.marks({"marks": [[["<unk>", 0.5]], [["`", 0.5]]]}) == "1: `<unk>` 50%, 2: `` ` `` 50%"


def test_classes_of_tokens() -> None:
    pieces = [b" the", b" house", b"hold", b" 1,907", b",", b"\n"]
    assert measures.token_classes(pieces) == [
        "function word", "word", "inside a word", "number", "punctuation", "line end",
    ]  # fmt: skip


def test_what_two_things_tell_of_each_other_is_measured_in_bits() -> None:
    from collections import Counter

    assert measures.information(Counter({(1, "a"): 5, (2, "b"): 5})) == pytest.approx(1.0)
    assert measures.information(Counter({(1, "a"): 5, (1, "b"): 5, (2, "a"): 5, (2, "b"): 5})) == pytest.approx(0.0)
