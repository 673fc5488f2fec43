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
    "python tools/ship_models.py": "needs a long run; test_shipped.py ships a small one",
    "python -m dcdm.evaluation": "its task's data are on the hub; test_harness.py runs the command line",
    "dcdm eval quality": "needs a scorer that readers bring; test_quality.py runs it on one of its own",
    "dcdm bench": "takes minutes; every subject has a test of its own",
}
"""How a command begins that is not run, and why."""

INSTEAD = [
    (r"^(dcdm train .*?)(--init (?!runs/)\S+)", r"\1", "initial weights that readers bring"),
    (r"^dcdm import smollm2 ", "dcdm import tiny-llama ", "needs a network"),
    (
        r"--(steps|limit|samples|windows) \d+",
        r"--\1 2",
        "a model of two steps, scored on two windows, will do",
    ),
    (r"^(dcdm eval ppl (?!.*--limit).*)$", r"\1 --limit 2", "two windows are enough"),
    (r"^(dcdm eval ppl .*--length) \d+", r"\1 32", "short ones, too"),
    (r"^(dcdm train (?!.*--dry-run).*?(?:openwebtext|gpt2|-\d\.\db).*)$", r"\1 --dry-run", "needs a hub or a GPU"),
    (r"--(data|corpus) addresses( --tokenizer bpe:\d+)?", r"--\1 train.txt", "a small text is enough"),
