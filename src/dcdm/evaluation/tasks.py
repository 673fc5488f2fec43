"""The paper's nine benchmarks, by the lm-evaluation-harness's own task definitions.

Data come from the hub, as those definitions say, or from a folder of files named like `gsm8k_test.jsonl`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from dcdm.config import ConfigError, DataConfig, require
from dcdm.data.sources import cut_into_parts, examine, read_rows, resolve
from dcdm.distributed import World, from_main
from dcdm.evaluation import execution

SPLITS = ("train", "dev", "validation", "test")
WITHIN_NOISE = 2.0  # a choice that leads by fewer standard errors than this may lead by chance


@dataclass(frozen=True)
class Benchmark:
    """A row of the paper's table."""

    title: str
    tasks: tuple[str, ...]
    """Names of tasks or groups of the harness."""
    folders: tuple[str, ...]
    """Where their definitions stand in the harness's `tasks` folder."""
    stem: str
    """Local files are named <stem>_<split>.jsonl."""
    fields: tuple[str, ...]
    """What every row of a local file must hold."""
    evaluated: str
    """The split that the official definition evaluates."""
    shots: int = 0
    examples: str | None = "train"
    """The split that few-shot examples officially come from; None: the definition brings its own."""
    whole: str | None = None
    """Name of a local file that has no split in its name; it is the evaluated split."""
    subject_field: str | None = None
    """Field of a local row by which it belongs to one of the group's tasks."""


def _benchmarks() -> dict[str, Benchmark]:
    rows: dict[str, dict[str, Any]] = json.loads(
        (files("dcdm.evaluation") / "benchmarks.json").read_text(encoding="utf-8")
    )
    for row in rows.values():
        row |= {key: tuple(row[key]) for key in ("tasks", "folders", "fields")}
    return {name: Benchmark(**row) for name, row in rows.items()}


BENCHMARKS = _benchmarks()


@dataclass(frozen=True)
class Chosen:
    """A benchmark to run, and its local files by split (None: from the hub)."""

    name: str
    benchmark: Benchmark
    files: Mapping[str, Path] | None

    @property
    def split(self) -> str:
        """The split that is evaluated: the official one, or validation where only that is here."""
        official = self.benchmark.evaluated
        return official if self.files is None or official in self.files else "validation"

    @property
    def notes(self) -> list[str]:
        notes = []
        if self.split != self.benchmark.evaluated:
            notes.append(f"{self.split} split (the official one is {self.benchmark.evaluated})")
        if self.benchmark.shots and self.benchmark.examples is None:
            notes.append("the definition's own examples")
        return notes


def choose(names: list[str], data_dir: Path | None) -> list[Chosen]:
    """The benchmarks called `names` (`all`: every one), checked against the files before anything is loaded."""
    known = ", ".join(BENCHMARKS)
    wanted = list(dict.fromkeys(name for n in names for name in (BENCHMARKS if n == "all" else [n])))
    require(bool(wanted), f"no task named; choose from all, {known}")
    for name in wanted:
        require(name in BENCHMARKS, f"unknown task {name!r}; choose from all, {known}")
    require(data_dir is None or data_dir.is_dir(), f"--data-dir {data_dir} is not a folder")
    return [_chosen(name, data_dir) for name in wanted]


def _chosen(name: str, folder: Path | None) -> Chosen:
    benchmark = BENCHMARKS[name]
    if folder is None:
        return Chosen(name, benchmark, None)
    chosen = Chosen(name, benchmark, files := _files(benchmark, folder))
    if chosen.split not in files:
        names = [f"{benchmark.stem}_{split}.jsonl" for split in dict.fromkeys((benchmark.evaluated, "validation"))]
        names += [f"{benchmark.whole}.jsonl"] if benchmark.whole else []
        raise ConfigError(f"{name}: {folder} holds none of {', '.join(names)} (or the same with .gz)")
    if benchmark.shots and benchmark.examples and benchmark.examples not in files:
        raise ConfigError(
            f"{name}: its {benchmark.shots} examples come from {benchmark.stem}_{benchmark.examples}.jsonl, "
            f"which {folder} does not hold; add it"
        )
    for path in files.values():
        rows_of(path, benchmark.fields)
    return chosen


