"""The models that come with the package: whole, as good as their cards say, found by name, and in the wheel."""

from __future__ import annotations

import io
import json
import lzma
import math
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import dcdm
import ship_models
import tiny
from dcdm import shipped
from dcdm.cli import main
from dcdm.config import ConfigError
from dcdm.data import sources
from dcdm.io.load import WEIGHTS, find_model, wrong_sums
from dcdm.shipped import CARD, HOME, LANES, ORDER, START, TRAINING, Card, card_of, folder_of

ROOT = Path(__file__).parent.parent
MODELS = shipped.names()
SIZES = (
    "model.hidden_size=16", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=8",
    "model.intermediate_size=24",
)  # fmt: skip
CLOSE = 0.15
"""How far a figure may lie from the card's where the files of another Python are not the same."""


def test_both_defaults_are_there():
    assert [name for name in ORDER if name in MODELS] == MODELS
    assert shipped.default() == LANES
    assert Card.read(HOME / LANES).kind == "lanes"
    assert Card.read(HOME / shipped.default(chunks=True)).kind == "dcdm"


# --- what lies in the folders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_file_is_what_its_checksums_and_its_card_vouch_for(name):
    folder, card = HOME / name, Card.read(HOME / name)
    assert wrong_sums(folder) == []
    listed = {*json.loads((folder / "checksums.json").read_text()), "checksums.json"}
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == listed
    assert {CARD, TRAINING, "README.md", "tokenizer.json"} <= listed
    assert ship_models.file_digest(folder / WEIGHTS) == card.weights["sha256"]
    assert (folder / WEIGHTS).stat().st_size == card.weights["bytes"] <= ship_models.LARGEST


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_bf16_in_the_file_and_fp32_on_a_cpu(name):
    stored = find_model(name).weights()
    assert {value.dtype for value in stored.values() if value.is_floating_point()} == {torch.bfloat16}
    model, tokenizer = dcdm.load(name)
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    card = Card.read(HOME / name)
    assert sum(p.numel() for p in model.parameters()) == card.parameters
    assert tokenizer.vocab_size == card.vocab_size == model.config.vocab_size


@pytest.mark.parametrize("name", MODELS)
def test_a_card_says_how_to_train_it_again_and_what_it_never_saw(name):
    card = Card.read(HOME / name)
    settings = ship_models.run_settings.read(HOME / name / TRAINING)
    assert settings.train.seed == card.seed
    assert 0 < card.steps <= settings.train.steps
    assert f"shipped/{name}/{TRAINING}" in card.command
    (source,) = settings.data.sources
    text = ship_models.TEXTS[source]
    assert (settings.init is not None) == (card.start is not None) == (HOME / name / START).is_file()
    assert (card.trained_on["source"], card.trained_on["licence"]) == (text.source, text.licence)
    shown = (HOME / name / "README.md").read_text()
    assert card.command in shown
    assert card.says in shown
    assert all(f"{figure.nats_per_byte:.3f}" in shown for figure in card.figures)
    assert all(f"`{file}`" in shown for file in card.held_out["files"])
    ship_models.check_twins(settings, card.twins, HOME)


def source_of(card: Card) -> str:
    (source,) = ship_models.run_settings.read(HOME / card.name / TRAINING).data.sources
    return source


def held_out(card: Card):
    return ship_models.held_out_corpus(source_of(card), list(card.held_out["files"]))


def same_files(card: Card) -> bool:
    return ship_models.held_out_files(source_of(card)) == card.held_out["files"]


