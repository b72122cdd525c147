"""`whence mix` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whence.cli import main

TEXT = "The bank raised its rates."


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["mix", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_table_per_layer(minilm_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, TEXT, "--method", "alti", "--layer", "all")
    assert code == 0
    assert out.count("comes from") == 6
    assert "raised" in out
    assert "shares of the input embeddings" in out


def test_json_words_and_a_file(minilm_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mix.safetensors"
    code, out, _ = run(
        capsys, TEXT, "--method", "rollout", "--per-layer", "--words", "--json", "--save", str(path), "-l", "0,5"
    )
    data = json.loads(out)
    assert code == 0
    assert data["layers"] == [0, 5]
    assert len(data["own_share"]) == 2
    assert path.exists()


def test_hidden_token_attribution(minilm_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "Rates rose.", "--method", "hidden-token-attribution", "--mode", "probes")
    assert code == 0
    assert "probes, folded forward mode" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((TEXT, "--method", "magic"), "No method is called"),
        ((TEXT, "--layer", "top"), "is not a layer"),
        ((TEXT, "--layer", "9"), "is not in this result"),
        ((TEXT, "--top", "0"), "shows nothing"),
        ((TEXT, "--method", "hidden-token-attribution", "--per-layer"), "leave --per-layer out"),
    ],
)
def test_mistakes(
    minilm_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert words in " ".join(err.split())
