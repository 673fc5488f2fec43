import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

import dcdm
from dcdm.config import ConfigError, ModelConfig, MoEConfig, ObjectiveConfig
from dcdm.kinds import parameter_counts

MILLIONS = {
    "mdlm-0.1b": 180.18, "bdlm-0.1b": 180.18, "ar-0.1b": 180.18, "dcdm-0.1b-k8": 181.75,
    "mdlm-0.5b": 491.93, "bdlm-0.5b": 491.93, "dcdm-0.5b-k8": 496.13, "dcdm-0.5b-k16": 496.13,
    "dcdm-0.5b-k32": 498.23, "dcdm-0.5b-k64": 500.32, "mdlm-1.7b": 1512.34, "bdlm-1.7b": 1512.34,
    "lanes-0.1b": 180.18, "lanes-0.5b": 491.93, "lanes-1.7b": 1512.34,
    "dcdm-1.7b-k8": 1522.83, "dcdm-1.7b-k16": 1524.93, "dcdm-moe-0.8b": 808.91, "dcdm-moe-2.8b": 2837.18,
}  # fmt: skip
ACTIVE = {"dcdm-moe-0.8b": 404.29, "dcdm-moe-2.8b": 1218.70}


@pytest.mark.parametrize("name", dcdm.presets())
def test_parameter_counts_of_every_preset_are_those_of_the_table(name):
    total, active = parameter_counts(dcdm.preset(name))
    parent = name.removesuffix("-causal")
    if "debug" in name:
        assert total < 2e6
    elif "small" in name:
        assert 2.9e6 < total < 3.2e6
    elif parent in MILLIONS:
        assert round(total / 1e6, 2) == MILLIONS[parent]
        assert round(active / 1e6, 2) == ACTIVE.get(parent, MILLIONS[parent])
    elif name.endswith("-drafts"):
        config, plain = (dcdm.preset(one) for one in (name, name.removesuffix("-drafts")))
        assert replace(config, drafts=0) == plain
        assert total == parameter_counts(plain)[0] + 6 * config.hidden_size**2 + 3 * config.hidden_size
    else:  # the ablations: another K or h of a row of the table
        config = dcdm.preset(name)
        row = dcdm.preset("-".join(name.split("-")[:2]) + "-k8")
        difference = config.num_chunks * config.chunk_dim - row.num_chunks * row.chunk_dim
        assert total - parameter_counts(row)[0] == config.hidden_size * difference


def test_every_dcdm_preset_has_a_causal_variant_that_differs_in_routing_only():
    names = dcdm.presets()
    for name in names:
        if name.startswith("dcdm") and not name.endswith("-causal"):
            assert dcdm.preset(f"{name}-causal") == replace(dcdm.preset(name), routing="causal")


def test_chunking_attention_adds_exactly_k_d_h_plus_two_d_squared():
    for name in ("dcdm-0.1b-k8", "dcdm-0.5b-k64", "dcdm-1.7b-k16"):
        config = dcdm.preset(name)
        plain = dcdm.preset(f"mdlm-{name.split('-')[1]}")
        d = config.hidden_size
        expected = config.num_chunks * d * config.chunk_dim + 2 * d * d
        assert parameter_counts(config)[0] - parameter_counts(plain)[0] == expected


def test_unknown_preset_names_the_nearest_ones():
    with pytest.raises(ConfigError, match=r"dcdm-0\.5b-k16"):
        dcdm.preset("dcdm-0.5b-k12")


