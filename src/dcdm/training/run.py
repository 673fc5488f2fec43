"""A run from settings to its folder: data, model, loop, checkpoints and metrics put together.

What may go wrong is found before the first step. Start weights come through `load_init`, and pictures for
TensorBoard through `picture`: reading foreign folders and drawing are not training's business.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from dcdm.config import ConfigError
from dcdm.costs import activation_bytes, bill
from dcdm.data.loader import Loader, WindowSet
from dcdm.data.prepare import prepare
from dcdm.data.settings import DataConfig
from dcdm.data.store import PreparedData
from dcdm.data.tokenizers import Tokenizer, load_tokenizer
from dcdm.distributed import World, any_true, broadcast_object, init_distributed, precision, shutdown
from dcdm.files import stops_handled_by
from dcdm.kinds import build
from dcdm.model import lora
from dcdm.model.transformer import Model
from dcdm.progress import ConsoleProgress
from dcdm.shipped import folder_of
from dcdm.training import settings as run_settings
from dcdm.training.checkpoint import Checkpointer
from dcdm.training.checkpoint_folder import CheckpointError, load_record, newest_whole
from dcdm.training.fingerprints import (
    CHECKPOINTS,
    HASHED,
    SETTINGS,
    TOKENIZER,
    Hashed,
    check_record,
    hash_data,
    record_of,
    recorded_settings,
    remember_hashes,
    tokenizer_problems,
)
from dcdm.training.fsdp import unsharded
from dcdm.training.loop import Hooks, NotFinite, train
from dcdm.training.metrics import Recorder, wandb_package
from dcdm.training.optimizers import kept_bytes
from dcdm.training.settings import DataChoice, RunConfig, TrainConfig
from dcdm.training.validation import MAIN, evaluate

T = TypeVar("T")

INTERRUPTED = 130
WRITTEN = {
    SETTINGS, TOKENIZER, CHECKPOINTS, HASHED, "metrics.jsonl", "timing.jsonl", "tensorboard", "wandb"
}  # fmt: skip
"""What a run writes into its folder."""
ASIDE = {".tmp", ".lock", ".log", ".out", ".err"}
"""Endings of what else may stand there before a run begins."""

MakePicture = Callable[[Model, torch.Tensor], Any]
"""(model, windows of text) → a figure of their chunks."""
LoadInit = Callable[[Model, str, Tokenizer], None]
"""Copy start weights from what `init` names into a model that reads text by this tokenizer."""


def run_training(
    preset: str | None,
    folder: Path,
    *,
    file: Path | None = None,
    changes: Mapping[str, Any] | None = None,
    device: str = "auto",
    dry_run: bool = False,
    load_init: LoadInit | None = None,
    picture: MakePicture | None = None,
    signals: bool = True,
) -> int:
    """Start a run, or resume the one in `folder`; returns the exit code: 0 done, 130 interrupted and saved.

    With `signals`, Ctrl-C and SIGTERM save and stop; without, they do what they do in the process at hand.
    """

    def ask() -> RunConfig:
        return _settle(preset, folder, file, changes or {})

    config = ask()
    if config.init is not None and load_init is None:
        raise ConfigError(f"init={config.init}: give load_init, the function that reads start weights")
    console = Console(stderr=True, soft_wrap=True)
    if dry_run:
        print(describe(config))
        return 0
    world = init_distributed(device)
    try:
        return _run(config, ask, folder, world, console, load_init, picture, signals)
    finally:
        shutdown(world)


def _settle(preset: str | None, folder: Path, file: Path | None, changes: Mapping[str, Any]) -> RunConfig:
    """Settings of a new run, or those of the run in `folder`, which flags may not contradict."""
    before = _stored_settings(folder)
    if before is None:
        _refuse_foreign(folder, file)
        return run_settings.resolve(preset, file, changes)
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
    return asked


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


def _stored_settings(folder: Path) -> RunConfig | None:
    """The settings of the run in `folder`: its settings.yaml, or what its newest whole checkpoint remembers."""
    if (folder / SETTINGS).exists():
        return run_settings.read(folder / SETTINGS)
    newest, _ = newest_whole(folder / CHECKPOINTS)
    return None if newest is None else recorded_settings(load_record(newest), newest)


def _run(
    config: RunConfig, ask: Callable[[], RunConfig], folder: Path, world: World, console: Console,
    load_init: LoadInit | None, picture: MakePicture | None, signals: bool,
) -> int:  # fmt: skip
    with ExitStack() as stack:
        checkpointer = stack.enter_context(
            Checkpointer(
                folder / CHECKPOINTS, world, keep_last=config.keep_last, keep_best=config.keep_best, metric=MAIN
            )
        )
        if world.is_main:  # what fails before the first step leaves nothing behind in a new folder
            stack.callback(lambda: None if (folder / SETTINGS).exists() else checkpointer.leave_no_trace())
        config = _from_main(ask, world)  # again, under the lock: another start may have been first
        check_start(config, folder, world)
        data = open_data(config, world)
        if is_prepared(config.data) and not (folder / SETTINGS).exists():
            check_as_prepared(config.data, data)
        hashed = _from_main(lambda: hash_data(data, folder), world)
        return _train(config, folder, data, hashed, checkpointer, world, console, load_init, picture, signals)


def check_start(config: RunConfig, folder: Path, world: World) -> None:
    """Refuse what would fail only after hours of preparing data."""
    batch, micro = config.train.batch_size, config.train.micro_batch
    if batch % world.size:
        raise ConfigError(f"--batch-size {batch} must be a multiple of the number of processes, {world.size}")
    if micro is not None and not 1 <= micro <= batch // world.size:
        raise ConfigError(
            f"--micro-batch {micro} must lie between 1 and {batch // world.size}, a process's share of --batch-size"
        )
    if config.wandb:
        wandb_package()
    is_new = _stored_settings(folder) is None  # a run that is resumed has all weights in its checkpoint
    if config.init is not None and is_new and not folder_of(config.init).is_dir():
        raise ConfigError(
            f"init={config.init} is not a folder, nor a model that comes with dcdm; name a run, a checkpoint, an "
            "exported folder, or what `dcdm models` lists"
        )


def _train(
    config: RunConfig, folder: Path, data: PreparedData, hashed: Hashed, checkpointer: Checkpointer, world: World,
    console: Console, load_init: LoadInit | None, picture: MakePicture | None, signals: bool,
) -> int:  # fmt: skip
    types = precision(config.train.dtype, world.device)
    config = _fit_vocabulary(config, data.tokenizer, console if world.is_main else None)
    train_set = data.dataset("train", config.window, config.data.overlong)
    valid_set = data.dataset("validation", config.window, config.data.overlong)
    batches = Loader(
        train_set, seed=config.train.seed, global_batch=config.train.batch_size, rank=world.rank, world=world.size,
        micro_batch=config.train.micro_batch, num_workers=config.data.loader_workers,
        pin_memory=world.device.type == "cuda",
    )  # fmt: skip
    model = build(config.model, seed=config.train.seed, device=world.device, dtype=types.weights)
    lost_init = None
    if config.init is not None and load_init is not None:
        try:
            load_init(model, config.init, data.tokenizer)
        except ConfigError as error:  # of no account if the run is resumed: a checkpoint has all weights
            lost_init = error
    if config.train.lora:
        lora.attach(model, config.train.lora, config.train.lora_alpha, config.train.seed)

    with ExitStack() as stack:
        stop = stack.enter_context(_signals()) if signals else _never
        hooks = Hooks(should_stop=stop, record=record_of(config, data, types))
        hooks.accept = lambda record: check_record(record, config, data, types, folder)
        recorder: Recorder | None = None
        if world.is_main:
            recorder = stack.enter_context(Recorder(folder, config, console, world))
            hooks.on_step, hooks.on_evaluation = recorder.on_step, recorder.on_evaluation
            hooks.on_resume = _begin(recorder, console, folder, config, data.tokenizer, hashed)
            hooks.on_skipped = lambda path, reason: console.print(f"{path}: skipped: {reason}")
        hooks.on_resume = _unless_lost(lost_init, hooks.on_resume)

        def assess(model: Model, step: int) -> Mapping[str, float]:
            if picture is not None and config.tensorboard:
                with unsharded(model):
                    if recorder is not None:
                        recorder.on_picture(step, picture(model, _samples(valid_set).to(world.device)))
            return evaluate(
                model, valid_set, world, sequences=config.evaluate_sequences, samples=config.evaluate_samples
            )

        try:
            done = train(
                model, batches, config.train, config.objective, world=world, hooks=hooks,
                checkpointer=checkpointer, checkpoint_every=config.checkpoint_every,
                evaluate=assess, evaluate_every=config.evaluate_every, evaluate_first=config.evaluate_first,
            )  # fmt: skip
        except NotFinite as error:
            _keep_batch(error, folder, world)
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO):
                raise
            raise CheckpointError(
                f"{folder} cannot be written any more ({error}); repair that, and the same command resumes the run"
            ) from error
        interrupted = any_true(stop(), world) and done < config.train.steps
    if world.is_main:
        what = "interrupted and saved" if interrupted else "done"
        console.print(f"{folder}: {what} at step {done}" + ("; the same command resumes it" if interrupted else ""))
    return INTERRUPTED if interrupted else 0


def _samples(dataset: WindowSet) -> torch.Tensor:
    """The texts whose chunks are shown."""
    return torch.stack([dataset[number]["tokens"] for number in range(min(4, len(dataset)))])


def _unless_lost(lost: ConfigError | None, begin: Callable[[int], None]) -> Callable[[int], None]:
    """`begin`, or the failure to read start weights, where the run would begin with them."""

    def on_resume(step: int) -> None:
        if step == 0 and lost is not None:
            raise lost
        begin(step)

    return on_resume


def _begin(
    recorder: Recorder, console: Console, folder: Path, config: RunConfig, tokenizer: Tokenizer, hashed: Hashed
) -> Callable[[int], None]:
    """What the main process does once it is certain from where the run resumes: now it may write to the folder."""

    def on_resume(step: int) -> None:
        kept = folder / TOKENIZER
        if kept.exists() and tokenizer_problems({"tokenizer": tokenizer.fingerprint}, folder):
            console.print(f"{kept} is damaged; written again from that of the data")
        tokenizer.save(kept)
        remember_hashes(hashed, folder)
        run_settings.write(config, folder / SETTINGS)
        recorder.on_resume(step)
        if step:
            console.print(f"{folder}: resuming from step {step}")

    return on_resume


def is_prepared(choice: DataChoice) -> bool:
    """Whether the data is a folder that `dcdm data prepare` wrote."""
    return len(choice.sources) == 1 and (Path(choice.sources[0]) / "manifest.json").exists()


def check_as_prepared(choice: DataChoice, data: PreparedData) -> None:
    """Refuse settings of the data that have no effect, since it was prepared with others."""
    given = data.manifest.get("given", {})
    defaults = {DataChoice.tokenizer, run_settings.preset_defaults("lanes-small")["data.tokenizer"]}
    ignored = []
    same = choice.tokenizer in {*defaults, given.get("tokenizer")}
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

    return PreparedData.open(_from_main(prepared, world))


def _from_main(action: Callable[[], T], world: World) -> T:
    """The main process's result on all ranks; if it fails, all do."""
    result: T | None = None
    failure: Exception | None = None
    if world.is_main:
        try:
            result = action()
        except Exception as error:  # told to the other ranks, which wait for it
            failure = error
    result, message = broadcast_object((result, None if failure is None else str(failure)), world)
    if failure is not None:
        raise failure
    if message is not None:
        raise ConfigError(message)
    return result  # type: ignore[return-value]


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


