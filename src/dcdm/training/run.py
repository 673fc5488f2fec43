"""A run from settings to its folder: data, model, steps, evaluations and checkpoints, in this order.

What may go wrong is found before the first step. Initial weights come through `load_init`, and
pictures through `picture`: reading foreign folders and drawing are not training's business.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dcdm.config import ConfigError, DataConfig
from dcdm.data.loader import Loader, WindowSet, in_order
from dcdm.data.prepare import prepare
from dcdm.data.store import PreparedData
from dcdm.data.tokenizers import Tokenizer, load_tokenizer
from dcdm.distributed import (
    World,
    any_true,
    from_main,
    gather_objects,
    init_distributed,
    missing_ranks_named,
    precision,
    shutdown,
)
from dcdm.files import stops_handled_by
from dcdm.kinds import build
from dcdm.likelihood.estimators import Estimator, default_estimator, score
from dcdm.likelihood.statistics import known, mean_and_stderr
from dcdm.model import lora
from dcdm.model.transformer import Model
from dcdm.progress import ConsoleProgress
from dcdm.shipped import folder_of
from dcdm.training import settings as run_settings
from dcdm.training.checkpoint import Checkpointer
from dcdm.training.checkpoint_folder import (
    CHECKPOINTS,
    SETTINGS,
    TOKENIZER,
    CheckpointError,
    check_record,
    checkpoints,
    load_record,
    newest_whole,
    record_of,
    recorded_settings,
    tokenizer_problems,
)
from dcdm.training.fsdp import FromWhole, shard
from dcdm.training.metrics import MAIN, Recorder, wandb_package
from dcdm.training.settings import DataChoice, RunConfig, TrainConfig
from dcdm.training.trainer import NotFinite, Trainer

WRITTEN = {SETTINGS, TOKENIZER, CHECKPOINTS, "metrics.jsonl", "timing.jsonl", "tensorboard", "wandb"}
"""What a run writes into its folder."""
ASIDE = {".tmp", ".lock", ".log", ".out", ".err"}
"""Endings of what else may lie there before a run begins."""
INTERRUPTED = 130

Watch = Callable[[Model], None]
"""Is shown the model at every evaluation, by the main process."""
LoadInit = Callable[[Model, str, Tokenizer], None]
"""Copy initial weights from what `init` names into a model that reads text by this tokenizer."""


def run_training(
    preset: str | None,
    folder: Path,
    *,
    file: Path | None = None,
    changes: Mapping[str, Any] | None = None,
    device: str = "auto",
    load_init: LoadInit | None = None,
    watch: Watch | None = None,
    signals: bool = True,
) -> int:
    """Start a run, or resume the one in `folder`; returns the exit code: 0 done, 130 interrupted and saved.

    With `signals`, Ctrl-C and SIGTERM save and stop; without, they do what they do in the process at hand.
    """
    config, before = settle(preset, folder, file, changes or {})
    if config.init is not None and load_init is None:
        raise ConfigError(f"init={config.init}: give load_init, the function that reads initial weights")
    world = init_distributed(device)
    try:
        return _run(config, before, folder, world, load_init, watch, signals)
    finally:
        shutdown(world)


def _run(
    config: RunConfig, before: RunConfig | None, folder: Path, world: World,
    load_init: LoadInit | None, watch: Watch | None, signals: bool,
) -> int:  # fmt: skip
    console = Console(stderr=True, soft_wrap=True)
    with ExitStack() as stack:
        # the folder is ours alone from here on; what fails before the first step leaves nothing behind in a new one
        checkpointer = stack.enter_context(
            Checkpointer(
                folder / CHECKPOINTS, world, keep_last=config.keep_last, keep_best=config.keep_best, metric=MAIN
            )
        )
        if world.is_main:
            stack.callback(lambda: None if (folder / SETTINGS).exists() else checkpointer.leave_no_trace())
        if from_main(lambda: stored_settings(folder) != before, world):
            raise ConfigError(f"{folder}: another process began this run just now; the same command resumes it")
        check_start(config, before is None, world)

        data = open_data(config, world)
        if is_prepared(config.data) and not (folder / SETTINGS).exists():
            check_as_prepared(config.data, data)
        from_main(data.check_at_start, world)

        types = precision(config.train.dtype, world.device)
        config = _fit_vocabulary(config, data.tokenizer, console if world.is_main else None)
        has_checkpoint = from_main(lambda: bool(checkpoints(checkpointer.folder)), world)

        def load(model: Model) -> None:
            if config.init is not None and load_init is not None and not has_checkpoint:
                load_init(model, config.init, data.tokenizer)

        windows = data.dataset("train", config.window, config.data.overlong)
        trainer = trainer_of(config, windows, world, load)
        resumed = trainer.resume(
            checkpointer, accept=lambda record: check_record(record, config, data, types, folder)
        )
        recorder: Recorder | None = None
        if world.is_main:
            for path, reason in resumed.skipped if resumed is not None else ():
                console.print(f"skipping {path}: {reason}")
            recorder = stack.enter_context(Recorder(folder, config, console, world))
            _begin(folder, config, data.tokenizer, console)
            recorder.on_resume(trainer.step)
            if trainer.step:
                console.print(f"{folder}: resuming from step {trainer.step}")

        stop_asked = stack.enter_context(_stop_asked(signals))
        valid_set = data.dataset("validation", config.window, config.data.overlong)
        record = record_of(config, data, types)
        try:
            interrupted = _train(
                trainer, config, valid_set, checkpointer, record, recorder, watch, stop_asked, world
            )
        except NotFinite as error:
            _keep_batch(error, folder, world)
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO):
                raise
            raise CheckpointError(
                f"{folder} cannot be written any more ({error}); repair that, and the same command resumes the run"
            ) from error
    if world.is_main:
        console.print(closing_line(folder, trainer, interrupted))
    return INTERRUPTED if interrupted else 0


def _train(
    trainer: Trainer, config: RunConfig, valid_set: WindowSet, checkpointer: Checkpointer, record: dict[str, Any],
    recorder: Recorder | None, watch: Watch | None, stop_asked: Callable[[], bool], world: World,
) -> bool:  # fmt: skip
    """The loop: step, report, evaluate, save. True if it was asked to stop before its last step, and saved."""

    def assess() -> Mapping[str, float]:
        with trainer.averaged() as model:
            if watch is not None and recorder is not None:
                watch(model)
            figures = evaluate(
                model, valid_set, world, sequences=config.evaluate_sequences, samples=config.evaluate_samples
            )
        if recorder is not None:
            recorder.on_evaluation(trainer.step, figures)
        return figures

    if config.evaluate_first and trainer.step == 0:
        assess()
    while trainer.step < config.train.steps:
        with missing_ranks_named(world):
            report = trainer.take_step()
        if recorder is not None:
            recorder.on_step(report)

        stop = any_true(stop_asked(), world)
        done = trainer.step == config.train.steps
        figures: Mapping[str, float] = {}
        # also when stopping: a resumed run starts after this step and would never come back to it
        if trainer.step % config.evaluate_every == 0 or done:
            figures = assess()
        if trainer.step % config.checkpoint_every == 0 or stop or done:
            trainer.save(checkpointer, record, figures, wait=stop or done)
        if stop:
            return not done
    return False


def evaluate(
    model: Model, dataset: WindowSet, world: World, *, sequences: int, samples: int, batch_size: int = 16
) -> dict[str, float]:
    """Nats per token on `sequences` windows spread evenly over the data: `valid_nll` by the valid estimator with
    its standard error over windows (absent for a single one), and for DCDM with the paper's routing `surrogate_nll`
    beside it, which is not a bound; for a model that writes in lanes `lanes_S_nll` for each number S of its list.

    The model's weights must be whole on every rank. Neither batch size nor number of ranks changes the result.
    """
    names: list[tuple[str, Estimator, int | None]] = [(MAIN, default_estimator(model), None)]
    if model.config.routes_from_noise:
        names.append(("surrogate_nll", "surrogate", None))
    if model.config.lanes is not None:  # the default is one of them
        names = [(f"lanes_{lanes}_nll", "exact", lanes) for lanes in model.config.lanes]
    figures: dict[str, float] = {}
    with torch.no_grad():
        for name, estimator, lanes in names:
            mine = []
            for batch in in_order(dataset, batch_size, rank=world.rank, world=world.size, limit=sequences):
                tokens, prompt = batch["tokens"].to(world.device), batch["prompt"].to(world.device)
                result = score(model, tokens, estimator, samples, prompt=prompt, index=batch["index"], lanes=lanes)
                columns = (x.tolist() for x in (batch["index"], result.nats, result.tokens))
                mine += list(zip(*columns, strict=True))
            rows = sorted(row for part in gather_objects(mine, world) for row in part)
            figures[name], stderr = mean_and_stderr((nats, count) for _, nats, count in rows)
            if (error := known(stderr)) is not None:
                figures[f"{name}_stderr"] = error
    if model.config.lanes is not None:
        ours = f"lanes_{model.config.default_lanes}_nll"
        main = {name.replace(ours, MAIN): value for name, value in figures.items() if name.startswith(ours)}
        figures = main | figures
    return figures


def trainer_of(
    config: RunConfig, windows: WindowSet, world: World, load: Callable[[Model], None] = lambda model: None
) -> Trainer:
    """The model, after `load` has given it initial weights if there are any to read, and its batches."""
    train, types = config.train, precision(config.train.dtype, world.device)
    alone = world.size == 1
    model = build(
        config.model, seed=train.seed if alone else None, device=world.device if alone else "meta",
        dtype=types.weights,
    )  # fmt: skip
    if train.lora:
        lora.attach(model, train.lora, train.lora_alpha, train.seed)
    if train.only_drafts:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("drafting."))
    shard(model, world, compute_dtype=types.compute, replicate=train.replicate, seed=train.seed)
    with nullcontext() if alone else FromWhole():
        if not alone and train.lora:
            lora.init_adapters(model, train.seed)
        load(model)
    batches = Loader(
        windows, seed=train.seed, global_batch=train.batch_size, rank=world.rank, world=world.size,
        micro_batch=train.micro_batch, num_workers=config.data.loader_workers,
        pin_memory=world.device.type == "cuda",
    )  # fmt: skip
    return Trainer(model, batches, train, config.objective, world)


def _begin(folder: Path, config: RunConfig, tokenizer: Tokenizer, console: Console) -> None:
    """What the main process writes to the folder once it is certain from where the run resumes."""
    kept = folder / TOKENIZER
    if kept.exists() and tokenizer_problems({"tokenizer": tokenizer.fingerprint}, folder):
        console.print(f"{kept} is damaged; written again from that of the data")
    tokenizer.save(kept)
    run_settings.write(config, folder / SETTINGS)


def closing_line(folder: Path, trainer: Trainer, interrupted: bool) -> str:
    """What a run ends with: where it is, and what can be done with it."""
    if interrupted:
        return f"{folder}: interrupted and saved at step {trainer.step}; the same command resumes it"
    see = "" if trainer.model.config.kind in ("ar", "lanes") else f"dcdm chunks {folder}, "
    return (
        f"{folder}: done at step {trainer.step}. Next: {see}dcdm sample {folder} --prompt TEXT, "
        f"dcdm eval ppl {folder} --data FILE"
    )


def _fit_vocabulary(config: RunConfig, tokenizer: Tokenizer, console: Console | None) -> RunConfig:
    if tokenizer.vocab_size == config.model.vocab_size:
        return config
    if console is not None:
        console.print(f"vocabulary: {tokenizer.vocab_size:,}, that of the tokenizer {config.data.tokenizer}")
    return replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))


def _keep_batch(error: NotFinite, folder: Path, world: World) -> None:
    kept = {f"{number}.{name}": value.cpu() for number, batch in enumerate(error.batches)
            for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}  # fmt: skip
    from safetensors.torch import save_file

    save_file(kept, folder / f"bad-batch-step{error.step}-rank{world.rank}.safetensors")


@contextmanager
def _stop_asked(signals: bool) -> Iterator[Callable[[], bool]]:
    """With `signals`, SIGINT, SIGTERM and SIGHUP ask the loop to save and stop; a second one ends at once."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("saving and stopping after this step (once more: stop at once)", file=sys.stderr)

    with stops_handled_by(ask) if signals else nullcontext():
        yield lambda: asked


