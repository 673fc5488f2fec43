"""The first hour on new devices, stage by stage: is each path what its literal version is, and does a run hold?

A stage is a function that gives what it found; its documentation says what it proves, and what to do if it fails.
"""

from __future__ import annotations

import inspect
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcdm.distributed import World
from dcdm.kinds import build
from dcdm.model import explicit, layout, masks, reference
from dcdm.model.attention import AttentionPlan, Backend, attend
from dcdm.model.masks import Slots
from dcdm.presets import preset
from dcdm.training.checkpoint import Checkpointer, collect
from dcdm.training.checkpoint_folder import CHECKPOINTS, checkpoints, load_weights
from dcdm.training.metrics import read_rows
from dcdm.training.plan import Simulation, Windows, counted_step, fill_optimizer
from dcdm.training.run import trainer_of
from dcdm.training.settings import resolve
from dcdm.training.simulation import as_on_a_gpu
from dcdm.training.trainer import Trainer

LENGTHS = (37, 257)  # less than a tile of FlexAttention, and a little more than two
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of the largest value
KINDS = ("ar-debug", "mdlm-debug", "bdlm-debug", "dcdm-debug", "dcdm-debug-causal", "dcdm-moe-debug")


class NotRun(Exception):
    """A stage cannot run here; the message says why."""


class Wrong(Exception):
    """What a stage proves does not hold."""


@dataclass(frozen=True)
class Setting:
    folder: Path
    """On the file system that runs will use."""
    device: torch.device
    preset: str
    steps: int
    batch_size: int
    processes: int

    def trainer(self, **changes: Any) -> Trainer:
        given = {"batch_size": self.batch_size, "steps": self.steps, **changes}
        config = resolve(self.preset, None, {f"train.{name}": value for name, value in given.items()})
        return trainer_of(config, Windows(config), World(device=self.device))


def close(what: str, found: Tensor, expected: Tensor, limit: float) -> float:
    """The largest difference, as a share of the largest value; raises if it is above `limit`."""
    found, expected = found.detach().double(), expected.detach().double()
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    if not difference <= limit:
        raise Wrong(f"{what}: differs by {difference:.2g} of the largest value, allowed are {limit:g}")
    return difference


# --- one kernel, one network, one optimizer step ------------------------------------------------------------------


def layouts(length: int, device: torch.device) -> Iterator[tuple[masks.Mask, Slots]]:
    """Every mask of the paper over two rows of five chunks, one with padding, about half masked."""
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 6, (2, length), generator=draw)
    ids[:, 0], ids[1, length - 5 :] = 0, -1
    masked = (torch.rand(2, length, generator=draw) < 0.5) & (ids > 0)
    ids, masked, real = (x.to(device) for x in (ids, masked, ids >= 0))
    yield masks.noise, layout.visible_first(real, masked).slots
    yield masks.chunk_causal, layout.chunk_sorted(ids, masked).slots
    yield masks.dual_stream, layout.dual_stream(ids, masked, compact=False).slots
    yield masks.causal, Slots.of(torch.where(real, 0, -1))


def attention(backend: Backend, backward: bool, setting: Setting) -> str:
    """Equal to an explicit softmax in fp32 and bf16, for every mask of the paper and odd lengths.

    Take another backend (`backend` of `dcdm.build`), and report this one.
    """
    device, largest = setting.device, dict.fromkeys(CLOSE, 0.0)
    if backend == "flex" and backward and device.type == "cpu":
        raise NotRun("FlexAttention has no backward pass on a CPU")
    for dtype, length in ((dtype, length) for dtype in CLOSE for length in LENGTHS):
        for mask, slots in layouts(length, device):
            plan, draw = AttentionPlan.of(mask, slots, backend), torch.Generator().manual_seed(0)
            *given, toward = (torch.randn(*slots.chunk.shape, heads, 64, generator=draw).to(device, dtype)
                              for heads in (4, 2, 2, 4))  # fmt: skip
            ours, theirs = (
                [x.detach().to(kind, copy=True).requires_grad_(backward) for x in given]
                for kind in (dtype, torch.float32)
            )
            counted = (slots.chunk >= 0)[..., None, None]
            found = attend(ours[0], ours[1], ours[2], plan.inputs(dtype)) * counted
            q, k, v = (x.transpose(1, 2) for x in theirs)
            expected = explicit.attend(q, k, v, mask.dense(slots)).transpose(1, 2) * counted
            pairs: list[tuple[Any, Any]] = [(found, expected)]
            if backward:
                (found * toward).sum().backward()
                (expected * toward.float()).sum().backward()
                pairs = [(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True)]
            for a, b in pairs:
                error = close(f"{mask.name}, {length} positions, {dtype}", a, b, CLOSE[dtype])
                largest[dtype] = max(largest[dtype], error)
    return ", ".join(f"{str(dtype)[6:]} within {error:.1g}" for dtype, error in largest.items())


