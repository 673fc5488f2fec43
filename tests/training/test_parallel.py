"""Two gloo processes in float64 against one process with the same global batch."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dcdm
import tiny
from dcdm import distributed
from dcdm.config import ObjectiveConfig
from dcdm.data.loader import Loader
from dcdm.diffusion.objectives import Batch, GlobalBatch, Loss, counted, loss, with_prompts
from dcdm.distributed import ParallelError, World, choose_device
from dcdm.keys import Key
from dcdm.model import lora, products
from dcdm.model.transformer import Model
from dcdm.training import fsdp
from dcdm.training.checkpoint import Checkpointer
from dcdm.training.checkpoint_folder import load_weights
from dcdm.training.optimizers import adamw, clip_gradients, full
from dcdm.training.run import trainer_of
from dcdm.training.settings import RunConfig
from dcdm.training.trainer import TrainConfig, Trainer
from ranks import on_ranks
from toy import InMemory, train_windows

ROWS, LENGTH, STEPS = 4, 14, 4
KINDS = ("bdlm", "paper", "causal", "paper-moe", "causal-moe")
MICRO_KINDS = ("ar", "mdlm", "paper-moe", "causal-moe")
DRAFTS = "lanes with drafts"  # of four rows the head sees the first, so that a rank has none for it
TRAIN = TrainConfig(steps=STEPS, learning_rate=1e-2)
# weights and rates large enough that a mistake in any part of the loss shows
BALANCE = 0.1


def objective(model: Model) -> ObjectiveConfig:
    config = model.config
    return ObjectiveConfig(
        chunk_loss_weight=BALANCE if config.kind == "dcdm" else None, moe_loss_weight=BALANCE,
        bias_rate=BALANCE if config.routes_from_noise else None, prompt_share=0.5,
    )  # fmt: skip


def network(kind: str) -> Model:
    return tiny.model("mdlm", kind="lanes", lanes=(1, 2), drafts=2) if kind == DRAFTS else tiny.model(kind)


def rows_of(world: World, micro: int = 0, micros: int = 1) -> Tensor:
    return torch.arange(ROWS).tensor_split(world.size)[world.rank].tensor_split(micros)[micro]


def batch_of(step: int, rows: Tensor) -> Batch:
    """Rows of step `step`'s global batch; rows differ in length, so that ranks hold different numbers of tokens."""
    tokens = tiny.tokens(ROWS, LENGTH, seed=step, padding=(7, 0, 2, 1))
    return Batch(tokens[rows], rows=rows, num_rows=ROWS)


# --- the loss, taken apart and weighted so that its sum over ranks is the loss of the global batch ----------------


def share_of_loss(model: Model, batch: Batch, key: Key, world: World) -> Loss:
    def total(x: torch.Tensor) -> torch.Tensor:
        return distributed.sum_over_ranks(x, world)

    tokens = total(counted(model, with_prompts(model, batch, key, objective(model))))
    return loss(model, batch, key, objective(model), GlobalBatch(tokens, ROWS, sum_over_ranks=total))


def train(kind: str, world: World, sharded_loss: bool) -> dict[str, np.ndarray]:
    model = fsdp.shard(network(kind), world)
    optimizer = adamw(model, TRAIN)
    norms = []
    for step in range(STEPS):
        batch, key = batch_of(step, rows_of(world)), Key(0).fold(step)
        optimizer.zero_grad()
        if sharded_loss:
            result = fsdp.run_gathered(model, share_of_loss, model, batch, key, world)
        else:
            result = loss(model, batch, key, objective(model))
        result.total.backward()
        norms.append(clip_gradients(model, 1.0).item())
        optimizer.step()
    weights = {name: full(value).numpy() for name, value in model.state_dict().items()}
    return {**weights, "norms": np.array(norms)}


def train_all(world: World) -> dict[str, dict[str, np.ndarray]]:
    return {kind: train(kind, world, sharded_loss=True) for kind in (*KINDS, DRAFTS)}


def everything(world: World) -> dict[str, Any]:
    """All that two ranks are asked for here, in one pair of processes."""
    parts = (train_all, backward_checks, evaluate_unevenly, mixed_precision, half_precision, agree)
    return {part.__name__: part(world) for part in parts}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return on_ranks(2, everything, timeout=240)


@pytest.mark.parametrize("kind", [*KINDS, DRAFTS])
def test_steps_on_two_ranks_equal_one_process_with_the_same_global_batch(kind, two_ranks):
    alone = train(kind, World(), sharded_loss=False)
    for rank in two_ranks:
        found = rank["train_all"][kind]
        assert found.keys() == alone.keys()
        for name, expected in alone.items():
            np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-6, err_msg=name)


