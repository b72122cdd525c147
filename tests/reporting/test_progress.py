"""Those who wait see what is done; those who do not, nothing."""

from __future__ import annotations

import pytest

from whence.reporting.progress import shown


def test_silent_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(None) as step:
        step("Working", 0.5)
    with shown(False) as step:
        step("Working", 0.5)
    assert capsys.readouterr() == ("", "")


def test_a_bar_where_it_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(True) as step:
        step("Exact intervals, 3 of 9 rows", 0.5)
    assert "Exact intervals, 3 of 9 rows" in capsys.readouterr().err


def test_a_line_in_a_notebook_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console.Console.is_jupyter", True, raising=False)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with shown(None) as step:
        step("Pictures of the heads", 0.25)
        assert " 25%  Pictures of the heads" in capsys.readouterr().err
    assert capsys.readouterr().err.strip() == ""
