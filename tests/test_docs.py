"""README.md and docs/ by test: every command and Python block runs, every link and picture is there.

Blocks run page by page, in order, in a folder where runs/first and its like are small models. A command that
readers cannot run at once stands in `INSTEAD` with what is run in its place, or in `LEFT_OUT` with the reason.
"""

import contextlib
import io
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import pretrained
from dcdm.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

LEFT_OUT = {
    "make ": "sets up an environment; the targets' parts are tested on their own",
    "pip install": "needs a network",
    "torchrun": "needs several devices; `--dry-run` of the same training is shown beside it",
    "dcdm demo": "takes minutes; test_demo.py runs a short one",
    "tensorboard": "does not return",
    "dcdm serve": "does not return",
    "dcdm reproduce": "takes hours or needs readers' data; test_experiments.py runs it at tiny scale",
    "dcdm study": "takes hours; test_study.py runs a small one and reads those that are shipped",
    "curl": "needs a server",
    "python -m pytest": "a test of the suite",
    "python benchmarks/": "takes minutes; test_serving_benchmark.py runs a small one",
    "python tools/check_drafts.py": "needs SmolLM2; test_draft_head.py has the properties on toy models",
    "python tools/ship_models.py": "needs a long run; test_shipped.py ships a small one",
    "python -m dcdm.evaluation": "its task's data are on the hub; test_harness.py runs the command line",
    "dcdm bench": "takes minutes; every subject has a test of its own",
    "dcdm check": "takes minutes; test_check.py runs all of it",
}
"""How a command begins that is not run, and why."""

INSTEAD = [
    (r"^(dcdm train .*?)(--init (?!runs/)\S+)", r"\1", "initial weights that readers bring"),
    (r"^dcdm import HuggingFaceTB/\S+ ", "dcdm import tiny-llama ", "needs a network"),
    (
        r"--(steps|limit|samples|windows) \d+",
        r"--\1 2",
        "a model of two steps, scored on two windows, will do",
    ),
    (r"^(dcdm eval ppl (?!.*--limit).*)$", r"\1 --limit 2", "two windows are enough"),
    (r"^(dcdm eval ppl .*--length) \d+", r"\1 32", "short ones, too"),
    (r"^(dcdm train (?!.*--dry-run).*?(?:openwebtext|gpt2|-\d\.\db).*)$", r"\1 --dry-run", "needs a hub or a GPU"),
    (r"--(data|corpus) addresses( --tokenizer bpe:\d+)?", r"--\1 train.txt", "a small text is enough"),
    (r"--own-texts \d+", "--own-texts 16", "few texts will do"),
    (r"(--to drafts)$", r"\1 --own-texts 16 --steps 2 --set data.window=256", "few texts, which bytes make long"),
    (r" --tasks all", " --tasks piqa", "one task's file is enough"),
    (r"^(dcdm eval tasks (?!.*--tasks).*)$", r"\1 --tasks piqa", "one task's file is enough"),
]
"""Rewritings of a command: pattern, replacement, why."""

PROGRAMS = "dcdm|echo|cat|python|make|torchrun|pip|curl|tensorboard"

UNFINISHED_PYTHON = {"contributing.md": "world = init_distributed(device)"}
"""Python blocks that show the shape of a program and say so: page, first line."""

OWN_TEST = {"data.md": "test_data_docs.py runs its shell blocks as they stand"}

SLOW = {"evaluation.md", "pretrained.md", "scaling.md"}
"""Pages whose commands score or adapt many models, or plan large ones."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text.count("\n", 0, m.start()) + 1, m[1], m[2]) for m in found]


def commands(block: Block) -> list[str]:
    """The commands of a block without a language, or of a shell's; [] if it shows something else."""
    if block.language not in ("", "sh", "bash", "console"):
        return []
    lines = block.text.replace("\\\n", " ").splitlines()
    lines = [re.sub(r"\s#\s.*$", "", line.removeprefix("$ ")).strip() for line in lines]
    return [re.sub(r" +", " ", line) for line in lines if re.match(rf"(\w+=\S+ )*({PROGRAMS}) ", line + " ")]


def why_left_out(command: str) -> str | None:
    return next((why for begins, why in LEFT_OUT.items() if command.startswith(begins)), None)


def to_run(command: str) -> str:
    for pattern, replacement, _ in INSTEAD:
        command = re.sub(pattern, replacement, command)
    return command


def exit_code(arguments: list[str]) -> object:
    try:
        main(arguments)
    except SystemExit as left:
        return left.code
    return 0


def run_command(command: str) -> None:
    """In this process: `dcdm …`, or `echo … | dcdm …`; nothing else is expected in the documents."""
    source, pipe, rest = command.partition(" | ")
    given = ""
    if pipe:
        kind, *words = shlex.split(source)
        given = " ".join(words) + "\n" if kind == "echo" else "".join(Path(word).read_text() for word in words)
        command = rest
    command, _, target = command.partition(" > ")
    words = shlex.split(command)
    assert words[0] == "dcdm", f"how to run {command!r}? See LEFT_OUT and INSTEAD"
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
        code = exit_code(words[1:])
    assert code in (0, None), f"{command}: exit code {code}"
    if target:
        Path(target.strip()).write_text(out.getvalue())


