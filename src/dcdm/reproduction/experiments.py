"""Every table and figure of the paper as a named experiment: what it shows, and what decides it here and there.

At CPU scale claims of a study (`studies/claims.yaml`) stand for it, and the study's runs are carried out; for the
paper's own scale `paper_commands` writes down what to start and what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcdm.config import ConfigError
from dcdm.presets import preset
from dcdm.reproduction.study import Study, sides


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper, or one of ours."""

    name: str
    shows: str
    paper: str
    """Where it stands in the paper."""
    claims: tuple[str, ...]
    """Those of the study that it decides."""
    presets: tuple[str, ...]
    """What the paper's scale trains."""
    variants: tuple[str, ...] = ()
    """Of the study, beside those that the claims compare."""


EXPERIMENTS = {
    one.name: one
    for one in (
        Experiment(
            "loss-curves", "loss of every kind, by valid bounds and by the number that the paper reports",
            "figure: training loss against steps", ("loss", "blocks", "surrogate", "number"),
            ("mdlm-0.5b", "bdlm-0.5b", "dcdm-0.5b-k8", "dcdm-0.5b-k8-causal"), ("ar", "paper-bell"),
        ),
        Experiment(
            "downstream", "multiple choice, GSM8K and MATH; at CPU scale accuracy is at chance, so nothing runs",
            "table: downstream benchmarks", (),
            ("mdlm-0.5b", "bdlm-0.5b", "dcdm-0.5b-k8", "dcdm-moe-0.8b", "mdlm-1.7b", "bdlm-1.7b", "dcdm-1.7b-k8",
             "dcdm-moe-2.8b"),
        ),
        Experiment(
            "adaptive", "decoding by AdaBlock, by fixed blocks and by DCDM", "table: adaptive block partitioning",
            ("adablock",), ("mdlm-1.7b", "bdlm-1.7b", "dcdm-1.7b-k8", "dcdm-moe-2.8b"),
        ),
        Experiment(
            "scaling", "loss at several sizes, equal tokens", "figure: parameters against accuracy", ("sizes",),
            ("mdlm-0.1b", "bdlm-0.1b", "dcdm-0.1b-k8", "mdlm-0.5b", "bdlm-0.5b", "dcdm-0.5b-k8", "mdlm-1.7b",
             "bdlm-1.7b", "dcdm-1.7b-k8"), ("mdlm", "bdlm", "paper", "bdlm-wide", "paper-wide"),
        ),
        Experiment(
            "training-steps", "the order of the kinds while training", "figure: training steps against accuracy",
            ("early",), ("mdlm-1.7b", "bdlm-1.7b", "dcdm-1.7b-k8"),
        ),
        Experiment(
            "k-ablation", "the number of chunks K, at equal parameters", "table: number of clusters", ("chunks",),
            ("dcdm-0.5b-k8", "dcdm-0.5b-k16", "dcdm-0.5b-k32", "dcdm-0.5b-k64", "dcdm-0.5b-k8-h128",
             "dcdm-0.5b-k64-h128"),
        ),
        Experiment(
            "point-vs-subspace", "h=1 against a subspace: loss and MaxVio", "figure: point against subspace",
            ("subspace", "balance"), ("dcdm-0.1b-k8-point", "dcdm-0.1b-k8-h48"),
        ),
        Experiment(
            "zero-shot", "texts of other kinds", "table: zero-shot perplexity", ("zero-shot",),
            ("ar-0.1b", "mdlm-0.1b", "bdlm-0.1b", "dcdm-0.1b-k8"), ("ar",),
        ),
        Experiment(
            "moe", "a mixture of experts in place of every MLP, at equal active size", "DCDM (MoE) rows",
            ("mixture",), ("dcdm-0.5b-k8", "dcdm-moe-0.8b", "dcdm-1.7b-k8", "dcdm-moe-2.8b"),
        ),
        Experiment(
            "partitions", "lanes, blocks, strided and routed chunks, against forwards", "ours",
            ("lanes", "learned"), ("dcdm-0.1b-k8-causal",), ("mdlm", "ar"),
        ),
        Experiment(
            "learning-rate", "three or four rates of each kind: how theirs was chosen", "ours", (),
            ("mdlm-0.1b", "bdlm-0.1b", "dcdm-0.1b-k8"),
            (*(f"{name}-rate-{rate}" for name in ("mdlm", "bdlm", "paper", "lanes", "ar") for rate in (2, 5, 10)),
             "bdlm-rate-1", "paper-rate-20"),
        ),
    )
}  # fmt: skip
"""By name, in the order of the paper."""
RATES = (0.5, 1.0, 2.0)
"""Of the experiment on learning rates, as multiples."""