def _files(benchmark: Benchmark, folder: Path) -> dict[str, Path]:
    """The benchmark's files in a folder, by split."""
    files: dict[str, Path] = {}
    for split in SPLITS:
        stems = [f"{benchmark.stem}_{split}"]
        stems += [benchmark.whole] if benchmark.whole and split == benchmark.evaluated else []
        for path in (folder / f"{stem}{ending}" for stem in stems for ending in (".jsonl", ".jsonl.gz")):
            if path.is_file():
                files.setdefault(split, path)
    return files


@cache
def rows_of(path: Path, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of a JSONL file, every one with the fields that its task needs."""
    settings = DataConfig()
    parts = cut_into_parts(examine(resolve(str(path), settings)), settings)
    rows = [row for part in parts for row in read_rows(part, fields, dict)]
    if not rows:
        raise ConfigError(f"{path} holds no rows")
    return rows


def local_data(chosen: Chosen, subject: str | None) -> Any:
    """The local rows of one task by split, in the place of its hub data set."""
    from datasets import Dataset, DatasetDict

    splits, of = DatasetDict(), chosen.benchmark.subject_field
    for split, path in (chosen.files or {}).items():
        rows = rows_of(path, chosen.benchmark.fields)
        if of is not None:  # the harness spells Counting & Probability counting_and_probability
            rows = [row for row in rows if row[of].lower().replace("&", "and").replace(" ", "_") == subject]
        if rows:
            splits[split] = Dataset.from_list(rows)
    return splits


@dataclass
class Loader:
    """Builds the harness's tasks, with local data and the paper's shots put into their definitions."""

    chosen: Chosen
    execute: bool
    world: World = field(default_factory=World)

    def load(self) -> list[Any]:
        """The harness's `Task` and `Group` objects."""
        import lm_eval.tasks

        home = Path(lm_eval.tasks.__file__).parent
        folders = [home / folder for folder in self.chosen.benchmark.folders]
        index = lm_eval.tasks.TaskManager(include_defaults=False, include_path=[*folders]).task_index
        loaded = [built for name in self.chosen.benchmark.tasks for built in self._built(name, index)]
        if not loaded:
            path, field = (self.chosen.files or {})[self.chosen.split], self.chosen.benchmark.subject_field
            raise ConfigError(f"{path}: no row has a {field} that {self.chosen.name} asks for")
        return loaded

    def _built(self, name: str, index: Mapping[str, Any]) -> Iterator[Any]:
        from lm_eval.api.group import Group
        from lm_eval.config.group import GroupConfig

        entry = index[name]
        if entry.kind.name == "TAG":
            for child in sorted(entry.tags):
                yield from self._built(child, index)
        elif entry.kind.name == "GROUP":
            group = Group.from_config(GroupConfig(**entry.cfg))
            for child in entry.cfg["task"]:
                for built in self._built(child, index):
                    group.add(built)
            if len(group):
                yield group
        elif (task := self._task(entry)) is not None:
            yield task

    def _task(self, entry: Any) -> Any:
        """The task, or None for a subject that the local files do not hold."""
        from lm_eval.api.task import ConfigurableTask
        from lm_eval.tasks._yaml_loader import load_yaml  # its public loader takes no data set for each subject

        runs_code = self.chosen.name == "humaneval"
        config = dict(load_yaml(entry.yaml_path, resolve_func=not runs_code))
        for name in ("tag", "group"):
            config.pop(name, None)
        config["num_fewshot"] = self.chosen.benchmark.shots
        if runs_code:
            config |= self._code_settings()
        if self.chosen.files is not None:
            splits = local_data(self.chosen, config.get("dataset_name"))
            if self.chosen.split not in splits:
                return None
            config |= {"dataset_path": None, "dataset_name": None, "dataset_kwargs": None}
            config["custom_dataset"] = lambda **_: splits
            config |= {
                name: None
                for name in ("training_split", "validation_split", "test_split", "fewshot_split")
                if config.get(name) not in splits
            }
            if self.chosen.split != self.chosen.benchmark.evaluated:  # the definition may name no other split
                config["test_split"] = self.chosen.split
        try:
            return ConfigurableTask(config=config)
        except Exception as error:
            if self.chosen.files is not None:
                raise
            # network, cache and repository errors have no common base
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"{self.chosen.name}: the hub's data cannot be loaded ({reason}); give the files by --data-dir"
            ) from error

    def _code_settings(self) -> dict[str, Any]:
        """HumanEval's programs in our limits; the definition's own metric is downloaded, and runs them without."""

        def judge(doc: dict[str, Any], results: list[list[str]]) -> dict[str, float]:
            if not self.execute:
                return {"not executed": 1.0}
            program = f"{results[0][0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
            passed = from_main(lambda: execution.passes(program), self.world)  # run once, by one process
            return {"pass@1": float(passed)}

        metric = "pass@1" if self.execute else "not executed"
        return {
            "unsafe_code": False,
            "process_results": judge,
            "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True}],
            "filter_list": [{"name": "create_test", "filter": [{"function": "custom", "filter_fn": _programs}]}],
        }


