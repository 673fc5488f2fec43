"""Importing published diffusion models: toy folders with their names and keys, as `transformers` computes them."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dcdm
import pretrained
import tiny
from dcdm.config import ConfigError
from dcdm.io import families, importing
from dcdm.io.export import export_sdar
from dcdm.io.pretrained import import_model
from dcdm.model.transformer import Model

transformers = pytest.importorskip("transformers")

TEXT = "the cat and the hat"


def imported(tmp_path: Path, name: str, **flags: Any) -> tuple[Model, Any, Any, int]:
    folder, source, mask_id = pretrained.published(tmp_path / "source", name)
    import_model(str(folder), tmp_path / "out", **{**pretrained.PUBLISHED[name].flags, **flags})
    return *dcdm.load(tmp_path / "out"), source, mask_id


@pytest.mark.parametrize("name", pretrained.PUBLISHED)
@torch.no_grad()
def test_an_imported_family_gives_the_logits_of_transformers_under_its_mask(tmp_path: Path, name: str) -> None:
    model, tokenizer, source, mask_id = imported(tmp_path, name)
    family = pretrained.PUBLISHED[name]
    config = model.config
    assert (config.block_size, config.shift, config.family) == (family.block_size, family.shift, name.split(",")[0])
    assert config.prompts == "ordinary"
    tokens = torch.tensor([[config.bos_id, *tokenizer.encode(TEXT)]])
    masked = torch.zeros_like(tokens, dtype=torch.bool)
    masked[0, 5:9] = masked[0, 11:] = True
    size = family.block_size or len(TEXT)
    first = 1 + (4 // size) * size  # the block that holds the first MASK
    end = min(tokens.shape[1], first + size)
    z = tokens.masked_fill(masked, mask_id)[:, 1:end]
    where = masked[:, :end]
    expected = pretrained.literal_logits(source, z, family.block_size, family.shift)[where[:, 1:]]
    logits = model(tokens[:, :end], where).logits[where]
    rows = tokenizer.vocab_size - 3
    expected = expected[:, :rows].clone()
    if mask_id < rows:
        assert logits[:, mask_id].isneginf().all()  # never emitted
        expected[:, mask_id] = -torch.inf
    assert expected[expected.isfinite()].std() > 0.5
    torch.testing.assert_close(logits[:, :rows], expected, atol=2e-5, rtol=0)


def test_every_family_is_tested_and_has_a_decoder() -> None:
    from dcdm.decoding.config import DECODERS

    assert {name.split(",")[0] for name in pretrained.PUBLISHED} == families.FAMILIES.keys() == DECODERS.keys()


def edited(folder: Path, **changes: Any) -> str:
    pretrained.edit_json(folder / "config.json", **changes)
    return str(folder)


def test_what_a_folder_does_not_say_or_says_twice_is_asked_for_by_name(tmp_path: Path) -> None:
    folder, _, mask_id = pretrained.published(tmp_path / "source", "sdar")
    out = tmp_path / "out"
    faults: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"block_size": ...}, {}, r"block size \(block_size\).*--block-size: 4 \(or 8, 16, 32, 64\)"),
        ({}, {"block_size": 8}, "block_size=8, but block_size=4"),
        ({"block_size": "4"}, {}, "block_size='4'.*whole number"),
        ({"mask_token_id": 5}, {}, f"mask_token_id=5 .* the tokenizer's is {mask_id}"),
        ({}, {"mask": "70000"}, "the mask 70000 is none of the model's"),
        ({}, {"mask": "th"}, "the mask .* is 'th', which texts hold"),
        ({}, {"bos": "<|im_start|>"}, "has no BOS"),
        ({}, {"family": "llada"}, "family=llada does not fit SDARForCausalLM.*choose sdar"),
        ({"rope_parameters": ..., "rope_theta": ...}, {}, "rope_theta=None"),
        ({"architectures": ["SDARMoeForCausalLM"]}, {}, "SDARMoeForCausalLM cannot be imported: its mixture"),
        ({"architectures": ["A2DQwen3LMHeadModel"]}, {}, "choose tiny-a2d-bd3lm or tiny-a2d-mdlm"),
        ({"num_hidden_layers": 3, "layer_types": ...}, {}, "num_layers=3, but there are weights of 2"),
    ]  # fmt: skip
    original = (folder / "config.json").read_text()
    for changes, flags, message in faults:
        with pytest.raises(ConfigError, match=message):
            import_model(edited(folder, **changes), out, **flags)
        (folder / "config.json").write_text(original)
    llada = pretrained.published(tmp_path / "llada", "llada")[0]
    for changes, message in (({"alibi": True}, "alibi=True"), ({"block_type": ...}, "block_type=None .* 'llama'")):
        with pytest.raises(ConfigError, match=message):
            import_model(edited(llada, **changes), out)
        edited(llada, alibi=False)
    with pytest.raises(ConfigError, match="no blocks"):
        import_model(edited(llada, block_type="llama"), out, block_size=4)
    assert not out.exists()


def test_a_truncated_shard_and_a_missing_tensor_are_named(tmp_path: Path) -> None:
    folder = pretrained.published(tmp_path / "source", "dream", max_shard_size="20KB")[0]
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-8])
    with pytest.raises(ConfigError, match=rf"{shard.name} cannot be read"):
        import_model(str(folder), tmp_path / "out")
    shard.unlink()
    with pytest.raises(ConfigError, match=rf"{shard.name}.*is not a regular file"):
        import_model(str(folder), tmp_path / "out")


def test_a_tokenizer_with_code_of_its_own_is_read_without_it(tmp_path: Path) -> None:
    """As Dream's: Qwen2's vocabulary and merges, and a class that only its folder has."""
    folder = pretrained.published(tmp_path / "source", "dream")[0]
    import_model(str(folder), tmp_path / "plain")
    classes = {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}
    (folder / "tokenization_dream.py").write_text("raise SystemExit('code of a folder was run')\n")
    pretrained.edit_json(folder / "tokenizer_config.json", tokenizer_class="DreamTokenizer", auto_map=classes)
    import_model(str(folder), tmp_path / "with its file")
    spec = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(spec["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\n")
    (folder / "added_tokens.json").write_text(
        json.dumps({one["content"]: one["id"] for one in spec["added_tokens"]})
    )
    import_model(str(folder), tmp_path / "without")
    texts = ("the cat", "x = 12  ", "a\n\nb")
    plain = dcdm.load(tmp_path / "plain")[1]
    for other in ("with its file", "without"):
        tokenizer = dcdm.load(tmp_path / other)[1]
        assert [tokenizer.encode(text) for text in texts] == [plain.encode(text) for text in texts]
        assert (tokenizer.eos_id, tokenizer.mask_id) == (plain.eos_id, plain.mask_id)


def test_weights_are_read_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pretrained.published(tmp_path / "source", "dream", max_shard_size="20KB")[0]
    read, alive, most = importing.read_tensor, weakref.WeakSet(), 0  # type: ignore[var-annotated]

    def watched(*where: Any) -> torch.Tensor:
        nonlocal most
        tensor = read(*where)
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(importing, "read_tensor", watched)
    import_model(str(folder), tmp_path / "out")
    assert 1 <= most <= 2


# --- back to engines that serve SDAR ------------------------------------------------------------------------------


@torch.no_grad()
def test_an_export_for_engines_gives_our_logits_and_our_texts_in_their_vocabulary(tmp_path: Path) -> None:
    model, tokenizer, _, _ = imported(tmp_path, "tiny-a2d-bd3lm", block_size=4)  # tied: it gets a head of its own
    export_sdar(tmp_path / "out", tmp_path / "engine")
    settings = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert (settings["architectures"], settings["block_size"], settings["mask_token_id"]) == (
        ["SDARForCausalLM"], 4, 151_669
    )  # fmt: skip
    known = transformers.AutoConfig.from_pretrained(tmp_path / "engine", trust_remote_code=True)
    assert (known.model_type, known.rope_theta, known.vocab_size) == ("sdar", 1e4, 151_936)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "engine")
    assert theirs(TEXT)["input_ids"] == tokenizer.encode(TEXT)
    assert (theirs.bos_token, len(theirs)) == (None, model.config.bos_id)
    source = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **{k: v for k, v in known.to_dict().items() if k not in ("auto_map", "model_type")}
        )
    ).eval()
    source.load_state_dict(load_file(tmp_path / "engine" / "model.safetensors"))

    def ask(ids: list[int]) -> torch.Tensor:
        z = torch.tensor([[151_669 if token == model.config.mask_id else token for token in ids]])
        return pretrained.literal_logits(source, z, 4, shift=False)[0]

    ids, mask = [*tokenizer.encode("the cat"), *[model.config.mask_id] * 10], model.config.mask_id
    prompt = ids[:-10]
    z = torch.tensor([[model.config.bos_id, *ids[:8]]])
    logits = model.head(model.denoise(z, model.partition(z).ids))[0, -2:, : model.config.bos_id]
    hidden = model.config.hidden_token
    assert hidden is not None
    wanted = ask(ids[:8])[-2:]
    wanted[:, hidden] = -torch.inf
    torch.testing.assert_close(logits, wanted[:, : model.config.bos_id], atol=2e-5, rtol=0)
    for start in range(0, len(ids), 4):  # the default decoder of the engines
        while mask in ids[start : start + 4]:
            confidence, token = ask(ids[: start + 4]).softmax(dim=-1).max(dim=-1)
            open_ = torch.tensor([at >= start and ids[at] == mask for at in range(start + 4)])
            confidence = confidence.masked_fill(~open_, -1)
            for at in ((confidence > 0.3) | (confidence == confidence.max())).nonzero().flatten().tolist():
                ids[at] = int(token[at])
    made = dcdm.generate(
        model, [[model.config.bos_id, *prompt]], max_new_tokens=10, temperature=0, commit="threshold:0.3",
        routing="blocks:4",
    )  # fmt: skip
    assert made.completions[0] == ids[len(prompt) :]
    import_model(str(tmp_path / "engine"), tmp_path / "again", mask="151669")
    again = dcdm.load(tmp_path / "again")[0]
    torch.testing.assert_close(again.layers.state_dict(), model.layers.state_dict(), rtol=0, atol=0)
    assert torch.equal(again.embed_tokens.weight[-1], model.embed_tokens.weight[-1])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"kind": "mdlm", "block_size": None}, "kind='mdlm'"), ({"prompts": "visible"}, "prompts='visible'"),
        ({"qk_norm": False}, "qk_norm=False"), ({"attention_bias": True}, "attention_bias=True"),
        ({"shift": True}, "shift=True"),
    ],
)  # fmt: skip
def test_what_an_engine_would_compute_differently_is_not_exported_for_it(
    tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    tiny.exported("bdlm", tmp_path / "model", **{"prompts": "ordinary", **changes})
    with pytest.raises(ConfigError, match=f"{name}, and an engine for SDAR"):
        export_sdar(tmp_path / "model", tmp_path / "engine")
    assert not (tmp_path / "engine").exists()
