"""Those who wait see what is done; those who do not, nothing."""

from __future__ import annotations

import inspect

import pytest

from whence.results.progress import Progress, counted, shown


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


def test_a_function_hears_everything_and_may_stop_the_work() -> None:
    told: list[tuple[str, float, float]] = []
    with shown(lambda *at: told.append(at)) as step:
        step("Working", 0.5)
        step("Counting", 2, 3)
    with counted("rows", 2, lambda *at: told.append(at)) as one:
        one()
        one()
    assert told == [("Working", 0.5, 1.0), ("Counting", 2, 3), ("rows", 1, 2), ("rows", 2, 2)]

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), counted("rows", 2, stop) as one:
        one()


def test_there_is_one_type_of_progress() -> None:
    """Every public function that takes `progress` takes this one."""
    import whence

    taking = 0
    for name in whence.__all__:
        public = getattr(whence, name)
        if inspect.isfunction(public) and "progress" in (given := inspect.signature(public).parameters):
            assert given["progress"].annotation in ("Progress", Progress), name
            taking += 1
    assert taking >= 5