SMALL = [
    "--batch-size", "2", "--set", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=2",
    "model.num_kv_heads=1", "model.head_dim=16", "model.intermediate_size=48", "tensorboard=false",
    "evaluate_sequences=2", "train.ema_decay=0.9",
]  # fmt: skip
MODELS = {
    "runs/first": "dcdm-debug-causal", "runs/second": "bdlm-debug", "runs/paper": "dcdm-debug",
    "runs/ar": "ar-debug", "runs/mdlm": "mdlm-debug", "runs/bdlm": "bdlm-debug", "runs/dcdm": "dcdm-debug",
    "run": "mdlm-debug",
    "runs/ar-debug": "ar-debug", "runs/mdlm-debug": "mdlm-debug", "runs/bdlm-debug": "bdlm-debug",
    "runs/dcdm-debug": "dcdm-debug", "runs/dcdm-debug-causal": "dcdm-debug-causal",
    "runs/dcdm-moe-debug": "dcdm-debug",
}  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """What readers have when they come to a page: small runs, texts of their own."""
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCDM_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        write_texts(folder)
        pretrained.saved(folder / "tiny-llama")
        for family, name in (
            ("sdar, config copy.json", "SDAR-1.7B-Chat"), ("llada", "LLaDA-8B-Instruct"),
            ("tiny-a2d-bd3lm", "Qwen3-0.6B-diffusion-bd3lm-v0.1"),
        ):  # fmt: skip
            pretrained.published(folder / "downloads" / name, family)
        made: dict[str, str] = {}
        for name, preset in MODELS.items():
            if preset in made:
                shutil.copytree(made[preset], name)
                continue
            made[preset] = name
            train = ["train", "--preset", preset, "--run", name, "--data", "train.txt", "--steps", "1"]
            with pytest.raises(SystemExit):
                main([*train, *SMALL])
        yield folder


def write_texts(folder: Path) -> None:
    text = "def f(x):\n    return x + 1\n\n" * 300
    for name in ("train.txt", "test.txt", "text.txt", "prompt.txt"):
        (folder / name).write_text(f"{text}{name}\n" if name != "prompt.txt" else "def main(")
    rows = (f'{{"question": "What is {n} and 0?", "answer": "It is {n}."}}\n' for n in range(400))
    (folder / "train.jsonl").write_text("".join(rows))
    for name in ("wikitext2", "data/wikitext2"):
        (folder / name).mkdir(parents=True)
        for split in ("train", "valid", "test"):
            (folder / name / f"{split}.txt").write_text(f"{text}{split}\n")
    for name in ("lambada", "pubmed", "arxiv"):
        (folder / "data" / f"{name}.jsonl").write_text('{"text": "so it continues"}\n' * 40)
    (folder / "tasks").mkdir()
    question = '{"goal": "open it", "sol1": "pull", "sol2": "wait", "label": 0}\n'
    for split in ("train", "validation"):
        (folder / "tasks" / f"piqa_{split}.jsonl").write_text(question * 4)


@pytest.fixture
def place(prepared, tmp_path, monkeypatch):
    """A copy of the prepared folder for one page; runs that the page itself trains are not there yet."""
    folder = tmp_path / "reader"
    shutil.copytree(prepared, folder, ignore=shutil.ignore_patterns("cache"))
    monkeypatch.setenv("DCDM_CACHE", str(prepared / "cache"))
    monkeypatch.chdir(folder)
    return folder


def forget_what_the_page_makes(page: Path, folder: Path) -> None:
    for block in blocks(page):
        for command in commands(block):
            for name in re.findall(r"^dcdm train .*--run (\S+)", command):
                shutil.rmtree(folder / name, ignore_errors=True)


def trained_small(command: str) -> str:
    """Models that the documents train have the size of `MODELS`, unless a cost is asked for."""
    if not command.startswith(("dcdm train", "dcdm adapt")) or "--dry-run" in command:
        return command
    plain, _, given = command.partition(" --set ")
    small = SMALL if command.startswith("dcdm train") else ["--set", "data.window=64", "evaluate_sequences=2"]
    return shlex.join([*shlex.split(plain), *small, *shlex.split(given)])


def cases() -> list:
    return [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW else [])
        for page in PAGES
        if page.name not in OWN_TEST and any(b.language == "python" or commands(b) for b in blocks(page))
    ]


@pytest.mark.parametrize("page", cases())
def test_every_command_and_python_block_runs_in_order(page, place):
    forget_what_the_page_makes(page, place)
    names: dict = {}
    for block in blocks(page):
        if block.language == "python" and not block.text.startswith(UNFINISHED_PYTHON.get(page.name, "\0")):
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(compile(block.text, str(block), "exec"), names)
            balance = [float(value) for value in re.findall(r"MaxVio (\S+)", said.getvalue())]
            assert not balance or balance[-1] < 0.5 * balance[0], "a loop of one's own balances its chunks"
        for command in commands(block):
            if why_left_out(command) is None:
                run_command(trained_small(to_run(command)))


# --- links -------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    found = re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
    return [link for link in found if not re.match(r"(https?|mailto):", link)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_internal_link_and_picture_is_there(page):
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name}: {link}"
        assert target.is_relative_to(ROOT), f"{page.name}: {link} leads out of the repository"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_nothing_holds_the_marks_of_an_unfinished_merge():
    folders = [ROOT / name for name in ("src", "docs", "examples", "tests")]
    files = [
        p for folder in folders for p in folder.rglob("*") if p.suffix in {".py", ".md", ".html", ".css", ".js"}
    ]
    marks = re.compile(r"^(<{7} |>{7} )", re.MULTILINE)
    assert [p.name for p in files if marks.search(p.read_text(encoding="utf-8"))] == []
