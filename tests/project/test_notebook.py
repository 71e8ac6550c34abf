"""The notebook in examples/ runs from its first cell to its last, in a kernel of its own."""

import os
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"


def test_the_notebook_runs_and_shows_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    for cell in notebook.cells:
        cell.source = re.sub(r"\bepochs=\d\d+", "epochs=3", cell.source)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output["data"] for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    tables = [data["text/html"] for data in shown if "text/html" in data]
    assert any("<caption>HaloLoader</caption>" in table for table in tables)
    assert any("<caption>FitResult</caption>" in table and "test accuracy" in table for table in tables)
    printed = "".join(output.get("text", "") for output in notebook.cells[-1].outputs)
    assert "exact" in printed
