"""The notebooks of docs/notebooks: stored without output, and run from the first cell to the last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.rotation import todays

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
RESULTS = {  # of one cell each: what a reader must see
    "grade_responses": "4 of 7 are right",
    "read_runs": "LUSPO luspo 12 steps",
    "train_on_rows": "20 steps; shorter: True",
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_output(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.slow
@pytest.mark.parametrize("path", todays(NOTEBOOKS, days=3), ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: make venv installs it")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the kernel, which is a process of its own
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")  # tqdm's, where ipywidgets is not installed
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any(RESULTS[path.stem] in output.get("text", "") for output in outputs)
    assert not [output for output in outputs if output.get("name") == "stderr"]
