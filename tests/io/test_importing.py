"""A Llama, Qwen2 or Qwen3 that `transformers` saved as a source of weights: what is read and what is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import pretrained
from dcdm.config import ConfigError, ModelConfig, RopeScaling
from dcdm.io.importing import Source

transformers = pytest.importorskip("transformers")

VOCAB = 50


def qwen3(tied: bool, family: str = "Qwen3", **changes: Any) -> Any:
    """A random Qwen3, or one of its relatives, whose every setting differs from our defaults."""
    settings = {
        "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 2048, "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    }  # fmt: skip
    return pretrained.network(family, tied, VOCAB, **{**settings, **changes})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a source model, tied or not, in one file or sharded; written once, not to be changed."""
    folders: dict[tuple[bool, bool], Path] = {}

    def folder(tied: bool = True, sharded: bool = False) -> Path:
        if (tied, sharded) not in folders:
            path = tmp_path_factory.mktemp("qwen3")
            qwen3(tied).save_pretrained(path, max_shard_size="9KB" if sharded else "1GB")
            assert (path / "model.safetensors.index.json").exists() == sharded
            assert (path / "model.safetensors").exists() != sharded
            folders[tied, sharded] = path
        return folders[tied, sharded]

    return folder


@pytest.fixture
def copied(saved: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Such a folder as a copy that the test may damage."""

    def folder(tied: bool = True, sharded: bool = False) -> Path:
        return Path(shutil.copytree(saved(tied, sharded), tmp_path / "source"))

    return folder


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pretrained.taken(folder)
    assert all(word in str(caught.value) for word in words), caught.value


# What is read


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("vocab_size", "rows"), [(30, 27), (80, 50)])
def test_a_smaller_or_larger_vocabulary_keeps_the_meaning_of_shared_ids(
    saved: Callable[..., Path], tied: bool, vocab_size: int, rows: int
) -> None:
    model = pretrained.taken(saved(tied), "mdlm", vocab_size=vocab_size)
    source = qwen3(tied).state_dict()
    names = {"embed_tokens.weight": "model.embed_tokens.weight"}
    if not tied:
        names["lm_head.weight"] = "lm_head.weight"
    for ours, theirs in names.items():
        value = model.state_dict()[ours]
        assert len(value) == vocab_size
        assert torch.equal(value[:rows], source[theirs][:rows])


def test_half_precision_sources_are_widened_without_rounding(tmp_path: Path) -> None:
    source = qwen3(True).to(torch.bfloat16)
    source.save_pretrained(tmp_path)
    weight = pretrained.taken(tmp_path).get_parameter("layers.1.mlp.up_proj.weight")
    assert weight.dtype == torch.float32
    assert torch.equal(weight, source.model.layers[1].mlp.up_proj.weight.float())


def test_a_sharded_folder_holds_what_one_file_holds(saved: Callable[..., Path]) -> None:
    one, sharded = (pretrained.taken(saved(sharded=sharded)).state_dict() for sharded in (False, True))
    assert all(torch.equal(sharded[name], value) for name, value in one.items())


def test_old_llama_folders_may_leave_out_what_was_the_same_for_all(tmp_path: Path) -> None:
    """Head size, key/value heads and RoPE's base, and the table of RoPE among their tensors."""
    source = qwen3(False, "Llama", num_key_value_heads=4, head_dim=6, rope_parameters={"rope_theta": 1e4})
    source.save_pretrained(tmp_path)
    pretrained.edit_json(tmp_path / "config.json", num_key_value_heads=..., head_dim=..., rope_parameters=...)
    edit_tensors(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}))
    model = pretrained.taken(tmp_path)
    config = model.config
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 6, 1e4)
    tokens = torch.arange(36).reshape(3, 12)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits[..., :VOCAB], source(tokens).logits, atol=1e-5, rtol=0)


# The config


def test_the_config_takes_every_setting_from_the_source_and_the_rest_from_the_caller(
    saved: Callable[..., Path],
) -> None:
    config = Source.in_folder(saved()).config("bdlm", block_size=3, context_length=64, init_std=0.1)
    assert config == ModelConfig(
        "bdlm", VOCAB + 3, 24, 2, 4, 2, 8, 40, block_size=3, context_length=64, max_position=2048,
        rope_theta=5e4, norm_eps=1e-5, tie_embeddings=True, init_std=0.1,
    )  # fmt: skip
    assert Source.in_folder(saved(False)).config("ar").tie_embeddings is False


def test_settings_are_read_from_their_places_before_and_since_transformers_5(copied: Callable[..., Path]) -> None:
    folder = copied()
    before = {name: value for name, value in pretrained.LLAMA_3.items() if name != "rope_theta"}
    scaling = RopeScaling(8.0, 1.0, 4.0, 16)
    for rope, expected in (
        ({"rope_theta": 70000, "rope_scaling": None}, (7e4, None)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 90000.0}}, (9e4, None)),
        ({"rope_parameters": pretrained.LLAMA_3}, (5e4, scaling)),
        ({"rope_theta": 5e4, "rope_scaling": before}, (5e4, scaling)),
    ):
        pretrained.edit_json(
            folder / "config.json", **{"rope_parameters": ..., "rope_theta": ..., "rope_scaling": ..., **rope}
        )
        config = Source.in_folder(folder).config("ar")
        assert (config.rope_theta, config.rope_scaling) == expected
    assert config.context_length == 1024
    pretrained.edit_json(folder / "config.json", max_position_embeddings=256)
    assert Source.in_folder(folder).config("ar").context_length == 256


# What is refused


