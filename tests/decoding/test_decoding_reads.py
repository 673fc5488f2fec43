"""How often a decoding step asks for values: what a GPU would be waited for, were every tensor on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dcdm
import tiny
from dcdm.decoding.config import DecodingConfig
from dcdm.model import blockmask
from reads import SIZED_BY_VALUES, aten

WHOLE = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__}


class Asked(TorchFunctionMode):
    """Whole tensors that Python asks for."""

    number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func in WHOLE
        return func(*args, **(kwargs or {}))


class Sized(TorchDispatchMode):
    """Operations whose results have as many elements as values say."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        chosen = packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_) and any(
            x is not None and x.dtype == torch.bool for x in tree_leaves(args[1])
        )
        self.number += packet in SIZED_BY_VALUES or packet is aten.equal or chosen
        return func(*args, **(kwargs or {}))


MOST = {"ar": 38, "mdlm": 37, "bdlm": 37, "paper": 29, "causal": 38, "lanes": 47, "lanes with drafts": 71}
"""Readings for each forward pass of one text, rounded up."""


@pytest.mark.parametrize("kind", MOST)
def test_a_decoding_step_asks_for_no_more_values_than_it_did(kind, monkeypatch):
    monkeypatch.setattr(blockmask, "flex_attention", lambda q, k, v, block_mask: q)  # kernels ask for nothing
    if kind.startswith("lanes"):
        model = tiny.model("mdlm", kind="lanes", lanes=(1, 2), drafts=2 if "drafts" in kind else 0)
    else:
        model = tiny.model(kind)
    model.backend = "flex"
    prompt = [[model.config.bos_id, 1, 2, 3]]
    with Sized() as sized, Asked() as asked:
        made = dcdm.generate(model, prompt, max_new_tokens=24, decoding=DecodingConfig())
    passes = int(made.forwards.max())
    assert asked.number + sized.number <= MOST[kind] * passes
