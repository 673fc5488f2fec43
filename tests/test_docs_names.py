"""Names in documents and docstrings are true: commands, flags, files, modules, members, versions, figures."""

import ast
import inspect
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

import dcdm
from dcdm.cli import COMMANDS, GROUPS
from dcdm.commands import data, options, serve
from test_docs import PAGES, ROOT, blocks

SRC = ROOT / "src" / "dcdm"
TRUE_PAGES = [page for page in PAGES if page.name not in {"LOG.md", "CHANGELOG.md"}]
"""Those two tell what was: their names need not exist any more."""
NO_FLAGS = {"--nproc-per-node", "--says", "--chunk", "--ink"}
"""In docstrings: torchrun's, of a program for developers, variables of CSS."""


def inline_code(text: str) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def docstrings(file: Path) -> str:
    """All of a Python file: every string that stands alone."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    alone = (node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    return "\n\n".join(node.value for node in alone if isinstance(node.value, str))


# --- commands and flags ------------------------------------------------------------------------------------------


def lines_of_code(page: Path) -> list[str]:
    shell = [block.text.replace("\\\n", " ") for block in blocks(page) if block.language in ("", "sh", "bash")]
    return [*(line for text in shell for line in text.splitlines()), *inline_code(page.read_text(encoding="utf-8"))]


def flags_of(run) -> set[str]:
    """Every option of a command, as it is written."""
    parameters = inspect.signature(run).parameters
    names = [*parameters]
    names += ["weights"] if any(p.annotation == "DtypeOption" for p in parameters.values()) else []
    names += [*vars(options.NO_FLAGS)] if "decoder" in names else []
    names += [*vars(serve.DEFAULT_LIMITS)] if "limits" in names else []
    names += [*vars(data.PLAIN)] if "reading" in names else []
    names = [name.replace("_", "-") for name in names]
    return {"--help", *(f"--{name}" for name in names), *(f"--no-{name}" for name in names)}


def runs() -> list:
    return [command.run for command in COMMANDS.values()]


def wrong_names(line: str) -> list[str]:
    """Commands and flags of `dcdm …` in a line that do not exist."""
    call = re.search(r"(?:^|\s|-m )dcdm ([a-z].*)$", re.sub(r"\s#\s.*$", "", line))
    if call is None:
        return []
    try:
        words = shlex.split(call[1])
    except ValueError:  # a quotation that goes on elsewhere
        words = call[1].split()
    if words in ([group] for group in GROUPS):
        return []
    name = " ".join(words[: 2 if words[0] in GROUPS else 1])
    if name not in COMMANDS:
        return [f"dcdm {name}"]
    given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    return [
        f"dcdm {name} {flag}" for flag in sorted(given - flags_of(COMMANDS[name].run) - {"--debug", "--run-folder"})
    ]


@pytest.mark.parametrize("page", TRUE_PAGES, ids=lambda page: page.name)
def test_every_command_and_flag_exists(page):
    assert [wrong for line in lines_of_code(page) for wrong in wrong_names(line)] == []


def test_every_command_and_flag_in_docstrings_exists():
    flags = set().union(NO_FLAGS, {"--debug", "--version", "--run-folder"}, *map(flags_of, runs()))
    wrong = {}
    for file in SRC.rglob("*.py"):
        text = docstrings(file)
        found = [name for code in inline_code(text) for name in wrong_names(code)]
        found += sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)) - flags)
        if found:
            wrong[file.relative_to(SRC).as_posix()] = found
    assert wrong == {}


def test_the_check_finds_commands_and_flags_that_do_not_exist():
    assert wrong_names("dcdm fly") == ["dcdm fly"]
    assert wrong_names("torchrun -m dcdm eval ppl runs/a --data x --no-such y") == ["dcdm eval ppl --no-such"]
    assert wrong_names("DCDM_API_KEY=x dcdm export runs/a out --adapter-only   # --comment") == []


# --- files, modules, classes -------------------------------------------------------------------------------------


@cache
def python_files() -> frozenset[str]:
    tops = (ROOT / name for name in ("src", "tests", "examples", "benchmarks", "tools"))
    return frozenset(path.relative_to(ROOT).as_posix() for top in tops for path in top.rglob("*.py"))


def missing_files(code: str) -> list[str]:
    """Files of this repository that a piece of code names, as `src/…`, `model/masks.py` or `masks.py`."""
    python = r"(?:[\w-]+/)*[\w-]+\.py"
    other = r"(?:src|docs|tests|examples|benchmarks|tools)/[\w./-]*\w"
    found = re.findall(rf"(?<![\w./{{}}-])({python}|{other})(?![\w{{}}*])", code)
    return [
        name for name in found
        if not (ROOT / name).exists() and not any(file.endswith(f"/{name}") for file in python_files())
        and not name.rpartition("/")[2].isupper()  # stands for a name
    ]  # fmt: skip


def missing_modules(code: str) -> list[str]:
    """Dotted names of this package that cannot be found."""
    found = re.findall(r"(?<![\w./-])dcdm(?:\.\w+)+", code.replace("dcdm.json", ""))  # a file
    return [name for name in found if not exists(name)]


def exists(name: str) -> bool:
    parts = name.split(".")[1:]
    for count in range(len(parts), 0, -1):
        place = SRC.joinpath(*parts[:count])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.exists():
            rest = parts[count:]
            return not rest or rest[0] in names_in(file)
    return parts[0] in {*dcdm.__all__, "__version__"}


@cache
def names_in(file: Path) -> frozenset[str]:
    found = re.findall(r"^(?:def|class) (\w+)|^(\w+)(?::[^=]*)? = ", file.read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(function or value for function, value in found)


@cache
def members() -> dict[str, set[str]]:
    """Class of this package → names of its methods, fields and attributes, inherited ones included."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                own.setdefault(node.name, set()).update(names_of_class(node))
                bases.setdefault(node.name, set()).update(ast.unparse(base) for base in node.bases)
    for name, names in own.items():
        for base in bases[name] & own.keys():
            names |= own[base]
    return own


