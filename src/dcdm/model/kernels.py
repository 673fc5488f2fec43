"""Blocks compiled for decoding, where a pass has so few positions that small operations cost as much as products.

PyTorch's compiler makes C++ of a whole block ahead of time (AOTInductor), for the shapes of a configuration and a
few positions: products and what stands between them are one call, which reads each weight once. For up to 64
positions and int8 weights, what stands between two products is one call, and oneDNN makes those. Weights and cache
are arguments: a kernel serves every block, and it is kept on disk for the next program.

    B batch   Q new slots   M rows, at least B·Q   d hidden size   H query heads   G key/value heads   D head size
    C slots of the cache   n keys   N rows of a weight matrix   K its columns
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dcdm.config import ConfigError, ModelConfig
from dcdm.files import user_cache
from dcdm.model.attention import rotate
from dcdm.model.cache import KVCache
from dcdm.model.packing import PackedLinear, in_two_bytes, joined
from dcdm.model.products import FEW_ROWS, Linear

log = logging.getLogger(__name__)

SECONDS, SAVED = 60.0, 1.5e-4
"""What compiling takes on a small machine, and what a pass through a block gains by it: both roughly."""
OPTIONS = {"cpp.enable_floating_point_contract_flag": "fast"}
ONE_THREAD = {"cpp.threads": 1}
"""Of what stands between two products: it is so small that a second thread costs more than it gains."""
ROWS = (1, 2, 4)
"""Whole blocks are made for as many positions; a pass over fewer takes the next."""
Call = Callable[[list[Tensor]], list[Tensor]]
Scaled = list[Tensor | None]
"""Matrices of one product, each with its scales behind it, or with None."""


def few_rows(x: Tensor, matrices: Scaled) -> Tensor:
    """(M, K) with each (N, K) or (N/16, K, 16), side by side: the compiler makes one loop over each weight."""
    x = torch.as_strided(x, x.shape, (x.shape[1], 1))  # made once, and not again for every row of the weights
    found = []
    for weight, scale in zip(matrices[::2], matrices[1::2], strict=True):
        assert weight is not None
        rows, inner = (x[..., None], 1) if weight.ndim == 3 else (x, -1)
        ways = 2 if len(x) <= 2 and len(weight) % 2 == 0 else 1  # sums under way hide each other's latency
        parts = weight.view(ways, len(weight) // ways, *weight.shape[1:]).unbind()
        y = torch.stack(
            [torch.cat([(part.to(x.dtype) * row).sum(inner).flatten() for part in parts]) for row in rows.unbind()]
        )
        found.append(y if scale is None else y * scale)
    return torch.cat(found, dim=-1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Attention(nn.Module):
    """From the product with queries, keys and values to the input of the output projection; the cache grows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.groups, self.each = config.num_kv_heads, config.num_heads // config.num_kv_heads
        self.size, self.eps = config.head_dim, config.norm_eps

    def forward(
        self, qkv: Tensor, own: Sequence[Tensor | None], cos: Tensor, sin: Tensor, mask: Tensor, index: Tensor,
        keys: Tensor, values: Tensor,
    ) -> Tensor:  # fmt: skip
        """`own` are biases and norms of heads; `mask` (B, Q, n) is added to the scores, `index` (B, Q) says where
        the new slots go in the cache (B, C, G, D)."""
        (B, Q, n), G, D = mask.shape, self.groups, self.size
        *bias, q_norm, k_norm = own
        if bias[0] is not None:
            qkv = qkv + torch.cat(bias)  # type: ignore[arg-type]
        q, k, v = qkv.view(B, Q, -1, D).split([G * self.each, G, G], dim=2)
        if q_norm is not None and k_norm is not None:
            q, k = _norm(q, q_norm, self.eps), _norm(k, k_norm, self.eps)
        row = torch.arange(B)[:, None]
        keys.index_put_((row, index), rotate(k, (cos, sin)))
        values.index_put_((row, index), v)
        # heads that share keys are further queries of them, so that no key is repeated
        q = rotate(q, (cos, sin)).view(B, Q, G, self.each, D).permute(0, 2, 3, 1, 4).reshape(B, G, -1, D)
        mask = mask[:, None, None].expand(B, 1, self.each, Q, n).reshape(B, 1, -1, n)
        k, v = keys[:, :n].transpose(1, 2), values[:, :n].transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.view(B, G, self.each, Q, D).permute(0, 3, 1, 2, 4).reshape(B * Q, -1)