def test_the_balance_bias_is_the_same_on_all_ranks_and_has_moved(two_ranks):
    paper = [kind for kind in KINDS if kind.startswith("paper")]
    first, second = ([rank["train_all"][kind]["chunking.balance_bias"] for kind in paper] for rank in two_ranks)
    assert all(np.array_equal(a, b) and a.any() for a, b in zip(first, second, strict=True))


# --- one backward pass in many ways -------------------------------------------------------------------------------


def gradients(model: Model) -> dict[str, np.ndarray]:
    return {name: full(p.grad).numpy() for name, p in model.named_parameters()}


def backward_in_micro_batches(world: World, kind: str, sync_each: bool) -> dict[str, np.ndarray]:
    """The package's loss as it is, a row at a time; each row counts alike, and chunks stay as they are."""
    model = fsdp.shard(tiny.model(kind), world)
    settings = replace(objective(model), bias_rate=None if kind == "ar" else 0.0)
    micros = ROWS // world.size
    for micro in range(micros):
        fsdp.sync_gradients(model, sync_each or micro == micros - 1)
        batch = batch_of(0, rows_of(world, micro, micros))
        result = fsdp.run_gathered(model, loss, model, batch, Key(0), settings)
        (result.total / ROWS).backward()
    return gradients(model)


def backward_checks(world: World) -> dict[str, Any]:
    # ranks hold different numbers of masked tokens: let them compute their logits in different numbers of slices
    whole, products.SLICE_BYTES = products.SLICE_BYTES, 3 * 4 * 23
    found: dict[str, Any] = {}
    for kind in MICRO_KINDS:
        found[kind] = [backward_in_micro_batches(world, kind, sync_each) for sync_each in (True, False)]
    products.SLICE_BYTES = whole
    model = fsdp.shard(tiny.model("paper-moe"), world)
    found["placements"] = {name: str(p.placements) for name, p in model.named_parameters()}
    found["own"] = sum(p.to_local().numel() for p in model.parameters())
    return found


@pytest.mark.parametrize("kind", MICRO_KINDS)
def test_the_package_s_loss_and_backward_give_one_process_s_gradients_through_micro_batches_and_head_slices(
    kind, two_ranks
):
    alone = backward_in_micro_batches(World(), kind, sync_each=True)
    for rank in two_ranks:
        for way in rank["backward_checks"][kind]:
            for name, expected in alone.items():
                np.testing.assert_allclose(way[name], expected, rtol=1e-9, atol=1e-9, err_msg=name)


def test_every_rank_holds_half_of_the_weights_and_few_experts_are_split_along_another_dimension(two_ranks):
    total = sum(p.numel() for p in tiny.model("paper-moe").parameters())
    for rank in two_ranks:
        placements = rank["backward_checks"]["placements"]
        assert rank["backward_checks"]["own"] == total // 2
        assert placements["layers.0.mlp.experts.down_proj"] == "(Shard(dim=1),)"
        assert placements["layers.0.self_attn.q_proj.weight"] == "(Shard(dim=0),)"


# --- evaluation, types, agreement ---------------------------------------------------------------------------------


def evaluate_unevenly(world: World) -> dict[str, Any]:
    """Between two optimizer steps, ranks call the model's methods a different number of times."""
    found: dict[str, Any] = {}
    for kind in ("paper", "causal"):
        model = fsdp.shard(tiny.model(kind), world)
        optimizer = adamw(model, TRAIN)
        clean = tiny.tokens(2, LENGTH)
        for _ in range(2):
            with fsdp.unsharded(model), torch.no_grad():
                for _ in range(1 + 2 * world.rank):
                    states = model.encode(clean, tiny.noise(model, clean)).states
                    found[kind] = fsdp.run_gathered(model, model.head, states)[..., :-3].numpy()  # may be nested
                    found[f"{kind} again"] = model(clean, tiny.noise(model, clean)).logits[..., :-3].numpy()
                    if kind == "causal":
                        model.partition(clean)
            optimizer.zero_grad()
            fsdp.run_gathered(model, loss, model, Batch(clean), Key(0)).total.backward()
            optimizer.step()
        found[f"{kind} sharded"] = all(type(p).__name__ == "DTensor" for p in model.parameters())
        found[f"{kind} weights"] = full(model.embed_tokens.weight).detach().numpy()
    return found


