"""What an experiment is at the paper's scale: the commands to start, their settings, and the bill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dcdm.model.costs import activation_bytes, bill, state_bytes
from dcdm.presets import preset
from dcdm.reproduction.experiments import Experiment
from dcdm.reproduction.variants import RATES
from dcdm.training.settings import TrainConfig, preset_defaults

UTILISATION = 0.4
MEMORY = 80e9  # bytes of one device
CORPORA = (
    "ptb=ptb.txt wikitext=wikitext.txt lm1b=lm1b.txt lambada=lambada.jsonl ag_news=ag_news.jsonl "
    "pubmed=pubmed.jsonl arxiv=arxiv.jsonl"
)
STEPS = {"point-vs-subspace": 200_000}
"""Where the paper says otherwise than its general 500,000."""


@dataclass(frozen=True)
class Job:
    """One training run on GPUs."""

    preset: str
    devices: int
    micro_batch: int
    steps: int
    batch: int
    tokens: float
    operations: float
    gpu_hours: float
    memory: float
    """Bytes on each device: state, activations kept by backward."""
    checkpointing: bool
    rate: float = 1.0
    """The peak learning rate as a multiple of the paper's."""

    @property
    def run(self) -> str:
        return self.preset if self.rate == 1 else f"{self.preset}-rate{self.rate:g}"

    @property
    def command(self) -> str:
        nodes = self.devices // 8
        rendezvous = (
            "--standalone" if nodes == 1 else f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
        )
        extra = " train.activation_checkpointing=true" if self.checkpointing else ""
        extra += "" if self.rate == 1 else f" train.learning_rate={self.rate * TrainConfig().learning_rate:g}"
        return (
            f"torchrun {rendezvous} --nproc-per-node 8 -m dcdm train --preset {self.preset} "
            f"--run-folder runs/{self.run} --data DATA/openwebtext --steps {self.steps} "
            f"--batch-size {self.batch} --micro-batch {self.micro_batch} --set train.compile=true{extra}"
        )


def job(name: str, steps: int) -> Job:
    """The run of a preset with the paper's settings on the paper's number of devices."""
    config, defaults = preset(name), TrainConfig()
    batch = int(preset_defaults(name)["train.batch_size"])
    devices = 8 if "0.1b" in name else 64
    costs, length = bill(config), config.context_length
    share = batch // devices
    state = state_bytes(config, devices) + 2 * costs.total_parameters  # the latter: gathered bf16 copies, at most
    micro, checkpointing = _fit(name, share, state)
    operations = costs.training * batch * steps * (4 / 3 if checkpointing else 1)
    seconds = costs.step_seconds(batch, devices, UTILISATION) * steps * (4 / 3 if checkpointing else 1)
    kept = activation_bytes(config, micro) / (config.num_layers if checkpointing else 1)
    assert defaults.steps >= steps
    return Job(
        name, devices, micro, steps, batch, float(steps) * batch * length, operations, seconds * devices / 3600,
        state + kept, checkpointing,
    )  # fmt: skip


def _fit(name: str, share: int, state: float) -> tuple[int, bool]:
    """Windows of one pass that fit beside the state; with recomputation where not even one would."""
    config = preset(name)
    room = 0.8 * MEMORY - state
    rows = int(room // activation_bytes(config, 1))
    if rows < 1:
        return max(1, share), True
    return max(n for n in range(1, share + 1) if share % n == 0 and n <= max(1, rows)), False


def evaluation(experiment: str, names: Sequence[str]) -> list[str]:
    """Commands that measure what the experiment compares."""
    runs = " ".join(f"runs/{name}" for name in names)
    if experiment == "zero-shot":
        return [f"dcdm eval ppl {runs} --data {CORPORA} --estimator auto surrogate"]
    if experiment in ("loss-curves", "training-steps", "point-vs-subspace"):
        return [f"tensorboard --logdir_spec {','.join(f'{name}:runs/{name}' for name in names)}"]
    if experiment in ("partitions", "learning-rate"):
        return [f"dcdm eval ppl {runs} --data wikitext=wikitext.txt --estimator auto trajectory --report out"]
    asked = "math,gsm8k,humaneval" if experiment == "adaptive" else "all"
    lines = [f"dcdm eval tasks runs/{name} --tasks {asked} --data-dir TASKS" for name in names]
    if experiment == "adaptive":
        lines += [
            "python -m dcdm.evaluation --model dcdm --tasks minerva_math,gsm8k,humaneval "
            f"--model_args pretrained=runs/{name},routing=adablock"
            for name in names
            if name.startswith("bdlm")
        ]
    return lines


def describe(experiment: Experiment) -> str:
    """Everything to start the experiment, as text."""
    jobs = [
        replace(job(name, STEPS.get(experiment.name, 500_000)), rate=rate)
        for name in experiment.presets
        for rate in (RATES.values() if experiment.name == "learning-rate" else (1.0,))
    ]  # fmt: skip
    lines = [
        f"{experiment.name}: {experiment.shows} ({experiment.paper})",
        "",
        "# once, on one machine (GPT-2's tokenizer, windows of 1,024)",
        "dcdm data prepare openwebtext --tokenizer gpt2 --out DATA/openwebtext",
        "",
        "# training: AdamW (0.9, 0.999, 1e-8), weight decay 0.01, peak 3e-4, cosine to 0, 2,500 warm-up steps",
        *(one.command for one in jobs),
        "",
    ]  # fmt: skip
    tuned = experiment.name in ("downstream", "adaptive")
    if tuned:
        lines += ["# fine-tuning on GSM8K; MATH has a training split of its own", *_tuning(experiment.presets), ""]
    names = [f"{name}-gsm8k" for name in experiment.presets] if tuned else [one.run for one in jobs]
    lines += ["# evaluation", *evaluation(experiment.name, names)]
    lines += [
        "", f"# bill: H800 at {UTILISATION:.0%} of 989 TFLOP/s, estimated, not measured",
        f"{'model':24}{'devices':>8}{'steps':>9}{'batch':>7}{'tokens':>9}{'EFLOP':>9}{'GPU-hours':>11}{'GB/device':>11}",
    ]  # fmt: skip
    for one in jobs:
        lines.append(
            f"{one.run:24}{one.devices:8d}{one.steps:9,d}{one.batch:7d}{one.tokens / 1e9:8.0f}B"
            f"{one.operations / 1e18:9.0f}{one.gpu_hours:11,.0f}{one.memory / 1e9:11.1f}"
        )
    hours = math.fsum(one.gpu_hours for one in jobs)
    exa = math.fsum(one.operations for one in jobs) / 1e18
    lines.append(f"{'together':24}{'':8}{'':9}{'':7}{'':9}{exa:9.0f}{hours:11,.0f}")
    return "\n".join(lines)


def _tuning(names: Sequence[str]) -> list[str]:
    return [
        f"dcdm train --preset {name} --run runs/{name}-gsm8k --init runs/{name} --data gsm8k_train.jsonl "
        "--steps 1000 --set data.reading.prompt_field=question data.reading.response_field=answer"
        for name in names
    ]
