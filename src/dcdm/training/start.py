"""What a run needs before its first step: settings, data, and the refusal of what would fail only after hours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from dcdm.config import ConfigError, DataConfig
from dcdm.costs import activation_bytes, cost_estimate
from dcdm.data.prepare import prepare
from dcdm.data.store import PreparedData
from dcdm.data.tokenizers import load_tokenizer
from dcdm.distributed import World, broadcast_object
from dcdm.progress import ConsoleProgress
from dcdm.shipped import folder_of
from dcdm.training import settings as run_settings
from dcdm.training.checkpoint_folder import load_record, newest_whole
from dcdm.training.fingerprints import CHECKPOINTS, HASHED, SETTINGS, TOKENIZER, recorded_settings
from dcdm.training.metrics import wandb_package
from dcdm.training.optimizers import kept_bytes
from dcdm.training.settings import DataChoice, RunConfig, TrainConfig

T = TypeVar("T")

WRITTEN = {
    SETTINGS, TOKENIZER, CHECKPOINTS, HASHED, "metrics.jsonl", "timing.jsonl", "tensorboard", "wandb"
}  # fmt: skip
"""What a run writes into its folder."""
ASIDE = {".tmp", ".lock", ".log", ".out", ".err"}
"""Endings of what else may stand there before a run begins."""


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

    return PreparedData.open(from_main(prepared, world))


def from_main(action: Callable[[], T], world: World) -> T:
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


def describe(config: RunConfig, devices: tuple[int, ...] = (1, 8, 64)) -> str:
    """What the run would cost, without starting it."""
    length = config.window
    costs, train_settings = cost_estimate(config.model, length), config.train
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
