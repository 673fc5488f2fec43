"""Weights in bytes: the same network up to 1e-3, in every way to decode; and folders that hold them."""

import copy

import pytest
import torch

import dcdm
import tiny
from dcdm.cli import main
from dcdm.io.load import load_model
from dcdm.io.verify import cache_errors
from dcdm.kinds import build
from dcdm.lanes.model import LaneModel
from dcdm.model import packing
from dcdm.model.packing import Matrix, dequantised, quantised

pytestmark = pytest.mark.skipif(not packing.can_pack(torch.device("cpu")), reason="this CPU has no VNNI")


def pair(name="ar", **changes):
    """A model in bytes, and one in fp32 with the weights that the bytes stand for."""
    config = tiny.config(name, hidden_size=32, **changes)
    model = build(config, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    packed = copy.deepcopy(model)
    packing.pack(packed, tied=config.tie_embeddings)
    model.load_state_dict(dequantised(packed.state_dict()))
    return packed.eval(), model.eval()


@torch.no_grad()
def apart(one, other):
    finite = torch.isfinite(other)
    return float((one - other)[finite].norm() / other[finite].norm())


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_a_product_with_bytes_is_that_of_what_they_stand_for(rows):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 40, generator=generator) * torch.logspace(-3, 3, 96)[:, None]
    numbers, scale = quantised(weight)
    assert ((numbers * scale[:, None] - weight).abs() <= 0.51 * scale[:, None]).all()
    x = torch.randn(rows, 40, generator=generator)
    x[0, 3] = 100.0  # one large activation does not make the others coarse
    x[-1] = 0 if rows > 1 else x[-1]
    found, wanted = Matrix(numbers, scale)(x), x @ (numbers * scale[:, None]).T
    assert apart(found / scale, wanted / scale) < 1e-4
    some = 1 if rows <= packing.FEW_ROWS else rows // 2
    torch.testing.assert_close(Matrix(numbers, scale)(x[:some]), found[:some], rtol=0, atol=0)


def test_bytes_of_what_bytes_stand_for_are_the_same_bytes():
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    numbers, scale = quantised(weight)
    again = quantised(numbers * scale[:, None])
    torch.testing.assert_close(
        again, (numbers, torch.where(torch.arange(64) == 3, again[1], scale)), rtol=0, atol=0
    )
    assert torch.equal(Matrix(numbers, scale).numbers, numbers)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ar", {}), ("ar", {"tie_embeddings": False, "attention_bias": True, "qk_norm": False}), ("mdlm", {}),
        ("bdlm", {}), ("causal", {}), ("paper", {}), ("causal-moe", {}), ("bdlm-shifted", {}),
    ],
)  # fmt: skip
def test_a_network_in_bytes_is_the_one_they_stand_for(name, changes):
    packed, plain = pair(name, **changes)
    tokens = torch.randint(tiny.LETTERS, (2, 16), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = plain.config.bos_id
    masked = torch.zeros_like(tokens, dtype=torch.bool)
    masked[:, 5:] = plain.config.kind != "ar"
    masked &= plain.position_masks(tokens).free
    ids = None
    if plain.config.has_chunking:  # a difference of 1e-5 can move a token to another chunk
        ids = plain(tokens, masked).chunk_ids
    wanted = plain(tokens, masked, chunk_ids=ids).logits
    assert apart(packed(tokens, masked, chunk_ids=ids).logits, wanted) < 1e-3
    assert packed.weights_type == "int8"
    assert not any(isinstance(child, torch.nn.Embedding) for child in packed.modules())


@pytest.mark.parametrize("name", ["ar", "bdlm", "causal-contiguous", "mdlm"])
def test_in_bytes_cached_equals_uncached_and_a_batch_its_rows(name):
    packed, _ = pair(name)
    assert cache_errors(packed) == []
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    together = dcdm.generate(packed, prompts, max_new_tokens=12)
    alone = [dcdm.generate(packed, [one], max_new_tokens=12, index=[row]) for row, one in enumerate(prompts)]
    assert together.completions == [one.completions[0] for one in alone]
    uncached = dcdm.generate(packed, prompts, max_new_tokens=12, cache="none")
    assert uncached.completions == together.completions


@pytest.mark.parametrize(("drafts", "draft_vocab"), [(0, 0), (2, 0), (2, 7)])
def test_lanes_and_drafts_in_bytes(drafts, draft_vocab):
    packed, _ = pair("ar", kind="lanes", lanes=(1, 4), drafts=drafts, draft_vocab=draft_vocab)
    assert isinstance(packed, LaneModel)
    assert cache_errors(packed) == []
    for lanes in (1, 4):
        plain = dcdm.generate(packed, [[1, 2]], max_new_tokens=16, lanes=lanes, drafts=0)
        assert len(plain.completions[0]) == 16
        if drafts and lanes == 1:
            drafted = dcdm.generate(packed, [[1, 2]], max_new_tokens=16, lanes=1, drafts=drafts, temperature=0.0)
            greedy = dcdm.generate(packed, [[1, 2]], max_new_tokens=16, lanes=1, drafts=0, temperature=0.0)
            assert drafted.completions == greedy.completions


def test_a_folder_of_bytes_is_verified_loaded_as_such_and_exported_back(tmp_path, capsys):
    source = tiny.exported("bdlm", tmp_path / "model")
    main(["export", str(source), str(tmp_path / "bytes"), "--weights", "int8"])
    main(["verify", str(tmp_path / "bytes")])
    assert "FAIL" not in capsys.readouterr().out
    assert (tmp_path / "bytes/model.safetensors").stat().st_size < 0.5 * (
        source / "model.safetensors"
    ).stat().st_size
    stored, _ = load_model(tmp_path / "bytes")
    made, _ = load_model(source, dtype=torch.int8)
    assert stored.weights_type == "int8"
    for name, value in made.state_dict().items():
        assert torch.equal(value, stored.state_dict()[name]), name
    main(["export", str(tmp_path / "bytes"), str(tmp_path / "wide")])
    wide, _ = load_model(tmp_path / "wide")
    assert wide.weights_type == "float32"
    tokens = tiny.tokens(2, 12, symbols=257)
    masked = wide.position_masks(tokens).free & (tokens > 40)
    assert apart(stored(tokens, masked).logits, wide(tokens, masked).logits) < 1e-3
    assert load_model(tmp_path / "bytes", dtype=torch.bfloat16)[0].weights_type == "bfloat16"
    main(["sample", str(source), "--prompt", "a", "--weights", "int8", "--length", "4"])


def test_transformers_is_not_given_bytes_as_weights(tmp_path):
    from dcdm import hub

    main(
        [
            "export",
            str(tiny.exported("ar", tmp_path / "model")),
            str(tmp_path / "b"),
            "--weights",
            "int8",
        ]
    )
    with pytest.raises(ValueError, match="export it with fp32"):
        hub.DCDMForCausalLM.from_pretrained(tmp_path / "b")


def test_without_vnni_a_folder_of_bytes_is_fp32_and_asking_for_bytes_is_refused(tmp_path, monkeypatch):
    source = tiny.exported("ar", tmp_path / "model")
    main(["export", str(source), str(tmp_path / "bytes"), "--weights", "int8"])
    monkeypatch.setattr(packing, "can_pack", lambda device: False)
    assert load_model(tmp_path / "bytes")[0].weights_type == "float32"
    with pytest.raises(dcdm.ConfigError, match="VNNI"):
        load_model(source, dtype=torch.int8)