GOOD = {"vocab_size": 260, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "intermediate_size": 64}  # fmt: skip
MOE = {"num_experts": 4, "experts_per_token": 2, "expert_size": 8, "shared_size": 8}
CHUNKS = {"num_chunks": 4, "chunk_dim": 8}
LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 64}


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"kind": "gpt"}, "kind"),
        ({"kind": "mdlm", "num_chunks": 8}, "num_chunks"),
        ({"kind": "mdlm", "chunk_dim": 8}, "chunk_dim"),
        ({"kind": "mdlm", "routing": "causal"}, "routing"),
        ({"kind": "ar", "block_size": 8}, "block_size"),
        ({"kind": "mdlm", "num_kv_heads": 3}, "num_kv_heads"),
        ({"kind": "mdlm", "head_dim": 7}, "head_dim"),
        ({"kind": "mdlm", "hidden_size": 0}, "hidden_size"),
        ({"kind": "mdlm", "num_layers": 1.5}, "num_layers"),
        ({"kind": "mdlm", "vocab_size": 3}, "vocab_size"),
        ({"kind": "mdlm", "intermediate_size": None}, "intermediate_size"),
        ({"kind": "mdlm", "moe": MoEConfig(**MOE)}, "moe"),
        ({"kind": "mdlm", "context_length": 50_000}, "context_length"),
        ({"kind": "mdlm", "context_length": 2**24 + 1, "max_position": 2**24 + 1}, "context_length"),
        ({"kind": "mdlm", "max_position": 10**12}, "max_position"),
        ({"kind": "mdlm", "init_std": -1.0}, "init_std"),
        ({"kind": "bdlm"}, "block_size"),
        ({"kind": "bdlm", "block_size": 0}, "block_size"),
        ({"kind": "bdlm", "block_size": 2000, "context_length": 1024}, "block_size"),
        ({"kind": "dcdm", "chunk_dim": 8}, "num_chunks"),
        ({"kind": "dcdm", "num_chunks": 4}, "chunk_dim"),
        ({"kind": "dcdm", "num_chunks": 4, "chunk_dim": 0}, "chunk_dim"),
        ({"kind": "dcdm", **CHUNKS, "routing": "greedy"}, "routing"),
        ({"kind": "dcdm", **CHUNKS, "prior": "strided"}, "prior"),
        ({"kind": "dcdm", **CHUNKS, "routing": "causal", "prior": "diagonal"}, "prior"),
        ({"kind": "dcdm", **CHUNKS, "routing": "causal", "prior_weight": 1.0}, "prior_weight"),
        ({"kind": "dcdm", **CHUNKS, "routing": "causal", "prior": "strided", "prior_weight": -1.0}, "prior_weight"),
        ({"kind": "ar", "rope_scaling": {**LLAMA_3, "factor": 0.0}}, "rope_scaling.factor"),
        ({"kind": "ar", "rope_scaling": {**LLAMA_3, "low_freq_factor": 4.0}}, "rope_scaling.low_freq_factor"),
        ({"kind": "mdlm", "hide_specials": True}, "hide_specials"),
        ({"kind": "ar", "lane_weights": (1.0,)}, "lane_weights"),
        ({"kind": "ar", "drafts": 1}, "drafts"),
        ({"kind": "lanes", "drafts": -1}, "drafts"),
        ({"kind": "lanes", "lanes": (1, 2), "lane_weights": (1.0,)}, "lane_weights"),
        ({"kind": "lanes", "lanes": (2, 1), "lane_weights": (1.0, 0.0)}, "lane_weights"),
        ({"kind": "lanes", "lanes": (1, 2), "lane_weights": (1.0, -1.0)}, "lane_weights"),
        ({"kind": "lanes", "lanes": 4}, "lanes=4"),
        ({"kind": "lanes", "lanes": ()}, "at least one"),
        ({"kind": "lanes", "lanes": (0, 2)}, "lanes=0 must be"),
        ({"kind": "lanes", "lanes": (2, 2)}, "each once"),
        ({"kind": "lanes", "block_size": 4}, "block_size=4 belongs"),
        ({"kind": "lanes", "num_chunks": 4}, "chunk_dim=None must be"),
        ({"kind": "mdlm", "lanes": (1, 2)}, "belongs to kind 'lanes'"),
        ({"kind": "mdlm", "predict": "left"}, "predict='left' does not fit kind 'mdlm'"),
        ({"kind": "ar", "predict": "left"}, "predict='left' does not fit kind 'ar'"),
        ({"kind": "dcdm", **CHUNKS, "predict": "left"}, "does not fit the paper's routing"),
        ({"kind": "ar", "prompts": "ordinary"}, "prompts"),
        ({"kind": "mdlm", "shift": True}, "shift=True"),
        ({"kind": "mdlm", "prompts": "ordinary", "hidden_token": 258}, "hidden_token=258"),
        ({"kind": "mdlm", "prompts": "none"}, "prompts='none'"),
        ({"kind": "mdlm", "prompts": "ordinary", "family": "gpt"}, "family='gpt'"),
        ({"kind": "lanes", "num_chunks": 0}, "num_chunks"),
        ({"kind": "dcdm", **CHUNKS, "routing": "causal", "prior": "strided"}, "prior_weight=0"),
        ({"kind": "mdlm", "rope_theta": 0.0}, "rope_theta"),
        ({"kind": "mdlm", "init_std": math.inf}, "init_std"),
        ({"kind": "mdlm", "moe": [3]}, "moe=.*num_experts"),
        ({"kind": "mdlm", "moe": {**MOE, "size": 3}}, "moe=.*num_experts"),
        ({"kind": "mdlm", "rope_scaling": {"factor": 2.0}}, "rope_scaling=.*original_length"),
        ({"kind": "mdlm", "tie_embeddings": "false"}, "tie_embeddings"),
    ],
)
def test_a_wrong_model_setting_is_refused_by_name_before_anything_is_allocated(change, setting):
    with pytest.raises(ConfigError, match=setting):
        ModelConfig(**{**GOOD, **change})


