"""Every file in examples/ runs as its first line says, on a model of its own and on a given one."""

import runpy
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "train.py": "",
    "load.py": "(1, 16, 260)",
    "score.py": "upper bound (NELBO)",
    "generate.py": "infilling, 15 forwards: 'def ",
    "huggingface.py": "260)",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the training example has run."""
    folder = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCDM_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        patch.syspath_prepend(str(EXAMPLES))
        start(patch, "train.py")
        yield folder


def start(patch, name, *arguments):
    """As `python examples/NAME ARGUMENTS` would."""
    patch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize("name", SAYS)
def test_the_example_runs_on_the_model_that_it_makes_and_on_a_given_one(name, place, monkeypatch, capsys):
    start(monkeypatch, name)
    said = capsys.readouterr().out
    assert SAYS[name] in said
    start(monkeypatch, name, place / "runs" / "example")
    assert capsys.readouterr().out == said


def test_the_layer_in_somebody_elses_transformer_learns_and_spreads_its_chunks(monkeypatch, capsys):
    start(monkeypatch, "chunking_attention.py", 40)
    said = capsys.readouterr().out
    assert "step 40: loss" in said
    assert "chunk 4: " in said


@pytest.mark.slow
def test_the_notebook_runs_and_shows_texts_and_chunks(tmp_path, monkeypatch):
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs are not kept"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    shown = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    pages = [data["text/html"] for data in shown if "text/html" in data]
    assert "(self):" in notebook.cells[3].outputs[-1].text
    assert any('title="chunk 8"' in page for page in pages)
    assert "upper bound" in notebook.cells[-1].outputs[-1].text
    assert (tmp_path / "runs" / "notebook" / "settings.yaml").is_file()
