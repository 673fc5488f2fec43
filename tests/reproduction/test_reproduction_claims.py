"""What results say: intervals over seeds, curves, verdicts, what chunks hold."""

import pytest

from dcdm.reproduction.claims import (
    Claim,
    Comparison,
    earlier,
    interior_optimum,
    loss_order,
    own_rates,
)
from dcdm.reproduction.intervals import Interval
from dcdm.reproduction.results import curve_points
from dcdm.reproduction.scale import cpu
from dcdm.reproduction.variants import RunSpec, variants
from dcdm.reproduction.verdicts import CONFIRMED, CONTRADICTED, UNDECIDED, verdict_of
from made_up_results import results_of, with_curves


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
    claim = loss_order(results_of(values))
    assert claim.parts[0].verdict == claim.verdict == expected
    assert claim.parts[1].verdict == CONFIRMED


@pytest.mark.parametrize(
    ("mean", "half", "expected"),
    [
        (-0.2, 0.1, CONFIRMED), (-0.1, 0.1, UNDECIDED), (-0.1, 0.3, UNDECIDED), (0.1, 0.3, UNDECIDED),
        (0.1, 0.1, UNDECIDED), (0.2, 0.1, CONTRADICTED), (0.2, None, UNDECIDED), (-0.2, None, UNDECIDED),
    ],
)  # fmt: skip
def test_an_interval_on_the_other_side_contradicts_and_one_that_holds_zero_decides_nothing(
    mean: float, half: float | None, expected: str
) -> None:
    assert verdict_of(Interval(mean, half, 3)) == expected


def test_the_comparison_behind_a_verdict_is_the_one_that_speaks_most_against_the_claim() -> None:
    differences = {
        "clear": (0.3, 0.1),
        "clearest": (0.4, 0.1),
        "wide": (0.6, 0.5),
        "open": (0.9, 1.0),
        "for": (-1.0, 0.1),
    }
    parts = tuple(
        Comparison(name, value := Interval(*figures, 3), verdict_of(value)) for name, figures in differences.items()
    )
    claim = Claim("", "", "", parts)
    assert claim.verdict == CONTRADICTED
    assert claim.deciding is not None
    assert claim.deciding.name == "clearest"
    assert claim.counts() == {CONTRADICTED: 3, UNDECIDED: 1, CONFIRMED: 1}
    assert Claim("", "", "", ()).deciding is None


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


def test_the_inner_number_of_chunks_is_chosen_over_common_seeds() -> None:
    chunks = {"paper-k4-h64": 4, "paper": 8, "paper-k16-h32": 16, "paper-k32-h24": 32}
    values = {(name, seed): 6.0 for name in chunks for seed in range(3)}
    values |= {("paper", seed): 5.9 for seed in range(3)} | {("paper", seed): 9.0 for seed in range(3, 6)}
    results = results_of(values)
    for (name, _), run in results.runs.items():
        run["settings"] = {"model": {"num_chunks": chunks[name], "chunk_dim": 64 if chunks[name] == 4 else 32}}
    assert [part.name for part in interior_optimum(results).parts] == ["K=8 − K=4", "K=8 − K=32"]


def test_a_model_s_learning_rate_is_chosen_by_its_validation_loss_alone() -> None:
    models, test = (
        ("paper", "bdlm8", "mdlm"),
        {"-quarter-rate": 7.0, "-half-rate": 5.0, "": 6.0, "-double-rate": 4.0},
    )
    values = [(f"{model}{end}", nats) for model in models for end, nats in test.items()]
    results = results_of({(name, seed): nats for name, nats in values for seed in (0, 1)})
    assert own_rates(results).verdict == UNDECIDED, "without curves nothing is chosen"
    for (name, _), run in results.runs.items():
        chosen = {"paper": "paper", "bdlm8": "bdlm8-half-rate", "mdlm": "mdlm-double-rate"}.values()
        run["measures"]["curve"] = {"validation": [[100, 9.0], [200, 5.5 if name in chosen else 5.6]]}
    assert [part.difference.mean for part in own_rates(results).parts if part.difference] == [1.0, 1.0, 2.0]
    assert RunSpec(cpu(), variants(cpu())["mdlm-half-rate"], 0).train["train.learning_rate"] == 1.5e-3