@pytest.mark.parametrize("name", MODELS)
def test_the_quick_figure_of_a_card_comes_out_again_on_the_held_out_files(name):
    card = Card.read(HOME / name)
    corpus = held_out(card)
    lanes = () if card.check["lanes"] is None else (card.check["lanes"],)
    found = ship_models.measure(HOME / name, corpus, card.check["windows"], lanes, (card.check["estimator"],))
    (figure,) = (one for _, one in found)
    room = 0.005 if same_files(card) else CLOSE * card.check["nats_per_byte"]
    assert figure.nats_per_byte == pytest.approx(card.check["nats_per_byte"], abs=room)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_all_figures_of_a_card_come_out_again_on_the_held_out_files(name):
    card = Card.read(HOME / name)
    corpus = held_out(card)
    found = [figure for _, figure in ship_models.measure(HOME / name, corpus, card.held_out["windows"])]
    room = 0.005 if same_files(card) else CLOSE
    for again, figure in zip(found, card.figures, strict=True):
        assert (again.estimator, again.lanes, again.drafts) == (figure.estimator, figure.lanes, figure.drafts)
        assert again.nats_per_token == pytest.approx(figure.nats_per_token, abs=room)


def test_another_text_has_another_figure():
    """The check above would notice: negative control."""
    card = Card.read(HOME / LANES)
    corpus = held_out(card)
    mixed = ship_models.replace(corpus, texts=tuple(text[::-1] for text in corpus.texts))
    ((_, figure),) = ship_models.measure(HOME / LANES, mixed, 8, (card.check["lanes"],), ("exact",))
    assert abs(figure.nats_per_byte - card.check["nats_per_byte"]) > CLOSE


# --- names -------------------------------------------------------------------------------------------------------


def test_a_name_is_taken_wherever_a_folder_is_and_a_folder_of_that_name_wins(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert folder_of(LANES) == folder_of(Path(LANES)) == folder_of(None) == HOME / LANES
    assert folder_of("nowhere") == Path("nowhere")
    main(["verify", shipped.default(chunks=True)])
    assert "FAIL" not in capsys.readouterr().out
    tiny.exported("causal", tmp_path / LANES)
    assert folder_of(LANES) == Path(LANES)
    assert find_model(LANES).config.kind == "dcdm"
    assert dcdm.load()[0].config.kind == "lanes"
    with pytest.raises(ConfigError, match="dcdm models"):
        dcdm.load("nowhere")


def test_cards_are_those_of_shipped_models_only(tmp_path):
    assert card_of(LANES) is not None
    assert card_of(tmp_path) is None
    (tmp_path / CARD).write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        card_of(tmp_path)


def test_models_lists_what_there_is_and_how_good_it_is(capsys):
    main(["models", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in told] == [*MODELS, *(card.name for card in shipped.adapters())]
    main(["models"])
    shown = capsys.readouterr().out
    for card in shipped.cards():
        assert card.says in shown
        assert card.trained_on["licence"] in shown
        for figure in card.figures:
            assert f"{figure.nats_per_byte:.3f}" in shown


# --- commands without a model ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stdin", [Terminal(), io.TextIOWrapper(io.BytesIO())], ids=["terminal", "nothing piped"])
def test_sample_without_arguments_continues_an_example(monkeypatch, capsys, stdin):
    from dcdm.commands.sample import EXAMPLE

    monkeypatch.setattr(sys, "stdin", stdin)
    main(["sample", "--length", "8"])
    assert capsys.readouterr().out.startswith(EXAMPLE)


def test_sample_without_a_model_is_careful_and_with_its_name_as_it_was(capsys):
    asked = ["--prompt", "def main(", "--length", "16", "--json"]
    main(["sample", *asked])
    careful = json.loads(capsys.readouterr().out)["completion"]
    main(["sample", LANES, *asked, "--temperature", "0.5"])
    assert json.loads(capsys.readouterr().out)["completion"] == careful
    model, tokenizer = dcdm.load(LANES)
    main(["sample", LANES, *asked])
    plain = dcdm.generate(model, ["def main("], tokenizer=tokenizer, max_new_tokens=16)
    assert json.loads(capsys.readouterr().out)["completion"] == plain.texts[0]


def test_chunks_without_a_model_takes_the_one_that_forms_them(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Terminal())
    main(["chunks"])
    assert capsys.readouterr().out.startswith(f"{shipped.default(chunks=True)}: dcdm")
    main(["chunks", "x = 1"])
    assert " tokens and BOS" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["chunks", "runs/typo", "x = 1"])
    assert "is not a folder" in capsys.readouterr().err


# --- making one --------------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A small run as if it had been trained on a small standard library, made into a model that ships."""
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))
    library = tmp_path / "library"
    library.mkdir()
    for name, text in {"seen.py": "x = 1\n" * 400, "unseen.py": "def f(y):\n    return y\n" * 60}.items():
        (library / name).write_text(text)
    (tmp_path / "seen.txt").write_text("x = 1\n" * 400)
    run = tmp_path / "run"
    options = ["--data", str(tmp_path / "seen.txt"), "--steps", "2", "--batch-size", "2", "--set",
               *SIZES, "model.context_length=32", "tensorboard=false",
               "evaluate_sequences=2"]  # fmt: skip
    with pytest.raises(SystemExit):
        main(["train", "--preset", "lanes-debug", "--run", str(run), *options])
    files = {"train": [library / "seen.py"], "validation": [library / "unseen.py"]}
    monkeypatch.setattr(ship_models, "stdlib_files", lambda split, source: files[split])
    monkeypatch.setattr(ship_models.sysconfig, "get_path", lambda _: str(library))
    with pytest.raises(ConfigError, match="not trained on stdlib or"):
        ship_models.ship(run, "mine", "Mine.", into=tmp_path / "box")
    read = ship_models.run_settings.read

    def as_if_on_stdlib(path):
        settings = read(path)
        return ship_models.replace(settings, data=ship_models.replace(settings.data, sources=("stdlib",)))

    monkeypatch.setattr(ship_models.run_settings, "read", as_if_on_stdlib)
    ship_models.ship(run, "mine", "Mine.", windows=8, into=tmp_path / "box")

    def ship_further(start: Path) -> Path:
        """A run with a draft head from these weights, made into a model that ships under the same name."""
        with pytest.raises(SystemExit):
            main(["train", "--preset", "lanes-debug-drafts", "--run", str(tmp_path / "further"),
                  "--init", str(start), "--tokenizer", str(start), *options])  # fmt: skip
        ship_models.ship(tmp_path / "further", "mine", "Mine, further.", windows=8, into=tmp_path / "second")
        return tmp_path / "second" / "mine"

    return run, tmp_path / "box" / "mine", ship_further