def names_of_class(node: ast.ClassDef) -> set[str]:
    names = {inner.name for inner in ast.walk(node) if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.AnnAssign | ast.Assign):
            for target in [inner.target] if isinstance(inner, ast.AnnAssign) else inner.targets:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                names |= {getattr(part, "id", getattr(part, "attr", "")) for part in parts}
    return names


def missing_members(code: str) -> list[str]:
    named = re.findall(r"(?<![\w.])([A-Z]\w+)\.([a-z_]\w*)", code)
    return [f"{one}.{member}" for one, member in named if one in members() and member not in members()[one]]


@pytest.mark.parametrize("page", TRUE_PAGES, ids=lambda page: page.name)
def test_every_file_module_and_member_exists(page):
    code = inline_code(page.read_text(encoding="utf-8"))
    python = [block.text for block in blocks(page) if block.language == "python"]
    assert missing("\n".join(code)) == []
    assert [name for text in python for name in missing_modules(text)] == []


def test_every_file_module_and_member_in_docstrings_exists():
    wrong = {file.relative_to(SRC).as_posix(): missing(docstrings(file)) for file in SRC.rglob("*.py")}
    assert {file: names for file, names in wrong.items() if names} == {}


def missing(text: str) -> list[str]:
    return [*missing_files(text), *missing_modules(text), *missing_programs(text), *missing_members(text)]


def missing_programs(code: str) -> list[str]:
    """Modules that `python -m` cannot run."""
    return [name for name in re.findall(r"-m (dcdm\.[\w.]*\w)", code) if not runnable(name)]


def runnable(name: str) -> bool:
    place = SRC.joinpath(*name.split(".")[1:])
    file = place.with_suffix(".py")
    return (place / "__main__.py").exists() or (
        file.exists() and '__name__ == "__main__"' in file.read_text(encoding="utf-8")
    )


def test_the_check_finds_names_that_do_not_exist():
    assert missing_files("src/dcdm/far.py, far.py, model/masks.py, docs/far") == [
        "src/dcdm/far.py",
        "far.py",
        "docs/far",
    ]
    assert missing_modules("dcdm.far.away, dcdm.load, dcdm.model.masks.far") == [
        "dcdm.far.away",
        "dcdm.model.masks.far",
    ]
    assert missing_members("Model._stage_1, Model.encode") == ["Model._stage_1"]
    assert missing_programs("python -m dcdm.config, -m dcdm.model.masks") == ["dcdm.config"]


# --- versions, figures, installation -----------------------------------------------------------------------------


def test_the_version_is_the_same_everywhere():
    assert f"\nversion: {dcdm.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {dcdm.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_modules_that_the_changelog_sends_readers_to_exist():
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 5
    assert [name for cell in rows for name in missing_modules(cell.replace(".*", ""))] == []


def test_figures_of_the_readme_stand_in_the_pages_of_results():
    """A difference may be told the other way round."""
    pages = ("reproduction", "drafts")
    results = "".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in pages)
    figures = re.findall(r"([−+]?)(\d\.\d{3} ± \d\.\d{3})", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(figures) > 5
    other = {"−": "+", "+": "−", "": ""}
    assert [one for sign, one in figures if sign + one not in results and other[sign] + one not in results] == []


def test_nothing_tells_readers_to_install_from_a_registry_that_does_not_have_it():
    files = [*PAGES, *SRC.rglob("*.py"), ROOT / "Makefile"]
    assert [file.name for file in files if re.search(r"pip install '?\"?dcdm", file.read_text("utf-8"))] == []
