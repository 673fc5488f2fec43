import math

import pytest
import torch

import dcdm
import tiny
from dcdm.config import ConfigError, ObjectiveConfig
from dcdm.decoding import routes
from dcdm.diffusion import noise
from dcdm.diffusion.objectives import Batch, draw, loss, with_prompts
from dcdm.keys import Key
from dcdm.model.chunking import max_violation

PLAIN = ObjectiveConfig(prompt_share=0.0)


def test_levels_are_stratified_over_the_global_batch_and_permuted():
    rows = torch.arange(8)
    t = noise.levels(Key(0).fold("noise", 3), rows, 8, 5, ObjectiveConfig(t_min=1e-9))
    assert sorted((t.flatten() * 40).long().tolist()) == list(range(40))
    again = noise.levels(Key(0).fold("noise", 4), rows, 8, 5, ObjectiveConfig(t_min=1e-9))
    assert not torch.equal((t * 40).long(), (again * 40).long())
    # no group and no row is tied to a level: over many steps the means are those of a uniform draw
    many = torch.stack([noise.levels(Key(1).fold("n", s), rows, 8, 5, PLAIN) for s in range(400)])
    assert (many.mean(dim=0) - 0.5).abs().max() < 4 * math.sqrt(1 / 12 / 400)


def test_levels_keep_to_their_range_and_a_share_of_the_groups_is_fully_masked():
    t = noise.levels(Key(0), torch.arange(64), 64, 16, ObjectiveConfig(t_min=0.3, t_max=0.8))
    assert t.min() >= 0.3
    assert t.max() <= 0.8
    t = noise.levels(Key(0), torch.arange(64), 64, 16, ObjectiveConfig(t_max=0.9, full_mask_share=0.25))
    assert (t == 1).double().mean().item() == pytest.approx(0.25, abs=0.05)


def test_levels_in_a_bell_keep_to_their_range_and_are_rare_at_its_ends():
    t = noise.levels(Key(0), torch.arange(64), 64, 64, ObjectiveConfig(t_min=0.2, t_max=0.8, t_shape="bell"))
    for x in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0):  # the share of levels below a part x of the range
        assert (t <= 0.2 + 0.6 * x).double().mean().item() == pytest.approx(3 * x**2 - 2 * x**3, abs=0.001)


@pytest.mark.parametrize("kind", tiny.DIFFUSION)
def test_splitting_a_batch_over_processes_changes_no_noise_and_no_gradient(kind):
    model = tiny.model(kind, seed=1)
    clean = tiny.tokens(6, 12, padding=(0, 4))
    index = torch.arange(100, 106)
    whole = Batch(clean, index=index)
    parts = [Batch(clean[at : at + 2], rows=torch.arange(at, at + 2), num_rows=6, index=index[at : at + 2])
             for at in (0, 2, 4)]  # fmt: skip
    key, settings = Key(7).fold("noise", 0), ObjectiveConfig(prompt_share=0.5)
    together = draw(model, with_prompts(model, whole, key, settings), key, settings)
    apart = [draw(model, with_prompts(model, part, key, settings), key, settings) for part in parts]
    for field in ("masked", "weight", "free"):
        assert torch.equal(getattr(together, field), torch.cat([getattr(p, field) for p in apart]))
    results = [loss(model, part, key, settings) for part in parts]
    nll = sum(r.nll * r.tokens for r in results) / sum(r.tokens for r in results)
    torch.testing.assert_close(nll, loss(model, whole, key, settings).nll)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_prompt_is_never_masked_and_padding_is_never_counted(kind):
    model = tiny.model(kind)
    clean = tiny.tokens(3, 10, padding=(4,))
    prompt = torch.zeros_like(clean, dtype=torch.bool)
    prompt[:, 2:5] = True
    result = loss(model, Batch(clean, prompt), 0, PLAIN)
    assert result.tokens == 3 * 9 - 3 * 3 - 4
    if kind != "ar":
        sample = draw(model, Batch(clean, prompt), Key(0), ObjectiveConfig(prompt_share=0.0, full_mask_share=1.0))
        assert torch.equal(sample.masked, sample.free)
        assert not (sample.masked & prompt).any()
        assert not sample.masked[clean >= tiny.LETTERS].any()


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_more_padding_changes_nothing(kind):
    model = tiny.model(kind)
    clean = tiny.tokens(2, 9)
    padded = torch.cat([clean, torch.full((2, 4), model.config.pad_id)], dim=1)
    masked = tiny.noise(model, clean)
    wide = torch.cat([masked, torch.zeros(2, 4, dtype=torch.bool)], dim=1)
    short, long = model(clean, masked), model(padded, wide)
    torch.testing.assert_close(long.logits[:, :9], short.logits)
    if kind != "ar":
        assert torch.equal(long.chunk_ids[:, :9], short.chunk_ids)
        assert (long.chunk_ids[:, 9:] == -1).all()


