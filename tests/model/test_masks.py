import runpy
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from dcdm.model import masks
from draw_masks import draw_masks

patterns = st.lists(st.tuples(st.integers(-1, 4), st.booleans()), min_size=1, max_size=9)


@given(patterns)
def test_noise_mask_is_the_papers_formula(pattern):
    nu = torch.tensor([m for _, m in pattern])
    mask = masks.noise_mask(nu)
    for row in range(len(nu)):
        for m in range(len(nu)):
            assert mask[row, m] == (not nu[m] or (nu[row] and row == m))


@given(patterns)
def test_chunk_causal_mask_is_the_papers_formula_and_leaves_padding_out(pattern):
    c = torch.tensor([chunk for chunk, _ in pattern])
    mask = masks.chunk_causal_mask(c)
    for row in range(len(c)):
        for m in range(len(c)):
            assert mask[row, m] == bool(c[m] <= c[row] and c[m] >= 0)


@given(patterns)
def test_dual_stream_mask_is_the_papers_formula_and_leaves_padding_out(pattern):
    c = torch.tensor([chunk for chunk, _ in pattern])
    length = len(c)
    mask = masks.dual_stream_mask(c)
    assert mask.shape == (2 * length, 2 * length)
    for row in range(2 * length):
        for m in range(2 * length):
            noisy_q, noisy_k = row < length, m < length
            cq, ck = c[row % length], c[m % length]
            allowed = (
                (noisy_q and noisy_k and cq == ck)
                or (noisy_q and not noisy_k and cq > ck)
                or (not noisy_q and not noisy_k and cq >= ck)
            )
            assert mask[row, m] == bool(allowed and cq >= 0 and ck >= 0)


def test_a_mask_of_permuted_slots_is_the_permuted_mask():
    ids = torch.tensor([0, 3, 1, 2, 2, -1, 1])
    slots = masks.dual_stream_slots(ids)
    order = torch.randperm(14, generator=torch.Generator().manual_seed(0))
    expected = masks.dual_stream.dense(slots)[order][:, order]
    assert torch.equal(masks.dual_stream.dense(slots.gather(order)), expected)


def test_clean_never_reads_noisy_and_blocks_of_one_have_the_conditioning_sets_of_ar():
    ids = torch.arange(6)  # BOS, then blocks of one
    mask = masks.dual_stream_mask(ids)
    assert not mask[6:, :6].any()
    assert torch.equal(mask[:6, 6:], torch.ones(6, 6).tril(-1).bool())
    assert torch.equal(mask[:6, :6], torch.eye(6).bool())


def test_every_mask_draws_itself(tmp_path):
    paths = draw_masks(str(tmp_path))
    assert len(paths) == 6
    assert all(Path(path).read_bytes()[:4] == b"\x89PNG" for path in paths)


def test_run_as_a_module_it_prints_the_three_masks_of_the_paper(capsys):
    runpy.run_module("dcdm.model.masks", run_name="__main__")
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("noise_mask", "chunk_causal_mask", "dual_stream_mask"))