class FewRows(nn.Module):
    """A whole block for at most M positions: h (M, d), of which the first B·Q are meant."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention, self.eps = Attention(config), config.norm_eps

    def forward(
        self, h: Tensor, norms: list[Tensor], matrices: list[Scaled], own: list[Tensor | None], where: list[Tensor]
    ) -> Tensor:
        (B, Q, _), qkv = where[2].shape, few_rows(_norm(h, norms[0], self.eps), matrices[0])
        meant = torch.arange(B * Q)
        attended = self.attention(qkv[meant], own, *where)
        if len(h) > 1:
            attended = attended.new_zeros(len(h), attended.shape[1]).index_put((meant,), attended)
        h = h + few_rows(attended, matrices[1])
        gate, up = few_rows(_norm(h, norms[1], self.eps), matrices[2]).chunk(2, dim=-1)
        return h + few_rows(F.silu(gate) * up, matrices[3])


class Head(nn.Module):
    def forward(self, x: Tensor, matrix: Scaled) -> Tensor:
        return few_rows(x, matrix)


class Enter(nn.Module):
    """The beginning of a block of more rows: activations in bytes, and the largest of each row."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps

    def forward(self, h: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        return in_two_bytes(_norm(h, norm, self.eps))


class Attend(nn.Module):
    """Between the products with queries, keys and values and with the output projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)

    def forward(
        self, products: Tensor, largest: Tensor, own: list[Tensor | None], where: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        return in_two_bytes(self.attention(joined(products, largest), own, *where))


class Add(nn.Module):
    """The end of attention or of the MLP, and the beginning of what follows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps

    def forward(self, products: Tensor, largest: Tensor, h: Tensor, norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = h + joined(products, largest)
        return h, *in_two_bytes(_norm(h, norm, self.eps))


class Gate(nn.Module):
    """Between the products of the MLP."""

    def forward(self, products: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = joined(products, largest).chunk(2, dim=-1)
        return in_two_bytes(F.silu(gate) * up)


# --- compiling and keeping ---------------------------------------------------------------------------------------


def folder() -> Path:
    """Where kernels are kept."""
    return user_cache() / "kernels"


def unsupported(model: Any) -> str:
    """Why blocks of a model cannot be compiled for decoding; empty if they can."""
    if model.config.moe is not None:
        return "mixtures of experts are not compiled for decoding"
    weight, first = model.norm.weight.data, [model.embed_tokens, *model.layers[0].modules()]
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or type(weight) is not Tensor:
        return "kernels for decoding are for whole models on the CPU, with weights=fp32 or int8"
    if any(isinstance(one, nn.Linear | nn.Embedding) and type(one) not in (Linear, nn.Embedding) for one in first):
        return "adapters must be merged before blocks are compiled for decoding"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "compiling for decoding needs a C++ compiler; install g++, or set CXX"
    return ""


def prepare(model: Any, passes: int = 0, compile: bool = False) -> None:
    """Give a model its kernels: those on disk, or new ones if `compile` says so or so many `passes` gain by it."""
    threads = torch.get_num_threads()
    if model.kernels is not None and model.kernels.threads == threads:
        return
    model.kernels = None
    wanted = compile or passes * model.config.num_layers * SAVED > SECONDS
    if not wanted and (model.kernels_sought == threads or not folder().is_dir()):
        return
    model.kernels_sought = threads
    if reason := unsupported(model):
        if compile:
            raise ConfigError(reason)
        return
    programs = _programs(model)
    missing = {name: program for name, program in programs.items() if not program.path.exists()}
    if missing:
        if not wanted:
            return
        log.warning("compiling blocks for decoding: about a minute, once for models of this shape")
        for program in missing.values():
            program.compile()
    model.kernels = Kernels(model, {name: program.load() for name, program in programs.items()}, threads)


def _parts(layer: Any) -> list[list[Any]]:
    """A block's matrices, those together that multiply the same states."""
    heads, mlp = layer.self_attn, layer.mlp
    qkv = [heads.q_proj, heads.k_proj, heads.v_proj]
    return [qkv, [heads.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]


def _weights(layer: Any) -> list[list[Any]]:
    """A block's norms, matrices, and biases and norms of heads."""
    heads, parts = layer.self_attn, _parts(layer)
    own = [one.bias for one in parts[0]] + [getattr(norm, "weight", None) for norm in (heads.q_norm, heads.k_norm)]
    matrices: list[Scaled]
    if isinstance(heads.o_proj, PackedLinear):
        matrices = [[same[0].matrix.blocks, same[0].matrix.scale] for same in parts]
    else:
        matrices = [[x for one in same for x in (one.weight, None)] for same in parts]
    return [[layer.input_layernorm.weight, layer.post_attention_layernorm.weight], matrices, own]


def _head(model: Any) -> Scaled:
    """Its matrix and scales; specials count."""
    head: Any = model.embed_tokens if model.lm_head is None else model.lm_head
    if isinstance(head, PackedLinear):
        return [head.matrix.numbers, head.matrix.scale]
    return [head.weight, getattr(head, "scale", None)]


class Kernels:
    """Those of one model, and how its passes go through them."""

    def __init__(self, model: Any, calls: dict[str, Call], threads: int) -> None:
        self.threads, self._calls = threads, calls
        self._layers = [_tensors(_weights(layer)) for layer in model.layers]
        self._blocks = []
        if "gate" in calls:
            for layer in model.layers:
                norms, _, own = _weights(layer)
                self._blocks.append((norms, [same[0].matrix for same in _parts(layer)], _tensors(own)))
        self._head = _tensors(_head(model))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copies of a model look for kernels of their own."""
        return type(None), ()

    def for_pass(self, tokens: Tensor, cache: KVCache) -> Callable[..., Tensor] | None:
        """What runs the blocks from a number on, over `tokens` (B, Q) placed in `cache`; None if nothing can."""
        rows = next((rows for rows in ROWS if tokens.numel() <= rows), tokens.numel())
        few = rows in ROWS or ("gate" in self._calls and rows <= FEW_ROWS)
        memory = cache.neighbours() if few and not torch.is_grad_enabled() else None
        if memory is None:
            return None

        def run(first: int, h_bqd: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
            if mask is None:
                mask = h_bqd.new_zeros(*tokens.shape, cache.num_keys)
            where, call = [*rotary, mask, cache.index], self._calls.get(f"{rows}-rows")
            if call is None:
                return self._more(first, h_bqd.flatten(0, 1), where, memory).view_as(h_bqd)
            h = F.pad(h_bqd.flatten(0, 1), (0, 0, 0, rows - tokens.numel()))
            for own, held in zip(self._layers[first:], memory[first:], strict=True):
                h = call([h, *own, *where, *held])[0]
            return h[: tokens.numel()].view_as(h_bqd)

        return run

    def _more(self, first: int, h: Tensor, where: list[Tensor], memory: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Blocks in pieces, between which oneDNN makes the products of bytes."""
        enter, attend, add, gate = (self._calls[name] for name in ("enter", "attend", "add", "gate"))
        blocks, shape = self._blocks[first:], where[-1].shape
        both, largest = enter([h, blocks[0][0][0]])
        following = [norms[0] for norms, *_ in (*blocks[1:], blocks[0])]  # what the last one prepares is not used
        for (norms, matrices, own), held, norm in zip(blocks, memory[first:], following, strict=True):
            heads, out, gate_up, down = matrices
            products = heads.of_bytes(both).view(2, *shape, -1)
            both, largest = attend([products, largest.view(*shape, 1), *own, *where, *held])
            h, both, largest = add([out.of_bytes(both), largest, h, norms[1]])
            both, largest = gate([gate_up.of_bytes(both), largest])
            h, both, largest = add([down.of_bytes(both), largest, h, norm])
        return h

    def logits(self, state: Tensor) -> Tensor:
        """The head's (…, V) of one state (…, d)."""
        return self._calls["head"]([state.view(1, -1), *self._head])[0].view(*state.shape[:-1], -1)


SIZES = {101: "b", 103: "q", 107: "n", 109: "c", 113: "m"}
"""Sizes that programs are traced with, where any other may come: primes that no network has."""
B, Q, N, C, M = SIZES


PARTS = (few_rows, _norm, rotate, in_two_bytes, joined, Attention)
"""What programs are made of."""


@dataclass(frozen=True)
class Program:
    """What is compiled, and arguments to trace it with."""

    name: str
    module: nn.Module
    arguments: tuple[Any, ...]
    setting: tuple[object, ...]

    @cached_property
    def path(self) -> Path:
        """Where it is on disk: code, shapes and machine are in the name."""
        types = [(tuple(x.shape), x.dtype) for x in _tensors(self.arguments)]
        code = [inspect.getsource(part) for part in (type(self.module), *PARTS)]
        machine = (torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())
        about = repr((types, self.setting, OPTIONS, ONE_THREAD, code, machine))
        return folder() / f"{self.name}-{hashlib.sha256(about.encode()).hexdigest()[:24]}.pt2"

    def load(self) -> Call:
        return torch._C._aoti.AOTIModelPackageLoader(str(self.path), "model", False, 1, -1).boxed_run

    @torch.no_grad()
    def compile(self) -> None:
        from torch._inductor import aoti_compile_and_package
        from torch.export import Dim, export

        dims = {size: Dim(name, min=1) for size, name in SIZES.items()}

        def dynamic(x: object) -> object:
            return {at: dims[n] for at, n in enumerate(x.shape) if n in dims} if isinstance(x, Tensor) else None

        dims[2 * M] = 2 * dims[M]
        path, options = self.path, OPTIONS | ({} if isinstance(self.module, FewRows | Head) else ONE_THREAD)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as place, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            traced = export(self.module, self.arguments, dynamic_shapes=tree_map(dynamic, self.arguments))
            os.replace(
                aoti_compile_and_package(traced, package_path=f"{place}/kernel.pt2", inductor_configs=options), path
            )


def _programs(model: Any) -> dict[str, Program]:
    """What a model's passes are made of."""
    config, weights = model.config, _weights(model.layers[0])
    d, size = config.hidden_size, config.head_dim

    def where(rows: int, queries: int) -> list[Tensor]:
        memory = torch.zeros(2, rows, C, config.num_kv_heads, size).unbind()
        rotary = torch.zeros(2, rows, queries, 1, size).unbind()
        return [*rotary, torch.zeros(rows, queries, N), torch.zeros(rows, queries, dtype=torch.long), *memory]

    found: dict[str, tuple[nn.Module, list[Any]]] = {"head": (Head(), [torch.zeros(1, d), _head(model)])}
    for rows in ROWS:
        places = where(1, 1) if rows == 1 else where(B, Q)
        found[f"{rows}-rows"] = FewRows(config), [torch.zeros(rows, d), *weights, places]
    if isinstance(model.layers[0].self_attn.o_proj, PackedLinear):
        norms, matrices, own = weights
        heads, gate_up = (len(matrices[which][1]) for which in (0, 2))
        states, largest = torch.zeros(M, d), torch.ones(M, 1)
        found |= {
            "enter": (Enter(config), [states, norms[0]]),
            "attend": (Attend(config), [torch.zeros(2, B, Q, heads), torch.ones(B, Q, 1), own, where(B, Q)]),
            "add": (Add(config), [torch.zeros(2 * M, d), largest, states, norms[0]]),
            "gate": (Gate(), [torch.zeros(2 * M, gate_up), largest]),
        }
    setting = (config.num_heads, config.norm_eps, config.qk_norm, config.attention_bias)
    return {name: Program(name, module, tuple(args), setting) for name, (module, args) in found.items()}


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
