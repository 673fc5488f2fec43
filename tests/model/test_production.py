"""The production path equals the literal one: outputs and gradients, every kind, any shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from dcdm.config import ConfigError, ObjectiveConfig
from dcdm.diffusion.objectives import Batch, loss
from dcdm.keys import Key
from dcdm.model import layout, masks, reference
from dcdm.model.attention import AttentionPlan, choose_backend, tiled_attention, tiles_by_autograd
from dcdm.model.chunking import subspace_mixture
from dcdm.model.layout import chunk_sorted, dual_stream, visible_first
from dcdm.model.products import token_nll, weighted_nll

CLOSE = {"atol": 1e-9, "rtol": 1e-7}


@st.composite
def canvases(draw):
    """A model's kind, clean tokens with padding, a prompt and a noise pattern."""
    kind = draw(st.sampled_from(tiny.DIFFUSION))
    rows, length = draw(st.integers(1, 3)), draw(st.integers(2, 19))
    seed = draw(st.integers(0, 10_000))
    padding = tuple(draw(st.integers(0, min(4, length - 2))) for _ in range(rows))
    clean = tiny.tokens(rows, length, seed=seed, padding=padding)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.rand(clean.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3]))
    share = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    masked = torch.rand(clean.shape, generator=generator) < share
    return kind, draw(st.integers(1, 5)), clean, prompt, masked


def make(kind, num_chunks):
    return tiny.model(kind, **({"num_chunks": num_chunks} if tiny.KINDS[kind]["kind"] == "dcdm" else {}))


def gradients(model, value):
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() if p.grad is not None else None for name, p in model.named_parameters()}


def assert_same_gradients(one, other):
    for name in one:
        a, b = (g[name] if g[name] is not None else torch.zeros(()) for g in (one, other))
        torch.testing.assert_close(
            a.expand_as(b) if a.ndim == 0 else a, b.expand_as(a) if b.ndim == 0 else b, **CLOSE
        )


@pytest.fixture(params=[True, False], ids=["tiles", "one tile"])
def many_tiles(request, monkeypatch):
    """Small tensors would always take one dense tile: make tiles cheap, and chunks large enough for their own."""
    if request.param:
        monkeypatch.setattr(layout, "CALL_COST", 0)
        monkeypatch.setattr(layout, "SMALLEST", 3)
        monkeypatch.setattr(layout, "ROW_BLOCK", 4)
    return request.param


@pytest.mark.parametrize("tiles", [True, False], ids=["tiles", "one tile"])
@settings(max_examples=2 * settings.default.max_examples)
@given(canvas=canvases())
def test_outputs_and_gradients_equal_the_literal_path(tiles, canvas):
    kind, num_chunks, clean, prompt, masked = canvas
    with pytest.MonkeyPatch.context() as patch:
        if tiles:
            patch.setattr(layout, "CALL_COST", 0)
            patch.setattr(layout, "SMALLEST", 3)
        model = make(kind, num_chunks)
        masked = masked & model.position_masks(clean, prompt).free
        fast, slow = model(clean, masked, prompt=prompt), reference.forward(model, clean, masked, prompt=prompt)
        assert torch.equal(fast.chunk_ids, slow.chunk_ids)
        torch.testing.assert_close(fast.logits, slow.logits, **CLOSE)
        if slow.router_scores is not None:
            where = fast.chunk_ids >= 1
            torch.testing.assert_close(fast.router_scores[where], slow.router_scores[where], **CLOSE)
        if masked.any():
            weight = torch.rand(
                fast.logits[masked][:, :-3].shape, generator=torch.Generator().manual_seed(1)
            ).double()
            same = [gradients(model, (out.logits[masked][:, :-3] * weight).sum()) for out in (fast, slow)]
            assert_same_gradients(*same)


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("backend", ["sdpa-tiled", "sdpa", "reference"])
def test_the_training_loss_and_its_gradient_equal_the_literal_ones(kind, backend, many_tiles):
    model = tiny.model(kind)
    model.backend = backend
    clean = tiny.tokens(4, 21, padding=(0, 5, 2))
    batch, objective = Batch(clean), ObjectiveConfig(prompt_share=0.5)
    fast = loss(model, batch, Key(3), objective)
    if kind == "ar":
        encoded = reference.encode(model, clean)
        counted = model.position_masks(clean).free[:, 1:]
        nll = -model.token_logits(encoded.states[:, :-1]).log_softmax(-1).gather(-1, clean[:, 1:, None])
        slow = nll.squeeze(-1)[counted].mean()
    else:
        literal = tiny.model(kind)
        literal.load_state_dict(model.state_dict())
        literal.encode = lambda *a, **k: reference.encode(literal, *a, **k)
        slow = loss(literal, batch, Key(3), objective).total
    torch.testing.assert_close(fast.total, slow, **CLOSE)
    if kind == "ar":
        assert_same_gradients(gradients(model, fast.total), gradients(model, slow))
    else:
        assert_same_gradients(gradients(model, fast.total), gradients(literal, slow))