# --- before the first step ----------------------------------------------------------------------------------------


def settle(
    preset: str | None, folder: Path, file: Path | None, changes: Mapping[str, Any]
) -> tuple[RunConfig, RunConfig | None]:
    """The settings of a new run or, unless flags contradict them, of the run in `folder`; and the latter's."""
    before = stored_settings(folder)
    if before is None:
        _refuse_foreign(folder, file)
        return run_settings.resolve(preset, file, changes), None
    if preset is None and file is None:
        asked = run_settings.changed(before, changes)
    else:
        asked = run_settings.resolve(preset, file, changes)
        asked = replace(asked, model=replace(asked.model, vocab_size=before.model.vocab_size))
    if wrong := run_settings.differences(before, asked):
        if wrong == ["train.steps"]:
            raise ConfigError(_other_steps(folder, before.train.steps, asked.train))
        raise ConfigError(
            f"{folder} was started with other settings ({', '.join(wrong)}); "
            "leave them out to resume it, or choose another --run"
        )
    return asked, before


def _other_steps(folder: Path, before: int, asked: TrainConfig) -> str:
    """What to say where a run is asked for another number of steps than its learning rate was made for."""
    if asked.steps < before:
        return (
            f"{folder} is a run of {before} steps, --steps {asked.steps} are fewer; leave --steps out to resume it"
        )
    return (
        f"{folder} is a run of {before} steps, and its learning rate falls towards their end; to train it for "
        f"{asked.steps - before} more, start another run from it: --init {folder} --run NEW --steps "
        f"{asked.steps - before} (a run with --set train.schedule=constant can be made longer)"
    )


