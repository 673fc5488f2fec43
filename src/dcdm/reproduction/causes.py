"""Pairs of models that differ in one thing: what a difference between partitions is due to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """`one` is `other` with one thing changed."""

    changed: str
    one: str
    other: str


CAUSES = (
    Cause("training at random noise levels → fully masked", "contiguous-full", "contiguous"),
    Cause("training at random noise levels → fully masked", "random-full", "random"),
    Cause("training at random noise levels → fully masked", "strided-full", "strided"),
    Cause("training at random noise levels → fully masked", "causal-full", "causal"),
    Cause("training at random noise levels → fully masked", "causal-strided-full", "causal-strided"),
    Cause("chunks contiguous → random, random noise levels", "random", "contiguous"),
    Cause("chunks contiguous → strided, random noise levels", "strided", "contiguous"),
    Cause("chunks contiguous → the paper's routing, random noise levels", "paper", "contiguous"),
    Cause("chunks contiguous → causal routing, random noise levels", "causal", "contiguous"),
    Cause("chunks contiguous → random, fully masked", "random-full", "contiguous-full"),
    Cause("chunks random → strided, fully masked", "strided-full", "random-full"),
    Cause("chunks contiguous → causal routing, fully masked", "causal-full", "contiguous-full"),
    Cause("prior of causal routing none → strided, random noise levels", "causal-strided", "causal"),
    Cause("prior of causal routing none → strided, fully masked", "causal-strided-full", "causal-full"),
    Cause("chunks causal with a strided prior → strided, fully masked", "strided-full", "causal-strided-full"),
    Cause("sizes of causal chunks equal → growing by 1.3", "causal-full-growing", "causal-full"),
    Cause("network of BDLM → with chunking attention, contiguous", "contiguous", "bdlm32"),
    Cause("W_O started at zero → as in the paper", "paper-wo", "paper"),
    Cause("W_O started at zero → as in the paper", "strided-full-wo", "strided-full"),
)