@pytest.mark.parametrize("change", [{"experts_per_token": 5}, {"num_experts": 0}, {"shared_size": 0}])
def test_a_wrong_mixture_setting_is_refused_by_name(change):
    with pytest.raises(ConfigError, match=f"moe.{next(iter(change))}"):
        MoEConfig(**{**MOE, **change})


@pytest.mark.parametrize(("kind", "change"), [
    ("ar", {"t_shape": "bell"}),
    ("ar", {"chunk_loss_weight": 0.1}), ("lanes", {"chunk_loss_weight": 0.1}), ("lanes", {"bias_rate": 0.1}),
    ("mdlm", {"bias_rate": 0.1}), ("dcdm", {"bias_rate": 0.1}),
])  # fmt: skip
def test_an_objective_without_effect_on_the_model_is_refused_by_name(kind, change):
    chunks = {**CHUNKS, "routing": "causal"} if kind == "dcdm" else CHUNKS if kind == "lanes" else {}
    with pytest.raises(ConfigError, match=next(iter(change))):
        ObjectiveConfig(**change).check_fits(ModelConfig(kind, **GOOD, **chunks))


@pytest.mark.parametrize("change", [
    {"t_min": 0.0}, {"t_min": 0.9, "t_max": 0.5}, {"full_mask_share": 1.5}, {"bias_rate": -1.0},
    {"t_shape": "flat"},
])  # fmt: skip
def test_a_wrong_objective_setting_is_refused_by_name(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        ObjectiveConfig(**change)


def test_block_size_need_not_divide_the_length():
    assert ModelConfig("bdlm", **GOOD, block_size=24, context_length=100).num_groups(100) == 5


def test_config_survives_a_round_trip_and_refuses_unknown_settings():
    for name in dcdm.presets():
        config = dcdm.preset(name)
        assert ModelConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="nmu_layers"):
        ModelConfig.from_dict({"kind": "mdlm", "nmu_layers": 3})


@pytest.mark.parametrize(
    ("kind", "later"),
    [
        (
            "lanes",
            {
                "lanes": (1, 2), "lane_weights": (3.0, 1.0), "drafts": 2, "attention_bias": True, "qk_norm": False,
                "rope_scaling": LLAMA_3,
            },
        ),
        ("bdlm", {"prompts": "ordinary", "shift": True, "hidden_token": 3, "family": "fast-dllm-v2"}),
        ("bdlm", {"predict": "left"}),
        ("ar", {"hide_specials": True}),
    ],
)  # fmt: skip
def test_settings_that_came_later_are_written_only_where_they_say_something(kind, later):
    """Folders of earlier versions have none of them, and digests of settings stay."""
    plain = ModelConfig(kind, **GOOD, block_size=4 if kind == "bdlm" else None)
    assert (later.keys() & plain.to_dict().keys()) <= {"lanes"}
    config = replace(plain, **later)
    assert config.to_dict().items() >= later.items()
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert "lanes" not in ModelConfig("ar", **GOOD).to_dict()


@pytest.mark.parametrize(
    "code",
    [
        "import dcdm; dcdm.preset(dcdm.presets()[0])",
        "import dcdm.decoding.config as decoding; decoding.settings()",
        "from dcdm.cli import main; main(['models', '--json'])",
    ],
)
def test_what_only_reads_settings_does_not_load_torch(code):
    code += "; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