def _programs(answers: list[list[str]], docs: list[dict[str, Any]]) -> list[list[str]]:
    """The definition's programs: the prompt and what was generated after it."""
    return [[doc["prompt"] + text for text in texts] for texts, doc in zip(answers, docs, strict=True)]


def run_benchmark(lm: Any, chosen: Chosen, limit: int | None, execute: bool) -> dict[str, Any]:
    """One benchmark's report."""
    started = time.perf_counter()
    lm.counts = type(lm.counts)()
    results = run_tasks(lm, Loader(chosen, execute, lm.world).load(), limit)
    notes = [*chosen.notes, *(["not executed"] if chosen.name == "humaneval" and not execute else [])]
    return {
        "task": chosen.name, "title": chosen.benchmark.title, "shots": chosen.benchmark.shots,
        "split": chosen.split,
        "figures": [line for name in chosen.benchmark.tasks for line in task_figures(name, results)],
        "counts": asdict(lm.counts), "notes": notes, "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


def run_tasks(lm: Any, loaded: list[Any], limit: int | None) -> dict[str, Any]:
    """The harness's results for what `Loader` made, with its own seed for the choice of examples."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_defaults=False).load(loaded)
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    results = evaluate(lm, tasks, limit=limit, log_samples=True)
    assert results is not None
    return dict(results)


# --- figures -----------------------------------------------------------------------------------------------------


def task_figures(name: str, results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every metric of a task or group: its value, its standard error over questions, and the level of chance."""
    record = results["results"][name]
    leaves = _leaves(name, results)
    for key, value in record.items():
        metric, comma, kept = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        samples = [sample for leaf in leaves for sample in results["samples"][leaf] if sample["filter"] == kept]
        samples = samples or [sample for leaf in leaves for sample in results["samples"][leaf]]
        stderr = record.get(f"{metric}_stderr,{kept}")
        yield {
            "task": name,
            "metric": metric if kept in ("none", "create_test") else f"{metric} ({kept})",
            "value": value,
            "stderr": stderr if isinstance(stderr, float) else None,
            "chance": _chance(name, samples),
            "questions": len(samples),
            **_noise(samples),
        }


def _leaves(name: str, results: dict[str, Any]) -> list[str]:
    children = results.get("group_subtasks", {}).get(name, [])
    return [leaf for child in children for leaf in _leaves(child, results)] if children else [name]


def _is_choice(sample: dict[str, Any]) -> bool:
    return not isinstance(sample["resps"][0][0], str)


def _chance(name: str, samples: list[dict[str, Any]]) -> float:
    """What guessing gives: one in the number of choices, or, for mc2, the share of true ones; 0 for free text."""
    if not _is_choice(samples[0]):
        return 0.0
    if name == "truthfulqa_mc2":
        shares = [sum(s["doc"]["mc2_targets"]["labels"]) / len(s["resps"]) for s in samples]
    else:
        shares = [1 / len(s["resps"]) for s in samples]
    return sum(shares) / len(shares)


def _noise(samples: list[dict[str, Any]]) -> dict[str, float | None]:
    """Monte-Carlo error per choice in nats, and the share of questions whose best choice leads within it."""
    if not _is_choice(samples[0]):
        return {"monte_carlo_stderr": None, "within_noise": None}
    choices = [[answer[0][0] for answer in sample["resps"]] for sample in samples]
    errors = [choice.stderr for question in choices for choice in question]
    close = [_leads_by_chance(question) for question in choices if len(question) > 1]
    return {
        "monte_carlo_stderr": sum(errors) / len(errors),
        "within_noise": sum(close) / max(1, len(close)),
    }


def _leads_by_chance(choices: list[Any]) -> bool:
    first, second = sorted(choices, reverse=True)[:2]
    error = (first.stderr**2 + second.stderr**2) ** 0.5
    return bool(error > 0 and first - second < WITHIN_NOISE * error)
