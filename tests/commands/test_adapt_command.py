"""`dcdm adapt`: what an imported model becomes, figures before and after, adapters, and resuming."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dcdm
import pretrained
from dcdm.cli import main
from dcdm.commands.adapt import adapted, memory
from dcdm.config import ConfigError, ModelConfig
from dcdm.data.loader import pack
from dcdm.data.store import PreparedData
from dcdm.io.load import load_model
from dcdm.io.pretrained import import_model
from dcdm.io.verify import verify_model
from dcdm.progress import Reporter
from dcdm.training import settings as run_settings
from dcdm.training.own_texts import own_texts

TEXT = "The cat sat on the mat, and that was that. Then there were two of them.\n" * 60


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapt")
    import_model(str(pretrained.saved(folder / "source", "Llama")), folder / "base")
    (folder / "text.txt").write_text(TEXT)
    (folder / "like.txt").write_text(TEXT + "\n")  # so much like it that training lowers every figure
    return folder


@pytest.fixture(autouse=True)
def at_home(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("DCDM_CACHE", str(place / "cache"))


TEXTS = ["--data", "text.txt", "--validation", "like.txt"]
SMALL = ["tensorboard=false", "evaluate_sequences=2", "data.window=32"]
CHUNKS = dict.fromkeys(("dcdm-causal", "dcdm-paper"), ("model.num_chunks=3", "model.chunk_dim=8"))


def adapt(run: str, *more: str, set: Sequence[str] = (), model: str = "base", data: list[str] = TEXTS) -> object:
    with pytest.raises(SystemExit) as left:
        main(["adapt", model, "--run", run, *data, *more, "--set", *SMALL, *set])
    return left.value.code


def evaluations(run: str) -> list[dict]:
    rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "evaluation" in row]


@pytest.mark.parametrize("to", ["lanes", "ar", "bdlm", "mdlm", "dcdm-causal", "dcdm-paper"])
def test_an_imported_model_becomes_every_kind_and_keeps_its_backbone(to, capsys):
    run = f"runs/{to}"
    assert adapt(run, "--to", to, "--steps", "2", set=CHUNKS.get(to, ())) == 0
    model, tokenizer = dcdm.load(run)
    base, own = dcdm.load("base")
    assert (model.config.kind, model.config.qk_norm) == (to.split("-")[0], False)
    assert model.config.context_length == base.config.context_length == 256
    assert tokenizer.fingerprint == own.fingerprint
    assert run_settings.read(Path(run, "settings.yaml")).window == 32
    before, after = evaluations(run)
    assert (before["step"], after["step"]) == (0, 2)
    shown = capsys.readouterr().out
    assert "step 0" in shown
    assert "step 2" in shown
    assert ("8 lanes" in shown) == (to == "lanes")


def test_an_imported_diffusion_model_becomes_another_one_and_brings_its_mask(tmp_path):
    for name, folder in (("sdar", "sdar"), ("dream", "dream")):
        import_model(str(pretrained.published(tmp_path / folder, name)[0]), Path(folder))
    for model, to, more in (("sdar", "dcdm-paper", ["--lora", "2"]), ("dream", "bdlm", ["--block-size", "8"])):
        run, base = f"runs/{model}-{to}", dcdm.load(model)[0]
        assert adapt(run, "--to", to, "--steps", "1", *more, model=model, set=CHUNKS.get(to, ())) == 0
        config = dcdm.load(run)[0].config
        assert (config.kind, config.hidden_token) == (to.split("-")[0], base.config.hidden_token)
        habits = ("visible", False) if to == "dcdm-paper" else ("ordinary", True)
        assert (config.prompts, config.shift, config.family) == (*habits, None)
        mask = dcdm.load(run)[0].embed_tokens.weight[-1]
        torch.testing.assert_close(mask, base.embed_tokens.weight[-1], atol=5e-3, rtol=0)
    kept = adapted(dcdm.load("sdar")[0].config, "bdlm", block_size=8)
    assert (kept.prompts, kept.family, kept.block_size) == ("ordinary", "sdar", 8)
    for to in ("lanes", "ar"):
        with pytest.raises(
            ConfigError, match=f"adapting to {to} starts from an AR model, and this is of kind 'bdlm'"
        ):
            adapted(kept, to)  # type: ignore[arg-type]


def test_figures_before_training_are_those_of_the_base_model_and_training_lowers_all_of_them():
    settings = ["model.lane_weights=[3,1,1,1]", "train.learning_rate=0.003"]
    assert adapt("runs/longer", "--steps", "20", "--batch-size", "8", set=settings) == 0
    assert dcdm.load("runs/longer")[0].config.lane_weights == (3, 1, 1, 1)
    before, *_, after = (row["evaluation"] for row in evaluations("runs/longer"))
    base, tokenizer = dcdm.load("base")
    windows = pack([TEXT + "\n"], tokenizer, 32)
    windows = windows[[0, len(windows) // 2]]  # spread over the text
    exact = dcdm.score(base, windows, "exact")
    nats = float(exact.nats.sum() / exact.tokens.sum())
    assert before["lanes_1_nll"] == pytest.approx(nats, abs=1e-4)
    assert before["valid_nll"] == before["lanes_4_nll"]
    for lanes in (1, 2, 4, 8):
        assert after[f"lanes_{lanes}_nll"] < before[f"lanes_{lanes}_nll"] - 0.5


def test_the_same_command_resumes_and_other_settings_are_refused(capsys):
    flat = ["train.schedule=constant", "checkpoint_every=1"]
    assert adapt("runs/short", "--steps", "1", set=flat) == 0
    assert adapt("runs/short", "--steps", "2", set=flat) == 0
    assert "resuming from step 1" in capsys.readouterr().err
    assert [row["step"] for row in evaluations("runs/short")] == [0, 1, 2]
    assert adapt("runs/short", "--steps", "2", "--lanes", "1,2", set=flat) == 2
    assert "model.lanes" in capsys.readouterr().err


def test_wrong_use_is_refused_by_option(adapters, refused):
    for words, message in (
        (["--lanes", "1,x"], "--lanes 1,x"),
        (["--to", "bdlm", "--block-size", "0"], "block_size=0"),
        (["--lora", "0"], "--lora 0"),
        (["--block-size", "8"], "--block-size 8 has no effect on --to lanes"),
        (["--steps", "0"], "--steps 0"),
        (["--set", "data.window=999"], "data.window="),
    ):
        assert message in refused("adapt", "base", "--run", "none", *TEXTS, *words)
    assert "`dcdm import model.gguf FOLDER` makes one" in refused("adapt", "model.gguf", "--run", "none")
    assert "has no adapter" in refused("export", "base", "none", "--adapter-only")
    assert adapt("runs/blocks", "--to", "bdlm", "--steps", "1") == 0
    assert "starts from an AR model" in refused("adapt", "runs/blocks", "--run", "none", "--to", "lanes")
    assert not Path("none").exists()


def test_passes_are_small_enough_for_two_gigabytes_and_recompute_where_one_window_is_too_much():
    smollm2 = ModelConfig("lanes", 49_155, 576, 30, 9, 3, 64, 1536, max_position=8192)
    assert memory(smollm2, 2, 256) == {"train.micro_batch": 2, "train.activation_checkpointing": False}
    assert memory(smollm2, 16, 256)["train.micro_batch"] == 6
    assert memory(smollm2, 16, 2048) == {"train.micro_batch": 1, "train.activation_checkpointing": True}


# --- adapters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["lanes", "dcdm-causal"])
def test_a_run_with_adapters_loads_verifies_and_exports_as_a_plain_model(adapters, to):
    run = f"runs/for-{to}"
    assert [check for check in verify_model(Path(run)) if check.problems] == []
    model, _ = dcdm.load(run)
    base, _ = dcdm.load("base")
    changed = {
        name
        for name, value in base.state_dict().items()
        if not torch.equal(value, model.state_dict()[name]) and "embed" not in name
    }
    assert len(changed) == 7 * 2  # seven matrices of two blocks, and no norm
    rows = (model.embed_tokens.weight != base.embed_tokens.weight).any(dim=-1).nonzero().flatten().tolist()
    assert rows == [model.config.bos_id, model.config.mask_id]
    main(["export", run, f"exported-{to}"])
    exported, _ = dcdm.load(f"exported-{to}")
    assert all(torch.equal(v, model.state_dict()[n]) for n, v in exported.state_dict().items())
    before, after = (row["evaluation"] for row in evaluations(run))
    assert after["valid_nll"] < before["valid_nll"]


def test_a_run_with_adapters_resumes_to_the_very_same_weights():
    """Stopped after two of four steps, at a constant rate, and resumed, against a run in one go."""
    flat = ["train.schedule=constant", "train.decay_share=0.0", "evaluate_first=false", "checkpoint_every=2"]
    for run, steps in (("runs/two", "2"), ("runs/two", "4"), ("runs/four", "4")):
        assert adapt(run, "--lora", "2", "--steps", steps, set=flat) == 0
    one, other = (dcdm.load(run)[0].state_dict() for run in ("runs/two", "runs/four"))
    assert all(torch.equal(one[name], value) for name, value in other.items())


@pytest.fixture(scope="module")
def adapters(place):
    """Runs with adapters, and what is exported of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("DCDM_CACHE", str(place / "cache"))
        for to in ("lanes", "ar", "dcdm-causal"):
            settings = [*CHUNKS.get(to, ()), "train.learning_rate=0.01"]
            assert adapt(f"runs/for-{to}", "--steps", "4", "--to", to, "--lora", "4", set=settings) == 0
            main(["export", f"runs/for-{to}", f"adapter-{to}", "--adapter-only"])
    return {to: place / f"adapter-{to}" for to in ("lanes", "ar", "dcdm-causal")}


