"""Every notebook runs top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_top_to_bottom(path: Path, minilm_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="running notebooks needs nbclient and ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="running notebooks needs nbclient")
    pytest.importorskip("ipykernel", reason="running notebooks needs ipykernel")
    pytest.importorskip("matplotlib", reason="the notebook plots: extra 'plot'")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = notebook.cells[-1].outputs[-1]["data"]["text/html"]
    assert shown.startswith("<iframe")
    assert not any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells), "stored outputs go stale"