def chosen_experiments(names: Sequence[str]) -> list[Experiment]:
    """The experiments called so, or `all`."""
    if unknown := sorted({*names} - {*EXPERIMENTS, "all"}):
        known = ", ".join(EXPERIMENTS)
        raise ConfigError(f"no experiment is called {', '.join(unknown)}; choose from {known}, or all")
    return [one for one in EXPERIMENTS.values() if "all" in names or one.name in names]


def variants_of(study: Study, experiment: Experiment) -> list[str]:
    """The variants of the study that the experiment is made of."""
    compared = [
        variant
        for claim in experiment.claims
        for comparison in study.claims[claim].below
        for variant, _ in sides(study, comparison)
    ]
    return list(dict.fromkeys([*compared, *experiment.variants]))


# --- the paper's scale --------------------------------------------------------------------------------------------

UTILISATION = 0.4
DEVICE_BYTES = 80e9
STEPS, STEPS_ELSEWHERE = 500_000, {"point-vs-subspace": 200_000}
CORPORA = (
    "ptb=ptb.txt wikitext=wikitext.txt lm1b=lm1b.txt lambada=lambada.jsonl ag_news=ag_news.jsonl "
    "pubmed=pubmed.jsonl arxiv=arxiv.jsonl"
)


def paper_commands(experiment: Experiment) -> str:
    """Everything to start the experiment at the paper's scale, and a bill; `--dry-run` of a command says more."""
    rates = RATES if experiment.name == "learning-rate" else (1.0,)
    steps = STEPS_ELSEWHERE.get(experiment.name, STEPS)
    jobs = [_job(name, rate, steps) for name in experiment.presets for rate in rates]
    lines = [
        f"{experiment.name}: {experiment.shows} ({experiment.paper})",
        "",
        "# once, on one machine (GPT-2's tokenizer, windows of 1,024)",
        "dcdm data prepare openwebtext --tokenizer gpt2 --out DATA/openwebtext",
        "",
        "# training: AdamW (0.9, 0.999, 1e-8), weight decay 0.01, peak 3e-4, cosine to 0, 2,500 warm-up steps",
        *(command for _, command, *_ in jobs),
        "",
    ]
    runs = [run for run, *_ in jobs]
    if experiment.name in ("downstream", "adaptive"):
        lines += ["# fine-tuning on GSM8K; MATH has a training split of its own", *map(_tuning, runs), ""]
        runs = [f"{run}-gsm8k" for run in runs]
    lines += ["# evaluation", *_evaluation(experiment.name, runs), ""]
    lines += [
        f"# bill: H800 at {UTILISATION:.0%} of 989 TFLOP/s, estimated, not measured",
        f"{'model':24}{'EFLOP':>9}{'GPU-hours':>11}",
        *(f"{run:24}{exa:9.0f}{hours:11,.0f}" for run, _, exa, hours in jobs),
        f"{'together':24}{sum(job[2] for job in jobs):9.0f}{sum(job[3] for job in jobs):11,.0f}",
    ]
    return "\n".join(lines)


def _job(name: str, rate: float, steps: int) -> tuple[str, str, float, float]:
    """(run, command, EFLOP, GPU-hours) of a preset with the paper's settings on the paper's number of devices."""
    from dcdm.model.costs import activation_bytes, bill, state_bytes
    from dcdm.training.settings import TrainConfig, preset_defaults

    config, costs = preset(name), bill(preset(name))
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


def _tuning(name: str) -> str:
    return (
        f"dcdm train --preset {name} --run runs/{name}-gsm8k --init runs/{name} --data gsm8k_train.jsonl "
        "--steps 1000 --set data.reading.prompt_field=question data.reading.response_field=answer"
    )


def _evaluation(experiment: str, names: Sequence[str]) -> list[str]:
    """Commands that measure what the experiment compares."""
    runs = " ".join(f"runs/{name}" for name in names)
    if experiment == "zero-shot":
        return [f"dcdm eval ppl {runs} --data {CORPORA} --estimator auto surrogate"]
    if experiment in ("loss-curves", "training-steps", "point-vs-subspace"):
        return [f"tensorboard --logdir_spec {','.join(f'{name}:runs/{name}' for name in names)}"]
    if experiment in ("partitions", "learning-rate"):
        return [f"dcdm eval ppl {runs} --data wikitext=wikitext.txt --estimator auto trajectory"]
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
