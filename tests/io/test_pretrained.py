"""`dcdm import`: folders, GGUF files and hub names as AR models with the logits of their source."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers

import dcdm
import pretrained
from dcdm.cli import main
from dcdm.config import ConfigError, DataError
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer
from dcdm.files import file_digest
from dcdm.io import pretrained as importing
from dcdm.io.pretrained import import_model
from dcdm.io.verify import verify_model
from dcdm.kinds import build
from dcdm.shipped import bases

TEXT = "It is a truth universally acknowledged, that 42 is one."


def their_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def our_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[model.config.bos_id, *ids]])).logits[0]


@pytest.mark.parametrize("adds_bos", [False, True], ids=["BOS named", "BOS put before texts"])
@pytest.mark.parametrize("family", pretrained.FAMILIES)
def test_an_imported_model_gives_the_logits_of_transformers_for_its_bos_and_the_text(
    tmp_path: Path, family: str, adds_bos: bool
) -> None:
    source = pretrained.saved(tmp_path / "source", family, adds_bos=adds_bos, tied=family != "Qwen2")
    made = import_model(str(source), tmp_path / "imported")
    assert (made.family, made.vocab_size, made.specials, made.chat) == (
        family,
        263,
        "BOS stands for <|im_start|>",
        True,
    )
    model, tokenizer = dcdm.load(tmp_path / "imported")
    assert (model.config.kind, model.config.context_length) == ("ar", 256)
    theirs = pretrained.tokenizer(adds_bos)(TEXT)["input_ids"]
    ids = tokenizer.encode(TEXT)
    assert theirs == ([1, *ids] if adds_bos else ids)
    expected = their_logits(pretrained.network(family, tied=family != "Qwen2"), [1, *ids])
    found = our_logits(model, ids)
    assert expected.std() > 0.5
    torch.testing.assert_close(found[:, :260], expected, atol=2e-5, rtol=0)
    assert (found[:, 260:] == -torch.inf).all()
    nats = dcdm.score(model, torch.tensor([[model.config.bos_id, *ids]]), "exact").nats[0]
    log_p = expected.log_softmax(dim=-1)[:-1].gather(1, torch.tensor(ids)[:, None]).sum()
    torch.testing.assert_close(nats.float(), -log_p, atol=1e-3, rtol=0)


def test_an_imported_model_is_whole_and_as_one_lane_the_same(tmp_path: Path) -> None:
    import_model(str(pretrained.saved(tmp_path / "source")), tmp_path / "imported")
    assert [check.name for check in verify_model(tmp_path / "imported") if check.problems] == []
    ar, tokenizer = dcdm.load(tmp_path / "imported")
    settings = ar.config.to_dict() | {"kind": "lanes", "lanes": (1, 2, 4)}
    del settings["hide_specials"]
    lanes = build(dcdm.ModelConfig.from_dict(settings)).eval()
    lanes.load_state_dict(ar.state_dict())
    tokens = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(TEXT)]])
    with torch.no_grad():
        one = lanes.head(lanes.encode(tokens, lanes=1).states)[:, 1:]
    torch.testing.assert_close(one, ar(tokens).logits[:, :-1], atol=1e-5, rtol=0)
    exact = dcdm.score(ar, tokens, "exact").nats
    torch.testing.assert_close(dcdm.score(lanes, tokens, "exact", lanes=1).nats, exact, atol=1e-4, rtol=0)
    assert (dcdm.score(lanes, tokens, "exact", lanes=4).nats - exact).abs() > 0.1


def test_new_rows_start_as_the_mean_as_bos_and_as_any_token_that_is_named(tmp_path: Path) -> None:
    source = str(pretrained.saved(tmp_path / "source"))
    rows = pretrained.network().model.embed_tokens.weight.detach()
    import_model(source, tmp_path / "plain")
    bos, pad, mask = dcdm.load(tmp_path / "plain")[0].embed_tokens.weight[-3:].detach()
    assert torch.equal(bos, rows[1])
    torch.testing.assert_close(torch.stack([pad, mask]), rows.mean(dim=0).expand(2, -1))
    import_model(source, tmp_path / "chosen", bos="<|endoftext|>", mask="<|im_end|>", context_length=64)
    model, tokenizer = dcdm.load(tmp_path / "chosen")
    assert torch.equal(model.embed_tokens.weight[-3], rows[0])
    assert torch.equal(model.embed_tokens.weight[-1], rows[2])
    assert (model.config.context_length, tokenizer.bos_for) == (64, 0)
    for wrong in ({"bos": "<|none|>"}, {"mask": "<|none|>"}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}='<|none|>' is not a token"):
            import_model(source, tmp_path / "wrong", **wrong)
    assert not (tmp_path / "wrong").exists()


def test_rows_without_tokens_are_left_out_and_tokens_without_rows_refused(tmp_path: Path) -> None:
    """Published embeddings are padded to round numbers."""
    padded = pretrained.saved(tmp_path / "padded", "Qwen3", rows=320)
    import_model(str(padded), tmp_path / "imported")
    model, tokenizer = dcdm.load(tmp_path / "imported")
    ids = tokenizer.encode(TEXT)
    expected = their_logits(pretrained.network("Qwen3", rows=320), [1, *ids])
    torch.testing.assert_close(our_logits(model, ids)[:, :260], expected[:, :260], atol=2e-5, rtol=0)
    short = pretrained.saved(tmp_path / "short", rows=200)
    with pytest.raises(ConfigError, match=r"tokenizer has 260 tokens, and the model rows for 200"):
        import_model(str(short), tmp_path / "none")


# --- folders of strangers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**5}, "num_layers=100000, but there are weights of 2"),
        ({"hidden_size": 10**6}, r"asks for embed_tokens\.weight \[260, 1000000\], and it holds \[260, 32\]"),
        ({"intermediate_size": 10**15}, "describes no model|asks for"),
        ({"vocab_size": 10**9}, r"asks for embed_tokens\.weight \[1000000000, 32\]"),
    ],
)
def test_sizes_are_compared_with_the_weights_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], message: str
) -> None:
    config = pretrained.saved(tmp_path / "source") / "config.json"
    pretrained.edit_json(config, **changes)
    monkeypatch.setattr(importing, "build", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(ConfigError, match=message):
        import_model(str(config.parent), tmp_path / "none")


def test_code_of_a_folder_is_never_run_whatever_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, trace = pretrained.saved(tmp_path / "source"), tmp_path / "trace"
    classes = {"AutoTokenizer": ["odd.Odd", None]}
    pretrained.edit_json(source / "tokenizer_config.json", tokenizer_class="Odd", auto_map=classes)
    (source / "odd.py").write_text(f"open({str(trace)!r}, 'w')\nclass Odd: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with contextlib.suppress(DataError):
        import_model(str(source), tmp_path / "none")
    assert not trace.exists()


def test_a_tokenizer_with_a_mask_token_is_a_sign_of_diffusion_unless_the_caller_knows_better(
    tmp_path: Path,
) -> None:
    folder = pretrained.saved(tmp_path / "source", "Qwen2")
    pretrained.tokenizer(mask_token="<|im_end|>").save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"mask token, '<\|im_end\|>'.*--family ar, --family open-dcoder"):
        importing.import_model(str(folder), tmp_path / "refused")
    importing.import_model(str(folder), tmp_path / "taken", family="ar")
    with pytest.raises(ConfigError, match="family='gpt' is not known; choose one of ar, sdar"):
        importing.import_model(str(folder), tmp_path / "refused", family="gpt")


def test_bos_is_what_a_tokenizer_puts_before_texts_else_names_else_what_separates_texts() -> None:
    before = importing.before_text
    assert before(pretrained.tokenizer(adds_bos=True, bos_token=None)) == "<|im_start|>"
    assert before(pretrained.tokenizer()) == "<|im_start|>"
    assert before(pretrained.tokenizer(bos_token=None)) == "<|endoftext|>"


# --- chats -------------------------------------------------------------------------------------------------------


def test_a_chat_that_begins_with_the_token_that_bos_stands_for_is_that_of_transformers(tmp_path: Path) -> None:
    import_model(str(pretrained.saved(tmp_path / "source")), tmp_path / "imported")
    model, tokenizer = dcdm.load(tmp_path / "imported")
    whole = pretrained.tokenizer().apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    theirs = pretrained.tokenizer()(whole)["input_ids"]
    ids = tokenizer.encode_chat(whole)
    assert theirs == [1, *ids]
    expected = their_logits(pretrained.network(), theirs)
    torch.testing.assert_close(our_logits(model, ids)[:, :260], expected, atol=2e-5, rtol=0)
    assert tokenizer.encode_chat("Hi") == tokenizer.encode("Hi")
    assert tokenizer.encode("<|im_start|>")[0] != 1  # in a text it is text
    plain = Tokenizer(tokenizer.backend, tokenizer.eos_id, tokenizer.chat_template)
    assert plain.with_bos_for(1).fingerprint == tokenizer.fingerprint
    assert tokenizer.fingerprint not in (plain.fingerprint, plain.with_bos_for(2).fingerprint)


# --- GGUF --------------------------------------------------------------------------------------------------------


@pytest.fixture
def base_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The GGUF file of a small base."""
    pytest.importorskip("gguf")
    file = pretrained.gguf_file(tmp_path / "a.gguf", pretrained.network("Llama"))
    known = bases.Base("Small", "small==1.0", "a.gguf", file_digest(file), 1)
    monkeypatch.setitem(bases.BASES, "small", known)
    return file