def test_a_run_becomes_a_model_that_ships(made, capsys):
    run, folder, _ = made
    card = Card.read(folder)
    assert wrong_sums(folder) == []
    assert not list(folder.glob("*.py")), "code there would be taken for modules of the package"
    assert list(card.held_out["files"]) == ["unseen.py"]
    assert (card.name, card.preset, card.steps) == ("mine", None, 2)
    assert [figure.lanes for figure in card.figures] == [1, 2, 4, 8, 16]
    before, after = dcdm.load(run)[0], dcdm.load(folder)[0]
    for name, value in before.state_dict().items():
        assert torch.equal(value.to(torch.bfloat16).float(), after.state_dict()[name])
    corpus = ship_models.held_out_corpus("stdlib", ["unseen.py"])
    scored = ship_models.evaluate_perplexity([str(folder)], [corpus], ("exact",)).rows
    assert card.figures[0].nats_per_token == pytest.approx(scored[0].nats_per_token, rel=1e-3)
    assert card.best.nats_per_token == min(figure.nats_per_token for figure in card.figures)
    assert math.isfinite(card.check["nats_per_byte"])
    assert asdict(Card.read(folder)) == json.loads((folder / CARD).read_text()) | {"figures": card_figures(card)}
    with pytest.raises(ConfigError, match="exists"):
        ship_models.ship(run, "mine", "Mine.", into=folder.parent)
    ship_models.ship(run, "mine", "Other.", windows=4, overwrite=True, into=folder.parent)
    assert Card.read(folder).says == "Other."