def test_blanks_come_at_their_share_are_short_and_take_the_place_of_other_prompts():
    free = torch.ones(2000, 64, dtype=torch.bool)
    free[:, 0] = False
    around = noise.visible_around_blanks(Key(0), torch.arange(2000), free, 0.3)
    rows = around.any(dim=1)
    assert 0.25 < rows.float().mean() < 0.35
    assert not around[:, 0].any()
    blanks = (free & ~around)[rows]
    assert blanks.any(dim=1).all()
    assert blanks.sum(dim=1).float().mean() < 32
    lengths = [len(run) for row in blanks.tolist() for run in "".join("x" if b else " " for b in row).split()]
    assert min(lengths) == 1
    assert sorted(lengths)[len(lengths) // 2] < 12
    model, batch = tiny.model("bdlm", 60), Batch(tiny.tokens(8, 200, 60))
    both = ObjectiveConfig(prompt_share=1.0, blank_share=1.0)
    only = ObjectiveConfig(prompt_share=0.0, blank_share=1.0)
    one, other = (with_prompts(model, batch, Key(0), how).prompt for how in (both, only))
    assert torch.equal(one, other)
    with pytest.raises(ConfigError, match="blank_share"):
        only.check_fits(tiny.config("ar"))


def test_random_visible_spans_come_at_their_share_and_always_leave_something_free():
    free = torch.ones(2000, 16, dtype=torch.bool)
    free[:, 0] = False
    spans = noise.visible_spans(Key(0), torch.arange(2000), free, 0.2)
    assert not spans[:, 0].any()
    assert spans.any(dim=1).double().mean().item() == pytest.approx(0.2, abs=0.03)
    assert (free & ~spans).any(dim=1).all()
    prefixes = (spans[:, 1] & (spans[:, 1:].long().diff(dim=1) <= 0).all(dim=1)).double().mean()
    assert 0.08 < prefixes < 0.15
    assert not noise.visible_spans(Key(0), torch.arange(10), free[:10], 0.0).any()
    assert (free[:50] & ~noise.visible_spans(Key(0), torch.arange(50), free[:50], 1.0)).any(dim=1).all()


@pytest.mark.parametrize("kind", tiny.VALID)
def test_the_training_objective_is_an_unbiased_estimate_of_the_scored_bound(kind):
    model = tiny.model(kind, symbols=2)
    clean = tiny.tokens(1, 5, symbols=2).repeat(6000, 1)
    index = torch.zeros(6000, dtype=torch.long)
    bound = dcdm.score(model, clean[:1], samples="all").nats.item() / 4
    settings = ObjectiveConfig(t_min=1e-6, prompt_share=0.0)
    sample = draw(model, Batch(clean, index=index), Key(0), settings)
    ids = sample.ids
    states = model.encode(clean, sample.masked, chunk_ids=ids).states
    nll = -model.token_logits(states).log_softmax(-1).gather(-1, clean.clamp(max=1)[..., None]).squeeze(-1)
    # 1/t has no finite variance near 0, so compare a trimmed version: tokens masked at t ≥ 0.02
    cut = sample.weight <= 50
    trimmed = ((nll * sample.weight) * cut).sum(dim=1) / 4
    error = trimmed.std() / math.sqrt(6000)
    assert abs(trimmed.mean() - bound) < 5 * error + 0.02 * bound
    total = loss(model, Batch(clean[:64], index=index[:64]), Key(3), settings)
    assert total.tokens == 64 * 4


@pytest.mark.parametrize("kind", tiny.VALID)
def test_training_on_fully_masked_chunks_is_the_one_forward_per_chunk_likelihood(kind):
    model = tiny.model(kind)
    clean = tiny.tokens(3, 10, padding=(2,))
    full = loss(model, Batch(clean), 0, ObjectiveConfig(prompt_share=0.0, full_mask_share=1.0))
    exact = dcdm.score(model, clean, "trajectory")
    assert full.nll.item() == pytest.approx(exact.per_token, abs=1e-9)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_every_parameter_that_the_kind_uses_gets_a_gradient(kind):
    model = tiny.model(kind, scale=3.0)
    loss(model, Batch(tiny.tokens(8, 16)), 0, PLAIN).total.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_balance_terms_are_on_for_paper_routing_and_off_where_chunks_are_balanced_by_construction():
    batch = Batch(tiny.tokens(4, 12))
    paper = loss(tiny.model("paper"), batch, 0)
    assert paper.total.item() == pytest.approx((paper.nll + 1e-2 * paper.chunk_loss).item())
    assert paper.counts.sum() == 4 * 11  # without BOS
    causal = loss(tiny.model("causal"), batch, 0)
    assert causal.chunk_loss is None
    assert causal.total.item() == pytest.approx(causal.nll.item())
    asked = loss(tiny.model("causal"), batch, 0, ObjectiveConfig(chunk_loss_weight=0.5))
    assert asked.total.item() == pytest.approx((asked.nll + 0.5 * asked.chunk_loss).item())
    mixture = loss(tiny.model("paper-moe"), batch, 0)
    expected = mixture.nll + 1e-2 * mixture.chunk_loss + 1e-2 * mixture.moe_loss
    assert mixture.total.item() == pytest.approx(expected.item())


def test_loss_takes_a_key_a_seed_or_a_generator():
    model, batch = tiny.model("mdlm"), Batch(tiny.tokens(4, 12))
    assert loss(model, batch, 5).total == loss(model, batch, Key(5)).total
    generator = torch.Generator().manual_seed(5)
    first, second = loss(model, batch, generator).total, loss(model, batch, generator).total
    assert first != second
    assert loss(model, batch, torch.Generator().manual_seed(5)).total == first


# identities between the kinds


def same_weights(target, source):
    target.load_state_dict({k: v for k, v in source.state_dict().items() if k in target.state_dict()}, strict=False)
    return target


def test_bdlm_with_one_block_is_mdlm():
    mdlm = tiny.model("mdlm")
    bdlm = same_weights(tiny.model("bdlm", block_size=11, seed=5), mdlm)
    clean = tiny.tokens(3, 12)
    masked = tiny.noise(mdlm, clean)
    torch.testing.assert_close(bdlm(clean, masked).logits, mdlm(clean, masked).logits, atol=1e-5, rtol=0)
    for estimator in ("bound", "trajectory"):
        torch.testing.assert_close(
            dcdm.score(bdlm, clean, estimator).nats, dcdm.score(mdlm, clean, estimator).nats, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("kind", ["causal-contiguous", "positional"])
def test_contiguous_causal_chunks_with_the_chunking_attention_silenced_are_bdlm(kind):
    bdlm = tiny.model("bdlm", block_size=4)
    causal = same_weights(tiny.model(kind, num_chunks=3, seed=5, chunk_out_init_std=0.0), bdlm)
    clean = tiny.tokens(3, 13)
    masked = tiny.noise(bdlm, clean)
    one, other = causal(clean, masked), bdlm(clean, masked)
    assert torch.equal(one.chunk_ids, other.chunk_ids)
    torch.testing.assert_close(one.logits, other.logits, atol=1e-5, rtol=0)
    with torch.no_grad():
        causal.chunking.o_proj.weight.normal_(std=0.3)
    assert not torch.allclose(causal(clean, masked).logits, other.logits, atol=1e-3)


def test_bound_of_blocks_of_one_equals_a_loop_that_predicts_one_position_at_a_time():
    model = tiny.model("bdlm", block_size=1)
    clean = tiny.tokens(3, 9)
    nats = torch.zeros(3, dtype=torch.float64)
    for position in range(1, 9):
        z = clean[:, : position + 1].clone()
        z[:, position] = model.config.mask_id
        states = model.denoise(z, torch.arange(position + 1).expand(3, -1))
        log_p = model.token_logits(states[:, position]).log_softmax(-1)
        nats -= log_p.gather(-1, clean[:, position, None]).squeeze(-1).detach()
    scored = dcdm.score(model, clean, "bound", samples=1)
    torch.testing.assert_close(scored.nats, nats, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", tiny.DIFFUSION)
def test_the_decoding_pass_equals_the_training_pass_on_the_active_chunk(kind):
    model = tiny.model(kind)
    clean = tiny.tokens(3, 11, padding=(2,))
    positions = model.position_masks(clean)
    if kind in tiny.PAPER:
        ids = torch.where(
            positions.real, torch.randint(0, 3, clean.shape, generator=torch.Generator().manual_seed(2)), -1
        )
        ids[:, 0] = 0
    else:
        ids = model.partition(clean).ids
    for active in range(1, int(ids.max()) + 1):
        inside = (ids == active) & tiny.noise(model, clean, 0.6)
        z = clean.masked_fill(inside | (ids > active), model.config.mask_id)
        masked = z == model.config.mask_id
        dual = model.encode(clean, masked, chunk_ids=ids).states
        torch.testing.assert_close(model.denoise(z, ids)[inside], dual[inside], atol=1e-9, rtol=0)
        if kind in tiny.VALID:  # of a partly filled canvas; its ids follow from what is revealed
            states = model.denoise(z, routes.current_ids(model, z))
            torch.testing.assert_close(states[inside], dual[inside], atol=1e-9, rtol=0)


def test_a_loop_of_ones_own_balances_without_another_call():
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, (16, 32)).sort(dim=1).values
    violations = {}
    for rate in (0.0, 0.05):
        model = tiny.model("paper", seed=3).float()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        settings = ObjectiveConfig(bias_rate=rate, chunk_loss_weight=0.0)
        for step in range(60):
            result = loss(model, tokens, step, settings)
            optimizer.zero_grad()
            result.total.backward()
            optimizer.step()
        violations[rate] = float(max_violation(result.counts.sum(dim=0)))
        assert bool(model.chunking.balance_bias.any()) == (rate > 0)
    assert violations[0.05] < 0.5 * violations[0.0]


def test_evaluating_a_loss_leaves_the_balance_bias_alone():
    model = tiny.model("paper")
    with torch.no_grad():
        loss(model, tiny.tokens(4, 16), 0)
    loss(model, tiny.tokens(4, 16), 0)
    assert not model.chunking.balance_bias.any()


def test_a_model_built_by_name_trains_with_its_presets_noise():
    model = dcdm.build("dcdm-debug", seed=0)
    assert model.objective == dcdm.ObjectiveConfig(t_min=0.3, t_max=1.0)
    tokens = torch.randint(0, 250, (2, 16))
    assert loss(model, tokens, 0).total == loss(model, tokens, 0, model.objective).total
    assert loss(model, tokens, 0).total != loss(model, tokens, 0, ObjectiveConfig()).total
    with pytest.raises(dcdm.ConfigError, match="did you mean dcdm-debug"):
        dcdm.build("dcdm-debg")
