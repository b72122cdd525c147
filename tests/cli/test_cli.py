"""The command line: results on standard output, the rest on standard error, one sentence per error."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from whence import cli
from whence import method_table as registry
from whence.cli import _app, main, paragraphs
from whence.errors import InputError, ModelError, UnavailableError, WhenceError
from whence.model import catalogue


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "whence", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=60,
    )


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A sub-command `fail` that does what the test puts in `.do`."""
    made = SimpleNamespace(do=lambda: None)

    def command(debug: _app.Debug = False) -> None:
        made.do()

    monkeypatch.setitem(sys.modules, "whence.cli.fail", SimpleNamespace(command=command))
    monkeypatch.setattr(cli, "COMMANDS", ("fail", "methods"))
    return made


def throws(error: BaseException) -> object:
    def do() -> None:
        raise error

    return do


# --- the whole ------------------------------------------------------------------------------------


def test_help_lists_every_command() -> None:
    done = run("--help", COLUMNS="100")
    assert done.returncode == 0
    assert all(f" {name} " in done.stdout for name in cli.COMMANDS)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from whence.cli import main; main(['--help']); "
        "print({'torch', 'transformers', 'numpy', 'pandas', 'scipy'} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_and_debug(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module(f"whence.cli.{name}").command.__doc__
    assert main([name, "--help"]) == 0
    assert "--debug" in capsys.readouterr().out


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("whence ")


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert "Usage" in out + err
    assert "error" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "No such command 'nope'. See: whence --help"),
        (["lok"], "No such command 'lok'. Did you mean 'look'? See: whence --help"),
        (["methods", "--nope"], "No such option: --nope. See: whence methods --help"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip() == f"error: {message}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["look", "a", "--epsilon", "3"], "error: --epsilon 3.0; give a share of the attention"),
        (["decide", "a", "--rule", "most"], "error: the rule 'most' is not understood"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_model_is_read(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--model", "./nowhere"]) == 2  # a folder that is not there would be refused otherwise
    assert capsys.readouterr().err.startswith(message)


def test_the_help_of_a_command_is_broken_by_the_window_alone() -> None:
    assert (
        paragraphs("One line\n    and its rest.\n\n    Another\n    one.\n    ")
        == "One line and its rest.\n\nAnother one."
    )


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("The text is empty."), 2),
        (ModelError("No attention in [mamba]."), 1),
        (UnavailableError("Not here. Fetch it with: whence get minilm"), 1),
        (WhenceError("Something."), 1),
    ],
)
def test_our_errors(
    failing: SimpleNamespace, capsys: pytest.CaptureFixture[str], error: WhenceError, code: int
) -> None:
    failing.do = throws(error)
    assert main(["fail"]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: {error}\n")


def test_a_long_error_stays_on_one_line(failing: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    failing.do = throws(InputError("word " * 100 + "end."))
    main(["fail"])
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unexpected_error_has_no_traceback(failing: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    failing.do = throws(ZeroDivisionError("division by zero"))
    assert main(["fail"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: division by zero" in err
    assert "--debug" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["--debug", "fail"], ["fail", "--debug"]])
def test_debug_shows_the_traceback(
    failing: SimpleNamespace, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    failing.do = throws(InputError("The text is empty."))
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.rstrip().endswith("error: The text is empty.")
    assert main(["fail"]) == 2  # and only that once
    assert "Traceback" not in capsys.readouterr().err


def test_interrupt(failing: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    failing.do = throws(KeyboardInterrupt())
    assert main(["fail"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_exit_codes_of_commands(failing: SimpleNamespace) -> None:
    failing.do = throws(typer.Exit(1))
    assert main(["fail"]) == 1


def test_a_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "whence", "methods", "--json"],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 1


def test_a_terminal_without_our_letters(failing: SimpleNamespace) -> None:
    done = run("get", "ünknown", PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert "\\xfcnknown" in done.stderr


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    _app.print_json({"a": [1.5, float("nan")], "b": (float("inf"), "é", None)})
    assert json.loads(capsys.readouterr().out) == {"a": [1.5, None], "b": [None, "é", None]}


# --- get ------------------------------------------------------------------------------------------


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """No download: notes (name, quiet) and answers with a path."""
    calls: list[tuple[str, bool]] = []

    def fetch(name: str, *, progress: object) -> Path:
        calls.append((name, not progress))
        return tmp_path / name

    monkeypatch.setattr("whence.cli.get.fetch", fetch)
    return calls


def test_get(fetched: list[tuple[str, bool]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["get", "SmolLM2", "minilm", "all-MiniLM-L6-v2"]) == 0
    assert fetched == [("smollm2", False), ("minilm", False)]
    assert capsys.readouterr().out == f"smollm2\t{tmp_path}/smollm2\nminilm\t{tmp_path}/minilm\n"


def test_get_json_quiet(fetched: list[tuple[str, bool]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["get", "minilm", "--json", "--quiet"]) == 0
    assert fetched == [("minilm", True)]
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {
        "name": "minilm",
        "path": str(tmp_path / "minilm"),
        "sha256": catalogue.get("minilm").sha256,
    }


@pytest.mark.parametrize(("names", "message"), [([], "whence get --list"), (["minilm", "nope"], "'nope'")])
def test_get_stops_before_any_download(
    fetched: list[tuple[str, bool]], names: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["get", *names]) == 2
    assert message in capsys.readouterr().err
    assert fetched == []


def test_get_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WHENCE_CACHE", str(tmp_path))
    monkeypatch.setattr("whence.model.cache._installed", lambda model: None)
    assert main(["get", "--list"]) == 0
    out, err = capsys.readouterr()
    assert all(model.name in out for model in catalogue.MODELS)
    for model in catalogue.MODELS:  # whole, in a window of 80 columns too
        assert f"licence {model.licence}, from {model.source}" in out
    assert "whence get NAME" in err
    assert main(["get", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["path"]) for row in rows] == [(m.name, None) for m in catalogue.MODELS]


# --- methods --------------------------------------------------------------------------------------


@pytest.fixture
def two_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_complete", True)
    about = {"paper": "Nobody 2020", "cost": "trace", "summary": "gives a number"}
    registry.declare("alti", "math:sqrt", question="mixing", needs=("wiring",), **about)
    registry.declare("null-space", "math:sqrt", question="attention", **about)


@pytest.mark.usefixtures("two_methods")
def test_methods(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    assert out.index("null-space") < out.index("alti")
    assert "Is this attention identifiable?" in out
    assert main(["methods", "--question", "mixing", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["needs"], row["paper"]) == ("alti", ["wiring"], "Nobody 2020")


@pytest.mark.usefixtures("two_methods")
def test_methods_of_an_unknown_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--question", "mixin"]) == 2
    assert "did you mean 'mixing'" in capsys.readouterr().err