def test_the_gguf_file_of_a_base_gives_the_logits_of_its_model_whatever_lies_beside_it(
    tmp_path: Path, base_file: Path
) -> None:
    byte_tokenizer().save(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "nowhere"}')
    made = import_model(str(base_file), tmp_path / "imported")
    assert (made.family, made.specials, made.chat) == ("Llama", "BOS stands for <|im_start|>", True)
    model, tokenizer = dcdm.load(tmp_path / "imported")
    ids = tokenizer.encode(TEXT)
    expected = their_logits(pretrained.network("Llama"), [1, *ids])
    torch.testing.assert_close(our_logits(model, ids)[:, :260], expected, atol=2e-5, rtol=0)
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in pieces] == ["a", "ĠĠ", "1", "2"], "digits one by one"


def test_other_gguf_files_are_refused_and_what_reads_them_is_asked_for(
    tmp_path: Path, base_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.gguf").write_bytes(base_file.read_bytes() + b" ")
    with pytest.raises(ConfigError, match=r"other\.gguf is none of the GGUF files .*safetensors"):
        import_model(str(tmp_path / "other.gguf"), tmp_path / "none")
    for missing in ("gguf", "accelerate"):
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name, missing=missing: None if name == missing else 1
        )
        with pytest.raises(ConfigError, match=rf"reading GGUF needs {missing}; pip install -e '\.\[adapt\]'"):
            import_model(str(base_file), tmp_path / "none")