@pytest.mark.parametrize("to", ["lanes", "ar", "dcdm-causal"])
def test_base_and_adapter_are_the_model_that_was_trained(adapters, to):
    trained = dcdm.load(f"runs/for-{to}")[0]
    folder = adapters[to]
    assert (folder / "adapter_model.safetensors").stat().st_size < 0.5 * Path(
        "base/model.safetensors"
    ).stat().st_size
    assert [check for check in verify_model(folder) if check.problems] == []
    main(["export", "base", f"merged-{to}", "--adapter", str(folder)])
    for found in (
        load_model("base", adapter=folder)[0],
        dcdm.load(folder)[0],  # its base stands where it stood
        dcdm.load(f"merged-{to}")[0],
    ):
        assert found.config == trained.config
        state = trained.state_dict()
        for name, value in found.state_dict().items():
            torch.testing.assert_close(value, state[name], atol=1e-6, rtol=0)


def test_peft_reads_the_adapter_and_gives_the_same_logits(adapters):
    peft = pytest.importorskip("peft")
    import transformers

    import dcdm.hub

    wrapped = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained("base"), str(adapters["ar"])
    ).eval()
    ours, tokenizer = dcdm.load("runs/for-ar")
    tokens = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(TEXT[:60])]])
    with torch.no_grad():
        expected = ours(tokens).logits[..., :-3]
        base = dcdm.load("base")[0](tokens).logits[..., :-3]
        torch.testing.assert_close(wrapped(tokens).logits[..., :-3], expected, atol=1e-4, rtol=0)
    assert (base - expected).abs().max() > 0.01


