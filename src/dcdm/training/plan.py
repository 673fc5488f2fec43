"""What a run will need on GPUs that are not there: `dcdm plan`.

Rank 0 takes a step of the real code on tensors without values (`simulation.py`) while every allocation, operation
and message is counted (`counting.py`). Memory, operations and bytes are therefore those of the code; seconds are
arithmetic on them, by `Assumptions`.
"""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import dataclass, replace
from typing import Any

import torch

from dcdm.config import ConfigError
from dcdm.costs import bf16_peak
from dcdm.data.store import Item
from dcdm.training.checkpoint import collect, gathered
from dcdm.training.counting import Counter, Message, Part
from dcdm.training.run import trainer_of
from dcdm.training.settings import RunConfig
from dcdm.training.simulation import simulated_rank
from dcdm.training.trainer import Trainer


@dataclass(frozen=True)
class Gpu:
    """Vendors' figures of one device."""

    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second, of its memory."""
    link: float
    """Bytes a second to the other devices of its node, in one direction."""

    @property
    def peak(self) -> float:
        """Dense bf16 operations a second."""
        peak = bf16_peak(self.name)
        assert peak is not None
        return peak


GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        Gpu("B200", 180e9, 8e12, 900e9), Gpu("H200", 141e9, 4.8e12, 450e9), Gpu("H100", 80e9, 3.35e12, 450e9),
        Gpu("H800", 80e9, 3.35e12, 200e9), Gpu("A100", 80e9, 2.04e12, 300e9), Gpu("A800", 80e9, 2.04e12, 200e9),
        Gpu("L40S", 48e9, 0.864e12, 32e9), Gpu("L4", 24e9, 0.3e12, 32e9),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Assumptions:
    """What the counts cannot say; each is an option of `dcdm plan`."""

    efficiency: float = 0.6
    """Share of its peak that a device reaches in matrix products."""
    fused: float = 0.4
    """Share of the other operations' bytes that is left when they are compiled together."""
    network: float = 50e9
    """Bytes a second from each device to other nodes: 400 Gbit/s."""
    usable: float = 0.9
    """Share of a device's memory that the step may take; the rest is for the driver, NCCL and fragmentation."""


@dataclass(frozen=True)
class Step:
    """One optimizer step on one rank, counted."""

    micro_batch: int
    micro_steps: int
    memory: dict[Part, int]
    """Bytes at the peak."""
    start: int
    """Largest number of bytes before the first step."""
    operations: float
    traffic: float
    sent: Tally[Message]
    parameters: int
    checkpoint: int
    """Bytes of a checkpoint."""

    @property
    def peak(self) -> int:
        return sum(self.memory.values())


