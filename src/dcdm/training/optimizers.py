"""Optimizers: AdamW as in the paper, and Muon for the matrices of the network.

Muon takes the momentum of a matrix's gradient and makes its singular values nearly equal before the step
(orthogonalisation by Newton–Schulz iterations), so that no direction is neglected. Embeddings, norms and the head
stay with AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw as adamw_step

from dcdm.model.transformer import Model
from dcdm.training.fsdp import own, own_part
from dcdm.training.settings import TrainConfig

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MUON_SCALE = 0.2  # times √max(rows, columns): an update has the size that AdamW's have, and rates mean the same


def make_optimizer(model: Model, settings: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a run; each group's `rate_scale` times the schedule's rate is its own rate."""
    return muon(model, settings) if settings.optimizer == "muon" else adamw(model, settings)


def trainable(model: Model) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are not frozen, by name."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`; the norm before that."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = full(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of a shard, on every rank; any other tensor as it is. All ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def adamw(model: Model, settings: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, not on norms and embeddings."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in trainable(model):
        is_plain = parameter.ndim < 2 or name.startswith("embed_tokens")
        (plain if is_plain else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, settings.learning_rate, settings.betas, settings.adam_eps)


def muon(model: Model, settings: TrainConfig) -> Muon:
    """Muon for the matrices of the blocks, of the chunking attention and of the draft head, AdamW for all else."""
    matrices: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in trainable(model):
        if _is_matrix(name, parameter.ndim):
            matrices.append(parameter)
        else:
            (decayed if name.startswith("lm_head") else plain).append(parameter)
    shared: dict[str, Any] = {"betas": settings.betas, "eps": settings.adam_eps, "orthogonal": False}
    groups = [
        {
            "params": matrices, "weight_decay": settings.weight_decay, "orthogonal": True,
            "momentum": settings.muon_momentum, "rate_scale": settings.muon_rate / settings.learning_rate,
        },
        {"params": decayed, "weight_decay": settings.weight_decay, **shared},
        {"params": plain, "weight_decay": 0.0, **shared},
    ]  # fmt: skip
    return Muon([group for group in groups if group["params"]], settings.learning_rate)


def _is_matrix(name: str, dimensions: int) -> bool:
    """Whether Muon moves a parameter: a matrix, or a stack of them, but for embeddings and head."""
    return dimensions >= 2 and not name.startswith(("embed_tokens", "lm_head"))


class Muon(torch.optim.Optimizer):
    """Groups that are `orthogonal` take Muon's step, the others AdamW's.

    Under FSDP a matrix's momentum stays sharded as its weight is. Its update is gathered, orthogonalised on every
    rank alike, and each rank keeps its shard: more arithmetic than many ranks need, and the same result as on one.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "rate_scale": 1.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["orthogonal"]:
                self._orthogonal_step(parameters, group)
            else:
                self._adam_step(parameters, group)

    def _orthogonal_step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        momentum = group["momentum"]
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            assert parameter.grad is not None
            state["momentum"].lerp_(parameter.grad, 1 - momentum)
            update = parameter.grad.lerp(state["momentum"], momentum)  # Nesterov's look ahead
            by_shape.setdefault(tuple(parameter.shape), []).append((parameter, update))
        for shape, members in by_shape.items():
            whole = [full(update) for _, update in members]
            scale = group["lr"] * MUON_SCALE * max(shape[-2:]) ** 0.5
            for (parameter, _), direction in zip(members, orthogonalised(torch.stack(whole)), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                own(parameter).sub_(direction[own_part(parameter)], alpha=scale)

    def _adam_step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        states = [self.state[p] for p in parameters]
        if parameters:
            adamw_step(
                parameters, [p.grad for p in parameters if p.grad is not None], [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states], [], [s["step"] for s in states], foreach=True, amsgrad=False,
                beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices (…, rows, columns) with nearly equal singular values: U Vᵀ of their U Σ Vᵀ, roughly.

    In the matrices' own type, bf16 where they are on a GPU: a CPU's bf16 products are slower than its fp32 ones.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16) if matrices.device.type == "cuda" else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)
