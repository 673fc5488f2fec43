"""`dcdm train` as a user runs it: settings, resume, interruption, initial weights, export, verify."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import types

import pytest
import torch
import yaml

import dcdm
import tiny
from dcdm.cli import main
from dcdm.commands.train import start_run
from dcdm.config import ConfigError
from dcdm.data.prepare import prepare
from dcdm.data.store import PreparedData
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.diffusion import objectives
from dcdm.distributed import Precision, World
from dcdm.io.export import export, write_export
from dcdm.io.load import load_init, load_model
from dcdm.io.verify import leaks, verify_model
from dcdm.kinds import build
from dcdm.training import settings as run_settings
from dcdm.training.checkpoint_folder import load_weights, read_manifest
from dcdm.training.metrics import Recorder
from dcdm.training.run import closing_line, evaluate, run_training
from ranks import Child, command_on_ranks

TEXT = "".join(f"def f{n}(x):\n    return x + {n * n}\n\n" for n in range(600))
SMALL = {
    "model.num_layers": 2, "model.hidden_size": 32, "model.context_length": 32, "train.batch_size": 4,
    "train.warmup_steps": 2, "evaluate_sequences": 4, "evaluate_samples": 2, "tensorboard": False,
}  # fmt: skip
run = functools.partial(run_training, load_init=load_init)
KINDS = ["ar-debug", "bdlm-debug", "dcdm-debug", "dcdm-moe-debug-causal"]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT)
    return path


def start(preset, folder, corpus, **changes):
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return run(preset, folder, changes={**SMALL, "data.sources": (str(corpus),), **named})


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def newest(folder):
    return sorted((folder / "checkpoints").glob("step-*"))[-1]


@pytest.mark.parametrize("preset", KINDS)
def test_every_kind_trains_evaluates_saves_loads_exports_and_verifies(preset, corpus, tmp_path):
    folder = tmp_path / "run"
    assert start(preset, folder, corpus, train__steps=6, evaluate_every=3, checkpoint_every=3) == 0
    rows = metrics(folder)
    assert [r["step"] for r in rows if "loss" in r] == [1, 2, 3, 4, 5, 6]
    evaluations = [r["evaluation"] for r in rows if "evaluation" in r]
    assert len(evaluations) == 2
    assert ("surrogate_nll" in evaluations[0]) == (preset == "dcdm-debug")
    model, tokenizer = load_model(folder)
    assert tokenizer.vocab_size == model.config.vocab_size
    assert leaks(model) == []
    export(folder, tmp_path / "exported")
    again, _ = dcdm.load(tmp_path / "exported")
    assert all(torch.equal(v, again.state_dict()[n]) for n, v in model.state_dict().items())
    for place in (folder, tmp_path / "exported"):
        assert all(check.problems == [] for check in verify_model(place))
    assert len({path.stat().st_mode for path in (tmp_path / "exported").iterdir()}) == 1


@pytest.mark.parametrize(("kind", "has_chunks"), [("dcdm", True), ("mdlm", True), ("ar", False), ("lanes", False)])
def test_the_last_line_of_a_run_names_what_can_be_done_with_it(kind, has_chunks):
    of_kind = types.SimpleNamespace(config=types.SimpleNamespace(kind=kind))
    said = closing_line("runs/x", types.SimpleNamespace(step=4, model=of_kind), interrupted=False)
    assert said.startswith("runs/x: done at step 4. Next: ")
    assert ("dcdm chunks runs/x" in said) == has_chunks
    assert "dcdm sample runs/x --prompt" in said
    assert "dcdm eval ppl runs/x --data" in said


def test_an_infinite_setting_survives_the_export(tmp_path):
    model = tiny.model("causal-contiguous", symbols=257).float()
    assert model.config.prior_weight == float("inf")
    write_export(model, byte_tokenizer(), tmp_path / "exported", "card")
    again, _ = dcdm.load(tmp_path / "exported")
    assert again.config == model.config


def signalling(stop_after, on_step=Recorder.on_step):
    """`Recorder.on_step` that sends SIGTERM after a step."""

    def tell(self, report):
        on_step(self, report)
        if report.step + 1 == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    return tell


@pytest.mark.parametrize("preset", ["dcdm-debug", "dcdm-debug-causal"])
def test_a_run_stopped_and_resumed_equals_one_never_interrupted_bit_for_bit(preset, corpus, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = {"train__ema_decay": 0.9, "evaluate_every": 4, "checkpoint_every": 2}
    assert start(preset, whole, corpus, train__steps=8, **changes) == 0
    for stop_after in (3, 4, 5):  # 4 is evaluated
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recorder, "on_step", signalling(stop_after))
            assert start(preset, parts, corpus, train__steps=8, **changes) == 130
        assert newest(parts).name.endswith(f"{stop_after}")
    assert run(None, parts) == 0  # the folder alone is enough to resume
    ours, theirs = load_weights(newest(parts)), load_weights(newest(whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ours, theirs = load_weights(newest(parts), "ema"), load_weights(newest(whole), "ema")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert metrics(parts) == metrics(whole)


def test_resolved_settings_start_the_same_run_again(corpus, tmp_path):
    assert start("dcdm-debug-causal", tmp_path / "one", corpus, train__steps=2, objective__full_mask_share=0.5) == 0
    assert run(None, tmp_path / "two", file=tmp_path / "one" / "settings.yaml") == 0
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")


def test_a_run_folder_refuses_other_settings_and_another_number_of_steps_by_name(corpus, tmp_path):
    start("mdlm-debug", tmp_path / "run", corpus, train__steps=2)
    for preset, changes, message in (
        ("mdlm-debug", {"train__learning_rate": 1.0}, r"train\.learning_rate"),
        ("bdlm-debug", {}, r"model\.kind"),
        ("mdlm-debug", {"train__steps": 5}, r"--init \S+run --run NEW --steps 3 "),
        ("mdlm-debug", {"train__steps": 1}, "fewer"),
    ):
        with pytest.raises(ConfigError, match=message):
            start(preset, tmp_path / "run", corpus, **{"train__steps": 2, **changes})


def test_a_run_begins_among_logs_and_settings_but_not_among_files_of_others(corpus, tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "thesis.tex").write_text("…")
    with pytest.raises(ConfigError, match=r"--run .*home holds no run but other files \(thesis\.tex\)"):
        start("mdlm-debug", folder, corpus, train__steps=1)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
    (folder / "thesis.tex").rename(folder / "training.log")
    (folder / ".DS_Store").touch()
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump({"preset": "mdlm-debug", "train": {"steps": 1}}))
    assert run(None, folder, file=file, changes={**SMALL, "data.sources": (str(corpus),)}) == 0
    with pytest.raises(ConfigError, match="is a file"):
        start("mdlm-debug", corpus, corpus, train__steps=1)


def test_what_auto_meant_on_another_device_stays(corpus, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    start("ar-debug", folder, corpus, train__steps=2, train__schedule="constant", train__decay_share=0.0)
    half = Precision(torch.float32, torch.bfloat16)
    with monkeypatch.context() as patch:
        elsewhere = {"auto": half, "fp32": Precision(torch.float32)}
        patch.setattr("dcdm.training.run.precision", lambda dtype, device: elsewhere[dtype])
        with pytest.raises(ConfigError, match=r"was computed in fp32, and train\.dtype=auto is bf16.*--dtype fp32"):
            run(None, folder, changes={"train.steps": 3})
        assert run(None, folder, changes={"train.steps": 3, "train.dtype": "fp32"}) == 0
    assert run(None, folder, changes={"train.steps": 4, "train.dtype": "auto"}) == 0


def test_every_setting_is_listed_with_its_value_and_where_it_comes_from(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("train: {clip: 2.0}\nmodel: {num_layers: 2}\n")
    main(["train", "--preset", "mdlm-debug", "--config", str(file), "--prompt-field", "q",
          "--response-field", "a", "--show-settings",
          "--set", "model.num_layers=3"])  # fmt: skip
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines()}
    shown = {name: [cell.strip() for cell in cells] for name, cells in lines.items()}
    assert shown["train.steps"] == ["1000", "preset mdlm-debug"]
    assert shown["train.clip"] == ["2.0", str(file)]
    assert shown["data.reading.prompt_field"] == ["q", "command line"]
    assert shown["model.num_layers"] == ["3", "command line"]
    assert shown["objective.t_min"] == ["0.3", "preset mdlm-debug"]
    assert shown["objective.prompt_share"][1] == "default"
    names = run_settings.flat(run_settings.to_dict(run_settings.resolve("mdlm-debug")))
    assert set(names) <= set(shown)
    assert not list(tmp_path.glob("runs"))


def test_a_loss_that_is_not_finite_keeps_the_batch_and_names_the_part(corpus, tmp_path, monkeypatch):
    original = objectives.weighted_nll
    monkeypatch.setattr("dcdm.diffusion.objectives.weighted_nll", lambda *a: original(*a) * float("nan"))
    with pytest.raises(FloatingPointError, match="the loss is not finite"):
        start("mdlm-debug", tmp_path / "run", corpus, train__steps=2)
    assert list((tmp_path / "run").glob("bad-batch-step1-rank0.safetensors"))


def test_initial_weights_come_from_a_run_and_from_an_export(corpus, tmp_path):
    start("mdlm-debug", tmp_path / "first", corpus, train__steps=3)
    export(tmp_path / "first", tmp_path / "exported")
    for number, source in enumerate((tmp_path / "first", tmp_path / "exported")):
        folder = tmp_path / f"next{number}"
        start("mdlm-debug", folder, corpus, train__steps=1, train__learning_rate=1e-12, init=str(source))
        ours, theirs = load_weights(newest(folder)), load_weights(newest(tmp_path / "first"))
        torch.testing.assert_close(ours["embed_tokens.weight"], theirs["embed_tokens.weight"])
    for changes, message in (
        ({"model__hidden_size": 64}, "hidden_size=64"),
        ({"model__rope_theta": 3e4}, "rope_theta=30000.0; there it is"),
        ({"data__tokenizer": "bpe:270"}, "another tokenizer than that of the data"),
    ):
        with pytest.raises(ConfigError, match=message):
            start("ar-debug", tmp_path / "wrong", corpus, train__steps=1, init=str(tmp_path / "first"), **changes)
    untied = {"train__steps": 1, "train__learning_rate": 1e-12, "model__tie_embeddings": False}
    start("mdlm-debug", tmp_path / "untied", corpus, init=str(tmp_path / "exported"), **untied)
    weights = load_weights(newest(tmp_path / "untied"))
    torch.testing.assert_close(weights["lm_head.weight"], weights["embed_tokens.weight"])
    shutil.rmtree(tmp_path / "exported")  # no more needed: a checkpoint has all weights
    start("mdlm-debug", tmp_path / "untied", corpus, init=str(tmp_path / "exported"), **untied)
    with pytest.raises(ConfigError, match="is not a folder"):
        start("mdlm-debug", tmp_path / "late", corpus, train__steps=1, init=str(tmp_path / "exported"))


def test_figures_of_checkpoints_are_those_of_their_weights(corpus, tmp_path):
    folder = tmp_path / "run"
    changes = {"train__steps": 5, "evaluate_every": 2, "checkpoint_every": 3, "train__ema_decay": 0.9}
    start("lanes-debug", folder, corpus, **changes)
    third, last = (newest(folder).parent / f"step-{step:08}" for step in (3, 5))
    assert read_manifest(third).metrics == {}, "not those of step 2"
    found = read_manifest(last).metrics["valid_nll"]
    valid = PreparedData.open(next((tmp_path / "cache/data").iterdir())).dataset("validation", 32, "truncate")
    again = evaluate(load_model(folder)[0], valid, World(), sequences=4, samples=2)
    assert found == pytest.approx(again["valid_nll"], abs=1e-5), "of the averaged weights, as they are loaded"


def test_settings_that_have_no_effect_or_no_meaning_leave_no_folder(corpus, tmp_path):
    prepared = prepare([str(corpus)], "bytes", tmp_path / "prepared").folder
    for preset, changes, message in (
        ("lanes-debug", {"objective__t_min": 0.5}, "t_min=0.5 has no effect"),
        ("ar-debug", {"train__lora": 4}, "there are none: name them with init"),
        ("ar-debug", {"train__lora_alpha": 4.0}, "needs adapters"),
        ("ar-debug", {"train__weight_decay": float("nan")}, "weight_decay=nan"),
        ("ar-debug", {"train__betas": [0.9]}, "must hold 2 values"),
        ("ar-debug", {"data__sources": []}, "names nothing"),
        ("ar-debug", {"data__sources": [3]}, "sources.0.=3"),
        ("ar-debug", {"data__loader_workers": -2}, "loader_workers=-2"),
        (
            "ar-debug",
            {"data__sources": [str(prepared)], "data__tokenizer": "bpe:300"},
            "bpe:300: no effect",
        ),
        ("ar-debug", {"data__sources": [str(prepared)], "data__validation": ["x.txt"]}, "validation=.*no effect"),
        ("ar-debug", {"data__sources": [str(prepared)], "data__reading__field": "f"}, "reading.field=f: no effect"),
    ):
        with pytest.raises(ConfigError, match=message):
            start(preset, tmp_path / "run", corpus, **changes)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["model:", "train: 3", "preset: 3", "3: 4", "model: {1: 2}", "- a"])
def test_a_file_of_settings_with_anything_in_it_is_refused_in_words(text, tmp_path):
    (tmp_path / "settings.yaml").write_text(text)
    with pytest.raises(ConfigError):
        run_settings.resolve("ar-debug", tmp_path / "settings.yaml")
    with pytest.raises(ConfigError, match="preset"):
        run_settings.resolve(None)


@pytest.mark.parametrize("option", [{"train__micro_batch": 1}, {"train__activation_checkpointing": True}])
def test_accumulation_and_checkpointed_activations_change_no_result(option, corpus, tmp_path):
    start("bdlm-debug", tmp_path / "plain", corpus, train__steps=3)
    start("bdlm-debug", tmp_path / "other", corpus, train__steps=3, **option)
    for one, other in zip(metrics(tmp_path / "plain"), metrics(tmp_path / "other"), strict=True):
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], abs=2e-5)


def test_the_averaged_weights_follow_their_recursion(corpus, tmp_path):
    start("mdlm-debug", tmp_path / "run", corpus, train__steps=2, train__ema_decay=0.75, checkpoint_every=1)
    places = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    first, second = (load_weights(place)["norm.weight"] for place in places)
    start_weight = torch.ones_like(first)
    early, later = 2 / 11, 3 / 12  # (1 + n) / (10 + n) of the n-th step, while it lies below the decay
    expected = later * (early * start_weight + (1 - early) * first) + (1 - later) * second
    torch.testing.assert_close(load_weights(places[-1], "ema")["norm.weight"], expected)


def board(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard")).Reload()


def test_tensorboard_shows_each_step_once_after_a_run_lost_some_with_chunks(corpus, tmp_path, monkeypatch):
    changes = {**SMALL, "tensorboard": True, "train.steps": 4, "evaluate_every": 2, "log_every": 1,
               "checkpoint_every": 2, "data.sources": (str(corpus),)}  # fmt: skip

    def die(self, report, on_step=Recorder.on_step):
        on_step(self, report)
        if report.step + 1 == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "on_step", die)
        with pytest.raises(KeyboardInterrupt):
            run("dcdm-debug", tmp_path / "run", changes=changes)
    run("dcdm-debug", tmp_path / "run", changes=changes)
    events = board(tmp_path / "run")
    assert [event.step for event in events.Scalars("train/nll")] == [1, 2, 3, 4]
    assert {"train/nll", "speed/tokens_per_second", "evaluation/valid_nll"} <= set(events.Tags()["scalars"])
    assert "chunks/ids" in events.Tags()["histograms"]


def test_wandb_is_told_figures_by_step_under_the_name_of_the_run(corpus, tmp_path, monkeypatch):
    told, opened = {}, {}

    class Session:
        def log(self, values, step):
            told.setdefault(step, {}).update(values)

        def finish(self):
            opened["finished"] = True

    def init(**named):
        opened.update(named)
        return Session()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    start("dcdm-debug", tmp_path / "run", corpus, wandb="project", train__steps=2, log_every=1, evaluate_every=2)
    assert (opened["project"], opened["id"], opened["resume"]) == ("project", "run", "allow")
    assert opened["finished"]
    assert [told[row["step"]]["train/nll"] for row in metrics(tmp_path / "run")[:2]] == [
        row["nll"] for row in metrics(tmp_path / "run")[:2]
    ]
    assert {"evaluation/valid_nll", "speed/tokens_per_second"} <= set(told[2])


def test_a_dry_run_starts_nothing_and_says_what_it_would_cost(tmp_path, capsys):
    assert start_run("dcdm-debug", tmp_path / "run", None, {"train.steps": 70_000}, "auto", dry_run=True) == 0
    said = capsys.readouterr().out
    for part in ("0.87M parameters", "70,000 steps", "1 × H100", "checkpoints", "TFLOP"):
        assert part in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.stepz": 3}, r"train\.steps"),
        ({"train.steps": "many"}, r"train\.steps"),
        ({"train.steps": 0}, "steps"),
        ({"train.schedule": "linear"}, r"train\.schedule"),
        ({"model.num_layers": 0}, "num_layers"),
        ({"objective.t_min": 2.0}, "t_min"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"train.batch_size": 4, "train.micro_batch": 8}, "--micro-batch 8 must lie between 1 and 4"),
        ({"init": "nowhere"}, "init=nowhere is not a folder, nor a model that comes with dcdm"),
    ],
)
def test_what_could_not_be_trained_is_refused_by_name_before_data_is_prepared(
    changes, message, tmp_path, monkeypatch
):
    monkeypatch.setattr("dcdm.training.run.open_data", lambda *_: pytest.fail("prepared"))
    with pytest.raises(ConfigError, match=message):
        dcdm.train("mdlm-debug", tmp_path / "run", data="nowhere.txt", settings=changes)
    assert not (tmp_path / "run").exists()


def test_a_preset_s_noise_fits_its_kind_and_naming_any_of_it_gives_it_up():
    def noise(preset, **changes):
        found = run_settings.resolve(preset, changes={name.replace("__", "."): v for name, v in changes.items()})
        return found.objective.t_shape, found.objective.t_min, found.objective.t_max

    clipped, whole = ("uniform", 0.3, 1.0), ("uniform", 0.001, 1.0)
    assert noise("mdlm-debug", model__kind="lanes") == whole
    for preset in ("dcdm-debug", "bdlm-debug", "mdlm-debug", "dcdm-debug-causal", "dcdm-small", "mdlm-small"):
        assert noise(preset) == clipped
        assert noise(preset, objective__t_shape="uniform") == whole
        assert noise(preset, objective__t_max=0.9) == ("uniform", 0.001, 0.9)
    with pytest.raises(ConfigError, match="t_shape=bell has no effect"):
        noise("ar-debug", objective__t_shape="bell")


@pytest.mark.parametrize("size", ["debug", "small"])
def test_presets_of_a_size_differ_in_what_makes_the_kind_and_in_nothing_else(size):
    """So that runs by preset can be compared."""
    own = ("kind", "block_size", "num_chunks", "chunk_dim", "routing", "moe", "intermediate_size")
    names = [name for name in dcdm.presets() if size in name and not name.startswith(("ar", "lanes"))]
    found = [run_settings.flat(run_settings.to_dict(run_settings.resolve(name))) for name in names]
    for name, one in zip(names, found, strict=True):
        differing = {key for key in {*one, *found[0]} if one.get(key) != found[0].get(key)}
        assert {key for key in differing if not key.startswith(tuple(f"model.{each}" for each in own))} == set(), (
            name
        )


def test_a_damaged_export_is_found(corpus, tmp_path):
    start("mdlm-debug", tmp_path / "run", corpus, train__steps=1)
    assert not any(check.problems for check in verify_model(newest(tmp_path / "run")))
    export(tmp_path / "run", tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    found = {check.name: check.problems for check in verify_model(tmp_path / "out")}
    assert found["checksums"] == ["model.safetensors has changed"]
    with pytest.raises(ConfigError, match="exists"):
        export(tmp_path / "run", tmp_path / "out")


def test_leaks_are_found_in_a_model_that_leaks():
    model = build(dcdm.preset("mdlm-debug"), seed=0)
    assert leaks(model) == []
    forward = model.forward
    model.forward = lambda tokens, masked: type("Out", (), {
        "logits": forward(tokens, masked).logits + torch.nn.functional.one_hot(tokens, 260)})  # fmt: skip
    assert leaks(model)


OWN, REMOTE = (
    "import dcdm.hub, transformers\nextra = {}",
    "import transformers\nextra = {'trust_remote_code': True}",
)
QUICK = {"ar-debug": OWN, "dcdm-debug-causal": REMOTE}


@pytest.mark.parametrize(("preset", "lines"), [
    pytest.param(preset, lines, marks=[] if QUICK.get(preset) == lines else pytest.mark.slow)
    for preset in ("ar-debug", "dcdm-debug-causal", "bdlm-debug", "dcdm-debug") for lines in (OWN, REMOTE)
], ids=lambda value: {OWN: "hub", REMOTE: "remote code"}.get(value, value))  # fmt: skip
def test_auto_classes_load_an_export_after_import_dcdm_hub_or_with_remote_code(preset, lines, tmp_path):
    write_export(build(dcdm.preset(preset), seed=0), byte_tokenizer(), tmp_path / "out", "card")
    auto = "AutoModelForCausalLM" if preset == "ar-debug" else "AutoModelForMaskedLM"
    code = f"""{lines}
