"""Imports point one way: the order of the packages, and no cycle between modules.

Every import counts: those inside functions and those for type checkers, too.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "dcdm"

# A package may import those of earlier rows and of its own row's modules; what stands in one row knows nothing of
# its neighbours.
ORDER = [
    ["config", "keys", "files"],
    ["presets", "progress", "shipped"],
    ["distributed"],
    ["data"],
    ["model"],
    ["diffusion"],
    ["decoding"],
    ["likelihood"],
    ["lanes"],
    ["kinds"],
    ["costs"],
    ["training"],
    ["hub"],
    ["io"],
    ["evaluation"],
    ["viewing"],
    ["serving"],
    ["bench"],
    ["studies"],
    ["commands"],
    ["cli"],
    ["__main__"],
]
LAYER = {name: number for number, row in enumerate(ORDER) for name in row}
TOP = "dcdm"  # its lazy names may live anywhere; nobody inside imports it


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> dict[str, set[str]]:
    """The modules of this package that each of them imports, wherever the import stands."""
    known = modules()
    edges: dict[str, set[str]] = {}
    for name, path in known.items():
        edges[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno}: relative imports hide where a name comes from"
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                named = [full if full in known else str(node.module) for full in whole]
            else:
                continue
            edges[name] |= {other for other in named if other == TOP or other.startswith(f"{TOP}.")}
    return edges


def package(module: str) -> str:
    return module.split(".")[1]


def cycle_of(edges: dict[str, set[str]]) -> list[str] | None:
    """One cycle, as the modules along it, or None."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        for other in sorted(edges.get(module, ())):
            if found := walk(other, [*path, module]):
                return found
        done.add(module)
        return None

    for module in sorted(edges):
        if found := walk(module, []):
            return found
    return None


def upward(edges: dict[str, set[str]]) -> list[str]:
    """Imports against the order of the packages."""
    wrong = []
    for module, others in edges.items():
        if module == TOP:
            continue
        for other in sorted(others):
            if other == TOP:
                wrong.append(f"{module} imports the package's front door")
            elif package(other) != package(module) and LAYER[package(other)] >= LAYER[package(module)]:
                wrong.append(f"{module} -> {other}")
    return wrong


def test_every_package_has_its_place_in_the_order():
    assert {package(module) for module in modules() if module != TOP} == set(LAYER)


def test_imports_point_from_later_layers_to_earlier_ones():
    assert upward(imports()) == []


def test_no_modules_import_each_other_in_a_circle():
    edges = {module: others for module, others in imports().items() if module != TOP}
    assert cycle_of(edges) is None


def test_only_commands_see_all_packages():
    """Commands put things together; nobody but the command line and the front door imports them."""
    users = {
        module
        for module, others in imports().items()
        if module != TOP and any(package(o) == "commands" for o in others - {TOP})
    }
    assert {package(module) for module in users} <= {"commands", "cli"}


def test_settings_and_presets_need_no_pytorch():
    """`import dcdm` and `dcdm --help` are fast since what they load at once is plain Python."""
    for name in ("dcdm", "dcdm.config", "dcdm.presets", "dcdm.cli"):
        named: list[str] = []
        for node in ast.parse(modules()[name].read_text(encoding="utf-8")).body:
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        assert not {other.split(".")[0] for other in named} & {"torch", "transformers", "datasets", "numpy"}, name


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ({"dcdm.model.a": {"dcdm.training.b"}, "dcdm.training.b": set()}, ["dcdm.model.a -> dcdm.training.b"]),
        ({"dcdm.training.b": {"dcdm.model.a"}, "dcdm.model.a": set()}, []),
        ({"dcdm.bench.a": {"dcdm.serving.b", "dcdm.commands.c"}}, ["dcdm.bench.a -> dcdm.commands.c"]),
    ],
)
def test_the_check_finds_imports_against_the_order(edges, expected):
    assert upward(edges) == expected


def test_the_check_finds_a_cycle():
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None
    assert cycle_of({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
