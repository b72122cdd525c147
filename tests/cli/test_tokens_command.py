from __future__ import annotations

import json
from pathlib import Path

import pytest

from whence.cli import main
from whence.tokens.result import TokenIdentifiability

TEXTS = [
    f"{who} {what} {where}."
    for who in ("The nurse", "A tall man", "Nobody")
    for what in ("waited", "sold tickets", "slept badly")
    for where in ("by the river", "in town", "at home", "near the old bank")
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join([*TEXTS, "", TEXTS[0]]) + "\n", encoding="utf-8")
    return path


def quick(file: Path, *more: str) -> list[str]:
    return ["tokens", "--texts", str(file), "--layers", "0,6", "--maps", "naive,ridge", *more]


def test_table_file_and_plot(minilm_path: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    saved, drawn = tmp_path / "rates.safetensors", tmp_path / "rates.png"
    assert main(quick(file, "--save", str(saved), "--plot", str(drawn), "--by", "kind")) == 0
    out, err = capsys.readouterr()
    assert "the token itself" in out
    assert "chance" in out
    assert "punctuation" in out
    assert "1 empty, 1 duplicate" in err
    assert TokenIdentifiability.load(saved).layers == (0, 6)
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_json(minilm_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(quick(file, "--json", "--parts", "whole", "--layers", "0-1", "--by", "length")) == 0
    out, _ = capsys.readouterr()
    data = json.loads(out)
    assert data["layers"] == [0, 1]
    assert data["rates"][0]["value"] == 1.0
    assert data["breakdown"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--layers", "a"], "write numbers"),
        (["--by", "colour"], "is no breakdown"),
        (["--plot", "rates.doc"], "must end in .png"),
        (["--texts", "nothing.csv"], "there is no file"),
        (["--text", "sentence"], "no text column 'sentence'; it has the columns 'text'"),
    ],
)
def test_wrong_use(file: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(quick(file, *more)) == 2
    assert said in capsys.readouterr().err
