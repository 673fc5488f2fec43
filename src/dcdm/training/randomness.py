"""The state of every global random generator of a process, as JSON."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy
import torch
from torch import Tensor


def capture(device: torch.device) -> dict[str, Any]:
    """States of Python's, NumPy's and PyTorch's global generators, that of `device` included."""
    version, words, gauss = random.getstate()
    of_numpy: dict[str, Any] = numpy.random.get_state(legacy=False)
    key = of_numpy["state"]["key"].tolist()
    states = {
        "python": [version, list(words), gauss],
        "numpy": {**of_numpy, "state": {**of_numpy["state"], "key": key}},
        "torch": _text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        states["cuda"] = _text(torch.cuda.get_rng_state(device))
    elif device.type == "mps":
        states["mps"] = _text(torch.mps.get_rng_state())
    return states


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Set what `capture` saw; a device's state is left out where the device is another kind now."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    of_numpy = states["numpy"]
    key = numpy.array(of_numpy["state"]["key"], dtype=numpy.uint32)
    numpy.random.set_state({**of_numpy, "state": {**of_numpy["state"], "key": key}})
    torch.set_rng_state(_state(states["torch"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_state(states["cuda"]), device)
    elif device.type == "mps" and "mps" in states:
        torch.mps.set_rng_state(_state(states["mps"]))


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _state(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
