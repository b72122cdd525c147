"""The same options on every command that takes a model, the same formats, and messages that speak command line."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import typer

from whence.cli import COMMANDS, build, main
from whence.cli._output import FORMATS
from whence.cli._speech import in_options
from whence.errors import UnavailableError
from whence.model import load as loading

SHARED = {
    "--model", "--task", "--pair", "--truncate", "--trust-remote-code", "--allow-pickle", "--device", "--dtype",
}  # fmt: skip
NO_MODEL = {"methods", "get", "train"}  # they list, fetch and make models
NO_RESULT = {"serve"}  # it prints nothing but where it is
TEXT = "The bank raised its rates."


def _options(name: str) -> set[str]:
    command = typer.main.get_command(build()).commands[name]  # type: ignore[attr-defined]
    return {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - NO_MODEL))
def test_the_same_options_wherever_a_model_is_taken(name: str) -> None:
    assert sorted((SHARED | {"-m"}) - _options(name)) == []


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - NO_RESULT))
def test_the_same_formats_wherever_a_result_is_printed(name: str) -> None:
    assert {"--format", "--json"} <= _options(name)
    assert main([name, *_needed(name), "--format", "xml"]) == 2


def _needed(name: str) -> list[str]:
    """What the command cannot do without: made up, as the format is looked at first."""
    command = typer.main.get_command(build()).commands[name]  # type: ignore[attr-defined]
    needed = [p for p in command.params if p.required]
    return [word for p in needed for word in ([p.opts[0], "1"] if p.opts[0].startswith("-") else ["1"])]


def test_commands_without_a_model_have_no_option_for_one() -> None:
    assert all("--model" not in _options(name) for name in NO_MODEL)


def test_a_model_by_its_option_or_as_an_argument(minilm: object, capsys: pytest.CaptureFixture[str]) -> None:
    frames = []
    for words in (["minilm"], ["--model", "minilm"]):
        assert main(["doctor", *words, "--text", "word " * 600, "--truncate", "--format", "csv", "-q"]) == 0
        frames.append(pd.read_csv(io.StringIO(capsys.readouterr().out)))
    pd.testing.assert_frame_equal(*frames)
    assert len(frames[0]) == 6
    assert main(["doctor", "minilm", "--model", "smollm2"]) == 2
    assert "name two models" in capsys.readouterr().err
    assert main(["doctor", "--pair", "Yes."]) == 2
    assert "give the first with --text" in capsys.readouterr().err


def test_help_names_exit_codes_cache_and_completion_and_loads_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for part in ("Exit codes: 0 done", "130", "$WHENCE_CACHE", "--install-completion"):
        assert part in said
    code = "import sys; from whence.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
    assert main(["--version"]) == 0


def test_certify_in_every_format(minilm: object, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    frames = {}
    for form in FORMATS:
        assert main(["certify", TEXT, "-l", "0", "--head", "0", "--query", "bank", "--format", form, "-q"]) == 0
        out = capfdbinary.readouterr().out
        if form == "csv":
            frames[form] = pd.read_csv(io.BytesIO(out))
        elif form == "parquet":
            frames[form] = pd.read_parquet(io.BytesIO(out))
        elif form == "json":
            data = json.loads(out)
    assert frames["csv"].columns.tolist() == ["key", "token", "weight", "lower", "upper"]
    pd.testing.assert_frame_equal(frames["csv"], frames["parquet"], check_dtype=False)
    assert len(data["keys"]) == len(frames["csv"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mix", TEXT, "--method", "occlusion"], "whence attribute does that"),
        (["attribute", TEXT, "--foil", "good"], "--foil good has no effect"),
        (["look", TEXT, "--report", "/nowhere/at/all.html"], "there is no folder '/nowhere/at'"),
        (["look", TEXT, "--report", "page.pdf"], "should end in .html"),
        (["look", TEXT, "--format", "xml"], "not one of table, json, csv, parquet"),
        (["look", TEXT, "--format", "csv", "--json"], "contradict each other"),
        (["look", TEXT, "--dtype", "int8"], "--dtype int8 is not one of"),
        (["look", TEXT, "--device", "tape"], "--device tape cannot be used here"),
        (["certify", "word " * 600, "-l", "0", "--head", "0", "--query", "1"], "pass --truncate to use its first part"),
        (["attribute", TEXT, "--by", "sentence"], "give --max-new-tokens or --continuation"),
    ],
)
def test_messages_speak_command_line(
    minilm: object, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "-q"]) == 2
    assert said in capsys.readouterr().err


def test_keyword_arguments_become_options() -> None:
    options = ["--position", "--foil", "--task"]
    assert in_options("position=9 is out of range.", options) == "--position 9 is out of range."
    assert in_options("load it with task='base' (--task base).", options) == "load it with --task base."
    assert in_options("keep=['x'] stays.", options) == "keep=['x'] stays."


def test_unknown_tokens_are_a_warning_line(minilm: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mix", "𓀀 𓁀 hello", "-q"]) == 0
    assert "warning: 2 of the 3 tokens" in capsys.readouterr().err


def test_a_misspelt_name_does_not_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    for check in (loading.check_model, loading.load):
        with pytest.raises(UnavailableError, match="Did you mean 'minilm'"):
            check("minilmm")
    assert main(["serve", "--model", "minilmm", "--port", "0"]) == 1
    assert time.monotonic() - start < 20  # five retries of the hub take 46 seconds


def test_an_answer_from_the_command_line(smollm2: object, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "attribute",
        "The capital of France is",
        "-m",
        "smollm2",
        "--method",
        "alti-logit",
        "--max-new-tokens",
        "2",
    ]
    assert main([*asked, "-q"]) == 0
    assert "Paris" in capsys.readouterr().out
    assert main([*asked, "-q", "--by", "sentence", "--format", "csv"]) == 0
    frame = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert frame["explained_token"].tolist()[0] == "Paris"


def test_methods_fit_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = subprocess.run(
        [sys.executable, "-m", "whence", "methods"], check=True, capture_output=True, text=True,
        env={**__import__("os").environ, "COLUMNS": "80"},
    ).stdout  # fmt: skip
    assert max(map(len, out.splitlines())) <= 80
    assert len(COMMANDS) == 14
