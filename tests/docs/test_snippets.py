"""Every snippet of README and docs runs, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from whence.cli import main
from whence.model.load import Model

from .snippets import Snippet, differs, snippets

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [page for page in PAGES if any(s.reason is None for s in snippets(page))]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_page_runs(page: Path, minilm: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    names: dict[str, Any] = {"__name__": "__page__"}
    for snippet in snippets(page):
        if snippet.reason is None:
            printed = _run(snippet, names, page)
            if snippet.printed is not None:
                difference = differs(printed, snippet.printed)
                assert difference is None, f"{page.name}, line {snippet.line}: {difference}"


def _run(snippet: Snippet, names: dict[str, Any], page: Path) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if snippet.kind == "python":
            exec(compile(snippet.code, f"{page.name}:{snippet.line}", "exec"), names)
        else:
            for line in snippet.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    assert words[0] == "whence", f"{page.name}, line {snippet.line}: {words[0]} is not run here"
                    assert main(words[1:]) == 0, f"{page.name}, line {snippet.line}: {line}"
    return out.getvalue()


def test_a_wrong_page_is_noticed() -> None:
    assert differs("0.57 of it", "0.57 of it") is None
    assert differs("0.58 of it", "0.57 of it") is None
    assert differs("0.67 of it", "0.57 of it") is not None
    assert differs("moved 7.5e-07", "moved 6.1e-07") is None
    assert differs("one two three", "one\n…\nthree") is None
    assert differs("one two three", "one two") is not None
    assert differs("one two", "one two three") is not None
    assert differs("31 of 32", "32 of 32") is not None
