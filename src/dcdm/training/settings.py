"""The settings of a run: from a preset, a YAML file and flags, in this order, checked before anything starts."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dcdm.config import RETIRED, ConfigError, DataConfig, Dtype, ModelConfig, ObjectiveConfig, without_retired
from dcdm.files import UnreadableFile, read_yaml, write_whole
from dcdm.presets import noise, preset

T = TypeVar("T")

Schedule = Literal["cosine", "constant"]
Optimizer = Literal["adamw", "muon"]
FREE_TO_CHANGE = {
    "evaluate_every", "evaluate_sequences", "evaluate_samples", "checkpoint_every", "keep_last", "keep_best",
    "log_every", "tensorboard", "wandb", "data.workers", "data.loader_workers", "train.micro_batch",
    "train.replicate", "data.sources", "data.validation",
}  # fmt: skip
"""Settings that may differ when a run is resumed: they do not change what it computes. Prepared data may stand
elsewhere, since a checkpoint's record names their bytes."""


@dataclass(frozen=True)
class TrainConfig:
    """How long and how fast to train; the defaults are the paper's."""

    steps: int = 500_000
    batch_size: int = 128
    """Sequences of one optimizer step, over all devices."""
    micro_batch: int | None = None
    """Sequences of one pass on one device; None means its whole share of the step."""
    learning_rate: float = 3e-4
    schedule: Schedule = "cosine"
    """After warm-up a cosine to 0, or constant with a linear decay over the last `decay_share` of the steps."""
    decay_share: float = 0.2
    warmup_steps: int = 2_500
    optimizer: Optimizer = "adamw"
    """adamw as in the paper, or muon: the matrices of the network by Muon, the rest by AdamW."""
    muon_rate: float = 1e-2
    """Peak learning rate of the matrices that Muon moves; `learning_rate` is that of all else."""
    muon_momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0
    ema_decay: float = 0.0
    """Averaged weights beside the trained ones; 0 means none."""
    dtype: Dtype = "auto"
    """Type of the computation: bf16 keeps weights and moments in fp32, fp64 has all in 64 bits; auto is bf16 on
    CUDA and fp32 elsewhere."""
    replicate: int = 1
    """Groups of devices that each hold a whole model in shards (hybrid sharding). With one for each node, weights
    are gathered within nodes, and gradients alone summed over all; 1 shards over all devices."""
    compile: bool = False
    activation_checkpointing: bool = False
    lora: int = 0
    """Rank of adapters on the blocks, which are trained in place of all weights; 0 means none."""
    lora_alpha: float | None = None
    """What adapters add is scaled by this over their rank; None means twice the rank."""
    only_drafts: bool = False
    """Train the draft head alone, on the distributions of the network, which is frozen."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "replicate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ConfigError(f"micro_batch={self.micro_batch} must be at least 1")
        for name in ("learning_rate", "muon_rate", "clip", "adam_eps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        for name, known in (("schedule", Schedule), ("dtype", Dtype), ("optimizer", Optimizer)):
            if getattr(self, name) not in get_args(known):
                raise ConfigError(_unknown(name, getattr(self, name), known))
        for name in ("decay_share", "ema_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} must lie between 0 and 1")
        if not 0 <= self.muon_momentum < 1:
            raise ConfigError(f"muon_momentum={self.muon_momentum} must be at least 0 and below 1")
        if self.ema_decay == 1:
            raise ConfigError("ema_decay=1 would never take up a trained weight; choose a value below 1")
        if self.lora < 0:
            raise ConfigError(f"lora={self.lora} must be 0 or more: the rank of the adapters")
        if self.lora_alpha is not None and not self.lora_alpha > 0:
            raise ConfigError(f"lora_alpha={self.lora_alpha} must be above 0")
        if self.lora_alpha is not None and not self.lora:
            raise ConfigError(f"lora_alpha={self.lora_alpha} needs adapters: set lora, their rank, or leave it out")
        for name in ("warmup_steps", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas={self.betas} must be two numbers, each at least 0 and below 1")


@dataclass(frozen=True)
class DataChoice:
    """What to train on; see docs/data.md."""

    sources: tuple[str, ...] = ("stdlib",)
    """Sources of text, or one folder that `dcdm data prepare` wrote."""
    tokenizer: str = "bytes"
    validation: tuple[str, ...] = ()
    reading: DataConfig = field(default_factory=DataConfig)
    overlong: Literal["truncate", "drop"] = "truncate"
    window: int | None = None
    """Positions of a training window; None means the model's context length."""
    workers: int | None = None
    """Threads of the preparation."""
    loader_workers: int = 0

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("data.sources names nothing; give stdlib, files, folders or hub data sets")
        for name in ("workers", "loader_workers"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"data.{name}={getattr(self, name)} must be 0 or more")


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run follows from."""

    model: ModelConfig
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataChoice = field(default_factory=DataChoice)
    init: str | None = None
    """Initial weights: a run, a checkpoint, an exported folder, or a name that `dcdm models` lists."""
    evaluate_every: int = 1_000
    evaluate_first: bool = False
    """Evaluate before the first step, too: what initial weights are worth."""
    evaluate_sequences: int = 64
    evaluate_samples: int = 4
    checkpoint_every: int = 1_000
    keep_last: int = 3
    keep_best: int = 1
    log_every: int = 10
    tensorboard: bool = True
    wandb: str | None = None
    """Project name; needs the package wandb."""

    def __post_init__(self) -> None:
        for name in ("evaluate_every", "evaluate_sequences", "evaluate_samples", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        self.objective.check_fits(self.model)
        if self.train.lora and self.init is None:
            raise ConfigError(
                f"train.lora={self.train.lora} trains adapters beside frozen weights, and there are none: name "
                "them with init, or leave it out"
            )
        if self.objective.soft_targets and not (self.train.lora and self.model.kind == "lanes"):
            raise ConfigError(
                "objective.soft_targets are those of frozen weights in one lane: train a lane model by train.lora, "
                "or leave it out"
            )
        if self.train.only_drafts and (self.init is None or not self.model.drafts or self.train.lora):
            raise ConfigError(
                "train.only_drafts trains the draft head of a frozen network: name that with init, give "
                "model.drafts, and leave train.lora out"
            )
        if not 2 <= self.window <= self.model.max_position:
            raise ConfigError(
                f"data.window={self.window} must lie between 2 and model.max_position={self.model.max_position}"
            )

    @property
    def window(self) -> int:
        """Positions of a training window."""
        return self.model.context_length if self.data.window is None else self.data.window


def preset_defaults(name: str) -> dict[str, Any]:
    """What suits a small preset on a laptop better than the paper's settings, alike for every kind.

    Its noise is `presets.noise`.
    """
    if "small" in name:
        return {
            "train.steps": 2_000, "train.batch_size": 8, "train.optimizer": "muon", "train.learning_rate": 2e-3,
            "train.muon_rate": 5e-3, "train.warmup_steps": 100, "train.schedule": "constant",
            "train.decay_share": 0.25, "data.tokenizer": "bpe:2048", "objective.prompt_share": 0.4,
            "evaluate_every": 500, "evaluate_sequences": 64, "checkpoint_every": 500,
        }  # fmt: skip
    if "debug" not in name:
        batch = 128 if "0.1b" in name else 512
        return {"train.batch_size": batch, "data.sources": ("openwebtext",), "data.tokenizer": "gpt2"}
    return {
        "train.steps": 1_000, "train.batch_size": 16, "train.optimizer": "muon", "train.learning_rate": 2e-3,
        "train.muon_rate": 2.5e-3, "train.warmup_steps": 50, "evaluate_every": 200, "evaluate_sequences": 32,
        "checkpoint_every": 200,
    }  # fmt: skip


NOISE = {"t_shape", "t_min", "t_max"}
"""Settings of the objective that a preset's noise stands for; one of them named gives up all of it."""