def network(setting: Setting) -> str:
    """Every kind, a mixture too, computes what model/reference.py says, forward and backward.

    If attention has passed, it is a layout or an expert's product: compare block by block, in fp64.
    """
    for name in KINDS:
        config, ids, found = preset(name), None, []
        tokens = torch.randint(250, (3, 77), generator=torch.Generator().manual_seed(1))
        tokens[:, 0], tokens[2, 60:] = config.bos_id, config.pad_id
        tokens = tokens.to(setting.device)
        read = tokens < (250 if config.kind == "ar" else 120)
        for literal in (True, False):
            model = build(config, seed=0, device=setting.device)
            given: Any = (tokens, None if config.kind == "ar" else read)
            encoded = reference.encode(model, *given) if literal else model.encode(*given, chunk_ids=ids)
            ids, states = encoded.chunk_ids, encoded.states[read]
            (states * torch.linspace(-1, 1, states.shape[-1], device=states.device)).sum().backward()
            found.append([states, *(p.grad for p in model.parameters() if p.grad is not None)])
        for number, (theirs, ours) in enumerate(zip(*found, strict=True)):
            close(f"{name}, {'gradients' if number else 'states'}", ours, theirs, 2e-3)
    return f"{', '.join(KINDS)}: states and gradients"


def losses(setting: Setting, backend: str, **changes: Any) -> Tensor:
    trainer = setting.trainer(**changes)
    trainer.model.backend = backend
    return torch.tensor([trainer.take_step().loss for _ in range(10)])


def ten_steps(setting: Setting) -> str:
    """Ten optimizer steps have the same losses with every backend.

    If the stages above have passed, it is the optimizer: compare with the CPU (--device cpu), step by step.
    """
    expected, found = losses(setting, "reference", dtype="fp32"), []
    for name in ("sdpa", "sdpa-tiled", *(["flex"] if setting.device.type == "cuda" else [])):
        found.append(f"{name} {close(name, losses(setting, name, dtype='fp32'), expected, 2e-3):.1g}")
    return f"losses from {expected[0]:.4f} to {expected[-1]:.4f}, within: {', '.join(found)}"


def compiled(setting: Setting) -> str:
    """FlexAttention and blocks compile, and the losses stay.

    Train with train.compile=false; TORCH_LOGS=recompiles,graph_breaks says what does not compile.
    """
    if setting.device.type != "cuda":
        raise NotRun("FlexAttention is compiled for CUDA, and there is no GPU")
    plain, fast = (losses(setting, "auto", compile=asked) for asked in (False, True))
    return f"losses within {close('compiled blocks', fast, plain, 2e-2):.1g}"


# --- whole runs ---------------------------------------------------------------------------------------------------