import torch
model = transformers.{auto}.from_pretrained({str(tmp_path / "out")!r}, **extra).eval()
import dcdm
own, tokenizer = dcdm.load({str(tmp_path / "out")!r})
tokens = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
tokens[:, 0] = own.config.bos_id
with torch.no_grad():
    if {preset == "ar-debug"}:
        assert torch.allclose(model(input_ids=tokens).logits, own(tokens).logits, atol=1e-5)
    else:
        ids = torch.zeros_like(tokens)
        masked = torch.zeros_like(tokens, dtype=torch.bool)
        masked[:, 9:] = True
        z = tokens.masked_fill(masked, own.config.mask_id)
        logits = model(input_ids=z).logits
        labels = tokens.masked_fill(~masked, -100)
        out = model(input_ids=z, labels=labels)
        expected = own(tokens, masked)
        assert torch.allclose(out.logits[masked], expected.logits[masked], atol=1e-5)
        if {preset == "bdlm-debug"}:  # the active block is the second one: positions 9…16
            assert torch.allclose(logits[:, 9:17], expected.logits[:, 9:17], atol=1e-4)
assert transformers.AutoTokenizer.from_pretrained({str(tmp_path / "out")!r})('ab')['input_ids'][-2:] == [97, 98]
"""
    if lines == OWN:
        exec(code, {})
    else:  # in a process that has not imported dcdm.hub
        Child(exec, f"import sys\nassert 'dcdm.hub' not in sys.modules\n{code}", {}).join(120)


@pytest.mark.parametrize("started_by", ["ranks", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_processes_train_and_resume_in_one(started_by, corpus, tmp_path):
    """The same command with gloo, the same figures, and a folder that one process resumes."""
    alone, pair = tmp_path / "alone", tmp_path / "pair"
    assert start("dcdm-debug", alone, corpus, train__steps=4, checkpoint_every=2) == 0
    values = yaml.safe_load((alone / "settings.yaml").read_text())
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump({**values, "tensorboard": True}))
    words = ["train", "--config", str(file), "--run-folder", str(pair), "--device", "cpu"]
    if started_by == "ranks":
        command_on_ranks(2, words)
    else:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dcdm"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *launch, *words], env=environment, check=True, timeout=240)
    for one, other in zip(metrics(alone), metrics(pair), strict=True):
        if "loss" in one:
            assert one["nll"] == pytest.approx(other["nll"], abs=1e-4)
            assert one["tokens"] == other["tokens"]
    assert "train/nll" in board(pair).Tags()["scalars"]
    assert run(None, pair) == 0  # nothing left to do, in one process


# --- dcdm.train, as scripts, threads and notebooks call it --------------------------------------------------------


def test_a_run_from_python_is_loaded_by_its_folder_and_leaves_signals_of_a_thread_alone(corpus, tmp_path):
    before, made, asked = signal.getsignal(signal.SIGINT), [], {"data": str(corpus), "steps": 2, "settings": SMALL}
    thread = threading.Thread(target=lambda: made.append(dcdm.train("mdlm-debug", str(tmp_path / "run"), **asked)))
    thread.start()
    thread.join()
    assert made == [tmp_path / "run"]
    assert signal.getsignal(signal.SIGINT) is before
    assert dcdm.load(made[0])[0].config.num_layers == 2
    tuned = dcdm.train("mdlm-debug", tmp_path / "tuned", data=[corpus], steps=1, init=made[0], settings=SMALL)
    assert (tuned / "checkpoints").is_dir()
    assert dcdm.train(run=made[0]) == made[0], "a finished run is found finished"


def test_chunk_views_show_themselves_in_a_notebook():
    from dcdm.viewing.chunks import view, window_of

    model, tokenizer = build(dcdm.preset("dcdm-debug"), seed=0).eval(), byte_tokenizer()
    drawn = view(model, window_of("if x < 1: <script>", tokenizer, 32)[0])._repr_html_()
    assert "<script>" not in drawn
    assert drawn.count("<span") == 19
