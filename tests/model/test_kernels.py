"""Blocks compiled for decoding give what the blocks give, for every kind, and are kept on disk."""

import shutil

import pytest
import torch

import dcdm
import tiny
from dcdm.config import ConfigError
from dcdm.io.verify import cache_errors
from dcdm.kinds import build
from dcdm.model import kernels, packing
from dcdm.model.masks import CLEAN, Slots

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or not packing.can_pack(torch.device("cpu")), reason="no g++, or no VNNI"
)
SHAPE = {"hidden_size": 32, "tie_embeddings": True}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Kernels that are compiled for one test serve the others."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def kept(cache, monkeypatch):
    monkeypatch.setenv("DCDM_CACHE", str(cache))


def model_of(name="ar", in_bytes=True, **changes):
    model = build(tiny.config(name, **(SHAPE | changes)), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1.1)
    if in_bytes:
        packing.pack(model, tied=model.config.tie_embeddings)
    return model.eval()


def without_kernels(monkeypatch):
    for user in ("engine", "batch"):
        monkeypatch.setattr(f"dcdm.decoding.{user}.prepare", lambda *_: None)


@torch.no_grad()
def passes(model, rows, queries, stored, fillers=False):
    """The states and the logits of `queries` new slots behind `stored` ones."""
    length = stored + queries
    tokens = torch.randint(tiny.LETTERS, (rows, length), generator=torch.Generator().manual_seed(rows))
    place = torch.arange(length).expand(rows, -1)
    chunk = place.clone()
    if fillers:
        chunk[0, 1] = chunk[-1, -1] = -1
    slots = Slots(place, chunk, torch.full_like(place, CLEAN), torch.zeros_like(place, dtype=torch.bool))
    held = model.new_cache(rows, length)
    model.extend(tokens[:, :stored], slots[:, :stored], chunk[:, :stored] >= 0, held, 1)
    passing = torch.zeros(rows, queries, dtype=torch.bool)
    new = model.extend(tokens[:, stored:], slots[:, stored:], passing, held, queries)
    real = chunk[:, stored:] >= 0
    return new[real], torch.stack([model.token_logits(state) for state in new[real][:, None]])


def equal_to_blocks(model, tolerance):
    for rows, queries, fillers in (
        (1, 1, False),
        (1, 3, False),
        (3, 1, True),
        (2, 3, True),
        (1, 8, False),
        (3, 4, True),
    ):
        model.kernels = None
        wanted = passes(model, rows, queries, 9, fillers)
        kernels.prepare(model, compile=True)
        assert model.kernels is not None
        for found, expected in zip(passes(model, rows, queries, 9, fillers), wanted, strict=True):
            finite = torch.isfinite(expected)
            assert float((found - expected)[finite].norm() / expected[finite].norm()) < tolerance, (rows, queries)


def test_compiled_blocks_of_bytes_are_the_blocks():
    equal_to_blocks(model_of(), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "qk_norm": False, "tie_embeddings": False}])
@pytest.mark.parametrize("in_bytes", [True, False])
def test_compiled_blocks_of_every_family_are_the_blocks(in_bytes, changes):
    equal_to_blocks(model_of("ar", in_bytes, **changes), 1e-3 if in_bytes else 1e-5)


@pytest.mark.parametrize("name", ["ar", "bdlm", "causal-contiguous", "mdlm"])
def test_compiled_decoding_of_a_batch_is_that_of_its_rows_and_cached_equals_uncached(name, monkeypatch):
    model = model_of(name)
    kernels.prepare(model, compile=True)
    assert cache_errors(model) == []
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    together = dcdm.generate(model, prompts, max_new_tokens=12)
    alone = [dcdm.generate(model, [one], max_new_tokens=12, index=[row]) for row, one in enumerate(prompts)]
    assert together.completions == [one.completions[0] for one in alone]
    model.kernels = None
    without_kernels(monkeypatch)
    assert dcdm.generate(model, prompts, max_new_tokens=12).completions == together.completions
    assert model.kernels is None


def test_compiled_decoding_in_the_papers_routing_is_that_of_the_blocks(monkeypatch):
    model = model_of("paper")
    without_kernels(monkeypatch)
    wanted = dcdm.generate(model, [[1, 2], [3]], max_new_tokens=12, cache="frozen").completions
    kernels.prepare(model, compile=True)
    assert dcdm.generate(model, [[1, 2], [3]], max_new_tokens=12, cache="frozen").completions == wanted


@pytest.mark.parametrize("drafts", [0, 2])
def test_compiled_lanes_and_drafts_write_what_the_blocks_write(drafts, monkeypatch):
    model = model_of("ar", kind="lanes", lanes=(1, 4), drafts=drafts)
    without_kernels(monkeypatch)

    def texts():
        return [
            dcdm.generate(model, [[1, 2]], max_new_tokens=16, lanes=lanes, drafts=drafts, temperature=t).completions
            for lanes in (1, 4) for t in (0.0, 1.0)
        ]  # fmt: skip

    wanted = texts()
    kernels.prepare(model, compile=True)
    assert texts() == wanted


def test_kernels_on_disk_are_taken_and_none_is_compiled_for_a_short_text(monkeypatch):
    kernels.prepare(model_of(), compile=True)
    monkeypatch.setattr(kernels.Program, "compile", lambda program: pytest.fail("compiled again"))
    other = model_of("bdlm")
    dcdm.generate(other, [[1]], max_new_tokens=4)
    assert other.kernels is not None
    wide = model_of(hidden_size=48)
    dcdm.generate(wide, [[1]], max_new_tokens=4)
    assert wide.kernels is None


def test_what_cannot_be_compiled_says_why(monkeypatch):
    with pytest.raises(ConfigError, match="mixtures of experts"):
        kernels.prepare(build(tiny.config("causal-moe")), compile=True)
    with pytest.raises(ConfigError, match="fp32 or int8"):
        kernels.prepare(build(tiny.config("ar"), dtype=torch.float64), compile=True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"install g\+\+"):
        kernels.prepare(model_of(), compile=True)