def start(setting: Setting, name: str, processes: int = 1) -> subprocess.Popen[str]:
    """`dcdm train` as a user starts it."""
    text = setting.folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"{a} + {b} = {a + b}\n" for a in range(200) for b in range(200)))
    many = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    values = {
        "preset": setting.preset, "run-folder": setting.folder / name, "data": text, "tokenizer": "bytes",
        "steps": setting.steps, "batch-size": setting.batch_size, "checkpoint-every": max(1, setting.steps // 5),
        "device": setting.device.type, "set": "evaluate_sequences=4",
    }  # fmt: skip
    options = [word for option, value in values.items() for word in (f"--{option}", str(value))]
    with (setting.folder / f"{name}.log").open("a") as told:
        command = [sys.executable, "-m", *(many if processes > 1 else []), "dcdm", "train", *options]
        return subprocess.Popen(command, stdout=told, stderr=told, text=True)


def finish(setting: Setting, name: str, process: subprocess.Popen[str]) -> Tensor:
    """The losses of a run that has ended well."""
    if process.wait() != 0:
        last = (setting.folder / f"{name}.log").read_text().strip().splitlines()[-1:]
        raise Wrong(f"exit code {process.returncode}: {' '.join(last)}")
    found = losses_of(setting, name)
    if len(found) != setting.steps or not found[-1] < found[0]:
        raise Wrong(f"{len(found)} steps of {setting.steps}, losses {found.tolist()[:1]} to {found.tolist()[-1:]}")
    return found


def losses_of(setting: Setting, name: str) -> Tensor:
    rows = read_rows(setting.folder / name / "metrics.jsonl")
    return torch.tensor([row["loss"] for row in rows if "loss" in row])


def undisturbed(setting: Setting) -> Tensor:
    if len(found := losses_of(setting, "one")) != setting.steps:
        raise NotRun("there is no run on one process to compare with: see that stage")
    return found


def one_process(setting: Setting) -> str:
    """A run goes from text to its last checkpoint, and the loss falls.

    Read one.log.
    """
    found = finish(setting, "one", start(setting, "one"))
    speed = [row["tokens_per_second"] for row in read_rows(setting.folder / "one" / "timing.jsonl")][-1]
    return f"{len(found)} steps, loss {found[0]:.4f} to {found[-1]:.4f}, {speed:,.0f} tokens/s"


def all_processes(setting: Setting) -> str:
    """All devices together train as one does.

    Read all.log, with NCCL_DEBUG=INFO; --device cpu tells whether it is the network of the GPUs.
    """
    if setting.processes < 2:
        raise NotRun("there is one device (on a CPU, --processes 2 starts two)")
    alone = undisturbed(setting)
    together = finish(setting, "all", start(setting, "all", setting.processes))
    return f"{setting.processes} processes: losses within {close('losses', together, alone, 2e-2):.1g} of one's"


def killed_and_resumed(setting: Setting) -> str:
    """A killed run, started again, ends as an undisturbed one does.

    Read killed.log; where checkpoints are damaged (`dcdm verify`), the file system loses what it acknowledged.
    """
    expected, process = undisturbed(setting), start(setting, "killed")
    while process.poll() is None and not checkpoints(setting.folder / "killed" / CHECKPOINTS):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise Wrong("the run ended before it could be killed: see killed.log, or ask for more --steps")
    resumed = finish(setting, "killed", start(setting, "killed"))
    if setting.device.type != "cpu":  # whose kernels add in any order
        return f"losses within {close('losses', resumed, expected, 2e-2):.1g} of an undisturbed run's"
    first, second = (load_weights(checkpoints(setting.folder / run / CHECKPOINTS)[0]) for run in ("one", "killed"))
    for name in first:
        close(name, second[name], first[name], 0.0)
    return "the last weights are those of an undisturbed run, bit for bit"


def beside_the_plan(setting: Setting) -> str:
    """A step takes the memory that `dcdm plan` says.

    Give `dcdm plan` what is left as --memory.
    """
    trainer = setting.trainer()
    given = {"train.batch_size": setting.batch_size, "train.dtype": trainer.types.name}
    config = resolve(setting.preset, None, given)
    planned = Simulation(config, 1).step(config.train.micro_batch or setting.batch_size).peak
    fill_optimizer(trainer)
    if setting.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        float(trainer.take_step().loss)  # reading it waits for the device
        peak = torch.cuda.max_memory_allocated()
    else:
        with as_on_a_gpu():
            peak = sum(counted_step(trainer).peak().values())
    found = f"{peak / 1e9:.3g} GB where the plan says {planned / 1e9:.3g}"
    if not 0.7 < peak / planned < 1.2:
        raise Wrong(found)
    return found


def checkpoint(setting: Setting) -> str:
    """This file system gives back what was written.

    Keep runs elsewhere. If it is slow, make checkpoint_every larger.
    """
    trainer, fresh = setting.trainer(), setting.trainer()
    trainer.take_step()
    with Checkpointer(setting.folder / "checkpoint") as checkpointer:
        began = time.perf_counter()
        trainer.save(checkpointer, {}, {}, wait=True)
        seconds = time.perf_counter() - began
        fresh.resume(checkpointer)
    ours, theirs = (collect(one.state())[0] for one in (trainer, fresh))
    for name, tensor in ours.items():
        close(name, theirs[name], tensor, 0.0)
    size = sum(tensor.numel() * tensor.element_size() for tensor in ours.values())
    return f"{size / 1e9:.3g} GB in {seconds:.2g} s; read back bit for bit"


STAGES: dict[str, Callable[[Setting], str]] = {
    **{f"attention-{name}{'-backward' * back}": partial(attention, name, back)
       for name in ("sdpa", "sdpa-tiled", "flex") for back in (False, True)},
    "network": network, "ten-steps": ten_steps, "compiled": compiled, "one-process": one_process,
    "all-processes": all_processes, "kill-and-resume": killed_and_resumed, "plan": beside_the_plan,
    "checkpoint": checkpoint,
}  # fmt: skip


def outcome(name: str, setting: Setting, chosen: bool) -> dict[str, Any]:
    """A stage's row of the report; what goes wrong in a stage is its own."""
    run, began = STAGES[name], time.perf_counter()
    try:
        if not chosen:
            raise NotRun("not named by --only")
        status, found = "passed", run(setting)
    except NotRun as reason:
        status, found = "not run", str(reason)
    except Exception as error:
        status, found = "failed", str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
    documentation = inspect.getdoc(run.func if isinstance(run, partial) else run) or ""
    proves, _, otherwise = " ".join(documentation.split("\n")).partition("  ")
    return {
        "stage": name, "status": status, "found": " ".join(found[:400].split()), "proves": proves,
        "seconds": round(time.perf_counter() - began, 1), "if it fails": otherwise,
    }  # fmt: skip


def write_report(folder: Path, known: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """check.json, and check.md for people."""
    (folder / "check.json").write_text(json.dumps({**known, "stages": rows}, indent=1) + "\n")
    lines = ["# The first hour", "", *(f"- {name}: {value}" for name, value in known.items())]
    for row in rows:
        lines += ["", f"**{row['stage']} {row['status']}.** {row['proves']} {row['found']} ({row['seconds']} s)"]
        lines += [row["if it fails"]] if row["status"] == "failed" else []
    (folder / "check.md").write_text("\n".join(lines) + "\n")
