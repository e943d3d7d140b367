"""Every notebook runs from a clean kernel, its assertions hold, and it draws."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_a_clean_kernel(path, monkeypatch, tmp_path):
    root = str(path.parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("JAX_NUMPY_DTYPE_PROMOTION", "standard")  # as a reader's own kernel has it
    monkeypatch.setenv("JAX_NUMPY_RANK_PROMOTION", "allow")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))


def test_the_notebooks_that_are_promised_exist():
    assert {path.stem for path in NOTEBOOKS} >= {"credit_assignment", "objectives"}