@pytest.mark.parametrize("content", [None, "{", "[]", "\udcff"], ids=["missing", "cut", "a list", "no text"])
def test_a_missing_folder_and_a_missing_or_damaged_config_are_refused(
    copied: Callable[..., Path], content: str | None
) -> None:
    folder = copied()
    refused(folder / "config.json", "config.json is not a folder", "download")
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content, errors="surrogateescape")
    refused(folder, "config.json", "save_pretrained")


CONFIG_FAULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another architecture": ({"model_type": "gpt2"}, ["model_type='gpt2'", "dense Llama, Qwen2 or Qwen3"]),
    "a mixture": ({"model_type": "qwen3_moe"}, ["model_type='qwen3_moe'", "dense Llama, Qwen2 or Qwen3"]),
    "another architecture of ours": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        ["k_norm", "absent"],
    ),
    "another class than its type's": (
        {"model_type": "llama"},
        ["'Qwen3ForCausalLM'", "LlamaForCausalLM", "--family ar"],
    ),
    "somebody's own class": (
        {"architectures": ["MyModel"], "auto_map": {"AutoModel": "my.MyModel"}},
        ["MyModel", "--family ar"],
    ),
    **{
        f"a sign of diffusion: {name}": ({name: value}, [name, str(value), "--family ar"])
        for name, value in {
            "mask_token_id": 49,
            "block_size": 4,
            "bd_size": 32,
            "auto_map": {"AutoModel": "m.M"},
        }.items()
    },
    "attention bias": ({"attention_bias": True}, ["attention_bias=True", "without"]),
    "MLP bias": ({"mlp_bias": True}, ["mlp_bias=True", "without"]),
    "rope scaling without a number": (
        {"rope_parameters": {**pretrained.LLAMA_3, "low_freq_factor": None}},
        ["low_freq_factor=None", "a number"],
    ),
    "rope scaling before transformers 5": (
        {"rope_parameters": ..., "rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        ["rope_scaling", "linear", "rope_type 'default'"],
    ),
    "a windowed layer": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        ["layer_types", "sliding_attention", "full attention"],
    ),
    "sliding window": ({"use_sliding_window": True}, ["use_sliding_window=True", "full attention"]),
    "another activation": ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "unquantized"]),
    "no rope theta": ({"rope_parameters": ...}, ["rope_theta=None", "a number"]),
    "a size in words": ({"hidden_size": "24"}, ["hidden_size='24'", "a whole number"]),
    "no word on tying": ({"tie_word_embeddings": ...}, ["tie_word_embeddings=None", "true or false"]),
    "other layers": ({"num_hidden_layers": 3, "layer_types": ...}, ["num_layers=3", "weights of 2"]),
    "other vocabulary": ({"vocab_size": 51}, ["embed_tokens", "[50, 24]", "[51, 24]"]),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_config_that_our_backbone_cannot_express_or_its_weights_do_not_fit_is_refused(
    copied: Callable[..., Path], fault: str
) -> None:
    changes, words = CONFIG_FAULTS[fault]
    folder = copied()
    pretrained.edit_json(folder / "config.json", **changes)
    refused(folder, str(folder), *words)


INDEX = "model.safetensors.index.json"
LAST = "model.norm.weight"  # the name that sorts last: a copy that checks as it goes would fail too late
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
TENSOR_FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], list[str]]] = {
    "missing": (lambda t: t.pop(LAST), ["asks for norm.weight [24], and it holds absent", "1 such tensor)"]),
    "no last layer": (lambda t: [t.pop(n) for n in list(t) if "layers.1" in n], ["num_layers=2", "weights of 1"]),
    "an adapter": (
        lambda t: t.update({f"{Q_PROJ[:-6]}lora_A": torch.ones(8)}),
        ["lora_A absent, and it holds [8]"],
    ),
    "transposed": (lambda t: t.update({Q_PROJ: t[Q_PROJ].T.contiguous()}), ["q_proj", "[24, 32]", "[32, 24]"]),
    "integers": (lambda t: t.update({LAST: torch.ones(24, dtype=torch.int8)}), [LAST, "I8", "BF16"]),
    "tied with another head": (
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
        ["tie_word_embeddings=True", "lm_head.weight", "false"],
    ),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_missing_extra_or_misshapen_tensors_are_refused(copied: Callable[..., Path], fault: str) -> None:
    change, words = TENSOR_FAULTS[fault]
    folder = copied()
    edit_tensors(folder, change)
    refused(folder, str(folder), *words)


def test_cut_missing_and_pickled_weights_are_refused(copied: Callable[..., Path]) -> None:
    folder = copied(tied=False)
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    refused(folder, "lm_head.weight [50, 24], and it holds absent")
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 100)
    refused(folder, "model.safetensors", "cannot be read", "again")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "model.safetensors", "save_pretrained")


def last_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[-1]


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


INDEX_FAULTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a missing shard": (lambda f: last_shard(f).unlink(), ["model-0000", "not a regular file", "again"]),
    "a pipe": (lambda f: as_pipe(last_shard(f)), ["model-0000", "not a regular file", "again"]),
    "a shard outside the folder": (
        lambda f: pretrained.edit_json(f / INDEX, weight_map={LAST: "../model.safetensors"}),
        ["weight_map", "files of this folder"],
    ),
    "no JSON": (lambda f: (f / INDEX).write_text("{"), ["index.json", "not JSON"]),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_a_sharded_folder_whose_index_is_damaged_or_names_no_files_of_its_own_is_refused(
    copied: Callable[..., Path], fault: str
) -> None:
    damage, words = INDEX_FAULTS[fault]
    folder = copied(sharded=True)
    damage(folder)
    refused(folder, str(folder), *words)
