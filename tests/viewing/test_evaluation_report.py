"""The page of `--report`: its figures, its drawings, what it says of what is not there, and how to repeat it."""

from __future__ import annotations

import html
import inspect
import json
import math
import re
import shlex
from types import SimpleNamespace

import pytest
import torch

import dcdm
import tiny
from corpora import prose
from dcdm.cli import main
from dcdm.commands.eval_ppl import ppl
from dcdm.evaluation import studies
from dcdm.evaluation.provenance import Provenance, spelled
from dcdm.evaluation.studies import Study
from dcdm.evaluation.windows import WindowBatch
from dcdm.files import file_digest
from dcdm.io.export import export
from dcdm.training.run import run_training
from dcdm.viewing.evaluation_report import tasks_page
from dcdm.viewing.plots import MARKERS, Series, bars, chart, reliability

SMALL = {
    "model.num_layers": 2, "model.hidden_size": 32, "model.context_length": 32, "train.batch_size": 4,
    "train.warmup_steps": 2, "evaluate_sequences": 4, "evaluate_samples": 2, "tensorboard": False,
    "train.steps": 4, "evaluate_every": 2, "checkpoint_every": 2,
}  # fmt: skip
PRESETS = ("ar-debug", "mdlm-debug", "bdlm-debug", "dcdm-debug", "dcdm-debug-causal", "lanes-debug")
EVIL = "</script><img src=x onerror=alert(1)> & so on. "


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Runs of every kind, an export, and a text with HTML in it."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "corpus.txt").write_text(prose(200))
    (folder / "mine.txt").write_text(EVIL * 20 + prose(30))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCDM_CACHE", str(folder / "cache"))
        for preset in PRESETS:
            run_training(preset, folder / preset, changes={**SMALL, "data.sources": (str(folder / "corpus.txt"),)})
    export(folder / "bdlm-debug", folder / "exported")
    return folder


@pytest.fixture(scope="module")
def made(place):
    """A report of all of them."""
    models = [str(place / name) for name in (*PRESETS, "exported")]
    out = place / "out"
    main(["eval", "ppl", *models, "--data", str(place / "mine.txt"), "--samples", "2",
          "--limit", "3", "--seed", "7", "--lanes", "1,4", "--estimator", "auto", "surrogate", "--device", "cpu",
          "--report", str(out), "--report-windows", "2"])  # fmt: skip
    page = (out / "report.html").read_text()
    stored = {name: json.loads((out / f"{name}.json").read_text()) for name in ("perplexity", "report")}
    return SimpleNamespace(page=page, out=out, **stored)


