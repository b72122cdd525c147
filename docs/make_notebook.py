"""The tutorial as a notebook: the same words and code, without outputs (`python docs/make_notebook.py`)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL, NOTEBOOK = ROOT / "docs/tutorial.md", ROOT / "notebooks/one_text.ipynb"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(r"^!\[[^\n]*\n", re.MULTILINE)


def cells(page: str) -> list[tuple[str, str]]:
    """("markdown" or "code", source) in the order of the page; pictures and printed output are left to the notebook."""
    found, end = [], 0
    for block in _BLOCK.finditer(page):
        found.append(("markdown", _words(page[end : block.start()])))
        if block[1] == "python":
            found.append(("code", block[2].rstrip("\n")))
        end = block.end()
    found.append(("markdown", _words(page[end:])))
    return [cell for cell in found if cell[1]]


def _words(text: str) -> str:
    return _PICTURE.sub("", text).strip()


def notebook(page: str) -> dict[str, Any]:
    """The notebook as nbformat 4 writes it."""
    made = []
    for number, (kind, source) in enumerate(cells(page)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        made.append(cell | {"source": source.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": made,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def main() -> None:
    made = notebook(TUTORIAL.read_text(encoding="utf-8"))
    NOTEBOOK.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(NOTEBOOK)


if __name__ == "__main__":
    main()
