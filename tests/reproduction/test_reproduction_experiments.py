"""Variants, experiments, and what `dcdm reproduce` says of them without running any."""

from pathlib import Path

import pytest

from dcdm.cli import main
from dcdm.commands.reproduce import details
from dcdm.config import ConfigError
from dcdm.reproduction import measures
from dcdm.reproduction.experiments import experiments, specs
from dcdm.reproduction.results import Places, Results
from dcdm.reproduction.run import expected_minutes
from dcdm.reproduction.scale import cpu, scale, tiny
from dcdm.reproduction.tables import FULLY_MASKED, ONE_CHANGE
from dcdm.reproduction.variants import RunSpec, variants


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


def test_comparisons_change_either_the_model_or_its_noise() -> None:
    shown = set(experiments(cpu())["partitions"].variants)
    for changed, *names in ONE_CHANGE:
        one, other = (RunSpec(cpu(), variants(cpu())[name], 0) for name in names)
        assert set(names) <= shown
        same_noise = one.objective.full_mask_share == other.objective.full_mask_share
        assert (one.model == other.model) != same_noise, changed
        assert same_noise == (changed != FULLY_MASKED)


def test_curves_have_as_many_points_as_asked_for() -> None:
    spec = RunSpec(cpu(), variants(cpu())["paper"], 0)
    steps = {*range(spec.evaluate_every, spec.steps + 1, spec.evaluate_every), spec.steps}
    assert len(steps) == cpu().evaluations


def test_runs_of_up_to_eight_chunks_are_expected_to_take_six_minutes_at_most() -> None:
    made = [RunSpec(cpu(), one, 0) for one in variants(cpu()).values()]
    few = [spec for spec in made if (spec.model.num_chunks or 0) <= 8]  # measured, those of 16 and 32 take longer
    assert max(expected_minutes(spec, Results("cpu")) for spec in few) < 6


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


def test_the_help_names_every_experiment() -> None:
    assert all(f" {name}," in details() for name in experiments(cpu()))