def test_an_adapter_of_another_base_or_a_damaged_one_is_refused(adapters, place, refused):
    import_model(str(pretrained.saved(place / "other-source", initializer_range=0.1)), place / "other")
    with pytest.raises(ConfigError, match="holds other weights"):
        load_model("other", adapter=adapters["lanes"])
    with pytest.raises(ConfigError, match="is not an adapter folder"):
        load_model("base", adapter="other")
    with pytest.raises(ConfigError, match="is an adapter itself"):
        load_model(adapters["lanes"], adapter=adapters["lanes"])
    damaged = Path(shutil.copytree(adapters["lanes"], place / "damaged"))
    settings = json.loads((damaged / "dcdm.json").read_text())
    (damaged / "dcdm.json").write_text(json.dumps({**settings, "base": "nowhere"}))
    with pytest.raises(ConfigError, match=r"dcdm\.json has changed"):
        load_model("base", adapter=damaged)
    (damaged / "checksums.json").unlink()
    with pytest.raises(ConfigError, match="is an adapter of nowhere, which is not here; give MODEL and --adapter"):
        dcdm.load(damaged)
    (damaged / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model("base", adapter=damaged)
    kept = (place / "base").rename(place / "kept")
    shutil.copytree(place / "other", place / "base")
    assert "its weights have changed" in refused("export", "runs/for-lanes", "none", "--adapter-only")
    shutil.rmtree(place / "base")
    kept.rename(place / "base")


def test_an_adapter_is_compared_with_its_base_in_every_part(adapters, tmp_path):
    folder = Path(shutil.copytree(adapters["ar"], tmp_path / "adapter"))
    (folder / "checksums.json").unlink()
    stored, weights = load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.safetensors"
    first = next(name for name in stored if name.endswith("q_proj.lora_A.weight"))
    other, value = first.replace("lora_A", "lora_B"), stored[first]
    for changes, message in (
        ({other: None}, "half of an adapter of layers.0.self_attn.q_proj"),
        ({first: value[:1]}, "expected"),
        ({first: value[:, :-1]}, "expected"),
        ({other: stored[other][:1]}, "expected"),
        ({first: value * torch.nan}, "no number"),
        ({first.replace("q_proj", "norm"): value}, "layers.0.self_attn.norm, which its base has no matrix of"),
        ({"base_model.model.model.norm.weight": value}, "holds norm.weight, which is no part"),
    ):
        changed = {name: x for name, x in (stored | changes).items() if x is not None}  # type: ignore[operator]
        save_file({name: x.clone() for name, x in changed.items()}, weights)
        with pytest.raises(ConfigError, match=message):
            load_model("base", adapter=folder)
    save_file(stored, weights)
    peft = json.loads((folder / "adapter_config.json").read_text())
    for changes, message in (
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern="),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"peft_type": "LOHA"}, "plain LoRA"),
        ({"lora_alpha": 1e9}, "lora_alpha=1e"),
        ({"r": peft["r"] + 1}, "expected"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["norm"]}, "modules_to_"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(peft | changes))
        with pytest.raises(ConfigError, match=message):
            load_model("base", adapter=folder)
    (folder / "adapter_config.json").write_text(json.dumps(peft))
    ours = json.loads((folder / "dcdm.json").read_text())
    ours["model"]["rope_theta"] = 5.0
    (folder / "dcdm.json").write_text(json.dumps(ours))
    with pytest.raises(ConfigError, match="is for rope_theta=5"):
        load_model("base", adapter=folder)


def test_an_adapter_on_weights_in_bf16_with_or_without_a_draft_head_is_the_model_that_was_trained():
    assert adapt("runs/drafting", "--drafts", "2", "--steps", "4", "--lanes", "1,2") == 0
    main(["export", "runs/drafting", "half", "--dtype", "bf16"])
    model = dcdm.load("half")[0]
    options = {"max_new_tokens": 20, "lanes": 1, "temperature": 0.0}
    with_drafts, without = (dcdm.generate(model, [[5, 6]], drafts=number, **options) for number in (2, 0))
    assert with_drafts.completions == without.completions
    for base, drafts in (("half", "0"), ("python-lanes", "3")):
        run = f"runs/{base}-{drafts}"
        assert adapt(run, "--drafts", drafts, "--lora", "2", "--steps", "1", model=base) == 0
        main(["export", run, f"adapter-{base}-{drafts}", "--adapter-only"])
        model = dcdm.load(f"adapter-{base}-{drafts}")[0]
        assert model.config.drafts == int(drafts)
        state = dcdm.load(run)[0].state_dict()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, state[name], atol=1e-6, rtol=0)