def test_ranks_may_evaluate_unevenly_inside_unsharded_and_training_continues_with_new_weights(two_ranks):
    first, second = (rank["evaluate_unevenly"] for rank in two_ranks)
    alone = evaluate_unevenly_alone()
    masked = tiny.noise(tiny.model("paper"), tiny.tokens(2, LENGTH)).numpy()
    for kind in ("paper", "causal"):
        assert first[f"{kind} sharded"]
        np.testing.assert_array_equal(first[kind], second[kind])
        np.testing.assert_array_equal(first[kind][masked], first[f"{kind} again"][masked])
        np.testing.assert_allclose(first[kind], alone[kind], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(first[f"{kind} weights"], alone[f"{kind} weights"], rtol=1e-9, atol=1e-9)


def evaluate_unevenly_alone() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("paper", "causal"):
        model = tiny.model(kind)
        optimizer = adamw(model, TRAIN)
        clean = tiny.tokens(2, LENGTH)
        for _ in range(2):
            with torch.no_grad():
                found[kind] = model.head(model.encode(clean, tiny.noise(model, clean)).states)[..., :-3].numpy()
            optimizer.zero_grad()
            (2 * loss(model, Batch(clean), Key(0)).total).backward()  # the two ranks held the same rows
            optimizer.step()
        found[f"{kind} weights"] = model.embed_tokens.weight.detach().numpy()
    return found


def mixed_precision(world: World) -> dict[str, Any]:
    model = fsdp.shard(tiny.model("paper-moe"), world, compute_dtype=torch.float32, reduce_dtype=torch.float64)
    seen: dict[bool, Any] = {}
    for early in (True, False):  # before and after FSDP's own hook
        model.layers[1].register_forward_pre_hook(
            lambda block, args, early=early: seen.update({early: args}), prepend=early
        )
    result = fsdp.run_gathered(model, loss, model, batch_of(0, rows_of(world)), Key(0), objective(model))
    result.total.backward()
    return {
        "loss": str(result.nll.dtype),
        "gradient": str(next(model.parameters()).grad.dtype),
        "weight": str(next(model.parameters()).dtype),
        "bias": type(model.chunking.balance_bias).__name__,
        "plan is passed on": seen[True][2] is seen[False][2],
    }


def test_mixed_precision_computes_low_keeps_weights_and_gradients_high_and_copies_no_mask(two_ranks):
    for rank in two_ranks:
        assert rank["mixed_precision"] == {
            "loss": "torch.float32", "gradient": "torch.float64", "weight": "torch.float64",
            "bias": "Tensor", "plan is passed on": True,
        }  # fmt: skip


BF16 = TrainConfig(steps=3, batch_size=4, warmup_steps=1, learning_rate=1e-3, dtype="bf16")
WINDOWS = tiny.tokens(8, 24)
TOLERANCE = {
    "ar": 1e-2,
    "paper": 1e-2,
    "causal-moe": 0.2,
}  # the last: other chunks, another draw of the noise


def half_precision(world: World) -> dict[str, tuple[float, str]]:
    found = {}
    for kind in TOLERANCE:
        made = dcdm.build(tiny.config(kind), seed=0)
        batches = Loader(InMemory(WINDOWS), seed=0, global_batch=4, rank=world.rank, world=world.size)
        found[kind] = (Trainer(made, batches, BF16, world=world).take_step().nll, str(made.norm.weight.dtype))
    return found


def test_shards_compute_in_bf16_and_keep_their_weights_in_fp32(two_ranks):
    first, second = (rank["half_precision"] for rank in two_ranks)
    assert first == second
    for kind, (nll, dtype) in first.items():
        model = dcdm.build(tiny.config(kind), seed=0)
        expected = train_windows(model, WINDOWS, replace(BF16, dtype="fp32", steps=1))[0].nll
        assert dtype == "torch.float32"
        assert nll != expected
        assert nll == pytest.approx(expected, rel=TOLERANCE[kind])


def agree(world: World) -> dict[str, Any]:
    mine = world.rank == 1
    found = {
        "sum": distributed.sum_over_ranks(torch.tensor([1, 10]) * (world.rank + 1), world).tolist(),
        "any": [distributed.any_true(flag, world) for flag in (True, mine, False)],
        "main": distributed.from_main(lambda: {"from": world.rank}, world),
        "gather": distributed.gather_objects(f"rank {world.rank}", world),
    }
    try:
        distributed.from_main(lambda: choose_device("mps"), world)
    except ParallelError as error:
        found["failure"] = str(error)[:10]
    return found


def test_ranks_agree_on_sums_flags_objects_and_failures(two_ranks):
    first, second = (rank["agree"] for rank in two_ranks)
    assert first == second
    assert first == {
        "sum": [3, 30], "any": [True, True, False],
        "main": {"from": 0}, "gather": ["rank 0", "rank 1"], "failure": "device=mps",
    }  # fmt: skip


def hang(world: World) -> str:
    """Rank 1 hangs where rank 0 waits for it."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    if world.rank == 1:
        time.sleep(15)
        return ""
    try:
        with distributed.missing_ranks_named(world, timedelta(seconds=1)):
            dist.all_reduce(torch.zeros(1), group=group)
    except ParallelError as error:
        return str(error)
    return "nothing happened"


def test_a_rank_that_hangs_is_named_when_time_is_up():
    said = on_ranks(2, hang)[0]
    assert "a rank died or hangs" in said
    assert "1" in said.split("monitoredBarrier")[0]


# --- one process --------------------------------------------------------------------------------------------------


def test_without_torchrun_the_world_is_one_process_and_nothing_is_sharded(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    world = distributed.init_distributed("cpu")
    assert (world.rank, world.size, world.is_main, world.device.type) == (0, 1, True, "cpu")
    model = tiny.model("paper")
    assert fsdp.shard(model, world) is model
    assert type(next(model.parameters())) is torch.nn.Parameter
    assert distributed.gather_objects("x", world) == ["x"]
    distributed.shutdown(world)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE not set"),
        ({"RANK": "two"}, "RANK='two' is not a whole number"),
        ({"RANK": "2"}, "between 0 and WORLD_SIZE-1=1"),
    ],
)
def test_a_broken_environment_is_refused_with_a_hint_at_torchrun(changes, message, monkeypatch):
    sound = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**sound, **changes}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(ParallelError, match=f"{message}.*torchrun"):
        distributed.init_distributed("cpu")


def test_clipping_in_one_process_scales_to_the_limit_and_reports_the_norm_before():
    model = tiny.model("bdlm")
    loss(model, batch_of(0, torch.arange(ROWS)), Key(0)).total.backward()
    before = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert clip_gradients(model, 0.5) == pytest.approx(before.item())
    assert torch.cat([p.grad.flatten() for p in model.parameters()]).norm() == pytest.approx(0.5, rel=1e-4)


# --- start-up, and groups of ranks that hold a model each -----------------------------------------------------


def start_of(world: World, kind: str, **train: Any) -> Trainer:
    network, given = tiny.config(kind, chunk_out_init_std=0.02), "somewhere" if train.get("lora") else None
    settings = RunConfig(network, train=replace(BF16, dtype="fp32", **train), init=given)
    return trainer_of(settings, InMemory(WINDOWS), world)


STARTED = {"paper-moe": 0, "causal": 0, "bdlm": 2}
"""By the rank of adapters."""


def start_and_steps(world: World, folder: Path) -> dict[str, Any]:
    """Initial weights of a model made in shards; and what steps make of one, in two groups where there are four."""
    found: dict[str, Any] = {"mesh": None}
    for kind, rank in STARTED.items():
        trainer = start_of(world, kind, seed=3, lora=rank, replicate=world.size // 2 or 1, optimizer="muon")
        found[kind] = {name: full(value).numpy().copy() for name, value in trainer.model.state_dict().items()}
        parameter = trainer.model.embed_tokens.weight
        found["mesh"] = None if world.size == 1 else tuple(parameter.device_mesh.shape)
        losses = [trainer.take_step().loss for _ in range(2)]
        found[f"{kind} losses"] = losses
        with Checkpointer(folder / kind, world) as checkpointer:
            trainer.save(checkpointer, {}, {}, wait=True)
    return found


def test_four_ranks_in_two_groups_start_as_one_process_train_as_it_does_and_save_what_it_reads(tmp_path):
    four = on_ranks(4, start_and_steps, tmp_path / "four", timeout=240)
    alone = start_and_steps(World(), tmp_path / "one")
    assert four[0]["mesh"] == (2, 2)
    for kind, adapted in STARTED.items():
        model = dcdm.build(tiny.config(kind, chunk_out_init_std=0.02), seed=3)
        if adapted:
            lora.attach(model, adapted, seed=3)
        built = model.state_dict()
        for rank in (alone, *four):
            assert rank[kind].keys() == built.keys()
            assert all(np.array_equal(rank[kind][name], value) for name, value in built.items())
            np.testing.assert_allclose(rank[f"{kind} losses"], alone[f"{kind} losses"], rtol=1e-5)
        for name, value in load_weights(tmp_path / "one" / kind / "step-00000002").items():
            saved = load_weights(tmp_path / "four" / kind / "step-00000002")[name]
            np.testing.assert_allclose(saved, value, rtol=1e-3, atol=1e-5, err_msg=name)
