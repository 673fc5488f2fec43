"""An experiment of a study at the paper's scale: the commands that start it, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

from dcdm.presets import preset
from dcdm.studies.study import Experiment

UTILISATION = 0.4
DEVICE_BYTES = 80e9


def paper_commands(name: str, experiment: Experiment) -> str:
    """Everything to start the experiment at the paper's scale, and its cost; `--dry-run` of a command says more."""
    jobs = [_job(one, rate, experiment.steps) for one in experiment.presets for rate in experiment.rates]
    lines = [
        f"{name}: {experiment.shows} ({experiment.paper})",
        "",
        "# once, on one machine (GPT-2's tokenizer, windows of 1,024)",
        "dcdm data prepare openwebtext --tokenizer gpt2 --out DATA/openwebtext",
        "",
        "# training: AdamW (0.9, 0.999, 1e-8), weight decay 0.01, peak 3e-4, cosine to 0, 2,500 warm-up steps",
        *(command for _, command, *_ in jobs),
        "",
        "# afterwards",
        *_afterwards(experiment.commands, [run for run, *_ in jobs]),
        "",
        f"# costs: H800 at {UTILISATION:.0%} of 989 TFLOP/s, estimated, not measured",
        f"{'model':24}{'EFLOP':>9}{'GPU-hours':>11}",
        *(f"{run:24}{exa:9.0f}{hours:11,.0f}" for run, _, exa, hours in jobs),
        f"{'together':24}{sum(job[2] for job in jobs):9.0f}{sum(job[3] for job in jobs):11,.0f}",
    ]
    return "\n".join(lines)


def _afterwards(commands: Sequence[str], runs: Sequence[str]) -> list[str]:
    """The experiment's own commands, for each run where they say `{run}`."""
    folders = " ".join(f"runs/{run}" for run in runs)
    lines: list[str] = []
    for command in commands:
        each = runs if "{run}" in command else [""]
        lines += [command.replace("{runs}", folders).replace("{run}", run) for run in each]
    return lines


def _job(name: str, rate: float, steps: int) -> tuple[str, str, float, float]:
    """(run, command, EFLOP, GPU-hours) of a preset with the paper's settings on the paper's number of devices."""
    from dcdm.costs import activation_bytes, cost_estimate, state_bytes
    from dcdm.training.settings import TrainConfig, preset_defaults

    config, costs = preset(name), cost_estimate(preset(name))
    batch, devices = int(preset_defaults(name)["train.batch_size"]), 8 if "0.1b" in name else 64
    share = batch // devices
    # windows of one pass that fit beside the state and gathered bf16 copies of the weights; recomputation where
    # not even one would
    room = 0.8 * DEVICE_BYTES - state_bytes(config, devices) - 2 * costs.total_parameters
    fitting = max(0, int(room // activation_bytes(config, 1)))
    micro = max((n for n in range(1, share + 1) if share % n == 0 and n <= fitting), default=share)
    nodes = devices // 8
    meeting = "--standalone" if nodes == 1 else f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    run = name if rate == 1 else f"{name}-rate{rate:g}"
    command = (
        f"torchrun {meeting} --nproc-per-node 8 -m dcdm train --preset {name} --run-folder runs/{run} "
        f"--data DATA/openwebtext --steps {steps} --batch-size {batch} --micro-batch {micro} "
        "--set train.compile=true"
    )
    command += "" if fitting else " train.activation_checkpointing=true"
    command += "" if rate == 1 else f" train.learning_rate={rate * TrainConfig().learning_rate:g}"
    again = 1 if fitting else 4 / 3  # a second forward pass
    hours = costs.step_seconds(batch, devices, UTILISATION) * steps * devices * again / 3600
    return run, command, costs.training * batch * steps * again / 1e18, hours
