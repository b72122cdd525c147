"""Every notebook runs top to bottom, and the tutorial's says what the tutorial says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_top_to_bottom(path: Path, minilm_path: Path, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="running notebooks needs nbclient and ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="running notebooks needs nbclient")
    pytest.importorskip("ipykernel", reason="running notebooks needs ipykernel")
    pytest.importorskip("matplotlib", reason="the notebook plots: extra 'plot'")
    notebook = nbformat.read(path, as_version=4)
    inside = {"metadata": {"path": str(tmp_path)}}  # what the notebook saves stays there
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=inside).execute()
    shown = notebook.cells[-1].outputs[-1]["data"]["text/html"]
    assert shown.startswith("<iframe")
    assert not any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells), "stored outputs go stale"


def test_the_tutorial_is_the_notebook() -> None:
    nbformat = pytest.importorskip("nbformat")
    made = runpy.run_path(str(ROOT / "docs/make_notebook.py"))
    page = made["TUTORIAL"].read_text(encoding="utf-8")
    stored = nbformat.read(made["NOTEBOOK"], as_version=4)
    assert [(cell.cell_type, cell.source) for cell in stored.cells] == made["cells"](page), "run docs/make_notebook.py"
    assert [kind for kind, _ in made["cells"](page)].count("code") == page.count("```python")