def text_of(page: str) -> str:
    """The page as a reader without scripts sees it."""
    return html.unescape(re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<(script|style).*?</\1>", "", page)))


def section(page: str, title: str) -> str:
    return page.split(f"<h2>{title}</h2>")[1].split("</section>")[0]


def test_the_page_has_the_figures_of_the_json_bounds_and_surrogates_apart(made):
    table = section(made.page, "Perplexity")
    assert table.index("exact or ≤ bound") < table.index("surrogate (no bound)")
    shown = text_of(table).split()
    for row in made.perplexity["results"]:
        assert f"{row['perplexity']:.2f}" in shown
        assert f"{row['bits_per_byte']:.3f}" in shown
    assert "ar-debug: surrogate does not fit (AR has exact, trajectory)" in text_of(made.page)


def test_every_drawing_has_the_numbers_of_the_json(made):
    found = {study["name"]: study for study in made.report["studies"]}
    assert list(found) == [*PRESETS, "exported"]
    decoders, sure = section(made.page, "Bits per token against forwards"), text_of(made.page)
    for name, study in found.items():
        decoders_of = [(one["commit"], one["lanes"]) for one in study["decoders"]]
        alone = {"ar-debug": [("position", None)], "lanes-debug": [("chunk", 1), ("chunk", 4)]}
        assert decoders_of == alone.get(name, [(commit, None) for commit in studies.COMMITS])
        for one in study["decoders"]:
            assert f"<td>{one['forwards']:.1f}</td><td>{one['bits']:.3f}" in decoders
        assert f"ECE {study['calibration']['error']:.3f}; {study['calibration']['count']:,} predictions" in sure
        assert study["calibration"]["count"] == sum(one["count"] for one in study["calibration"]["bins"])
        if study["balance"] is not None:
            assert f"MaxVio {study['balance']['violation']:.3f}" in sure
            assert sum(study["balance"]["sizes"]) == study["calibration"]["count"]
    assert ">chunk, 1 lane<" in decoders
    curves = section(made.page, "Loss and valid bound against tokens seen")
    assert all(f"{name} from " in curves and f">{name}</text>" in curves for name in PRESETS)


def test_what_does_not_apply_is_said(made):
    said = text_of(made.page)
    for sentence in (
        "exported: an exported folder keeps no curves.", "ar-debug: AR has no chunks.",
        "ar-debug: AR writes a token with every forward",
        "mdlm-debug: MDLM has nothing to balance", "bdlm-debug: BDLM has nothing to balance",
    ):  # fmt: skip
        assert sentence in said


def test_the_page_needs_nothing_from_outside_and_shows_text_as_text(made):
    assert not re.search(r"https?:|//\w|url\((?!#)|@import|<link|<iframe|<object", made.page.replace("// ---", ""))
    assert "default-src 'none'" in made.page
    assert "<img" not in made.page
    assert made.page.count("</script>") == 2
    data = json.loads(re.search(r'(?s)<script type="application/json" id="data">(.*?)</script>', made.page)[1])
    assert "".join(data["texts"][0]["tokens"][1:]).startswith(EVIL[:10])


def test_the_page_says_how_to_repeat_it(made, place, capsys):
    said = text_of(section(made.page, "To repeat it"))
    assert "seed 7" in re.sub(r"\s+", " ", said)
    manifest = sorted((place / "ar-debug" / "checkpoints").glob("step-*"))[-1] / "manifest.json"
    weights = place / "exported" / "model.safetensors"
    for value in (file_digest(manifest), file_digest(weights), torch.__version__, str(manifest.parent)):
        assert value in said
    assert made.perplexity["corpora"]["mine"]["sha256"] in said
    assert made.perplexity["models"]["ar-debug"]["step"] == 4
    command = made.report["repeat"]["command"]
    assert command in said
    again = place / "again"
    words = shlex.split(command)[1:]
    words[words.index("--report") + 1] = str(again)
    main(words)
    capsys.readouterr()
    for name in ("perplexity.json", "report.html"):
        first, second = ((folder / name).read_text() for folder in (made.out, again))
        assert second.replace(str(again), str(made.out)) == first


def test_the_command_is_spelled_as_the_command_line_reads_it():
    values = {name: p.default for name, p in inspect.signature(ppl).parameters.items()}
    values |= {"models": ["a b", "c"], "data": ["x=y.txt"], "detokenise": False, "separate": True, "seed": 3}
    wanted = "dcdm eval ppl 'a b' c --data x=y.txt --seed 3 --separate --no-detokenise"
    assert spelled("eval ppl", ppl, values) == wanted


@pytest.mark.parametrize(
    "changes", [{"kind": "lanes", "lanes": (1, 3)}, {"kind": "bdlm", "block_size": 4, "predict": "left"}]
)
def test_models_that_predict_from_the_left_fill_whole_chunks_and_their_bits_are_the_exact_ones(changes):
    model, batch = tiny.model("mdlm", **changes), drawn(rows=3, length=17)
    decoders = studies.decoders_of(model.config)
    assert [(decoder.commit, decoder.lanes) for decoder in decoders] == [
        ("chunk", number) for number in changes.get("lanes", (None,))
    ]
    for decoder in decoders:
        exact = dcdm.score(model, batch.tokens, estimator="exact", lanes=decoder.lanes).nats.sum()
        found = studies.decoder_figures(model, [batch], decoder)
        assert found.bits * 3 * 16 * math.log(2) == pytest.approx(float(exact))
        assert found.forwards == (4 if decoder.lanes is None else -(-16 // decoder.lanes))


# --- calibration -------------------------------------------------------------------------------------------------


def knowing(kind: str, probabilities: torch.Tensor):
    """A model that gives every token of position p the probabilities of p mod 2."""
    model = tiny.model(kind)
    rows = probabilities.shape[1]
    weight = torch.full((model.head_weight().shape[0], 2), -1e3, dtype=torch.float64)
    weight[:rows] = probabilities.log().T
    states = torch.eye(2, dtype=torch.float64)
    model.head_weight = lambda: weight
    shift = 1 if kind == "ar" else 0  # position ℓ−1 predicts ℓ
    model.denoise = lambda z, ids, *_: states[(torch.arange(z.shape[1]) + shift) % 2].expand(len(z), -1, -1)
    model.extend = lambda tokens, slots, keep, memory, n, rows=None: states[(slots.position[:, :n] + shift) % 2]
    return model


TRUE = torch.tensor([[0.55, 0.25, 0.2], [0.04, 0.03, 0.93]], dtype=torch.float64)


def drawn(rows: int = 60, length: int = 41) -> WindowBatch:
    """Windows whose tokens have the probabilities `TRUE`."""
    generator = torch.Generator().manual_seed(0)
    places = TRUE[torch.arange(length) % 2].expand(rows, -1, -1).reshape(-1, 3)
    tokens = torch.multinomial(places, 1, generator=generator).view(rows, length)
    tokens[:, 0] = tiny.LETTERS
    prompt = torch.zeros(rows, length, dtype=torch.bool)
    return WindowBatch(tokens, prompt, torch.arange(rows), torch.arange(length).expand(rows, -1))


@pytest.mark.parametrize("kind", ["ar", "mdlm", "bdlm", "paper", "causal"])
def test_a_model_that_knows_the_probabilities_is_calibrated(kind):
    found = studies.calibrated(knowing(kind, TRUE), [drawn()])
    assert found.count == 60 * 40
    assert found.error < 0.02
    assert [one.count for one in found.bins if one.count] == [1200, 1200]
    assert found.bins[5].confidence == pytest.approx(0.55)
    assert found.bins[9].confidence == pytest.approx(0.93)


@pytest.mark.parametrize("kind", ["ar", "bdlm", "paper"])
def test_overconfidence_is_seen(kind):
    sharp = TRUE**6 / (TRUE**6).sum(dim=1, keepdim=True)
    found = studies.calibrated(knowing(kind, sharp), [drawn()])
    assert found.confidence > 0.98
    assert found.error == pytest.approx(found.confidence - found.accuracy)
    assert found.error > 0.2


def test_given_tokens_are_not_predictions():
    batch = drawn(rows=3, length=9)
    batch.prompt[:, :5] = True
    assert studies.calibrated(knowing("bdlm", TRUE), [batch]).count == 3 * 4


def test_calibration_error_is_the_mean_distance_by_counts():
    confidence = torch.tensor([0.1, 0.1, 0.85, 0.85, 0.85, 1.0], dtype=torch.float64)
    right = torch.tensor([False, False, True, True, False, True])
    found = studies.calibration(confidence, right)
    assert found.error == pytest.approx((2 * 0.1 + 3 * (0.85 - 2 / 3) + 0) / 6)
    assert [one.count for one in found.bins] == [0, 2, 0, 0, 0, 0, 0, 0, 3, 1]


# --- parts -------------------------------------------------------------------------------------------------------


def test_curves_of_a_run_count_tokens_and_survive_a_broken_end(tmp_path):
    lines = [
        {"step": 1, "nll": 3.0, "tokens": 10, "max_violation": 0.5}, {"step": 2, "nll": 2.0, "tokens": 12},
        {"step": 2, "evaluation": {"valid_nll": 2.5, "valid_nll_stderr": 0.1}},
        {"step": 3, "nll": float("nan"), "tokens": 5},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "nl')
    found = studies.training_of(tmp_path)
    assert found == studies.Training([(10, 3.0), (22, 2.0)], [(22, 2.5, 0.1)], [(10, 0.5)])
    assert studies.training_of(tmp_path / "none") is None


def test_charts_are_drawn_of_any_numbers_and_escape_names():
    assert chart([Series("a")], "x", "y") == ""
    for points in ([(1.0, 2.0)], [(0.0, 0.0), (1e6, 5.0)]):
        drawn = chart([Series("a<b $1", points, markers=MARKERS[: len(points)], errors=[0.1])], "x", "y")
        assert drawn.count("a&lt;b $1") == 2  # in the legend, and for those who cannot see it
    assert "nan" not in chart([Series("a", [(8.0, 1.0), (8.0, 1.0)], dash="-")], "x", "y", log=True)
    assert bars([0, 0], "chunk", "tokens", 0.0).startswith("<svg")
    assert ">x</text>" in reliability(studies.calibration(torch.ones(3), torch.ones(3) > 0).bins, "x", "y")


def test_the_same_numbers_are_drawn_by_the_same_bytes_that_ask_for_nothing_from_outside():
    series = [Series("a", [(1.0, 2.0), (2.0, 3.0)], dash="--", markers=["o", "s"], errors=[0.1, None])]
    first, second = (chart(series, "x", "y") for _ in range(2))
    assert first == second
    assert not re.search(r"https?:|url\((?!#)|<metadata|<style|font-family", first)
    assert "fill: #000000" not in first  # text has the page's colour, on light and on dark ground


def test_small_numbers_are_shortened_in_coordinates_but_neither_in_labels_nor_in_what_is_read_aloud():
    drawn = chart([Series("lr-0.0003", [(0.0, 0.0001), (1.0, 0.0003)], dash="-")], "step", "rate")
    seen = re.findall(r">([^<>]+)</text>", drawn)
    assert {"lr-0.0003", "0.000300"} <= set(seen)
    assert len(set(seen)) == len(seen)
    assert 'aria-label="rate: lr-0.0003 from 0.0001 to 0.0003"' in drawn
    assert not re.search(r"\.\d{3}", "".join(re.findall(r"<(?!svg)[^>]*>", drawn)))


def test_the_page_of_tasks_has_figures_and_notes_and_says_what_is_absent():
    line = {
        "task": "arc", "metric": "acc", "value": 0.25, "stderr": 0.1, "chance": 0.2, "questions": 20,
        "monte_carlo_stderr": 0.3, "within_noise": 0.5,
    }  # fmt: skip
    counts = {"cut_contexts": 2, "split_continuations": 0, "windowed_generations": 0}
    report = {"title": "A<C", "shots": 0, "figures": [line], "counts": counts, "notes": ["a note"], "seconds": 1.0}
    repeat = Provenance("dcdm eval tasks run", {"torch": "2"}, {"seed": 5}, {"run": {"sha256": "abc"}}, {})
    page = tasks_page([report], Study("run", "AR", missing={"balance": "AR has no chunks"}), repeat)
    said = text_of(page)
    wanted = ("A<C", "25.0 ± 10.0", "0.30 (50 %)", "a note", "2 contexts cut", "need held-out text", "no chunks")
    for part in wanted:
        assert part in said
    assert "A<C" not in page.replace("A&lt;C", "")


def test_tasks_write_a_page_of_a_run(place, capsys, tmp_path):
    pytest.importorskip("lm_eval")
    row = {"goal": "eat soup", "sol1": "with a spoon", "sol2": "with a fork", "label": 0}
    (tmp_path / "piqa_validation.jsonl").write_text(json.dumps(row) + "\n")
    out = tmp_path / "out"
    main(["eval", "tasks", str(place / "dcdm-debug"), "--tasks", "piqa", "--data-dir", str(tmp_path),
          "--samples", "2", "--json", "--report", str(out)])  # fmt: skip
    printed, said = json.loads(capsys.readouterr().out), text_of((out / "report.html").read_text())
    assert json.loads((out / "tasks.json").read_text()) == printed
    assert f"{100 * printed['tasks'][0]['figures'][0]['value']:.1f}" in said
    assert file_digest(tmp_path / "piqa_validation.jsonl") in said
    assert f"dcdm eval tasks {place / 'dcdm-debug'} --tasks piqa" in said
    assert "MaxVio of the steps of training" in said


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_measured(place, capsys):
    for command in (["ppl", str(place / "ar-debug"), "--data", str(place / "mine.txt")], ["tasks", "none"]):
        with pytest.raises(SystemExit) as stopped:
            main(["eval", *command, "--report", str(place / "mine.txt" / "out")])
        assert stopped.value.code == 2
        assert "give a folder that can be written to" in capsys.readouterr().err


def test_a_report_of_no_window_is_refused_before_anything_is_measured(place, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "ppl", str(place / "ar-debug"), "--data", str(place / "mine.txt"), "--report-windows", "0"])
    assert stopped.value.code == 2
    assert "--report-windows 0: must be at least 1" in capsys.readouterr().err