def resolve(
    preset_name: str | None, file: Path | str | None = None, changes: Mapping[str, Any] | None = None
) -> RunConfig:
    """The run's settings. `changes` maps dotted names ("train.steps") to values and wins over the file."""
    merged: dict[str, Any] = {}
    for _, values in _sources(preset_name, file, changes or {}):
        _merge(merged, values)
    if "vocab_size" not in merged.get("model", {}):
        _put(merged, "model.vocab_size", 4)
    return made(RunConfig, merged, "")


def _sources(
    preset_name: str | None, file: Path | str | None, changes: Mapping[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """Where settings come from, the later winning over the earlier, and what each says."""
    from_file: dict[str, Any] = {}
    if file is not None:
        from_file = _read_yaml(Path(file), f"--config {file}")
        for group in ("model", "objective", "train", "data"):
            if group in from_file and not isinstance(from_file[group], Mapping):
                raise ConfigError(f"--config {file}: {group} must hold settings by name, not {from_file[group]!r}")
        named = from_file.pop("preset", None)
        if named is not None and not isinstance(named, str):
            raise ConfigError(f"preset={named!r} must be a name; `dcdm presets` lists them")
        preset_name = preset_name or named
    if preset_name is None and "model" not in {*from_file, *changes}:
        raise ConfigError("--preset is missing; `dcdm presets` lists them")
    asked: dict[str, Any] = {}
    for name, value in changes.items():
        _put(asked, name, value)
    from_preset: dict[str, Any] = {}
    if preset_name is not None:
        from_preset["model"] = preset(preset_name).to_dict()
        model = {**from_preset["model"], **from_file.get("model", {}), **asked.get("model", {})}
        named = {*from_file.get("objective", {}), *asked.get("objective", {})} & NOISE
        levels = {} if named else noise(preset_name, model["kind"], model.get("predict", ""))
        from_preset["objective"] = dict(levels)
        for name, value in preset_defaults(preset_name).items():
            _put(from_preset, name, value)
    return [(f"preset {preset_name}", from_preset), (str(file), from_file), ("command line", asked)]


@dataclass(frozen=True)
class Setting:
    """One setting of a run, by the name that `--set` takes."""

    name: str
    value: Any
    source: str
    """Where the value comes from: the default, a preset, a file, or the command line."""


def listed(
    preset_name: str | None, file: Path | str | None = None, changes: Mapping[str, Any] | None = None
) -> list[Setting]:
    """Every setting that `resolve` gives, and where it comes from."""
    origin: dict[str, str] = {}
    for source, values in _sources(preset_name, file, changes or {}):
        origin |= dict.fromkeys(flat(values), source)
    config = resolve(preset_name, file, changes)
    return [Setting(name, value, origin.get(name, "default")) for name, value in flat(to_dict(config)).items()]


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain values, as written to a run's settings.yaml."""
    return _plain(asdict(config))


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """`config` with the settings that `changes` names by their dotted names."""
    values = to_dict(config)
    for name, value in changes.items():
        _put(values, name, value)
    return from_dict(values)


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Settings from the plain values that `to_dict` gave."""
    return made(RunConfig, values, "")


def differences(one: RunConfig, other: RunConfig) -> list[str]:
    """Dotted names of the settings that differ and may not, when a run of `one` is resumed with `other`."""
    ours, theirs = flat(to_dict(one)), flat(to_dict(other))
    free = FREE_TO_CHANGE | ({"train.steps"} if _only_longer(one.train, other.train) else set())
    if "auto" in (one.train.dtype, other.train.dtype):  # checkpoints know what it stood for
        free = free | {"train.dtype"}
    if one.model.moe is not None:  # its balance loss is taken for each pass
        free = free - {"train.micro_batch"}
    return [n for n in sorted({*ours, *theirs}) if ours.get(n) != theirs.get(n) and n not in free]


def _only_longer(one: TrainConfig, other: TrainConfig) -> bool:
    """Whether a run is only made longer at a constant learning rate, which looks at the end only once it decays."""
    return one.schedule == other.schedule == "constant" and other.steps > one.steps


def with_values(names: list[str], one: RunConfig, other: RunConfig) -> str:
    """The settings called `names` as they are in two runs, for a message."""
    ours, theirs = flat(to_dict(one)), flat(to_dict(other))
    shown = [f"{name} is {ours.get(name)} and was {theirs.get(name)}" for name in names[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def as_yaml(config: RunConfig) -> str:
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False)


def write(config: RunConfig, path: Path) -> None:
    write_whole(path, as_yaml(config).encode())


def read(path: Path) -> RunConfig:
    """The settings that a run keeps in its folder."""
    try:
        return from_dict(_read_yaml(path, str(path)))
    except ConfigError as error:
        raise ConfigError(f"{error}; {path} is damaged: restore it, or remove it and resume the run") from error


def _read_yaml(path: Path, label: str) -> dict[str, Any]:
    try:
        content = read_yaml(path)
    except UnreadableFile as error:
        raise ConfigError(f"{label} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{label} must hold settings by name, such as `train: {{steps: 100}}`")
    return content


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    *folders, last = name.split(".")
    for part in folders:
        values = values.setdefault(part, {})
    values[last] = value


def _merge(base: dict[str, Any], more: Mapping[str, Any], path: str = "") -> None:
    for name, value in more.items():
        if not isinstance(name, str):
            raise ConfigError(f"{path}{name!r} is not the name of a setting: write it as text")
        if isinstance(base.get(name), dict):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path}{name} must hold settings by name, not {value!r}")
            _merge(base[name], value, f"{path}{name}.")
        else:
            base[name] = value


type_hints = cache(get_type_hints)  # they are most of the time that a study takes to be read


def made(cls: type[T], values: Mapping[str, Any], path: str) -> T:
    """A dataclass from nested plain values; unknown names and wrong types are refused with the nearest fix."""
    hints = type_hints(cls)  # type: ignore[arg-type]
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    ready = {}
    for name, value in without_retired(values, RETIRED.get(path.rstrip("."), {})).items():
        where = f"{path}{name}"
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"unknown setting {where}; " + (f"did you mean {path}{near[0]}?" if near else
                              f"known here: {', '.join(known)}"))  # fmt: skip
        ready[name] = _value(hints[name], value, where)
    try:
        return cls(**ready)
    except TypeError as error:
        raise ConfigError(f"{path.rstrip('.') or 'settings'}: {error}") from error


def _value(hint: Any, value: Any, where: str) -> Any:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if hint is Any or (value is None and type(None) in options):
        return value
    for option in options:
        if is_dataclass(option) and isinstance(value, Mapping):
            return made(option, value, f"{where}.")  # type: ignore[arg-type]
        if get_origin(option) is Mapping and isinstance(value, Mapping):
            if strange := [name for name in value if not isinstance(name, str)]:
                raise ConfigError(f"{where}: {strange[0]!r} is not a name; put it into quotes")
            return {name: _value(get_args(option)[1], each, f"{where}.{name}") for name, each in value.items()}
        if get_origin(option) is tuple and isinstance(value, list | tuple):
            kinds = get_args(option)
            kinds = kinds[:1] * len(value) if kinds[1:] == (...,) else kinds
            if len(kinds) != len(value):
                raise ConfigError(f"{where}={value!r} must hold {len(kinds)} values")
            return tuple(
                _value(kind, each, f"{where}[{at}]")
                for at, (kind, each) in enumerate(zip(kinds, value, strict=True))
            )
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if option is float and isinstance(value, str):  # YAML reads 1e-3 as text
            try:
                return float(value)
            except ValueError:
                continue
        if option in (int, str, bool) and type(value) is option:
            return value
        if get_origin(option) is Literal:
            if value in get_args(option):
                return value
            raise ConfigError(_unknown(where, value, option))
    names = " or ".join(str(getattr(o, "__name__", o)) for o in options)
    raise ConfigError(f"{where}={value!r} is not of the right kind; expected {names}")


def _unknown(name: str, value: Any, known: Any) -> str:
    """What to say of a value that is none of the names of a Literal."""
    message = f"{name}={value!r} is not known; choose one of {', '.join(get_args(known))}"
    return f"{message} (fp16 would need scaled losses; bf16 does not)" if value == "fp16" else message


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{path}{name}.") if isinstance(value, Mapping) else {f"{path}{name}": value}
    return found