def test_a_model_of_the_kind_keeps_what_is_not_given():
    sizes = ModelConfig("dcdm", 99, 16, 2, 2, 1, 8, 32, num_chunks=16, chunk_dim=8, routing="causal",
                        prior="strided", prior_weight=1.0, predict="left")  # fmt: skip
    assert adapted(sizes, "dcdm-causal") == sizes
    lanes = ModelConfig("lanes", 99, 16, 2, 2, 1, 8, 32, lanes=(1, 3), lane_weights=(2.0, 1.0), drafts=2)
    assert adapted(lanes, "lanes") == lanes
    assert adapted(lanes, "lanes", lanes=(1, 2, 4)) == replace(lanes, lanes=(1, 2, 4), lane_weights=None)


def test_prepared_text_and_an_adapter_folder_are_taken_for_further_training(adapters):
    tokenizer = str(adapters["lanes"].parent / "base")
    main(["data", "prepare", "text.txt", "--validation", "like.txt", "--tokenizer", tokenizer, "--out", "prepared"])
    for model in ("base", str(adapters["lanes"])):
        assert (
            adapt(f"runs/further-{Path(model).name}", "--steps", "1", model=model, data=["--data", "prepared"]) == 0
        )
    assert dcdm.load("runs/further-adapter-lanes")[0].config == dcdm.load("runs/for-lanes")[0].config


