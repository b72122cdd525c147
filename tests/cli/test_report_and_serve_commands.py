"""`whence look` ends with a report; `whence serve` says what it cannot do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from whence.cli import main
from whence.cli._browser import open_in_browser


def test_look_writes_the_report_and_does_not_open_it_without_a_display(
    tmp_path: Path, minilm_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("webbrowser.open", lambda _: pytest.fail("there is no display"))
    path = tmp_path / "out.html"
    assert main(["look", "The bank raised its rates.", "--report", str(path), "--open"]) == 0
    said = capsys.readouterr()
    assert str(path) in said.out.replace("\n", "")
    assert "no display" in said.err
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["look", "The bank raised its rates.", "--report", ""]) == 0
    assert "Report:" not in capsys.readouterr().out


def test_browser_opens_where_there_is_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    assert open_in_browser("file:///x.html")
    assert opened == ["file:///x.html"]


def test_serve_names_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn", reason="the server comes with the extra 'web'")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert "Choose another with --port" in capsys.readouterr().err
