"""The paper's experiments as parts of a study, and what `dcdm reproduce` says and does."""

import re
from pathlib import Path

import pytest
import yaml

import corpora
from dcdm.cli import main
from dcdm.commands.study import reproduce
from dcdm.studies.plots import draw_curves
from dcdm.studies.study import read_study

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def claims():
    return read_study(ROOT / "studies/claims.yaml")


def test_the_study_of_the_claims_is_whole_and_fair(claims):
    """Everything belongs to an experiment; comparisons have seeds enough, rates their own; noise is named."""
    assert sorted(claim for one in claims.experiments.values() for claim in one.claims) == sorted(claims.claims)
    assert set(claims.variants_in(claims.experiments)) == set(claims.variants)
    texts = [text for claim in claims.claims.values() for text in claim.below]
    compared = {name for text in texts for name, _ in claims.sides(text)}
    assert min(len(claims.seeds_of(name)) for name in compared) >= 3
    rates = claims.variants_in(["learning-rate"])
    tuning = {seed for name in rates for seed in claims.seeds_of(name)}
    assert not tuning & {seed for name in claims.variants if name not in rates for seed in claims.seeds_of(name)}
    for name, variant in claims.variants.items():
        exact = variant.preset.startswith(("ar", "lanes")) or variant.settings.get("model.predict") == "left"
        assert exact or {"objective.t_shape", "objective.t_min"} & variant.settings.keys(), name


def test_the_list_and_the_help_name_every_experiment(claims, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    main(["reproduce", "--list"])
    shown = capsys.readouterr().out
    told = " ".join((reproduce.__doc__ or "").split())
    assert all(name in shown and f" {name}," in told for name in claims.experiments)


def test_mistakes_are_named(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    paper = ["--study", str(ROOT / "studies/claims.yaml")]
    here = [*paper, "--out", "claims.json"]
    for words, message in (
        ([], "name an experiment"),
        (["figures", *paper], "no experiment is called figures"),
        (["moe"], "studies/claims.yaml: there is no such file"),
        (["downstream", *paper], "nothing of it runs at CPU scale"),
        (["moe", *paper], "--out results/claims.json: results is not a folder"),
        (["moe", *here], "corpora: data/wikitext2/test.txt"),
        (["moe", "--jobs", "0", *here], "--jobs 0"),
    ):
        assert message in refused("reproduce", *words)
    assert not list(tmp_path.iterdir())


def test_an_experiment_is_carried_out_judged_and_not_repeated(tmp_path, monkeypatch, capsys):
    """At a size of seconds: one variant and one claim of the paper's study, in processes of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(corpora.prose(300))
    content = yaml.safe_load((ROOT / "studies/claims.yaml").read_text())
    small = {"model.hidden_size": 16, "model.num_heads": 2, "model.num_kv_heads": 1, "model.head_dim": 8,
             "model.intermediate_size": 32, "model.num_layers": 1, "model.context_length": 32}  # fmt: skip
    content["settings"] |= {"train.steps": 2, "evaluate_every": 1, "data.sources": ["text.txt"], **small}
    content |= {"seeds": [0], "windows": 2, "samples": 1, "corpora": {"test": "text.txt"}, "against": "paper"}
    paper = content["variants"]["paper"]
    paper |= {"seeds": [], "settings": {**paper["settings"], "model.chunk_dim": 4}}
    content["variants"] = {"paper": paper}
    content["claims"] = {"number": {**content["claims"]["number"], "below": ["paper surrogate < paper"]}}
    content["experiments"] = {"loss": {"shows": "the number that the paper reports", "claims": ["number"]}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(content))
    command = ["reproduce", "loss", "--study", "small.yaml", "--out", "out.json", "--work", "work"]
    main(command)
    first = capsys.readouterr()
    assert first.err.count(": done") == 1
    assert first.out.count("one seed") == 2  # which decides nothing
    stored = (tmp_path / "out.json").read_bytes()
    (tmp_path / "work").rename(tmp_path / "gone")
    main(command)
    again = capsys.readouterr()
    assert (sorted(again.out.splitlines()), again.err) == (sorted(first.out.splitlines()), "")
    assert (tmp_path / "out.json").read_bytes() == stored


# --- in a hurry --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick():
    return read_study(ROOT / "studies/quick.yaml")


def test_a_quick_study_has_the_papers_k_and_models_of_one_size(quick, claims):
    assert set(quick.experiments) == {"loss-curves", "k-ablation", "point-vs-subspace", "zero-shot"}
    assert set(quick.experiments) <= set(claims.experiments)
    models = [quick.config(name).model for name in quick.variants_in(["k-ablation"])]
    assert {model.num_chunks for model in models} == {8, 16, 32, 64}
    assert {model.num_chunks * model.chunk_dim for model in models} == {256}


def test_the_figure_of_a_quick_experiment_has_loss_and_balance_and_what_was_not_run_says_so(
    quick, tmp_path, monkeypatch, capsys
):
    valid = {"nats_per_token": 5.0, "estimator": "sequential", "forwards": None, "max_violation": 0.5}
    figures = {"paper-s0": {"valid": {**valid, "curve": [[20, 5.5], [40, 5.0]], "balance": [[20, 1.0], [40, 0.5]]}}}
    draw_curves(quick, figures, tmp_path / "curves.svg", ["paper", "mdlm"])
    assert len(re.findall(r"<g id=\"axes_\d", (tmp_path / "curves.svg").read_text())) == 2

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dcdm.studies.runner.carry_out", lambda *given: True)
    monkeypatch.setattr("dcdm.studies.runner.collected", lambda *given: figures)
    main(["reproduce", "k-ablation", "--quick", "--study", str(ROOT / "studies/quick.yaml")])
    shown = capsys.readouterr().out
    assert "paper: DCDM, K=8, h=32" in shown
    assert shown.count("not run") == 3 + 1  # comparisons, the claim
    assert (tmp_path / "runs/quick/k-ablation.png").is_file()