@pytest.mark.parametrize("kind", ["mdlm", "bdlm", "paper", "causal", "causal-moe"])
def test_the_decoding_pass_equals_the_literal_one(kind, many_tiles):
    model = tiny.model(kind)
    clean = tiny.tokens(3, 17, padding=(4,))
    ids = torch.randint(0, 4, clean.shape, generator=torch.Generator().manual_seed(0))
    ids = torch.where(clean == model.config.pad_id, -1, ids)
    z = clean.masked_fill((ids == 2) | (ids == 3), model.config.mask_id)
    states = model.denoise(z, ids)
    only = reference.Pass(model, masks.chunk_causal, masks.Slots.of(ids))
    if kind == "paper":
        h, _ = reference.stage_1(model, z, z == model.config.mask_id, ids >= 0)
        expected = model.norm(only.run(h, first=1))
    else:
        expected = model.norm(only.run(model.embed_tokens(z)))
    torch.testing.assert_close(states[ids >= 0], expected[ids >= 0], **CLOSE)


@pytest.mark.parametrize("kind", ["causal", "causal-strided", "causal-moe"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_accumulated_rounds_equal_rounds_that_start_over(kind, kv_heads):
    model = tiny.model(kind, num_chunks=5, num_kv_heads=kv_heads)
    clean = tiny.tokens(4, 23, padding=(0, 9))
    prompt = torch.zeros_like(clean, dtype=torch.bool)
    prompt[2, 4:15] = True
    partition = model.partition(clean, prompt)
    assert torch.equal(partition.ids, reference.partition(model, clean, prompt))
    # the scores too, round by round
    for k in range(1, 6):
        shown = partition.ids < k
        literal = reference.router_scores(model, clean.masked_fill(~shown, model.config.mask_id), clean != 21)
        members = partition.ids == k
        torch.testing.assert_close(partition.scores[members], literal[members], **CLOSE)


def test_a_prior_that_decides_alone_needs_no_rounds(monkeypatch):
    clean = tiny.tokens(2, 12)
    for kind in ("causal-contiguous", "causal-strided"):
        model = tiny.model(kind, num_chunks=4, prior_weight=float("inf"))
        expected = reference.partition(model, clean)
        monkeypatch.setattr("dcdm.model.transformer.IncrementalRouter", None)
        assert torch.equal(model.partition(clean).ids, expected)
        monkeypatch.undo()


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=14), st.booleans())
def test_tiles_cover_exactly_the_live_pairs(ids, with_masks):
    """Every allowed pair lies in one tile, and a tile without a mask holds nothing else."""
    ids = torch.tensor([ids, ids[::-1]])
    noise = torch.rand(2, ids.shape[1], generator=torch.Generator().manual_seed(0)) < 0.5
    for mask, place in (
        (masks.dual_stream, dual_stream(ids, noise & (ids >= 1))),
        (masks.chunk_causal, chunk_sorted(ids, noise)),
        (masks.noise, visible_first(ids >= 0, noise & (ids >= 0))),
        (masks.causal, chunk_sorted(torch.where(ids >= 0, 0, -1).sort(descending=True).values, noise)),
    ):
        plan = AttentionPlan.of(mask, place.slots, "sdpa-tiled")
        expected = plan.dense
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "CALL_COST", 0)
            patch.setattr(layout, "SMALLEST", 3 if with_masks else 1)
            patch.setattr(layout, "ROW_BLOCK", 4)
            tiles = plan.tiles
        seen = torch.zeros_like(expected, dtype=torch.int)
        for tile in tiles:
            allowed = plan.tile_mask(tile) if tile.masked else torch.ones(1, 1, 1, dtype=torch.bool)
            part = torch.zeros_like(expected[tile.r0 : tile.r1, tile.q0 : tile.q1])
            columns = [*range(tile.a0, tile.a1), *range(tile.b0, tile.b1)]
            part[..., columns] = allowed.expand(tile.r1 - tile.r0, tile.q1 - tile.q0, len(columns))
            seen[tile.r0 : tile.r1, tile.q0 : tile.q1] += part
            if tile.own:
                for row in range(tile.q0, tile.q1):
                    seen[tile.r0 : tile.r1, row, row] += 1
        assert torch.equal(seen, expected.int())


