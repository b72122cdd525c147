"""Every snippet of README and docs runs, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from whence.cli import main
from whence.errors import UnavailableError
from whence.model.cache import locate

from .readers_files import hand_over, train_models, write_texts
from .snippets import Snippet, differs, snippets

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [page for page in PAGES if any(s.reason is None for s in snippets(page))]
PORT = "8899"  # the port of the pages; another one here, so that it is free
INSTALLS = ("installs", "sets up the machine")  # or machines


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory, minilm_path: Path) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    write_texts(folder)
    train_models(folder)
    return folder


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_page_runs(page: Path, stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {s.needs for s in snippets(page) if s.needs}:
        try:
            locate(name)
        except UnavailableError as error:
            pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    hand_over(stock, tmp_path, page.read_text())
    names: dict[str, Any] = {"__name__": "__page__"}
    for snippet in snippets(page):
        if snippet.reason is None:
            printed = _run(snippet, names, page)
            if snippet.printed is not None:
                difference = differs(printed, snippet.printed)
                assert difference is None, f"{page.name}, line {snippet.line}: {difference}"


def _run(snippet: Snippet, names: dict[str, Any], page: Path) -> str:
    where = f"{page.name}, line {snippet.line}"
    if snippet.kind == "sh":
        return _shell(snippet.code, where)
    assert snippet.kind == "python", f"{where}: write ```python or ```sh, so that it is run"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(snippet.code, f"{page.name}:{snippet.line}", "exec"), names)
    return out.getvalue()


def _shell(code: str, where: str) -> str:
    lines = [shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines()]
    lines = [line for line in lines if line]
    if any(line[0] not in ("whence", "make") or "&" in line or "$(" in code for line in lines):
        return _script(code, where)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for line in lines:
            words = line[1:] if line[0] == "whence" else _made_by(line[1])
            assert main(words) == 0, f"{where}: {shlex.join(line)}"
    return out.getvalue()


def _made_by(target: str) -> list[str]:
    """`make demo` ends with a whence command: that one, without what sets up the machine."""
    makefile = (ROOT / "Makefile").read_text()
    assert target == "demo", f"make {target} is not run here"
    assert "whence look '$(DEMO_TEXT)'" in makefile
    text = re.search(r"^DEMO_TEXT \?= (.*?[^\\])$", makefile, re.MULTILINE | re.DOTALL)
    assert text is not None
    return ["look", re.sub(r"\s*\\\n", " ", text[1])]


def _script(code: str, where: str) -> str:
    """Whole, by bash, with this interpreter's programs; whatever it leaves running is ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        code = code.replace(PORT, str(free.getsockname()[1]))
    for program in ("curl", "espeak-ng"):
        if program in code and shutil.which(program) is None:
            pytest.skip(f"the page uses {program}, which is not here")
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", code], env={**os.environ, "PATH": paths}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = run.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0, f"{where}: {err[-2000:]}"
    return out


def test_only_what_installs_is_not_run() -> None:
    left_out = [(page.name, s.line, s.reason) for page in PAGES for s in snippets(page) if s.reason is not None]
    assert [one for one in left_out if not one[2].startswith(INSTALLS)] == []


def test_a_wrong_page_is_noticed(tmp_path: Path) -> None:
    assert differs("0.57 of it", "0.57 of it") is None
    assert differs("0.58 of it", "0.57 of it") is None
    assert differs("0.67 of it", "0.57 of it") is not None
    assert differs("moved 7.5e-07", "moved 6.1e-07") is None
    assert differs("one two three", "one\n…\nthree") is None
    assert differs("one two three", "one two") is not None
    assert differs("one two", "one two three") is not None
    assert differs("31 of 32", "32 of 32") is not None
    with pytest.raises(AssertionError, match="line 7"):
        _shell("false\n", "a page, line 7")