def test_a_card_tells_how_to_make_the_start_weights_and_what_drafts_save(made):
    run, before, ship_further = made
    folder = ship_further(before)
    card, first = Card.read(folder), Card.read(before)
    assert card.start == {"steps": 2, "tokens": first.tokens, "seed": 0}
    assert card.all_steps == 4
    assert card.tokenizer == first.tokenizer == "bytes"
    assert (folder / START).read_text() == (before / TRAINING).read_text()
    assert "init: runs/mine-start" in (folder / TRAINING).read_text()
    steps = [
        f"dcdm train --config src/dcdm/shipped/mine/{START} --run runs/mine-first",
        "dcdm export runs/mine-first runs/mine-start --dtype bf16",
        f"dcdm train --config src/dcdm/shipped/mine/{TRAINING} --run runs/mine",
    ]
    assert card.command.split(" && ") == steps
    pairs = {(figure.lanes, figure.drafts): figure for figure in card.figures}
    assert set(pairs) == {(lanes, drafts) for lanes in (1, 2, 4, 8, 16) for drafts in (None, 3)}
    assert pairs[1, 3].nats_per_token == pytest.approx(pairs[1, None].nats_per_token, rel=1e-3)
    assert pairs[1, 3].forwards_per_window < pairs[1, None].forwards_per_window == 31
    (before / CARD).unlink()
    with pytest.raises(ConfigError, match="has no card"):
        ship_models.ship(run.parent / "further", "mine", "Mine.", into=run.parent / "third")


def card_figures(card: Card) -> tuple:
    return tuple(asdict(figure) for figure in card.figures)


def test_a_dcdm_of_english_ships_with_its_twin_and_tells_what_its_chunks_hold(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))
    lines = [f"Fellow citizens, in {year} the people of Texas had peace. " * 8 for year in range(1790, 1910)]
    with lzma.open(tmp_path / "addresses.txt.xz", "wt") as file:
        file.write("\n".join(lines))
    monkeypatch.setattr(sources, "HOME", tmp_path)
    for kind, steps in (("dcdm", "2"), ("mdlm", "2"), ("bdlm", "1")):
        with pytest.raises(SystemExit):
            main(["train", "--preset", f"{kind}-debug", "--run", str(tmp_path / kind), "--data", "addresses",
                  "--steps", steps, "--batch-size", "2", "--set", *SIZES,
                  "model.context_length=32", "tensorboard=false", "evaluate_sequences=2"])  # fmt: skip
    box = tmp_path / "box"
    for kind, twin in (("dcdm", "mdlm"), ("mdlm", "dcdm")):
        ship_models.ship(
            tmp_path / kind, f"english-{kind}", "English.", windows=6, twins=(f"english-{twin}",), into=box
        )
    with pytest.raises(ConfigError, match=r"is no twin: it differs in train\.steps"):
        ship_models.ship(tmp_path / "bdlm", "english-bdlm", "English.", twins=("english-dcdm",), into=box)
    monkeypatch.setattr(shipped, "HOME", box)
    capsys.readouterr()
    assert shipped.names() == ["english-dcdm", "english-mdlm"], "the paper's model first"
    assert shipped.default(chunks=True) == "english-dcdm"
    card, other = shipped.cards()
    assert [one.estimator for one in card.figures] == ["sequential", "surrogate", "trajectory"]
    assert [one.estimator for one in other.figures] == ["bound", "trajectory"]
    assert card.best.estimator != "surrogate", "which is not a bound"
    assert list(card.held_out["files"].values()) == [
        ship_models.digest_of(text) for text in ship_models.held_out_corpus("addresses", []).texts
    ]
    assert [row["noise"] for row in card.chunks if row["which"] == "visible"] == [0, 0.3, 0.6, 0.9]
    assert len(card.words) == 8
    assert other.chunks == []
    shown = (box / "english-dcdm" / "README.md").read_text()
    assert "surrogate (not a bound)" in shown
    assert "`english-mdlm`" in shown
    main(["models"])
    assert "public domain" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", Terminal())
    main(["chunks"])
    assert "The people of the United States" in capsys.readouterr().out


# --- the wheel ---------------------------------------------------------------------------------------------------


def test_a_wheel_holds_the_models(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    code = "import setuptools.build_meta as build; build.build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = (tree / "dist").glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for name in MODELS:
        wanted = {f"dcdm/shipped/{name}/{path.name}" for path in (HOME / name).iterdir() if path.is_file()}
        assert wanted <= held