@pytest.mark.slow
@pytest.mark.skipif("SMOLLM2_GGUF" not in os.environ, reason="SMOLLM2_GGUF names no file of SmolLM2")
def test_the_real_smollm2_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    file = Path(os.environ["SMOLLM2_GGUF"])
    import_model(str(file), tmp_path / "imported")
    model, tokenizer = dcdm.load(tmp_path / "imported")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    ids = tokenizer.encode(TEXT)
    assert tokenizer.bos_for is not None
    expected = their_logits(theirs.eval(), [tokenizer.bos_for, *ids])
    torch.testing.assert_close(our_logits(model, ids)[:, :-3], expected, atol=1e-4, rtol=0)


# --- from the network --------------------------------------------------------------------------------------------


def test_a_name_on_the_hub_is_downloaded_and_a_failure_says_what_it_could_have_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pretrained.saved(tmp_path / "source")
    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        if "none" in name:
            raise OSError("no such repository")
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("dcdm.io.pretrained.hub_answers", lambda: True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert import_model("somebody/model", tmp_path / "imported").family == "Llama"
    with pytest.raises(ConfigError, match=r"'somebody/none' is neither a folder nor .* no such repository"):
        import_model("somebody/none", tmp_path / "other")
    monkeypatch.setattr("dcdm.io.pretrained.hub_answers", lambda: False)
    with pytest.raises(ConfigError, match="the hub cannot be reached"):
        import_model("somebody/none", tmp_path / "other")
    assert asked == ["somebody/model", "somebody/none", "somebody/none"]
    with pytest.raises(ConfigError, match="there is no such folder or file"):
        import_model("./nowhere", tmp_path / "other")


def test_the_command_writes_the_folder_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = pretrained.saved(tmp_path / "source"), tmp_path / "imported"
    with pytest.raises(ConfigError, match=f"import it first: `dcdm import {source} FOLDER`"):
        dcdm.load(source)
    main(["import", str(source), str(target)])
    assert "Llama, 0.0M parameters, 263 tokens, with a chat template" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(["import", str(source), str(target)])
    assert left.value.code == 2
    assert "exists; choose another folder" in capsys.readouterr().err