def _refuse_foreign(folder: Path, own: Path | None) -> None:
    """Refuse to begin a run among files that are not of a run; `own` is the file of its settings."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--run {folder} is a file; choose a folder")
    names = sorted(p.name for p in folder.iterdir() if not _of_a_run(p, own)) if folder.is_dir() else []
    if names:
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise ConfigError(
            f"--run {folder} holds no run but other files ({shown}); choose an empty folder or one that does not "
            "exist"
        )


def _of_a_run(path: Path, own: Path | None) -> bool:
    """Whether a file may stand in a folder where a run begins: what a killed start left, hidden files and logs."""
    if path.name in WRITTEN or path.name.startswith((".", "bad-batch-")) or path.suffix in ASIDE:
        return True
    return own is not None and own.exists() and path.samefile(own)


def stored_settings(folder: Path) -> RunConfig | None:
    """The settings of the run in `folder`: its settings.yaml, or what its newest whole checkpoint remembers."""
    if (folder / SETTINGS).exists():
        return run_settings.read(folder / SETTINGS)
    newest, _ = newest_whole(folder / CHECKPOINTS)
    return None if newest is None else recorded_settings(load_record(newest), newest)


def check_start(config: RunConfig, is_new: bool, world: World) -> None:
    """Refuse what would fail only after hours of preparing data."""
    batch, micro = config.train.batch_size, config.train.micro_batch
    if batch % world.size:
        raise ConfigError(f"--batch-size {batch} must be a multiple of the number of processes, {world.size}")
    if world.size % config.train.replicate:
        raise ConfigError(
            f"train.replicate={config.train.replicate} must divide the number of processes, {world.size}"
        )
    if micro is not None and not 1 <= micro <= batch // world.size:
        raise ConfigError(
            f"--micro-batch {micro} must lie between 1 and {batch // world.size}, a process's share of --batch-size"
        )
    if config.wandb:
        wandb_package()
    if is_new and config.init is not None and not folder_of(config.init).is_dir():
        raise ConfigError(
            f"init={config.init} is not a folder, nor a model that comes with dcdm; name a run, a checkpoint, an "
            "exported folder, or what `dcdm models` lists"
        )


def is_prepared(choice: DataChoice) -> bool:
    """Whether the data is a folder that `dcdm data prepare` wrote."""
    return len(choice.sources) == 1 and (Path(choice.sources[0]) / "manifest.json").exists()


def check_as_prepared(choice: DataChoice, data: PreparedData) -> None:
    """Refuse settings of the data that have no effect, since it was prepared with others."""
    given = data.manifest.get("given", {})
    defaults = {run_settings.preset_defaults(name).get("data.tokenizer") for name in ("debug", "small", "1.7b")}
    ignored = []
    same = choice.tokenizer in {*defaults, DataChoice.tokenizer, given.get("tokenizer")}
    if not same and Path(choice.tokenizer).is_dir():  # by another path, or a copy
        same = load_tokenizer(choice.tokenizer).fingerprint == data.tokenizer.fingerprint
    if not same:
        ignored.append(f"data.tokenizer={choice.tokenizer}")
    if choice.validation and list(choice.validation) != given.get("validation"):
        ignored.append(f"data.validation={list(choice.validation)}")
    if choice.reading != DataConfig():
        asked, kept = choice.reading.identity(bool(choice.validation)), data.manifest["plan"]["settings"]
        ignored += [f"data.reading.{name}={value}" for name, value in asked.items() if kept.get(name) != value]
    if ignored:
        raise ConfigError(
            f"{', '.join(ignored)}: no effect on {choice.sources[0]}, which is prepared already; leave it out, or "
            "prepare the text anew with it (`dcdm data prepare`)"
        )


def open_data(config: RunConfig, world: World) -> PreparedData:
    """The prepared data: given as such, or prepared now by the main process."""
    choice = config.data
    if is_prepared(choice):
        return PreparedData.open(Path(choice.sources[0]))

    def prepared() -> Path:
        with ConsoleProgress() as reporter:
            return prepare(
                list(choice.sources), choice.tokenizer, None, validation=choice.validation,
                settings=choice.reading, workers=choice.workers, reporter=reporter,
            ).folder  # fmt: skip

    return PreparedData.open(from_main(prepared, world))
