"""No prediction may depend on the true value of the token it predicts."""

import pytest
import torch

import tiny
from dcdm.model import masks, reference
from dcdm.model.masks import Slots

LENGTH = 14
TOLERANCE = 1e-9


def perturbed(clean, position):
    other = clean.clone()
    other[:, position] = torch.where(clean[:, position] < tiny.LETTERS, (clean[:, position] + 5) % 20, 21)
    return other


def own_logit_changes(forward, clean, masked):
    """How many masked tokens can be seen in their own logits or, second, in any chunk id."""
    before = forward(clean, masked)
    logits = ids = 0
    for position in range(1, clean.shape[1]):
        after = forward(perturbed(clean, position), masked)
        rows = masked[:, position]
        difference = (after[0] - before[0])[rows, position].abs().amax(dim=-1)
        logits += int((difference > TOLERANCE).sum())
        ids += int((after[1] != before[1]).any(dim=-1)[rows].sum())
    return logits, ids


def predict(model):
    def forward(clean, masked):
        encoded = model.encode(clean, masked)
        return model.token_logits(encoded.states), encoded.chunk_ids

    return forward


@pytest.mark.parametrize("kind", tiny.DIFFUSION)
def test_a_masked_token_never_changes_its_own_logits(kind):
    model = tiny.model(kind, num_chunks=4) if kind not in ("mdlm", "bdlm") else tiny.model(kind)
    clean = tiny.tokens(4, LENGTH, padding=(0, 3))
    masked = tiny.noise(model, clean, share=0.6)
    logits, ids = own_logit_changes(predict(model), clean, masked)
    assert masked.sum() > 20
    assert logits == 0
    if kind in tiny.PAPER:
        assert ids == 0, "in the paper's routing no chunk id may depend on a masked token either"


@pytest.mark.parametrize("kind", [k for k in tiny.VALID if k not in ("mdlm",)])
def test_a_token_changes_no_id_and_no_logit_of_its_own_or_an_earlier_chunk(kind):
    model = tiny.model(kind, num_chunks=4) if kind != "bdlm" else tiny.model(kind)
    clean = tiny.tokens(3, LENGTH)
    ids = model.partition(clean).ids
    masked = tiny.noise(model, clean, share=0.6)
    before, _ = predict(model)(clean, masked)
    touched = 0
    for position in range(1, LENGTH):
        after, new = predict(model)(perturbed(clean, position), masked)
        for row in range(3):
            if not masked[row, position]:
                continue
            own = ids[row, position]
            settled = ids[row] <= own
            assert torch.equal(new[row][settled], ids[row][settled])
            assert (after - before)[row][settled & masked[row]].abs().max() <= TOLERANCE
            touched += int(not torch.allclose(after[row], before[row]))
    assert touched > 0, "later chunks must see the token, or this test proves nothing"


@pytest.mark.parametrize("kind", tiny.VALID)
def test_a_masked_token_of_a_later_chunk_reaches_no_earlier_logit_through_the_clean_stream(kind):
    model = tiny.model(kind)
    clean = tiny.tokens(2, LENGTH)
    ids = model.partition(clean).ids
    everything = model.position_masks(clean).free
    before, _ = predict(model)(clean, everything)
    last = ids == ids.amax(dim=-1, keepdim=True)
    changed = torch.where(last, (clean + 3) % 20, clean)
    after = model.token_logits(model.encode(changed, everything, chunk_ids=ids).states)
    assert (after - before).abs().max() <= TOLERANCE


def test_ar_logits_never_see_later_tokens():
    model = tiny.model("ar")
    clean = tiny.tokens(2, LENGTH)
    before = model(clean).logits
    for position in range(1, LENGTH):
        after = model(perturbed(clean, position)).logits
        assert torch.equal(after[:, :position], before[:, :position])


def leaky(model, reading):
    """The paper's network, written out, under one of four readings of its text, each of which leaks."""

    def everything(slots):
        return torch.ones(len(slots.chunk), LENGTH, LENGTH, dtype=torch.bool)

    def stage(tokens, slots, block_mask, soft_mask):
        h = model.embed_tokens(tokens)
        h, _ = reference.block(model.layers[0], h, slots, block_mask, model.config)
        return reference.chunking(model.chunking, h, soft_mask)

    def forward(clean, masked):
        length = clean.shape[1]
        z = clean.masked_fill(masked, model.config.mask_id)
        slots = Slots.of(torch.zeros_like(clean), masked)
        noise = masks.noise.dense(slots)
        if reading == "cross-stream with the self-loop modulo L":
            both = Slots.cat(slots, slots)  # ν and ℓ taken modulo L, one attention over z ⊕ x
            h, r = stage(torch.cat([z, clean], dim=1), both, masks.noise.dense(both), masks.noise.dense(both))
            r_z, r_x = r.chunk(2, dim=1)
        else:
            block = everything(slots) if reading == "full self-attention in stage 1" else noise
            soft = everything(slots) if reading == "soft path without the noise mask" else noise
            (h_z, r_z), (h_x, r_x) = (stage(stream, slots, block, soft) for stream in (z, clean))
            h = torch.cat([h_z, h_x], dim=1)
        ids = model.chunking.assign(r_x if reading == "ids from the clean stream" else r_z)
        second = reference.Pass(model, masks.dual_stream, masks.dual_stream_slots(ids))
        return model.token_logits(model.norm(second.run(h, first=1)[:, :length])), ids

    return forward


@pytest.mark.parametrize(
    "reading",
    [
        "ids from the clean stream",
        "cross-stream with the self-loop modulo L",
        "soft path without the noise mask",
        "full self-attention in stage 1",
    ],
)
def test_each_leaking_reading_of_the_paper_is_caught(reading):
    model = tiny.model("paper", num_chunks=4)
    clean = tiny.tokens(4, LENGTH)
    masked = tiny.noise(model, clean, share=0.6)
    logits, _ = own_logit_changes(leaky(model, reading), clean, masked)
    assert logits > 0


def test_the_leak_harness_finds_nothing_where_every_reading_is_right():
    model = tiny.model("paper", num_chunks=4)
    clean = tiny.tokens(4, LENGTH)
    masked = tiny.noise(model, clean, share=0.6)
    assert own_logit_changes(leaky(model, "none"), clean, masked) == (0, 0)
    literal, ids = leaky(model, "none")(clean, masked)
    built, built_ids = predict(model)(clean, masked)
    assert torch.equal(ids, built_ids)
    torch.testing.assert_close(literal[masked], built[masked])