def _never() -> bool:
    return False


@contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """SIGINT, SIGTERM and SIGHUP ask the loop to save and stop; a second one ends at once."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("saving and stopping after this step (once more: stop at once)", file=sys.stderr)

    with stops_handled_by(ask):
        yield lambda: asked


def describe(config: RunConfig, devices: tuple[int, ...] = (1, 8, 64)) -> str:
    """What the run would cost, without starting it."""
    length = config.window
    costs, train_settings = bill(config.model, length), config.train
    tokens = train_settings.steps * train_settings.batch_size * length
    saves = train_settings.steps // config.checkpoint_every + (train_settings.steps % config.checkpoint_every > 0)
    size = kept_bytes(config.model, train_settings)
    lines = [
        f"model        {config.model.kind}, {costs.total_parameters / 1e6:.2f}M parameters"
        + (f", {costs.active_parameters / 1e6:.2f}M active" if config.model.moe else "")
        + f", vocabulary {config.model.vocab_size:,} before the tokenizer is known",
        f"data         {', '.join(config.data.sources)}, tokenizer {config.data.tokenizer}, windows of {length}",
        f"steps        {train_settings.steps:,} of {train_settings.batch_size} windows: {tokens / 1e9:.3g}B tokens",
        f"operations   {costs.training * train_settings.batch_size / 1e12:.3g} TFLOP a step, "
        f"{costs.training_per_token * tokens / 1e18:.3g} EFLOP in all",
        f"checkpoints  {saves} of {size / 1e9:.2f} GB, {config.keep_last} last and {config.keep_best} best kept",
    ]
    for count in devices:
        share = max(1, train_settings.batch_size // count)
        rows = min(share, train_settings.micro_batch or share)
        state = (size + 4 * costs.total_parameters) / count  # what is kept, and gradients
        memory = state + activation_bytes(config.model, rows, length)
        lines.append(
            f"{count:3d} device{'s' if count > 1 else ' '}  {memory / 1e9:.1f} GB each at {rows} windows a pass; "
            f"{costs.step_seconds(train_settings.batch_size, count, 0.4):.3g} s a step on H800 at 40 %"
        )
    return "\n".join(lines)