def test_slots_that_nobody_reads_are_left_out():
    ids = torch.tensor([[0, 1, 1, 2, 2, 3, -1]])
    place = dual_stream(ids, torch.zeros(1, 7, dtype=torch.bool))
    streams = place.slots.stream[0].tolist()
    assert place.num_noisy == 5  # not BOS, not padding
    assert streams.count(masks.CLEAN) == 5  # chunks 0, 1 and 2
    one = torch.tensor([[0, 1, 1, 1]])  # MDLM: the clean stream is chunk 0 alone
    assert dual_stream(one, torch.zeros(1, 4, dtype=torch.bool)).slots.chunk.shape[1] == 4


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_operator_and_the_portable_tiles_equal_literal_attention_and_its_gradients(kv_heads, monkeypatch):
    monkeypatch.setattr(layout, "CALL_COST", 0)
    monkeypatch.setattr(layout, "SMALLEST", 4)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (2, 24), generator=generator)
    noise = torch.rand(2, 24, generator=generator) < 0.5
    for mask, place in (
        (masks.dual_stream, dual_stream(ids, noise & (ids >= 1))),
        (masks.noise, visible_first(ids >= 0, noise)),
        (masks.noise, visible_first(ids >= 0, torch.ones_like(noise))),  # nothing visible
    ):
        plan = AttentionPlan.of(mask, place.slots, "sdpa-tiled")
        size = place.slots.chunk.shape[1]
        q = torch.randn(2, 4, size, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        k, v = (torch.randn(2, kv_heads, size, 8, generator=generator, dtype=torch.float64, requires_grad=True)
                for _ in range(2))  # fmt: skip
        weight = torch.randn(2, 4, size, 8, generator=generator, dtype=torch.float64)
        results = [
            reference.attend(q, k, v, plan.dense),
            tiled_attention(q, k, v, plan.table, plan.additive(q.dtype))[0].transpose(1, 2),
            tiles_by_autograd(q, k, v, plan.table, plan.additive(q.dtype)),
        ]
        grads = [torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in results]
        for out, grad in zip(results[1:], grads[1:], strict=True):
            torch.testing.assert_close(out, results[0], **CLOSE)
            for a, b in zip(grad, grads[0], strict=True):
                torch.testing.assert_close(a, b, **CLOSE)


def test_the_operator_passes_pytorchs_own_checks():
    plan = AttentionPlan.of(
        masks.dual_stream, dual_stream(torch.tensor([[0, 1, 1, 2]]), torch.ones(1, 4) > 0).slots, "sdpa-tiled"
    )
    size = plan.num_queries
    q, k, v = (torch.randn(1, 2, size, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    torch.library.opcheck(tiled_attention, (q, k, v, plan.table, plan.additive(q.dtype)))


@pytest.mark.parametrize("budget", [1, 10_000, 1 << 22])
def test_chunking_attention_in_blocks_equals_the_literal_one_at_any_memory_budget(budget, monkeypatch, many_tiles):
    monkeypatch.setattr("dcdm.model.chunking.BLOCK_BYTES", budget)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 5, (2, 50), generator=generator)
    ids[:, 0] = 0
    noise = (torch.rand(2, 50, generator=generator) < 0.5) & (ids >= 0)
    for mask, place in (
        (masks.dual_stream, dual_stream(ids, noise & (ids >= 1))),
        (masks.noise, visible_first(ids >= 0, noise)),
    ):
        fast = AttentionPlan.of(mask, place.slots, "sdpa-tiled")
        slow = AttentionPlan.of(mask, place.slots, "reference")
        p = torch.randn(2, 3, fast.num_queries, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        v = torch.randn(2, fast.num_queries, 6, generator=generator, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(2, fast.num_queries, 6, generator=generator, dtype=torch.float64)
        results = [subspace_mixture(p, v, plan) for plan in (fast, slow)]
        torch.testing.assert_close(*results, **CLOSE)
        grads = [torch.autograd.grad((out * weight).sum(), (p, v)) for out in results]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("slice_bytes", [1, 500, 1 << 26])
def test_the_sliced_loss_equals_cross_entropy_in_value_and_gradient(slice_bytes, monkeypatch):
    monkeypatch.setattr("dcdm.model.products.SLICE_BYTES", slice_bytes)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(13, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (13,), generator=generator)
    importance = torch.rand(13, generator=generator, dtype=torch.float64)
    nll = torch.nn.functional.cross_entropy(states @ weight.T, targets, reduction="none")
    fast = weighted_nll(states, weight, targets, importance)
    torch.testing.assert_close(fast, (nll * importance).sum(), **CLOSE)
    found = token_nll(states, targets, lambda part: part @ weight.T, len(weight))
    torch.testing.assert_close(found, nll.detach(), **CLOSE)
    for a, b in zip(torch.autograd.grad(3 * fast, (states, weight)),
                    torch.autograd.grad(3 * (nll * importance).sum(), (states, weight)), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, **CLOSE)


def test_no_tensor_of_all_logits_exists_during_a_training_step():
    model = tiny.model("causal", symbols=500, scale=1.0)
    clean = tiny.tokens(4, 30, symbols=500)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                if isinstance(x, torch.Tensor) and x.shape[-1:] == (500,) and x.shape[0] != 16:  # not Wᵀ
                    largest = max(largest, x.numel())
            return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcdm.model.products.SLICE_BYTES", 8 * 500 * 4)
        with Watch():
            loss(model, Batch(clean), 0).total.backward()
    assert 0 < largest <= 8 * 500


def test_backends_are_chosen_by_device_and_wrong_choices_name_the_reason():
    cpu = torch.device("cpu")
    assert choose_backend("auto", cpu, training=True) == "sdpa-tiled"
    assert choose_backend("auto", torch.device("cuda"), training=True) == "flex"
    with pytest.raises(ConfigError, match="no backward"):
        choose_backend("flex", cpu, training=True)
    with pytest.raises(ConfigError, match="backend='fast'"):
        choose_backend("fast", cpu, training=False)
    model = tiny.model("causal")
    model.backend = "flex"
    clean = tiny.tokens(1, 6)
    with pytest.raises(ConfigError, match="no backward"):
        model(clean, tiny.noise(model, clean))