class Simulation:
    """Rank 0 of a run on `ranks` devices; made once, then it takes steps with micro-batches of any size."""

    def __init__(self, config: RunConfig, ranks: int) -> None:
        if config.train.batch_size % ranks:
            raise ConfigError(f"--batch-size {config.train.batch_size} must be a multiple of --gpus {ranks}")
        if ranks % config.train.replicate:
            raise ConfigError(f"train.replicate={config.train.replicate} must divide --gpus {ranks}")
        dtype = "bf16" if config.train.dtype == "auto" else config.train.dtype
        self.ranks, self.share = ranks, config.train.batch_size // ranks
        if (asked := config.train.micro_batch) is not None and asked > self.share:
            raise ConfigError(f"--micro-batch {asked} is more than {self.share}, a device's share of --batch-size")
        self.config = replace(config, train=replace(config.train, dtype=dtype, compile=False))

    def step(self, micro_batch: int) -> Step:
        """A step with passes of `micro_batch` windows, of which two are run and all are counted."""
        micro_steps = -(-self.share // micro_batch)
        rows = micro_batch * min(2, micro_steps) * self.ranks
        train = replace(self.config.train, batch_size=rows, micro_batch=micro_batch)
        with simulated_rank(self.ranks) as world:
            with Counter() as before:
                trainer = trainer_of(replace(self.config, train=train), Windows(self.config), world)
            fill_optimizer(trainer)
            step = counted_step(trainer)
            stored = gathered(collect(trainer.state())[0], world).values()
            totals = step.totals.plus(step.first_pass, max(0, micro_steps - 2))
            return Step(
                micro_batch, micro_steps, step.peak(), sum(before.peak().values()), totals.operations,
                totals.traffic, totals.sent, sum(p.numel() for p in trainer.model.parameters()),
                sum(x.numel() * x.element_size() for x in stored),
            )  # fmt: skip

    def largest(self, room: float) -> Step | None:
        """The step with the largest micro-batch that fits into `room` bytes, or None."""
        sizes = [size for size in range(self.share, 0, -1) if self.share % size == 0]
        one = self.step(1)
        if one.peak > room or self.share == 1:
            return one if one.peak <= room else None
        per_window = one.memory["activations"] + one.memory["temporary"]
        likely = 1 + 1.5 * (room - one.peak) / max(1, per_window)
        for size in sizes:
            if size == 1:
                return one
            if size <= likely and (step := self.step(size)).peak <= room:
                return step
        return one


def fill_optimizer(trainer: Trainer) -> None:
    """Give the optimizer its moments, by a step without gradients."""
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()


def counted_step(trainer: Trainer) -> Counter:
    """The counts of a trainer's next step; the optimizer has its moments already."""
    trainer.model.zero_grad(set_to_none=True)
    counter = Counter()
    counter.hold("weights", [*trainer.model.parameters(), *trainer.model.buffers()])
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    counter.hold("optimizer", [*moments, *trainer.average.values()])
    with counter:
        trainer.take_step()
    return counter


class Windows:
    """Full windows of random tokens."""

    identity = "made up"

    def __init__(self, config: RunConfig) -> None:
        self.vocabulary, self.bos, self.length = config.model.vocab_size - 3, config.model.bos_id, config.window

    def __len__(self) -> int:
        return 1024  # an order of them is drawn

    def __getitem__(self, index: int) -> Item:
        tokens = torch.randint(self.vocabulary, (self.length,), generator=torch.Generator().manual_seed(index))
        tokens[0] = self.bos
        return {"tokens": tokens, "prompt": torch.zeros(self.length, dtype=torch.bool), "index": index}


@dataclass(frozen=True)
class Plan:
    """A counted step, and what follows from it for one kind of device."""

    config: RunConfig
    ranks: int
    per_node: int
    gpu: Gpu
    assumed: Assumptions
    step: Step
    largest: Step | None
    """With the largest micro-batch that fits."""

    def seconds(self) -> dict[str, float]:
        """Of a step, by what it waits for; messages travel while the device computes."""
        gpu, assumed = self.gpu, self.assumed
        found = {
            "products": self.step.operations / (gpu.peak * assumed.efficiency),
            "memory": self.step.traffic * assumed.fused / gpu.bandwidth,
            "network": sum(size / self._speed(message) for message, size in self.step.sent.items()),
        }
        return found | {"step": max(found["products"] + found["memory"], found["network"])}

    def _speed(self, message: Message) -> float:
        within = len({rank // self.per_node for rank in message.ranks}) == 1
        return self.gpu.link if within else min(self.gpu.link, self.assumed.network)

    def figures(self) -> dict[str, Any]:
        """All that is known, as plain values."""
        train, seconds = self.config.train, self.seconds()
        tokens = train.batch_size * self.config.window
        hours = train.steps * seconds["step"] / 3600
        sent: Tally[str] = Tally()
        for message, size in self.step.sent.items():
            sent[f"{message.kind} of {len(message.ranks)}"] += size
        return {
            "parameters": self.step.parameters, "gpus": self.ranks, "gpu": self.gpu.name,
            "micro_batch": self.step.micro_batch, "micro_steps": self.step.micro_steps,
            "memory": self.step.memory, "peak_bytes": self.step.peak, "start_bytes": self.step.start,
            "fits": self.step.peak <= self.assumed.usable * self.gpu.memory,
            "largest_micro_batch": None if self.largest is None else self.largest.micro_batch,
            "operations": self.step.operations, "traffic_bytes": self.step.traffic, "sent_bytes": dict(sent),
            "seconds": seconds, "tokens_per_second": tokens / seconds["step"], "tokens": tokens * train.steps,
            "utilisation": self.step.operations / self.gpu.peak / seconds["step"],
            "days": hours / 24, "gpu_hours": hours * self.ranks, "checkpoint_bytes": self.step.checkpoint,
            "assumed": vars(self.assumed),
        }  # fmt: skip


def make_plan(
    config: RunConfig, ranks: int, gpu: Gpu, per_node: int = 8, assumed: Assumptions | None = None
) -> Plan:
    """With the micro-batch of the settings, or else with the largest that fits."""
    assumed = assumed or Assumptions()
    simulation = Simulation(config, ranks)
    largest = simulation.largest(assumed.usable * gpu.memory)
    asked = config.train.micro_batch
    if asked is None:
        step = largest or simulation.step(1)
    else:
        step = largest if largest is not None and largest.micro_batch == asked else simulation.step(asked)
    return Plan(config, ranks, per_node, gpu, assumed, step, largest)


def lines_of(plan: Plan) -> list[str]:
    """The plan for people."""
    known, train, assumed = plan.figures(), plan.config.train, plan.assumed
    seconds, nodes = known["seconds"], -(-plan.ranks // plan.per_node)
    room = assumed.usable * plan.gpu.memory
    fits = "" if known["fits"] else "; IT DOES NOT FIT"
    parts = ", ".join(f"{name} {_gb(size)}" for name, size in plan.step.memory.items() if size)
    sent = ", ".join(f"{name} {_gb(size)}" for name, size in known["sent_bytes"].items())
    most = known["largest_micro_batch"]
    return [
        f"model        {plan.config.model.kind}, {known['parameters'] / 1e6:.2f}M parameters, vocabulary "
        f"{plan.config.model.vocab_size:,} before the tokenizer is known",
        f"devices      {plan.ranks} × {plan.gpu.name} on {nodes} node{'s' if nodes > 1 else ''}",
        f"step         {train.batch_size} windows of {plan.config.window}: on each device "
        f"{plan.step.micro_steps} × {plan.step.micro_batch}; {train.optimizer}",
        f"memory       {_gb(plan.step.peak)} GB at the peak, {_gb(room)} usable of {_gb(plan.gpu.memory)}{fits}",
        f"             {parts}",
        f"             {_gb(plan.step.start)} GB at most before the first step",
        f"fits         {'not even one window' if most is None else f'up to {most} windows'} a pass",
        f"operations   {known['operations'] / 1e12:.3g} TFLOP a step and device",
        f"sent         {sent or 'nothing'}{' GB a step and device' if sent else ''}",
        f"seconds      products {seconds['products']:.3g} (at {assumed.efficiency:.0%} of "
        f"{plan.gpu.peak / 1e12:.0f} TFLOP/s) + memory {seconds['memory']:.3g} ({assumed.fused:.0%} of "
        f"{_gb(known['traffic_bytes'])} GB at {plan.gpu.bandwidth / 1e12:.3g} TB/s)",
        f"             beside network {seconds['network']:.3g} ({_gb(plan.gpu.link)} GB/s in a node, "
        f"{_gb(assumed.network)} between): {seconds['step']:.3g} a step",
        f"speed        {known['tokens_per_second']:,.0f} tokens/s, {known['utilisation']:.0%} of the peak",
        f"run          {train.steps:,} steps, {known['tokens'] / 1e9:.3g}B tokens: {known['days']:.3g} days, "
        f"{known['gpu_hours']:,.0f} GPU hours",
        f"checkpoints  {_gb(known['checkpoint_bytes'])} GB each, {plan.config.keep_last} last and "
        f"{plan.config.keep_best} best kept",
    ]


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g}"