def test_sampling_and_scoring_take_a_base_with_its_adapter(adapters, capsys):
    shown = []
    for model in (["base", "--adapter", str(adapters["lanes"])], [str(adapters["lanes"])], ["runs/for-lanes"]):
        main(["sample", *model, "--prompt", "The cat", "--length", "12", "--lanes", "2", "--temperature", "0"])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]
    main(["eval", "ppl", str(adapters["lanes"]), "--data", "text.txt", "--limit", "2", "--length", "32", "--json"])
    assert json.loads(capsys.readouterr().out)


# --- a draft head beside a frozen base ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def head(place: Path) -> Path:
    """The exported head of a short run on own texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("DCDM_CACHE", str(place / "cache"))
        (place / "prompts.txt").write_text("The cat…\nWho?\n")
        drafts = ["--to", "drafts", "--own-texts", "40", "--prompts", "prompts.txt", "--steps", "6"]
        settings = ["train.warmup_steps=0", "evaluate_first=true"]
        assert adapt("runs/drafts", *drafts, set=settings, data=[]) == 0
        main(["export", "runs/drafts", "head", "--adapter-only", "--dtype", "bf16"])
    return place / "head"


def test_a_head_is_trained_on_own_texts_beside_a_base_that_stays_as_it_is(head: Path, place: Path) -> None:
    trained, tokenizer = dcdm.load("runs/drafts")
    base, _ = dcdm.load("base")
    state = trained.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in base.state_dict().items())
    assert bool(state["drafting.down.weight"].any())
    tokens = pack([TEXT], tokenizer, 32)[:4]
    exact = dcdm.score(trained, tokens, "exact", lanes=1).nats
    torch.testing.assert_close(exact, dcdm.score(base, tokens, "exact").nats, atol=1e-5, rtol=0)
    torch.testing.assert_close(dcdm.score(trained, tokens, "drafted", samples=1, lanes=1).nats, exact)
    first, last = (row["evaluation"]["valid_nll"] for row in evaluations("runs/drafts"))
    assert first == last
    optimizer = list((place / "runs/drafts/checkpoints").glob("*/optim*")) or [place]
    assert all(path.stat().st_size < 100_000 for path in optimizer)
    (own,) = (place / "cache/data").glob("own-texts-*")
    again = PreparedData.open(own, verify=True)
    assert (again.documents("train"), again.documents("validation")) == (38, 2)


def test_texts_of_base_and_head_are_those_of_the_base(head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not (head / "adapter_config.json").exists()
    assert [check for check in verify_model(head) if check.problems] == []
    main(["export", "base", "with-head", "--adapter", str(head)])
    base, tokenizer = dcdm.load("base")
    prompts = [tokenizer.encode(text) for text in ("The cat", "Then there", "two", "x")]
    greedy = {"max_new_tokens": 24, "temperature": 0.0}
    expected = dcdm.generate(base, prompts, **greedy)
    for model in (load_model("base", adapter=head)[0], dcdm.load(head)[0], dcdm.load("with-head")[0]):
        found = dcdm.generate(model, prompts, **greedy)
        assert found.completions == expected.completions
        assert int(found.forwards.sum()) < int(expected.forwards.sum())
    capsys.readouterr()
    main(["bench", "peers", "--models", "base", "--adapter", str(head), "--quick", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    ways = [row["path"] for row in rows]
    assert ways[0] == "1 lane, 3 drafts"
    assert {"1 lane, 3 drafts, int8", "generate of transformers"} <= {*ways}


def test_a_head_of_another_base_is_refused_and_so_is_what_has_no_effect(
    head: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_model(str(pretrained.saved(place / "third-source", initializer_range=0.3)), place / "third")
    with pytest.raises(ConfigError, match="holds other weights"):
        load_model("third", adapter=head)
    for options, data, said in (
        (["--to", "ar", "--own-texts", "8"], [], "no effect on --to ar"),
        (["--to", "lanes", "--own-texts", "8"], TEXTS, "on --data or on own texts"),
        (["--to", "drafts", "--own-texts", "8"], TEXTS, "on --data or on own texts"),
        (["--to", "drafts", "--lora", "8"], TEXTS, "--lora has no effect on --to drafts"),
        (["--to", "lanes", "--own-texts", "8"], [], "leaves no room in data.window=32"),
        (["--to", "drafts", "--lanes", "2"], [], "no effect on --to drafts"),
        (["--to", "drafts", "--prompts", "nowhere.txt"], [], "is not a file"),
    ):
        assert adapt("runs/none", *options, data=data) == 2
        assert said in capsys.readouterr().err


def test_a_head_learns_from_a_given_text_too() -> None:
    assert adapt("runs/drafts-of-text", "--to", "drafts", "--steps", "2") == 0
    model, _ = dcdm.load("runs/drafts-of-text")
    assert (model.config.lanes, model.config.drafts) == ((1,), 3)


def test_own_texts_that_were_interrupted_are_continued(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, tokenizer = dcdm.load("base")
    monkeypatch.setenv("DCDM_CACHE", str(place / "whole"))
    whole = own_texts(base, tokenizer, "weights", 72, place / "prompts.txt", 24)
    monkeypatch.setenv("DCDM_CACHE", str(place / "stopped"))
    written: list[int] = []

    class Stopping(Reporter):
        def progress(self, task: str, done: int, total: int, unit: str, note: str = "") -> None:
            written.append(done)
            if written == [64]:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        own_texts(base, tokenizer, "weights", 72, place / "prompts.txt", 24, Stopping())
    continued = own_texts(base, tokenizer, "weights", 72, place / "prompts.txt", 24)
    assert PreparedData.open(whole).content_fingerprint == PreparedData.open(continued).content_fingerprint


def test_lanes_of_own_texts_learn_by_adapters_what_one_lane_predicts(head: Path, place: Path) -> None:
    own = ["--to", "lanes", "--own-texts", "40", "--prompts", "prompts.txt"]
    assert adapt("runs/own-lanes", *own, "--steps", "2", data=[]) == 0
    settings = run_settings.read(Path("runs/own-lanes/settings.yaml"))
    assert (settings.train.lora, settings.objective.soft_targets) == (16, True)
    assert settings.data.sources == run_settings.read(Path("runs/drafts/settings.yaml")).data.sources
    main(["export", "runs/own-lanes", "own-lanes", "--adapter-only", "--dtype", "bf16"])
    assert [check for check in verify_model(place / "own-lanes") if check.problems] == []
